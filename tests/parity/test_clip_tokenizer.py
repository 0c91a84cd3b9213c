"""Token numbers equal transformers' CLIPTokenizer on the same vocabulary files: a small one, and OpenAI's, of which the
part that these texts need is stored. Where it can be fetched (it lies in open_clip's wheel, which is downloaded and not
installed), all of it."""

import gzip
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers as hf

from vitlab.text.tokenizer import Tokenizer

CAPTIONS = ["a dog on a beach", "a cat in the house", "two dogs and 3 cats", "the dog's house", "一只狗在海滩上"] * 3
TEXTS = [
    "a photo of a cat",
    "A Dog  on\ta\nBEACH!!!",
    "the dog's, it'll they've I'm 1234 items",
    "一只狗在海滩上。两只猫",
    "🐶 😀👨‍👩‍👧 emoji! 🇨🇳",
    "Ünïcödé É ﬁ ① ½ naïve",
    "日本語 한국어 العربية",
    "a\u0301 composed, \u00a0 no-break \u200b zero width",
    "<|startoftext|> inside <|endoftext|> after",
    "</w> punctuation...!?",
    "",
    "   ",
    "long text " * 100,
    "狗" * 100,
]


def same(ours: Tokenizer, theirs: hf.CLIPTokenizer) -> None:
    found = theirs(TEXTS, padding="max_length", truncation=True, max_length=ours.context, return_tensors="pt")
    expected = torch.as_tensor(found["input_ids"])
    ids = ours(TEXTS)
    for text, one, two in zip(TEXTS, ids, expected, strict=True):
        assert torch.equal(one, two), text
    assert (ours.start_id, ours.end_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for text, row in zip(TEXTS, ids, strict=True):
        if "|>" not in text:  # a word for the end in the middle: they go on after it, we stop there
            assert ours.decode(row) == theirs.decode(row, skip_special_tokens=True), text


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer.train(CAPTIONS, vocab=580, context=24)


def test_a_small_vocabulary_of_two_files(small, tmp_path):
    for name, text in small.to_two_files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    theirs = hf.CLIPTokenizer.from_pretrained(tmp_path)
    same(Tokenizer.read(tmp_path, context=24), theirs)
    same(small, theirs)


def test_our_tokenizer_json_is_read_by_them(small, tmp_path):
    small.save(tmp_path)
    same(small, hf.CLIPTokenizer.from_pretrained(tmp_path))


def test_their_tokenizer_json_is_read_by_us(small, tmp_path):
    for name, text in small.to_two_files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    theirs = hf.CLIPTokenizer.from_pretrained(tmp_path, model_max_length=24)
    theirs.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    ours = Tokenizer.read(tmp_path / "saved")
    assert ours.options == small.options  # length and padding come along
    same(ours, theirs)


def test_numbers_of_openais_vocabulary(tmp_path):
    """What transformers gave with the whole of it; we read the stored part, in which each token has its number."""
    stored = json.loads(
        (Path(__file__).parent.parent / "data" / "golden" / "clip_vocabulary_part.json").read_text(encoding="utf-8")
    )
    assert stored["texts"] == TEXTS
    (tmp_path / "vocab.json").write_text(json.dumps(stored["vocab"]), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *stored["merges"], ""]), encoding="utf-8")
    ours = Tokenizer.read(tmp_path)
    assert (ours.start_id, ours.end_id, ours.context) == (49406, 49407, 77)
    for text, row, expected in zip(TEXTS, ours(TEXTS).tolist(), stored["ids"], strict=True):
        assert row == expected + [49407] * (77 - len(expected)), text


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """OpenAI's list of pairs out of open_clip's wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(folder), "open_clip_torch"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, encoding="utf-8")
    except subprocess.TimeoutExpired:
        pytest.skip("open_clip's wheel, which holds the full vocabulary, could not be fetched within a minute")
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip("open_clip's wheel, which holds the full vocabulary, cannot be fetched here (pip download failed)")
    with zipfile.ZipFile(wheels[0]) as wheel:
        (folder / "pairs.txt.gz").write_bytes(wheel.read("open_clip/bpe_simple_vocab_16e6.txt.gz"))
    return folder / "pairs.txt.gz"


def test_the_full_vocabulary(pairs, tmp_path):
    """Pairs 0 to 48,893 after the heading make the vocabulary of 49,408, counted here by OpenAI's own rule."""
    ours = Tokenizer.read(pairs)
    assert (ours.vocab, ours.start_id, ours.end_id, ours.context) == (49408, 49406, 49407, 77)
    assert ours("a photo of a cat")[0, :8].tolist() == [49406, 320, 1125, 539, 320, 2368, 49407, 49407]
    lines = gzip.decompress(pairs.read_bytes()).decode().split("\n")[1 : 49152 - 256 - 2 + 1]
    bytes_in_order = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(n) for n in bytes_in_order] + [chr(256 + n) for n in range(256 - len(bytes_in_order))]
    words = [*letters, *(c + "</w>" for c in letters), *(line.replace(" ", "") for line in lines)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *lines, ""]), encoding="utf-8")
    theirs = hf.CLIPTokenizer.from_pretrained(tmp_path)
    same(ours, theirs)
    same(Tokenizer.read(tmp_path), theirs)
