"""Activation patching: an image goes through the network, and a part of another one's pass takes the place of its own.

    result = patch("bundled:cifar10", "cat.jpg", "dog.jpg")
    result.moved(result.groups["patches"])     # (L,): 0 is still the first image's logit, 1 the other one's

Where the logit follows the other image, the patched part carried what the class is told by (Meng et al.,
arXiv:2202.05262). All tokens of one layer always give 1: everything after them is the other image's pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.inputs import Images, TokenModel, as_batch, run_trace, wide
from vitlab.explain.relevance import Target, class_numbers, classifier
from vitlab.explain.stages import Stages, heads_at
from vitlab.layers.edit import Edit
from vitlab.layers.trace import Trace, check_offered
from vitlab.models.base import evaluation_mode
from vitlab.models.hierarchy import Hierarchy
from vitlab.tables import Table, Tabular

STEPS = {"attention": "attention_out", "MLP": "mlp_out"}  # what a half of a block adds, of all tokens


@dataclass
class Patching(Tabular):
    """Logits of one class: of both images, and of the first with parts of the other."""

    target: int
    logit: float  # of the first image
    other_logit: float
    label: str  # of this class
    groups: dict[str, Tensor]  # (L,) each: "attention" and "MLP" of all tokens; where there are, "prefix" and "patches"
    heads: Tensor  # (L, h); nan where a layer has fewer heads than another
    patches: Tensor | None = field(default=None)  # (L, grid_h, grid_w): one patch's token alone

    def table(self) -> Table:
        columns = {name: self.moved(values).tolist() for name, values in self.groups.items()}
        rows = [
            [str(layer + 1), *("" if math.isnan(value) else f"{value:.2f}" for value in row)]
            for layer, row in enumerate(zip(*columns.values(), strict=True))
        ]
        heading = [
            f"Logit of {self.label}: {self.logit:.4f} of the image, {self.other_logit:.4f} of the other",
            "0: nothing has moved. 1: as the other image.",
        ]
        return Table(["layer", *columns], rows, ["layer", *columns], heading)

    def moved(self, logits: Tensor) -> Tensor:
        """How far logits moved: 0 is the first image's, 1 the other one's; nan where both have the same."""
        way = self.other_logit - self.logit
        return (logits - self.logit) / way if abs(way) > 1e-6 else torch.full_like(logits, torch.nan)


@torch.no_grad()
def patch(
    model: ModelOrName,
    image: Images,
    other: Images,
    target: Target = None,
    *,
    by_patch: bool = False,
    batch_size: int = 8,
) -> Patching:
    """Patches each layer in turn: groups of tokens, each half of a block, and each head.

    target     the class whose logit is measured. None: the other image's top class
    by_patch   also each patch's token alone: as many passes as layers times patches
    """
    model = classifier(model)
    check_offered(["tokens", "heads", *STEPS.values()], model.traceable)
    images, others = (as_batch(model, each).images for each in (image, other))
    if len(images) != 1 or images.shape != others.shape:
        raise UsageError(
            f"patching is between two images of one size, found {tuple(images.shape)} and {tuple(others.shape)}."
        )
    own = run_trace(model, images, "tokens")
    theirs = run_trace(model, others, "tokens", "heads", *STEPS.values())
    with evaluation_mode(model):
        number = int(class_numbers(model, wide(model(others)), target)[0])
        logit, other_logit = (float(wide(model(each))[0, number]) for each in (images, others))

        def run(edit: Edit, count: int = 1) -> Tensor:
            return wide(model(images.expand(count, -1, -1, -1), edit=edit))[:, number].cpu()  # (count,)

        depth = len(model.blocks)
        groups = {name: torch.full((depth,), torch.nan) for name in _groups(model, images)}
        heads = torch.full((depth, max(heads_at(model, layer) for layer in range(depth))), torch.nan)
        for layer in range(depth):
            for name, kind in STEPS.items():
                groups[name][layer] = run(Edit().replace(kind, theirs[kind, layer], layer=layer))[0]
            tokens, prefix = theirs["tokens", layer], _prefix(model, layer, images)
            for name, places in (("prefix", range(prefix)), ("patches", range(prefix, tokens.shape[1]))):
                if prefix:
                    edit = Edit().replace("tokens", tokens, layer=layer, tokens=places)
                    groups[name][layer] = run(edit)[0]
            for head in range(heads_at(model, layer)):
                heads[layer, head] = run(Edit().replace("heads", theirs["heads", layer], layer=layer, heads=[head]))[0]
        patches = _by_patch(model, images, own, theirs, run, batch_size) if by_patch else None
    return Patching(number, logit, other_logit, model.label_of(number), groups, heads, patches)


def _groups(model: TokenModel, images: Tensor) -> list[str]:
    last = _prefix(model, len(model.blocks) - 1, images)
    return [*STEPS, *(["prefix", "patches"] if last else [])]


def _prefix(model: TokenModel, layer: int, images: Tensor) -> int:
    """Tokens before the patches at this layer."""
    if isinstance(model, Hierarchy):
        return model.places(*images.shape[-2:])[layer].prefix
    return len(model.config.prefix)


def _by_patch(model: TokenModel, images: Tensor, own: Trace, theirs: Trace, run, batch_size: int) -> Tensor:
    """(L, grid_h, grid_w): many copies of the image in a batch, each with one patch's token of the other."""
    stages = Stages(model, *images.shape[-2:]) if isinstance(model, Hierarchy) else None
    maps: list[Tensor] = []
    for layer in range(len(model.blocks)):
        prefix, mine, other = _prefix(model, layer, images), own["tokens", layer], theirs["tokens", layer]
        logits: list[Tensor] = []
        for numbers in torch.arange(prefix, mine.shape[1]).split(batch_size):
            mixed = mine.repeat(len(numbers), 1, 1)  # (n, N, D)
            mixed[torch.arange(len(numbers)), numbers] = other[0, numbers]
            logits.append(run(Edit().replace("tokens", mixed, layer=layer), len(numbers)))
        row = torch.cat(logits)  # (N,)
        grid = model.layout(*images.shape[-2:]).grid
        maps.append(row.unflatten(0, grid) if stages is None else stages.paint(row, stages.layers[layer].stage))
    return torch.stack(maps)
