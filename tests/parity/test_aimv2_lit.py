"""AIMv2 with its text tower against transformers' Aimv2Model, both ways; and Apple's own names for the same weights."""

import json
import re

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import load_with_report
from vitlab.errors import CheckpointError, UsageError
from vitlab.text.tokenizer import Tokenizer

from .test_siglip import close, randomise

pytestmark = pytest.mark.filterwarnings("ignore")  # folders without preprocessor_config.json
VISION = dict(
    hidden_size=40, num_hidden_layers=2, num_attention_heads=5, intermediate_size=57, patch_size=7, image_size=35
)
TEXT = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=37, vocab_size=90)
CONTEXT, END = 11, 83
CONFIGS = {
    "learned positions": ({}, {}, 1.3),
    "native": ({"is_native": True}, {"rms_norm_eps": 1e-3}, -0.4),  # a scale below 1 counts as 1
    "biases": (dict(qkv_bias=True, mlp_bias=True, num_channels=1), dict(qkv_bias=True, mlp_bias=True), 5.0),
}


def their_model(vision: dict, text: dict, scale: float) -> hf.Aimv2Model:
    torch.manual_seed(0)
    text_config = {**TEXT, "max_position_embeddings": CONTEXT, "eos_token_id": END, **text}
    config = hf.Aimv2Config(text_config=text_config, vision_config={**VISION, **vision}, projection_dim=17)
    model = randomise(hf.Aimv2Model(config))
    model.logit_scale.data.fill_(scale)
    return model


def some_ids(count: int, context: int = CONTEXT, end: int = END) -> torch.Tensor:
    ids = torch.randint(end, (count, context))
    for row, length in zip(ids, (0, 3, *torch.randint(1, context, (count - 2,)).tolist()), strict=True):
        row[length:] = end
    return ids


def agree(ours, theirs, images: torch.Tensor, ids: torch.Tensor) -> None:
    seen = (ids == END).cumsum(dim=1) <= 1  # as their tokenizer masks; without padding sdpa would not be causal
    expected = theirs(input_ids=ids, pixel_values=images, attention_mask=seen.int())
    close(ours.encode_image(images), expected.image_embeds)
    close(ours.encode_text(ids), expected.text_embeds)
    close(ours(images, ids).logits_per_image / ours.scale, expected.logits_per_image / ours.scale)  # up to 100
    close(ours.forward_features(images), expected.vision_model_output.last_hidden_state)
    assert torch.allclose(ours.encode_text(ids).norm(dim=1), torch.ones(len(ids)))


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_theirs_read_by_us_and_written_back(name, tmp_path):
    theirs = their_model(*CONFIGS[name])
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    images, ids = torch.randn(3, theirs.config.vision_config.num_channels, 35, 35), some_ids(4)
    agree(ours, theirs, images, ids)
    if name == "native":  # its positions are computed for the grid of each image
        agree(ours, theirs, torch.randn(2, 3, 21, 49), ids)
    close(ours.encode_text(ours.text.trim_padding(ids[:2])), ours.encode_text(ids[:2]))
    convert.write(ours, tmp_path / "back", "hf")
    source, written = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back"))
    assert source.keys() == written.keys() and all(torch.equal(source[key], written[key]) for key in source)
    agree(ours, hf.Aimv2Model.from_pretrained(tmp_path / "back").eval(), images, ids)
    assert load_with_report(tmp_path / "back")[0].config == ours.config
    theirs.set_attn_implementation("eager")
    unpadded = theirs.get_text_features(ids[2:], torch.ones_like(ids[2:])).pooler_output
    close(ours.encode_text(ids[2:], normalise=False), unpadded)
    tower = vitlab.load(tmp_path / "hf", encoder=True)
    assert tower.family == "aimv2"
    close(tower(images), theirs.vision_model(images).pooler_output)


APPLE = {  # of transformers' names, in this order
    r"(vision|text)_model\.encoder\.layers": r"\1_model.trunk.blocks",
    r"(vision|text)_model\.rms_norm": r"\1_model.trunk.post_trunk_norm",
    r"embeddings\.patch_embed\.": "preprocessor.patchifier.proj.",
    r"embeddings\.rms_norm": "preprocessor.patchifier.norm",
    r"text_model\.embeddings\.token_embedding": "text_model.preprocessor.text_embedding",
    r"text_model\.embeddings\.position_embedding\.weight": "text_model.preprocessor.positional_embedding",
    r"embeddings\.position_embedding\.weight": "preprocessor.pos_embed",
    r"rms_norm(\d)": r"norm_\1",
    r"attention\.out_proj": "attn.proj",
    r"ffn\.gate_proj": "mlp.fc1",
    r"ffn\.up_proj": "mlp.fc3",
    r"ffn\.down_proj": "mlp.fc2",
    r"head\.(k|v)_proj": r"head.\1",
    r"head\.output_proj": "head.linear",
    "visual_projection": "image_projector",
    "text_projection": "text_projector",
    "logit_scale": "log_logit_scale",
    "vision_model": "image_encoder",
    "text_model": "text_encoder",
}


