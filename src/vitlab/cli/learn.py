"""vitlab learn."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from vitlab.cli.console import out, print_json
from vitlab.cli.language import Language, language
from vitlab.learn.check import check
from vitlab.learn.exercises import EXERCISES, Exercise, find
from vitlab.learn.messages import message
from vitlab.learn.progress import next_exercise, remember, states


def run(
    name: str | None,
    file: Path | None,
    lang: str | None,
    solution: bool,
    print_it: bool,
    seconds: float,
    json: bool,
) -> None:
    spoken = language(lang)
    if name is None:
        _list(spoken, json)
        return
    exercise = find(name)
    if solution:
        print(exercise.solution(), end="")
    elif file is not None:
        _check(exercise, file, spoken, seconds, json)
    elif print_it:
        print(exercise.starter(spoken), end="")
    else:
        _start(exercise, spoken)


def _list(spoken: Language, json: bool) -> None:
    from rich.table import Table

    exercises = states(Path.cwd())
    if json:
        print_json([{"exercise": name, "file": file, "state": state} for name, (file, state) in exercises.items()])
        return
    console = out(markup=False)
    console.print(message("list", spoken))
    table = Table(box=None, pad_edge=False, show_header=False)
    for number, (name, (_, state)) in enumerate(exercises.items(), 1):
        style = {"done": "green", "changed": "yellow"}.get(state)
        table.add_row(str(number), name, EXERCISES[name].titles[spoken], message(state, spoken), style=style)
    console.print(table)
    console.print(_next(Path.cwd(), spoken))


def _next(folder: Path, spoken: Language) -> str:
    exercise = next_exercise(folder)
    return message("next", spoken, command=_command(*exercise)) if exercise else message("all done", spoken)


def _start(exercise: Exercise, spoken: Language) -> None:
    key = "written" if exercise.write_starter(spoken) else "already there"
    command = _command(exercise.name, exercise.file)
    out(markup=False).print(message(key, spoken, file=exercise.file, command=command))


def _check(exercise: Exercise, file: Path, spoken: Language, seconds: float, json: bool) -> None:
    result = check(exercise, file, seconds)
    if result.printed.strip():
        print(result.printed.rstrip(), file=sys.stderr)
    grade = result.grade
    if json:
        print_json(grade.to_dict(spoken))
    else:
        first, *more = grade.lines(spoken)
        console = out(markup=False)
        console.print(first, style="green" if grade.passed else "bold")
        for line in more:
            console.print(f"  {line}", soft_wrap=True)
    if not grade.passed:
        raise SystemExit(1)
    remember(exercise, file)
    if not json:
        out(markup=False).print(_next(file.parent, spoken))


def _command(name: str, file: str | None) -> str:
    return shlex.join(["vitlab", "learn", name, *([file] if file else [])])
