"""ladder.json: all that a resumed run of the ladder must not decide again."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vitlab.checkpoints import native
from vitlab.errors import TrainingError
from vitlab.training.runlog import from_json, read_log, to_json
from vitlab.training.starting_points import Start

PLAN, RUNGS = "ladder.json", "rungs"


@dataclass
class LadderState:
    """What has been decided, and the seconds that it took."""

    settings: list[str]
    start: Start | None = None
    classes: list[str] | None = None
    share: float | None = None  # of the images that the time allows for; None: not decided yet
    plans: dict[str, str] = field(default_factory=dict)  # rung -> its recipe as TOML; empty: left out
    left_out: list[dict[str, Any]] = field(default_factory=list)  # rungs: name, title, why, for_time
    changes: list[str] = field(default_factory=list)  # settings that came with --resume --changed
    seconds: float = 0.0
    saved: float = 0.0  # when this was written, in seconds since 1970
    finished: bool = False

    def write(self, run: Path) -> None:
        self.saved = time.time()
        native.write_text(run / PLAN, to_json(asdict(self)))

    def seconds_until_killed(self, run: Path) -> float:
        """Seconds of a run that was killed, by its logs, if they go on after this was written."""
        logs = [run, *(run / RUNGS).glob("*")]
        times = [line["time"] for log in logs for line in read_log(log)[-1:] if "time" in line]
        return self.seconds + max(0.0, max(times, default=0.0) - self.saved)

    @classmethod
    def read(cls, run: Path) -> LadderState:
        try:
            values = from_json((run / PLAN).read_bytes())
            start = values.pop("start")
            return cls(**values, start=None if start is None else Start(**start))
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise TrainingError(
                f"{run / PLAN}: is missing or damaged ({error}). Start a new run: run.dir={run}-again"
            ) from None
