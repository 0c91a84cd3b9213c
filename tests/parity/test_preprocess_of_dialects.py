"""What pictures go through, by library and by name: size, crop, interpolation, mean and std, as each release says.

Wrong colours or a wrong crop cost accuracy and raise no error, so every value is written out here once more. Beside
them stand the other silent ones: class names in their order, and eps where a config does not say it.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import vitlab
from vitlab.checkpoints import convert, keymap, timm, torchvision
from vitlab.checkpoints.hf import labels_from, options_from
from vitlab.checkpoints.load import load_with_report
from vitlab.images.preprocess import Preprocess
from vitlab.models.config import option_paths
from vitlab.models.registry import MODELS

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
SMALL = dict(image_size=32, patch_size=8, width=48, depth=1, heads=4, classes=3)
HALF = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
OPENAI = dict(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
STRETCH = dict(how="stretch", resize=None, interpolation="bilinear", scale=1 / 255)
CROP = dict(how="crop", resize=None, interpolation="bicubic", scale=1 / 255)


def MARGIN(side: int) -> dict:
    """The shorter side to 256 for a crop of 224, and in proportion, as DeiT, DINO, MAE and DINOv2 are evaluated."""
    return {**CROP, "resize": round(256 * side / 224)}


# ---------------------------------------------------------------- bare files


def weights_of(name: str, folder: Path) -> Path:
    """The weights of a golden file, as that library would have saved them."""
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    weights = {key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")}
    save_file(weights, folder / "bare.safetensors")
    return folder / "bare.safetensors"


BARE = {
    "timm_vit_cls": ("timm", Preprocess((32, 48), **CROP, **HALF)),
    "lucidrains_vit": ("lucidrains", Preprocess((32, 32), **STRETCH, **HALF)),
    "facebook_dinov2_plain": ("facebook", Preprocess((28, 28), **MARGIN(28), **IMAGENET)),
    "facebook_dinov2_registers": ("facebook", Preprocess((28, 28), **MARGIN(28), **IMAGENET)),
}


@pytest.mark.parametrize(("name", "expected"), BARE.items(), ids=BARE)
def test_bare_files_get_what_their_library_uses(name, expected, tmp_path):
    told = dict(heads=4, image_size=(32, 48)) if name.startswith("timm") else dict(heads=4)
    model, report = load_with_report(weights_of(name, tmp_path), **told)
    assert (report.dialect, model.preprocess) == expected


def test_googles_files_are_stretched_to_half_and_half():
    model, report = load_with_report(GOLDEN / "jax_vit.npz")
    assert report.dialect == "jax"
    assert model.preprocess == Preprocess((32, 32), **STRETCH, **HALF)


def test_torchvision_resizes_to_256_and_crops_224(tmp_path):
    """ImageClassification(crop_size=224), with its default resize_size=256 and bilinear interpolation."""
    model = vitlab.create("vit_base", **{**SMALL, "image_size": 224, "patch_size": 32})
    state = keymap.write("torchvision", torchvision.DIALECT.rules, dict(model.state_dict()), heads=4)
    save_file(state, tmp_path / "vit.safetensors")
    model, report = load_with_report(tmp_path / "vit.safetensors", heads=4)
    assert report.dialect == "torchvision"
    expected = dict(how="crop", resize=256, interpolation="bilinear", scale=1 / 255, **IMAGENET)
    assert model.preprocess == Preprocess((224, 224), **expected)
    larger, _ = load_with_report(tmp_path / "vit.safetensors", heads=4, image_size=448)
    assert larger.preprocess == Preprocess((448, 448), **{**expected, "resize": 512})  # the same share is cut away


def test_facebooks_mae_files_have_imagenets_colours(tmp_path):
    model = vitlab.create("vit_base", **{**SMALL, "classes": 0})
    state = keymap.write("timm", timm.RULES, dict(model.state_dict()), heads=4)
    decoder = {"mask_token": torch.zeros(1, 1, 20), "decoder_pos_embed": torch.zeros(1, 17, 20)}
    torch.save({"model": {**state, **decoder}}, tmp_path / "mae.pth")
    model, report = load_with_report(tmp_path / "mae.pth", heads=4, encoder=True)
    assert (report.dialect, model.preprocess) == ("facebook", Preprocess((32, 32), **MARGIN(32), **IMAGENET))


# ---------------------------------------------------------------- timm folders


@pytest.fixture
def timm_folder(tmp_path):
    """A timm folder whose pretrained_cfg says what a test wants."""

    def make(patch_size: int, **pretrained_cfg):
        size = pretrained_cfg["input_size"][1:]
        model = vitlab.create("vit_base", **{**SMALL, "image_size": size, "patch_size": patch_size})
        convert.write(model, tmp_path, "timm")
        config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
        (tmp_path / "config.json").write_text(
            json.dumps({**config, "pretrained_cfg": pretrained_cfg}), encoding="utf-8"
        )
        return load_with_report(tmp_path)[0].preprocess

    return make


TIMM = {  # crop_pct -> the shorter side before the crop: floor(size / crop_pct), as timm's transforms_imagenet_eval
    "augreg": (dict(input_size=[3, 224, 224], crop_pct=0.9), (224, 224), 248),
    "default": (dict(input_size=[3, 224, 224], crop_pct=0.875), (224, 224), 256),
    "deit3": (dict(input_size=[3, 384, 384], crop_pct=1.0), (384, 384), 384),
    "clip": (dict(input_size=[3, 224, 224], crop_pct=0.95), (224, 224), 235),
    "squash": (dict(input_size=[3, 192, 256], crop_pct=0.95, crop_mode="squash"), (192, 256), (202, 269)),
    "wide": (dict(input_size=[3, 192, 256], crop_pct=0.8), (192, 256), 240),
}


@pytest.mark.parametrize(("says", "size", "resize"), TIMM.values(), ids=TIMM)
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_a_timm_folder_tells_everything(says, size, resize, interpolation, timm_folder):
    colours = dict(mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    found = timm_folder(32, **says, **colours, interpolation=interpolation)
    assert found == Preprocess(
        size, "crop", resize, interpolation=interpolation, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)
    )


def test_what_a_timm_folder_leaves_out_is_as_timm_has_it(timm_folder):
    assert timm_folder(8, input_size=[3, 32, 32]) == Preprocess((32, 32), **CROP, **HALF)
    assert timm_folder(8, input_size=[3, 32, 32], mean=[0, 0, 0]).mean == (0, 0, 0)


def test_a_preprocess_written_for_timm_comes_back(tmp_path):
    model = vitlab.create("vit_base", **SMALL)
    model.preprocess = Preprocess((32, 32), "crop", 40, "lanczos", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    convert.write(model, tmp_path, "timm")
    says = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["pretrained_cfg"]
    assert (says["crop_pct"], says["interpolation"], says["mean"]) == (0.8, "lanczos", [0.1, 0.2, 0.3])
    assert load_with_report(tmp_path)[0].preprocess == model.preprocess


# ---------------------------------------------------------------- transformers folders without a preprocessor_config

HF = dict(hidden_size=48, num_hidden_layers=1, num_attention_heads=4, patch_size=8, image_size=32)
USUAL = {
    "vit": (lambda: hf.ViTModel(hf.ViTConfig(**HF)), Preprocess((32, 32), **STRETCH, **HALF)),
    "deit": (
        lambda: hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(**HF)),
        Preprocess((32, 32), **MARGIN(32), **IMAGENET),
    ),
    "vit_mae": (lambda: hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**HF)), Preprocess((32, 32), **MARGIN(32), **IMAGENET)),
    "dinov2": (lambda: hf.Dinov2Model(hf.Dinov2Config(**HF)), Preprocess((32, 32), **MARGIN(32), **IMAGENET)),
    "dinov2_with_registers": (
        lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**HF)),
        Preprocess((32, 32), **MARGIN(32), **IMAGENET),
    ),
}


@pytest.mark.parametrize(("kind", "row"), USUAL.items(), ids=USUAL)
def test_transformers_folders_get_what_their_kind_usually_has(kind, row, tmp_path):
    build, expected = row
    build().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["model_type"] == kind
    assert not (tmp_path / "preprocessor_config.json").exists()
    assert load_with_report(tmp_path)[0].preprocess == expected


# ---------------------------------------------------------------- names


def expected_for(name: str) -> Preprocess:
    """By the releases: Google's ViTs; DeiT's 256 -> 224, as Swin, PVT and Twins have it; Swin at 384 and CLIP without a
    margin; DINOv2 at 518; one channel for digits.
    """
    if name == "vit_mnist" or name.endswith("_digits"):
        side = 28 if name == "vit_mnist" else 8
        return Preprocess((side, side), **STRETCH, mean=(0.5,), std=(0.5,))
    if name.endswith("_cifar") or name.startswith(("clip_nano", "clip_vision_nano", "siglip_nano", "tipsv2_nano")):
        side = 96 if name.endswith("_96") else 32
        return Preprocess((side, side), **STRETCH, **HALF)
    if "naflex" in name:
        return Preprocess((256, 256), "aspect", **HALF, patch=16, max_patches=256)
    if name.startswith("siglip") and name != "siglip_nano":
        side = (
            256 if "large" in name or "patch32" in name or "giant" in name or name.endswith("so400m_patch16") else 224
        )
        return Preprocess((side, side), **{**STRETCH, "interpolation": "bicubic"}, **HALF)
    if name.startswith("tipsv2"):
        return Preprocess((448, 448), **STRETCH, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    if name.startswith("vit_relpos"):
        return Preprocess((224, 224), **{**CROP, "resize": 248}, **IMAGENET)  # nine tenths, as timm
    if name.startswith("aimv2"):
        return Preprocess((224, 224), **CROP, **OPENAI)
    if name.startswith("clip_"):
        side = 336 if name.endswith("_336") else 224
        return Preprocess((side, side), **CROP, **OPENAI)
    if name.startswith("swinv2"):
        side, resize = (192, 213) if name == "swinv2_large" else (256, 284)  # nine tenths, as timm
        return Preprocess((side, side), **{**CROP, "resize": resize}, **IMAGENET)
    if name.startswith("swin") and name.endswith("_384"):
        return Preprocess((384, 384), **{**CROP, "resize": 384}, **IMAGENET)
    if name.startswith(("deit", "mae", "dino_", "swin", "pvt", "twins")):
        return Preprocess((224, 224), **{**CROP, "resize": 256}, **IMAGENET)
    if name.startswith("resnet"):
        return Preprocess((224, 224), **{**CROP, "resize": 256, "interpolation": "bilinear"}, **IMAGENET)
    if name.startswith("dinov2"):
        return Preprocess((518, 518), **MARGIN(518), **IMAGENET)
    if name.startswith("dinov3"):
        return Preprocess((224, 224), **STRETCH, **IMAGENET)
    if name.startswith("eva02"):
        return Preprocess((224, 224), **CROP, **OPENAI)
    if name.startswith("pe_clip"):  # Meta's own transform squashes
        return Preprocess(MODELS[name].config.image_size, **STRETCH, **HALF)
    if name.startswith("pe_"):
        return Preprocess(MODELS[name].config.image_size, **CROP, **HALF)  # each at its own size
    if name.startswith(("linear_head", "eomt", "yolos", "segformer", "depth_anything")):  # the whole image
        rule = "bicubic" if name.startswith("depth_anything") else "bilinear"
        return Preprocess(MODELS[name].config.image_size, **{**STRETCH, "interpolation": rule}, **IMAGENET)
    assert name.startswith(("vit_", "beit_"))
    side = 384 if name == "vit_base_r50_s16" else 224
    return Preprocess((side, side), **STRETCH, **HALF)


@pytest.mark.parametrize("name", MODELS)
def test_every_name_has_its_releases_preprocess(name):
    with torch.device("meta"):
        options = {"depth": 1} if "depth" in option_paths(type(MODELS[name].config)) else {}
        assert vitlab.create(name, **options).preprocess == expected_for(name)


def test_a_preprocess_follows_size_and_channels():
    with torch.device("meta"):
        larger = vitlab.create("deit_tiny_distilled_patch16_384", depth=1).preprocess
        wide = vitlab.create("dinov2_small", depth=1, image_size=(224, 336)).preprocess
        grey = vitlab.create("deit_tiny_distilled", depth=1, channels=1).preprocess
    assert larger == Preprocess((384, 384), **{**CROP, "resize": 439}, **IMAGENET)  # 256 / 224 * 384
    assert wide == Preprocess((224, 336), **MARGIN(224), **IMAGENET)
    assert (grey.mean, grey.std, grey.resize) == ((0.5,), (0.5,), 256)


# ---------------------------------------------------------------- labels and eps


def test_labels_keep_the_order_of_their_numbers(tmp_path):
    """As text "10" stands before "2": with more than ten classes an order by text gives wrong names."""
    names = [f"class {chr(97 + i)}" for i in range(23)]
    shuffled = {str(i): names[i] for i in sorted(range(23), key=lambda i: (i * 7) % 23)}
    assert labels_from({"id2label": shuffled}) == names
    config = hf.ViTConfig(**HF, intermediate_size=96, id2label=dict(enumerate(names)))
    hf.ViTForImageClassification(config).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    in_text_order = dict(sorted(written["id2label"].items()))
    assert list(in_text_order)[:3] == ["0", "1", "10"]
    (tmp_path / "config.json").write_text(json.dumps({**written, "id2label": in_text_order}), encoding="utf-8")
    assert load_with_report(tmp_path)[0].labels == names


def test_fillers_of_more_than_ten_classes_are_no_labels():
    assert labels_from({"id2label": {str(i): f"LABEL_{i}" for i in range(12)}}) is None
    assert labels_from({"id2label": {str(i): f"LABEL_{11 - i}" for i in range(12)}})[0] == "LABEL_11"


@pytest.mark.parametrize("config", [hf.ViTConfig, hf.DeiTConfig, hf.ViTMAEConfig, hf.Dinov2Config])
def test_an_eps_that_is_not_said_is_transformers_own_default(config):
    says = config().to_dict()
    assert options_from({"model_type": says["model_type"]})["eps"] == says["layer_norm_eps"]
    assert options_from({"model_type": says["model_type"], "layer_norm_eps": 3e-4})["eps"] == 3e-4


def test_dinov2_has_eps_1e_6():
    for kind in ("dinov2", "dinov2_with_registers"):
        assert options_from({"model_type": kind})["eps"] == hf.AutoConfig.for_model(kind).layer_norm_eps == 1e-6
