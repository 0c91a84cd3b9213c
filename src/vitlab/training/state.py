"""A run folder's checkpoints: all that a run needs to resume, written so that one intact save always exists.

last/     weights.safetensors, model.json, optimizer.safetensors, ema.safetensors, state.json
last-1/   the save before it (run.keep = 1), from which a run resumes where `last` is damaged
best/     weights.safetensors, model.json
adapter/  with model.lora: the adapters of the best model alone; best/ has them merged, last/ beside the weights

state.json holds the digest of every file beside it, and of the run's recipe.toml and result.json.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitlab.checkpoints import digests, native
from vitlab.checkpoints.adapters import save_adapter
from vitlab.checkpoints.files import read_json
from vitlab.errors import CheckpointError, TrainingError
from vitlab.models.base import Network
from vitlab.training import run_lock
from vitlab.training.runlog import from_json, to_json

LAST, BEST, ADAPTER, STATE = "last", "best", "adapter", "state.json"
OPTIMIZER, EMA = "optimizer.safetensors", "ema.safetensors"
RUN_DIGESTS = "run_digests"  # in state.json: of files outside of the save
RECIPE, RESULT, BEST_WEIGHTS = "recipe.toml", "result.json", f"{BEST}/{native.WEIGHTS}"


@dataclass
class Progress:
    """How far a run is: all numbers that are not tensors."""

    step: int = 0  # steps done
    best_rank: float | None = None  # the objective's own measure; the accuracy where it learns labels
    best_top1: float = -1.0
    best_epoch: int = -1
    seconds: float = 0.0  # of training, over all its parts
    images: int = 0
    skipped: dict[str, str] = field(default_factory=dict)  # images that could not be read: name -> what is wrong
    scaler: float = 0.0  # fp16's loss scale
    scaler_steps: int = 0  # since it last changed
    finished: bool = False


Tensors = dict[str, Tensor]
MAX_KEPT = 9  # run.keep


def check_place(run: Path) -> None:
    """Refuse a run folder that cannot be written, before anything is downloaded or trained."""
    if "\0" in str(run):
        raise TrainingError(f"run.dir={run}: a null byte cannot be part of a path. Name another folder: run.dir=...")
    place = next(place for place in (run, *run.absolute().parents) if place.exists())
    if not place.is_dir():
        raise TrainingError(f"run.dir={run}: {place} is a file, where a folder is needed. Name another: run.dir=...")
    if not os.access(place, os.W_OK | os.X_OK):
        raise TrainingError(f"run.dir={run}: {place} cannot be written. Name another folder: run.dir=...")


# ------------------------------------------------------------------------------------------------------------- saving


def save_last(
    run: Path,
    model: Network,
    optimizer: Tensors,
    ema: Tensors | None,
    progress: Progress,
    *,
    keep: int = 0,
    recipe_digest: str | None = None,
) -> None:
    """Everything that --resume needs. `keep` saves before it stay, as last-1, last-2, ...

    `recipe_digest`: of recipe.toml when the run began, whatever has become of the file since.
    """

    def fill(folder: Path) -> None:
        native.save(model, folder, merge=False)
        save_file(optimizer, folder / OPTIMIZER)
        if ema is not None:
            save_file(ema, folder / EMA)
        others = [path.name for path in folder.iterdir() if path.name != native.WEIGHTS]
        of_files = {**native.read_card(folder)[digests.DIGESTS], **digests.file_digests(folder, others)}
        of_run = digests.file_digests(run, [RESULT] if (run / RESULT).is_file() else [])
        of_run |= {} if recipe_digest is None else {RECIPE: recipe_digest}
        of_run |= {} if (best := best_digest(run)) is None else {BEST_WEIGHTS: best}
        state = digests.seal({**from_json(to_json(asdict(progress))), digests.DIGESTS: of_files, RUN_DIGESTS: of_run})
        # A file name that is not UTF-8 holds lone surrogates; backslashreplace spells them as JSON does.
        (folder / STATE).write_bytes(to_json(state).encode("utf-8", "backslashreplace"))

    with explain_failed_save(run):
        replace_folder(run / LAST, fill, keep)


def save_best(run: Path, model: Network) -> None:
    with explain_failed_save(run):
        replace_folder(run / BEST, lambda folder: native.save(model, folder))


def save_best_adapter(run: Path, model: Network, base: str) -> None:
    """The adapters of the best model alone, beside it."""
    with explain_failed_save(run):
        replace_folder(run / ADAPTER, lambda folder: save_adapter(model, folder, base))


@contextmanager
def explain_failed_save(run: Path) -> Iterator[None]:
    """A save that fails (the disk is full) says what is still there, and how to continue."""
    run_lock.check_held(run)
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        intact = next(iter(generations(run)), None)
        safe = f"{intact} is untouched" if intact is not None else "nothing had been saved before"
        raise CheckpointError(
            f"{run}: cannot be saved ({reason}); {safe}. Make room, then go on: vitlab train --resume {run} "
            "(with run.keep=0 --changed behind it, a third less is needed)"
        ) from None


def replace_folder(folder: Path, fill: Callable[[Path], object], keep: int | None = None) -> None:
    """Fill a new folder, flush it, and put it in the old one's place; if it is interrupted, one of the two is intact.

    With `keep` the old one becomes folder-1, that one folder-2, ..., and those beyond `keep` are removed.
    """
    new, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    recover(folder)
    for left_behind in (new, old):
        shutil.rmtree(left_behind, ignore_errors=True)
    if keep is not None and folder.exists():
        for number, path in _earlier(folder):
            if number > keep:
                shutil.rmtree(path, ignore_errors=True)  # before the new one needs its space
    new.mkdir(parents=True)
    try:
        fill(new)
        for path in new.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        _sync_folder(new)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    _sync_folder(folder.parent)
    if keep and old.exists():
        with suppress(OSError):  # somebody reads an earlier save: the new one is in place all the same
            _shift(folder, old, keep)
    shutil.rmtree(old, ignore_errors=True)


def _shift(folder: Path, old: Path, keep: int) -> None:
    """Make room for `old` as folder-1."""
    for number, path in reversed(_earlier(folder)):
        if number < keep:
            shutil.rmtree(folder.with_name(f"{folder.name}-{number + 1}"), ignore_errors=True)
            path.rename(folder.with_name(f"{folder.name}-{number + 1}"))
    first = folder.with_name(f"{folder.name}-1")
    shutil.rmtree(first, ignore_errors=True)
    old.rename(first)


def _earlier(folder: Path) -> list[tuple[int, Path]]:
    """The numbered saves before this one, newest first. A copy of the user's, such as last-500, is none of them."""
    numbered = [(number, folder.with_name(f"{folder.name}-{number}")) for number in range(1, MAX_KEPT + 1)]
    return [(number, path) for number, path in numbered if (path / STATE).is_file()]


