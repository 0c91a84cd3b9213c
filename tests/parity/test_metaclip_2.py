"""MetaCLIP 2 against transformers, both ways: CLIP's network, XLM-V's kind of tokens."""

import json
from pathlib import Path

import pytest
import sentencepiece
import torch
import transformers as hf
from safetensors.torch import load_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import load_with_report
from vitlab.text.sentencepiece import parse
from vitlab.text.tokenizer import Tokenizer

from .test_clip import TEXT, VISION, agree, randomise
from .test_siglip import TEXTS

OWN = dict(bos_token_id=0, pad_token_id=1, eos_token_id=2, vocab_size=400, max_position_embeddings=17)


def their_model(**text) -> hf.MetaClip2Model:
    torch.manual_seed(0)
    config = hf.MetaClip2Config(text_config={**TEXT, **OWN, **text}, vision_config=VISION, projection_dim=12)
    return randomise(hf.MetaClip2Model(config))


def some_ids(n: int, end: int, context: int = 17) -> torch.Tensor:
    """Larger numbers than the end come before it: a CLIP with end 2 is read at the largest."""
    ids = torch.randint(end + 1, 400, (n, context))
    for row, length in zip(ids, torch.randint(1, context, (n,)).tolist(), strict=True):
        row[length], row[length + 1 :] = end, 1
    return ids


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Backend:
    """A small tokenizer of XLM-V's kind: pieces of a sentencepiece model, and its table of characters."""
    prefix = tmp_path_factory.mktemp("pieces") / "m"
    sentences = iter([*TEXTS, *(f"a photo of {n} dogs, cats and birds" for n in range(99))])
    ids = dict(bos_id=0, pad_id=1, eos_id=2, unk_id=3, pad_piece="<pad>")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_prefix=str(prefix), vocab_size=110, minloglevel=9, **ids
    )
    model = parse(prefix.with_suffix(".model").read_bytes())
    backend = Backend(models.Unigram([(piece.text, piece.score) for piece in model.pieces], unk_id=3))
    backend.normalizer = normalizers.Precompiled(model.characters)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True, special=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return backend


def write_tokenizer(backend: Backend, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "XLMRobertaTokenizer", "model_max_length": 17}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("end", [2, 57])
def test_theirs_read_by_us_and_written_back(end, tmp_path):
    theirs = their_model(eos_token_id=end)
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    assert (ours.config.text.end_id, ours.config.text.pad_id) == (end, 1)
    images, ids = torch.randn(3, 3, 40, 40), some_ids(4, end)
    agree(ours, theirs, images, ids)
    with torch.inference_mode():
        tower = theirs.vision_model
        hidden = tower(images).last_hidden_state
        torch.testing.assert_close(ours.forward_features(images), hidden, atol=1e-5, rtol=0)
        normed = tower.post_layernorm(hidden)  # they apply it to the class token alone
        torch.testing.assert_close(ours.encoder.forward_features(images), normed, atol=1e-5, rtol=0)
        assert torch.allclose(ours.encode_text(ids).norm(dim=1), torch.ones(4))
    convert.write(ours, tmp_path / "back", "hf")
    kind = hf.MetaClip2Model if end == 2 else hf.CLIPModel  # with another end both are the same
    back = kind.from_pretrained(tmp_path / "back").eval()
    agree(ours, back, images, ids)
    source, written = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert source.keys() == written.keys() and all(torch.equal(source[key], written[key]) for key in source)
    assert load_with_report(tmp_path / "back")[0].config.text.end_id == end


@pytest.mark.filterwarnings("ignore")
def test_a_folder_with_its_tokenizer_goes_both_ways(pieces, tmp_path):
    theirs = their_model()
    theirs.save_pretrained(tmp_path / "hf")
    write_tokenizer(pieces, tmp_path / "hf")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert isinstance(tokenizer, hf.XLMRobertaTokenizer)
    ours = vitlab.load(tmp_path / "hf")
    options = dict(padding="max_length", truncation=True, max_length=17, return_tensors="pt")
    expected = tokenizer(TEXTS, **options).input_ids
    assert torch.equal(ours.tokenizer(TEXTS), expected)
    assert (ours.tokenizer.start_id, ours.tokenizer.end_id, ours.tokenizer.pad_id) == (0, 2, 1)
    agree(ours, theirs, torch.randn(2, 3, 40, 40), expected)
    assert ours.tokenizer.decode(ours.tokenizer("a photo of 7 dogs")) == ["a photo of 7 dogs"]
    vitlab.save(ours, tmp_path / "native")
    assert torch.equal(vitlab.load(tmp_path / "native").tokenizer(TEXTS), expected)
    convert.write(ours, tmp_path / "back", "hf")
    again = hf.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert isinstance(again, hf.XLMRobertaTokenizer) and torch.equal(again(TEXTS, **options).input_ids, expected)
    assert isinstance(hf.AutoModel.from_pretrained(tmp_path / "back"), hf.MetaClip2Model)


def test_without_a_config_of_its_length_a_text_has_77_tokens(pieces):
    assert Tokenizer.from_json(pieces.to_str()).context == 77


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["VisionModel", "VisionModelWithProjection", "ForImageClassification"])
def test_the_image_tower_alone(name, tmp_path):
    torch.manual_seed(1)
    config = hf.MetaClip2VisionConfig(**VISION, projection_dim=12)
    if name == "ForImageClassification":
        config = hf.MetaClip2Config(vision_config=config.to_dict(), id2label={0: "cat", 1: "dog"})
    theirs, images = randomise(getattr(hf, f"MetaClip2{name}")(config)), torch.randn(2, 3, 40, 40)
    theirs.save_pretrained(tmp_path)
    with torch.inference_mode():
        out = theirs(images)
        expected = next(out[key] for key in ("logits", "image_embeds", "pooler_output") if key in out)
        torch.testing.assert_close(vitlab.load(tmp_path)(images), expected, atol=1e-5, rtol=0)
