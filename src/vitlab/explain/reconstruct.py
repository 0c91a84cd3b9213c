"""Masked patches reconstructed by a masked autoencoder: figure 2 of arXiv:2111.06377.

    result = reconstruct(model, ["cat.jpg", "dog.jpg"], mask_ratio=0.75, seed=0)
    result.painted                             # (B, C, H, W), normalised like result.images

A model that predicts normalised pixels (norm_pix) gets the mean and deviation of the true patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName, as_network
from vitlab.errors import UsageError
from vitlab.explain.inputs import Images, batches, token_model, wide
from vitlab.images.randomness import uniform
from vitlab.models.base import evaluation_mode
from vitlab.models.mae import MaskedAutoencoder
from vitlab.tables import Table, Tabular


@dataclass(frozen=True)
class Reconstruction(Tabular):
    """Tensors on the CPU; images are normalised."""

    images: Tensor  # (B, C, H, W), the originals
    mask: Tensor  # (B, grid_h, grid_w), True where hidden
    prediction: Tensor  # (B, N, P*P*C), the decoder's output
    painted: Tensor  # (B, C, H, W), the prediction as images
    error: Tensor  # (B,), loss over the hidden patches of each image

    def table(self) -> Table:
        (H, W), patches = self.images.shape[-2:], self.mask[0].numel()
        hidden = [f"{int(mask.sum())} of {patches}" for mask in self.mask]
        rows = [
            [str(i), count, f"{error:.4g}"] for i, (count, error) in enumerate(zip(hidden, self.error, strict=True))
        ]
        heading = [f"Reconstruction of {len(rows)} image{'s' if len(rows) > 1 else ''} of {H} x {W}"]
        return Table(["image", "hidden patches", "error"], rows, ("image", "hidden patches", "error"), heading)

    @property
    def hidden(self) -> Tensor:
        """(B, 1, H, W), True at every hidden pixel."""
        (H, W), (rows, columns) = self.images.shape[-2:], self.mask.shape[-2:]
        spread = self.mask.repeat_interleave(H // rows, dim=1).repeat_interleave(W // columns, dim=2)
        return spread[:, None]

    @property
    def pasted(self) -> Tensor:
        """(B, C, H, W): visible patches of the original, hidden ones painted."""
        return torch.where(self.hidden, self.painted, self.images)


@torch.no_grad()
def reconstruct(
    model: ModelOrName,
    images: Images,
    *,
    mask_ratio: float | None = None,
    seed: int = 0,
    mask: Tensor | None = None,
    batch_size: int = 8,
) -> Reconstruction:
    """Mask patches, encode the rest, decode. The mask depends on the seed and the image's number only.

    mask_ratio   share of masked patches; None: the model's own
    mask         or the mask of every image: (grid_h, grid_w), True where hidden
    """
    model = masked_autoencoder(model)
    if mask_ratio is not None and not 0 < mask_ratio < 1:
        raise UsageError(f"mask_ratio={mask_ratio:g} is a share: above 0 and below 1, e.g. 0.75.")
    parts: list[Reconstruction] = []
    first = 0
    for batch in batches(model.encoder, images, batch_size):
        x = batch.images
        rows, columns = model.encoder.layout(*x.shape[-2:]).grid
        noise = torch.from_numpy(uniform(seed, first + np.arange(len(x)), count=rows * columns))  # (B, N)
        if mask is not None:
            mask_ratio, noise = _noise_of(mask, (rows, columns), len(x))
        with evaluation_mode(model):
            out = model(x, noise, mask_ratio=mask_ratio)
        error = (wide(out.prediction) - wide(model.target(x))).square().mean(-1)  # (B, N)
        each = (error * out.mask).sum(1) / out.mask.sum(1)  # (B,)
        painted = model.to_images(wide(out.prediction), wide(x))
        hidden = out.mask.bool().unflatten(1, (rows, columns))
        values = (wide(x), hidden, wide(out.prediction), painted, each)
        parts.append(Reconstruction(*(value.cpu() for value in values)))
        first += len(x)
    names = ("images", "mask", "prediction", "painted", "error")
    return Reconstruction(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def _noise_of(mask: Tensor, grid: tuple[int, int], images: int) -> tuple[float, Tensor]:
    """The ratio and noise that produce this mask: the model keeps the patches of the lowest noise."""
    if tuple(mask.shape) != grid:
        raise UsageError(f"mask is {tuple(mask.shape)} but the patches are {grid[0]} x {grid[1]}.")
    hidden = int(mask.sum())
    if not 0 < hidden < mask.numel():
        raise UsageError(f"mask hides {hidden} of {mask.numel()} patches: hide at least one, and leave at least one.")
    visible = mask.numel() - hidden
    return 1 - (visible + 0.5) / mask.numel(), mask.flatten().float().expand(images, -1)


def masked_autoencoder(model: ModelOrName) -> MaskedAutoencoder:
    """The model, or the one that a name loads; raises if it has no decoder."""
    model = as_network(model)
    if isinstance(model, MaskedAutoencoder):
        return model
    token_model(model.encoder)
    raise UsageError(
        f"this is a {model.family} model without a decoder, so it cannot reconstruct images. Most released MAE files "
        "hold the encoder alone: take one with its decoder (transformers' ViTMAEForPreTraining, or facebook's file "
        "with decoder_* in it), or train one: vitlab train mae_cifar10."
    )
