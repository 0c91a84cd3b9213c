"""How much faster does a trained model get with fewer tokens, and what does it cost? Measured on this machine.

    study = study_tokens("runs/cifar10_56px/best", DataRecipe("cifar10"))
    studies/tokens-.../{study.json, results.csv, table.md, plot.png}

Every reducer is evaluated on the test set, next to one that drops as many tokens in the same layers at random, and
timed interleaved with the full model in one process. The speed-up is a ratio of medians.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitlab.checkpoints.load import load_with_report
from vitlab.errors import UsageError
from vitlab.export.timing import TimingOptions, alternate, summary
from vitlab.images.datasets import Data, open_data, subset
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import Trace
from vitlab.models.plain import PlainTransformer
from vitlab.reduce import r_for, reducer_of
from vitlab.study.grid import file_safe
from vitlab.study.study import Row, Study, write_study_json
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import evaluating, forward_all
from vitlab.training.labels import class_order
from vitlab.training.recipe import DataRecipe

ALL = "all tokens"
SHARES = (0.25, 0.5, 0.75, 0.9)  # of the patches that ToMe merges over all layers
KEEPS = (0.9, 0.8, 0.7, 0.6, 0.5)  # of EViT at each of three layers


Watch = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]  # name of the reducer, number of images


@dataclass
class ReducerResult:
    """Measurements of one reducer."""

    name: str
    tokens: int  # after the last layer
    top1: float
    agreement: float  # with the predictions of the full model
    seconds: list[float] = field(default_factory=list)  # per batch
    speedup: float = 1.0


@dataclass
class TokenStudy(Study):
    title: str
    batch: int
    ways: list[ReducerResult]

    @property
    def rows(self) -> list[Row]:
        rows = []
        for way in self.ways:
            times = summary(way.seconds)
            row = {"way": way.name, "tokens": way.tokens, "top1": way.top1, "agreement": way.agreement}
            row |= {"ms": 1000 * times["median"], "ms_quarter": 1000 * times["quarter"]}
            row |= {"ms_three_quarters": 1000 * times["three_quarters"], "n": times["n"], "speedup": way.speedup}
            rows.append(row)
        return rows

    def tables(self) -> list[list[Row]]:
        """The quartiles in one cell."""
        return [
            [
                {
                    "way": row["way"],
                    "tokens left": row["tokens"],
                    "top-1": f"{row['top1']:.2%}",
                    "agreement": f"{row['agreement']:.2%}",
                    "ms": f"{row['ms']:.1f} ({row['ms_quarter']:.1f} .. {row['ms_three_quarters']:.1f})",
                    "speed-up": f"{row['speedup']:.2f} x",
                }
                for row in self.rows
            ]
        ]

    def draw(self, path: Path) -> None:
        """Accuracy over speed-up, a line per method, dotted for random baselines; dashed: all tokens."""
        from vitlab.study.plot import legend_beside, percent, plot_file

        full, *ways = self.ways
        lines: dict[str, list[ReducerResult]] = {}
        for way in ways:
            method, _, rest = way.name.partition(":")
            like = f" like {rest.removeprefix('like=').partition(':')[0]}" if rest.startswith("like=") else ""
            lines.setdefault(method + like + (", decreasing" if "decreasing" in rest else ""), []).append(way)
        with plot_file(path, (8, 4.6), self.title) as axes:
            axes.axhline(full.top1, color="0.4", linestyle="--", linewidth=1)
            for name, members in lines.items():
                members = sorted(members, key=lambda way: -way.tokens)
                style = "o:" if name.startswith("random") else "o-"
                axes.plot([w.speedup for w in members], [w.top1 for w in members], style, markersize=5, label=name)
            axes.plot(1.0, full.top1, "s", color="0.2", label=full.name)
            axes.set(xlabel=f"speed-up, batch of {self.batch}", ylabel="accuracy")
            percent(axes.yaxis)
            legend_beside(axes)
            axes.grid(alpha=0.25)


def study_tokens(
    checkpoint: str,
    data: DataRecipe,
    *,
    ways: list[str] | None = None,
    timing: TimingOptions | None = None,
    images: int | None = None,
    folder: Path | None = None,
    command: str = "",
    watch: Watch | None = None,
) -> TokenStudy:
    """`ways`: reducers as `reducer_of` reads them; None: default_ways. `images`: evaluate on this many test images."""
    model, report = load_with_report(checkpoint)
    if not isinstance(model, PlainTransformer) or not model.config.classes:
        raise UsageError(f"{checkpoint}: fewer tokens are studied on a ViT with classes; this is a {model.family}.")
    timing = timing or TimingOptions()
    if timing.batch < 1 or timing.rounds < 2:
        raise UsageError(f"batch={timing.batch} must be at least 1 and rounds={timing.rounds} at least 2.")
    reducers = {name: reducer_of(name) for name in ways or default_ways(model)}
    opened = open_data(data.source, path=data.path)
    order = class_order(model.labels, opened.classes) if model.labels else list(range(len(opened.classes)))
    if order is None:
        raise UsageError(f"{checkpoint} was not trained on the classes of {data.source}, so it cannot be evaluated.")
    image_set = _test_images(model, opened, images)
    folder = folder or Path("studies") / file_safe(f"tokens-{Path(checkpoint).parent.name or checkpoint}")
    results = _evaluate(model, image_set, {ALL: None, **reducers}, order, watch)
    batch, _ = image_set.normalised(np.arange(min(timing.batch, len(image_set))))
    _time(model, batch, results, {ALL: None, **reducers}, timing.rounds)
    title = f"{Path(checkpoint).parent.name or checkpoint} on {Path(data.source).name}"
    study = TokenStudy(folder, title, len(batch), results, notes=list(report.notes))
    about = {"checkpoint": checkpoint, "source": data.source, "pictures": len(image_set)}
    write_study_json(folder, "tokens", {"batch": study.batch, **about}, command)
    study.write()
    study.notes += study.write_plot()
    return study


def default_ways(model: PlainTransformer) -> list[str]:
    """ToMe, EViT if there is a class token, and for each as many tokens dropped at random."""
    depth, patches = len(model.blocks), math.prod(model.layout(*model.input_size).grid)
    counts = dict.fromkeys(r_for(share, patches=patches, depth=depth) for share in SHARES)
    ways = [f"tome:r={r}{schedule}" for schedule in ("", ",schedule=decreasing") for r in counts]
    ways += [f"evit:keep={keep}" for keep in KEEPS] if "class_attention" in model.traceable else []
    return ways + [f"random:like={way}" for way in ways]


def _test_images(model: PlainTransformer, data: Data, images: int | None) -> ImageSet:
    chosen = data.test or data.val
    if images is not None and images < len(chosen):
        chosen = subset(chosen, np.linspace(0, len(chosen) - 1, images).astype(int))  # spread over the split
    assert model.preprocess is not None, "a loaded checkpoint has one"
    return ImageSet(chosen, model.preprocess)


def _evaluate(
    model: PlainTransformer,
    image_set: ImageSet,
    reducers: dict[str, Reducer | None],
    order: list[int],
    watch: Watch | None,
) -> list[ReducerResult]:
    results: list[ReducerResult] = []
    answers: dict[str, Tensor] = {}
    for name, reducer in reducers.items():
        run = partial(model, reducer=reducer)
        with nullcontext() if watch is None else watch(name, len(image_set)) as progress:
            logits, read, _ = forward_all(model, run, model.config.classes, image_set, progress=progress)
        answers[name] = logits[read][:, order].argmax(dim=1)
        top1 = float((answers[name] == image_set.labels[read]).float().mean())
        agreement = float((answers[name] == answers[ALL]).float().mean())
        results.append(ReducerResult(name, _tokens_left(model, image_set, reducer), top1, agreement))
    return results


def _tokens_left(model: PlainTransformer, image_set: ImageSet, reducer: Reducer | None) -> int:
    trace = Trace("tokens", layers=[-1])
    with evaluating(model):
        model(image_set.normalised(np.arange(1))[0], trace=trace, reducer=reducer)
    return trace["tokens", -1].shape[1]


def _time(
    model: PlainTransformer,
    images: Tensor,
    ways: list[ReducerResult],
    reducers: dict[str, Reducer | None],
    rounds: int,
) -> None:
    with evaluating(model), torch.inference_mode():
        times = alternate({way.name: partial(model, images, reducer=reducers[way.name]) for way in ways}, rounds)
    full = summary(times[ALL])["median"]
    for way in ways:
        way.seconds = times[way.name]
        way.speedup = full / summary(way.seconds)["median"]
