"""Heat maps for a run's report: where the model looked when it gave an answer, by a method of explain/.

maps = heat_maps(model, images, answers)                   # a picture for each image; [] where the model has none
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import numpy as np
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.explain.inputs import ImageBatch, token_model
from vitlab.explain.methods import METHODS, ScoringMethod
from vitlab.images.preprocess import Geometry
from vitlab.models.base import Network

PREFERRED = ("relevance", "grad_cam", "rollout")  # the first that the model supports
TOKENS = 800  # above this the attention of all layers no longer fits small machines; Grad-CAM needs none
PASSES = 3  # forward passes that one map costs: a forward and a backward one
SIDE = 224  # pixels of a picture's longer side


def heat_method(model: Network) -> ScoringMethod | None:
    """The method that suits a model best; None where it has no tokens, or colours cannot be drawn."""
    if find_spec("matplotlib") is None:
        return None
    try:
        rows, columns = token_model(model).layout(*model.require_preprocess().at_one_size().size).grid
    except UsageError:
        return None
    fitting = [METHODS[name] for name in PREFERRED if METHODS[name].supports(model)]
    small = [method for method in fitting if rows * columns <= TOKENS or "attention" not in method.needs]
    return small[0] if small else None


def heat_maps(model: Network, images: Tensor, answers: list[int]) -> list[np.ndarray]:
    """images (B, C, H, W), normalised; for each the picture under the map of its answer, (h, w, 3) uint8."""
    method = heat_method(model)
    if method is None or not len(images):
        return []
    from vitlab.explain.draw.heatmap import overlay
    from vitlab.explain.views import View

    like, preprocess, tokens = next(model.parameters()), model.require_preprocess(), token_model(model)
    size = (images.shape[-2], images.shape[-1])
    view = partial(View, geometry=Geometry(size, size, 0, 0), size=size, patch_size=tokens.config.patch_size)
    grid = tokens.layout(*size).grid
    pictures = []
    for image, answer in zip(images.split(1), answers, strict=True):  # one at a time: attention takes much memory
        heat = method(model, ImageBatch(image.to(like.device, like.dtype)), [answer]).float().cpu().numpy()[0]
        shown = view(preprocess.to_image(image[0]).convert("RGB"), patches=grid)
        pictures.append(overlay(heat, shown, signed=method.signed, side=SIDE))
    return pictures
