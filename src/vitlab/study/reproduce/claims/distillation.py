"""Does a convolutional teacher help?"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from vitlab.study.reproduce.bench import SGD, Workbench, accuracy, train
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.grid import seed_by_seed
from vitlab.study.reproduce.verdict import difference
from vitlab.training.loop import Show
from vitlab.training.runs import read_result

FRACTION, EPOCHS = 0.2, 15
TAUGHT, ALONE, TEACHER = "with teacher", "labels only", "the teacher"


def measure(bench: Workbench, seed: int, folder: Path, show: Show) -> dict[str, float]:
    teacher = bench.network("resnet", EPOCHS, seed, optim=SGD, fraction=FRACTION)
    weights = train(teacher, folder / "teacher", show)
    student = {
        "model.distill_token": True,
        "objective.name": "distill",
        "objective.teacher": str(weights),
        "objective.distillation": "hard",
    }
    return {
        TAUGHT: accuracy(bench.network("vit", EPOCHS, seed, student, fraction=FRACTION), folder / "student", show),
        ALONE: accuracy(bench.network("vit", EPOCHS, seed, fraction=FRACTION), folder / "alone", show),
        TEACHER: float(read_result(folder / "teacher")["top1"]),
    }


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    return seed_by_seed(seeds, partial(measure, bench))


CLAIM = Claim(
    name="distillation",
    title=Text("A convolutional teacher helps a ViT", "卷积网络当教师能帮助 ViT"),
    paper=Citation("DeiT", "2012.12877", "Section 5.2, Table 3"),
    says=Text(
        "DeiT-B on ImageNet: 81.8 % with labels only, 83.4 % with hard distillation through a distillation token.",
        "DeiT-B 在 ImageNet 上：只用标签 81.8 %，通过蒸馏 token 做硬蒸馏 83.4 %。",
    ),
    here=Text(
        "With a fifth of the images: a ResNet is trained, then a ViT with a distillation token learns from labels and "
        "its answers; beside it the same ViT with labels only.",
        "用五分之一的图像：先训练一个 ResNet，再让带蒸馏 token 的 ViT 同时学习标签和它的回答；"
        "对照是只用标签的同样 ViT。",
    ),
    arms=tuple(map(Arm, (TAUGHT, ALONE, TEACHER))),
    rule=(difference(TAUGHT, ALONE, low=0.0),),
    steps=steps,
)
