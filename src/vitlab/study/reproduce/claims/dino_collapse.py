"""DINO needs centring and sharpening."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

from vitlab.models.registry import find
from vitlab.study.reproduce.bench import Workbench, train
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.grid import grid
from vitlab.study.reproduce.verdict import value
from vitlab.training.loop import Show
from vitlab.training.recipe import Recipe
from vitlab.training.runlog import read_log

BOTH, NO_CENTRING, NO_SHARPENING = "both", "no centring", "no sharpening"
SHARP, STUDENT = [0.02, 0.02], [0.1, 0.1]  # temperatures of the teacher; the student has 0.1
ARMS = {
    BOTH: {"model.centring": True, "objective.teacher_temperature": SHARP},
    NO_CENTRING: {"model.centring": False, "objective.teacher_temperature": SHARP},
    NO_SHARPENING: {"model.centring": True, "objective.teacher_temperature": STUDENT},
}
ONE_OUTPUT, UNIFORM = 0.1, 0.98  # of ln K
LAST = 10  # steps


def teacher_entropy(recipe: Recipe, run: Path, show: Show) -> float:
    """Entropy of the teacher's output in the last steps, as a share of ln K, that of uniform output."""
    train(recipe, run, show)
    config = find(recipe.model.name)[0].config.with_options(**recipe.model.options)
    entropies = [line["teacher_entropy"] for line in read_log(run) if "teacher_entropy" in line]
    return fmean(entropies[-LAST:]) / math.log(config.option("out_dim"))


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    return grid(ARMS, lambda varied, seed: bench.pretraining("dino", 10, seed, varied), seeds, teacher_entropy)


CLAIM = Claim(
    name="dino-collapse",
    title=Text("DINO collapses without centring and without sharpening", "DINO 缺少居中或锐化都会坍塌"),
    paper=Citation("DINO", "2104.14294", "Section 5.3, Figure 7"),
    says=Text(
        "Without centring the teacher's entropy goes to 0 (one output), without sharpening to ln K (uniform); with "
        "both neither happens.",
        "没有居中，教师输出的熵趋于 0（只用一个输出）；没有锐化，熵趋于 ln K（均匀）；两者都有则都不会发生。",
    ),
    here=Text(
        "DINO for 10 epochs; entropy of the teacher in the last ten logged steps, as a share of ln K. No sharpening: "
        "the teacher has the student's temperature, 0.1.",
        "DINO 训练 10 个 epoch；最后十个记录步中教师输出的熵，以 ln K 为 1。不锐化：教师温度与学生相同，为 0.1。",
    ),
    arms=tuple(map(Arm, ARMS)),
    rule=(
        value(NO_CENTRING, high=ONE_OUTPUT),
        value(NO_SHARPENING, low=UNIFORM),
        value(BOTH, low=ONE_OUTPUT, high=UNIFORM),
    ),
    steps=steps,
    scale="number",
    measured="entropy of the teacher / ln K",
    minutes=4,
)
