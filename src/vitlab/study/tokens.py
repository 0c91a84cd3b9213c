"""How much faster does a trained model get with fewer tokens, and what does it cost? Measured on this machine.

    study = study_tokens("runs/cifar10_56px/best", "cifar10")
    studies/tokens-.../{study.json, results.csv, table.md, plot.png}

Every way is judged on the whole test set, beside one that drops as many tokens in the same layers at random, and timed
against the same model with all its tokens: batches in turns, in one process. The speed-up is a ratio of medians.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.checkpoints.load import load_with_report
from vitlab.export.timing import alternate, summary
from vitlab.images.datasets import Data, open_data, subset
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import Trace
from vitlab.reduce import r_for, reducer_of
from vitlab.study.folder import PLOT, without_matplotlib, write_about, write_texts
from vitlab.study.grid import file_safe
from vitlab.training.batches import Pictures
from vitlab.training.evaluate import evaluating, look_at_all
from vitlab.training.labels import class_order
from vitlab.training.runs import to_csv, to_markdown

ALL = "all tokens"
SHARES = (0.25, 0.5, 0.75, 0.9)  # of the patches that ToMe merges away, over all layers
KEEPS = (0.9, 0.8, 0.7, 0.6, 0.5)  # at each of three layers: EViT


Watch = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]  # what is done, of how many pictures


@dataclass
class Way:
    """One way of having fewer tokens, and what came of it."""

    name: str
    tokens: int  # after the last layer
    top1: float
    agreement: float  # with the answers of the model with all tokens
    seconds: list[float] = field(default_factory=list)  # of a batch
    speedup: float = 1.0

    def row(self) -> dict[str, Any]:
        times = summary(self.seconds)
        return {
            "way": self.name,
            "tokens": self.tokens,
            "top1": self.top1,
            "agreement": self.agreement,
            "ms": 1000 * times["median"],
            "ms_quarter": 1000 * times["quarter"],
            "ms_three_quarters": 1000 * times["three_quarters"],
            "n": times["n"],
            "speedup": self.speedup,
        }


@dataclass
class TokenStudy:
    folder: Path
    title: str
    batch: int
    ways: list[Way]
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [way.row() for way in self.ways]


def study_tokens(
    checkpoint: str,
    source: str,
    *,
    path: str | None = None,
    ways: list[str] | None = None,
    batch: int = 8,
    rounds: int = 15,
    images: int | None = None,
    folder: Path | None = None,
    command: str = "",
    watch: Watch | None = None,
) -> TokenStudy:
    """`ways` as `reducer_of` reads them; left out, those of default_ways."""
    model, report = load_with_report(checkpoint)
    if not getattr(model, "blocks", None) or not model.config.classes:
        raise ValueError(f"{checkpoint}: fewer tokens are studied on a ViT with classes; this is a {model.family}.")
    if batch < 1 or rounds < 2:
        raise ValueError(f"batch={batch} must be at least 1 and rounds={rounds} at least 2.")
    reducers = {name: reducer_of(name) for name in ways or default_ways(model)}
    data = open_data(source, path=path)
    order = class_order(model.labels, data.classes) if model.labels else list(range(len(data.classes)))
    if order is None:
        raise ValueError(f"{checkpoint} was not trained on the classes of {source}, so it cannot be judged there.")
    pictures = _pictures(model, data, images)
    folder = folder or Path("studies") / file_safe(f"tokens-{Path(checkpoint).parent.name or checkpoint}")
    found = _judge(model, pictures, {ALL: None, **reducers}, order, watch)
    batch_of, _ = pictures.normalised(np.arange(min(batch, len(pictures))))
    _time(model, batch_of, found, {ALL: None, **reducers}, rounds)
    title = f"{Path(checkpoint).parent.name or checkpoint} on {Path(source).name}"
    study = TokenStudy(folder, title, len(batch_of), found, list(report.notes))
    _write(study, {"checkpoint": checkpoint, "source": source, "pictures": len(pictures)}, command)
    study.notes += without_matplotlib(lambda: _draw(study))
    return study


def default_ways(model: Any) -> list[str]:
    """ToMe, EViT where there is a class token, and for each the same number of tokens dropped at random."""
    depth, patches = len(model.blocks), math.prod(model.layout(*model.input_size).grid)
    counts = dict.fromkeys(r_for(share, patches=patches, depth=depth) for share in SHARES)
    ways = [f"tome:r={r}{schedule}" for schedule in ("", ",schedule=decreasing") for r in counts]
    ways += [f"evit:keep={keep}" for keep in KEEPS] if "class_attention" in model.traceable else []
    return ways + [f"random:like={way}" for way in ways]


def _pictures(model: Any, data: Data, images: int | None) -> Pictures:
    chosen = data.test or data.val
    if images is not None and images < len(chosen):
        chosen = subset(chosen, np.linspace(0, len(chosen) - 1, images).astype(int))  # spread over all
    return Pictures(chosen, model.preprocess)


def _judge(
    model: Any,
    pictures: Pictures,
    reducers: dict[str, Reducer | None],
    order: list[int],
    watch: Watch | None,
) -> list[Way]:
    found: list[Way] = []
    answers: dict[str, Tensor] = {}
    for name, reducer in reducers.items():
        look = partial(model, reducer=reducer)
        with nullcontext() if watch is None else watch(name, len(pictures)) as progress:
            logits, read, _ = look_at_all(model, look, model.config.classes, pictures, progress=progress)
        answers[name] = logits[read][:, order].argmax(dim=1)
        top1 = float((answers[name] == pictures.labels[read]).float().mean())
        agreement = float((answers[name] == answers[ALL]).float().mean())
        found.append(Way(name, _tokens_left(model, pictures, reducer), top1, agreement))
    return found


def _tokens_left(model: Any, pictures: Pictures, reducer: Reducer | None) -> int:
    trace = Trace("tokens", layers=[-1])
    with evaluating(model):
        model(pictures.normalised(np.arange(1))[0], trace=trace, reducer=reducer)
    return trace["tokens", -1].shape[1]


def _time(model: Any, images: Tensor, ways: list[Way], reducers: dict[str, Reducer | None], rounds: int) -> None:
    with evaluating(model), torch.inference_mode():
        times = alternate({way.name: partial(model, images, reducer=reducers[way.name]) for way in ways}, rounds)
    whole = summary(times[ALL])["median"]
    for way in ways:
        way.seconds = times[way.name]
        way.speedup = whole / summary(way.seconds)["median"]


def _write(study: TokenStudy, about: dict[str, Any], command: str) -> None:
    write_about(study.folder, "tokens", {"batch": study.batch, **about}, command)
    table = to_markdown([for_people(row) for row in study.rows])
    write_texts(study.folder, {"results.csv": to_csv(study.rows), "table.md": table})


def for_people(row: dict[str, Any]) -> dict[str, str | int]:
    """A row with units and the spread in one cell."""
    return {
        "way": row["way"],
        "tokens left": row["tokens"],
        "top-1": f"{row['top1']:.2%}",
        "agreement": f"{row['agreement']:.2%}",
        "ms": f"{row['ms']:.1f} ({row['ms_quarter']:.1f} .. {row['ms_three_quarters']:.1f})",
        "speed-up": f"{row['speedup']:.2f} x",
    }


def _draw(study: TokenStudy) -> None:
    from vitlab.study.plot import draw_tokens

    draw_tokens(study, study.folder / PLOT)
