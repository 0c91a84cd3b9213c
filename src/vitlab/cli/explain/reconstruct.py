"""vitlab explain reconstruct."""

from __future__ import annotations

from typing import Any

import torch

from vitlab.cli.console import out as console
from vitlab.cli.explain.job import Options, finish, start
from vitlab.explain import draw
from vitlab.explain.reconstruct import check_decoder
from vitlab.explain.reconstruct import reconstruct as rebuild
from vitlab.printable import one_line


def reconstruct(options: Options, mask_ratio: float | None, seed: int) -> None:
    if mask_ratio is not None and not 0 < mask_ratio < 1:
        raise ValueError(f"--mask-ratio {mask_ratio:g} is a share: above 0 and below 1, e.g. 0.75.")
    job = start(options, whole=True)
    check_decoder(job.model)
    config, preprocess = job.model.config, job.model.preprocess
    share = config.mask_ratio if mask_ratio is None else mask_ratio
    found = rebuild(job.model, job.images, mask_ratio=share, seed=seed, batch_size=job.many)
    hidden = int(found.mask[0].sum())
    title = f"Painted by {job.name}"
    true = "Mean and contrast of each patch are the true ones: the model paints normalised pixels."
    note = true if config.norm_pix else ""
    figure = lambda: draw.reconstruction(job.views, found, preprocess, title=title, note=note)
    page = lambda drawn: draw.figure_page(drawn if drawn is not None else figure(), title=title)

    def colours(images: torch.Tensor) -> Any:
        """(B, C, H, W) -> (B, H, W, C), 0 to 1 as in the file."""
        mean, std = (torch.tensor(v)[:, None, None] for v in (preprocess.mean, preprocess.std))
        return (images * std + mean).permute(0, 2, 3, 1).numpy()

    numbers = {
        "picture": colours(found.images),
        "reconstruction": colours(found.painted),
        "mask": found.mask.numpy(),
        "prediction": found.prediction.numpy(),
        "error": found.error.numpy(),
        "mask_ratio": share,
        "seed": seed,
    }
    told = {"error": found.error.tolist(), "hidden_patches": hidden, "mask_ratio": share, "seed": seed}

    def show() -> None:
        for view, error in zip(job.views, found.error.tolist(), strict=True):
            line = f"{view.name}: error {error:.4f} over {hidden} hidden patches"
            console(markup=False).print(one_line(line), soft_wrap=True)

    finish(job, figure, numbers, page, told, show)
