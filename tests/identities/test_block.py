"""Blocks, MLPs, activations and pooling against torch and transformers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Dinov2Config, SiglipVisionConfig
from transformers.activations import ACT2FN
from transformers.models.dinov2.modeling_dinov2 import Dinov2SwiGLUFFN
from transformers.models.siglip.modeling_siglip import SiglipMultiheadAttentionPoolingHead

from vitlab.layers.attention import Attention
from vitlab.layers.block import ACTIVATIONS, MLP, Block, StochasticDepth, SwiGLU, swiglu_hidden
from vitlab.layers.pooling import AttentionPool, pool_tokens


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_block_matches_torchs_encoder_layer(norm):
    ours = Block(Attention(48, 4), MLP(48, 96), 48, norm=norm, eps=1e-5)
    theirs = nn.TransformerEncoderLayer(48, 4, 96, 0.0, "gelu", batch_first=True, norm_first=norm == "pre")
    theirs.self_attn.in_proj_weight.data = ours.attention.qkv.weight.data
    theirs.self_attn.in_proj_bias.data = ours.attention.qkv.bias.data
    pairs = [(theirs.self_attn.out_proj, ours.attention.proj), (theirs.linear1, ours.mlp.fc1)]
    pairs += [(theirs.linear2, ours.mlp.fc2), (theirs.norm1, ours.norm1), (theirs.norm2, ours.norm2)]
    for target, source in pairs:
        nn.init.normal_(source.weight, std=0.2)
        nn.init.normal_(source.bias)
        target.load_state_dict(source.state_dict())
    z = torch.randn(2, 9, 48)
    torch.testing.assert_close(ours(z), theirs(z), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("relu", "relu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("quick_gelu", "quick_gelu")],
)
def test_activations_match_transformers(ours, theirs):
    x = torch.linspace(-6, 6, 1001)
    torch.testing.assert_close(ACTIVATIONS[ours](x), ACT2FN[theirs](x), atol=1e-6, rtol=1e-6)


def test_swiglu_matches_dinov2():
    theirs = Dinov2SwiGLUFFN(Dinov2Config(hidden_size=48, mlp_ratio=4))
    assert theirs.gate_proj.out_features == swiglu_hidden(48, 4)
    ours = SwiGLU(48, swiglu_hidden(48, 4))
    for part in ("weight", "bias"):
        both = torch.cat([getattr(theirs.gate_proj, part), getattr(theirs.up_proj, part)])
        getattr(ours.fc1, part).data = both.data
        getattr(ours.fc2, part).data = getattr(theirs.down_proj, part).data
    x = torch.randn(2, 5, 48)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-6, rtol=1e-5)


def test_attention_pool_matches_siglip():
    config = SiglipVisionConfig(hidden_size=48, num_attention_heads=4, intermediate_size=96, hidden_act="gelu")
    theirs = SiglipMultiheadAttentionPoolingHead(config)
    ours = AttentionPool(48, 4, 96, eps=config.layer_norm_eps)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours.query.data = theirs.probe.data
    for part in ("weight", "bias"):
        joined = getattr(theirs.attention, f"in_proj_{part}").data
        getattr(ours.q, part).data, getattr(ours.kv, part).data = joined[:48], joined[48:]
    ours.proj.load_state_dict(theirs.attention.out_proj.state_dict())
    ours.norm.load_state_dict(theirs.layernorm.state_dict())
    ours.mlp.load_state_dict(theirs.mlp.state_dict())
    x = torch.randn(2, 15, 48)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_pooling_leaves_prefix_tokens_out():
    tokens = torch.randn(2, 3 + 10, 8)
    assert torch.equal(pool_tokens(tokens, "class", 3), tokens[:, 0])
    torch.testing.assert_close(pool_tokens(tokens, "mean", 3), torch.stack([t[3:].mean(0) for t in tokens]))
    both = pool_tokens(tokens, "class_mean", 3)
    torch.testing.assert_close(both, torch.cat([tokens[:, 0], tokens[:, 3:].mean(1)], dim=1))


def test_merged_tokens_weigh_as_much_as_their_parts_did():
    parts = torch.randn(1, 1 + 4, 8)
    merged = torch.stack([parts[0, 0], parts[0, 1:4].mean(0), parts[0, 4]])[None]
    sizes = torch.tensor([[1.0, 3.0, 1.0]])
    torch.testing.assert_close(pool_tokens(merged, "mean", 1, sizes), pool_tokens(parts, "mean", 1))


def test_stochastic_depth_drops_whole_samples_and_keeps_the_mean():
    drop = StochasticDepth(0.25).train()
    x = torch.ones(20000, 2, 3)
    out = drop(x)
    torch.testing.assert_close(out.flatten(1).unique(dim=0), torch.tensor([[0.0] * 6, [1 / 0.75] * 6]))
    assert abs(out.mean() - 1) < 0.02
    assert torch.equal(drop.eval()(x), x)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_stochastic_depth_drops_each_branch_on_its_own(norm):
    """Branches that add 1 and 10 to one channel: kept at rate 0.5 they add 2 and 20, and all four sums occur."""
    block = Block(Attention(48, 4), MLP(48, 96), 48, norm=norm, stochastic_depth=0.5).train()
    for last, step in ((block.attention.proj, 1.0), (block.mlp.fc2, 10.0)):
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        last.bias.data[0] = step
    if norm == "post":
        block.norm1, block.norm2 = nn.Identity(), nn.Identity()  # what is added stays to be seen
    z = torch.randn(400, 3, 48)
    added = (block(z) - z).round(decimals=3)
    assert torch.equal(added[:, :, 1:], torch.zeros(400, 3, 47))
    sums, counts = added[:, :, 0].unique(dim=0, return_counts=True)  # (combinations, N): equal for all of a sample
    torch.testing.assert_close(sums, torch.tensor([0.0, 2.0, 20.0, 22.0])[:, None].expand(4, 3))
    assert counts.min() > 60


def test_mlp_drops_after_the_activation_and_after_the_second_layer():
    x = torch.randn(3, 5, 48)
    for mlp in (MLP(48, 96, dropout=0.3).train(), SwiGLU(48, 96, dropout=0.3).train()):
        torch.manual_seed(4)
        out = mlp(x)
        torch.manual_seed(4)
        y = mlp.fc1(x)
        y = F.gelu(y) if isinstance(mlp, MLP) else F.silu(y[..., :96]) * y[..., 96:]
        y = F.dropout(mlp.fc2(F.dropout(y, 0.3)), 0.3)
        torch.testing.assert_close(out, y)
