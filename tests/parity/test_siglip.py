"""SigLIP against transformers, both ways, and stored tensors of timm and open_clip; its tokenizers against theirs."""

import json
import random
from pathlib import Path

import pytest
import sentencepiece
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, trainers

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints import siglip as checkpoint
from vitlab.errors import CheckpointError, TokenizerError
from vitlab.models import registry
from vitlab.text.tokenizer import Tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # folders without preprocessor_config.json
GOLDEN = Path(__file__).parent.parent / "data" / "golden"
VISION = dict(hidden_size=24, intermediate_size=53, num_hidden_layers=2, num_attention_heads=3, patch_size=8)
TEXT = dict(
    hidden_size=20,
    intermediate_size=37,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=60,
    max_position_embeddings=11,
    projection_size=24,
)
TEXTS = [
    *("a photo of a cat", "A Photo, of a DOG!!", "", "   ", "  leading", "two  spaces\ttab\n", "一只狗在海边"),
    *("你好，世界！", "🐶🐱", "👨\u200d👩\u200d👧 family", "❤️ 1️⃣", "x" * 300, "word " * 200, "ΟΔΟΣ ΑΣ.", "İstanbul"),
    *("café cafe\u0301", "ﬁne ½ Ａ１", "snake_case", "▁under▁score", "...", "a\u200bb\u200b", "\u3000全角　空白"),
    *("한국어", "don't stop-me", "нет ДА"),
]


def randomise(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.02 if "embed" in name else 0.3)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return model.eval()


def their_siglip(image_size=40, **text):
    config = hf.SiglipConfig(text_config={**TEXT, **text}, vision_config={**VISION, "image_size": image_size})
    return randomise(hf.SiglipModel(config))


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"image_size": 45}, {"hidden_act": "gelu", "layer_norm_eps": 1e-5}], ids=str)
@torch.inference_mode()
def test_theirs_read_by_us_and_written_back(options, tmp_path):
    torch.manual_seed(0)
    theirs = their_siglip(**options)
    theirs.save_pretrained(tmp_path / "hf")
    ours, side = vitlab.load(tmp_path / "hf"), options.get("image_size", 40)  # 45: the last 5 pixels are not read
    images, ids = torch.randn(3, 3, side, side), torch.randint(60, (4, 11))
    expected = theirs(input_ids=ids, pixel_values=images)
    close(ours(images, ids).logits_per_image, expected.logits_per_image)
    close(ours.encode_image(images), expected.image_embeds)
    close(ours.encode_text(ids), expected.text_embeds)
    close(ours.forward_features(images), expected.vision_model_output.last_hidden_state)
    wide = torch.randn(2, 3, 61, 29)  # other positions, and no whole patches
    if side == 40:
        wide = wide[..., :56, :24]
    close(
        ours.encode_image(wide, normalise=False),
        theirs.get_image_features(wide, interpolate_pos_encoding=True).pooler_output,
    )
    convert.write(ours, tmp_path / "back", "hf")
    source, written = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert source.keys() == written.keys() and all(torch.equal(source[key], written[key]) for key in source)
    close(hf.SiglipModel.from_pretrained(tmp_path / "back")(input_ids=ids, pixel_values=images)[0], expected[0])


@torch.inference_mode()
def test_the_image_tower_alone_and_with_a_classifier(tmp_path):
    torch.manual_seed(1)
    alone = randomise(hf.SiglipVisionModel(hf.SiglipVisionConfig(**VISION, image_size=40)))
    config = hf.SiglipConfig(text_config=TEXT, vision_config={**VISION, "image_size": 40})
    config.id2label = {0: "cat", 1: "dog", 2: "bird"}
    classifier, images = randomise(hf.SiglipForImageClassification(config)), torch.randn(2, 3, 40, 40)
    alone.save_pretrained(tmp_path / "alone")
    classifier.save_pretrained(tmp_path / "classes")
    close(vitlab.load(tmp_path / "alone")(images), alone(images).pooler_output)
    model = vitlab.load(tmp_path / "classes")
    close(model(images), classifier(images).logits)
    assert model.labels == ["cat", "dog", "bird"]
    vitlab.convert(tmp_path / "alone", tmp_path / "back", to="hf")
    again = hf.SiglipVisionModel.from_pretrained(tmp_path / "back").eval()  # version 4's names, which 5 reads
    assert all(torch.equal(again.state_dict()[key], value) for key, value in alone.state_dict().items())
    close(again(images).pooler_output, alone(images).pooler_output)
    with pytest.raises(vitlab.UsageError, match="SiglipVisionModel cannot express classes=3"):
        vitlab.convert(tmp_path / "alone", tmp_path / "no", to="hf", classes=3)


