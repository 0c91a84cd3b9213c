"""Attention: torch's own module, the explicit path, and what a bias does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitlab.layers.attention import Attention, attention_weights
from vitlab.layers.positions import RelativeBias, relative_index, rotary_2d


def test_attention_matches_torch():
    ours, theirs = Attention(64, heads=4), nn.MultiheadAttention(64, 4, batch_first=True)
    theirs.in_proj_weight.data, theirs.in_proj_bias.data = ours.qkv.weight.data, ours.qkv.bias.data
    theirs.out_proj.load_state_dict(ours.proj.state_dict())
    x = torch.randn(2, 17, 64)  # (B, N, D)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0], atol=1e-5, rtol=0)


def test_attention_matches_a_slow_loop_with_its_own_head_dim():
    layer = Attention(24, heads=3, head_dim=5, qkv_bias=False)
    x = torch.randn(2, 7, 24)
    out = torch.zeros(2, 7, 15)
    for b in range(2):
        q, k, v = (x[b] @ layer.qkv.weight.T).chunk(3, dim=-1)
        for head in range(3):
            part = slice(5 * head, 5 * head + 5)
            for i in range(7):
                scores = torch.stack([q[i, part] @ k[j, part] / 5**0.5 for j in range(7)])
                weights = scores.exp() / scores.exp().sum()
                out[b, i, part] = sum(weights[j] * v[j, part] for j in range(7))
    torch.testing.assert_close(layer(x), out @ layer.proj.weight.T + layer.proj.bias, atol=1e-5, rtol=0)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("inside", ["nothing", "rope", "bias", "key_bias"])
def test_fused_equals_explicit(qk_norm, inside):
    options = dict(heads=4, qk_norm=qk_norm)
    fused, explicit = Attention(64, path="fused", **options), Attention(64, path="explicit", **options)
    explicit.load_state_dict(fused.state_dict())
    x = torch.randn(3, 1 + 6, 64)
    rope = rotary_2d((2, 3), 16, 100.0, prefix=1) if inside == "rope" else None
    bias = {"bias": torch.randn(1, 4, 7, 7), "key_bias": torch.randn(3, 1, 1, 7)}.get(inside)
    torch.testing.assert_close(fused(x, rope, bias), explicit(x, rope, bias), atol=1e-5, rtol=0)


def test_weights_are_rows_that_sum_to_one():
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    weights = attention_weights(q, k, None, 8**-0.5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))
    torch.testing.assert_close(weights[1, 2, 3], (q[1, 2, 3] @ k[1, 2].T / 8**0.5).softmax(0))


def test_relative_bias_matches_a_slow_loop():
    grid, heads = (3, 4), 2
    bias = RelativeBias(grid, heads, prefix=2)
    found = bias(relative_index(grid, prefix=2), grid)[0]  # (h, N, N)
    places = [None, None] + [(r, c) for r in range(3) for c in range(4)]
    offsets = 5 * 7
    for i, a in enumerate(places):
        for j, b in enumerate(places):
            if a is None or b is None:
                entry = offsets + (2 if a is None and b is None else 0 if a is None else 1)
            else:
                entry = (a[0] - b[0] + 2) * 7 + (a[1] - b[1] + 3)
            assert torch.equal(found[:, i, j], bias.table[entry])


def test_relative_bias_matches_beit():
    from transformers import BeitConfig
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias

    theirs = BeitRelativePositionBias(BeitConfig(num_attention_heads=2, image_size=64, patch_size=16))
    nn.init.normal_(theirs.relative_position_bias_table)
    ours = RelativeBias((4, 4), 2, prefix=1)
    ours.table.data = theirs.relative_position_bias_table.data
    torch.testing.assert_close(ours(relative_index((4, 4), 1), (4, 4))[0], theirs((4, 4)).squeeze(0))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="head_dim"):
        Attention(50, heads=4)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_on_the_explicit_path_acts_on_the_weights_and_on_the_projection(training):
    layer = Attention(48, heads=4, attention_dropout=0.4, dropout=0.2, path="explicit").train(training)
    x = torch.randn(3, 7, 48)
    torch.manual_seed(4)
    out = layer(x)
    torch.manual_seed(4)
    q, k, v = (part.reshape(3, 7, 4, 12).transpose(1, 2) for part in layer.qkv(x).chunk(3, dim=-1))
    weights = F.dropout((q * 12**-0.5 @ k.mT).softmax(-1), 0.4, training)
    y = F.dropout(layer.proj((weights @ v).transpose(1, 2).reshape(3, 7, 48)), 0.2, training)
    torch.testing.assert_close(out, y, atol=1e-6, rtol=1e-5)


def test_normed_queries_and_keys_with_the_given_eps():
    """Small queries and keys, so that eps weighs as much as their variance."""
    layer = Attention(48, heads=4, qk_norm=True, eps=1e-3, path="explicit")
    for norm in (layer.q_norm, layer.k_norm):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    x = 0.05 * torch.randn(2, 7, 48)
    q, k, v = (part.reshape(2, 7, 4, 12).transpose(1, 2) for part in layer.qkv(x).chunk(3, dim=-1))
    q = F.layer_norm(q, (12,), layer.q_norm.weight, layer.q_norm.bias, 1e-3)
    k = F.layer_norm(k, (12,), layer.k_norm.weight, layer.k_norm.bias, 1e-3)
    y = ((q @ k.mT / 12**0.5).softmax(-1) @ v).transpose(1, 2).reshape(2, 7, 48)
    torch.testing.assert_close(layer(x), layer.proj(y), atol=1e-6, rtol=1e-5)
