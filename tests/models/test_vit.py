"""VisionTransformer's options: each does what its name says, on any image size."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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


@pytest.mark.parametrize("positions", ["learned", "sincos", "rotary", "relative", "none"])
@pytest.mark.parametrize("prefix", [{}, {"registers": 2}, {"class_token": False, "pooling": "mean"}], ids=str)
def test_any_image_size_at_forward_time(positions, prefix):
    model = small(positions=positions, **prefix)
    for size in ((32, 48), (48, 32), (16, 80), (56, 56)):
        assert model(torch.randn(2, 3, *size)).isfinite().all()


def test_equal_token_counts_of_another_grid_resize():
    """32 x 48 and 48 x 32 have 24 patches each: positions must not be taken over as they stand."""
    model = small()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
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
    from vitlab.layers.positions import rotary_2d

    cos, sin = rotary_2d((4, 6), 12, 100.0, prefix=1)
    one_by_one = [model.blocks[0](z[i : i + 1], (cos[kept[i]], sin[kept[i]])) for i in range(2)]
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


def test_half_precision_runs():
    model = small(positions="sincos", registers=1).to(torch.bfloat16)
    assert model(IMAGES.to(torch.bfloat16)).dtype == torch.bfloat16
