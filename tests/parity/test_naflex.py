"""SigLIP 2 for images of their own aspect against transformers: photos to features, several sizes in one batch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from PIL import Image
from safetensors.torch import load_file, save_file

import vitlab
from vitlab.checkpoints import convert
from vitlab.errors import CheckpointError, UsageError
from vitlab.images.preprocess import Preprocess, aspect_size
from vitlab.layers.positions import cubic_weights, resize_grid
from vitlab.layers.trace import Trace
from vitlab.text.tokenizer import Tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # folders without preprocessor_config.json
NAFLEX = dict(hidden_size=24, intermediate_size=53, num_hidden_layers=2, num_attention_heads=3, patch_size=8)
NAFLEX |= dict(num_patches=25)
TEXT = dict(hidden_size=20, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, vocab_size=60)
TEXT |= dict(max_position_embeddings=11, projection_size=24)
GOLDEN = Path(__file__).parent.parent / "data" / "golden"
SIZES = [(24, 56), (40, 40), (64, 16), (8, 72), (8, 8)]  # at patches of 8
# Not one column: there torch gives transformers wrong positions (an error of its antialias that depends on strides).


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def randomise(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.02 if "token_embed" in name else 0.3)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return model.eval()


def their_naflex(**vision):
    return randomise(hf.Siglip2Model(hf.Siglip2Config(text_config=TEXT, vision_config={**NAFLEX, **vision})))


def their_inputs(images, patch=8):
    """Patches in transformers' order: row, column, channel."""
    flat = [image.unfold(1, patch, patch).unfold(2, patch, patch).permute(1, 2, 3, 4, 0) for image in images]
    shapes = torch.tensor([patches.shape[:2] for patches in flat])
    rows = [patches.reshape(-1, patch * patch * image.shape[0]) for patches, image in zip(flat, images, strict=True)]
    longest = max(map(len, rows)) + 3
    mask = torch.stack([torch.arange(longest) < len(row) for row in rows]).int()
    pixels = torch.stack([F.pad(row, (0, 0, 0, longest - len(row))) for row in rows])
    return dict(pixel_values=pixels, pixel_attention_mask=mask, spatial_shapes=shapes)


@pytest.mark.parametrize("options", [{}, {"hidden_act": "gelu", "layer_norm_eps": 1e-5}, {"num_channels": 1}], ids=str)
@torch.inference_mode()
def test_images_of_several_sizes_in_one_batch(options, tmp_path):
    torch.manual_seed(0)
    theirs = their_naflex(**options)
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    images, ids = [torch.randn(options.get("num_channels", 3), *size) for size in SIZES], torch.randint(60, (4, 11))
    inputs = their_inputs(images)
    expected = theirs(input_ids=ids, **inputs)
    close(ours.encode_images(images), expected.image_embeds)
    close(ours(images, ids).logits_per_image, expected.logits_per_image)
    tokens, seen = ours.image.encode(images)
    last = expected.vision_model_output.last_hidden_state[:, : tokens.shape[1]]
    close(tokens[seen.bool()], last[inputs["pixel_attention_mask"][:, : tokens.shape[1]].bool()])
    for image, embedding in zip(images, expected.image_embeds, strict=True):  # alone, an image is a batch for the ViT
        close(ours.encode_image(image[None])[0], embedding)
    convert.write(ours, tmp_path / "back", "hf")
    source, written = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert source.keys() == written.keys() and all(torch.equal(source[key], written[key]) for key in source)
    close(hf.Siglip2Model.from_pretrained(tmp_path / "back")(input_ids=ids, **inputs).logits_per_image, expected[0])


@torch.inference_mode()
def test_the_image_tower_alone(tmp_path):
    torch.manual_seed(1)
    theirs, images = randomise(hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**NAFLEX))), [torch.randn(3, 16, 48)] * 2
    images.append(torch.randn(3, 32, 24))
    theirs.save_pretrained(tmp_path / "alone")
    their_naflex().save_pretrained(tmp_path / "both")
    ours = vitlab.load(tmp_path / "alone")
    assert ours.family == "naflex_vit" and vitlab.load(tmp_path / "both", encoder=True).family == "naflex_vit"
    close(ours.encode_images(images), theirs(**their_inputs(images)).pooler_output)
    convert.write(ours, tmp_path / "back", "hf")
    again = hf.Siglip2VisionModel.from_pretrained(tmp_path / "back")
    close(again(**their_inputs(images)).pooler_output, ours.encode_images(images))