def recover(folder: Path) -> None:
    """After a kill between the two renames, the old folder goes back to its place."""
    old = folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        with suppress(FileNotFoundError):  # another process of the run was faster
            old.rename(folder)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# ------------------------------------------------------------------------------------------------------------ loading


@dataclass
class Saved:
    """One save, read and checked."""

    folder: Path
    card: dict[str, Any]  # model.json
    weights: Tensors
    optimizer: Tensors
    ema: Tensors | None
    progress: Progress
    run_digests: dict[str, str]  # of recipe.toml and result.json when it was written


def generations(run: Path) -> list[Path]:
    """The saves of a run, newest first."""
    last = run / LAST
    newest = [path for path in (last, run / f".{LAST}.old") if path.is_dir()]
    return [*newest, *(path for _, path in _earlier(last))]


def load_last(run: Path, *, with_ema: bool = False, note: Callable[[str], object] = lambda text: None) -> Saved | None:
    """The newest intact save; None where nothing was saved yet.

    A damaged save is set aside as last-damaged, and `note` says so. `with_ema`: a save without a running average is
    damaged.
    """
    recover(run / LAST)
    saves = generations(run)
    problems = [f"{run / LAST}: is missing."] if saves and saves[0] != run / LAST else []
    for folder in saves:
        try:
            saved = read_save(folder, with_ema)
        except digests.DamagedError as error:  # any other error, e.g. a version or a permission, is no damage
            problems.append(str(error))
            continue
        if problems:
            aside = f" It is kept as {LAST}-damaged." if _set_aside(run, before=folder) else ""
            note(f"{problems[0]}{aside} Resuming from {folder.name}, saved at step {saved.progress.step}.")
        return saved
    if problems:
        raise CheckpointError(
            f"{run}: no save of this run is whole. {' '.join(problems)} Put the files back from a copy; or train anew "
            f"in another folder: vitlab train {run / 'recipe.toml'} run.dir={run}-again"
        )
    return None


def _set_aside(run: Path, before: Path) -> bool:
    """Damaged saves must not count as generations: the newest stays as last-damaged. False: there was none."""
    saves, place = generations(run), run / f"{LAST}-damaged"
    damaged = saves[: saves.index(before)]
    for folder in reversed(damaged):
        shutil.rmtree(place, ignore_errors=True)
        folder.rename(place)
    return bool(damaged)


def _read_card(folder: Path) -> dict[str, Any]:
    try:
        read_json(folder / native.CARD)
    except (CheckpointError, FileNotFoundError) as error:
        raise digests.DamagedError(f"{folder / native.CARD}: cannot be read ({error}).") from None
    return native.read_card(folder)


