"""CLIP against transformers' CLIPModel, both ways, and stored tensors of open_clip; the activation is never guessed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import load_file, save_file

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.clip import hf_options
from vitlab.checkpoints.load import AssumedWarning, load_with_report
from vitlab.errors import CheckpointError
from vitlab.models.clip import CLIP, CLIPConfig, clip_vit
from vitlab.models.registry import build, build_config
from vitlab.models.two_towers import TextConfig, contrastive_loss, same_captions
from vitlab.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
VOCAB, CONTEXT, END = 60, 11, 57
TEXT = dict(
    vocab_size=VOCAB,
    max_position_embeddings=CONTEXT,
    hidden_size=20,
    intermediate_size=44,
    num_hidden_layers=3,
    num_attention_heads=4,
    bos_token_id=56,
    eos_token_id=END,
    pad_token_id=END,
)
VISION = dict(
    hidden_size=24, intermediate_size=60, num_hidden_layers=2, num_attention_heads=3, image_size=40, patch_size=8
)


def randomise(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter far from its start value, so that a forgotten one shows; tokens small, so that eps shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            small = "embed" in name or "class_token" in name or "positions" in name
            parameter.normal_(std=0.002 if small else 0.2)
            if ("norm" in name and name.endswith("weight")) or parameter.ndim == 0:
                parameter.add_(1)
    return model.eval()


def their_clip(text=None, vision=None, dim: int = 12) -> hf.CLIPModel:
    texts, pictures = {**TEXT, **(text or {})}, {**VISION, **(vision or {})}
    return randomise(hf.CLIPModel(hf.CLIPConfig(text_config=texts, vision_config=pictures, projection_dim=dim)))  # type: ignore


def some_ids(n: int, end: int = END, context: int = CONTEXT) -> torch.Tensor:
    ids = torch.randint(end - 5, (n, context))
    for row, length in zip(ids, torch.randint(1, context, (n,)).tolist(), strict=True):
        row[length:] = end  # padded with end-of-text: the first counts
    return ids


def agree(ours, theirs, images: torch.Tensor, ids: torch.Tensor) -> None:
    with torch.inference_mode():
        expected = theirs(input_ids=ids, pixel_values=images)
        out = ours(images, ids)
        pairs = (
            (ours.encode_image(images), expected.image_embeds),
            (ours.encode_text(ids), expected.text_embeds),
            (out.logits_per_image, expected.logits_per_image),
            (out.logits_per_text, expected.logits_per_text),
            (ours.forward_features(images), expected.vision_model_output.last_hidden_state),
        )
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


CONFIGS = {
    "quick_gelu": ({}, {}),
    "gelu": (dict(hidden_act="gelu"), dict(hidden_act="gelu")),
    "each its own": (dict(hidden_act="gelu", layer_norm_eps=1e-6), dict(num_channels=1, image_size=24)),
}


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_theirs_read_by_us_and_written_back(options, tmp_path):
    theirs = their_clip(*options)
    theirs.save_pretrained(tmp_path / "hf")
    images, ids = (
        torch.randn(3, theirs.config.vision_config.num_channels, *[theirs.config.vision_config.image_size] * 2),
        some_ids(5),
    )
    with pytest.warns(AssumedWarning, match="mean="):  # there is no preprocessor_config.json
        ours = vitlab.load(tmp_path / "hf")
    assert (ours.config.text.end_id, ours.config.text.pad_id) == (END, END)
    agree(ours, theirs, images, ids)
    convert.write(ours, tmp_path / "back", "hf")
    source, written = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert source.keys() == written.keys() and all(torch.equal(source[key], written[key]) for key in source)
    agree(ours, hf.CLIPModel.from_pretrained(tmp_path / "back").eval(), images, ids)


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
def test_ours_read_by_them(activation, tmp_path):
    tokenizer = Tokenizer.train(["a dog on a beach", "一只猫"] * 4, vocab=540, context=13, pad_id=0)
    image = clip_vit(image_size=24, patch_size=4, width=40, depth=3, heads=5, mlp_ratio=2.5)
    text = TextConfig(width=30, depth=2, heads=3, mlp_ratio=1.5, **tokenizer.options)
    ours = randomise(CLIP(CLIPConfig(image, text, 17).with_options(activation=activation)))
    ours.tokenizer, ours.preprocess = (
        tokenizer,
        vitlab.create("clip_ViT-B/32", image_size=24, patch_size=4, **{"image.depth": 1, "text.depth": 1}).preprocess,
    )  # type: ignore
    notes = convert.write(ours, tmp_path, "hf")
    assert any("pads with end-of-text" in note for note in notes)
    theirs = hf.CLIPModel.from_pretrained(tmp_path).eval()
    processor = hf.CLIPProcessor.from_pretrained(tmp_path)
    pictures = [
        Image.fromarray(np.random.default_rng(n).integers(0, 256, (31, 50, 3), dtype=np.uint8)) for n in range(2)
    ]
    texts = ["a dog", "一只猫 🐶", "a beach " * 20]
    theirs_in = processor(text=texts, images=pictures, return_tensors="pt", padding="max_length", truncation=True)
    images = ours.preprocess.batch(pictures)  # type: ignore
    torch.testing.assert_close(images, theirs_in["pixel_values"], atol=1e-5, rtol=0)
    with torch.inference_mode():
        expected = theirs(**theirs_in).logits_per_image
        found = ours(images, ours.tokenizer(texts)).logits_per_image  # type: ignore  # padded with 0, which no one sees
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    again = vitlab.load(tmp_path)
    assert again.tokenizer.options == {**tokenizer.options, "pad_id": tokenizer.end_id}
    assert torch.equal(again.preprocess.batch(pictures), images) and again.config.text.activation == activation
    agree(again, theirs, images, ours.tokenizer(texts))  # type: ignore


def test_the_wrong_activation_shows(tmp_path):
    """The checks above can fail: with the other one they do."""
    theirs = their_clip()
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    for part in ("text_config", "vision_config"):
        config[part]["hidden_act"] = "gelu"
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.warns(AssumedWarning):
        ours = vitlab.load(tmp_path)
    with pytest.raises(AssertionError):
        agree(ours, theirs, torch.randn(2, 3, 40, 40), some_ids(2))


def test_early_files_that_name_the_wrong_end(tmp_path):
    """eos_token_id=2 stands in OpenAI's files on the hub; transformers then reads at the largest number."""
    theirs = their_clip(dict(eos_token_id=2))
    theirs.save_pretrained(tmp_path)
    with pytest.warns(AssumedWarning):
        ours = vitlab.load(tmp_path)
    assert ours.config.text.end_id == VOCAB - 1
    agree(ours, theirs, torch.randn(2, 3, 40, 40), some_ids(4, end=VOCAB - 1))


