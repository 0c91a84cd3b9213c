"""From a photo to numbers on both sides: transformers' image processor and model, and vitlab on the same folder.

Small random weights, one folder per model_type that vitlab reads, three photos: one rotated by EXIF, one grey, one not
square. What a preprocessor_config.json says decides the input, also where config.json has another image_size.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from PIL import Image, ImageOps

import vitlab
from vitlab.checkpoints import convert, families
from vitlab.checkpoints.hf import preprocess_from
from vitlab.checkpoints.load import AssumedWarning, load_with_report
from vitlab.errors import CheckpointError
from vitlab.images.preprocess import Preprocess

MODEL_TYPES = {name: kind for family in families.FAMILIES.values() for name, kind in family.model_types.items()}
TOLERANCE = 1e-5
ORIENTATION = 0x0112
SMALL = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, layer_norm_eps=1e-6)
CLASSES = dict(num_labels=5)
BEIT = dict(**SMALL, image_size=48, patch_size=16, use_relative_position_bias=True)
DINO = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=2, patch_size=14, image_size=518)
NAFLEX = dict(**SMALL, patch_size=16, num_patches=9)
STAGES = dict(depths=[1, 2, 1, 1], num_labels=5)
PVT = dict(hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 2, 3, 4], mlp_ratios=[2, 2, 2, 2], **STAGES)


def clip_model(kind: str = "CLIP"):
    text = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=99)
    text |= dict(bos_token_id=97, eos_token_id=98, pad_token_id=0)
    vision = dict(**SMALL, image_size=48, patch_size=16)
    config = getattr(hf, f"{kind}Config")(text_config=text, vision_config=vision, projection_dim=24)
    return getattr(hf, f"{kind}Model")(config)


def siglip_model(image_size: int = 48):
    text = dict(**SMALL, vocab_size=99, projection_size=48)
    vision = dict(**SMALL, image_size=image_size, patch_size=16)
    return hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=vision))


def tips_model():
    vision = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=2, patch_size=16, image_size=48)
    return hf.Tipsv2Model(hf.Tipsv2Config(text_config=dict(**SMALL, vocab_size=99), vision_config=vision))


def square(side: int) -> dict:
    return {"height": side, "width": side}


MAE = dict(**SMALL, decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4)
DENSE = {  # what is read of networks for pixels and objects -> where it is compared
    "depth_anything": "test_depth_anything.py",
    "eomt": "test_eomt.py",
    "eomt_dinov3": "test_eomt.py",
    "segformer": "test_segformer.py",
    "yolos": "test_yolos.py",
}
FAMILIES = {  # name -> model, processor, size that images are read at
    "vit": (
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**SMALL, **CLASSES, image_size=48, patch_size=16)),
        lambda: hf.ViTImageProcessorPil(size=square(48)),
        48,
    ),
    "vit, larger than its positions": (
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**SMALL, **CLASSES, image_size=32, patch_size=16)),
        lambda: hf.ViTImageProcessorPil(size=square(64)),
        64,
    ),
    "vit, features": (
        lambda: hf.ViTModel(hf.ViTConfig(**SMALL, image_size=48, patch_size=16), add_pooling_layer=False),
        lambda: hf.ViTImageProcessorPil(size=square(48), resample=3, do_rescale=False),
        48,
    ),
    "deit": (
        lambda: hf.DeiTForImageClassificationWithTeacher(
            hf.DeiTConfig(**SMALL, **CLASSES, image_size=48, patch_size=16)
        ),
        lambda: hf.DeiTImageProcessorPil(size=square(56), crop_size=square(48)),
        48,
    ),
    "vit_mae": (
        lambda: hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**MAE, image_size=48, patch_size=16)),
        lambda: hf.ViTImageProcessorPil(size=square(48)),
        48,
    ),
    "dinov2": (
        lambda: hf.Dinov2Model(hf.Dinov2Config(**DINO)),
        lambda: hf.BitImageProcessorPil(size={"shortest_edge": 256}, crop_size=square(224)),
        224,
    ),
    "dinov2, classes": (
        lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**DINO, **CLASSES)),
        lambda: hf.BitImageProcessorPil(size={"shortest_edge": 256}, crop_size=square(224)),
        224,
    ),
    "dinov2_with_registers": (
        lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**DINO)),
        lambda: hf.BitImageProcessorPil(size={"shortest_edge": 256}, crop_size=square(224)),
        224,
    ),
    "clip": (clip_model, lambda: hf.CLIPImageProcessorPil(size={"shortest_edge": 48}, crop_size=square(48)), 48),
    "clip_vision_model": (
        lambda: hf.CLIPVisionModelWithProjection(
            hf.CLIPVisionConfig(**SMALL, image_size=48, patch_size=16, projection_dim=24)
        ),
        lambda: hf.CLIPImageProcessorPil(size={"shortest_edge": 48}, crop_size=square(48)),
        48,
    ),
    "clip, smaller than its positions": (
        clip_model,
        lambda: hf.CLIPImageProcessorPil(size={"shortest_edge": 40}, crop_size=square(32)),
        32,
    ),
    "siglip": (siglip_model, lambda: hf.SiglipImageProcessorPil(size=square(48)), 48),
    "siglip, larger than its positions": (
        lambda: siglip_model(32),
        lambda: hf.SiglipImageProcessorPil(size=square(64)),
        64,
    ),
    "siglip_vision_model": (
        lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**SMALL, image_size=48, patch_size=16)),
        lambda: hf.SiglipImageProcessorPil(size=square(48)),
        48,
    ),
    "tipsv2": (tips_model, lambda: hf.ViTImageProcessorPil(size=square(48), do_normalize=False), 48),
    "tipsv2, smaller than its positions": (
        tips_model,
        lambda: hf.ViTImageProcessorPil(size=square(32), do_normalize=False),
        32,
    ),
    "tipsv2_vision_model": (
        lambda: tips_model().vision_model,
        lambda: hf.ViTImageProcessorPil(size=square(64), do_normalize=False),
        64,
    ),
    "siglip2": (
        lambda: hf.Siglip2Model(hf.Siglip2Config(text_config=dict(**SMALL, vocab_size=99), vision_config=NAFLEX)),
        lambda: hf.Siglip2ImageProcessorPil(max_num_patches=16),
        64,
    ),
    "siglip2_vision_model": (
        lambda: hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**NAFLEX)),
        lambda: hf.Siglip2ImageProcessorPil(max_num_patches=9),
        48,
    ),
    "dinov3_vit": (
        lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**SMALL, image_size=48, patch_size=16, num_register_tokens=2)),
        lambda: hf.ViTImageProcessorPil(size=square(48)),  # its own needs torchvision
        48,
    ),
    "metaclip_2": (
        lambda: clip_model("MetaClip2"),
        lambda: hf.CLIPImageProcessorPil(size={"shortest_edge": 48}, crop_size=square(48)),
        48,
    ),
    "metaclip_2_vision_model": (
        lambda: hf.MetaClip2VisionModelWithProjection(
            hf.MetaClip2VisionConfig(**SMALL, image_size=48, patch_size=16, projection_dim=24)
        ),
        lambda: hf.CLIPImageProcessorPil(size={"shortest_edge": 48}, crop_size=square(48)),
        48,
    ),
    "swin": (
        lambda: hf.SwinForImageClassification(
            hf.SwinConfig(image_size=64, embed_dim=12, depths=[1, 2], num_heads=[2, 3], window_size=4, num_labels=5)
        ),
        lambda: hf.ViTImageProcessorPil(size=square(72), resample=3),
        72,
    ),
    "swinv2": (
        lambda: hf.Swinv2ForImageClassification(
            hf.Swinv2Config(image_size=64, embed_dim=12, depths=[1, 2], num_heads=[2, 3], window_size=4, num_labels=5)
        ),
        lambda: hf.ViTImageProcessorPil(size=square(64), resample=3),
        64,
    ),
    "beit": (
        lambda: hf.BeitForImageClassification(hf.BeitConfig(**BEIT, **CLASSES)),
        lambda: hf.BeitImageProcessorPil(size=square(48)),
        48,
    ),
    "data2vec-vision": (
        lambda: hf.Data2VecVisionForImageClassification(hf.Data2VecVisionConfig(**BEIT, **CLASSES)),
        lambda: hf.BeitImageProcessorPil(size=square(56), do_center_crop=True, crop_size=square(48)),
        48,
    ),
    "aimv2_vision_model": (
        lambda: hf.Aimv2VisionModel(hf.Aimv2VisionConfig(**SMALL, image_size=48, patch_size=16)),
        lambda: hf.CLIPImageProcessorPil(size={"shortest_edge": 48}, crop_size=square(48)),
        48,
    ),
    "aimv2": (
        lambda: hf.Aimv2Model(
            hf.Aimv2Config(
                text_config=dict(**SMALL, vocab_size=50, max_position_embeddings=7, eos_token_id=49),
                vision_config=dict(**SMALL, image_size=48, patch_size=16),
                projection_dim=24,
            )
        ),
        lambda: hf.CLIPImageProcessorPil(size={"shortest_edge": 48}, crop_size=square(48)),
        48,
    ),
    "ijepa": (
        lambda: hf.IJepaForImageClassification(hf.IJepaConfig(**SMALL, **CLASSES, image_size=48, patch_size=16)),
        lambda: hf.ViTImageProcessorPil(size=square(48)),
        48,
    ),
    "vit_msn": (
        lambda: hf.ViTMSNModel(hf.ViTMSNConfig(**SMALL, image_size=48, patch_size=16)),
        lambda: hf.ViTImageProcessorPil(size=square(48), resample=3),
        48,
    ),
    "pvt": (
        lambda: hf.PvtForImageClassification(hf.PvtConfig(**PVT, image_size=64)),
        lambda: hf.PvtImageProcessorPil(size=square(64)),
        64,
    ),
    "pvt_v2": (
        lambda: hf.PvtV2ForImageClassification(hf.PvtV2Config(**PVT, image_size=64)),
        lambda: hf.PvtImageProcessorPil(size=square(96)),
        96,
    ),
    "resnet": (
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5)
        ),
        lambda: hf.ConvNextImageProcessorPil(size={"shortest_edge": 64}),
        64,
    ),
    "resnet, from 384 on": (
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5)
        ),
        lambda: hf.ConvNextImageProcessorPil(size={"shortest_edge": 384}),
        384,
    ),
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> list[Path]:
    """Smooth noise, as photos are: rotated by its EXIF data, grey, and much wider than high."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)

    def smooth(height: int, width: int) -> Image.Image:
        coarse = Image.fromarray(rng.integers(0, 256, (9, 11, 3), dtype=np.uint8))
        return coarse.resize((width, height), Image.Resampling.BICUBIC)

    exif = Image.Exif()
    exif[ORIENTATION] = 6  # to be turned by 90 degrees
    smooth(300, 280).save(folder / "rotated.jpg", exif=exif)
    smooth(270, 310).convert("L").save(folder / "grey.png")
    smooth(260, 431).save(folder / "wide.jpg")
    return [folder / name for name in ("rotated.jpg", "grey.png", "wide.jpg")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each family's folder, as transformers saves it, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("folder")
            torch.manual_seed(len(name))
            model, processor, _ = FAMILIES[name]
            model = model()
            for key, parameter in model.named_parameters():  # large, or one photo would give the features of another
                fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
                start = 1.0 if parameter.ndim == 1 and key.endswith(("weight", "lambda1")) else 0.0
                place = "position" in key or "token" in key
                torch.nn.init.normal_(parameter, start, 0.3 if place or parameter.ndim == 1 else 2 / fan_in**0.5)
            model.save_pretrained(made[name])
            processor().save_pretrained(made[name])
        return made[name]

    return make


def by_transformers(folder: Path, photos: list[Path], name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Features (B, E) that a classifier reads, or would read, and logits where the model has any."""
    processor = hf.AutoImageProcessor.from_pretrained(folder, use_fast=False)
    assert type(processor).__name__.endswith("Pil")
    upright = [ImageOps.exif_transpose(Image.open(photo)).convert("RGB") for photo in photos]  # as load_image does
    inputs = processor(images=upright, return_tensors="pt")
    pixels = inputs["pixel_values"]
    architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    model = getattr(hf, architecture).from_pretrained(folder).eval()
    interpolate = {"interpolate_pos_encoding": True} if "positions" in name and "tips" not in name else {}
    with torch.inference_mode():
        if name in ("clip_vision_model", "metaclip_2_vision_model"):
            return model(pixels).image_embeds, None
        if name == "siglip2":
            return model.get_image_features(**inputs).pooler_output, None
        if name in ("siglip_vision_model", "siglip2_vision_model", "tipsv2_vision_model"):
            return model(**inputs).pooler_output, None
        if name == "aimv2" or name.startswith(("clip", "metaclip", "siglip", "tips")):
            features = model.get_image_features(pixels, **interpolate)
            return getattr(features, "pooler_output", features), None
        if name.startswith("vit_mae"):  # nothing masked: the encoder sees every patch, in order
            model.config.mask_ratio = 0.0
            noise = torch.arange(9.0).expand(len(pixels), 9)
            return model.vit(pixels, noise=noise).last_hidden_state[:, 0], None
        base = (model if name == "dinov3_vit" else model.base_model)(pixels, **interpolate)
        tokens = base.last_hidden_state
        logits = model(pixels, **interpolate).logits if hasattr(model, "num_labels") and "For" in architecture else None
        if name.startswith(("swin", "resnet", "beit", "data2vec", "aimv2")):
            return base.pooler_output.flatten(1), logits
        if name == "ijepa":
            return tokens.mean(1), logits
        if name.startswith("pvt_v2"):
            return tokens.flatten(2).mean(2), logits
        if name == "dinov2, classes":
            return torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], dim=1), logits
        return tokens[:, 0], logits


@pytest.mark.parametrize("name", FAMILIES)
def test_photo_to_features(name, folders, photos):
    folder = folders(name)
    features, logits = by_transformers(folder, photos, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if "positions" in name:
            warnings.filterwarnings("ignore", message=".*images are read at", category=AssumedWarning)
        model = vitlab.load(folder)
    side = FAMILIES[name][2]
    assert model.input_size == (side, side)
    ours = np.stack([row.vector for row in vitlab.embed(model, photos)])
    np.testing.assert_allclose(ours, F.normalize(features, dim=1).numpy(), rtol=0, atol=TOLERANCE)
    apart = np.linalg.norm(ours[:, None] - ours[None], axis=-1)[np.triu_indices(3, 1)]
    assert apart.min() > 100 * TOLERANCE  # the photos give different features, or this would show nothing
    if logits is None:
        return
    chances = logits.softmax(dim=-1)
    for row, expected in zip(vitlab.predict(model, photos, top=5), chances, strict=True):
        found = dict(row.scores)
        np.testing.assert_allclose([found[f"class {i}"] for i in range(5)], expected.numpy(), rtol=0, atol=TOLERANCE)


def test_every_model_type_that_is_read_is_compared():
    kinds = {name.split(",")[0] for name in FAMILIES}
    assert kinds | DENSE.keys() == MODEL_TYPES.keys()
    assert all((Path(__file__).parent / file).is_file() for file in DENSE.values())


# ---------------------------------------------------------------- one DINOv2 folder, on every road


@pytest.fixture(scope="module")
def dinov2(folders):
    """A folder whose positions are for 518 x 518 and whose processor gives 224 x 224."""
    return folders("dinov2")


def test_a_native_copy_keeps_the_grid_and_the_numbers(dinov2, photos, tmp_path):
    model = vitlab.load(dinov2)
    vitlab.save(model, tmp_path / "native")
    again = vitlab.load(tmp_path / "native")
    assert again.config.image_size == (518, 518) and again.positions.table.shape[1] == 1 + 37 * 37
    assert again.input_size == (224, 224) and again.preprocess.resize == 256
    for one, other in zip(vitlab.embed(model, photos), vitlab.embed(again, photos), strict=True):
        np.testing.assert_array_equal(one.vector, other.vector)


def test_an_image_size_that_is_given_wins_over_both_files(dinov2):
    for side, resize in ((518, 592), (112, 128)):
        model = vitlab.load(dinov2, image_size=side)
        assert model.config.image_size == model.preprocess.size == (side, side)
        assert model.preprocess.resize == resize  # the same share is cut away


@pytest.mark.parametrize("to", ["timm", "hf", "jax"])
def test_written_for_another_library_it_gives_the_same_numbers(dinov2, photos, to, tmp_path):
    """transformers' DINOv2 resizes positions itself, the others get them resized."""
    model = vitlab.load(folders_for(to, dinov2, tmp_path))
    target = tmp_path / ("out.npz" if to == "jax" else "out")
    notes = convert.write(model, target, to)
    again, _ = load_with_report(target)
    (row, *_) = convert.compare("unused", target, model, changed=True)
    assert row.difference < TOLERANCE
    kept = to == "hf"
    assert again.config.image_size == ((518, 518) if kept else (224, 224))
    assert any("positions were resized to 224x224" in note for note in notes) != kept
    images = model.preprocess.batch(photos)
    with torch.inference_mode():
        torch.testing.assert_close(again(images), model(images), atol=TOLERANCE, rtol=0)


def folders_for(to: str, dinov2: Path, tmp_path: Path) -> Path:
    """What the layout can hold: timm and JAX have no mask token, JAX no layer scale."""
    if to == "hf":
        return dinov2
    options = dict(image_size=518, patch_size=14, width=48, depth=1, heads=4, classes=0)
    model = vitlab.create("vit_base", **options)
    model.preprocess = vitlab.load(dinov2).preprocess
    vitlab.save(model, tmp_path / "plain")
    return tmp_path / "plain"


def test_it_is_explained_inspected_and_exported_at_the_size_it_reads(dinov2, photos):
    from vitlab.explain.attention_maps import attention_maps
    from vitlab.export.metadata import model_metadata
    from vitlab.export.wrapper import example_input
    from vitlab.serve.model_pool import ServedModel
    from vitlab.serve.page_queries import model_info

    model = vitlab.load(dinov2)
    assert attention_maps(model, photos[0]).shape[-2:] == (16, 16)
    assert vitlab.inspect(dinov2).image_size == vitlab.inspect(model).image_size == (224, 224)
    assert vitlab.inspect(dinov2, image_size=518).image_size == (518, 518)
    assert model_metadata(model, "features").image_size == (224, 224)
    assert tuple(example_input(model, "features").shape[-2:]) == (224, 224)
    info = model_info(ServedModel("dinov2", model))
    assert (info["grid"], info["size"]) == ([16, 16], [224, 224])


# ---------------------------------------------------------------- what a preprocessor_config.json leaves out


@pytest.mark.parametrize(
    "says",
    [
        {"image_processor_type": "ViTImageProcessor"},
        {"image_processor_type": "DeiTImageProcessor"},
        {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 250}},
        {"image_processor_type": "CLIPImageProcessor"},
        {"image_processor_type": "PvtImageProcessor"},
        {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 64}},
        {"feature_extractor_type": "CLIPFeatureExtractor", "size": 64, "crop_size": 48},
        {"feature_extractor_type": "DeiTFeatureExtractor", "size": 64, "crop_size": 48},
        {"feature_extractor_type": "ViTFeatureExtractor", "size": 64, "do_normalize": False},
    ],
    ids=lambda says: next(iter(says.values())),
)
def test_what_a_processor_file_leaves_out_is_as_its_processor_has_it(says, photos, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(says), encoding="utf-8")
    kind = next(iter(says.values())).replace("FeatureExtractor", "ImageProcessor")
    processor = getattr(hf, f"{kind}Pil").from_pretrained(tmp_path)
    ours = Preprocess(**preprocess_from(says))
    image = Image.open(photos[2])
    theirs = processor(images=image, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(ours(image), theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("model_type", ["vit", "deit", "dinov2", "swin", "pvt", "pvt_v2", "resnet", "clip", "vit_mae"])
def test_a_file_that_names_no_processor_is_its_model_types(model_type):
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    theirs = IMAGE_PROCESSOR_MAPPING_NAMES[model_type]["torchvision"]
    assert MODEL_TYPES[model_type].processor == theirs.removesuffix("ImageProcessor")


def test_a_size_that_patches_do_not_divide_is_refused_with_one_that_they_do(dinov2, tmp_path):
    shutil.copytree(dinov2, tmp_path / "odd")
    file = tmp_path / "odd" / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "crop_size": 256}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"read at 256x256, which is no multiple of the patch size 14.*252"):
        vitlab.load(tmp_path / "odd")
    assert vitlab.load(tmp_path / "odd", image_size=252).preprocess.size == (252, 252)


def test_a_processor_without_crop_is_said_to_be_cropped_here(dinov2, tmp_path):
    shutil.copytree(dinov2, tmp_path / "open")
    file = tmp_path / "open" / "preprocessor_config.json"
    says = {**json.loads(file.read_text(encoding="utf-8")), "do_center_crop": False, "size": {"shortest_edge": 224}}
    file.write_text(json.dumps(says), encoding="utf-8")
    with pytest.warns(AssumedWarning, match="the centre square is cut out"):
        vitlab.load(tmp_path / "open")


def test_a_size_that_transformers_refuses_is_said(folders):
    with pytest.warns(AssumedWarning, match=r"images are read at 64x64, .* made for 32x32, .*interpolate_pos_encoding"):
        vitlab.load(folders("vit, larger than its positions"))
    assert load_with_report(folders("vit, larger than its positions"), image_size=48)[1].notes == []