def test_a_classifier_reads_the_mean_of_the_patches(photos, tmp_path):
    torch.manual_seed(6)
    config = hf.Siglip2Config(text_config=TEXT, vision_config=NAFLEX, id2label={0: "cat", 1: "dog", 2: "bird"})
    theirs = randomise(hf.Siglip2ForImageClassification(config))
    theirs.save_pretrained(tmp_path)
    processor = hf.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=25)
    processor.save_pretrained(tmp_path)
    ours, inputs = vitlab.load(tmp_path), processor(images=photos, return_tensors="pt")
    with torch.inference_mode():
        expected = theirs(**inputs).logits
        close(ours([ours.preprocess(photo) for photo in photos]), expected)
    for row, chances in zip(vitlab.predict(ours, photos), expected.softmax(dim=1), strict=True):
        assert dict(row.scores) == pytest.approx(dict(zip(ours.labels, chances.tolist(), strict=True)), abs=1e-5)


@pytest.fixture(scope="module")
def photos():
    rng = np.random.default_rng(0)
    coarse = [Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)) for _ in range(4)]
    sizes = [(90, 30), (64, 64), (31, 140), (200, 117)]
    return [image.resize(size, Image.Resampling.BICUBIC) for image, size in zip(coarse, sizes, strict=True)]


@pytest.mark.parametrize("max_patches", [9, 25, 64])
@torch.inference_mode()
def test_photos_by_their_processor(max_patches, photos, tmp_path):
    torch.manual_seed(2)
    processor = hf.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=max_patches)
    theirs = their_naflex()
    theirs.save_pretrained(tmp_path / "hf")
    processor.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    inputs = processor(images=photos, return_tensors="pt")
    expected = F.normalize(theirs.get_image_features(**inputs).pooler_output, dim=1)
    grids = [(tensor.shape[1] // 8, tensor.shape[2] // 8) for tensor in map(ours.preprocess, photos)]
    assert grids == [tuple(shape) for shape in inputs["spatial_shapes"].tolist()] and len(set(grids)) > 1
    close(torch.tensor(np.stack([row.vector for row in vitlab.embed(ours, photos)])), expected)
    convert.write(ours, tmp_path / "back", "hf")
    said = json.loads((tmp_path / "back" / "preprocessor_config.json").read_text(encoding="utf-8"))
    assert (said["patch_size"], said["max_num_patches"]) == (8, max_patches)
    back = hf.Siglip2ImageProcessorPil.from_pretrained(tmp_path / "back")(images=photos, return_tensors="pt")
    assert all(torch.equal(back[name], inputs[name]) for name in inputs)
    assert vitlab.load(tmp_path / "back").preprocess == ours.preprocess
    assert Preprocess.from_dict(ours.preprocess.to_dict()) == ours.preprocess


@torch.inference_mode()
def test_another_image_size_is_another_number_of_patches(photos, tmp_path):
    """Positions stay as they were learned, and are resized once, to each image's grid; written back they are equal."""
    torch.manual_seed(8)
    theirs = their_naflex()
    theirs.save_pretrained(tmp_path / "hf")
    hf.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=25).save_pretrained(tmp_path / "hf")
    inputs = hf.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=63)(images=photos, return_tensors="pt")
    expected = F.normalize(theirs.get_image_features(**inputs).pooler_output, dim=1)
    ours = vitlab.load(tmp_path / "hf", image_size=(56, 72))
    assert ours.preprocess.max_patches == 63 and ours.input_size == (56, 72)
    close(torch.tensor(np.stack([row.vector for row in vitlab.embed(ours, photos)])), expected)
    convert.write(ours, tmp_path / "back", "hf")
    source, written = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert source.keys() == written.keys() and all(torch.equal(source[key], written[key]) for key in source)
    vitlab.save(ours, tmp_path / "own")
    for folder in ("back", "own"):
        close(torch.tensor(np.stack([row.vector for row in vitlab.embed(str(tmp_path / folder), photos)])), expected)


def test_sizes_of_whole_patches():
    from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

    rng = np.random.default_rng(3)
    for height, width, patch, most in rng.integers([1, 1, 4, 1], [5000, 5000, 33, 1100], (200, 4)).tolist():
        assert aspect_size((height, width), patch, most) == get_image_size_for_max_num_patches(
            height, width, patch, most
        )