def unpack(name):
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    weights = {key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")}
    return weights, tensors


@pytest.mark.parametrize(
    ("name", "architecture", "pooling"),
    [
        ("timm_siglip", "vit_base_patch16_siglip_224", "map"),
        ("timm_siglip2_so", "vit_so400m_patch14_siglip_gap_224", "avg"),
    ],
)
@torch.inference_mode()
def test_timm(name, architecture, pooling, tmp_path):
    weights, tensors = unpack(name)
    save_file(weights, tmp_path / "model.safetensors")
    config = {"architecture": architecture, "global_pool": pooling, "model_args": {"img_size": 32, "num_heads": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = vitlab.load(tmp_path)
    close(model(tensors["input.images"]), tensors["output.logits"])
    close(model.forward_features(tensors["input.images"]), tensors["output.features"])


OPEN_CLIP = {
    "embed_dim": 48,
    "init_logit_bias": -10,
    "vision_cfg": {
        "timm_model_name": "vit_base_patch16_siglip_224",
        "timm_pool": "map",
        "timm_proj": "none",
        "image_size": 32,
    },
    "text_cfg": {
        "context_length": 16,
        "vocab_size": 90,
        "width": 48,
        "heads": 4,
        "layers": 2,
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-06},
        "act_kwargs": {"approximate": "tanh"},
    },
}


def open_clip_folder(folder: Path, **text) -> dict[str, torch.Tensor]:
    weights, tensors = unpack("open_clip_siglip")
    save_file(weights, folder / "open_clip_model.safetensors")
    config = {**OPEN_CLIP, "text_cfg": {**OPEN_CLIP["text_cfg"], **text}}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}), encoding="utf-8")
    return tensors


@torch.inference_mode()
def test_open_clip(tmp_path):
    tensors = open_clip_folder(tmp_path)
    model = vitlab.load(tmp_path, image=dict(heads=4))  # its name is of another width, which would tell them
    out = model(tensors["input.images"], tensors["input.ids"])
    close(out.logits_per_image, tensors["output.logits_per_image"])
    close(model.encode_image(tensors["input.images"]), tensors["output.image_features"])
    close(model.encode_text(tensors["input.ids"]), tensors["output.text_features"])


