"""CLIP's image tower alone: transformers' three classes live, both ways; open_clip's beside a BERT."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import AssumedWarning, load_with_report
from vitlab.errors import CheckpointError
from vitlab.layers.trace import Trace
from vitlab.models.base import Capability
from vitlab.models.clip import CLIPVision
from vitlab.text.tokenizer import Tokenizer

from .test_clip import VISION, randomise
from .test_clip import unpack as unpack_clip
from .test_golden import unpack

TOWER = {**VISION, "projection_dim": 12}
CLASSES = {
    "tower": (hf.CLIPVisionModel, lambda **more: hf.CLIPVisionConfig(**TOWER, **more)),
    "projected": (hf.CLIPVisionModelWithProjection, lambda **more: hf.CLIPVisionConfig(**TOWER, **more)),
    "classifier": (
        hf.CLIPForImageClassification,
        lambda **more: hf.CLIPConfig(vision_config={**TOWER, **more}, id2label={0: "cat", 1: "dog", 2: "owl"}),
    ),
}


def theirs_of(name: str, **more) -> torch.nn.Module:
    kind, config = CLASSES[name]
    model = randomise(kind(config(**more)))
    torch.nn.init.normal_(tower_of(model).embeddings.position_embedding.weight)
    return model


def tower_of(model: torch.nn.Module) -> torch.nn.Module:
    return getattr(model, "vision_model", model)


def output_of(out) -> torch.Tensor:
    names = ("logits", "image_embeds", "pooler_output")
    return next(value for value in (getattr(out, name, None) for name in names) if value is not None)


@pytest.mark.parametrize(
    "more", [{}, dict(hidden_act="gelu", layer_norm_eps=1e-6, num_channels=1)], ids=["own", "other"]
)
@pytest.mark.parametrize("name", CLASSES)
def test_theirs_read_by_us_and_written_back(name, more, tmp_path):
    theirs = theirs_of(name, **more)
    theirs.save_pretrained(tmp_path / "hf")
    with pytest.warns(AssumedWarning, match="mean="):  # there is no preprocessor_config.json
        ours = vitlab.load(tmp_path / "hf")
    assert isinstance(ours, CLIPVision) == (name == "projected") and ours.encoder is ours
    assert ours.labels == (["cat", "dog", "owl"] if name == "classifier" else None)
    for size in ((40, 40), (56, 24)):
        images = torch.randn(3, ours.config.channels, *size)
        with torch.inference_mode():
            expected = output_of(theirs(images, interpolate_pos_encoding=True))
            hidden = tower_of(theirs)(images, interpolate_pos_encoding=True).last_hidden_state
            assert expected.std() > 0.1
            torch.testing.assert_close(ours(images), expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(ours.forward_features(images), hidden, atol=1e-5, rtol=0)
            if name == "projected":
                torch.testing.assert_close(ours.features(images), expected, atol=1e-5, rtol=0)
                unit = torch.nn.functional.normalize(expected, dim=-1)
                torch.testing.assert_close(ours.encode_image(images, normalise=True), unit, atol=1e-5, rtol=0)
    convert.write(ours, tmp_path / "back", "hf")
    back = type(theirs).from_pretrained(tmp_path / "back").eval()
    unread = "post_layernorm" if name == "classifier" else "-"
    for key, value in theirs.state_dict().items():
        assert unread in key or torch.equal(value, back.state_dict()[key]), key
    assert load_with_report(tmp_path / "back")[0].config == ours.config


def test_a_wrong_eps_shows(tmp_path):
    theirs = randomise(hf.CLIPVisionModel(hf.CLIPVisionConfig(**TOWER, layer_norm_eps=1e-4)))
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-5}), encoding="utf-8")
    images = torch.randn(2, 3, 40, 40)
    with torch.inference_mode():
        wrong = load_with_report(tmp_path)[0](images)
        assert (wrong - theirs(images).pooler_output).abs().max() > 1e-3


def test_a_projected_tower_is_a_vit_like_any_other(tmp_path):
    """Saved, traced, reduced, given classes; what it cannot be is said."""
    theirs_of("projected").save_pretrained(tmp_path / "hf")
    ours, _ = load_with_report(tmp_path / "hf")
    assert Capability.TEXT not in ours.capabilities and Capability.TOKENS in ours.capabilities
    vitlab.save(ours, tmp_path / "native")
    images, trace = torch.randn(2, 3, 40, 40), Trace("projection", "pool", "attention", layers=[-1])
    with torch.inference_mode():
        embeds = vitlab.load(tmp_path / "native")(images, trace=trace)
        assert torch.equal(embeds, ours(images)) and torch.equal(trace["projection"], embeds)
    assert trace["pool"].shape == (2, 24) and trace["attention", -1].shape == (2, 3, 26, 26)
    fine, _ = load_with_report(tmp_path / "hf", classes=5, encoder=True)
    assert fine(images).shape == (2, 5) and torch.equal(fine.features(images), ours.features(images))
    with pytest.raises(vitlab.UsageError, match="cannot express classes"):
        convert.write(fine, tmp_path / "out", "hf")
    with pytest.raises(vitlab.UsageError, match="head_hidden=0"):
        ours.config.with_options(head_hidden=4)
    with pytest.raises(vitlab.UsageError, match="reads no text"):
        ours.encode_text(torch.zeros(1, 3, dtype=torch.long))


def test_bare_files_say_what_is_assumed_or_ask(tmp_path):
    for name in ("tower", "projected"):
        theirs_of(name).save_pretrained(tmp_path / name)
    with pytest.warns(AssumedWarning, match=r"activation=quick_gelu.*as in OpenAI's CLIP"):
        vitlab.load(tmp_path / "tower" / "model.safetensors", heads=3)
    with pytest.raises(CheckpointError, match="GELU or with QuickGELU"):
        vitlab.load(tmp_path / "projected" / "model.safetensors", heads=3)
    model, _ = load_with_report(tmp_path / "projected" / "model.safetensors", heads=3, activation="gelu")
    assert model.config.mlp.activation == "gelu" and model.config.norm.eps == 1e-5
    config = json.loads((tmp_path / "projected" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "projected" / "config.json").write_text(json.dumps({**config, "projection_dim": 13}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="embed_dim=13 but the weights have 12"):
        vitlab.load(tmp_path / "projected")


@pytest.mark.parametrize("kind", ["shards", "bin", "sharded bin"])
def test_several_files_and_pickles(kind, tmp_path):
    theirs = theirs_of("projected")
    theirs.save_pretrained(tmp_path, **({"max_shard_size": "8KB"} if kind == "shards" else {}))
    if kind != "shards":
        state = load_file(tmp_path / "model.safetensors")
        (tmp_path / "model.safetensors").unlink()
        parts = {"pytorch_model.bin": [*state]}
        if kind == "sharded bin":
            keys = sorted(state)
            parts = {f"pytorch_model-0000{n + 1}-of-00002.bin": keys[n::2] for n in range(2)}
            index = {"weight_map": {key: part for part, keys in parts.items() for key in keys}}
            (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
        for part, keys in parts.items():
            torch.save({key: state[key] for key in keys}, tmp_path / part)
    assert not (tmp_path / "model.safetensors").exists()
    images = torch.randn(2, 3, 40, 40)
    with torch.inference_mode():
        expected = theirs(images).image_embeds
        torch.testing.assert_close(load_with_report(tmp_path)[0](images), expected, atol=1e-5, rtol=0)


# ---- open_clip

BERT = {
    "text.transformer.embeddings.word_embeddings.weight": torch.ones(9, 4),
    "text.transformer.encoder.layer.0.attention.self.query.weight": torch.ones(4, 4),
    "text.proj.0.weight": torch.ones(6, 4),
    "logit_scale": torch.tensor(1.0),
}
COLOURS = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bicubic"}


def open_clip_folder(folder, state, model_cfg):
    folder.mkdir()
    torch.save({**state, **BERT}, folder / "open_clip_pytorch_model.bin")
    text = {"hf_model_name": "some/bert", "hf_proj_type": "mlp", "hf_pooler_type": "cls_last_hidden_state_pooler"}
    config = {"model_cfg": {"text_cfg": text, **model_cfg}, "preprocess_cfg": COLOURS}
    (folder / "open_clip_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_timm_tower_beside_a_bert(tmp_path):
    """As BiomedCLIP has it; its tower's tokens are those that timm stored."""
    path, tensors = unpack("timm_vit_mean_fcnorm", tmp_path)
    state = {f"visual.trunk.{key}": value for key, value in load_file(path).items() if not key.startswith("head.")}
    width = state["visual.trunk.patch_embed.proj.weight"].shape[0]
    state["visual.head.proj.weight"] = torch.randn(6, width)
    vision = {"timm_model_name": "vit_base_patch16_224", "timm_model_pretrained": False, "timm_pool": "avg"}
    vision |= {"timm_proj": "linear", "image_size": [32, 48]}
    folder = open_clip_folder(tmp_path / "clip", state, {"embed_dim": 6, "vision_cfg": vision})
    with pytest.warns(AssumedWarning, match=r"text tower \(some/bert\) is not known here and left out"):
        model = vitlab.load(folder, heads=4)
    images = tensors["input.images"]
    with torch.inference_mode():
        torch.testing.assert_close(model.forward_features(images), tensors["output.features"], atol=1e-5, rtol=0)
        norm = [state[f"visual.trunk.fc_norm.{part}"] for part in ("weight", "bias")]
        mean = tensors["output.features"][:, 1:].mean(dim=1)
        pooled = torch.nn.functional.layer_norm(mean, (width,), *norm, eps=1e-6)
        expected = pooled @ state["visual.head.proj.weight"].T
        torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=0)
    assert model.preprocess.mean == (0.1, 0.2, 0.3) and model.config.mlp.activation == "gelu"
    for name, value in (
        ("timm_proj", "mlp"),
        ("timm_pool", "abs_attn"),
        ("timm_model_name", "vit_base_patch16_rpn_224"),
    ):
        config = {"embed_dim": 6, "vision_cfg": {**vision, name: value}}
        with pytest.raises(CheckpointError, match=f"image tower, timm's vit_base.*({value}|norms after)"):
            vitlab.load(open_clip_folder(tmp_path / value, state, config), heads=4)


