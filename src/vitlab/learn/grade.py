"""Grade a learner's numbers. Mistakes are found by computing our layer with each known mistake."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitlab.learn.child import Failure
from vitlab.learn.exercises import Exercise, ExerciseCase
from vitlab.learn.messages import message, step_name
from vitlab.learn.mistakes import KnownMistake, candidate_mistakes, known_mistakes
from vitlab.learn.steps import (
    TOLERANCE,
    axes_order,
    close,
    distance,
    find_divergence,
    same_but_for_axes,
    same_numbers,
    scale_factor,
    shape_in_letters,
)
from vitlab.learn.variants.base import Sizes


@dataclass(frozen=True)
class Remark:
    """One sentence, by its key in messages.toml; steps and hints are translated too."""

    key: str
    values: dict[str, Any] = field(default_factory=dict)

    def text(self, language: str) -> str:
        values = dict(self.values)
        for name, value in values.items():
            if isinstance(value, KnownMistake):
                values[name] = value.hint(language)
            elif name in ("step", "last"):
                values[name] = step_name(value, language)
        return message(self.key, language, **values)


@dataclass(frozen=True)
class Grade:
    exercise: str
    passed: bool
    remarks: tuple[Remark, ...]

    @property
    def mistakes(self) -> list[str]:
        return [m.name for r in self.remarks for m in r.values.values() if isinstance(m, KnownMistake)]

    @property
    def keys(self) -> list[str]:
        return [remark.key for remark in self.remarks]

    def lines(self, language: str) -> list[str]:
        return [remark.text(language) for remark in self.remarks]

    def to_dict(self, language: str) -> dict[str, Any]:
        return {
            "exercise": self.exercise,
            "passed": self.passed,
            "kinds": self.keys,
            "mistakes": self.mistakes,
            "lines": self.lines(language),
        }


def grade(exercise: Exercise, failure: Failure | None, outputs: list[dict[str, Tensor]]) -> Grade:
    cases = exercise.all_cases()
    if failure and failure.key != "to write":
        tensors = _steps(outputs[failure.case]) if failure.case < len(outputs) else []
        return _failed(exercise, *_no_numbers(exercise, failure, cases[failure.case], tensors))
    complete = failure.case if failure else len(cases)  # cases that were run before a part that is still to be written
    truth = [case.ours() for case in cases[:complete]]
    actual = [output["output"] for output in outputs[:complete]]
    expected = [y for y, _ in truth]
    if not all(map(close, actual, expected)):
        return _failed(exercise, *_wrong_numbers(exercise, cases[:complete], actual, expected, outputs))
    if failure:
        right = [Remark("right so far", {"count": complete})] if complete else []
        return _failed(exercise, *right, *_no_numbers(exercise, failure, cases[complete], []))
    return _right_numbers(exercise, outputs, truth)


def _failed(exercise: Exercise, *remarks: Remark) -> Grade:
    return Grade(exercise.name, False, (Remark("not passed", {"name": exercise.name}), *remarks))


def _no_numbers(exercise: Exercise, failure: Failure, case: ExerciseCase, tensors: list[Tensor]) -> list[Remark]:
    remarks = [Remark(failure.key, failure.values)]
    if failure.key == "forward" and (mistake := _stopping_mistake(exercise, case, tensors)):
        remarks = [Remark("mistake", {"hint": mistake}), Remark("measured stop"), *remarks]
    if failure.values.get("line") and failure.values.get("code"):
        remarks.append(Remark("at", failure.values))
    if failure.values.get("like"):
        remarks.append(Remark("rename", failure.values))
    if failure.key == "forward":
        remarks.append(Remark("sizes", {"sizes": _listed(case.sizes)}))
    return remarks


def _stopping_mistake(exercise: Exercise, case: ExerciseCase, tensors: list[Tensor]) -> KnownMistake | None:
    """A mistake that stops our computation too, if its last step before that is among the learner's tensors."""
    right = case.steps().values()
    for mistake in known_mistakes(exercise.name):
        last = case.last_step_before_error(**mistake.options)
        if last is None or any(same_but_for_axes(last, step) for step in right):
            continue
        if any(same_but_for_axes(tensor, last) for tensor in tensors):
            return mistake
    return None