@torch.inference_mode()
def test_written_to_open_clip(tmp_path, monkeypatch):
    """The same tensors, and a config that says the same; timm's names end with the size, so the small one gets one."""
    tensors = open_clip_folder(tmp_path)
    model = vitlab.load(tmp_path, image=dict(heads=4))
    with pytest.raises(CheckpointError, match="none has patches of 8 in images of 32x32"):
        convert.write(model, tmp_path / "back", "open_clip")
    tower = dict(width=48, depth=2, heads=4)
    monkeypatch.setitem(checkpoint.TOWERS, "little", (tower, tower))
    monkeypatch.setitem(checkpoint.TRUNKS, ("little", 8), (32,))
    convert.write(model, tmp_path / "back", "open_clip")
    before, after = (load_file(folder / "open_clip_model.safetensors") for folder in (tmp_path, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    cfg = json.loads((tmp_path / "back" / "open_clip_config.json").read_text(encoding="utf-8"))["model_cfg"]
    assert cfg["vision_cfg"].pop("timm_model_name") == "vit_little_patch8_siglip_32"
    source = {name: value for name, value in OPEN_CLIP["vision_cfg"].items() if name != "timm_model_name"}
    assert source.items() <= cfg["vision_cfg"].items() and OPEN_CLIP["text_cfg"].items() <= cfg["text_cfg"].items()
    assert (cfg["embed_dim"], cfg["init_logit_bias"], cfg["custom_text"]) == (48, -10, True)
    again = vitlab.load(tmp_path / "back", image=dict(heads=4))
    assert again.config == model.config and again.preprocess == model.preprocess
    out = again(tensors["input.images"], tensors["input.ids"])
    close(out.logits_per_image, tensors["output.logits_per_image"])


@pytest.mark.parametrize(
    ("name", "options", "trunk"),
    [
        ("siglip_base_patch16", {"activation": "gelu"}, "vit_base_patch16_siglip_224"),
        ("siglip_base_patch16", {"image_size": 384, "image.activation": "gelu"}, "vit_base_patch16_siglip_384"),
        ("siglip2_so400m_patch16", {"image_size": 512}, "vit_so400m_patch16_siglip_512"),
        ("siglip2_giant_opt_patch16", {}, "vit_giantopt_patch16_siglip_256"),
    ],
)
def test_released_sizes_have_a_name_in_open_clip(name, options, trunk):
    with torch.device("meta"):
        model = vitlab.create(name, **{**options, "image.depth": 1, "text.depth": 1})
    real = model.config.with_options(**{"image.depth": registry.MODELS[name].config.image.depth})
    model.config = real  # its blocks are all alike
    written = checkpoint.FAMILY.writers["open_clip"].write(model, model.state_dict())
    cfg = written.files["open_clip_config.json"]["model_cfg"]
    assert cfg["vision_cfg"]["timm_model_name"] == trunk
    tanh = cfg["text_cfg"].get("act_kwargs") == {"approximate": "tanh"}
    assert tanh == (options.get("activation") != "gelu")
    assert {"visual.trunk.attn_pool.latent", "text.text_projection.bias", "logit_bias"} <= written.tensors.keys()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ({"no_causal_mask": False}, "text_cfg.no_causal_mask=False"),
        ({"pool_type": "eos"}, "text_cfg.pool_type='eos'"),
        ({"ls_init_value": 0.1}, "text_cfg.ls_init_value=0.1"),
        ({"heads": 4, "width": 44}, "do not belong together"),
    ],
)
def test_what_open_clip_says_otherwise_is_refused(text, says, tmp_path):
    open_clip_folder(tmp_path, **text)
    with pytest.raises(CheckpointError, match=says):
        vitlab.load(tmp_path, image=dict(heads=4))


