"""vitlab VERB ...: the command. Verbs and options are in *_app.py, what they do in the module of the verb's name."""

from __future__ import annotations

from typing import Annotated

import typer

from vitlab.cli import complete
from vitlab.cli.explain.app import app as explain
from vitlab.cli.network_app import app as network
from vitlab.cli.pictures_app import app as pictures
from vitlab.cli.study_app import app as study
from vitlab.cli.training_app import app as training
from vitlab.version import __version__

app = typer.Typer(
    name="vitlab",
    help="Build, train, look inside and ship Vision Transformers.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would double the time it takes to appear
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


for verbs in (network, training, pictures):
    app.add_typer(verbs)  # without a name of their own
app.add_typer(explain, name="explain")
app.add_typer(study, name="study")


def run() -> None:
    """The console script: errors a user can cause end in one clear line, not in a traceback."""
    from typer.main import get_command

    from vitlab.cli.console import reporting_errors, set_up_output
    from vitlab.cli.help import prepare

    set_up_output()
    with reporting_errors(), complete.answering_bash():
        code = prepare(get_command(app))(prog_name="vitlab", standalone_mode=False)
        if code == 130:  # what Typer makes of Ctrl-C
            raise KeyboardInterrupt
        raise SystemExit(code)