def read_save(folder: Path, with_ema: bool = False) -> Saved:
    """One save, every file compared with its digest; raises CheckpointError where it is not what was written."""
    state = _read_state(folder)
    digests.check_files(folder, state, STATE)
    ema = _read_tensors(folder / EMA) if (folder / EMA).exists() else None
    if with_ema and ema is None:
        raise digests.DamagedError(f"{folder / EMA}: is missing, and the recipe (optim.ema) says that it was saved.")
    run_digests = state.pop(RUN_DIGESTS, {})
    has_digests = bool(state.pop(digests.DIGESTS, None))
    return Saved(
        folder=folder,
        card=_read_card(folder),
        weights=_read_tensors(folder / native.WEIGHTS),
        optimizer=_read_tensors(folder / OPTIMIZER),
        ema=ema,
        progress=_progress(state if has_digests else {**asdict(Progress()), **state}, folder / STATE),
        run_digests=run_digests,
    )


def check_recipe_file(run: Path, saved: Saved) -> None:
    """Refuse a recipe.toml that is not the one the save was made with."""
    expected, path = saved.run_digests.get(RECIPE), run / RECIPE
    if expected is not None and digests.file_digest(path) != expected:
        raise CheckpointError(
            f"{path}: was changed since step {saved.progress.step} was saved. Put it back as it was, or pass --changed "
            "to go on with it as it is."
        )


def check_best(run: Path, saved: Saved) -> None:
    """Refuse a run whose best model so far is lost: its result would be another model's."""
    if saved.progress.best_epoch < 0:
        return
    folder = run / BEST
    try:
        if not (folder / native.CARD).is_file():
            raise digests.DamagedError(f"{folder}: is missing.")
        digests.check_files(folder, native.read_card(folder), native.CARD)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"{error} The best model of this run was that of epoch {saved.progress.best_epoch + 1}, and nothing else "
            f"holds it: put the folder back from a copy, or train anew: vitlab train {run / 'recipe.toml'} "
            f"run.dir={run}-again"
        ) from None


def check_result(run: Path, saved: Saved) -> None:
    """Refuse a result.json that is not the one a finished run wrote."""
    path, expected = run / RESULT, saved.run_digests.get(RESULT)
    if not saved.progress.finished:
        return
    if not path.is_file() or (expected is not None and digests.file_digest(path) != expected):
        raise CheckpointError(f"{path}: is missing, or is not what the run wrote.")


def best_digest(run: Path) -> str | None:
    """The digest of the best model's weights, as its model.json has it; None: there is none."""
    try:
        return native.read_card(run / BEST)[digests.DIGESTS][native.WEIGHTS]
    except (CheckpointError, OSError, KeyError, TypeError):
        return None


def forget_other_best(run: Path, saved: Saved) -> None:
    """Where best/ was written after the save, it is of an epoch that comes again: let that epoch decide anew.

    The same epochs give the same best model; on a machine that does not repeat itself, numbers and model still agree.
    """
    expected = saved.run_digests.get(BEST_WEIGHTS)
    if expected is not None and best_digest(run) != expected:
        saved.progress.best_rank, saved.progress.best_top1, saved.progress.best_epoch = None, -1.0, -1


def _read_tensors(path: Path) -> Tensors:
    if not path.is_file():
        raise digests.DamagedError(f"{path}: is missing.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise digests.DamagedError(f"{path}: is damaged or cut off ({error}).") from None


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE
    if not path.is_file():
        raise digests.DamagedError(f"{path}: is missing.")
    try:
        state = from_json(path.read_bytes())
    except ValueError as error:
        raise digests.DamagedError(f"{path}: is not valid JSON ({error}).") from None
    if not isinstance(state, dict) or not isinstance(state.get(RUN_DIGESTS, {}), dict):
        raise digests.DamagedError(f"{path}: is not a table of a run's progress.")
    digests.check_seal(state, path)
    state.pop(digests.SEAL, None)
    return state


def _number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _duration(value: object) -> bool:
    return _number(value) and math.isfinite(value) and value >= 0


CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "step": (_count, "a whole number from 0"),
    "best_rank": (lambda value: value is None or _number(value), "a number, or null"),
    "best_top1": (lambda value: _number(value) and not value > 1, "a share of one"),
    "best_epoch": (lambda value: value == -1 or _count(value), "a whole number from -1"),
    "seconds": (_duration, "a number from 0"),
    "images": (_count, "a whole number from 0"),
    "skipped": (
        lambda value: isinstance(value, dict) and all(isinstance(text, str) for text in value.values()),
        "a table of names and reasons",
    ),
    "scaler": (_duration, "a number from 0"),
    "scaler_steps": (_count, "a whole number from 0"),
    "finished": (lambda value: isinstance(value, bool), "true or false"),
}


def _progress(values: dict[str, Any], path: Path) -> Progress:
    names = {f.name for f in fields(Progress)}
    if unknown := sorted(values.keys() - names):
        raise CheckpointError(f"{path}: {unknown[0]!r} is not known. It was written by another vitlab.")
    if missing := sorted(names - values.keys()):
        raise CheckpointError(f"{path}: {missing[0]!r} is missing. It was written by another vitlab.")
    for name, (is_valid, expected) in CHECKS.items():
        if not is_valid(values[name]):
            raise digests.DamagedError(f"{path}: {name} is {values[name]!r:.40}, expected {expected}.")
    return Progress(**values)
