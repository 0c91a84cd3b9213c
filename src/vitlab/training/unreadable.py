"""Images that cannot be read are reported, counted once each, and skipped; too many stop a run.

They are kept in a table: name -> error message.
"""

from __future__ import annotations

from vitlab.errors import DataError
from vitlab.training.runlog import RunLog
from vitlab.training.state import Progress

SHOWN = 50  # names in one message


def note_skipped(skipped: dict[str, str], progress: Progress, log: RunLog | None, step: int) -> list[str]:
    """Add them to the run's table and its log; returns the new messages."""
    new = {name: message for name, message in skipped.items() if name not in progress.skipped}
    progress.skipped.update(new)
    if log is not None:
        for message in new.values():
            log.write("skip", step, message=message)
    return list(new.values())


def check_skipped(skipped: dict[str, str], limit: int, setting: str, remedy: str) -> None:
    """Refuse more of them than the setting allows."""
    if len(skipped) > limit:
        few = f"{len(skipped)} images" if len(skipped) > 1 else "an image"
        raise DataError(
            f"{few} could not be read, more than {setting}={limit} allows:\n{listed(skipped)}\n"
            f"Mend or remove them, or allow more: {remedy}"
        )


def none_readable(skipped: dict[str, str]) -> DataError:
    return DataError(
        f"none of the {len(skipped)} images can be read:\n{listed(skipped)}\n"
        "Are they images at all? Open one in a viewer, or copy them again from where they came."
    )


def listed(skipped: dict[str, str], most: int = SHOWN) -> str:
    """A line for each."""
    lines = [f"  {message}" for message in list(skipped.values())[:most]]
    return "\n".join(lines + ([f"  and {len(skipped) - most} more"] if len(skipped) > most else []))
