"""Every way to rate patches, by name, under one signature: method(model, images, target) -> (B, grid_h, grid_w).

Higher is more important. attention and rollout know nothing of classes, and random knows nothing at all: it is what the
others have to beat.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from vitlab.explain.attention_maps import attention_maps
from vitlab.explain.inputs import Images, as_batch, grid_of
from vitlab.explain.relevance import Target, grad_cam, gradient_x_input, relevance
from vitlab.explain.rollout import rollout

Method = Callable[[Any, Images, Target], Tensor]


def last_attention(model: Any, images: Images, target: Target = None) -> Tensor:
    """The last layer's attention from what the head reads, mean over heads."""
    return attention_maps(model, images, layers=[-1], heads="mean")[:, 0, 0]


def random_map(model: Any, images: Images, target: Target = None, *, seed: int = 0) -> Tensor:
    """An order by lot, another one for each image."""
    batch = as_batch(model, images)
    return torch.rand(len(batch), *grid_of(model, batch), generator=torch.Generator().manual_seed(seed))


METHODS: dict[str, Method] = {
    "attention": last_attention,
    "rollout": lambda model, images, target=None: rollout(model, images),
    "relevance": relevance,
    "grad_cam": grad_cam,
    "gradient_x_input": gradient_x_input,
    "random": random_map,
}


def find_method(method: str | Method) -> Method:
    """A method by its name; a function with the same signature is one already."""
    if callable(method):
        return method
    if method in METHODS:
        return METHODS[method]
    near = get_close_matches(str(method), METHODS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"there is no method {method!r}.{hint} There are: {', '.join(METHODS)}.")
