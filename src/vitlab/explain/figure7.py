"""The numbers of figure 7 of ViT (arXiv:2010.11929) for any model: filters, position similarity, attention distance.

With them attention entropy, token lengths and the register test (arXiv:2309.16588). `draw.figure7` draws them.
"""

from __future__ import annotations

from typing import Any

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.distance import attention_statistics
from vitlab.explain.inputs import Images, TokenModel, token_model
from vitlab.explain.weights import (
    components,
    high_norm_tokens,
    patch_filters,
    position_similarity,
    stem_filters,
    token_norms,
)
from vitlab.layers.hybrid_stem import HybridStem
from vitlab.layers.patches import ConvStem
from vitlab.models.hierarchy import Hierarchy

FILTERS = 28  # as in the paper
NO_IMAGES = "Give images to measure this: it depends on what the model sees."


def figure7_numbers(model: ModelOrName, images: Images | None = None, *, batch_size: int = 8) -> dict[str, Any]:
    """Arrays for each panel; `missing` gives the reason for each that this model does not have.

    filters (n, P, P, C), or of a convolutional stem stem_filters (n, 3, 3, C); similarity (grid_h, grid_w, grid_h,
    grid_w); distance and entropy (layers, heads), with uniform_distance and max_entropy; norms (B, layers, tokens),
    high_norm (B, layers, grid_h, grid_w) and high_norm_share (layers,), threshold (layers,)
    """
    model = token_model(model)
    numbers: dict[str, Any] = {}
    missing: dict[str, str] = {}
    try:
        numbers |= _filters(model)
    except UsageError as error:
        missing["filters"] = str(error)
    try:
        numbers["similarity"] = position_similarity(model).numpy()
    except UsageError as error:
        missing["similarity"] = str(error)
    if images is None:
        return {**numbers, "missing": {**missing, **dict.fromkeys(("distance", "entropy", "norms"), NO_IMAGES)}}
    try:
        statistics = attention_statistics(model, images, batch_size=batch_size)
        numbers |= {"distance": statistics.distance.numpy(), "entropy": statistics.entropy.numpy()}
        numbers |= {"uniform_distance": statistics.uniform_distance, "max_entropy": statistics.max_entropy}
        numbers |= {"images": statistics.images}
    except UsageError as error:
        missing |= {"distance": str(error), "entropy": str(error)}
    try:
        numbers["norms"] = token_norms(model, images, batch_size=batch_size).numpy()
        high = high_norm_tokens(model, images, batch_size=batch_size)
        numbers |= {"high_norm": high.mask.numpy(), "high_norm_share": high.share.numpy(), "judged": high.layers}
        numbers |= {"threshold": high.threshold.numpy(), "high_norm_found": high.mean_share}
    except UsageError as error:
        missing["norms"] = str(error)
    return {**numbers, "missing": missing}


def _filters(model: TokenModel) -> dict[str, Any]:
    """Patch filters, or those of the first layer of a convolutional stem."""
    if not isinstance(model, Hierarchy) and isinstance(model.patch_embed, ConvStem | HybridStem):
        return {"stem_filters": stem_filters(model).numpy()}
    E = patch_filters(model)  # (D, C, P, P)
    return {"filters": components(E, min(FILTERS, len(E) - 1, E[0].numel())).numpy()}