# ---- tokenizers


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A folder with a small sentencepiece model."""
    folder, draw = tmp_path_factory.mktemp("pieces"), random.Random(0)
    lines = ["a photo of a cat and a dog on the beach", "hello world", "一只狗在海边跑 你好", "нет да οδος 한국어"] * 20
    lines += ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=40)) for _ in range(100)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "spiece"), vocab_size=300, minloglevel=3
    )
    hf.SiglipTokenizer(str(folder / "spiece.model")).save_pretrained(folder)
    return folder


def theirs_of(tokenizer, texts):
    return tokenizer(texts, padding="max_length", truncation=True, max_length=64)["input_ids"]


def test_sentencepiece_equals_transformers(pieces):
    ours = Tokenizer.read(pieces)
    assert ours(TEXTS).tolist() == theirs_of(hf.SiglipTokenizer.from_pretrained(pieces), TEXTS)
    assert Tokenizer.from_json(ours.to_json())(TEXTS).equal(ours(TEXTS))
    assert ours.decode(ours("A photo, of a dog!")[0]) == "a photo of a dog" and ours.context == 64


ODD = [  # marks without a letter, Hangul in parts, special tokens that somebody typed, full-width ones, control codes
    *("</s>", "<unk>", "<s>", "</S>", "＜／ｓ＞", "e\u0301", *"\u0301\u0338\u0327\u0344\u093c", "\u1112\u1161\u11ab"),
    *("\u1112", "각", "ΟΔΟΣ", "一只", *"ﬁ½①﷽Σİßǆ狗🐶🏽", *"\u200d\ufe0f\u3000▁\t\0\x07\u00ad\ufeff", " ", "  "),
    *("a", "dog ", "x.y", "'"),
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {"normalization_rule_name": "nfkc_cf", "add_dummy_prefix": False},
        {"model_type": "bpe"},
        {"byte_fallback": True, "vocab_size": 500},
    ],
    ids=str,
)
def test_any_text_has_the_ids_of_transformers(options, tmp_path):
    draw = random.Random(3)
    letters = "abcdefghijklmnopqrstuvwxyz"
    lines = ["a cat and a dog </s>", "一只狗在海边", "οδος 한국어 é >"] * 20
    lines += ["".join(draw.choices(letters + " ", k=40)) for _ in range(40)]
    options = {"vocab_size": 150, "minloglevel": 3, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(tmp_path / "spiece"), **options
    )
    theirs, ours = hf.SiglipTokenizer(str(tmp_path / "spiece.model")), Tokenizer.read(tmp_path)
    texts = [
        "".join(draw.choice(ODD) if draw.random() < 0.7 else chr(draw.randrange(33, 0x3000)) for _ in range(length))
        for length in [*range(1, 13), 80] * 12
    ]
    texts += ["a</s>", "a </s> b", "</s>", "<unk>狗", "a<unk>\u0301"]
    expected = theirs_of(theirs, texts)
    different = [text for text, a, b in zip(texts, ours(texts).tolist(), expected, strict=True) if a != b]
    assert not different
    assert Tokenizer.from_json(ours.to_json())(texts).equal(ours(texts))


def test_pieces_that_are_not_cut_alike_are_refused(tmp_path):
    lines = ["a photo of a cat and a dog", "hello world"] * 20
    options = {"model_prefix": str(tmp_path / "spiece"), "vocab_size": 20, "minloglevel": 3}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), user_defined_symbols=["dog"], **options)
    with pytest.raises(TokenizerError, match="pieces that a user defined"):
        Tokenizer.read(tmp_path)


@pytest.mark.parametrize(
    "options", [{"add_eos_token": True, "padding_side": "right"}, {"add_eos_token": True}], ids=str
)
def test_gemma_equals_transformers(options, tmp_path):
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    backend.train_from_iterator(["a photo of a cat and a dog", "hello world", "一只狗在海边"] * 20, trainer)
    model = json.loads(backend.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    options = {"add_eos_token": True, "model_max_length": 64, **options}
    hf.Siglip2Tokenizer(vocab=model["vocab"], merges=merges, **options).save_pretrained(tmp_path)
    ours = Tokenizer.read(tmp_path)
    assert ours(TEXTS).tolist() == theirs_of(hf.Siglip2Tokenizer.from_pretrained(tmp_path), TEXTS)
    assert ours.padding_side == options.get("padding_side", "left") and ours.pad_id == 0


@torch.inference_mode()
def test_a_folder_with_its_tokenizer_goes_both_ways(pieces, tmp_path):
    theirs = their_siglip(vocab_size=300, max_position_embeddings=64)
    theirs.save_pretrained(tmp_path / "hf")
    for name in ("spiece.model", "tokenizer_config.json"):
        (tmp_path / "hf" / name).write_bytes((pieces / name).read_bytes())
    model = vitlab.load(tmp_path / "hf")
    ids = hf.SiglipTokenizer.from_pretrained(pieces)(
        TEXTS[:4], padding="max_length", max_length=64, return_tensors="pt"
    )
    expected = theirs.get_text_features(ids["input_ids"]).pooler_output
    close(torch.from_numpy(vitlab.embed_text(model, TEXTS[:4])), torch.nn.functional.normalize(expected, dim=1))
    convert.write(model, tmp_path / "back", "hf")
    again = hf.AutoTokenizer.from_pretrained(tmp_path / "back")
    texts = [text for text in TEXTS if "Σ" not in text]  # the library lower-cases letter by letter
    assert theirs_of(again, texts) == model.tokenizer(texts).tolist()
    vitlab.save(model, tmp_path / "own")
    assert vitlab.load(tmp_path / "own").tokenizer(TEXTS).equal(model.tokenizer(TEXTS))


def test_zero_shot_gives_each_label_its_own_probability(pieces, tmp_path):
    model = vitlab.create("siglip_nano", **Tokenizer.read(pieces).options)
    model.tokenizer = Tokenizer.read(pieces)
    image = torch.zeros(32, 32, 3, dtype=torch.uint8).numpy()
    with torch.inference_mode():
        tensor = model.eval().preprocess(image)[None]
        ids = model.tokenizer(["a cat", "a dog"])
        expected = model(tensor, ids).logits_per_image.sigmoid()[0]
    scores = dict(vitlab.zero_shot(model, [image], ["cat", "dog"], templates=["a {}"])[0].scores)
    assert scores["cat"] == pytest.approx(float(expected[0]), rel=1e-4) and sum(scores.values()) < 0.9