def test_losses_agree():
    theirs = their_clip()
    images, ids = torch.randn(6, 3, 40, 40), some_ids(6)
    with torch.inference_mode():
        out = theirs(input_ids=ids, pixel_values=images, return_loss=True)
        scale = theirs.logit_scale.exp()
        assert not (same_captions(ids) & ~torch.eye(6, dtype=torch.bool)).any()
        for same in (None, same_captions(ids)):
            torch.testing.assert_close(contrastive_loss(out.image_embeds, out.text_embeds, scale, same), out.loss)


def test_sizes_of_the_published_models_are_theirs():
    for name, text, vision, dim in (
        (
            "clip_vit_large_patch14",
            (768, 12, 12),
            dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, patch_size=14),
            768,
        ),
        ("clip_vit_base_patch32", (512, 12, 8), {}, 512),
    ):
        width, depth, heads = text
        words = dict(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=depth, num_attention_heads=heads)
        config = hf.CLIPConfig(text_config=words, vision_config=vision, projection_dim=dim)
        entry, own = build_config(name)
        with torch.device("meta"):
            theirs, ours = hf.CLIPModel(config), build(entry.family, own)
        counts = [sum(p.numel() for p in model.parameters()) for model in (theirs, ours)]
        assert counts[0] == counts[1] == {768: 427_616_513, 512: 151_277_313}[dim]


