"""Does a claim hold here? Decided by a rule that is written before the runs.

A criterion is a weighted sum of arms and the range in which the claim puts it. The sum is computed for each unit (a
seed, or a model), so arms are paired. It holds where the 95 % interval of its mean (Student's t, n - 1 degrees of
freedom) lies inside the range, fails where the interval lies outside, and is undecided otherwise.

    difference("class", "mean", low=-0.02, high=0.02)      # alike: within two points
    difference("conv", "patch", low=0.0)                   # better
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev

from scipy.stats import t

CONFIDENCE = 0.95

Values = Mapping[str, Mapping[str, float]]  # arm -> unit -> measured value


class ClaimOutcome(StrEnum):
    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Criterion:
    label: str  # of the sum: "class − mean"
    weights: Mapping[str, float]  # by arm
    low: float = -math.inf
    high: float = math.inf

    def decide(self, values: Values) -> Decision:
        sums = [
            math.fsum(weight * values[arm][unit] for arm, weight in self.weights.items())
            for unit in common_units(values, list(self.weights))
        ]
        low, high = interval(sums)
        if self.low < low and high < self.high:
            outcome = ClaimOutcome.HOLDS
        elif high <= self.low or low >= self.high:
            outcome = ClaimOutcome.FAILS
        else:
            outcome = ClaimOutcome.UNDECIDED
        return Decision(self, outcome, fmean(sums) if sums else math.nan, low, high, len(sums))


@dataclass(frozen=True)
class Decision:
    """A criterion and what was measured."""

    criterion: Criterion
    outcome: ClaimOutcome
    mean: float
    low: float  # of the 95 % interval
    high: float
    n: int


def difference(a: str, b: str, low: float = -math.inf, high: float = math.inf) -> Criterion:
    return Criterion(f"{a} − {b}", {a: 1.0, b: -1.0}, low, high)


def value(arm: str, low: float = -math.inf, high: float = math.inf) -> Criterion:
    return Criterion(arm, {arm: 1.0}, low, high)


def verdict(decisions: Sequence[Decision]) -> ClaimOutcome:
    """A claim holds if all criteria do; it does not if one fails."""
    outcomes = {decision.outcome for decision in decisions}
    if ClaimOutcome.FAILS in outcomes:
        return ClaimOutcome.FAILS
    return ClaimOutcome.HOLDS if outcomes == {ClaimOutcome.HOLDS} else ClaimOutcome.UNDECIDED


def common_units(values: Values, arms: Sequence[str]) -> list[str]:
    """Units for which all arms are measured, in the order of the first arm."""
    return [unit for unit in values.get(arms[0], {}) if all(unit in values.get(arm, {}) for arm in arms)]


def interval(numbers: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean. One number has no spread, so its interval is unbounded."""
    if len(numbers) < 2:
        return -math.inf, math.inf
    mean, error = fmean(numbers), stdev(numbers) / math.sqrt(len(numbers))
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(numbers) - 1)) * error
    return mean - half, mean + half