def apples_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As Apple's release has them, by the definition in its source: one matrix for queries, keys and values."""
    state = dict(state)
    for key in [key for key in state if ".q_proj." in key]:
        parts = [state.pop(key.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        state[key.replace("attention.q_proj", "attn.qkv")] = torch.cat(parts)
    renamed = {}
    for key, value in state.items():
        for theirs, apples in APPLE.items():
            key = re.sub(theirs, apples, key)
        renamed[key] = value[None] if key.endswith("pos_embed") else value
    return renamed


@torch.inference_mode()
def test_apples_own_files(tmp_path):
    theirs = their_model(*CONFIGS["learned positions"])
    state, images, ids = apples_names(theirs.state_dict()), torch.randn(2, 3, 35, 35), some_ids(3)
    save_file(state, tmp_path / "model.safetensors")
    text = {**TEXT, "max_context_length": CONTEXT, "eos_token_id": END}
    config = {"model_type": "aimv2", "projection_dim": 17, "vision_config": VISION, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model, report = load_with_report(tmp_path)
    assert report.dialect == "apple"
    agree(model, theirs, images, ids)
    save_file(state, tmp_path / "bare.safetensors")
    bare = vitlab.load(tmp_path / "bare.safetensors", heads=5, text=dict(heads=3, end_id=END))
    close(bare(images, ids).logits_per_image, model(images, ids).logits_per_image)
    with pytest.raises(CheckpointError, match=r"text=dict\(heads="):
        vitlab.load(tmp_path / "bare.safetensors", heads=5)


@torch.inference_mode()
def test_apples_own_image_encoder(tmp_path):
    theirs = their_model(*CONFIGS["native"])
    prefix = "image_encoder."
    state = {k.removeprefix(prefix): v for k, v in apples_names(theirs.state_dict()).items() if k.startswith(prefix)}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "aimv2", **VISION}), encoding="utf-8")
    model, images = vitlab.load(tmp_path), torch.randn(2, 3, 28, 49)
    close(model.forward_features(images), theirs.vision_model(images).last_hidden_state)
    close(model(images), theirs.vision_model(images).pooler_output)


def test_a_folder_with_its_tokenizer_answers_in_words(tmp_path):
    tokenizer = Tokenizer.train(["a photo of a cat", "two dogs"] * 4, vocab=540, context=CONTEXT)
    theirs = their_model({}, {"vocab_size": tokenizer.vocab, "eos_token_id": tokenizer.end_id}, 1.0)
    theirs.save_pretrained(tmp_path / "hf")
    for name, content in tokenizer.to_two_files().items():
        (tmp_path / "hf" / name).write_text(
            content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
        )
    ours = vitlab.load(tmp_path / "hf")
    assert torch.equal(ours.tokenizer(["a cat", "two"]), tokenizer(["a cat", "two"]))
    convert.write(ours, tmp_path / "back", "hf")
    again = hf.AutoTokenizer.from_pretrained(tmp_path / "back")
    inputs = again(["a cat", "two dogs"], padding="max_length", max_length=CONTEXT, return_tensors="pt")
    with torch.inference_mode():
        expected = theirs.get_text_features(**inputs).pooler_output
        close(ours.encode_text(ours.tokenizer(["a cat", "two dogs"]), normalise=False), expected)
    (answer,) = vitlab.zero_shot(ours, ["docs/pictures/chelsea.jpg"], ["cat", "dog"])
    assert abs(sum(score for _, score in answer.scores) - 1) < 1e-5


def test_what_cannot_be_read_or_written_is_said(tmp_path):
    theirs = their_model(*CONFIGS["learned positions"])
    theirs.text_model.save_pretrained(tmp_path / "text")
    with pytest.raises(CheckpointError, match=r"aimv2_text_model.*a text tower alone"):
        vitlab.load(tmp_path / "text")
    theirs.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for changed, message in (
        ({"max_logit_scale": 50.0}, "max_logit_scale 50"),
        ({"projection_dim": 16}, "embed_dim=16 but the weights have 17"),
        ({"text_config": {**config["text_config"], "num_attention_heads": "3"}}, "num_attention_heads"),
    ):
        path.write_text(json.dumps({**config, **changed}), encoding="utf-8")
        with pytest.raises(CheckpointError, match=message):
            vitlab.load(tmp_path / "hf")
    mean = vitlab.create("aimv2_lit_digits", **{"image.pooling": "mean"})
    with pytest.raises(UsageError, match="pooling=mean"):
        convert.write(mean, tmp_path / "no", "hf")