def test_open_clips_own_tower_beside_a_bert(tmp_path):
    path, tensors = unpack_clip("open_clip_quickgelu", tmp_path)
    state = {key: value for key, value in load_file(path).items() if key.startswith("visual.")}
    width, _, side, _ = state["visual.conv1.weight"].shape
    depth = len({key.split(".")[3] for key in state if "resblocks" in key})
    vision = {"image_size": tensors["input.images"].shape[-1], "patch_size": side}
    vision |= {"layers": depth, "width": width, "head_width": width // 4}
    cfg = {"embed_dim": state["visual.proj"].shape[1], "quick_gelu": True, "vision_cfg": vision}
    model, report = load_with_report(open_clip_folder(tmp_path / "clip", state, cfg))
    with torch.inference_mode():
        ours = model.encode_image(tensors["input.images"])
    torch.testing.assert_close(ours, tensors["output.image_features"], atol=1e-5, rtol=0)
    assert any("reads no text" in note for note in report.notes)


def test_a_tokenizer_of_pairs_alone(tmp_path):
    """merges.txt without vocab.json: CLIP numbers its tokens by the order of the pairs."""
    tokenizer = Tokenizer.train(["a dog on a beach", "一只猫"] * 4, vocab=540, context=13)
    for name, text in tokenizer.to_two_files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    texts = ["a dog", "一只猫 🐶", "", "a beach " * 20]
    expected = Tokenizer.read(tmp_path, context=13)(texts)
    assert torch.equal(expected, tokenizer(texts))
    (tmp_path / "vocab.json").unlink()
    assert torch.equal(Tokenizer.read(tmp_path, context=13)(texts), expected)
    model = vitlab.create("clip_digits", **tokenizer.options)
    convert.write(model, tmp_path / "clip", "hf")
    (tmp_path / "clip" / "merges.txt").write_bytes((tmp_path / "merges.txt").read_bytes())
    assert torch.equal(vitlab.load(tmp_path / "clip").tokenizer(texts), expected)
