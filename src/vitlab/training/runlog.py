"""The log of a run: a line of JSON for every event in log.jsonl; wandb and TensorBoard too, where the recipe says so.

    {"kind": "train", "step": 120, "time": 1767225600.0, "loss": 0.41, "lr": 0.0009, "images_per_second": 812.0}
    {"kind": "val", "step": 120, "time": 1767225601.5, "epoch": 2, "loss": 0.38, "top1": 0.9117}
    {"kind": "note", "step": 120, "time": 1767225601.6, "text": "saved"}

Accuracies are shares of one. Only the process of rank 0 writes a log. torch, wandb and TensorBoard are imported
only where they are used.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

from vitlab.errors import TrainingError
from vitlab.optional import require
from vitlab.parsing import parse_json, spell_not_finite
from vitlab.special_files import special_kind

LOG = "log.jsonl"
Wandb = Literal["off", "offline", "online"]
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # JSON has no numbers for these


class RunLog:
    """The log of one run, open for writing. A line is on its way to the disk before `write` returns."""

    def __init__(
        self,
        folder: Path,
        *,
        wandb: Wandb = "off",
        tensorboard: bool = False,
        config: Mapping[str, object] | None = None,
        name: str | None = None,
        start_step: int = 0,
    ) -> None:
        """`start_step`: the step that the run resumes from; later lines are removed. 0: a new log."""
        if wandb not in get_args(Wandb):
            raise TrainingError(f"track.wandb={wandb!r} is not known: use {', '.join(get_args(Wandb))}.")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / LOG
        self._known = _go_back(self.path, start_step)
        self._file = self.path.open("ab", buffering=0)  # what is written is with the system at once
        self._wandb = None if wandb == "off" else _open_wandb(self.folder, wandb, config or {}, name, start_step)
        self._tensorboard = _open_tensorboard(self.folder, start_step) if tensorboard else None

    def write(self, kind: str, step: int, **numbers: Any) -> None:
        """One line. Tensors and arrays become plain numbers; NaN and infinity texts that `read_log` turns back."""
        assert "time" not in numbers, "the log keeps the time itself"
        numbers = {key: _plain_value(value) for key, value in numbers.items()}
        if kind != "note" and (kind, step) in self._known:  # the step a resumed run starts from was logged before
            return
        line = {"kind": kind, "step": step, "time": round(time.time(), 3), **spell_not_finite(numbers)}
        text = json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
        # A file name that is not UTF-8 holds lone surrogates; backslashreplace spells them as JSON does.
        data = text.encode("utf-8", "backslashreplace")
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise OSError(
                error.errno,
                f"the log cannot be written ({error.strerror}). Make room, then: vitlab train --resume {self.folder}",
                str(self.path),
            ) from None
        curves = {f"{kind}/{key}": value for key, value in numbers.items() if isinstance(value, int | float)}
        if self._wandb is not None and curves:
            self._wandb.log(curves, step=step)
        if self._tensorboard is not None:
            for key, value in curves.items():
                self._tensorboard.add_scalar(key, value, step)

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._tensorboard = self._wandb = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """Every line of a run's log; a last line that was cut when the run was killed is left out. No log: no lines."""
    path = Path(folder) / LOG
    if not path.is_file():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    read = []
    for number, line in enumerate(lines, 1):
        try:
            read.append(_parse(line))
        except ValueError as error:
            if number == len(lines) and not line.endswith(b"\n"):  # cut off
                break
            raise TrainingError(
                f"{path}: line {number} is not a line of a log: {line[:60]!r} ({error}). "
                f"Delete that line, or resume the run, which repairs its log: vitlab train --resume {folder}"
            ) from None
    return read


def _parse(line: bytes) -> dict[str, Any]:
    event = from_json(line)
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str) or not isinstance(event.get("step"), int):
        raise TrainingError("no event with a kind and a step")
    return event


def _parse_or_none(line: bytes) -> dict[str, Any] | None:
    try:
        return _parse(line)
    except ValueError:
        return None


def _plain_value(value: Any) -> Any:
    """Tensors, arrays and numpy's numbers -> Python's own; the rest stays."""
    if isinstance(value, dict):
        return {str(key): _plain_value(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(v) for v in value]
    return value.tolist() if hasattr(value, "tolist") else str(value) if isinstance(value, Path) else value


def _read_back(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _read_back(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_read_back(v) for v in value]
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


def to_json(value: object) -> str:
    """Any result as strict JSON, readable, NaN and infinity as texts."""
    return json.dumps(spell_not_finite(_plain_value(value)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(text: str | bytes) -> Any:
    """What `to_json` wrote. NaN as a number, infinity and deep nesting are a ValueError."""
    return _read_back(parse_json(text))


def _go_back(path: Path, step: int) -> set[tuple[str, int]]:
    """Drop what a killed run logged after its checkpoint, because those steps will come again; and a cut last line.

    Returns the (kind, step) at `step` itself: a run may be killed between its save and the next line, and say it again.
    """
    if kind := special_kind(path):
        raise TrainingError(f"{path}: is {kind}, where the run would write its log. Remove it.")
    if not path.exists():
        return set()
    lines = path.read_bytes().splitlines(keepends=True)
    events = [_parse_or_none(line) for line in lines]
    # A run that restarts from 0 says everything again, what it said at step 0 too.
    stays = [event is not None and event["step"] <= step and step > 0 for event in events]
    if not all(stays) or (lines and not lines[-1].endswith(b"\n")):
        from vitlab.checkpoints.native import write_whole

        kept = b"".join(line.rstrip(b"\r\n") + b"\n" for line, stay in zip(lines, stays, strict=True) if stay)
        write_whole(path, lambda temporary: temporary.write_bytes(kept))
    return {(e["kind"], step) for e, stay in zip(events, stays, strict=True) if stay and e and e["step"] == step}


def _open_wandb(folder: Path, mode: Wandb, config: Mapping[str, object], name: str | None, start_step: int) -> Any:
    if mode == "offline":
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # its telemetry looks for its host even when offline
    require(f"track.wandb={mode!r}", "wandb", otherwise="Or set track.wandb=off.")
    import wandb

    remembered = folder / "wandb" / "run_id"  # a resumed run continues the same curves
    goes_on = start_step > 0 and remembered.is_file()
    run_id = remembered.read_text(encoding="utf-8").strip() if goes_on else uuid.uuid4().hex[:8]
    remembered.parent.mkdir(exist_ok=True)
    remembered.write_text(run_id, encoding="utf-8")
    try:
        return wandb.init(
            mode="offline" if mode == "offline" else "online",
            dir=str(folder),
            project="vitlab",
            name=name,
            id=run_id,
            config=_plain_value(config),
            resume="allow" if goes_on and mode == "online" else None,
            settings=wandb.Settings(silent=True, console="off"),  # the console is the run's own
        )
    except wandb.Error as error:
        raise TrainingError(
            f"track.wandb={mode!r}: wandb does not start: {error} Run `wandb login`, or set track.wandb=offline or off."
        ) from None


def _open_tensorboard(folder: Path, start_step: int) -> Any:
    require("track.tensorboard=true", "tensorboard", otherwise="Or set track.tensorboard=false.")
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides what a killed run wrote at this step and later
    purge_step = start_step + 1 if start_step > 0 else 0
    return SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step, flush_secs=10)
