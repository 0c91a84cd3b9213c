"""Run a claim: step by step, each stored when it is done, so that an interrupted claim resumes.

reproduce/positions/{result.json, report.md, plot.png, study.json}
reproduce/positions/steps/learned,seed=0.json    values and seconds of a step
reproduce/positions/runs/learned,seed=0/         its training, as `vitlab train` makes it
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.native import write_text
from vitlab.errors import UsageError
from vitlab.language import Language
from vitlab.study.reproduce.bench import Workbench
from vitlab.study.reproduce.claim import Claim, ClaimStep
from vitlab.study.reproduce.claims import CLAIMS
from vitlab.study.reproduce.result import Result, read_result, report
from vitlab.study.runner import format_duration
from vitlab.study.study import PLOT, read_study_json, write_json, write_study_json
from vitlab.training.loop import Show, Silent
from vitlab.training.runs import read_run
from vitlab.version import __version__

FOLDER = Path("reproduce")
RESULT, REPORT = "result.json", "report.md"
SEEDS = 3


def reproduce(
    claim: Claim,
    folder: Path | None = None,
    *,
    seeds: int = SEEDS,
    settings: Sequence[str] = (),
    language: Language = "en",
    show: Show | None = None,
) -> Result:
    """Run what is missing of a claim. `folder` holds all claims; `settings` are those of `vitlab train`."""
    show, place = show or Silent(), (folder or FOLDER) / claim.name
    if seeds < 1:
        raise UsageError(f"--seeds {seeds} must be at least 1.")
    if settings and not claim.seeded:
        show.note(f"{claim.name} trains nothing: settings change nothing.")
        settings = ()
    steps = claim.steps(Workbench(tuple(settings)), seeds)
    _check_folder(place, settings)
    command = _command(claim, folder, seeds, settings)
    write_study_json(place, "reproduce", {"claim": claim.name, "settings": list(settings)}, command)
    result = Result(claim, settings=tuple(settings), command=command, version=__version__)
    for step, stored in _run_steps(steps, place, show):
        for arm, value in stored["values"].items():
            result.values.setdefault(arm, {})[step.unit] = value
        result.seconds += stored["seconds"]
        write_json(place / RESULT, result.to_dict(), indent=2)  # after each step, so that it can be read early
    plot = _draw(result, place, show)
    write_text(place / REPORT, report(result, language, plot))
    return result


def stored_results(folder: Path | None = None) -> list[Result]:
    """Every claim, with its values if it was run in this folder."""
    results = []
    for name, claim in CLAIMS.items():
        path = (folder or FOLDER) / name / RESULT
        stored = read_result(read_json(path)) if path.is_file() else Result(claim)
        results.append(replace(stored, claim=claim))
    return results


def _run_steps(steps: list[ClaimStep], place: Path, show: Show) -> Iterator[tuple[ClaimStep, dict[str, Any]]]:
    """(step, its stored values and seconds); those of an earlier command first."""
    paths = {step.name: place / "steps" / f"{step.name}.json" for step in steps}
    (place / "steps").mkdir(exist_ok=True)
    done = {step.name: read_json(path) for step in steps if (path := paths[step.name]).is_file()}
    if done:
        show.note(f"{len(done)} of {len(steps)} steps are finished already.")
    seconds = [stored["seconds"] for stored in done.values()]
    waiting = len(steps) - len(done)
    for number, step in enumerate(steps, 1):
        if step.name not in done:
            left = f" ({format_duration(fmean(seconds) * waiting)} left)" if seconds else ""
            show.note(f"step {number} of {len(steps)}: {step.name}{left}")
            done[step.name] = _run_step(step, place / "runs" / step.name, show)
            write_json(paths[step.name], done[step.name])
            seconds.append(done[step.name]["seconds"])
            waiting -= 1
        yield step, done[step.name]


def _run_step(step: ClaimStep, runs: Path, show: Show) -> dict[str, Any]:
    """Its values, and its seconds: those of trainings that were interrupted count from their beginning."""
    start = time.perf_counter()
    values = step.measure(runs, show)
    trained = sum(read_run(path.parent).result.get("seconds", 0.0) for path in runs.rglob("result.json"))
    return {"values": values, "seconds": max(time.perf_counter() - start, trained)}


def _command(claim: Claim, folder: Path | None, seeds: int, settings: Sequence[str]) -> str:
    more = [] if seeds == SEEDS else ["--seeds", str(seeds)]
    more += [] if folder in (None, FOLDER) else ["-o", str(folder)]
    return shlex.join(["vitlab", "reproduce", claim.name, *settings, *more])


def _check_folder(place: Path, settings: Sequence[str]) -> None:
    """Refuse a folder whose runs had other settings."""
    old = read_study_json(place, "reproduce")
    if old and old.get("settings") != list(settings):
        before = " ".join(old.get("settings", [])) or "none"
        raise UsageError(
            f"{place} was made with other settings ({before}; now {' '.join(settings) or 'none'}). "
            "Use another folder: -o FOLDER."
        )


def _draw(result: Result, place: Path, show: Show) -> str | None:
    try:
        from vitlab.study.reproduce.draw import draw
    except ImportError:
        show.note(f"{PLOT} is not drawn: that needs matplotlib, which is not installed: pip install 'vitlab[plot]'.")
        return None
    draw(result, place / PLOT)
    return PLOT