def test_another_image_size_resizes_as_theirs(tmp_path):
    theirs = their_clip()
    torch.nn.init.normal_(theirs.vision_model.embeddings.position_embedding.weight)
    theirs.save_pretrained(tmp_path)
    images, ids = torch.randn(2, 3, 56, 24), some_ids(3)
    with torch.inference_mode(), pytest.warns(AssumedWarning):
        expected = theirs(input_ids=ids, pixel_values=images, interpolate_pos_encoding=True).logits_per_image
        for ours in (vitlab.load(tmp_path), vitlab.load(tmp_path, image_size=(56, 24))):
            torch.testing.assert_close(ours(images, ids).logits_per_image, expected, atol=1e-5, rtol=0)


# ---- open_clip and OpenAI


def unpack(name: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    weights = {key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")}
    save_file(weights, folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors", tensors


TOLD = dict(heads=4, text=dict(heads=4))
ACTIVATIONS = {"open_clip_gelu": "gelu", "open_clip_quickgelu": "quick_gelu"}


def golden_agrees(model, tensors: dict[str, torch.Tensor]) -> float:
    images, ids = tensors["input.images"], tensors["input.ids"]
    with torch.inference_mode():
        pairs = (
            (model.encode_image(images, normalise=False), tensors["output.image_features"]),
            (model.encode_text(ids, normalise=False), tensors["output.text_features"]),
            (model(images, ids).logits_per_image, tensors["output.logits_per_image"]),
        )
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_open_clip_agrees_and_comes_back_identical(name, tmp_path):
    path, tensors = unpack(name, tmp_path)
    model, report = load_with_report(path, activation=ACTIVATIONS[name], **TOLD)
    assert report.dialect == "open_clip" and report.counts()["matched"] == len(report.rows)
    assert (model.config.text.end_id, model.config.text.pad_id) == (99, 0)
    assert golden_agrees(model, tensors) < 1e-5
    other = "gelu" if ACTIVATIONS[name] == "quick_gelu" else "quick_gelu"
    assert golden_agrees(load_with_report(path, activation=other, **TOLD)[0], tensors) > 1e-4  # it matters
    convert.write(model, tmp_path / "back", "open_clip")
    source, written = load_file(path), load_file(tmp_path / "back" / "open_clip_model.safetensors")
    assert source.keys() == written.keys() and all(torch.equal(source[key], written[key]) for key in source)
    again = vitlab.load(tmp_path / "back")  # its config says everything
    assert again.config == model.config and again.preprocess == model.preprocess
    assert golden_agrees(again, tensors) < 1e-5


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_from_open_clip_to_transformers(name, tmp_path):
    path, tensors = unpack(name, tmp_path)
    model, _ = load_with_report(path, activation=ACTIVATIONS[name], **TOLD)
    convert.write(model, tmp_path / "hf", "hf")
    theirs = hf.CLIPModel.from_pretrained(tmp_path / "hf").eval()
    with torch.inference_mode():
        out = theirs(input_ids=tensors["input.ids"], pixel_values=tensors["input.images"])
    torch.testing.assert_close(out.logits_per_image, tensors["output.logits_per_image"], atol=1e-5, rtol=0)


def test_the_activation_is_asked_for_and_never_guessed(tmp_path):
    path, _ = unpack("open_clip_gelu", tmp_path)
    with pytest.raises(CheckpointError, match=r'activation="quick_gelu".*vitlab convert PATH FOLDER --activation'):
        vitlab.load(path, **TOLD)
    model, _ = load_with_report(path, activation="gelu", **TOLD)
    convert.write(model, tmp_path / "folder", "open_clip")
    beside = tmp_path / "folder" / "open_clip_config.json"
    config = json.loads(beside.read_text(encoding="utf-8"))
    del config["model_cfg"]["quick_gelu"]
    beside.write_text(json.dumps(config), encoding="utf-8")
    assert vitlab.load(tmp_path / "folder").config == model.config  # in open_clip's configs that means GELU
    convert.write(model, tmp_path / "hf", "hf")
    bare = tmp_path / "hf" / "model.safetensors"
    with pytest.raises(CheckpointError, match="do not say whether"):
        vitlab.load(bare, **TOLD)
    with pytest.raises(CheckpointError, match=r"activation='swish'"):
        vitlab.load(bare, activation="swish", **TOLD)


def test_a_state_dict_as_openai_has_it(tmp_path):
    """Half precision, with three numbers beside the weights; trained by open_clip, inside two wrappers."""
    path, tensors = unpack("open_clip_quickgelu", tmp_path)
    state = {key: value.half() for key, value in load_file(path).items()}
    save_file({key: value.float() for key, value in state.items()}, path)
    expected, _ = load_with_report(path, activation="quick_gelu", **TOLD)
    inputs = tensors["input.images"], tensors["input.ids"]
    numbers = {"input_resolution": 32, "context_length": 16, "vocab_size": 100}
    torch.save({**state, **{key: torch.tensor(value) for key, value in numbers.items()}}, tmp_path / "ViT.pt")
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in state.items()}}, tmp_path / "epoch_3.pt")
    inside = ("token_embedding", "positional_embedding", "transformer.", "ln_final", "text_projection")
    custom = {f"text.{key}" if key.startswith(inside) else key: value for key, value in state.items()}
    torch.save(custom, tmp_path / "custom.pt")
    for name in ("ViT.pt", "epoch_3.pt", "custom.pt"):
        with pytest.warns(AssumedWarning, match=r"eps=1e-05, mean=\(0\.48"):
            model = vitlab.load(tmp_path / name, activation="quick_gelu", **TOLD)
        with torch.inference_mode():
            assert torch.equal(model(*inputs).logits_per_image, expected(*inputs).logits_per_image)


