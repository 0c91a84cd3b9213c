"""Weights never load quietly into a slightly wrong network: contradictions are refused, guesses are said."""

import json

import pytest
import torch
import transformers as hf_library
from safetensors.torch import load_file, save_file

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import load_with_report

SMALL = dict(patch_size=8, width=48, depth=2, heads=4, classes=7)
TOLD = dict(heads=4, eps=1e-6, activation="gelu")


def timm_file(folder, **options):
    model = vitlab.create("vit_base", **{**SMALL, **options}).eval()
    convert.write(model, folder / "bare.safetensors", "timm")
    return model, folder / "bare.safetensors"


@pytest.mark.parametrize("size", [(32, 48), (16, 32), (24, 40), (40, 56), (48, 64)])
def test_a_bare_non_square_grid_is_asked_for_and_then_right(size, tmp_path):
    """1 + 4 x 6 positions are 25, which is also 5 x 5: that must not be taken for the grid."""
    model, path = timm_file(tmp_path, image_size=size)
    with pytest.raises(ValueError, match="must be passed"):
        vitlab.load(path, **TOLD)
    images = torch.randn(2, 3, *size)
    assert torch.equal(vitlab.load(path, **TOLD, image_size=size)(images), model(images))


def test_both_readings_of_an_ambiguous_count_are_named(tmp_path):
    _, path = timm_file(tmp_path, image_size=(32, 48))
    with pytest.raises(ValueError) as error:
        vitlab.load(path, **TOLD)
    assert "image_size=(32, 48)" in str(error.value) and 'prefix_positions="none"' in str(error.value)
    told = vitlab.load(path, **TOLD, prefix_positions="none")
    assert (told.config.image_size, told.config.positions.prefix_positions) == ((40, 40), "none")


def test_a_square_grid_without_class_position_loads_when_told(tmp_path):
    model, path = timm_file(tmp_path, image_size=32, prefix_positions="none")
    for told in (dict(prefix_positions="none"), dict(image_size=32)):
        loaded = vitlab.load(path, **TOLD, **told)
        assert torch.equal(loaded(torch.ones(1, 3, 32, 32)), model(torch.ones(1, 3, 32, 32)))


def test_a_resize_that_could_have_been_the_stored_grid_is_said(tmp_path):
    _, path = timm_file(tmp_path, image_size=32)
    _, report = load_with_report(path, **TOLD, image_size=(16, 64))
    assert any("grid=(2, 8)" in note for note in report.notes)


def test_a_pooler_beside_a_classifier_is_not_read(tmp_path):
    config = hf_library.ViTConfig(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96, image_size=16, patch_size=8
    )
    theirs = hf_library.ViTForImageClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    extra = {"vit.pooler.dense.weight": torch.randn(48, 48), "vit.pooler.dense.bias": torch.randn(48)}
    save_file({**weights, **extra}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, report = load_with_report(tmp_path)
    assert {row.theirs[0] for row in report.rows if row.status == "unused"} == extra.keys()
    images = torch.randn(2, 3, 16, 16)
    with torch.inference_mode():
        torch.testing.assert_close(model(images), theirs(images).logits, atol=1e-5, rtol=0)


CONTRADICTIONS = [
    dict(heads=2),
    dict(width=96),
    dict(depth=4),
    dict(mlp_ratio=2.0),
    dict(qk_norm=True),
    dict(patch_size=16),
    dict(class_token=False, pooling="mean"),
    dict(distill_token=True),
    dict(prefix_positions="none"),
    dict(positions="rotary"),
    dict(norm="post"),
]


@pytest.mark.parametrize("layout", ["native", "hf", "timm"])
@pytest.mark.parametrize("wrong", CONTRADICTIONS, ids=str)
def test_overrides_that_make_another_network_are_refused(layout, wrong, tmp_path):
    model = vitlab.create("vit_base", image_size=32, **SMALL)
    convert.write(model, tmp_path / layout, layout)
    with pytest.raises(ValueError, match=str(tmp_path)) as error:
        vitlab.load(tmp_path / layout, **wrong)
    assert next(iter(wrong)) in str(error.value) or "positions" in str(error.value)


def test_heads_that_contradict_a_jax_file_are_refused(tmp_path):
    model = vitlab.create("vit_base", image_size=32, **SMALL)
    convert.write(model, tmp_path / "x.npz", "jax")
    with pytest.raises(ValueError, match="heads=4"):
        vitlab.load(tmp_path / "x.npz", heads=2, eps=1e-6, activation="gelu")


def test_grid_is_refused_where_the_folder_says_it(tmp_path):
    vitlab.save(vitlab.create("vit_base", image_size=32, **SMALL), tmp_path)
    with pytest.raises(ValueError, match="bare weights"):
        vitlab.load(tmp_path, grid=(2, 8))


def test_guessed_heads_are_said(tmp_path):
    model = vitlab.create("vit_cifar", depth=1)  # width 192 with 12 heads, where published networks have 3
    notes = convert.write(model, tmp_path / "bare.safetensors", "timm")
    assert notes == ["a bare file does not say its heads: load it with heads=12."]
    _, report = load_with_report(tmp_path / "bare.safetensors")
    assert "heads=3" in report.notes[0]


@pytest.mark.parametrize("pooling", ["class", "mean", "mean_norm"])
@pytest.mark.parametrize("ratio", [2.0, 2.3, 61 / 48])
def test_timm_folders_come_back_as_they_were(pooling, ratio, tmp_path):
    model = vitlab.create("vit_base", image_size=32, **SMALL, pooling=pooling, mlp_ratio=ratio).eval()
    convert.write(model, tmp_path, "timm")
    args = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["model_args"]
    assert int(48 * args["mlp_ratio"]) == model.config.mlp_hidden  # timm cuts off
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(vitlab.load(tmp_path)(images), model(images))


TIMM = {
    "norm_layer='rmsnorm'": dict(norm_layer="rmsnorm"),
    "pool_include_prefix": dict(pool_include_prefix=True),
    "global_pool='map'": dict(global_pool="map"),
    "depth": dict(depth=5),
    "width": dict(embed_dim=96),
    "patch_size": dict(patch_size=4),
    "block_fn": dict(block_fn="parallel"),
}


@pytest.mark.parametrize(("says", "args"), TIMM.items())
def test_timm_arguments_that_are_not_this_network_are_refused(says, args, tmp_path):
    convert.write(vitlab.create("vit_base", image_size=32, **SMALL), tmp_path, "timm")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["model_args"] |= args
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match=says):
        vitlab.load(tmp_path)


