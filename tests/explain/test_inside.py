"""lens, attribution, ablate, patch: against the network's own logits, other weights, slow loops and identities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vitlab
from vitlab.explain import ablate, ask, attribution, draw, figures, lens, open_subject, patch
from vitlab.layers.edit import Edit
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import ViTConfig
from vitlab.text.tokenizer import Tokenizer

SMALL = dict(image_size=(32, 48), patch_size=8, width=48, depth=3, heads=4, classes=7)
SENTENCES = ["a photo of a cat", "a photo of a dog", "one bird"]
IMAGES = torch.randn(3, 3, 32, 48, generator=torch.Generator().manual_seed(1))


def noisy(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def small(**options) -> VisionTransformer:
    torch.manual_seed(0)
    return noisy(VisionTransformer(ViTConfig().with_options(**{**SMALL, **options})))


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.train(SENTENCES * 3, vocab=530, context=12)


def clip(words: Tokenizer, **options):
    torch.manual_seed(0)
    model = noisy(vitlab.create("clip_digits", **words.options, **options))
    model.tokenizer = words
    return model


def logits_of(model, images):
    with torch.no_grad():
        return model(images)


# ---------------------------------------------------------------- attribution

NETWORKS = {
    "vit": ("vit_digits", {}),
    "deit": ("vit_digits", dict(distill_token=True)),
    "registers, mean": ("vit_digits", dict(pooling="mean", registers=3, positions="sincos")),
    "norm after the mean": ("vit_digits", dict(pooling="mean_norm", class_token=False)),
    "class and mean": ("vit_digits", dict(pooling="class_mean")),
    "post-norm": ("vit_digits", dict(norm="post")),
    "layer scale, norm before": ("vit_digits", dict(layer_scale=0.5, norm_pre=True)),
    "rotary": ("vit_digits", dict(positions="rotary", qk_norm=True)),
    "beit": ("beit_digits", {}),
    "norms in branches": ("vit_relpos_digits", dict(norm="branch")),
    "norm inside attention": ("eva02_digits", dict(attention_norm=True, mlp_norm=True)),
    "rms norm": ("aimv2_digits", dict(pooling="mean")),
    "swin": ("swin_cifar", dict(image_size=(24, 40))),
    "swin v2": ("swinv2_cifar", {}),
    "pvt": ("pvt_cifar", dict(image_size=(24, 40))),
    "pvt v2": ("pvt_v2_cifar", {}),
    "twins": ("twins_svt_cifar", {}),
}


@pytest.mark.parametrize(("name", "options"), NETWORKS.values(), ids=NETWORKS)
def test_shares_sum_to_the_logit(name, options):
    model = noisy(vitlab.create(name, **options))
    images = torch.randn(3, model.config.channels, *model.config.image_size)
    result = attribution(model, images, batch_size=2)
    logits = logits_of(model, images)
    assert result.target == logits.argmax(1).tolist()
    torch.testing.assert_close(result.total, logits.max(1).values.double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(result.logit, logits.max(1).values.double(), atol=1e-4, rtol=0)
    assert float(result.heads.abs().max()) > 1e-3 and float(result.mlps.abs().max()) > 1e-3
    if options.get("image_size") != (24, 40) or name == "pvt_cifar":  # where no padding is looked at
        torch.testing.assert_close(result.sources.sum(-1), result.heads, atol=1e-5, rtol=0)
    other = attribution(model, images, target=4)
    torch.testing.assert_close(other.total, logits[:, 4].double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{}, dict(loss="sigmoid"), {"image.pooling": "mean"}], ids=str)
def test_shares_sum_to_a_clips_logit_of_a_sentence(words, options):
    model = clip(words, **options)
    model.image_projection.bias = torch.nn.Parameter(torch.randn(model.feature_width))  # as timm's towers have
    images = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        wanted = model(images, words(SENTENCES)).logits_per_image
    asked = ask(model, SENTENCES)
    torch.testing.assert_close(lens(asked, images).logits[:, -1], wanted, atol=1e-5, rtol=0)
    for number, sentence in enumerate(SENTENCES):
        result = attribution(asked, images, target=sentence)
        torch.testing.assert_close(result.total, wanted[:, number].double(), atol=1e-4, rtol=0)
        torch.testing.assert_close(result.sources.sum(-1), result.heads, atol=1e-5, rtol=0)
    assert ablate(asked, images[:1]).heads.shape == (1, 4, 4)


def test_a_heads_share_is_what_the_logit_loses_with_frozen_statistics():
    """Without a later layer, the share of a head of the last layer is the logit's change, up to the norm's statistics:
    of a network without them, exactly.
    """
    model = small(final_norm="no", depth=1)
    model.blocks[0].mlp.fc2.weight.data.zero_()  # or the MLP would answer to the change
    result, ablation = attribution(model, IMAGES, 2), ablate(model, IMAGES, 2)
    torch.testing.assert_close(-ablation.heads.double(), result.heads, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        -ablation.attention.double(), result.heads.sum(2) + result.attention_bias, atol=1e-5, rtol=0
    )


def test_a_head_is_no_sum_where_the_head_is_not_linear():
    with pytest.raises(ValueError, match="not linear"):
        attribution(small(pooling="attention"), IMAGES)
    with pytest.raises(ValueError, match="not linear"):
        attribution(small(head_hidden=16), IMAGES)


# ---------------------------------------------------------------- lens


def test_the_lens_ends_in_the_answer_and_reads_shorter_networks():
    model = small(registers=1)
    result = lens(model, IMAGES, batch_size=2)
    torch.testing.assert_close(result.logits[:, -1], logits_of(model, IMAGES), atol=1e-6, rtol=0)
    torch.testing.assert_close(result.probabilities, result.logits.softmax(-1))
    for layer in range(3):  # the same network with fewer layers
        short = VisionTransformer(model.config.with_options(depth=layer + 1)).eval()
        short.load_state_dict({k: v for k, v in model.state_dict().items() if k in short.state_dict()})
        torch.testing.assert_close(result.logits[:, layer], logits_of(short, IMAGES), atol=1e-6, rtol=0)


def test_patches_of_a_lens_by_a_slow_loop():
    model = small(registers=1)
    result = lens(model, IMAGES, target=[1, 5, 2])
    w = {name: value.numpy().astype(np.float64) for name, value in model.state_dict().items()}
    trace = vitlab.Trace("tokens")
    with torch.no_grad():
        model(IMAGES, trace=trace)
    for layer in range(3):
        for image in range(3):
            for number in range(24):
                z = trace["tokens", layer][image, 2 + number].numpy().astype(np.float64)
                z = (z - z.mean()) / np.sqrt(z.var() + 1e-6) * w["norm.weight"] + w["norm.bias"]
                scores = np.exp(w["head.weight"] @ z + w["head.bias"])
                scores /= scores.sum()
                where = (image, layer, *divmod(number, 6))
                assert int(result.patch_class[where]) == scores.argmax()
                np.testing.assert_allclose(float(result.patch_probability[where]), scores.max(), atol=1e-5)
                wanted = scores[[1, 5, 2][image]]
                np.testing.assert_allclose(float(result.target_probability[where]), wanted, atol=1e-5)


def test_the_mean_of_the_patches_logits_is_a_mean_pooled_networks_logit():
    model = noisy(vitlab.create("swin_cifar", image_size=(24, 40)))
    images = torch.randn(2, 3, 24, 40)
    result = lens(model, images, target=3)
    assert result.layers == [4, 5] and result.patch_class.shape == (2, 2, 3, 5)
    torch.testing.assert_close(result.logits[:, -1], logits_of(model, images), atol=1e-6, rtol=0)
    tokens = model.forward_features(images).detach()  # (B, 15, D)
    each = model.head(tokens).detach()
    torch.testing.assert_close(each.mean(1), result.logits[:, -1], atol=1e-5, rtol=0)
    torch.testing.assert_close(
        each.softmax(-1).max(-1).values, result.patch_probability[:, -1].flatten(1), atol=1e-5, rtol=0
    )


# ---------------------------------------------------------------- ablate


@pytest.mark.parametrize("name", ["vit_digits", "swin_cifar"])
def test_ablation_equals_zero_columns_of_the_projection(name):
    model = noisy(vitlab.create(name))
    images = torch.randn(2, model.config.channels, *model.config.image_size)
    result = ablate(model, images, target=[3, 1], batch_size=1)
    whole = logits_of(model, images)
    torch.testing.assert_close(result.logit, whole[[0, 1], [3, 1]])
    for layer, head in ((0, 1), (len(model.blocks) - 1, 2)):
        attention = model.blocks[layer].attention
        kept = attention.proj.weight.detach().clone()
        with torch.no_grad():
            attention.proj.weight[:, head * attention.head_dim : (head + 1) * attention.head_dim] = 0
            without = model(images)
            attention.proj.weight.copy_(kept)
        change = (without - whole)[[0, 1], [3, 1]]
        torch.testing.assert_close(result.heads[:, layer, head], change, atol=1e-5, rtol=0)
        change = (without.softmax(-1) - whole.softmax(-1))[[0, 1], [3, 1]]
        torch.testing.assert_close(result.heads_probability[:, layer, head], change, atol=1e-5, rtol=0)
    if name == "swin_cifar":  # 3, 6 and 12 heads
        assert torch.isnan(result.heads[:, 0, 3:]).all() and not torch.isnan(result.heads[:, 4:]).any()


def test_ablation_by_the_mean():
    model = small()
    result = ablate(model, IMAGES[:1], target=0, how="mean")
    trace = vitlab.Trace("mlp_out")
    with torch.no_grad():
        whole = model(IMAGES[:1], trace=trace)
        mean = trace["mlp_out", 1][:, 1:].mean(1, keepdim=True)
        change = model(IMAGES[:1], edit=Edit().replace("mlp_out", mean, layer=1)) - whole
    torch.testing.assert_close(result.mlps[:, 1], change[:, 0])
    with pytest.raises(ValueError, match='"zero" or "mean"'):
        ablate(model, IMAGES, how="noise")


# ---------------------------------------------------------------- patch


def test_patching_the_same_image_moves_nothing_and_the_class_token_of_the_last_layer_everything():
    model = small()
    same = patch(model, IMAGES[:1], IMAGES[:1], by_patch=True)
    for logits in (*same.groups.values(), same.heads, same.patches):
        torch.testing.assert_close(logits, torch.full_like(logits, same.logit), atol=1e-5, rtol=0)
        assert torch.isnan(same.moved(logits)).all()  # there is no way to go
    result = patch(model, IMAGES[:1], IMAGES[1:2], by_patch=True, batch_size=5)
    first, second = logits_of(model, IMAGES[:2])
    assert result.target == int(second.argmax())
    assert result.logit == pytest.approx(float(first[result.target]), abs=1e-5)
    assert result.other_logit == pytest.approx(float(second[result.target]), abs=1e-5)
    moved = {name: result.moved(logits) for name, logits in result.groups.items()}
    assert float(moved["prefix"][-1]) == pytest.approx(1, abs=1e-4)  # all that the head reads
    assert float(moved["patches"][-1]) == pytest.approx(0, abs=1e-4)  # which it does not read
    assert result.patches is not None and float(result.moved(result.patches[-1]).abs().max()) < 1e-4
    trace = vitlab.Trace("tokens")
    with torch.no_grad():
        model(IMAGES[1:2], trace=trace)
        edit = Edit().replace("tokens", trace["tokens", 0], layer=0, tokens=[1 + 8])
        wanted = model(IMAGES[:1], edit=edit)[0, result.target]
    torch.testing.assert_close(result.patches[0, 1, 2], wanted, atol=1e-5, rtol=0)


def test_patching_in_stages():
    model = noisy(vitlab.create("pvt_cifar"))
    a, b = torch.randn(2, 1, 3, 32, 32)
    result = patch(model, a, b, target=2, by_patch=True, batch_size=128)
    assert list(result.groups) == ["attention", "MLP", "prefix", "patches"]
    assert torch.isnan(result.groups["prefix"][:4]).all()  # the class token joins in the last stage
    assert float(result.moved(result.groups["prefix"])[-1]) == pytest.approx(1, abs=1e-3)
    assert result.patches.shape == (6, 16, 16)
    with pytest.raises(ValueError, match="two images of one size"):
        patch(model, a, torch.randn(2, 3, 32, 32))


# ---------------------------------------------------------------- figures


def test_results_are_tables_that_count_layers_from_1():
    model = small()
    model.labels = [*"abcdef", "大熊猫"]
    found, shares = lens(model, IMAGES[:1], 6), attribution(model, IMAGES[:2], 6)
    row = found.table().rows[-1]
    best = int(found.probabilities[0, -1].argmax())
    assert row[0] == "3" and row[1] == model.labels[best] and row[-1] == f"{float(found.probabilities[0, -1, 6]):.3f}"
    assert found.table().titles[-1] == "of 大熊猫" and len(lens(model, IMAGES, 6).table().rows) == 9
    parts = shares.parts(1)
    assert sum(parts.values()) == pytest.approx(float(shares.logit[1]), abs=1e-4) and "MLP 3" in parts
    assert shares.table().total[2] == f"{float(shares.logit[1]):+.4f}"
    changed = ablate(model, IMAGES[:2], 6)
    assert changed.table().rows[2][2] == f"{float(changed.heads[:, 2, 1].mean()):+.3f}"
    moved = patch(model, IMAGES[:1], IMAGES[1:2], 6)
    assert moved.table().rows[0][1] == f"{float(moved.moved(moved.groups['attention'])[0]):.2f}"
    assert all("大熊猫" in result._repr_html_() for result in (found, shares, changed, moved))


def test_figures_of_one_and_of_several_images():
    subject = open_subject("bundled:digits", ["digits#3", "digits#8"])
    one = open_subject("bundled:digits", "digits#3")
    for explained in (figures.lens(one), figures.lens(subject), figures.attribution(one), figures.attribution(subject)):
        assert explained.figure().get_axes()
    ablation, patching = figures.ablate(one, how="mean"), figures.patch(subject, by_patch=True)
    assert ablation.figure().get_axes() and patching.figure().get_axes()
    np.testing.assert_allclose(patching.numbers["group_prefix"][-1], 1, atol=1e-4)
    shares = figures.attribution(subject).results["shares"]
    np.testing.assert_allclose(
        [sum(row.values()) for row in shares], figures.attribution(subject).results["logit"], atol=1e-4
    )
    with pytest.raises(ValueError, match="takes two images"):
        figures.patch(one)


def test_pictures_take_numbers_only():
    heads = np.array([[0.5, -0.25], [np.nan, 0.0]])
    figure = draw.ablation(heads, {"MLP": np.array([0.1, 0.2])}, title="A", lines=["B"])
    texts = [text.get_text() for axes in figure.get_axes() for text in axes.texts]
    assert {"A", "B", "0.50", "-0.25", "0.00", "0.10", "0.20"} <= set(texts)  # a missing head has no number