class Nothing(torch.nn.Module):
    def forward(self, x):
        return x


def test_torchscript_archives_are_refused_with_advice(tmp_path):
    torch.jit.script(Nothing()).save(str(tmp_path / "ViT-B-32.pt"))
    with pytest.raises(CheckpointError, match=r"TorchScript program.*torch\.jit\.load\(path\)\.state_dict\(\)"):
        vitlab.load(tmp_path / "ViT-B-32.pt")


@pytest.mark.parametrize("drop", ["visual.class_embedding", "transformer.resblocks.1.ln_1.weight", "text_projection"])
def test_half_a_clip_is_told(drop, tmp_path):
    path, _ = unpack("open_clip_gelu", tmp_path)
    state = load_file(path)
    del state[drop]
    save_file(state, path)
    with pytest.raises(CheckpointError, match=r"no ViT of CLIP's kind|is missing"):
        vitlab.load(path, activation="gelu", **TOLD)


def test_heads_are_asked_for_by_tower(tmp_path):
    path, _ = unpack("open_clip_gelu", tmp_path)
    with pytest.raises(CheckpointError, match="heads"):
        vitlab.load(path, activation="gelu", text=dict(heads=4))
    with pytest.raises(CheckpointError, match=r"text tower of width 40.*text=dict\(heads=\d\)\)"):
        vitlab.load(path, activation="gelu", heads=4)


def test_a_config_of_other_weights_is_noticed(tmp_path):
    path, _ = unpack("open_clip_gelu", tmp_path)
    model, _ = load_with_report(path, activation="gelu", **TOLD)
    for to, beside, part, name in (
        ("open_clip", "open_clip_config.json", ("model_cfg", "text_cfg"), "context_length"),
        ("hf", "config.json", ("vision_config",), "patch_size"),
        ("hf", "config.json", (), "projection_dim"),
    ):
        convert.write(model, tmp_path / to, to)
        config = whole = json.loads((tmp_path / to / beside).read_text(encoding="utf-8"))
        for key in part:
            config = config[key]
        config[name] += 1
        (tmp_path / to / beside).write_text(json.dumps(whole), encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"do not belong together|do not fit"):
            vitlab.load(tmp_path / to)


