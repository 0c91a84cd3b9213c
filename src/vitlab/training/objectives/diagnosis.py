"""What goes wrong in any run, from the numbers in its log; each objective adds its own findings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

Line = dict[str, Any]  # one "train" event of the log: step, loss, lr, grad_norm, and the objective's numbers

ENOUGH = 3  # lines after the start that a finding needs
NO_BETTER = 0.98  # of the loss of guessing
ALIKE_STD, ALIKE_RANK = 0.02, 1.1  # features of different images that are the same
NOTHING = 1e-12  # a learning rate that moves no weight


class Finding(NamedTuple):
    name: str
    message: str  # what was seen
    remedy: str  # what to type


def general_findings(lines: Sequence[Line]) -> list[Finding]:
    for line in lines:
        for name in ("loss", "grad_norm"):
            value = line.get(name)
            if value is not None and not math.isfinite(value):
                remedy = (
                    f"Try optim.lr={(line.get('lr') or 0.0) / 3:.1e} optim.clip=1.0, a longer warm-up "
                    "(optim.warmup_epochs), or run.amp=off. If it comes at once, look at the images of that batch."
                )
                return [Finding("not finite", f"step {line.get('step')}: {name} is {value}.", remedy)]
    if len(lines) < ENOUGH:
        return []
    rates, norms, losses = ([line[n] for line in lines if n in line] for n in ("lr", "grad_norm", "loss"))
    if rates and max(rates) < NOTHING:
        return [Finding("learning rate 0", "the learning rate is 0: no weight moves.", "Set it: optim.lr=1e-3.")]
    if norms and max(norms) == 0:
        message = "every gradient is 0: the loss depends on no parameter that learns."
        return [Finding("no gradient", message, "Unfreeze something (model.freeze=none), or start from other weights.")]
    if losses and max(losses) - min(losses) <= 1e-6 * abs(losses[0]):
        message = f"the loss is {losses[0]:.6g} at every step: it does not move."
        return [Finding("loss stands still", message, "Learn faster: optim.lr times 10.")]
    return []


def recent_lines(lines: Sequence[Line], settled: int, early: bool = False) -> list[Line]:
    """The later half of what was logged from step `settled` on; `early`: the first lines instead."""
    after = [line for line in lines if line.get("step", settled) >= settled]
    return after[:ENOUGH] if early else after[len(after) // 2 :]


def mean_of(lines: Sequence[Line], name: str) -> float | None:
    """None where no line has it."""
    values = [float(line[name]) for line in lines if name in line]
    return sum(values) / len(values) if values else None
