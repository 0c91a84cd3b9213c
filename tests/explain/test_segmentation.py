"""attention_masks: a slow loop over transformers' attention, and heads whose attention is known by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vitlab
from vitlab.explain import attention_masks


def fewest(row: np.ndarray, keep: float) -> np.ndarray:
    """Take the largest patch that is left until the taken ones hold the share."""
    taken, total, held = np.zeros(len(row), dtype=bool), row.sum(), 0.0
    while held < keep * total - 1e-12:
        best = max((k for k in range(len(row)) if not taken[k]), key=lambda k: row[k])
        taken[best] = True
        held += row[best]
    return taken


@pytest.mark.parametrize(("keep", "layer"), [(0.6, -1), (0.9, 0), (0.05, 1)])
def test_masks_equal_the_slow_loop_on_transformers_attention(pair, keep, layer):
    masks = attention_masks(pair.ours, pair.images, keep, layer)
    assert masks.shape == (2, 4, 4, 6) and masks.dtype == torch.bool
    rows = pair.attentions[layer][:, :, 0, pair.prefix :]  # (B, h, N): from the class token to the patches
    for image, head in np.ndindex(2, 4):
        assert np.array_equal(masks[image, head].flatten().numpy(), fewest(rows[image, head], keep))
    assert torch.equal(attention_masks(pair.ours, pair.images, keep, layer, batch_size=1), masks)


def test_masks_of_known_heads(known):
    """One that looks everywhere needs 60 % of the patches; one that looks at a patch needs that one."""
    model = known("uniform", 6, grid=(3, 5))
    masks = attention_masks(model, torch.zeros(2, 3, 12, 20))
    assert masks[:, 0].sum(dim=(1, 2)).tolist() == [9, 9]
    assert masks[0, 1].nonzero().tolist() == [[1, 0]]  # token 6 is patch 5: the class token stands before them
    assert attention_masks(model, torch.zeros(1, 3, 12, 20), keep=1.0)[0, 0].all()


def test_what_is_refused(known):
    with pytest.raises(ValueError, match="keep=0 is a share of the attention"):
        attention_masks(known("uniform"), torch.zeros(1, 3, 12, 20), keep=0)
    without = vitlab.create("vit_cifar", class_token=False, pooling="mean", depth=1)
    with pytest.raises(ValueError, match="query='class'"):
        attention_masks(without, torch.zeros(1, 3, 32, 32))
