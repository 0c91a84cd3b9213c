"""Check a learner's file against our layers: it runs in its own process, its numbers are graded in this one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.learn.child import Failure, Task
from vitlab.learn.exercises import Exercise, probe
from vitlab.learn.grade import Grade, grade

SECONDS = 20.0  # for the learner's code, without importing torch
START_UP = 120.0  # limit for importing torch
MOST_PRINTED = 4000  # characters


@dataclass(frozen=True)
class ExerciseResult:
    grade: Grade
    printed: str  # by the learner's code


def check(exercise: Exercise, file: Path, seconds: float = SECONDS) -> ExerciseResult:
    if not file.is_file():
        raise UsageError(f"{file}: no such file. vitlab learn {exercise.name} writes a starter file.")
    if seconds <= 0:
        raise UsageError(f"--seconds {seconds:g} must be more than 0.")
    with tempfile.TemporaryDirectory(prefix="vitlab-learn-") as name:
        folder = Path(name)
        task, cases = prepare(exercise)
        for number, case in enumerate(cases):
            save_file(case, folder / f"case{number}.safetensors")
        (folder / "task.json").write_text(json.dumps({**task, "seconds": seconds}), encoding="utf-8")
        code = _run(file.resolve(), folder, seconds)
        failure, outputs = _read(folder, code, file, seconds)
        printed = (folder / "printed.txt").read_text(encoding="utf-8", errors="replace")
    return ExerciseResult(grade(exercise, failure, outputs), printed[:MOST_PRINTED])


def prepare(exercise: Exercise) -> tuple[Task, list[dict[str, Tensor]]]:
    """Input of the child process: how to build the learner's class, our weights, and the inputs of forward."""
    cases = exercise.all_cases()
    arguments = [list(case.arguments) for case in cases]
    task = Task(class_name=exercise.class_name, signature=exercise.signature, arguments=arguments)
    tensors = []
    for case in cases:
        weights = {f"weight.{key}": value.contiguous() for key, value in case.learner_weights.items()}
        inputs = {f"input.{n}": x for n, x in enumerate(case.inputs)}
        tensors.append({**inputs, "probe": probe(case.variant()), **weights})
    return task, tensors


def _run(file: Path, folder: Path, seconds: float) -> int | None:
    """Exit code of the child; None if its watchdog did not end it."""
    # not -m: vitlab.learn imports its child itself, and Python warns of a module that is then run once more
    command = [sys.executable, "-c", "from vitlab.learn.child import main; main()", str(file), str(folder)]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1"}
    with (folder / "printed.txt").open("wb") as out:
        process = subprocess.Popen(
            command, cwd=file.parent, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(timeout=seconds + START_UP)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()
            process.wait()


def _read(folder: Path, code: int | None, file: Path, seconds: float) -> tuple[Failure | None, list[dict[str, Tensor]]]:
    answer = folder / "answer.json"
    if answer.is_file():
        failure = json.loads(answer.read_text(encoding="utf-8"))
        outputs = [load_file(f) for f in sorted(folder.glob("output*.safetensors"))]
        return failure and Failure(**failure), outputs
    stuck = (
        (folder / "stuck.txt").read_text(errors="replace", encoding="utf-8") if (folder / "stuck.txt").is_file() else ""
    )
    if code is None or stuck:
        return Failure("endless", {"seconds": seconds, "file": file.name, **_line(stuck, file)}), []
    how = f"exit code {code}"
    if code < 0:
        how = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return Failure("crashed", {"how": how}), []


def _line(stuck: str, file: Path) -> dict[str, object]:
    """The innermost line of the learner's file when the watchdog fired."""
    match = re.search(rf'File "{re.escape(str(file.resolve()))}", line (\d+)', stuck)
    if match is None:
        return {}
    number = int(match[1])
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return {"line": number, "code": lines[number - 1].strip() if number <= len(lines) else ""}