def _right_numbers(exercise: Exercise, outputs: list[dict[str, Tensor]], truth: list[tuple[Tensor, Tensor]]) -> Grade:
    """The outputs agree; check repeated calls, the input and gradients."""
    for output, (y, gradient) in zip(outputs, truth, strict=True):
        if not close(output["again"], y):
            return _failed(exercise, Remark("two calls"))
        if bool(output["changed"]):
            return _failed(exercise, Remark("input changed"))
        if "gradient" not in output:
            return _failed(exercise, Remark("no gradient"))
        if distance(output["gradient"], gradient) > 10 * TOLERANCE:
            return _failed(exercise, Remark("other gradient"))
    worst = max(distance(output["output"], y) for output, (y, _) in zip(outputs, truth, strict=True))
    return Grade(exercise.name, True, (Remark("passed", {"name": exercise.name, "relative": max(worst, 1e-7)}),))


def _wrong_numbers(
    exercise: Exercise,
    cases: list[ExerciseCase],
    actual: list[Tensor],
    expected: list[Tensor],
    outputs: list[dict[str, Tensor]],
) -> list[Remark]:
    mistakes, relative = _diagnose(exercise, cases, actual)
    if mistakes:
        measured = Remark("measured" if len(mistakes) == 1 else "measured two", {"relative": max(relative, 1e-7)})
        return [*(Remark("mistake", {"hint": mistake}) for mistake in mistakes), measured]
    number = next(n for n, (a, b) in enumerate(zip(actual, expected, strict=True)) if not close(a, b))
    sizes, a, b = cases[number].sizes, actual[number], expected[number]
    remarks = _describe(a, b, sizes)
    right = [case.sizes for case, x, y in zip(cases, actual, expected, strict=True) if close(x, y)]
    if right:
        remarks.append(Remark("one case", {"right": _listed(right[0]), "wrong": _listed(sizes)}))
    remarks += _where(cases[number], outputs[number])
    return [*remarks, Remark("sizes", {"sizes": _listed(sizes)})]


def _diagnose(
    exercise: Exercise, cases: list[ExerciseCase], actual: list[Tensor]
) -> tuple[tuple[KnownMistake, ...], float]:
    """The first mistakes that explain the learner's numbers in every case, and the remaining difference."""
    for mistakes in candidate_mistakes(exercise.name):
        options = {name: value for mistake in mistakes for name, value in mistake.options.items()}
        far = 0.0
        for case, theirs in zip(cases, actual, strict=True):
            try:
                far = max(far, distance(theirs, case.variant(**options)))
            except RuntimeError:  # incompatible mistakes
                far = float("inf")
            if far > TOLERANCE:
                break
        if far <= TOLERANCE:
            return mistakes, far
    return (), 0.0


def _describe(a: Tensor, b: Tensor, sizes: Sizes) -> list[Remark]:
    """Describe an output that no known mistake explains."""
    shapes = {"found": shape_in_letters(tuple(a.shape), sizes), "wanted": shape_in_letters(tuple(b.shape), sizes)}
    if a.shape != b.shape:
        return [Remark("axes" if axes_order(a, b) else "shape", shapes)]
    if (broken := int((~torch.isfinite(a)).sum())) > 0:
        return [Remark("finite", {"count": broken})]
    if (factor := scale_factor(a, b)) is not None:
        return [Remark("scaled", {"factor": factor})]
    if same_numbers(a, b):
        return [Remark("shuffled")]
    largest = float((a - b).abs().max())
    remarks = [Remark("difference", {"largest": largest, "relative": distance(a, b)})]
    if a.ndim == 3:
        wrong = [n for n in range(a.shape[1]) if not close(a[:, n], b[:, n])]
        if 0 < len(wrong) < a.shape[1]:
            remarks.append(Remark("tokens wrong", {"tokens": ", ".join(map(str, wrong))}))
    return remarks


def _where(case: ExerciseCase, output: dict[str, Tensor]) -> list[Remark]:
    ours = case.steps()
    divergence = find_divergence(ours, _steps(output))
    if divergence.first is None:
        return [Remark("after all", {"last": divergence.last})]
    if divergence.last is None:
        remarks = [Remark("first of all", {"step": divergence.first})]
    else:
        remarks = [Remark("first step", {"step": divergence.first, "last": divergence.last})]
    if divergence.factor is not None:
        remarks.append(Remark("step scaled", {"factor": divergence.factor}))
    elif divergence.shuffled is not None:
        wanted = shape_in_letters(tuple(ours[divergence.first].shape), case.sizes)
        remarks.append(
            Remark("step shuffled", {"found": shape_in_letters(divergence.shuffled, case.sizes), "wanted": wanted})
        )
    return remarks


def _steps(output: dict[str, Tensor]) -> list[Tensor]:
    """Every tensor that the learner's code computed, in order."""
    return [value for key, value in sorted(output.items()) if key.startswith("step.")]


def _listed(sizes: Sizes) -> str:
    return ", ".join(f"{letter}={size}" for letter, size in sizes.items())
