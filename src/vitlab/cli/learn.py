"""vitlab learn."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitlab.cli import complete
from vitlab.cli.console import console, print_json, table
from vitlab.cli.language import Language, language
from vitlab.cli.options import Json, choice

if TYPE_CHECKING:
    from vitlab.learn.exercises import Exercise
    from vitlab.learn.progress import State


def learn(
    exercise: Annotated[
        str | None,
        typer.Argument(
            metavar="EXERCISE",
            help="patch-embed, attention, mlp, block or vit. Default: the list.",
            autocompletion=complete.exercises,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Your file, to be checked. Default: write a starter file."),
    ] = None,
    lang: Annotated[str | None, choice("en", "zh", name="--lang", help="Language. Default: the locale's.")] = None,
    solution: Annotated[bool, typer.Option("--solution", help="Show our solution.")] = False,
    show: Annotated[bool, typer.Option("--print", help="Print the starter file instead of writing it.")] = False,
    seconds: Annotated[float, typer.Option(help="Time limit for your code.", min=0.01)] = 20.0,
    json: Json = False,
) -> None:
    """Write a ViT yourself, in five exercises that are checked.

    Exit code 1: not yet right.
    """
    from vitlab.learn.exercises import find

    lang = language(lang)
    if exercise is None:
        _list(lang, json)
        return
    chosen = find(exercise)
    if solution:
        print(chosen.solution(), end="")
    elif file is not None:
        _check(chosen, file, lang, seconds, json)
    elif show:
        print(chosen.starter(lang), end="")
    else:
        _start(chosen, lang)


def _list(lang: Language, json: bool) -> None:
    from vitlab.learn.exercises import EXERCISES
    from vitlab.learn.messages import message
    from vitlab.learn.progress import states

    progress = states(Path.cwd())
    if json:
        print_json([{"exercise": name, "file": file, "state": state} for name, (file, state) in progress.items()])
        return
    console().print(message("list", lang))
    grid = table("", "", "", "")
    grid.show_header = False
    for number, (name, (_, state)) in enumerate(progress.items(), 1):
        style = {"done": "green", "changed": "yellow"}.get(state)
        grid.add_row(str(number), name, EXERCISES[name].titles[lang], message(state, lang), style=style)
    console().print(grid)
    console().print(_next_step(progress, lang))


def _next_step(progress: dict[str, tuple[str, State]], lang: Language) -> str:
    from vitlab.learn.messages import message

    first = next((name for name, (_, state) in progress.items() if state != "done"), None)
    if first is None:
        return message("all done", lang)
    file, state = progress[first]
    return message("next", lang, command=_command(first, None if state == "open" else file))


def _start(exercise: Exercise, lang: Language) -> None:
    from vitlab.learn.messages import message

    file = Path(exercise.file)
    key = "already there" if file.exists() else "written"
    if key == "written":
        file.write_text(exercise.starter(lang), encoding="utf-8")
    console().print(message(key, lang, file=file, command=_command(exercise.name, exercise.file)))


def _check(exercise: Exercise, file: Path, lang: Language, seconds: float, json: bool) -> None:
    from vitlab.learn.check import check
    from vitlab.learn.progress import remember, states

    checked = check(exercise, file, seconds)
    if checked.printed.strip():
        print(checked.printed.rstrip(), file=sys.stderr)
    grade = checked.grade
    if grade.passed:
        remember(exercise, file)
    if json:
        print_json(grade.to_dict(lang))
    else:
        first, *more = grade.lines(lang)
        console().print(first, style="green" if grade.passed else "bold")
        for line in more:
            console().print(f"  {line}", soft_wrap=True)
    if not grade.passed:
        raise SystemExit(1)
    if not json:
        console().print(_next_step(states(file.parent), lang))


def _command(name: str, file: str | None) -> str:
    return shlex.join(["vitlab", "learn", name, *([file] if file else [])])
