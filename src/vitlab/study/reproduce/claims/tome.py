"""Merging tokens without training: what does it cost?"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from vitlab.checkpoints.load import load_with_report
from vitlab.models.plain import PlainTransformer
from vitlab.reduce import r_for, reducer_of
from vitlab.study.reproduce.bench import Workbench, train
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.grid import seed_by_seed
from vitlab.study.reproduce.verdict import difference
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import evaluate_classifier
from vitlab.training.job import data_of
from vitlab.training.loop import Show

SHARES = (0.25, 0.5, 0.75)  # of the patches that are gone at the end
METHODS = {"ToMe": "tome:r={r}", "random": "random:like=tome:r={r}"}
ALL, MOST = "all tokens", "75 %"
MARGIN = 0.01


def measure(bench: Workbench, seed: int, folder: Path, show: Show) -> dict[str, float]:
    recipe = bench.network("vit", 20, seed)
    model, data = load_with_report(train(recipe, folder, show))[0], data_of(recipe)
    assert isinstance(model, PlainTransformer) and model.preprocess is not None
    images = ImageSet(data.test or data.val, model.preprocess)
    h, w = model.layout(*model.input_size).grid
    numbers = {ALL: evaluate_classifier(model, images).top(1)}
    for share in SHARES:
        r = r_for(share, patches=h * w, depth=len(model.blocks))
        for name, text in METHODS.items():
            reducer = reducer_of(text.format(r=r))
            numbers[f"{name}, {100 * share:.0f} %"] = evaluate_classifier(model, images, reducer=reducer).top(1)
    return numbers


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    return seed_by_seed(seeds, partial(measure, bench))


CLAIM = Claim(
    name="tome",
    title=Text("Merging tokens without training costs little accuracy", "不经训练就合并 token，准确率损失很小"),
    paper=Citation("ToMe", "2210.09461", "Abstract; Section 4"),
    says=Text(
        "ViT-L at 512 and ViT-H at 518 pixels: twice the throughput for a drop of 0.2 to 0.3 points, without training. "
        "Merging is better than dropping.",
        "512 像素的 ViT-L 与 518 像素的 ViT-H：不经训练，吞吐量翻倍，准确率只降 0.2 到 0.3 个百分点。合并优于丢弃。",
    ),
    here=Text(
        "A ViT with 4 layers is trained for 20 epochs, then tested with a quarter, half and three quarters of its "
        "patches merged over all layers, and with as many dropped at random.",
        "训练 20 个 epoch 的 4 层 ViT，测试时在各层累计合并四分之一、一半、四分之三的图块；对照是随机丢弃同样多。",
    ),
    arms=(
        Arm(ALL, series=ALL, x=0.0),
        *(Arm(f"{name}, {100 * share:.0f} %", series=name, x=100 * share) for name in METHODS for share in SHARES),
    ),
    rule=(
        difference(f"ToMe, {MOST}", ALL, low=-MARGIN),
        difference(f"ToMe, {MOST}", f"random, {MOST}", low=0.0),
    ),
    steps=steps,
    axis="patches gone after the last layer, %",
    minutes=1.5,
)
