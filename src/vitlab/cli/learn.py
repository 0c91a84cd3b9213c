"""vitlab learn."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitlab.cli import complete
from vitlab.cli.console import console, print_json, table
from vitlab.cli.options import Json, argument, choice
from vitlab.language import Language, language

if TYPE_CHECKING:
    from vitlab.learn.exercises import Exercise


def learn(
    exercise: Annotated[
        str | None,
        argument("EXERCISE", "patch-embed, attention, ... Default: the list of all.", complete.exercises),
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
    """Write ViT, MAE and CLIP yourself, in eight checked exercises.

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
    from vitlab.learn.exercises import EXERCISES, page_links
    from vitlab.learn.messages import message
    from vitlab.learn.progress import states

    exercises = states(Path.cwd())
    if json:
        state_of = {name: {"file": file, "state": state} for name, (file, state) in exercises.items()}
        print_json([{**link, **state_of[link["exercise"]]} for link in page_links()])
        return
    console().print(message("list", lang))
    grid = table("", "", "", "")
    grid.show_header = False
    for number, (name, (_, state)) in enumerate(exercises.items(), 1):
        style = {"done": "green", "changed": "yellow"}.get(state)
        grid.add_row(str(number), name, EXERCISES[name].titles[lang], message(state, lang), style=style)
    console().print(grid)
    _show_next(Path.cwd(), lang)


def _show_next(folder: Path, lang: Language) -> None:
    from vitlab.learn.messages import message
    from vitlab.learn.progress import next_exercise

    following = next_exercise(folder)
    console().print(message("next", lang, command=_command(*following)) if following else message("all done", lang))


def _start(exercise: Exercise, lang: Language) -> None:
    from vitlab.learn.messages import message

    key = "written" if exercise.write_starter(lang) else "already there"
    console().print(message(key, lang, file=exercise.file, command=_command(exercise.name, exercise.file)))
    console().print(message("on the page", lang, fragment=exercise.fragment), soft_wrap=True)


def _check(exercise: Exercise, file: Path, lang: Language, seconds: float, json: bool) -> None:
    from vitlab.learn.check import check
    from vitlab.learn.progress import remember

    checked = check(exercise, file, seconds)
    if checked.printed.strip():
        print(checked.printed.rstrip(), file=sys.stderr)
    grade = checked.grade
    if json:
        print_json(grade.to_dict(lang))
    else:
        first, *more = grade.lines(lang)
        console().print(first, style="green" if grade.passed else "bold")
        for line in more:
            console().print(f"  {line}", soft_wrap=True)
    if not grade.passed:
        raise SystemExit(1)
    remember(exercise, file)
    if not json:
        _show_next(file.parent, lang)


def _command(name: str, file: str | None) -> str:
    return shlex.join(["vitlab", "learn", name, *([file] if file else [])])
