"""A picture's features: what a model's classifier reads, or would read; of a CLIP, its place in the space of words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def features_of(model: Any, **options: Any) -> Callable[[Tensor], Tensor]:
    """(B, C, H, W) -> (B, E). Options as for the forward pass: reducer=..."""
    if hasattr(model, "encode_image"):
        return lambda images: model.encode_image(images, **options)
    encoder = getattr(model, "encoder", model)
    if not hasattr(encoder, "forward_head"):
        raise ValueError("this gives no features of pictures: take the model itself, or export it with --features.")

    def look(images: Tensor) -> Tensor:
        if not hasattr(encoder, "encode"):  # a network of stages, or of convolutions
            return encoder.forward_head(encoder.forward_features(images, **options), pre_logits=True)
        tokens, sizes = encoder.encode(images, **options)  # a mean over merged tokens weighs them by what they hold
        return encoder.forward_head(tokens, pre_logits=True, sizes=sizes)

    return look
