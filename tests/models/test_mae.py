"""MAE by identities and a slow loop: what is hidden, what the encoder sees and costs, what the loss counts."""

import json

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import vitlab
from vitlab.layers.patches import unpatchify
from vitlab.layers.trace import Trace
from vitlab.models.mae import MODELS, MAEConfig, MaskedAutoencoder, images_of, pixels_of
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import ViTConfig

SIZE = dict(image_size=(32, 48), patch_size=8, width=48, depth=2, heads=4)  # 4 x 6 patches
SMALL = dict(**SIZE, decoder=dict(width=32, depth=2, heads=2))


def small(**options) -> MaskedAutoencoder:
    model = MaskedAutoencoder(MAEConfig().with_options(**{**SMALL, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(("size", "ratio"), [((32, 48), 0.75), ((32, 48), 0.6), ((40, 24), 0.3), ((8, 16), 0.5)])
def test_every_image_hides_the_same_share_of_other_patches(size, ratio):
    model = small(mask_ratio=ratio)
    N = size[0] * size[1] // 64
    mask = model(torch.randn(5, 3, *size)).mask
    assert mask.shape == (5, N) and set(mask.unique().tolist()) == {0.0, 1.0}
    assert mask.sum(1).tolist() == [N - int(N * (1 - ratio))] * 5
    assert N < 4 or len({tuple(row) for row in mask.tolist()}) > 1


def test_the_noise_decides():
    model = small()
    images, noise = torch.randn(2, 3, 32, 48), torch.rand(2, 24)
    first, again = model(images, noise), model(images, noise)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for row, hidden in zip(noise, first.mask, strict=True):
        assert row[hidden == 1].min() > row[hidden == 0].max()
    assert model(images, torch.zeros(2, 24)).mask[0].tolist() == [0.0] * 6 + [1.0] * 18  # among equals, the first
    torch.manual_seed(3)
    chance = model(images)
    torch.manual_seed(3)
    assert torch.equal(chance.mask, model(images).mask)
    assert not torch.equal(chance.mask, model(images).mask)
    assert model(images, noise, mask_ratio=0.5).mask.sum() == 24


def slow_loss(images: np.ndarray, prediction: np.ndarray, mask: np.ndarray, P: int, norm_pix: bool) -> float:
    """Section 3: the mean square between the painted and the true pixels, over hidden patches alone."""
    B, C, H, W = images.shape
    errors = []
    for b in range(B):
        for patch in range((H // P) * (W // P)):
            if mask[b, patch] == 0:
                continue
            row, column = divmod(patch, W // P)
            true = [images[b, c, row * P + y, column * P + x] for y in range(P) for x in range(P) for c in range(C)]
            true = np.array(true)
            if norm_pix:
                variance = ((true - true.mean()) ** 2).sum() / (len(true) - 1)
                true = (true - true.mean()) / np.sqrt(variance + 1e-6)
            errors.append(((prediction[b, patch] - true) ** 2).mean())
    return float(np.mean(errors))


@pytest.mark.parametrize("norm_pix", [False, True])
def test_the_loss_is_that_of_a_slow_loop(norm_pix):
    model = small(norm_pix=norm_pix).double()
    images = torch.randn(3, 3, 32, 48).double() * 2 + 1
    out = model(images, torch.rand(3, 24))
    expected = slow_loss(images.numpy(), out.prediction.detach().numpy(), out.mask.numpy(), 8, norm_pix)
    assert out.loss.item() == pytest.approx(expected, rel=1e-12)


def test_only_hidden_patches_are_learned_from_and_only_visible_ones_are_seen():
    model = small()
    images, noise = torch.randn(2, 3, 32, 48), torch.rand(2, 24)
    trace = Trace("pixels", gradients=True)
    out = model(images, noise, decoder_trace=trace)
    out.loss.backward()
    slope = trace.gradient("pixels").abs().amax(-1)  # (B, N)
    assert torch.equal(slope > 0, out.mask == 1)

    hidden = unpatchify(out.mask[..., None].expand(-1, -1, 64), 8, (4, 6))  # (B, 1, H, W)
    with torch.no_grad():
        other = model(images + 5 * hidden, noise)  # hidden pixels changed
        assert torch.equal(other.prediction, out.prediction) and other.loss != out.loss
        seen = model(images + 5 * (1 - hidden), noise)
        assert not torch.allclose(seen.prediction, out.prediction)


def test_the_encoder_works_on_visible_tokens_alone():
    """7 of 25 tokens: the tokens in every block, and the multiplications, which a formula gives."""
    model, trace = small(), Trace("visible", "tokens", "qkv")
    images, noise = torch.randn(2, 3, 32, 48), torch.rand(2, 24)
    model(images, noise, trace=trace)
    assert {trace[kind, layer].shape[1] for kind in ("tokens", "qkv") for layer in (0, 1)} == {7}
    assert trace["visible"].shape == (2, 7, 48)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        meta = VisionTransformer(model.config.encoder)
        meta.encode(torch.empty(1, 3, 32, 48), keep=torch.zeros(1, 6, dtype=torch.long))
    n, D, hidden = 7, 48, 192
    block = n * D * 3 * D + 2 * n * n * D + n * D * D + 2 * n * D * hidden
    assert counter.get_total_flops() == 2 * (24 * 3 * 64 * D + 2 * block)


@pytest.mark.parametrize("positions", ["sincos", "learned", "rotary", "none"])
def test_keeping_all_patches_changes_nothing_and_their_order_does_not_matter(positions):
    options = dict(image_size=(32, 48), patch_size=8, width=48, depth=2, heads=4, registers=2, positions=positions)
    encoder = VisionTransformer(ViTConfig().with_options(**options)).eval()
    images = torch.randn(2, 3, 32, 48)
    everything = torch.arange(24).expand(2, 24)
    plain = encoder.forward_features(images)
    torch.testing.assert_close(encoder.encode(images, keep=everything)[0], plain, atol=1e-6, rtol=0)
    order = torch.rand(2, 24).argsort(1)
    shuffled = encoder.encode(images, keep=order)[0]
    torch.testing.assert_close(shuffled[:, :3], plain[:, :3], atol=1e-5, rtol=0)
    expected = plain[:, 3:].gather(1, order[..., None].expand(-1, -1, 48))
    torch.testing.assert_close(shuffled[:, 3:], expected, atol=1e-5, rtol=0)


def test_a_relative_bias_cannot_lose_patches():
    encoder = VisionTransformer(ViTConfig().with_options(**SIZE, positions="relative"))
    with pytest.raises(ValueError, match='use positions="sincos"'):
        encoder.encode(torch.randn(1, 3, 32, 48), keep=torch.arange(6)[None])


def test_pixels_and_images_are_each_others_inverse():
    images = torch.randn(2, 3, 32, 48)
    pixels = pixels_of(images, 8)
    assert pixels.shape == (2, 24, 192)
    assert torch.equal(pixels[1, 8].reshape(8, 8, 3), images[1, :, 8:16, 16:24].permute(1, 2, 0))  # row 1, column 2
    assert torch.equal(images_of(pixels, 8, (4, 6)), images)


@pytest.mark.parametrize("norm_pix", [False, True])
def test_a_picture_of_the_target_is_the_image(norm_pix):
    model, images = small(norm_pix=norm_pix), torch.rand(2, 3, 48, 16) * 3 - 1
    torch.testing.assert_close(model.to_images(model.target(images), images), images, atol=1e-5, rtol=0)


def test_flat_patches_have_a_finite_target():
    model = small(norm_pix=True)
    assert torch.equal(model.target(torch.full((1, 3, 32, 48), 0.5)), torch.zeros(1, 24, 192))
    assert model(torch.zeros(2, 3, 32, 48)).loss.isfinite()


def test_positions_follow_the_image():
    """A larger grid: encoder and decoder resize theirs alike, by the rule of the encoder."""
    model = small(positions="learned", **{"decoder.positions": "learned"})
    for table in (model.encoder.positions.table, model.decoder.positions.table):
        torch.nn.init.normal_(table)
    images, noise = torch.randn(2, 3, 40, 64), torch.rand(2, 40)
    trace = Trace("masked", "positions")
    out = model(images, noise, decoder_trace=trace)
    assert out.prediction.shape == (2, 40, 192) and out.mask.sum(1).tolist() == [30, 30]
    added = trace["positions"] - trace["masked"]
    old = model.decoder.positions.table[:, 1:].reshape(1, 4, 6, 32).permute(0, 3, 1, 2)
    new = torch.nn.functional.interpolate(old, size=(5, 8), mode="bicubic").flatten(2).transpose(1, 2)
    torch.testing.assert_close(added[:, 1:], new.expand(2, -1, -1), atol=1e-5, rtol=0)
    masked = trace["masked"][:, 1:]
    assert torch.equal(masked[out.mask == 1], model.decoder.mask_token[0].expand(60, -1))


def test_gradient_checkpointing_gives_the_same_gradients():
    plain, saving = small().train(), small(gradient_checkpointing=True).train()
    saving.load_state_dict(plain.state_dict())
    images, noise = torch.randn(2, 3, 32, 48), torch.rand(2, 24)
    for model in (plain, saving):
        model(images, noise).loss.backward()
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert a.grad.abs().max() > 0, name
        torch.testing.assert_close(a.grad, b.grad)


def test_bfloat16_autocast_and_export():
    model, images, noise = small(), torch.randn(2, 3, 32, 48), torch.rand(2, 24)
    with torch.no_grad():
        expected = model(images, noise)
        with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
            half = model(images, noise)
        assert half.loss.dtype == torch.float32 and half.loss.item() == pytest.approx(expected.loss.item(), rel=0.05)
        program = torch.export.export(model, (images, noise)).module()
        for a, b in zip(program(images, noise), expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- the encoder, files, names


def test_the_encoder_is_a_vit_that_can_be_used_alone(tmp_path):
    model = vitlab.create("mae_cifar", depth=2)
    assert isinstance(model.encoder, VisionTransformer) and model.encoder.config == model.config.encoder
    assert model.encoder.preprocess is model.preprocess is not None and model.encoder.card is model.card
    vitlab.save(model.encoder, tmp_path / "encoder")
    again = vitlab.load(tmp_path / "encoder", encoder=True)  # without it: a note that there is no more
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(images), model.encoder.eval()(images)) and again.preprocess == model.preprocess


def test_native_files(tmp_path):
    model = small(norm_pix=True)
    vitlab.save(model, tmp_path)
    again = vitlab.load(tmp_path)
    assert (again.family, again.config, again.labels) == ("mae", model.config, None)
    images, noise = torch.randn(2, 3, 32, 48), torch.rand(2, 24)
    assert torch.equal(again(images, noise).prediction, model(images, noise).prediction)
    assert vitlab.load(tmp_path, mask_ratio=0.5, norm_pix=False).config.mask_ratio == 0.5
    larger = vitlab.load(tmp_path, image_size=(64, 48))
    assert larger(torch.randn(1, 3, 64, 48)).mask.shape == (1, 48)
    tuned = vitlab.load(tmp_path, encoder=True, classes=5, pooling="mean")
    assert tuned(images).shape == (2, 5)
    assert torch.equal(tuned.forward_features(images), model.encoder.forward_features(images))
    for wrong in (dict(classes=5), dict(decoder=dict(heads=4)), dict(decoder=dict(depth=1)), dict(depth=1)):
        with pytest.raises(ValueError, match=str(tmp_path)):
            vitlab.load(tmp_path, **wrong)


REMEDIES = {
    "mask_ratio=1.0 must be at least 0 and below 1": dict(mask_ratio=1.0),
    "decoder: width 32 is not a multiple of heads 3: use heads=2": dict(decoder=dict(heads=3)),
    "decoder: sincos positions need a width that is a multiple of 4: use 12": dict(decoder=dict(width=10, heads=2)),
    "Did you mean 'norm_pix'": dict(norm_pix_loss=True),
    "Did you mean 'decoder.width'": dict(decoder_embed_dim=256),
    "decoder is a group of width, depth, heads": dict(decoder=256),
    "expected sincos | learned": dict(positions="rotary"),
    "48 is not a multiple of 9: use 54 (or 45)": dict(patch_size=9, image_size=(36, 48)),
}


@pytest.mark.parametrize(("remedy", "options"), REMEDIES.items())
def test_what_cannot_work_is_refused_with_a_remedy(remedy, options):
    with pytest.raises(ValueError) as error:
        MAEConfig().with_options(**SMALL).with_options(**options)
    assert remedy in str(error.value)


def test_input_that_cannot_work_is_refused_in_words():
    model = small()
    images = torch.randn(2, 3, 32, 48)
    cases = [
        ((images[:, :1],), {}, r"must be \(batch, 3, height, width\)"),
        ((images[..., :44],), {}, "44 is not a multiple of 8: use 48"),
        ((images, torch.rand(2, 23)), {}, r"noise is \(2, 23\) but must be \(2, 24\)"),
        ((images[:, :, :8, :16],), {}, "mask_ratio=0.75 of 2 patches leaves none visible"),
        ((images,), dict(mask_ratio=0.0), "mask_ratio=0 of 24 patches hides none"),
        ((images,), dict(trace=Trace("pixels")), "cannot give 'pixels'"),
        ((images,), dict(decoder_trace=Trace("patch_embed")), "It can give: embed, masked, position_embedding, positions"),
    ]
    for args, options, words in cases:
        with pytest.raises(ValueError, match=words):
            model(*args, **options)


def test_options_by_name_by_group_and_by_path():
    by_group = MAEConfig().with_options(decoder=dict(width=64, heads=2), width=192, heads=3)
    assert by_group == MAEConfig().with_options(**{"decoder.width": 64, "decoder.heads": 2}, width=192, heads=3)
    assert (by_group.width, by_group.decoder.width, by_group.decoder.depth) == (192, 64, 8)
    assert MAEConfig.from_dict(json.loads(json.dumps(by_group.to_dict()))) == by_group


def by_formula(c: MAEConfig) -> int:
    """Parameters, from the paper's description: two stacks of blocks, a token each, what joins them and paints."""

    def blocks(width: int, depth: int, ratio: float) -> int:
        hidden = round(width * ratio)
        return depth * (4 * width * width + 4 * width + 2 * width * hidden + hidden + width + 4 * width) + 2 * width

    pixels, d = c.channels * c.patch_size**2, c.decoder
    encoder = pixels * c.width + c.width + c.width + blocks(c.width, c.depth, c.mlp_ratio)
    decoder = c.width * d.width + d.width + d.width + blocks(d.width, d.depth, d.mlp_ratio)
    return encoder + decoder + d.width * pixels + pixels


@pytest.mark.parametrize("name", MODELS)
def test_every_name_has_its_size_and_runs(name):
    with torch.device("meta"):
        model = vitlab.create(name)
        c = model.config
        out = model(torch.empty(2, c.channels, *c.image_size))
    assert sum(p.numel() for p in model.parameters()) == by_formula(c)
    assert out.prediction.shape == (2, c.grid[0] * c.grid[1], c.patch_size**2 * c.channels) and out.loss.shape == ()
    assert model.preprocess.size == c.image_size and not c.classes


def test_names():
    with torch.device("meta"):
        assert vitlab.create("mae_vit_large_patch16").config == MODELS["mae_large"]
        assert vitlab.create("vit_mae_base").config == MODELS["mae_base"]
        assert vitlab.create("mae_huge").config.patch_size == 14
    with pytest.raises(ValueError, match="there is no model named 'mae_vit_base_patch8'"):
        vitlab.create("mae_vit_base_patch8")
    for small_name, vit in (("mae_cifar", "vit_cifar"), ("mae_digits", "vit_digits")):
        ours, theirs = vitlab.create(small_name).encoder, vitlab.create(vit)
        assert ours.config == theirs.config.with_options(classes=0, positions="sincos")
        assert ours.preprocess == theirs.preprocess