def test_an_open_clip_network_that_is_another_one_is_refused(tmp_path):
    path, _ = unpack("open_clip_gelu", tmp_path)
    model, _ = load_with_report(path, activation="gelu", **TOLD)
    convert.write(model, tmp_path / "folder", "open_clip")
    beside = tmp_path / "folder" / "open_clip_config.json"
    plain = json.loads(beside.read_text(encoding="utf-8"))
    for part, name, value in (
        ("text_cfg", "no_causal_mask", True),
        ("vision_cfg", "pool_type", "avg"),
        ("vision_cfg", "layers", [3, 4, 6, 3]),
    ):
        before = dict(plain["model_cfg"][part])
        plain["model_cfg"][part] |= {name: value}
        beside.write_text(json.dumps(plain), encoding="utf-8")
        said = "a ResNet of CLIP's own" if name == "layers" else f"{part}.{name}"
        with pytest.raises(CheckpointError, match=said):
            vitlab.load(tmp_path / "folder")
        plain["model_cfg"][part] = before


def test_what_another_library_cannot_express_is_refused(tmp_path):
    model = vitlab.create("clip_digits", stem="conv", loss="sigmoid", class_token=False, pooling="mean")
    for to, names in (
        ("hf", ("stem=conv", "loss=sigmoid", "pooling=mean")),
        ("open_clip", ("stem=conv", "class token")),
    ):
        with pytest.raises(ValueError) as caught:
            convert.write(model, tmp_path / "out", to)
        assert all(name in str(caught.value) for name in names) and "--to native" in str(caught.value)
    with pytest.raises(ValueError, match="--encoder"):
        convert.write(model, tmp_path / "out", "timm")
    with pytest.raises(ValueError, match="is not written as open_clip: use --to timm, hf, jax or native"):
        convert.write(vitlab.create("vit_digits"), tmp_path / "out", "open_clip")
    assert not (tmp_path / "out").exists()


def test_the_sigmoid_loss_bias_travels_with_open_clip(tmp_path):
    model = randomise(vitlab.create("clip_digits", loss="sigmoid"))
    convert.write(model, tmp_path, "open_clip")
    again = vitlab.load(tmp_path)
    expected = model.config.with_options(pad_id=0, resize_rule="bicubic_antialias")  # as open_clip does it
    assert again.config == expected and torch.equal(again.bias, model.bias)
    ids = torch.full((2, 16), 1023)
    images = torch.randn(2, 1, 8, 8)
    with torch.inference_mode():
        assert torch.equal(again(images, ids).logits_per_image, model(images, ids).logits_per_image)


def test_the_image_tower_alone(tmp_path):
    theirs = their_clip()
    theirs.save_pretrained(tmp_path)
    tower, _ = load_with_report(tmp_path, encoder=True, classes=7)
    images = torch.randn(2, 3, 40, 40)
    with torch.inference_mode():
        expected = theirs.vision_model(images).pooler_output
        torch.testing.assert_close(
            tower.forward_head(tower.forward_features(images), pre_logits=True), expected, atol=1e-5, rtol=0
        )
    assert tower(images).shape == (2, 7)


def test_nulls_of_full_dumps_are_no_values():
    """OpenAI's own folders were written by transformers 4.16, which dumps null for what a tower does not have."""
    config = hf.CLIPConfig().to_dict()
    expected = hf_options(config, None)
    for tower in ("text_config", "vision_config"):
        config[tower] |= {"task_specific_params": None, "tokenizer_class": None}
    config["vision_config"] |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    assert hf_options(config, None) == expected
