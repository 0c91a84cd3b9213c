"""TIPSv2 against transformers, both ways, and stored tensors of timm; its tokenizer against theirs."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import load_with_report
from vitlab.errors import CheckpointError
from vitlab.layers.trace import Trace
from vitlab.text.tokenizer import Tokenizer

from .test_siglip import TEXTS, close, randomise, unpack

pytestmark = pytest.mark.filterwarnings("ignore")  # folders without preprocessor_config.json
VISION = dict(hidden_size=26, num_hidden_layers=2, num_attention_heads=2, patch_size=7, image_size=35, mlp_ratio=2.5)
TEXT = dict(
    hidden_size=26,
    intermediate_size=37,
    num_hidden_layers=2,
    num_attention_heads=2,
    vocab_size=300,
    max_position_embeddings=11,
)


def their_tips(text=None, **vision) -> hf.Tipsv2Model:
    torch.manual_seed(0)
    config = hf.Tipsv2Config(text_config={**TEXT, **(text or {})}, vision_config={**VISION, **vision})
    model = randomise(hf.Tipsv2Model(config))
    model.temperature.data.fill_(0.37)
    return model


def some_ids(n: int, pad: int = 0, context: int = 11) -> torch.Tensor:
    ids = torch.randint(pad + 1, 300, (n, context))
    for row, length in zip(ids, (1, 5, *torch.randint(1, context, (n - 2,)).tolist()), strict=True):
        row[length:] = pad
    return ids


@pytest.mark.parametrize(
    ("text", "vision"),
    [
        ({}, {}),
        ({"scale_sqrt_depth": False, "layer_norm_eps": 1e-3, "hidden_act": "gelu"}, {"num_register_tokens": 3}),
        ({"pad_token_id": 4, "pooling_epsilon": 0.5}, {"use_swiglu_ffn": True, "mlp_ratio": 4, "num_channels": 1}),
    ],
    ids=["own", "other", "gated"],
)
@torch.inference_mode()
def test_theirs_read_by_us_and_written_back(text, vision, tmp_path):
    theirs = their_tips(text, **vision)
    theirs.save_pretrained(tmp_path / "hf")
    ours, pad = vitlab.load(tmp_path / "hf"), text.get("pad_token_id", 0)
    images, ids = torch.randn(3, vision.get("num_channels", 3), 35, 35), some_ids(4, pad)
    expected = theirs(input_ids=ids, pixel_values=images, attention_mask=(ids != pad).int())
    close(ours.encode_image(images), expected.image_embeds)
    close(ours.encode_text(ids), expected.text_embeds)
    close(ours(images, ids).logits_per_text, expected.logits_per_text)
    close(ours.forward_features(images), expected.vision_model_output.last_hidden_state)
    assert torch.allclose(ours.encode_text(ids).norm(dim=1), torch.ones(4))
    close(ours.encode_text(ours.text.trim_padding(ids[:2])), ours.encode_text(ids[:2]))
    for size in ((56, 21), (14, 49)):  # other positions, larger and smaller
        other = torch.randn(2, images.shape[1], *size)
        close(ours.encode_image(other, normalise=False), theirs.get_image_features(other).pooler_output)
    convert.write(ours, tmp_path / "back", "hf")
    source, written = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert source.keys() == written.keys() and all(torch.equal(source[key], written[key]) for key in source)
    back = hf.Tipsv2Model.from_pretrained(tmp_path / "back")
    close(back(input_ids=ids, pixel_values=images, attention_mask=(ids != pad).int())[0], expected[0])
    assert load_with_report(tmp_path / "back")[0].config == ours.config


@torch.inference_mode()
def test_an_empty_text_gives_zeros_and_disturbs_no_other(tmp_path):
    their_tips().save_pretrained(tmp_path)
    ours, ids = vitlab.load(tmp_path), some_ids(2)
    both = ours.encode_text(torch.cat([ids, torch.zeros(1, 11, dtype=torch.long)]))
    close(both[:2], ours.encode_text(ids))
    assert torch.equal(both[2], torch.zeros(26))


def test_released_files_have_their_temperature_in_the_config(tmp_path):
    their_tips().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({key: value for key, value in weights.items() if key != "temperature"}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "temperature_init_value": 0.25}), encoding="utf-8")
    assert vitlab.load(tmp_path).scale == 4
    (tmp_path / "config.json").write_text(json.dumps({**config, "temperature_init_value": 0}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="temperature_init_value"):
        vitlab.load(tmp_path)


@torch.inference_mode()
def test_the_image_tower_alone(tmp_path):
    theirs, images = their_tips().vision_model, torch.randn(2, 3, 35, 35)
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    expected = theirs(images)
    close(ours(images), expected.pooler_output)
    close(ours.forward_features(images), expected.last_hidden_state)
    convert.write(ours, tmp_path / "back", "hf")
    close(hf.Tipsv2VisionModel.from_pretrained(tmp_path / "back")(images)[0], expected[0])
    trace = Trace("attention", layers=[-1])
    ours(images, trace=trace)
    assert trace["attention", -1].shape == (2, 2, 27, 27)


@torch.inference_mode()
def test_timm(tmp_path):
    weights, tensors = unpack("timm_tips")
    save_file(weights, tmp_path / "model.safetensors")
    config = {"architecture": "vit_base_patch14_reg1_tipsv2", "num_classes": 7}
    config |= {"pretrained_cfg": {"mean": [0.0] * 3, "std": [1.0] * 3, "interpolation": "bilinear"}}
    config["model_args"] = {"embed_dim": 48, "num_heads": 4, "depth": 2, "img_size": 28}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ours = vitlab.load(tmp_path)
    close(ours.forward_features(tensors["input.images"]), tensors["output.features"])
    close(ours(tensors["input.images"]), tensors["output.logits"])


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A folder with a small tokenizer, as transformers saves it."""
    backend = Backend(models.BPE(byte_fallback=True))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    special = ["<pad>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    backend.train_from_iterator([f"a photo of {n} dogs" for n in range(9)], trainer)
    model, folder = json.loads(backend.to_str())["model"], tmp_path_factory.mktemp("pieces")
    merges = [tuple(pair) for pair in model["merges"]]
    hf.Tipsv2Tokenizer(vocab=model["vocab"], merges=merges, model_max_length=11).save_pretrained(folder)
    return folder


def test_a_folder_with_its_tokenizer_goes_both_ways(pieces, tmp_path):
    theirs, tokenizer = their_tips(), hf.Tipsv2Tokenizer.from_pretrained(pieces)
    theirs.save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    options = dict(padding="max_length", truncation=True, max_length=11, return_tensors="pt")
    inputs = tokenizer(TEXTS, **options)
    assert torch.equal(ours.tokenizer(TEXTS), inputs.input_ids)
    assert torch.equal(inputs.input_ids != ours.tokenizer.pad_id, inputs.attention_mask.bool())
    vitlab.save(ours, tmp_path / "native")
    assert torch.equal(vitlab.load(tmp_path / "native").tokenizer(TEXTS), inputs.input_ids)
    convert.write(ours, tmp_path / "back", "hf")
    assert torch.equal(
        hf.AutoTokenizer.from_pretrained(tmp_path / "back")(TEXTS, **options).input_ids, inputs.input_ids
    )
    assert torch.equal(vitlab.load(tmp_path / "back").tokenizer(TEXTS), inputs.input_ids)
    assert Tokenizer.read(pieces).decode(ours.tokenizer("A photo of 7 dogs"))[0].startswith("a photo of")