def test_zero_shot_with_images_of_their_own_aspect(photos):
    tokenizer = Tokenizer.train(["a photo of a cat", "a dog on a beach"], vocab=600, context=16)
    torch.manual_seed(4)
    model = vitlab.create("naflex_digits", channels=3, **tokenizer.options)
    model.tokenizer, model.preprocess = tokenizer, Preprocess(8, "aspect", patch=2, max_patches=16)
    together = vitlab.zero_shot(model, photos, ["cat", "dog"], templates=["a {}"])
    alone = [vitlab.zero_shot(model, [photo], ["cat", "dog"], templates=["a {}"])[0] for photo in photos]
    for one, other in zip(together, alone, strict=True):
        assert dict(one.scores) == pytest.approx(dict(other.scores), abs=1e-6)
    with torch.inference_mode():
        images = [model.preprocess(photo) for photo in photos]
        expected = model.logits(model.encode_images(images), model.class_embeddings([["a cat"], ["a dog"]])).sigmoid()
    assert dict(together[2].scores) == pytest.approx(
        dict(zip(["cat", "dog"], expected[2].tolist(), strict=True)), abs=1e-6
    )


@pytest.mark.parametrize("pooling", ["attention", "mean", "mean_norm"])
@torch.inference_mode()
def test_registers_stand_before_the_patches_of_each_image(pooling):
    torch.manual_seed(7)
    model = vitlab.create("naflex_vit_digits", registers=3, pooling=pooling).eval()
    images = [torch.randn(1, 4, 12), torch.randn(1, 8, 8), torch.randn(1, 2, 2)]
    close(model(images), torch.cat([model(image[None]) for image in images]))


def test_gradients_reach_the_tower_through_a_packed_batch():
    model = vitlab.create("naflex_vit_digits", classes=0)
    images = [torch.randn(1, 4, 12, requires_grad=True), torch.randn(1, 8, 8)]
    model.encode_images(images)[0].sum().backward()
    assert images[0].grad is not None and images[0].grad.abs().sum() > 0
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_timms_naflexvit(tmp_path):
    """Stored weights, input and outputs of naflexvit_base_patch16_gap: registers, LayerScale, a mean with its norm."""
    stored = load_file(GOLDEN / "timm_naflexvit.safetensors")
    weights = {key.removeprefix("weights."): value for key, value in stored.items() if key.startswith("weights.")}
    save_file(weights, tmp_path / "model.safetensors")
    bare = vitlab.load(tmp_path / "model.safetensors", heads=4).eval()
    config = {"architecture": "naflexvit_base_patch16_gap", "model_args": {"num_heads": 4, "embed_dim": 48}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for ours in (bare, vitlab.load(tmp_path).eval()):
        assert ours.family == "naflex_vit" and ours.config.tokens.registers == 4 and ours.config.grid == (16, 16)
        images = stored["input.images"]
        with torch.inference_mode():
            close(ours(images), stored["output.logits"])
            close(ours.forward_features(images), stored["output.features"])
            mixed = [images[0], torch.randn(3, 64, 16), images[1]]
            close(ours(mixed)[[0, 2]], stored["output.logits"])
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": "naflexvit_base_patch16_par_gap"}), encoding="utf-8"
    )
    with pytest.raises(CheckpointError, match="naflexvit_base_patch16_par_gap has positions that keep the aspect"):
        vitlab.load(tmp_path)


def test_positions_in_a_graph_for_any_size():
    torch.manual_seed(5)
    table = torch.randn(1, 20, 3)
    for new in [(4, 5), (2, 9), (7, 3), (1, 1), (8, 1), (1, 8)]:
        rows, columns = cubic_weights((4, 5), new, "bilinear_antialias")
        grid = rows @ table.reshape(4, 5, 3).permute(2, 0, 1) @ columns.mT
        close(grid.permute(1, 2, 0).reshape(1, -1, 3), resize_grid(table, (4, 5), new, "bilinear_antialias"))


def test_what_cannot_be_packed_is_refused(tmp_path):
    model = vitlab.create("naflex_vit_digits")
    with pytest.raises(UsageError, match="no images"):
        model.encode_images([])
    with pytest.raises(UsageError, match="must be a list of tensors"):
        model.encode_images(None)
    with pytest.raises(UsageError, match="image height: 5 is not a multiple of 2: use 6"):
        model.encode_images([torch.randn(1, 5, 4)])
    with pytest.raises(UsageError, match="must be a tensor"):
        model.encode_images([Image.new("L", (8, 8))])
    with pytest.raises(UsageError, match="images of one size"):
        model([torch.randn(1, 4, 4), torch.randn(1, 2, 4)], trace=Trace("tokens"))
    with pytest.raises(UsageError, match="a class or distillation token"):
        vitlab.create("naflex_vit_digits", class_token=True)
    with pytest.raises(UsageError, match="patch=0"):
        Preprocess(8, "aspect")
    their_naflex().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["vision_config"]["num_patches"] = 24
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="num_patches 24"):
        vitlab.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "siglip"}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"model_type 'siglip'.*siglip2"):
        vitlab.load(tmp_path)
