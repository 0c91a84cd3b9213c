"""transformers' ViTMAEForPreTraining with the same weights and the same noise: prediction, mask, loss; both ways."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import AssumedWarning, load_with_report
from vitlab.layers.trace import Trace
from vitlab.models.mae import MaskedAutoencoder
from vitlab.models.vit import VisionTransformer

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
SMALL = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, patch_size=8)
DECODER = dict(
    decoder_hidden_size=32, decoder_num_hidden_layers=2, decoder_num_attention_heads=2, decoder_intermediate_size=80
)
CONFIGS = {
    "plain": dict(image_size=32),
    "norm_pix": dict(image_size=32, norm_pix_loss=True, mask_ratio=0.5),
    "odd share, grey, relu": dict(image_size=40, num_channels=1, hidden_act="relu", mask_ratio=0.62),
    "no qkv bias, eps 1e-5": dict(image_size=24, qkv_bias=False, layer_norm_eps=1e-5, norm_pix_loss=True),
}


def their_mae(positions: bool = True, **options) -> hf.ViTMAEForPreTraining:
    """Every parameter far from its start value, and tokens small, so that eps shows; positions=False: sin-cos ones."""
    model = hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**SMALL, **DECODER, **options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.002 if "embeddings" in name else 0.2)
            if not positions and "pos" in name:  # transformers' own, in the order that released weights have
                side = options["image_size"] // 8
                table = build_2d_sinusoidal_position_embedding(side, side, parameter.shape[-1], cls_token=True)
                parameter.copy_(table.roll(parameter.shape[-1] // 2, dims=1))
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return model


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """Under the names of version 4: version 5 saves decoder_layers as decoder_encoder.layer, and reads both."""
    found = load_file(folder / "model.safetensors")
    return {key.replace("decoder_encoder.layer.", "decoder_layers."): value for key, value in found.items()}


def inputs(model: MaskedAutoencoder, batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    c = model.config
    return torch.randn(batch, c.channels, *c.image_size), torch.rand(batch, c.grid[0] * c.grid[1])


def agree(ours: MaskedAutoencoder, theirs, images: torch.Tensor, noise: torch.Tensor) -> None:
    with torch.inference_mode():
        a, b = ours(images, noise), theirs(images, noise=noise)
    assert torch.equal(a.mask, b.mask)
    torch.testing.assert_close(a.prediction, b.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(a.loss, b.loss, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_prediction_mask_and_loss_agree_both_ways(options, tmp_path):
    theirs = their_mae(**options)
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    assert isinstance(ours, MaskedAutoencoder)
    assert (ours.config.positions, ours.config.decoder.positions) == ("learned", "learned")  # kept as they are
    images, noise = inputs(ours)
    agree(ours, theirs, images, noise)
    convert.write(ours, tmp_path / "back", "hf")
    source, written = saved(tmp_path / "hf"), load_file(tmp_path / "back" / "model.safetensors")
    assert source.keys() == written.keys()
    assert all(torch.equal(value, written[key]) for key, value in source.items())
    agree(ours, hf.ViTMAEForPreTraining.from_pretrained(tmp_path / "back").eval(), images, noise)


def test_gradients_agree(tmp_path):
    theirs = their_mae(image_size=32, norm_pix_loss=True)
    theirs.save_pretrained(tmp_path)
    ours = vitlab.load(tmp_path).train()
    images, noise = inputs(ours)
    ours(images, noise).loss.backward()
    theirs(images, noise=noise).loss.backward()
    pairs = {
        "patches": (ours.encoder.patch_embed.proj, theirs.vit.embeddings.patch_embeddings.projection),
        "norm": (ours.encoder.norm, theirs.vit.layernorm),
        "embed": (ours.decoder.embed, theirs.decoder.decoder_embed),
        "pixels": (ours.decoder.pixels, theirs.decoder.decoder_pred),
    }
    found = {name: (a.weight, b.weight) for name, (a, b) in pairs.items()}
    found["class token"] = (ours.encoder.class_token, theirs.vit.embeddings.cls_token)
    found["mask token"] = (ours.decoder.mask_token, theirs.decoder.mask_token)
    for a, b in found.values():
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)


def test_sincos_tables_become_fixed_positions_and_are_written_again(tmp_path):
    theirs = their_mae(positions=False, image_size=32)
    theirs.save_pretrained(tmp_path / "hf")
    ours, report = load_with_report(tmp_path / "hf")
    assert (ours.config.positions, ours.config.decoder.positions) == ("sincos", "sincos")
    unused = {row.theirs[0]: row.note for row in report.rows if row.status == "unused"}
    assert unused.keys() == {"vit.embeddings.position_embeddings", "decoder.decoder_pos_embed"}
    assert all("sin-cos" in note for note in unused.values())
    images, noise = inputs(ours)
    agree(ours, theirs, images, noise)
    vitlab.save(ours, tmp_path / "native")
    again = vitlab.load(tmp_path / "native")
    assert again.config == ours.config
    convert.write(again, tmp_path / "back", "hf")
    agree(ours, hf.ViTMAEForPreTraining.from_pretrained(tmp_path / "back").eval(), images, noise)


def test_a_table_that_is_nearly_sincos_is_kept_exactly(tmp_path):
    theirs = their_mae(positions=False, image_size=32)
    with torch.no_grad():
        theirs.vit.embeddings.position_embeddings[0, 5, 7] += 1e-4
    theirs.save_pretrained(tmp_path)
    ours = vitlab.load(tmp_path)
    assert (ours.config.positions, ours.config.decoder.positions) == ("learned", "sincos")
    assert torch.equal(ours.encoder.positions.table, theirs.vit.embeddings.position_embeddings)
    agree(ours, theirs, *inputs(ours))


@pytest.mark.parametrize("size", [(48, 64), (32, 16)])
def test_the_encoder_agrees_on_images_of_another_shape(size, tmp_path):
    """The decoder of transformers stretches its positions along the list of patches, so only encoders are compared."""
    theirs = their_mae(image_size=32)
    theirs.save_pretrained(tmp_path)
    ours = vitlab.load(tmp_path)
    N = size[0] * size[1] // 64
    images, noise = torch.randn(2, 3, *size), torch.rand(2, N)
    trace = Trace("norm")
    with torch.inference_mode():
        out = theirs.vit(images, noise=noise, interpolate_pos_encoding=True)
        mask = ours(images, noise, trace=trace).mask
    shuffled = noise.argsort(dim=1)[:, : N // 4]  # the order in which they stand there
    place = 1 + shuffled.argsort(dim=1)[..., None].expand(-1, -1, 48)
    expected = torch.cat([out.last_hidden_state[:, :1], out.last_hidden_state.gather(1, place)], dim=1)
    torch.testing.assert_close(trace["norm"], expected, atol=1e-5, rtol=0)
    assert torch.equal(mask, out.mask)


def test_the_keys_of_transformers_5_in_memory_are_read_too(tmp_path):
    theirs = their_mae(image_size=32, norm_pix_loss=True)
    torch.save(theirs.state_dict(), tmp_path / "v5.pth")
    assert "decoder.decoder_layers.0.attention.q_proj.weight" in theirs.state_dict()
    with pytest.warns(AssumedWarning, match=r"do not say eps=1e-12, activation=gelu, mask_ratio=0\.75"):
        ours = vitlab.load(tmp_path / "v5.pth", heads=4, decoder=dict(heads=2), norm_pix=True)
    assert ours.preprocess.mean == (0.485, 0.456, 0.406)
    agree(ours, theirs, *inputs(ours))
    with pytest.raises(ValueError, match=r"decoder's heads cannot be read .* decoder=dict\(heads=16\)"):
        load_with_report(tmp_path / "v5.pth", heads=4)
    with pytest.raises(ValueError, match=r"no option 'norm_pixels'.* Did you mean 'norm_pix'"):
        load_with_report(tmp_path / "v5.pth", heads=4, norm_pixels=True)


def test_stored_tensors_of_transformers_4(tmp_path):
    tensors, path = load_file(GOLDEN / "hf4_mae.safetensors"), tmp_path / "mae.safetensors"
    save_file({k.removeprefix("weights."): v for k, v in tensors.items() if k.startswith("weights.")}, path)
    told = dict(heads=4, decoder=dict(heads=4), mask_ratio=0.5, norm_pix=True)
    ours, report = load_with_report(path, **told)
    assert report.dialect == "hf" and report.counts()["matched"] == len(ours.state_dict()) == len(report.rows)
    with torch.inference_mode():
        out = ours(tensors["input.images"], tensors["input.noise"])
    for name in ("prediction", "mask"):
        torch.testing.assert_close(getattr(out, name), tensors[f"output.{name}"], atol=1e-5, rtol=0)
    torch.testing.assert_close(out.loss.reshape(1), tensors["output.loss"], atol=1e-5, rtol=0)
    convert.write(ours, tmp_path / "back", "hf")
    source, written = load_file(path), load_file(tmp_path / "back" / "model.safetensors")
    assert source.keys() == written.keys()
    assert all(torch.equal(value, written[key]) for key, value in source.items())


# ---------------------------------------------------------------- facebook's names

FACEBOOK = {  # theirs by transformers' saved names
    r"vit\.embeddings\.cls_token": "cls_token",
    r"vit\.embeddings\.position_embeddings": "pos_embed",
    r"vit\.embeddings\.patch_embeddings\.projection": "patch_embed.proj",
    r"vit\.encoder\.layer\.": "blocks.",
    r"vit\.layernorm": "norm",
    r"decoder\.mask_token": "mask_token",
    r"decoder\.decoder_layers\.": "decoder_blocks.",
    r"decoder\.(decoder_\w+)": r"\1",
    r"layernorm_before": "norm1",
    r"layernorm_after": "norm2",
    r"intermediate\.dense": "mlp.fc1",
    r"attention\.output\.dense": "attn.proj",
    r"output\.dense": "mlp.fc2",
}


def facebook_file(theirs, folder, *, decoder: bool = True):
    theirs.save_pretrained(folder)
    state: dict[str, torch.Tensor] = {}
    for key, value in saved(folder).items():
        name = key
        for pattern, replacement in FACEBOOK.items():
            name = re.sub(pattern, replacement, name)
        state[name] = value
    for key in [key for key in state if "attention.query" in key]:
        parts = [state.pop(key.replace("query", part)) for part in ("query", "key", "value")]
        state[key.replace("attention.attention.query", "attn.qkv")] = torch.cat(parts)
    if not decoder:
        state = {key: value for key, value in state.items() if not key.startswith(("decoder_", "mask_token"))}
    torch.save({"model": state}, folder / "mae.pth")
    return folder / "mae.pth", state


def test_facebooks_whole_file(tmp_path):
    theirs = their_mae(positions=False, image_size=32, layer_norm_eps=1e-6, norm_pix_loss=True)
    path, state = facebook_file(theirs, tmp_path)
    assert {"mask_token", "decoder_pos_embed", "decoder_blocks.1.attn.qkv.bias", "decoder_pred.weight"} <= state.keys()
    ours, report = load_with_report(path, heads=4, decoder=dict(heads=2), norm_pix=True)
    assert report.dialect == "facebook" and ours.config.eps == 1e-6 and ours.config.positions == "sincos"
    assert {row.theirs[0] for row in report.rows if row.status == "unused"} == {"pos_embed", "decoder_pos_embed"}
    assert "eps=1e-06, activation=gelu, mask_ratio=0.75" in report.notes[-1]
    agree(ours, theirs, *inputs(ours))


def test_facebooks_encoder_alone_says_so(tmp_path):
    theirs = their_mae(positions=False, image_size=32, layer_norm_eps=1e-6, mask_ratio=0.0)
    path, _ = facebook_file(theirs, tmp_path, decoder=False)
    ours, report = load_with_report(path, heads=4)
    assert isinstance(ours, VisionTransformer) and ours.config.positions.kind == "sincos"
    assert any("holds an encoder and no decoder" in note for note in report.notes)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        out = theirs.vit(images, noise=torch.arange(16.0).expand(2, 16)).last_hidden_state
        torch.testing.assert_close(ours.forward_features(images), out, atol=1e-5, rtol=0)
    for to in ("timm", "hf"):  # libraries that hold positions as a table
        convert.write(ours, tmp_path / to, to)
        again, _ = load_with_report(tmp_path / to)
        with torch.inference_mode():
            torch.testing.assert_close(again.forward_features(images), out, atol=1e-5, rtol=0)


def test_transformers_encoder_alone_says_so(tmp_path):
    their_mae(image_size=32).vit.save_pretrained(tmp_path)
    with pytest.warns(AssumedWarning, match="holds an encoder and no decoder"):
        assert isinstance(vitlab.load(tmp_path), VisionTransformer)


# ---------------------------------------------------------------- convert, and what does not belong together


def test_convert_checks_what_it_wrote_in_transformers(tmp_path):
    their_mae(positions=False, image_size=32).save_pretrained(tmp_path / "hf")
    model, _ = load_with_report(tmp_path / "hf")
    for to in ("native", "hf"):
        convert.write(model, tmp_path / to / "out", to)
        rows = convert.compare(tmp_path / "hf", tmp_path / to / "out", model, changed=False)
        assert len(rows) == (2 if to == "native" else 3)
        assert all(row.difference is not None and row.difference < 1e-5 for row in rows), rows
    convert.write(model, tmp_path / "bare.safetensors", "hf")
    rows = convert.compare(tmp_path / "hf", tmp_path / "bare.safetensors", model, changed=False)
    assert rows[0].difference < 1e-5
    for to in ("timm", "jax"):
        with pytest.raises(ValueError, match="--to hf or native, or its encoder alone"):
            convert.write(model, tmp_path / "no.npz", to)
    wide, _ = load_with_report(tmp_path / "hf", image_size=(32, 48))
    with pytest.raises(ValueError, match="square images only, and this one 32x48"):
        convert.write(wide, tmp_path / "wide", "hf")


def test_a_config_of_other_weights_is_refused(tmp_path):
    their_mae(image_size=32).save_pretrained(tmp_path)
    says = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**says, "decoder_num_hidden_layers": 5}), encoding="utf-8")
    with pytest.raises(ValueError, match="depth 5 is requested, but the weights have width 32 and depth 2"):
        vitlab.load(tmp_path)


def test_a_decoder_with_a_hole_is_refused(tmp_path):
    their_mae(image_size=32).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["decoder.decoder_norm.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"decoder\.norm\.weight is missing"):
        vitlab.load(tmp_path)
    assert vitlab.load(tmp_path, encoder=True, classes=5)(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_published_decoders_need_no_telling(tmp_path):
    """A bare file of the published width: 16 heads."""
    config = hf.ViTMAEConfig(**SMALL, image_size=32, decoder_num_hidden_layers=1)
    theirs = hf.ViTMAEForPreTraining(config).eval()
    nn.init.normal_(theirs.decoder.mask_token)
    torch.save(theirs.state_dict(), tmp_path / "bare.pth")
    ours, _ = load_with_report(tmp_path / "bare.pth", heads=4)
    assert (ours.config.decoder.width, ours.config.decoder.heads) == (512, 16)
    agree(ours, theirs, *inputs(ours))
