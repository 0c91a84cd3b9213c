"""What a masked autoencoder paints where patches were hidden from it: the pictures of figure 2 of arXiv:2111.06377.

    found = reconstruct(model, ["cat.jpg", "dog.jpg"], mask_ratio=0.75, seed=0)
    found.painted                              # (B, C, H, W), normalised like found.images

Where the model paints normalised pixels (norm_pix), mean and deviation of the true patches are put back: they are not
the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.explain.inputs import Images, batches, check_model, evaluating, wide
from vitlab.images.randomness import uniform
from vitlab.models.mae import MaskedAutoencoder


@dataclass(frozen=True)
class Reconstruction:
    """On the CPU; images are normalised, as the model reads them."""

    images: Tensor  # (B, C, H, W), as they are
    mask: Tensor  # (B, grid_h, grid_w), True where hidden
    prediction: Tensor  # (B, N, P*P*C), as the decoder gives it
    painted: Tensor  # (B, C, H, W), the same as images
    error: Tensor  # (B,), each picture's loss: of its hidden patches

    @property
    def hidden(self) -> Tensor:
        """(B, 1, H, W), True at every pixel that was hidden."""
        (H, W), (rows, columns) = self.images.shape[-2:], self.mask.shape[-2:]
        spread = self.mask.repeat_interleave(H // rows, dim=1).repeat_interleave(W // columns, dim=2)
        return spread[:, None]

    @property
    def pasted(self) -> Tensor:
        """(B, C, H, W): visible patches as they are, the others painted."""
        return torch.where(self.hidden, self.painted, self.images)


@torch.no_grad()
def reconstruct(
    model: MaskedAutoencoder,
    images: Images,
    *,
    mask_ratio: float | None = None,
    seed: int = 0,
    mask: Tensor | None = None,
    batch_size: int = 8,
) -> Reconstruction:
    """Hide patches, encode the rest, paint. Which are hidden is a function of the seed and the picture's number.

    mask_ratio   another share than the model's own
    mask         or which ones, the same in every picture: (grid_h, grid_w), True where hidden
    """
    check_decoder(model)
    parts: list[Reconstruction] = []
    first = 0
    for batch in batches(model.encoder, images, batch_size):
        x = batch.images
        rows, columns = model.encoder.layout(*x.shape[-2:]).grid
        noise = torch.from_numpy(uniform(seed, first + np.arange(len(x)), count=rows * columns))  # (B, N)
        if mask is not None:
            mask_ratio, noise = _chosen(mask, (rows, columns), len(x))
        with evaluating(model):
            out = model(x, noise, mask_ratio=mask_ratio)
        error = (wide(out.prediction) - wide(model.target(x))).square().mean(-1)  # (B, N)
        each = (error * out.mask).sum(1) / out.mask.sum(1)  # (B,)
        painted = model.picture(wide(out.prediction), wide(x))
        hidden = out.mask.bool().unflatten(1, (rows, columns))
        found = (wide(x), hidden, wide(out.prediction), painted, each)
        parts.append(Reconstruction(*(value.cpu() for value in found)))
        first += len(x)
    names = ("images", "mask", "prediction", "painted", "error")
    return Reconstruction(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def _chosen(mask: Tensor, grid: tuple[int, int], images: int) -> tuple[float, Tensor]:
    """The ratio and the noise by which the model hides just these patches: it keeps those of the lowest noise."""
    if tuple(mask.shape) != grid:
        raise ValueError(f"mask is {tuple(mask.shape)} but the patches are {grid[0]} x {grid[1]}.")
    hidden = int(mask.sum())
    if not 0 < hidden < mask.numel():
        raise ValueError(f"mask hides {hidden} of {mask.numel()} patches: hide at least one, and leave at least one.")
    visible = mask.numel() - hidden
    return 1 - (visible + 0.5) / mask.numel(), mask.flatten().float().expand(images, -1)


def check_decoder(model: Any) -> None:
    """Refuse what cannot paint."""
    if isinstance(model, MaskedAutoencoder):
        return
    check_model(getattr(model, "encoder", model))
    raise ValueError(
        f"this is a {model.family} model without a decoder, so it cannot reconstruct pictures. Most released MAE files "
        "hold the encoder alone: take one with its decoder (transformers' ViTMAEForPreTraining, or facebook's file "
        "with decoder_* in it), or train one: vitlab train mae_cifar10."
    )
