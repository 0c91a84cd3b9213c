"""vitlab COMMAND ...: all commands by name. Each module holds the options, the call and the printing of its own."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer.main import get_command

from vitlab.cli import (
    cache,
    check,
    complete,
    convert,
    data,
    diff,
    evaluate,
    export,
    inspect,
    learn,
    predict,
    reproduce,
    runs,
    search,
    serve,
    train,
    try_photo,
)
from vitlab.cli.console import reporting_errors, set_up_output, warnings_as_notes
from vitlab.cli.explain import app as explain
from vitlab.cli.help import prepare
from vitlab.cli.options import Commands, old_spellings
from vitlab.cli.page import app as page
from vitlab.cli.study import app as study
from vitlab.version import __version__

COMMANDS = {  # in the order of the help page
    "try": try_photo.try_photo,
    "inspect": inspect.inspect,
    "models": inspect.models,
    "predict": predict.predict,
    "zeroshot": predict.zeroshot,
    "convert": convert.convert,
    "push": convert.push,
    "export": export.export,
    "bench": export.bench,
    "diff": diff.diff,
    "learn": learn.learn,
    "reproduce": reproduce.reproduce,
    "train": train.train,
    "verify-resume": train.verify_resume,
    "data": data.data,
    "check": check.check,
    "eval": evaluate.evaluate,
    "runs": runs.runs,
    "doctor": runs.doctor,
    "index": search.index,
    "search": search.search,
    "embed": search.embed,
    "cache": cache.cache,
    "serve": serve.serve,
}

app = Commands(
    "Build, train, look inside and ship Vision Transformers.",
    name="vitlab",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name, function in COMMANDS.items():
    app.add(function, name)
app.add_typer(explain, name="explain")
app.add_typer(study, name="study")
app.add_typer(page, name="page")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"vitlab {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Build, train, look inside and ship Vision Transformers."""


def run() -> None:
    """The console script: errors a user can cause end in one line, bugs in a traceback."""
    set_up_output()
    sys.argv[1:] = old_spellings(sys.argv[1:])
    with reporting_errors(), warnings_as_notes(), complete.answering_bash():
        code = prepare(get_command(app))(prog_name="vitlab", standalone_mode=False)
        if code == 130:  # Typer's code for Ctrl-C
            raise KeyboardInterrupt
        raise SystemExit(code)
