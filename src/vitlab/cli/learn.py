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
from vitlab.learn.progress import State, remember, states


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

    found = states(Path.cwd())
    if json:
        print_json([{"exercise": name, "file": file, "state": state} for name, (file, state) in found.items()])
        return
    console = out(markup=False)
    console.print(message("list", spoken))
    table = Table(box=None, pad_edge=False, show_header=False)
    for number, (name, (_, state)) in enumerate(found.items(), 1):
        style = {"done": "green", "changed": "yellow"}.get(state)
        title = EXERCISES[name].titles[spoken]
        table.add_row(str(number), name, title, message(state, spoken), style=style)
    console.print(table)
    console.print(_following(found, spoken))


def _following(found: dict[str, tuple[str, State]], spoken: Language) -> str:
    first = next((name for name, (_, state) in found.items() if state != "done"), None)
    if first is None:
        return message("all done", spoken)
    file, state = found[first]
    return message("next", spoken, command=_command(first, None if state == "open" else file))


def _start(exercise: Exercise, spoken: Language) -> None:
    file = Path(exercise.file)
    key = "already there" if file.exists() else "written"
    if key == "written":
        file.write_text(exercise.starter(spoken), encoding="utf-8")
    out(markup=False).print(message(key, spoken, file=file, command=_command(exercise.name, exercise.file)))


def _check(exercise: Exercise, file: Path, spoken: Language, seconds: float, json: bool) -> None:
    checked = check(exercise, file, seconds)
    if checked.printed.strip():
        print(checked.printed.rstrip(), file=sys.stderr)
    verdict = checked.grade
    if verdict.passed:
        remember(exercise, file)
    if json:
        print_json(verdict.to_dict(spoken))
    else:
        first, *more = verdict.lines(spoken)
        console = out(markup=False)
        console.print(first, style="green" if verdict.passed else "bold")
        for line in more:
            console.print(f"  {line}", soft_wrap=True)
    if not verdict.passed:
        raise SystemExit(1)
    if not json:
        out(markup=False).print(_following(states(file.parent), spoken))


def _command(name: str, file: str | None) -> str:
    return shlex.join(["vitlab", "learn", name, *([file] if file else [])])
