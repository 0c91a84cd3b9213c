"""The tokenizer: numbered as CLIP's, nothing unknown, length and padding explicit, files that come back."""

import copy
import json
import pickle
from itertools import pairwise

import pytest
import torch

from vitlab.errors import TokenizerError
from vitlab.text.tokenizer import LEAST, Tokenizer

CAPTIONS = ["a dog on a beach", "a cat in the house", "two dogs", "the dog's house", "一只狗在海滩上"] * 3


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer.train(CAPTIONS, vocab=560, context=12)


def pairs_by_hand(captions: list[str], steps: int) -> list[tuple[str, str]]:
    """Byte pairs of plain words, as the paper of BPE has it (arXiv:1508.07909, Algorithm 1)."""
    words: dict[tuple[str, ...], int] = {}
    for word in " ".join(captions).split():
        key = (*word[:-1], word[-1] + "</w>")
        words[key] = words.get(key, 0) + 1
    found = []
    for _ in range(steps):
        counts: dict[tuple[str, str], int] = {}
        for word, n in words.items():
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + n
        best = max(counts, key=lambda pair: counts[pair])
        assert list(counts.values()).count(counts[best]) == 1, "a tie, where the order is open"
        found.append(best)
        joined = {}
        for word, n in words.items():
            parts, i = [], 0
            while i < len(word):
                both = word[i : i + 2] == best
                parts.append("".join(best) if both else word[i])
                i += 1 + both
            joined[tuple(parts)] = n
        words = joined
    return found


def test_the_most_frequent_pairs_are_merged_in_order():
    captions = ["ab"] * 9 + ["xbc"] * 5 + ["bc"] * 2 + ["cd"] * 3
    expected = pairs_by_hand(captions, 3)
    tokenizer = Tokenizer.train(captions, vocab=LEAST + 3)
    merges = tokenizer.to_two_files()["merges.txt"].split("\n")[1:-1]
    assert [tuple(line.split()) for line in merges] == expected


def test_tokens_are_numbered_as_in_clip(small):
    vocab = json.loads(small.to_two_files()["vocab.json"])
    assert sorted(vocab.values()) == list(range(small.vocab))
    assert (vocab["!"], vocab["a"], vocab["a</w>"]) == (0, ord("a") - ord("!"), 256 + ord("a") - ord("!"))
    assert (small.start_id, small.end_id) == (small.vocab - 2, small.vocab - 1)  # the end is the largest


def test_every_text_has_numbers_and_comes_back(small):
    for text in ("a dog", "zebra!", "狗", "🐶 👨‍👩‍👧", "naïve café", "", "日本語 한국어 العربية"):
        wide = Tokenizer(copy.deepcopy(small.backend), context=77)
        ids = wide(text)
        assert ids.shape == (1, 77) and ids.dtype == torch.long
        row = ids[0].tolist()
        assert row[0] == wide.start_id and row.count(wide.start_id) == 1
        end = row.index(wide.end_id)
        assert set(row[end:]) == {wide.pad_id} and wide.end_id not in row[1:end]  # nothing unknown became an end
        assert wide.decode(ids)[0].replace(" ", "") == text.lower().replace(" ", "")
    assert small.decode(small("A  Dog\n on a beach")[0]) == "a dog on a beach"


def test_padding_is_what_is_asked_for(small):
    openai = Tokenizer(copy.deepcopy(small.backend), context=12, pad_id=0)
    ids, theirs = openai("a dog")[0].tolist(), small("a dog")[0].tolist()
    end = ids.index(openai.end_id)
    assert ids[: end + 1] == theirs[: end + 1]
    assert set(ids[end + 1 :]) == {0} and set(theirs[end + 1 :]) == {small.end_id}


def test_a_long_text_is_cut_before_its_end_or_refused(small):
    ids = small("a dog on a beach " * 9)
    assert ids.shape == (1, 12) and ids[0, -1] == small.end_id
    assert torch.equal(
        ids[0, :11], Tokenizer(copy.deepcopy(small.backend), context=77)("a dog on a beach " * 9)[0, :11]
    )
    strict = Tokenizer(copy.deepcopy(small.backend), context=12, truncate=False)
    assert torch.equal(strict(["two dogs", "狗"]), small(["two dogs", "狗"]))
    with pytest.raises(TokenizerError, match=r"'two dogs two dogs.* is \d+ tokens long, .* at most 12 fit"):
        strict(["a dog", "two dogs " * 9])


def test_what_was_written_is_read(small, tmp_path):
    texts = ["a dog", "狗 🐶", "the " * 40]
    for number, tokenizer in enumerate(
        (small, Tokenizer(copy.deepcopy(small.backend), context=20, pad_id=0, truncate=False))
    ):
        tokenizer.save(tmp_path / str(number))
        again = Tokenizer.read(tmp_path / str(number))
        assert again.options == tokenizer.options and again.truncate == tokenizer.truncate
        assert torch.equal(again(texts[:2]), tokenizer(texts[:2]))
    for copied in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert torch.equal(copied(texts), small(texts))


def test_two_files(small, tmp_path):
    for name, text in small.to_two_files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    texts = ["a dog", "狗 🐶", "the " * 40]
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 12}', encoding="utf-8")
    for place in (tmp_path, tmp_path / "vocab.json", tmp_path / "merges.txt"):
        assert torch.equal(Tokenizer.read(place)(texts), small(texts))
    assert Tokenizer.read(tmp_path, context=9, pad_id=3).options == {**small.options, "context": 9, "pad_id": 3}
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.read(tmp_path).context == 77
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(TokenizerError, match=r"merges\.txt is missing"):
        Tokenizer.read(tmp_path)


def test_training_is_the_same_every_time():
    captions = [f"a {colour} {thing}" for colour in ("red", "green", "blue") for thing in ("car", "tree", "bird")]
    one, two = (Tokenizer.train(captions, vocab=600) for _ in range(2))
    assert one.to_json() == two.to_json() and one.vocab < 600  # few words make few pairs


WRONG = {
    "empty": ("tokenizer.json", "{}", "is no tokenizer.json that"),
    "cut": ("tokenizer.json", '{"version": "1.0", "mod', "Fetch or write it again"),
    "pairs": ("pairs.txt", "#version\na b c\n", "two parts of a word"),
    "gzip": ("pairs.txt.gz", "not gzip", "cannot be read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_damaged_files_are_named(case, tmp_path):
    name, text, says = WRONG[case]
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(TokenizerError, match=says) as caught:
        Tokenizer.read(tmp_path / name)
    assert name in str(caught.value)


def test_what_cannot_work_is_told(small, tmp_path):
    with pytest.raises(TokenizerError, match="no such file"):
        Tokenizer.read(tmp_path / "nothing.json")
    with pytest.raises(TokenizerError, match="neither"):
        Tokenizer.read(tmp_path)
    with pytest.raises(TokenizerError, match="514 tokens"):
        Tokenizer.train(CAPTIONS, vocab=300)
    with pytest.raises(TokenizerError, match="context=2"):
        Tokenizer.train(CAPTIONS, context=2)
    with pytest.raises(TokenizerError, match="pad_id=9999"):
        Tokenizer.train(CAPTIONS, pad_id=9999)
    with pytest.raises(TokenizerError, match="expected texts, found 7"):
        small(["a", 7])


def test_bytes_of_a_command_line_that_are_no_utf8_are_refused(small):
    with pytest.raises(TokenizerError, match="is not valid Unicode"):
        small(b"caf\xe9".decode("utf-8", "surrogateescape"))
