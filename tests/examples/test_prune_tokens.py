"""The exercise of the last evening: a right answer passes, the usual mistakes are named, the file as it is stops."""

import runpy
from pathlib import Path

import pytest
import torch

EXERCISE = Path(__file__).parents[2] / "examples" / "course" / "prune_tokens.py"


def right(tokens, attention, keep):
    best = attention.mean(dim=1).topk(keep, dim=1).indices.sort(dim=1).values + 1  # (B, keep)
    return torch.stack(
        [image[torch.cat([torch.tensor([0]), places])] for image, places in zip(tokens, best, strict=True)]
    )


def unsorted(tokens, attention, keep):
    best = attention.mean(dim=1).topk(keep, dim=1).indices + 1
    return torch.stack(
        [image[torch.cat([torch.tensor([0]), places])] for image, places in zip(tokens, best, strict=True)]
    )


def one_head(tokens, attention, keep):
    return right(tokens, attention[:, :1], keep)


def off_by_one(tokens, attention, keep):
    return torch.cat([tokens[:, :1], right(tokens[:, :-1], attention[..., 1:], keep)[:, 1:]], dim=1)


def without_class_token(tokens, attention, keep):
    return right(tokens, attention, keep)[:, 1:]


@pytest.fixture
def exercise():
    return runpy.run_path(str(EXERCISE), run_name="exercise")


def test_a_right_answer_passes(exercise, capsys):
    exercise["check"].__globals__["keep_tokens"] = right
    exercise["check"]()
    assert capsys.readouterr().out.startswith("right")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (unsorted, "another order"),
        (one_head, "other patches"),
        (off_by_one, "not yet"),
        (without_class_token, "shape is \\(2, 4, 5\\), and should be \\(2, 5, 5\\)"),
        (lambda tokens, attention, keep: tokens[:, -keep - 1 :], "class token must stay"),
    ],
)
def test_mistakes_are_named(exercise, wrong, message):
    exercise["check"].__globals__["keep_tokens"] = wrong
    with pytest.raises(SystemExit, match=message):
        exercise["check"]()


def test_it_has_to_be_written_first():
    with pytest.raises(NotImplementedError):
        runpy.run_path(str(EXERCISE), run_name="__main__")
