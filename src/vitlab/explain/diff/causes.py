"""Why two copies of a network diverge: every guess is tried on the network, and reported only if it repairs it.

The network of one side is rebuilt with the guess applied (the other's eps, activation, or a tensor) and runs again. A
guess that moves the first difference to a later step is a cause; then the search continues.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from vitlab.errors import VitlabError
from vitlab.explain.diff.guesses import Guess, SearchState, guesses
from vitlab.explain.diff.relations import relate
from vitlab.explain.diff.sides import Side
from vitlab.explain.diff.steps import StepDifference, Tally, first_difference, run_steps

ROUNDS = 8  # causes to look for, one after the other


@dataclass(frozen=True)
class Cause:
    """`words` describe what differs; without it, the difference falls from `before` to `after`."""

    kind: str  # eps, activation, preprocess, positions, transposed, bias, qkv, heads, pooling, tokens, classes, ...
    step: str  # where it first shows
    words: str
    remedy: str
    before: float  # relative differences of that step; see StepDifference
    after: float | None = None  # None: not tried
    changed: str = ""  # the side that was changed
    tensors: tuple[str, ...] = ()

    @property
    def explained(self) -> float | None:
        """The share of the step's difference that it explains."""
        if self.after is None or not self.before:
            return None
        return 1.0 if self.before == float("inf") else 1 - self.after / self.before


class TrialResult(NamedTuple):
    first: tuple[int, StepDifference] | None  # the first remaining difference and its step index
    after: float = 0.0  # the remaining difference at the step to repair


class Search:
    """Changes p, one cause at a time, until it agrees with r on `images`."""

    def __init__(self, p: Side, r: Side, images: Tensor, tolerance: float):
        self.images, self.tolerance = images, tolerance
        self.wanted = r.steps(images)
        both = [key for key in p.weights if key in r.weights and key != "mask_token"]  # no step reads a mask token
        both = [key for key in both if p.weights[key].shape == r.weights[key].shape]
        relations = {key: relate(key, p.weights[key], r.weights[key], p.config) for key in both}
        self.state = SearchState(p, r, (images.shape[-2], images.shape[-1]), list(self.wanted), relations)
        self.unexplained = ""  # describes the first difference without a cause
        self.nearest: tuple[float, str] = (
            0.0,
            "",
        )  # the best guess that did not repair it: share explained, description

    def run(self) -> list[Cause]:
        causes: list[Cause] = []
        at = self._try([])
        while at is not None and at.first is not None and len(causes) < ROUNDS:
            place, row = at.first
            self.nearest = (0.0, "")
            repaired = self._repair(place, row)
            if repaired is None:
                break
            parts, at = repaired
            causes.append(self._accept(parts, row, at.after))
        if at is not None and at.first is not None:
            left = at.first[1].step
            if len(causes) == ROUNDS:
                self.unexplained = f"After {ROUNDS} causes {left} still differs; the search ends here."
            else:
                start = "No known cause repairs what comes then," if causes else "No known cause repairs"
                self.unexplained = f"{start} {left}: {self._summary()}"
        return causes

    def _repair(self, place: int, row: StepDifference) -> tuple[list[Guess], TrialResult] | None:
        """The first guess that repairs the step at `place`; of a combination, only the needed parts."""
        for parts in guesses(self.state, place):
            then = self._try(parts, place)
            if not _repairs(then, place, row):
                explained = 1 - then.after / row.relative if then is not None else 0.0
                if len(parts) == 1 and explained > self.nearest[0]:
                    self.nearest = (explained, parts[0].description)
                continue
            for part in parts if len(parts) > 1 else []:
                fewer = [other for other in parts if other is not part]
                without = self._try(fewer, place)
                if _repairs(without, place, row):
                    parts, then = fewer, without
            assert then is not None
            return parts, then
        return None

    def _try(self, parts: list[Guess], place: int | None = None) -> TrialResult | None:
        """Run p with these guesses applied; None if that network cannot be built."""
        state = self.state
        changes = {leaf: value for part in parts for leaf, value in part.options.items()}
        tensors = {key: state.r.weights[key] for part in parts for key in part.tensors}
        try:
            model = state.p.rebuilt({**state.options, **changes}, {**state.taken, **tensors}, state.r.weights)
            steps = run_steps(model, self.images)
        except VitlabError:  # incompatible options, or tensors that neither side has
            return None
        first = first_difference(steps, self.wanted, self.tolerance)
        if place is None:
            return TrialResult(first)
        if (key := state.steps[place]) not in steps:
            return None
        tally = Tally()
        tally.add(steps[key], self.wanted[key])
        return TrialResult(first, tally.row("", self.tolerance).relative)

    def _accept(self, parts: list[Guess], row: StepDifference, after: float) -> Cause:
        for part in parts:
            self.state.options |= part.options
            self.state.taken |= {key: self.state.r.weights[key] for key in part.tensors}
        description = "; and ".join(
            f"{p.description} ({_tensor_names(p.tensors)})" if p.tensors else p.description for p in parts
        )
        remedy = " ".join(dict.fromkeys(part.remedy for part in parts))
        tensors = tuple(key for part in parts for key in part.tensors)
        return Cause(parts[0].kind, row.step, description, remedy, row.relative, after, self.state.p.letter, tensors)

    def _summary(self) -> str:
        """Without a cause: the best guess, and how the tensors differ."""
        relations = self.state.relations
        other = {k: v for k, v in relations.items() if v.kind != "equal" and k not in self.state.taken}
        if not other:
            return "all tensors agree, and so do all options that tell, so the two programs compute it differently."
        most = sorted(other, key=lambda key: -other[key].distance)[:5]
        listed = ", ".join(f"{k} ({other[k].distance:.1e}, cosine {other[k].cosine:.4f})" for k in most)
        text = f"{len(other)} of {len(relations)} tensors differ, most (relative distance, cosine): {listed}."
        share, description = self.nearest
        if share >= 0.5:
            text += f" Nearest comes {description}, which explains {share:.0%} of it."
        if self.state.retrained:
            middle = sorted(relation.cosine for relation in other.values())[len(other) // 2]
            alike = "One looks like a trained copy of the other." if middle > 0.5 else "They look like two trainings."
            text += f" {alike}"
        return text


def _repairs(then: TrialResult | None, place: int, row: StepDifference) -> bool:
    """The step agrees, and not only because rounding moved it just below the tolerance."""
    if then is None or then.after > row.relative / 2:
        return False
    return then.first is None or then.first[0] > place


def _tensor_names(tensors: tuple[str, ...]) -> str:
    return tensors[0] if len(tensors) == 1 else f"{tensors[0]} and {len(tensors) - 1} more"
