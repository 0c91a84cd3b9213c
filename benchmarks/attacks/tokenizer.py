"""The tokenizer of a CLIP run, trained in many processes: the same captions must give the same one everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

CORPORA, PROCESSES, LAUNCHES = 40, 5, 10
LETTERS = "abcdefghijklmnopqrstuvwxyzéß狗猫"
TINY = (
    *("model.image.width=32", "model.image.depth=1", "model.text.width=32", "model.text.depth=1", "model.stem=patch"),
    *("model.embed_dim=16", "data.per_class=4", "data.batch_size=8", "run.device=cpu"),
)


def corpus(seed: int) -> list[str]:
    """Captions of made-up words, each of which occurs as often as the others, so that most pairs have a rival."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(LETTERS, k=draw.randint(2, 5))) for _ in range(120)]
    return [" ".join(words[first : first + 6]) for first in range(0, len(words), 6)]


def digests(seeds: range) -> list[str]:
    """For each corpus, a hash of the tokenizer and of the ids it gives the captions."""
    from vitlab.text.tokenizer import Tokenizer

    found = []
    for seed in seeds:
        captions = corpus(seed)
        tokenizer = Tokenizer.train(captions, vocab=620, context=48)
        ids = tokenizer(captions).tolist()
        found.append(hashlib.sha256(f"{tokenizer.to_json()}{ids}".encode()).hexdigest())
    return found


def prepare_rank(folder: Path) -> None:
    """What each process of torchrun does: prepare a CLIP run, and write down which tokenizer it got."""
    from vitlab.training.job import prepare
    from vitlab.training.presets import find_recipe
    from vitlab.training.processes import stop
    from vitlab.training.recipe import with_settings

    job = prepare(with_settings(find_recipe("clip_digits")[1], list(TINY)), folder / "run")
    (folder / f"rank{job.who.rank}.json").write_text(job.model.require_tokenizer().to_json(), encoding="utf-8")
    job.who.wait()
    stop()


def run() -> list[tuple[str, int, int]]:
    """(attack, tried, held): corpora that give one result in all processes; launches of torchrun whose ranks agree."""
    same = sum(len(set(results)) == 1 for results in zip(*_in_processes(), strict=True))
    return [
        (f"tokenizer of one corpus, trained in {PROCESSES} processes", CORPORA, same),
        ("tokenizer of two torchrun ranks", LAUNCHES, sum(_ranks_agree() for _ in range(LAUNCHES))),
    ]


def _in_processes() -> Iterator[list[str]]:
    for hash_seed in range(PROCESSES):
        command = [sys.executable, __file__, "digests", str(CORPORA)]
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        yield json.loads(done.stdout)


def _ranks_agree() -> bool:
    with tempfile.TemporaryDirectory() as place:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*torchrun, __file__, "rank", place], check=True, stderr=subprocess.DEVNULL)
        ranks = [Path(place, f"rank{rank}.json").read_text(encoding="utf-8") for rank in range(2)]
        return len({*ranks, Path(place, "run", "tokenizer.json").read_text(encoding="utf-8")}) == 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["digests"]:
        print(json.dumps(digests(range(int(sys.argv[2])))))
    elif sys.argv[1:2] == ["rank"]:
        prepare_rank(Path(sys.argv[2]))
    else:
        for row in run():
            print(*row, sep=", ")
