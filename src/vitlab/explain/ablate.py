"""Head importance by ablation: how the logit of a class changes without one head, one MLP or one attention layer.

    result = ablate("bundled:cifar10", "cat.jpg", how="mean")
    result.heads[0]                            # (L, h): change of the class's logit
    result.heads_probability[0]                # (L, h): and of its probability

One pass for each part, with an Edit: "zero" takes away what it gives, "mean" puts the mean over the image's patches in
its place, which keeps the network nearer to what it knows (Michel et al., arXiv:1905.10650).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.inputs import Images, TokenModel, wide
from vitlab.explain.relevance import Target, class_numbers, classifier, target_parts
from vitlab.explain.stages import heads_at
from vitlab.layers.edit import Edit
from vitlab.layers.trace import check_offered
from vitlab.models.base import class_labels, evaluation_mode
from vitlab.tables import Table, Tabular

How = Literal["zero", "mean"]


@dataclass
class Ablation(Tabular):
    """Changes against the whole network, of the logit and of the probability of each image's class."""

    how: How
    target: list[int]
    logit: Tensor  # (B,), of the whole network
    probability: Tensor  # (B,)
    heads: Tensor  # (B, L, h); nan where a layer has fewer heads than another
    heads_probability: Tensor
    attention: Tensor  # (B, L): without all heads of a layer
    attention_probability: Tensor
    mlps: Tensor  # (B, L)
    mlps_probability: Tensor
    labels: list[str]  # of all classes

    def table(self) -> Table:
        heads, attention, mlps = (part.mean(0).tolist() for part in (self.heads, self.attention, self.mlps))
        titles = ["without", *(f"head {n + 1}" for n in range(self.heads.shape[2])), "attention", "MLP"]
        rows = [
            [f"layer {layer + 1}", *("" if math.isnan(value) else f"{value:+.3f}" for value in (*row, whole, mlp))]
            for layer, (row, whole, mlp) in enumerate(zip(heads, attention, mlps, strict=True))
        ]
        of = ", ".join(dict.fromkeys(self.labels[number] for number in self.target))
        mean = f", mean of {len(self.target)} images" if len(self.target) > 1 else ""
        return Table(titles, rows, titles[1:], [f"Change of the logit of {of}{mean}"], prose=titles[:1])


@torch.no_grad()
def ablate(
    model: ModelOrName, images: Images, target: Target = None, how: How = "zero", *, batch_size: int = 8
) -> Ablation:
    """Runs the network once for every head, attention layer and MLP."""
    model = classifier(model)
    check_offered(["heads", "attention_out", "mlp_out"], model.traceable)
    if how not in ("zero", "mean"):
        raise UsageError(f'how={how!r} must be "zero" or "mean".')
    counts = [heads_at(model, layer) for layer in range(len(model.blocks))]
    places = [("heads", layer, head) for layer, count in enumerate(counts) for head in range(count)]
    places += [(kind, layer, 0) for kind in ("attention_out", "mlp_out") for layer in range(len(counts))]
    logits_before: list[Tensor] = []
    chosen: list[int] = []
    changes = {place: list[Tensor]() for place in places}
    for batch, classes in target_parts(model, images, target, batch_size):
        with evaluation_mode(model):
            logits = wide(model(batch))
            numbers = class_numbers(model, logits, classes)
            base = _of_class(model, logits, numbers)  # (2, B)
            for kind, layer, head in places:
                edit = getattr(Edit(), how)(kind, layer=layer, heads=[head] if kind == "heads" else None)
                changes[kind, layer, head].append(_of_class(model, wide(model(batch, edit=edit)), numbers) - base)
        logits_before.append(base)
        chosen += numbers.tolist()
    logit, probability = torch.cat(logits_before, dim=1).cpu()
    tables = {
        kind: torch.full((2, len(logit), len(counts), max(counts) if kind == "heads" else 1), torch.nan)
        for kind in ("heads", "attention_out", "mlp_out")
    }
    for (kind, layer, head), parts in changes.items():
        tables[kind][:, :, layer, head] = torch.cat(parts, dim=1).cpu()
    attention, mlps = tables["attention_out"][..., 0], tables["mlp_out"][..., 0]
    labels = class_labels(model)
    return Ablation(how, chosen, logit, probability, *tables["heads"], *attention, *mlps, labels=labels)


def _of_class(model: TokenModel, logits: Tensor, numbers: Tensor) -> Tensor:
    """(B, classes), (B,) -> (2, B): the logit and the probability of each image's class."""
    both = torch.stack([logits, model.task.scores(logits).to(logits.dtype)])  # (2, B, classes)
    return both.gather(2, numbers.expand(2, -1)[..., None])[..., 0]
