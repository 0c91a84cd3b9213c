"""Logit lens: which class each token would be read as, after every layer (nostalgebraist, 2020).

    result = lens("bundled:cifar10", "cat.jpg")
    result.probabilities[0]                    # (L, classes): what the head would say if the network ended there
    result.patch_class[0, 3]                   # (grid_h, grid_w): what it would say of each patch after layer 3

The tokens after a layer go through the network's own last norm and head. A patch is read as if it were all that the
head reads: its token stands in the place of the class token, or of the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.explain.inputs import Images, TokenModel, run_trace, wide
from vitlab.explain.relevance import Target, class_numbers, classifier, target_parts
from vitlab.explain.stages import last_stage
from vitlab.layers.trace import check_offered
from vitlab.models.base import class_labels, evaluation_mode
from vitlab.models.hierarchy import Hierarchy
from vitlab.tables import Bar, Cell, Table, Tabular

AT_ONCE = 4096  # tokens that are read together


@dataclass
class Lens(Tabular):
    """What the head reads after each of `layers`."""

    layers: list[int]
    logits: Tensor  # (B, layers, classes), of what the head reads: the class token, or the mean of the patches
    probabilities: Tensor  # (B, layers, classes); of a model of numbers, its values
    patch_class: Tensor  # (B, layers, grid_h, grid_w): the top class of each patch
    patch_probability: Tensor  # (B, layers, grid_h, grid_w): its probability
    target: list[int]  # the class of each image that is followed
    target_probability: Tensor  # (B, layers, grid_h, grid_w): its probability at each patch
    labels: list[str]  # of all classes

    def table(self) -> Table:
        rows = [[str(i), *row] for i in range(len(self.target)) for row in self.image_rows(i)]
        of = {self.labels[number] for number in self.target}
        titles = [
            "image",
            "after layer",
            "top class",
            "probability",
            "",
            "of " + (of.pop() if len(of) == 1 else "target"),
        ]
        right = {"probability", titles[-1]}
        if len(self.target) == 1:
            titles, rows = titles[1:], [row[1:] for row in rows]
        return Table(titles, rows, right, ["What the head would read after each layer"])

    def image_rows(self, i: int) -> list[list[Cell]]:
        """After each layer: its number from 1, the top class, its probability, and that of the target."""
        best = self.probabilities[i].max(-1)  # (layers,)
        numbers, shares = best.indices.tolist(), best.values.tolist()
        followed = self.probabilities[i, :, self.target[i]].tolist()
        return [
            [str(layer + 1), self.labels[number], f"{share:.3f}", Bar(share), f"{own:.3f}"]
            for layer, number, share, own in zip(self.layers, numbers, shares, followed, strict=True)
        ]


@torch.no_grad()
def lens(model: ModelOrName, images: Images, target: Target = None, *, batch_size: int = 8) -> Lens:
    """The logit lens of every layer and patch; `target` (default: each image's top class) is followed through them.

    In stages (Swin, PVT, Twins) only the last stage has tokens that the head can read: its layers, on its own grid.
    """
    model = classifier(model)
    check_offered(["tokens"], model.traceable)
    layers = last_stage(model)
    parts: list[tuple[Tensor, ...]] = []
    chosen: list[int] = []
    for batch, classes in target_parts(model, images, target, batch_size):
        trace = run_trace(model, batch, "tokens", layers=layers)
        tokens = [_normed(model, trace["tokens", layer]) for layer in layers]
        rows, columns = model.layout(*batch.shape[-2:]).grid
        if isinstance(model, Hierarchy):
            rows, columns = model.config.grids(*batch.shape[-2:])[-1]
        with evaluation_mode(model):
            logits = torch.stack([wide(model.forward_head(z)) for z in tokens], dim=1)  # (B, layers, classes)
            numbers = class_numbers(model, logits[:, -1], classes)  # (B,)
            read = [_read_patches(model, z[:, -rows * columns :], numbers) for z in tokens]
        maps = (torch.stack(each, dim=1).unflatten(-1, (rows, columns)) for each in zip(*read, strict=True))
        parts.append((logits, model.task.scores(logits), *maps))
        chosen += numbers.tolist()
    labels = class_labels(model)
    logits, probabilities, top, probability, of_target = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    return Lens(list(layers), logits, probabilities, top, probability, chosen, of_target, labels)


def _normed(model: TokenModel, z: Tensor) -> Tensor:
    norm = model.norm_after(len(model.stages) - 1) if isinstance(model, Hierarchy) else model.norm
    return z if norm is None else norm(z)


def _read_patches(model: TokenModel, patches: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every patch (B, N, D) the top class, its probability, and that of the target class: (B, N) each."""
    B, N, _ = patches.shape
    copies = 1 if isinstance(model, Hierarchy) else len(model.config.prefix) + 1  # wherever the head looks
    alone = patches.flatten(0, 1)[:, None].expand(-1, copies, -1)  # (B N, copies, D)
    scores = torch.cat([model.task.scores(wide(model.forward_head(part))) for part in alone.split(AT_ONCE)])
    best = scores.max(dim=1)
    of_target = scores.gather(1, target.repeat_interleave(N)[:, None])
    return best.indices.view(B, N), best.values.view(B, N), of_target.view(B, N)
