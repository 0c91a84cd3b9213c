"""What is wrong with a learner's numbers: measured by making the known mistakes on our own side, never guessed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitlab.learn.exercises import Case, Exercise, Sizes
from vitlab.learn.messages import step_name, words
from vitlab.learn.mistakes import Mistake, suspects
from vitlab.learn.steps import TOLERANCE, axes_order, close, distance, lettered, part, same_numbers, times


@dataclass(frozen=True)
class Remark:
    """One sentence, by its key in messages.toml; steps and hints get their words in the reader's language."""

    key: str
    said: dict[str, Any] = field(default_factory=dict)

    def text(self, language: str) -> str:
        said = dict(self.said)
        for name, value in said.items():
            if isinstance(value, Mistake):
                said[name] = value.hint(language)
            elif name in ("step", "last"):
                said[name] = step_name(value, language)
        return words(self.key, language, **said)


@dataclass(frozen=True)
class Verdict:
    exercise: str
    passed: bool
    remarks: tuple[Remark, ...]

    @property
    def mistakes(self) -> list[str]:
        return [m.name for r in self.remarks for m in r.said.values() if isinstance(m, Mistake)]

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


def judge(exercise: Exercise, answer: dict[str, Any], outputs: list[dict[str, Tensor]]) -> Verdict:
    if answer["failed"]:
        return _no(exercise, *_failure(exercise, answer))
    cases = [exercise.case(n) for n in range(len(exercise.cases))]
    truth = [case.ours() for case in cases]
    found = [output["output"] for output in outputs]
    wanted = [y for y, _ in truth]
    if all(map(close, found, wanted)):
        return _right_numbers(exercise, outputs, truth)
    return _no(exercise, *_wrong_numbers(exercise, cases, found, wanted, outputs))


def _no(exercise: Exercise, *remarks: Remark) -> Verdict:
    return Verdict(exercise.name, False, (Remark("not passed", {"name": exercise.name}), *remarks))


def _failure(exercise: Exercise, answer: dict[str, Any]) -> list[Remark]:
    """The code did not get as far as numbers."""
    said = {k: v for k, v in answer.items() if k not in ("failed", "case")}
    remarks = [Remark(answer["failed"], said)]
    if said.get("line") and said.get("code"):
        remarks.append(Remark("at", said))
    if said.get("like"):
        remarks.append(Remark("rename", said))
    if answer["failed"] == "forward":
        remarks.append(Remark("sizes", {"sizes": _listed(exercise.cases[answer["case"]])}))
    return remarks


def _right_numbers(exercise: Exercise, outputs: list[dict[str, Tensor]], truth: list[tuple[Tensor, Tensor]]) -> Verdict:
    """Forward agrees; what else can be wrong with it?"""
    for output, (y, gradient) in zip(outputs, truth, strict=True):
        if not close(output["again"], y):
            return _no(exercise, Remark("two calls"))
        if bool(output["changed"]):
            return _no(exercise, Remark("input changed"))
        if "gradient" not in output:
            return _no(exercise, Remark("no gradient"))
        if distance(output["gradient"], gradient) > 10 * TOLERANCE:
            return _no(exercise, Remark("other gradient"))
    worst = max(distance(output["output"], y) for output, (y, _) in zip(outputs, truth, strict=True))
    return Verdict(exercise.name, True, (Remark("passed", {"name": exercise.name, "relative": max(worst, 1e-7)}),))


def _wrong_numbers(
    exercise: Exercise, cases: list[Case], found: list[Tensor], wanted: list[Tensor], outputs: list[dict[str, Tensor]]
) -> list[Remark]:
    made, relative = _diagnose(exercise, cases, found)
    if made:
        measured = Remark("measured" if len(made) == 1 else "measured two", {"relative": max(relative, 1e-7)})
        return [*(Remark("mistake", {"hint": mistake}) for mistake in made), measured]
    number = next(n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if not close(a, b))
    sizes, a, b = cases[number].sizes, found[number], wanted[number]
    remarks = _about(a, b, sizes)
    right = [case.sizes for case, x, y in zip(cases, found, wanted, strict=True) if close(x, y)]
    if right:
        remarks.append(Remark("one case", {"right": _listed(right[0]), "wrong": _listed(sizes)}))
    remarks += _where(cases[number], outputs[number])
    return [*remarks, Remark("sizes", {"sizes": _listed(sizes)})]


def _diagnose(exercise: Exercise, cases: list[Case], found: list[Tensor]) -> tuple[tuple[Mistake, ...], float]:
    """The first suspects whose numbers are the learner's in every case, and how near they come."""
    for made in suspects(exercise.name):
        options = {name: value for mistake in made for name, value in mistake.options.items()}
        far = 0.0
        for case, theirs in zip(cases, found, strict=True):
            try:
                far = max(far, distance(theirs, case.variant(**options)))
            except RuntimeError:  # two mistakes that do not fit together
                far = float("inf")
            if far > TOLERANCE:
                break
        if far <= TOLERANCE:
            return made, far
    return (), 0.0


def _about(a: Tensor, b: Tensor, sizes: Sizes) -> list[Remark]:
    """What can be said of an output that no known mistake gives."""
    shapes = {"found": lettered(tuple(a.shape), sizes), "wanted": lettered(tuple(b.shape), sizes)}
    if a.shape != b.shape:
        return [Remark("axes" if axes_order(a, b) else "shape", shapes)]
    if (broken := int((~torch.isfinite(a)).sum())) > 0:
        return [Remark("finite", {"count": broken})]
    if (factor := times(a, b)) is not None:
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


def _where(case: Case, output: dict[str, Tensor]) -> list[Remark]:
    theirs = [value for key, value in sorted(output.items()) if key.startswith("step.")]
    ours = case.steps()
    parting = part(ours, theirs)
    if parting.first is None:
        return [Remark("after all", {"last": parting.last})]
    if parting.last is None:
        remarks = [Remark("first of all", {"step": parting.first})]
    else:
        remarks = [Remark("first step", {"step": parting.first, "last": parting.last})]
    if parting.factor is not None:
        remarks.append(Remark("step scaled", {"factor": parting.factor}))
    elif parting.shuffled is not None:
        wanted = lettered(tuple(ours[parting.first].shape), case.sizes)
        remarks.append(Remark("step shuffled", {"found": lettered(parting.shuffled, case.sizes), "wanted": wanted}))
    return remarks


def _listed(sizes: Sizes) -> str:
    return ", ".join(f"{letter}={size}" for letter, size in sizes.items())
