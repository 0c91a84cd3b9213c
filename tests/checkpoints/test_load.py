"""Loading with changes: new heads, other sizes, other poolings, and what the report says of each key."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import vitlab
from vitlab.checkpoints import convert, jax, keymap, timm
from vitlab.checkpoints.load import load_with_report
from vitlab.layers.trace import Trace
from vitlab.models.vit_config import SIZES

OPTIONS = dict(image_size=(32, 48), patch_size=8, width=48, depth=2, heads=4, classes=7)


@pytest.fixture
def saved(tmp_path):
    model = vitlab.create("vit_base", **OPTIONS).eval()
    model.labels = list("abcdefg")
    return model, vitlab.save(model, tmp_path / "native")


def test_new_classes_give_a_new_head_and_keep_the_rest(saved):
    model, folder = saved
    other, report = load_with_report(folder, classes=3)
    assert [r.ours for r in report.rows if r.status == "new"] == ["head.weight", "head.bias"]
    assert (other.labels, other.config.classes) == (None, 3)
    images = torch.randn(2, 3, 32, 48)
    assert torch.equal(other.forward_features(images), model.forward_features(images))
    assert other.head.weight.std() > 0.01  # initialised, not left empty
    for parameter in other.parameters():
        assert parameter.requires_grad and not parameter.is_meta


def test_classes_0_gives_features(saved):
    model, folder = saved
    features, report = load_with_report(folder, classes=0)
    images = torch.randn(2, 3, 32, 48)
    assert torch.equal(features(images), model.forward_features(images)[:, 0])
    assert report.counts()["unused"] == 2


def test_another_size_resizes_positions_and_preprocess(saved):
    model, folder = saved
    other, report = load_with_report(folder, image_size=(64, 40))
    assert other.positions.table.shape == (1, 1 + 8 * 5, 48)
    assert other.preprocess.size == (64, 40)
    row = next(r for r in report.rows if r.status == "resized")
    assert (row.ours, row.note) == ("positions.table", "from 1x25x48, grid 4x6 to 8x5")
    patches = model.positions.table[:, 1:].reshape(1, 4, 6, 48).permute(0, 3, 1, 2)
    theirs = F.interpolate(patches, size=(8, 5), mode="bicubic").flatten(2).transpose(1, 2)
    torch.testing.assert_close(other.positions.table[:, 1:], theirs)
    images = torch.randn(2, 3, 64, 40)
    torch.testing.assert_close(other(images), model(images), atol=1e-5, rtol=0)  # as at forward time


def test_the_turned_grid_of_equal_count_is_resized_too(saved):
    model, folder = saved
    other, report = load_with_report(folder, image_size=(48, 32))
    assert report.counts()["resized"] == 1
    assert not torch.equal(other.positions.table, model.positions.table)


def test_relative_tables_are_resized(tmp_path):
    model = vitlab.create("vit_base", **OPTIONS, positions="relative").eval()
    vitlab.save(model, tmp_path)
    other, report = load_with_report(tmp_path, image_size=(48, 48))
    assert report.counts()["resized"] == 2
    images = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(other(images), model(images), atol=1e-5, rtol=0)


def test_options_without_weights_can_change_freely(saved):
    _, folder = saved
    model = vitlab.load(folder, stochastic_depth=0.2, attention="explicit", dropout=0.1)
    assert model.config.residual.stochastic_depth == 0.2
    trace = Trace("attention", gradients=True)
    model(torch.randn(1, 3, 32, 48), trace=trace).sum().backward()
    assert trace.gradient("attention", 0).abs().sum() > 0


def test_mean_pooling_with_its_own_norm_for_fine_tuning(saved):
    _, folder = saved
    model, report = load_with_report(folder, pooling="mean_norm", classes=5)
    news = {r.ours for r in report.rows if r.status == "new"}
    assert news == {"head.weight", "head.bias", "head_norm.weight", "head_norm.bias"}
    assert {r.theirs[0] for r in report.rows if r.status == "unused"} == {"norm.weight", "norm.bias"}
    assert model(torch.randn(2, 3, 32, 48)).shape == (2, 5)


def test_a_pretraining_head_goes_when_a_new_classifier_comes(tmp_path):
    model = vitlab.create("vit_base", **{**OPTIONS, "classes": 0}, head_hidden=20)
    vitlab.save(model, tmp_path)
    assert vitlab.load(tmp_path, classes=5).config.head.head_hidden == 0
    assert vitlab.load(tmp_path, classes=5, head_hidden=20).config.head.head_hidden == 20


def test_half_precision_files_load_as_float32(saved, tmp_path):
    model, _ = saved
    convert.write(model, tmp_path / "timm", "timm")
    from safetensors.torch import load_file

    halved = {k: v.half() for k, v in load_file(tmp_path / "timm" / "model.safetensors").items()}
    save_file(halved, tmp_path / "timm" / "model.safetensors")
    loaded, _ = load_with_report(tmp_path / "timm")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded.head.weight, model.head.weight.half().float())


WIDTHS = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16}


@pytest.mark.parametrize(("width", "heads"), WIDTHS.items())
def test_published_widths_need_no_heads(width, heads, tmp_path):
    model = vitlab.create("vit_base", image_size=16, patch_size=8, width=width, heads=heads, depth=1, classes=2)
    convert.write(model, tmp_path / "bare.safetensors", "timm")
    assert load_with_report(tmp_path / "bare.safetensors")[0].config.heads == heads


@pytest.mark.parametrize("size", SIZES)
def test_a_size_is_written_once(size, tmp_path):
    """Its row tells the heads, by the width of bare weights and by the name in a timm folder."""
    small = dict(image_size=16, patch_size=8, depth=1, mlp_ratio=1.0, classes=2)
    model = vitlab.create(f"vit_{size}", **small)
    convert.write(model, tmp_path / size, "timm")
    config = json.loads((tmp_path / size / "config.json").read_text(encoding="utf-8"))
    config |= {"architecture": f"vit_{size}_patch16_224", "model_args": {"img_size": 16}}
    (tmp_path / size / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for path in (tmp_path / size, tmp_path / size / "model.safetensors"):
        assert load_with_report(path)[0].config.heads == SIZES[size][2]["heads"]


def test_a_square_count_may_be_resized_or_told_to_be_another_grid(tmp_path):
    """196 = 14 x 14 = 7 x 28: a bare file is taken as square unless the grid is told."""
    model = vitlab.create(
        "vit_base", image_size=(7 * 4, 28 * 4), patch_size=4, width=48, heads=4, depth=1, classes=2
    ).eval()
    convert.write(model, tmp_path / "wide.safetensors", "timm")
    told = dict(heads=4, eps=1e-6, activation="gelu", resize_rule="bicubic")
    images = torch.randn(1, 3, 28, 112)
    right = vitlab.load(tmp_path / "wide.safetensors", grid=(7, 28), **told)
    assert torch.equal(right(images), model(images))
    resized, report = load_with_report(tmp_path / "wide.safetensors", image_size=(28, 112), **told)
    assert report.counts()["resized"] == 1 and "grid 14x14 to 7x28" in next(r.note for r in report.rows if r.note)
    assert resized.config.image_size == (28, 112)


def test_saving_twice_over_the_same_folder_keeps_one_whole_checkpoint(saved):
    model, folder = saved
    with torch.no_grad():
        model.head.bias.fill_(3)
    vitlab.save(model, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["model.json", "weights.safetensors"]
    assert torch.equal(vitlab.load(folder).head.bias, torch.full((7,), 3.0))


def timm_state(**options) -> dict[str, torch.Tensor]:
    model = vitlab.create("vit_base", **{**OPTIONS, "image_size": 32, **options}).eval()
    return keymap.write("timm", timm.RULES, dict(model.state_dict()), heads=4)


TOLD = dict(heads=4, eps=1e-6, activation="gelu")


def test_the_encoder_of_facebooks_mae_file_alone_names_what_is_left_out(tmp_path):
    """The released file with decoder: its mask token has the decoder's width."""
    encoder = {key: value for key, value in timm_state().items() if not key.startswith("head.")}
    decoder = {"mask_token": torch.zeros(1, 1, 20), "decoder_pos_embed": torch.zeros(1, 17, 20)}
    decoder |= {"decoder_blocks.0.attn.qkv.weight": torch.zeros(60, 20), "decoder_pred.bias": torch.zeros(192)}
    torch.save({"model": {**encoder, **decoder}}, tmp_path / "mae.pth")
    model, report = load_with_report(tmp_path / "mae.pth", **TOLD, encoder=True)
    assert report.dialect == "facebook"
    assert {row.theirs[0] for row in report.rows if row.status == "unused"} == decoder.keys()
    assert model.preprocess.mean == (0.485, 0.456, 0.406)
    assert torch.equal(model.blocks[1].mlp.fc2.weight, encoder["blocks.1.mlp.fc2.weight"])
    tuned = vitlab.load(tmp_path / "mae.pth", **TOLD, encoder=True, classes=5, pooling="mean_norm")
    assert tuned(torch.randn(2, 3, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize(
    ("key", "option"), [("pos_embed", "positions='none'"), ("patch_embed.proj.bias", "patch_bias=False")]
)
def test_a_tensor_that_networks_rarely_lack_must_be_said_to_be_absent(key, option, tmp_path):
    state = timm_state()
    del state[key]
    save_file(state, tmp_path / "less.safetensors")
    with pytest.raises(ValueError, match=option):
        vitlab.load(tmp_path / "less.safetensors", **TOLD)
    name, value = option.split("=")
    told = {name: value.strip("'") if value != "False" else False}
    assert vitlab.load(tmp_path / "less.safetensors", **TOLD, image_size=32, **told)(
        torch.randn(1, 3, 32, 32)
    ).shape == (1, 7)


@pytest.mark.parametrize(
    "wrong",
    [dict(hidden_size=64), dict(num_hidden_layers=3), dict(patch_size=4), dict(image_size=64), dict(qkv_bias=False)],
    ids=str,
)
def test_a_config_that_contradicts_its_weights_is_refused(wrong, saved, tmp_path):
    convert.write(saved[0], tmp_path / "hf", "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, **wrong}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"the config says|do not fit a grid of 8x8"):
        vitlab.load(tmp_path / "hf")


def test_fillers_are_no_labels_and_labels_must_fit_the_classes(saved, tmp_path):
    model, folder = saved
    model.labels = None
    convert.write(model, tmp_path / "hf", "hf")
    assert vitlab.load(tmp_path / "hf").labels is None
    card = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    del card["seal"]
    (folder / "model.json").write_text(json.dumps({**card, "labels": ["a", "b"]}), encoding="utf-8")
    with pytest.raises(ValueError, match="list of 7 names"):
        vitlab.load(folder)


def test_bfloat16_arrays_of_jax_are_read(tmp_path):
    model = vitlab.create("vit_base", **OPTIONS).eval()
    arrays = keymap.write("jax", jax.RULES, dict(model.state_dict()), heads=4)
    halved = {k: v.bfloat16().view(torch.int16).numpy().view("V2") for k, v in arrays.items()}
    np.savez(tmp_path / "half.npz", **halved)
    loaded = vitlab.load(tmp_path / "half.npz", image_size=(32, 48), eps=1e-6, activation="gelu")
    assert torch.equal(loaded.head.weight, model.head.weight.bfloat16().float())


def test_preprocess_can_be_told(saved):
    _, folder = saved
    model = vitlab.load(folder, preprocess=dict(mean=(0.1, 0.2, 0.3), how="crop"))
    assert (model.preprocess.mean, model.preprocess.how, model.preprocess.size) == ((0.1, 0.2, 0.3), "crop", (32, 48))
    with pytest.raises(ValueError, match="no option 'men'"):
        vitlab.load(folder, preprocess=dict(men=0.5))


@pytest.mark.parametrize("patch_size", [12, 16])
def test_larger_patches_make_the_same_tokens_of_a_larger_image(saved, patch_size):
    """Resized bilinearly patch by patch, an image gives the tokens it gave: FlexiViT's PI-resize loses nothing."""
    model, folder = saved
    size = (4 * patch_size, 6 * patch_size)
    other, report = load_with_report(folder, resize_patches=True, patch_size=patch_size, image_size=size)
    resized = {row.ours: row.note for row in report.rows if row.status == "resized"}
    assert resized == {"patch_embed.proj.weight": f"from 48x3x8x8, patches of 8 to {patch_size} pixels"}
    patches = torch.randn(2, 3, 4, 6, 8, 8)
    larger = F.interpolate(patches.flatten(0, 3)[:, None], (patch_size, patch_size), mode="bilinear")
    larger = larger.unflatten(0, (2, 3, 4, 6))[:, :, :, :, 0]
    image, large = (x.transpose(3, 4).flatten(4, 5).flatten(2, 3) for x in (patches, larger))
    torch.testing.assert_close(other(large), model(image), atol=1e-5, rtol=0)


def test_smaller_patches_sum_the_weights_of_what_they_stand_for(saved):
    model, folder = saved
    other = vitlab.load(folder, resize_patches=True, patch_size=4)
    assert other.config.grid == (8, 12) and other.preprocess.size == (32, 48)
    weight = model.patch_embed.proj.weight
    torch.testing.assert_close(other.patch_embed.proj.weight, weight.unfold(2, 2, 2).unfold(3, 2, 2).sum((-2, -1)))
    colour = torch.randn(1, 3, 1, 1).expand(1, 3, 32, 48)  # of one colour, every patch makes the same token
    small, large = other.patch_embed(colour)[0, 0], model.patch_embed(colour)[0, 0]
    torch.testing.assert_close(small, large, atol=1e-5, rtol=0)


def test_patches_are_resized_only_if_asked_for_and_where_there_is_one_projection(saved, tmp_path):
    _, folder = saved
    with pytest.raises(ValueError, match=r"patch_size=8, so .* resize_patches=True"):
        vitlab.load(folder, patch_size=4)
    vitlab.save(vitlab.create("vit_base", stem="conv", **OPTIONS), tmp_path / "conv")
    with pytest.raises(ValueError, match="another network"):
        vitlab.load(tmp_path / "conv", resize_patches=True, patch_size=4)
