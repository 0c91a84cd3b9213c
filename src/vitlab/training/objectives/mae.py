"""MAE: most patches are hidden, and the model predicts their pixels (models/mae.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitlab.images.randomness import torch_seed
from vitlab.models.base import Network
from vitlab.models.mae import MaskedAutoencoder
from vitlab.text.tokenizer import Tokenizer
from vitlab.training.batches import ImageSet, TrainingBatch
from vitlab.training.evaluate import evaluating
from vitlab.training.finetune import build_pretraining_model
from vitlab.training.objectives import diagnosis
from vitlab.training.objectives.base import AnyScores, Forward, Inputs, MicroStep, SelfSupervised
from vitlab.training.objectives.diagnosis import Finding, Line
from vitlab.training.recipe import Recipe

EVALUATED = 1024  # images whose reconstruction is measured
NOISE = 4  # coordinate of the draw that hides their patches
MASK = "In the mask 1 is hidden and 0 visible, and the loss counts the hidden: see choose_visible in models/mae.py."


class MaskedReconstruction(SelfSupervised):
    model: MaskedAutoencoder
    head = ("decoder.",)
    encoder_waits = True  # the gradients of a random decoder spoil it: docs/benchmarks.md

    @classmethod
    def build_model(
        cls, recipe: Recipe, classes: list[str], channels: int, tokenizer: Tokenizer | None
    ) -> tuple[Network, list[str]]:
        return build_pretraining_model(recipe.model, MaskedAutoencoder, channels, family="mae", example="mae_cifar")

    @classmethod
    def preview_notes(cls, model: Network) -> list[str]:
        ratio = model.config.mask_ratio
        return [f"the model itself hides {ratio:.0%} of the patches, which is not drawn: vitlab explain reconstruct"]

    def inputs(self, batch: TrainingBatch, at: MicroStep) -> Inputs:
        return {"images": batch.images.to(self.who.device)}

    def loss(self, forward: Forward, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        out = forward(inputs["images"])
        if not self.logged:
            return out.loss, {}
        return out.loss, reconstruction_numbers(out.prediction, self.model.target(inputs["images"]), out.mask)

    def rank(self, scores: AnyScores, model: Network, image_set: ImageSet) -> tuple[float, dict[str, float]]:
        """By the loss on validation images: k-NN says little about what fine-tuning will reach."""
        error = self._error(model, image_set)
        return -error, {"reconstruction": error}

    def _error(self, model: Network, image_set: ImageSet) -> float:
        """The loss on the first images, with the same patches hidden each time."""
        few = np.arange(min(len(image_set), EVALUATED))
        noise = torch.Generator().manual_seed(torch_seed(self.recipe.run.seed, NOISE))
        total, count = 0.0, 0
        with evaluating(model):
            for part in np.array_split(few, -(-len(few) // 256)):
                images, kept = image_set.normalised(part)
                patches = math.prod(model.grid_of((images.shape[-2], images.shape[-1])))
                hidden = torch.rand(len(kept), patches, generator=noise)
                loss = model(images.to(self.who.device), hidden.to(self.who.device)).loss
                total, count = total + float(loss) * len(kept), count + len(kept)
        return total / count

    def diagnose(self, lines: Sequence[Line]) -> list[Finding]:
        return findings(lines, mask_ratio=self.model.config.mask_ratio, settled=self.plan.total // 5)


def reconstruction_numbers(prediction: Tensor, target: Tensor, mask: Tensor) -> dict[str, float]:
    """(B, N, P), (B, N, P), (B, N) -> errors over hidden and visible patches, that of the mean patch, and the share."""
    with torch.no_grad():
        error = (prediction.float() - target.float()).square().mean(dim=-1)  # (B, N)
        variance = (target.float() - target.float().mean(dim=(0, 1))).square().mean(dim=-1)
        return {
            "hidden_error": float((error * mask).sum() / mask.sum().clamp_min(1)),
            "visible_error": float((error * (1 - mask)).sum() / (1 - mask).sum().clamp_min(1)),
            "baseline": float((variance * mask).sum() / mask.sum().clamp_min(1)),
            "hidden_share": float(mask.float().mean()),
        }


def findings(lines: Sequence[Line], *, mask_ratio: float | None = None, settled: int = 0) -> list[Finding]:
    """lines: oldest first, with `reconstruction_numbers`; settled: the step from which the loss counts.

    A falling loss alone proves nothing: a model whose mask is inverted learns to copy what it sees.
    """
    results = diagnosis.general_findings(lines)
    if any(finding.name == "not finite" for finding in results):
        return results
    recent = diagnosis.recent_lines(lines, settled)
    share = diagnosis.mean_of(recent, "hidden_share")
    if share is not None and mask_ratio is not None and abs(share - mask_ratio) > 0.1:
        inverted = abs(share - (1 - mask_ratio)) < 0.1
        message = f"the loss counts {share:.0%} of the patches, but {mask_ratio:.0%} are to be hidden"
        message += ": those that are visible. The mask is the wrong way round." if inverted else "."
        results.append(Finding("wrong mask", message, MASK))
    if len(recent) < diagnosis.ENOUGH:
        return results
    loss, first = (
        diagnosis.mean_of(recent, "loss"),
        diagnosis.mean_of(diagnosis.recent_lines(lines, 0, early=True), "loss"),
    )
    hidden, visible = diagnosis.mean_of(recent, "hidden_error"), diagnosis.mean_of(recent, "visible_error")
    falls = loss is not None and first is not None and loss < 0.9 * first
    if hidden is not None and visible is not None and falls and hidden > 3 * visible:
        message = (
            f"visible patches are painted well (error {visible:.4f}), hidden ones are not ({hidden:.4f}): "
            "the loss is counted over the visible."
        )
        results.append(Finding("copies what it sees", message, MASK))
    baseline = diagnosis.mean_of(recent, "baseline")
    if loss is not None and baseline is not None and loss >= diagnosis.NO_BETTER * baseline:
        message = f"the loss is {loss:.4f}, that of the mean patch everywhere {baseline:.4f}: nothing was learned yet."
        remedy = "Train longer (run.epochs), learn faster (optim.lr times 3), or hide less: model.mask_ratio=0.6."
        results.append(Finding("no better than the mean", message, remedy))
    return results
