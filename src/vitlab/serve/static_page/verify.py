"""Compare the graphs of a page with the library, before they are kept: same photos, same edits, every output.

No value may differ by more than 1e-4 of the largest of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.errors import ExportError
from vitlab.explain.clip_prompts import ask
from vitlab.explain.methods import METHODS
from vitlab.explain.reconstruct import reconstruct
from vitlab.layers.edit import Edit
from vitlab.layers.trace import Trace
from vitlab.models.base import Network, evaluating
from vitlab.models.mae import MaskedAutoencoder
from vitlab.models.two_towers import TwoTowers
from vitlab.optional import require
from vitlab.serve.static_page.graphs import AFTER, BEFORE, IN_BLOCKS, Knobs, plain_encoder

TOLERANCE = 1e-4
SENTENCE = "a photo of a cat"
Outputs = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class OutputDifference:
    """The largest difference of one output, and the largest value that it was compared with."""

    output: str
    difference: float
    largest: float

    @property
    def passed(self) -> bool:
        return self.difference <= TOLERANCE * max(1.0, self.largest)


class PageSession:
    """A graph of a page in ONNX Runtime, on the CPU."""

    def __init__(self, path: Path):
        require("page", "onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.outputs = [output.name for output in self.session.get_outputs()]

    def __call__(self, **inputs: Tensor) -> Outputs:
        values: Any = self.session.run(None, {name: value.numpy() for name, value in inputs.items()})
        return dict(zip(self.outputs, values, strict=True))


def edits(model: Network) -> list[dict[str, Any]]:
    """Nothing changed, then every knob: two edits, as positions are removed or shuffled."""
    encoder = plain_encoder(model)
    heads = [[0, 0], [len(encoder.blocks) - 1, encoder.config.heads - 1]]
    changed = {"mask_patches": [0, 2], "drop_heads": heads, "temperature": 1.7}
    moved = [{"positions": "removed"}, {"positions": "shuffled", "seed": 5}] if encoder.positions is not None else [{}]
    return [{}, {**changed, **moved[0]}, {"scale_by_sqrt_d": False, **moved[-1]}]


def knobs_of(model: Network, edit: dict[str, Any]) -> Knobs:
    """The inputs of a graph that do what an edit does; static.js has the same in JavaScript."""
    encoder, (height, width) = plain_encoder(model), model.require_preprocess().size
    knobs = Knobs.neutral(encoder, (height, width))
    for patch in edit.get("mask_patches", []):
        knobs.patch_factors[patch] = 0
    for layer, head in edit.get("drop_heads", []):
        knobs.head_factors[layer, head] = 0
    root = 1.0 if edit.get("scale_by_sqrt_d", True) else encoder.config.head_width**0.5
    knobs.score_factor.fill_(root / edit.get("temperature", 1.0))
    if edit.get("positions") == "removed":
        knobs.position_factor.zero_()
    if edit.get("positions") == "shuffled":
        generator = torch.Generator().manual_seed(edit["seed"])
        knobs.position_order.copy_(torch.randperm(len(knobs.position_order), generator=generator))
    return knobs


def compare_inside(model: Network, session: PageSession, images: Tensor) -> list[OutputDifference]:
    results = []
    for image in images.split(1):
        for edit in edits(model):
            expected = _inside(model, image, Edit.from_json(edit))
            actual = session(images=image, **knobs_of(model, edit)._asdict())
            results += _differences(expected, actual)
    return results


@torch.no_grad()
def _inside(model: Network, image: Tensor, edit: Edit) -> dict[str, Tensor]:
    encoder = plain_encoder(model)
    kinds = [kind for kind in (*BEFORE, *IN_BLOCKS, *AFTER) if kind in encoder.traceable]
    trace = Trace(*kinds)
    with evaluating(model):
        output = encoder(image, trace=trace, edit=edit)[0]
        values = {kind: trace.stack(kind)[:, 0] if kind in IN_BLOCKS else trace[kind][0] for kind in kinds}
        if encoder.config.classes:
            tokens = [trace["tokens", layer] for layer in trace.layers]
            tokens = [z if encoder.norm is None else encoder.norm(z) for z in tokens]
            values |= {"logits": output, "by_depth": torch.cat([encoder.forward_head(z) for z in tokens])}
        if isinstance(model, TwoTowers):
            values["embedding"] = model.encode_image(image, edit=edit)[0]
    return values


def compare_heat(model: Network, session: PageSession, images: Tensor) -> list[OutputDifference]:
    """For the first and the last class; of a CLIP, for a sentence."""
    results = []
    if isinstance(model, TwoTowers):
        classifier = ask(model, [SENTENCE])
        targets = {0: classifier.sentences[0].detach()}
    else:
        classifier, classes = model, model.classes
        targets = {number: torch.eye(classes)[number] for number in (0, classes - 1)}
    for image in images.split(1):
        for number, weights in targets.items():
            expected = {name: METHODS[name](classifier, image, number)[0] for name in session.outputs}
            actual = session(images=image, weights=weights, **knobs_of(model, {})._asdict())
            results += _differences(expected, actual)
    return results


def compare_reconstruction(model: MaskedAutoencoder, session: PageSession, images: Tensor) -> list[OutputDifference]:
    results = []
    for image in images.split(1):
        for ratio in (0.75, 0.4):
            expected = reconstruct(model, image, mask_ratio=ratio, seed=3)
            hidden = expected.mask[0].flatten()
            actual = session(images=image, visible=(~hidden).nonzero()[:, 0])
            error = torch.from_numpy(actual["errors"])[hidden].mean().numpy()
            results += _differences(
                {"painted": expected.painted[0], "error": expected.error[0]}, {**actual, "error": error}
            )
    return results


@torch.no_grad()
def compare_text(model: TwoTowers, session: PageSession) -> list[OutputDifference]:
    ids = model.require_tokenizer()([SENTENCE])
    return _differences({"sentence": model.encode_text(ids)[0]}, session(ids=ids))


def _differences(expected: Mapping[str, Tensor], actual: Outputs) -> list[OutputDifference]:
    results = []
    for name, value in expected.items():
        difference = np.abs(value.numpy() - actual[name])
        worst = float(difference.max()) if np.isfinite(difference).all() else float("inf")
        results.append(OutputDifference(name, worst, float(value.abs().max())))
    return results


def require_equal(name: str, graph: str, differences: list[OutputDifference]) -> None:
    if failed := [d for d in differences if not d.passed]:
        worst = max(failed, key=lambda d: d.difference)
        raise ExportError(
            f"{name}: its graph {graph!r} differs from the model: {worst.output} by {worst.difference:.1e}, of values "
            f"up to {worst.largest:.3g}, where {TOLERANCE:.0e} is allowed. It was not kept."
        )
