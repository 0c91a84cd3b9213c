"""VisionTransformer's options: each does what its name says, on any image size."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitlab.layers.block import MLP, StochasticDepth
from vitlab.layers.positions import Rotary, rotary_2d, sincos_2d
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import ViTConfig

SMALL = dict(image_size=(32, 48), patch_size=8, width=48, depth=2, heads=4, classes=7)


def small(**options) -> VisionTransformer:
    return VisionTransformer(ViTConfig().with_options(**{**SMALL, **options})).eval()


IMAGES = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))


def test_the_whole_network_written_out_by_hand():
    """Eqs. 1-4 with torch's functional calls and nothing of ours but the weights."""
    model = small()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    w = dict(model.named_parameters())
    z = F.conv2d(IMAGES, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=8).flatten(2).mT
    z = torch.cat([w["class_token"].expand(2, 1, 48), z], dim=1) + w["positions.table"]
    for i in range(2):
        b = f"blocks.{i}."
        y = F.layer_norm(z, (48,), w[b + "norm1.weight"], w[b + "norm1.bias"], 1e-6)
        qkv = F.linear(y, w[b + "attention.qkv.weight"], w[b + "attention.qkv.bias"])
        q, k, v = (part.reshape(2, 25, 4, 12).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        y = ((q @ k.mT / 12**0.5).softmax(-1) @ v).transpose(1, 2).reshape(2, 25, 48)
        z = z + F.linear(y, w[b + "attention.proj.weight"], w[b + "attention.proj.bias"])
        y = F.layer_norm(z, (48,), w[b + "norm2.weight"], w[b + "norm2.bias"], 1e-6)
        y = F.gelu(F.linear(y, w[b + "mlp.fc1.weight"], w[b + "mlp.fc1.bias"]))
        z = z + F.linear(y, w[b + "mlp.fc2.weight"], w[b + "mlp.fc2.bias"])
    z = F.layer_norm(z, (48,), w["norm.weight"], w["norm.bias"], 1e-6)
    logits = F.linear(z[:, 0], w["head.weight"], w["head.bias"])
    torch.testing.assert_close(model(IMAGES), logits, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("positions", ["learned", "sincos", "rotary", "relative", "none"])
def test_positions_see_where_a_patch_stands(positions):
    """Without positions a ViT with mean pooling cannot tell shuffled patches from the image; with any kind it can."""
    model = small(positions=positions, pooling="mean")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    nn.init.normal_(model.patch_embed.proj.weight, std=0.02)  # so that positions weigh as much as content
    patches = IMAGES.unfold(2, 8, 8).unfold(3, 8, 8).flatten(2, 3)  # (B, C, N, P, P)
    shuffled = patches[:, :, torch.randperm(24)].unflatten(2, (4, 6)).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 32, 48)
    changed = (model(IMAGES) - model(shuffled)).abs().max()
    assert changed < 1e-5 if positions == "none" else changed > 1e-3


def bicubic(values, old, new):
    """(old rows * columns, D) -> (new rows * columns, D), by torch."""
    picture = values.reshape(1, *old, -1).permute(0, 3, 1, 2)
    return F.interpolate(picture, size=new, mode="bicubic").flatten(2)[0].T


def built_for(size, model) -> VisionTransformer:
    """A model made for this image size, with the same weights, and what belongs to places resized by torch."""
    c, old, new = model.config, (4, 6), (size[0] // 8, size[1] // 8)
    state = {key: value for key, value in model.state_dict().items() if key != "positions.table"}
    kind = c.positions.kind
    if kind in ("learned", "sincos"):  # sin-cos positions of another grid are resized too: as learned ones then
        n = c.positioned_prefix
        table = sincos_2d(old, c.width)[0] if kind == "sincos" else model.positions.table[0, n:]
        first = torch.zeros(n, c.width) if kind == "sincos" else model.positions.table[0, :n]
        state["positions.table"] = torch.cat([first, bicubic(table, old, new)])[None]
        kind = "learned"
    if kind == "relative":
        for key in [key for key in state if key.endswith("relative.table")]:
            before, after = ((2 * rows - 1, 2 * columns - 1) for rows, columns in (old, new))
            count = before[0] * before[1]
            state[key] = torch.cat([bicubic(state[key][:count], before, after), state[key][count:]])
    other = VisionTransformer(c.with_options(image_size=size, positions=kind)).eval()
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("positions", ["learned", "sincos", "rotary", "relative", "none"])
@pytest.mark.parametrize("prefix", [{}, {"registers": 2}, {"class_token": False, "pooling": "mean"}], ids=str)
def test_any_image_size_at_forward_time(positions, prefix):
    """As a model that was built for that size."""
    model = small(positions=positions, **prefix)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (1.0 if key.endswith("table") else 0.1))
        for size in ((32, 48), (48, 32), (16, 80), (56, 56)):
            images = torch.randn(2, 3, *size)
            torch.testing.assert_close(model(images), built_for(size, model)(images), atol=1e-5, rtol=1e-5)


def test_equal_token_counts_of_another_grid_resize():
    """32 x 48 and 48 x 32 have 24 patches each: positions must not be taken over as they stand."""
    model = small()
    nn.init.normal_(model.positions.table)
    turned = torch.randn(1, 3, 48, 32)
    as_stored = model.patch_embed(turned)
    z = torch.cat([model.class_token, as_stored], dim=1) + model.positions.table  # the mistake
    for block in model.blocks:
        z = block(z)
    assert (model(turned) - model.head(model.norm(z)[:, 0])).abs().max() > 1e-3


@pytest.mark.parametrize(("which", "prefix"), [("none", [0, 0, 0, 0]), ("class", [1, 1, 0, 0]), ("all", [1, 1, 1, 1])])
def test_which_prefix_tokens_have_positions(which, prefix):
    model = small(distill_token=True, registers=2, prefix_positions=which)
    nn.init.ones_(model.positions.table)
    for token in (model.class_token, model.distill_token, model.register_tokens):
        nn.init.zeros_(token)
    z, _ = model.embed(IMAGES, model.layout(32, 48))
    assert z[0, :4, 0].tolist() == prefix
    torch.testing.assert_close(z[:, 4:], model.patch_embed(IMAGES) + 1)


def test_prefix_tokens_stand_first_in_the_published_order():
    model = small(distill_token=True, registers=2, positions="none")
    for value, token in enumerate((model.class_token, model.distill_token, model.register_tokens), 1):
        nn.init.constant_(token, value)
    z, _ = model.embed(IMAGES, model.layout(32, 48))
    assert z[0, :4, 0].tolist() == [1, 2, 3, 3]


def test_poolings():
    tokens = torch.randn(2, 1 + 2 + 24, 48)
    for pooling, expected in {
        "class": tokens[:, 0],
        "mean": tokens[:, 3:].mean(1),
        "class_mean": torch.cat([tokens[:, 0], tokens[:, 3:].mean(1)], dim=1),
        "mean_norm": F.layer_norm(tokens[:, 3:].mean(1), (48,), eps=1e-6),
    }.items():
        model = small(pooling=pooling, registers=2, classes=0)
        torch.testing.assert_close(model.forward_head(tokens), expected)
        assert model(IMAGES).shape[1] == model.feature_width
    assert small(pooling="mean_norm").norm is None  # one norm, after the mean


def test_pre_logits_and_the_classifier():
    model = small(head_hidden=20)
    tokens = model.forward_features(IMAGES)
    features = model.forward_head(tokens, pre_logits=True)
    torch.testing.assert_close(features, torch.tanh(model.pre_logits(tokens[:, 0])))
    assert torch.equal(model(IMAGES), model.head(features))


def test_distilled_model_answers_with_the_mean_of_its_heads():
    model = small(distill_token=True)
    tokens = model.forward_features(IMAGES)
    torch.testing.assert_close(model(IMAGES), (model.head(tokens[:, 0]) + model.head_distill(tokens[:, 1])) / 2)
    with pytest.raises(ValueError, match="distill_token=True"):
        small().forward_heads(tokens)


def test_reset_classifier_changes_the_head_only():
    model = small(distill_token=True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.labels = list("abcdefg")
    model.reset_classifier(3)
    assert (model(IMAGES).shape, model.config.classes, model.labels) == ((2, 3), 3, None)
    for key, value in model.state_dict().items():
        if not key.startswith("head"):
            assert torch.equal(value, before[key])
    model.reset_classifier(0)
    assert model(IMAGES).shape == (2, 48)


def test_layer_scale_of_almost_zero_leaves_only_the_residual():
    model = small(layer_scale=1e-12)
    z, _ = model.embed(IMAGES, model.layout(32, 48))
    torch.testing.assert_close(model.forward_features(IMAGES), model.norm(z), atol=1e-5, rtol=0)


def test_post_norm_ends_in_a_norm():
    model = small(norm="post")
    assert model.norm is None
    tokens = model.forward_features(IMAGES)
    torch.testing.assert_close(tokens.mean(-1), torch.zeros(2, 25), atol=1e-5, rtol=0)
    torch.testing.assert_close(tokens.var(-1, correction=0), torch.ones(2, 25), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "option",
    [dict(dropout=0.5), dict(attention_dropout=0.5), dict(stochastic_depth=0.9), dict(patch_dropout=0.5)],
    ids=str,
)
def test_random_options_act_in_training_only_and_by_seed(option):
    model = small(depth=4, **option)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    images = IMAGES.repeat(4, 1, 1, 1)

    def run(seed):
        torch.manual_seed(seed)
        return model(images)

    assert torch.equal(run(0), run(1))
    model.train()
    assert not torch.equal(run(0), run(1))
    assert torch.equal(run(0), run(0))


def test_patch_dropout_with_rotary_positions_turns_the_kept_patches_by_their_own_place():
    model = small(positions="rotary", patch_dropout=0.5, pooling="mean", depth=1).train()
    torch.manual_seed(3)
    out = model(IMAGES)
    torch.manual_seed(3)
    z, kept = model.embed(IMAGES, model.layout(32, 48))
    cos, sin, _ = rotary_2d((4, 6), 12, 100.0, prefix=1)
    one_by_one = [model.blocks[0](z[i : i + 1], Rotary(cos[kept[i]], sin[kept[i]])) for i in range(2)]
    torch.testing.assert_close(out, model.forward_head(model.norm(torch.cat(one_by_one))), atol=1e-6, rtol=1e-5)
    assert z.shape[1] == 1 + 12


def test_gradient_checkpointing_gives_the_same_gradients():
    plain, saving = small(dropout=0.3).train(), small(dropout=0.3, gradient_checkpointing=True).train()
    saving.load_state_dict(plain.state_dict())
    for model in (plain, saving):
        torch.manual_seed(5)
        model(IMAGES).square().sum().backward()
    for ours, theirs in zip(saving.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class CountedMLP(MLP):
    """Counts how often it runs."""

    runs = 0

    def forward(self, x, trace=None):
        self.runs += 1
        return super().forward(x, trace)


@pytest.mark.parametrize(
    ("checkpointing", "training", "expected"), [(True, True, [1, 2]), (False, True, [1, 1]), (True, False, [1, 1])]
)
def test_gradient_checkpointing_runs_every_block_again_in_backward(checkpointing, training, expected):
    model = small(gradient_checkpointing=checkpointing, depth=3).train(training)
    for block in model.blocks:
        block.mlp = CountedMLP(48, 192)
    loss = model(IMAGES).square().sum()
    forward = [block.mlp.runs for block in model.blocks]
    loss.backward()
    assert [forward, [block.mlp.runs for block in model.blocks]] == [[runs] * 3 for runs in expected]


def kept_for_backward(model) -> int:
    """How many numbers autograd keeps from a forward pass, weights left out."""
    weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(IMAGES).sum()  # held, so that no address is used twice
    assert loss.requires_grad
    return sum(kept.values())


def test_gradient_checkpointing_keeps_little_for_backward():
    plain, saving = (kept_for_backward(small(gradient_checkpointing=on, depth=6).train()) for on in (False, True))
    assert saving < plain / 5


@pytest.mark.parametrize("positions", ["learned", "sincos", "rotary", "relative"])
@pytest.mark.parametrize("path", ["fused", "explicit"])
def test_half_precision_agrees_with_float32(positions, path):
    model = small(positions=positions, registers=1, attention=path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter)).copy_(parameter.bfloat16())  # weights that fit exactly
        images = torch.randn(2, 3, 40, 48).bfloat16()  # a grid of its own, so that positions are resized
        expected = model(images.float())
        halved = model.to(torch.bfloat16)(images)
    assert halved.dtype == torch.bfloat16
    error = (halved.float() - expected).square().mean().sqrt() / expected.std()
    assert error < 0.05  # 8 bits of mantissa: 1/256 a step, over some twenty steps
    assert expected.std() > 0.1


@pytest.mark.parametrize("registers", [0, 3])
def test_attention_pooling_sees_patches_only(registers):
    model = small(pooling="attention", registers=registers, classes=0)
    tokens = torch.randn(2, 1 + registers + 24, 48)
    features = model.forward_head(tokens)
    other = tokens.clone()
    other[:, : 1 + registers] = 100 * torch.randn(2, 1 + registers, 48)
    assert torch.equal(model.forward_head(other), features)
    for patch in (1 + registers, -1):  # the first and the last patch count
        other = tokens.clone()
        other[:, patch] += 1
        assert not torch.equal(model.forward_head(other), features)


@pytest.mark.parametrize(("depth", "rates"), [(5, [0.0, 0.1, 0.2, 0.3, 0.4]), (2, [0.0, 0.4]), (1, [0.0])])
def test_stochastic_depth_grows_linearly_from_0_to_its_rate(depth, rates):
    model = small(depth=depth, stochastic_depth=0.4)
    assert [block.depth_drop.rate for block in model.blocks] == pytest.approx(rates)
    assert sum(isinstance(m, StochasticDepth) for m in model.modules()) == depth


def test_dropout_follows_positions_and_takes_prefix_tokens_too():
    model = small(dropout=0.5, registers=2)
    images = IMAGES.repeat(8, 1, 1, 1)
    with torch.no_grad():
        nn.init.normal_(model.positions.table)
        whole, _ = model.embed(images, model.layout(32, 48))
        dropped, _ = model.train().embed(images, model.layout(32, 48))
    gone = dropped == 0
    torch.testing.assert_close(dropped, torch.where(gone, 0, 2 * whole))  # tokens with their positions, or nothing
    for part in (gone[:, :3], gone[:, 3:]):
        assert abs(part.float().mean() - 0.5) < 0.06


def test_dropout_rates_reach_every_layer():
    model = small(dropout=0.3, attention_dropout=0.2)
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.3}
    assert sum(isinstance(m, nn.Dropout) for m in model.modules()) == 1 + 2 * 2  # positions; projection and MLP
    assert {block.attention.attention_dropout for block in model.blocks} == {0.2}


@pytest.mark.parametrize(
    ("options", "norms"),
    [
        (dict(), 2 * 2 + 1),
        (dict(qk_norm=True), 2 * 4 + 1),
        (dict(norm_pre=True, patch_norms=True), 2 * 2 + 1 + 3),
        (dict(pooling="mean_norm"), 2 * 2 + 1),
        (dict(pooling="attention"), 2 * 2 + 2),
        (dict(norm="post"), 2 * 2),
    ],
    ids=str,
)
def test_every_norm_has_the_configs_eps(options, norms):
    found = [m.eps for m in small(eps=3e-4, **options).modules() if isinstance(m, nn.LayerNorm)]
    assert found == [3e-4] * norms
    assert {m.eps for m in small(**options).modules() if isinstance(m, nn.LayerNorm)} == {1e-6}


def test_a_new_model_starts_as_the_papers_code_does():
    """Xavier: uniform within sqrt(6 / (in + out)); q, k and v are three matrices. Patches by fan-in; the rest 0.02."""
    D, hidden = 96, 384
    model = small(width=D, heads=3, distill_token=True, registers=5, classes=50, image_size=(80, 96))
    uniform, normal = {}, {}
    for i, block in enumerate(model.blocks):
        for name, part in zip("qkv", block.attention.qkv.weight.chunk(3), strict=True):
            uniform[f"{i} {name}"] = (part, (6 / (D + D)) ** 0.5)
        uniform[f"{i} proj"] = (block.attention.proj.weight, (6 / (D + D)) ** 0.5)
        uniform[f"{i} fc1"] = (block.mlp.fc1.weight, (6 / (D + hidden)) ** 0.5)
        uniform[f"{i} fc2"] = (block.mlp.fc2.weight, (6 / (D + hidden)) ** 0.5)
    for name, (weight, bound) in uniform.items():
        assert 0.99 * bound < weight.abs().max() <= bound, name
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05), name
        assert abs(weight.mean()) < 0.05 * bound, name
    normal |= {"patches": (model.patch_embed.proj.weight, (3 * 8 * 8) ** -0.5), "table": (model.positions.table, 0.02)}
    normal |= {"head": (model.head.weight, 0.02), "second head": (model.head_distill.weight, 0.02)}
    prefix = torch.cat([model.class_token, model.distill_token, model.register_tokens], dim=1)
    for name, (weight, std) in (normal | {"prefix tokens": (prefix, 0.02)}).items():
        assert weight.std().item() == pytest.approx(std, rel=0.1), name
        assert weight.abs().max() > 2.5 * std, name  # a bell, not a box
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            assert not parameter.any(), key
        elif "norm" in key:
            assert torch.equal(parameter, torch.ones_like(parameter)), key


def test_relative_tables_and_the_pooling_query_start_at_002():
    model = small(positions="relative", pooling="attention", image_size=(80, 96), width=480)
    assert model.blocks[1].attention.relative.table.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.pool.query.std().item() == pytest.approx(0.02, rel=0.1)
