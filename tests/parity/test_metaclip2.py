"""transformers' MetaCLIP 2, live with random weights: a CLIP whose texts end with 2; both ways, with a tokenizer."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import vitlab

VOCAB, CONTEXT = 90, 13
TEXT = dict(vocab_size=VOCAB, max_position_embeddings=CONTEXT, hidden_size=20, intermediate_size=44)
TEXT |= dict(num_hidden_layers=2, num_attention_heads=4, bos_token_id=0, eos_token_id=2, pad_token_id=1)
VISION = dict(hidden_size=24, intermediate_size=60, num_hidden_layers=2, num_attention_heads=3)
VISION |= dict(image_size=40, patch_size=8)
TEXTS = ["a dog", "一只狗 🐕", "", "der Hund schläft " * 9]


def their_model(kind, config):
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As transformers saves the model, with a tokenizer of XLM-R's kind: <s> text </s>."""
    place = tmp_path_factory.mktemp("metaclip2")
    config = hf.MetaClip2Config(text_config=TEXT, vision_config=VISION, projection_dim=12)
    their_model(hf.MetaClip2Model, config).save_pretrained(place)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    backend = Backend(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=VOCAB, special_tokens=special, unk_token="<unk>")
    backend.train_from_iterator(["a dog sleeps", "der Hund schläft", "一只狗在睡觉"] * 3, trainer)
    ends = [("<s>", 0), ("</s>", 2)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    names = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=CONTEXT, **names)
    fast.save_pretrained(place)
    return place


@torch.inference_mode()
def test_embeddings_are_theirs(folder):
    ours, theirs = vitlab.load(folder), hf.MetaClip2Model.from_pretrained(folder).eval()
    fast = hf.AutoTokenizer.from_pretrained(folder)
    asked = fast(TEXTS, padding="max_length", truncation=True, max_length=CONTEXT, return_tensors="pt")
    ids = ours.tokenizer(TEXTS)
    ended = (asked.input_ids == 2).int().cumsum(1) - (asked.input_ids == 2).int() > 0  # behind the first end: padding
    assert torch.equal(ids.masked_fill(ended, 0), asked.input_ids.masked_fill(ended, 0))
    images = torch.randn(3, 3, 40, 40)
    expected = theirs(input_ids=asked.input_ids, attention_mask=asked.attention_mask, pixel_values=images)
    torch.testing.assert_close(ours.encode_image(images), expected.image_embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.encode_text(ids), expected.text_embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours(images, ids).logits_per_image, expected.logits_per_image, atol=1e-5, rtol=0)


def test_written_for_transformers_with_equal_tensors(folder, tmp_path):
    result = vitlab.convert(folder, tmp_path / "again", "hf", check=True)
    assert [row.difference is not None and not row.wrong for row in result.checks] == [True] * 3
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["model_type"], config["text_config"]["eos_token_id"]) == ("metaclip_2", 2)
    theirs, ours = hf.AutoTokenizer.from_pretrained(tmp_path / "again"), vitlab.load(tmp_path / "again").tokenizer
    assert theirs("der Hund").input_ids == ours("der Hund")[0][: len(theirs("der Hund").input_ids)].tolist()


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["MetaClip2VisionModel", "MetaClip2VisionModelWithProjection"])
def test_the_image_tower_alone(kind, tmp_path):
    config = hf.MetaClip2VisionConfig(**VISION, projection_dim=12)
    theirs, images = their_model(getattr(hf, kind), config), torch.randn(2, 3, 40, 40)
    theirs.save_pretrained(tmp_path)
    expected = theirs(pixel_values=images)
    wanted = expected.image_embeds if "Projection" in kind else expected.pooler_output
    torch.testing.assert_close(vitlab.load(tmp_path)(images), wanted, atol=1e-5, rtol=0)