def test_timms_clip_names_tell_eps_and_activation(tmp_path):
    model = vitlab.create("vit_base", image_size=32, **SMALL, norm_pre=True, patch_bias=False)
    convert.write(model, tmp_path, "timm")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del config["vitlab"], config["model_args"]["act_layer"]
    config["architecture"] = "vit_base_patch16_clip_quickgelu_224"
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    loaded = vitlab.load(tmp_path)
    assert (loaded.config.norm.eps, loaded.config.mlp.activation) == (1e-5, "quick_gelu")


def test_what_would_read_back_as_another_network_is_not_written(tmp_path):
    mean = vitlab.create("vit_base", image_size=32, **SMALL, pooling="mean")
    with pytest.raises(ValueError, match="pooling=mean"):
        convert.write(mean, tmp_path / "x.npz", "jax")
    dino = vitlab.create("dinov2_small", image_size=28, depth=1, mlp_ratio=2.3)
    with pytest.raises(ValueError, match=r"mlp_ratio=2\.3"):
        convert.write(dino, tmp_path / "hf", "hf")


@pytest.mark.parametrize(("name", "mean"), [("dist", 0.485), ("headless", 0.485), ("plain", 0.5)])
def test_facebooks_bare_files_have_imagenets_mean(name, mean, tmp_path):
    _, path = timm_file(tmp_path, image_size=32, distill_token=name == "dist", classes=0 if name == "headless" else 7)
    assert vitlab.load(path, **TOLD).preprocess.mean[0] == mean


def test_blocks_that_are_not_numbered_in_a_row_are_refused(tmp_path):
    _, path = timm_file(tmp_path, image_size=32)
    state = {key.replace("blocks.1.", "blocks.999999."): value for key, value in load_file(path).items()}
    save_file(state, path)
    with pytest.raises(ValueError, match="not numbered"):
        vitlab.load(path, **TOLD)


THEIRS = dict(hidden_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=8)


@pytest.mark.parametrize(("source", "options"), [("mae", {}), ("vit", {"classes": 9}), ("vit", {"image_size": 32})])
def test_check_never_crashes_and_says_what_it_did_not_compare(source, options, tmp_path):
    if source == "mae":
        hf_library.ViTMAEModel(hf_library.ViTMAEConfig(**THEIRS, intermediate_size=96)).save_pretrained(tmp_path / "a")
    else:
        hf_library.ViTModel(hf_library.ViTConfig(**THEIRS, intermediate_size=96)).save_pretrained(tmp_path / "a")
    model, _ = load_with_report(tmp_path / "a", **options)
    convert.write(model, tmp_path / "b", "native")
    rows = convert.compare(tmp_path / "a", tmp_path / "b", model, changed=bool(options))
    assert rows[0].difference == 0
    assert rows[1].difference is None and rows[1].remark


def test_check_compares_features_of_encoders(tmp_path):
    hf_library.Dinov2Model(hf_library.Dinov2Config(**THEIRS)).save_pretrained(tmp_path / "hf")
    model, _ = load_with_report(tmp_path / "hf")
    convert.write(model, tmp_path / "back", "hf")
    rows = convert.compare(tmp_path / "hf", tmp_path / "back", model, changed=False)
    assert len(rows) == 3 and all(row.difference is not None and row.difference < 1e-5 for row in rows)


def test_fresh_weights_do_not_follow_the_default_device(tmp_path):
    vitlab.save(vitlab.create("vit_base", image_size=32, **SMALL), tmp_path)
    with torch.device("meta"):
        model = vitlab.load(tmp_path, classes=3)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
