"""The tokenizer of a CLIP run depends on its captions alone: not on hash order, the process, or when it stopped."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from vitlab.checkpoints import native
from vitlab.text.bpe import learn_merges
from vitlab.text.tokenizer import Tokenizer
from vitlab.training import captions
from vitlab.training.job import data_of, prepare
from vitlab.training.loop import Silent, fit
from vitlab.training.objectives.clip import ContrastiveLearning
from vitlab.training.presets import find_recipe
from vitlab.training.processes import Processes, start, stop
from vitlab.training.recipe import to_toml, with_settings

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attacks" / "tokenizer.py"
spec = importlib.util.spec_from_file_location("tokenizer_attack", SCRIPT)
attack = importlib.util.module_from_spec(spec)
spec.loader.exec_module(attack)

RECIPE = with_settings(find_recipe("clip_digits")[1], list(attack.TINY))


# ---- merges


def test_another_process_learns_the_same():
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, SCRIPT, "digests", "6"], env=environment, capture_output=True, check=True, timeout=120
    )
    assert json.loads(done.stdout) == attack.digests(range(6))


def counted(words: dict[tuple[str, ...], int]) -> Counter:
    counts = Counter()
    for word, n in words.items():
        for pair in pairwise(word):
            counts[pair] += n
    return counts


def merges_by_recounting(word_counts: dict[str, int]) -> list[tuple[tuple[str, str], bool]]:
    """Algorithm 1 of arXiv:1508.07909, counting anew after every merge; and whether the pair had a rival."""
    words = {(*word[:-1], word[-1] + "</w>"): n for word, n in word_counts.items()}
    found = []
    while counts := counted(words):
        most = max(counts.values())
        rivals = [pair for pair, n in counts.items() if n == most]
        best = min(rivals)
        found.append((best, len(rivals) > 1))
        joined = Counter()
        for word, n in words.items():
            text = "\0".join(("", *word, ""))  # tokens between NULs: a pair is one piece of text
            while (old := "\0" + "\0".join(best) + "\0") in text:
                text = text.replace(old, "\0" + "".join(best) + "\0", 1)
            joined[tuple(text.split("\0")[1:-1])] += n
        words = dict(joined)
    return found


def random_words(seed: int, letters: str, most: int) -> dict[str, int]:
    draw = random.Random(seed)
    texts = ["".join(word) for n in (2, 3, 4) for word in product(letters, repeat=n)]
    return {word: draw.randint(1, most) for word in draw.sample(texts, 60)}


@pytest.mark.parametrize("seed", range(6))
def test_merges_are_those_of_the_paper_with_ties_in_text_order(seed):
    words = random_words(seed, "abcd", most=3)  # counts of 1 to 3: ties all over; "aaaa" overlaps itself
    expected = merges_by_recounting(words)
    assert sum(tied for _, tied in expected) > 20
    assert list(learn_merges(words, "</w>")) == [pair for pair, _ in expected]
    shuffled = dict(random.Random(0).sample(list(words.items()), len(words)))
    assert list(learn_merges(shuffled, "</w>")) == [pair for pair, _ in expected]


def test_merges_are_those_of_the_tokenizers_library_up_to_the_first_tie():
    compared = 0
    for seed in range(6):
        words = random_words(seed, "abcd", most=400)
        learner = Backend(models.BPE(end_of_word_suffix="</w>"))
        learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.BpeTrainer(vocab_size=10_000, end_of_word_suffix="</w>", show_progress=False)
        learner.train_from_iterator((f"{word} " * n for word, n in words.items()), trainer)
        theirs = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
        expected = merges_by_recounting(words)
        until = next((i for i, (_, tied) in enumerate(expected) if tied), len(expected))
        assert list(learn_merges(words, "</w>"))[:until] == theirs[:until]
        compared += until
    assert compared > 60


# ---- one tokenizer for a run


def another(recipe=RECIPE) -> str:
    """A tokenizer that the recipe's own captions would not give."""
    return Tokenizer.train(["zebra zebu"] * 9, vocab=recipe.text.vocab, context=recipe.text.context).to_json()


def test_the_first_process_trains_and_the_others_get_its_tokenizer(in_two_processes, tmp_path, monkeypatch):
    def work(rank: int) -> None:
        if rank:
            monkeypatch.setattr(Tokenizer, "train", lambda *_, **__: pytest.fail("trained by the second process too"))
        who = start("cpu")
        tokenizer = ContrastiveLearning.tokenizer(RECIPE, data_of(RECIPE), tmp_path / "run", who)
        (tmp_path / f"{rank}.json").write_text(tokenizer.to_json(), encoding="utf-8")
        stop()

    assert in_two_processes(work) == [0, 0]
    assert (tmp_path / "0.json").read_text(encoding="utf-8") == (tmp_path / "1.json").read_text(encoding="utf-8")


def test_all_processes_end_where_the_first_cannot_make_one(in_two_processes, tmp_path):
    recipe = with_settings(RECIPE, [f"text.tokenizer={tmp_path / 'nothing.json'}"])

    def work(rank: int) -> None:
        with pytest.raises(ValueError, match="first process" if rank else "no such file"):
            ContrastiveLearning.tokenizer(recipe, data_of(recipe), tmp_path / "run", start("cpu"))

    assert in_two_processes(work) == [0, 0]


class Killed(Silent):
    def start(self, done, total):
        raise KeyboardInterrupt


def test_a_run_killed_before_its_first_save_goes_on_with_its_tokenizer(tmp_path):
    run, named = tmp_path / "run", tmp_path / "named.json"
    named.write_text(another(), encoding="utf-8")
    recipe = with_settings(RECIPE, [f"text.tokenizer={named}", f"run.dir={run}"])
    with pytest.raises(KeyboardInterrupt):
        fit(recipe, run, show=Killed())
    assert not (run / "last").exists()
    named.unlink()  # what the run was started with is gone
    job = prepare(recipe, run)
    assert job.model.tokenizer.to_json() == another() == (run / "tokenizer.json").read_text(encoding="utf-8")
    native.save(job.model, tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.json").read_text(encoding="utf-8") == another()


def test_a_new_run_does_not_take_up_what_lies_in_its_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text(
        another(), encoding="utf-8"
    )  # of a run that was killed before it wrote recipe.toml
    tokenizer = prepare(RECIPE, tmp_path).model.tokenizer
    assert tokenizer.to_json() == (tmp_path / "tokenizer.json").read_text(encoding="utf-8") != another()


def test_a_resumed_run_has_the_tokenizer_of_its_save(tmp_path):
    saved = tmp_path / "last"
    saved.mkdir()

    def resumed(recipe=RECIPE, saved=None) -> str:
        return ContrastiveLearning.tokenizer(recipe, data_of(recipe), tmp_path, Processes(), saved).to_json()

    first = prepare(RECIPE, tmp_path).model.tokenizer.to_json()
    (tmp_path / "recipe.toml").write_text(to_toml(RECIPE), encoding="utf-8")
    assert resumed() == first  # killed before its first save
    for text in (replace(RECIPE.text, vocab=600), replace(RECIPE.text, context=9)):
        with pytest.raises(ValueError, match=r"text\.(vocab|context): \d+ -> \d+.*start a new run"):
            resumed(replace(RECIPE, text=text))
    (saved / "tokenizer.json").write_text(first, encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(another(), encoding="utf-8")  # that of the save counts, which has a digest
    assert resumed(saved=saved) == first
    with pytest.raises(ValueError, match="trained with another tokenizer"):
        captions.check_same_tokenizer(Tokenizer.from_json(another()), saved)
    (saved / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json: is missing"):
        resumed(saved=saved)
