"""Recall@k and its chance, against loops and draws written from the definition."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitlab.training.retrieval import Retrieval


def made(counts: list[int], seed: int = 0, read: list[bool] | None = None) -> Retrieval:
    """Pictures with so many captions each, some of which are near them."""
    generator = torch.Generator().manual_seed(seed)
    images = F.normalize(torch.randn(len(counts), 6, generator=generator), dim=1)
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    texts = F.normalize(images[owner] + 0.7 * torch.randn(len(owner), 6, generator=generator), dim=1)
    seen = torch.ones(len(counts), dtype=torch.bool) if read is None else torch.tensor(read)
    return Retrieval(images, texts, owner, seen, seconds=1.0)


def by_loop(found: Retrieval, k: int) -> tuple[float, float]:
    """Sort everything by its cosine and look among the first k; pictures that were not read are not there."""
    there = [i for i in range(len(found.images)) if found.read[i]]
    captions = [j for j in range(len(found.texts)) if int(found.owner[j]) in there]
    to_text = 0
    for i in there:
        ranked = sorted(captions, key=lambda j: -float(found.images[i] @ found.texts[j]))
        to_text += any(int(found.owner[j]) == i for j in ranked[:k])
    to_image = 0
    for j in captions:
        ranked = sorted(there, key=lambda i: -float(found.images[i] @ found.texts[j]))
        to_image += int(found.owner[j]) in ranked[:k]
    return to_text / len(there), to_image / len(captions)


@pytest.mark.parametrize("k", [1, 5, 10])
@pytest.mark.parametrize("unread", [(), (0, 7, 39)])
def test_recall_is_that_of_the_definition(k, unread):
    counts = [1 + i % 4 for i in range(40)]
    found = made(counts, read=[i not in unread for i in range(40)])
    expected = by_loop(found, k)
    assert 0 < expected[0] < 1 and expected[0] != expected[1]
    assert tuple(found.recall(k).values()) == pytest.approx(expected)
    assert found.top(k) == pytest.approx(sum(expected) / 2)
    told = found.to_dict()
    assert told["images"] == 40 - len(unread) and told["captions"] == int(found.read[found.owner].sum())
    assert told["recall"]["text_to_image"][str(k)] == pytest.approx(expected[1])


def test_more_pictures_than_fit_at_once():
    found = made([1] * 1500)
    near = found.images @ found.texts.T
    for way, table in (("image_to_text", near), ("text_to_image", near.T)):
        ranks = (table > table.diagonal()[:, None]).sum(1)
        assert found.recall(10)[way] == pytest.approx(float((ranks < 10).float().mean()), abs=1e-3)


def test_chance_is_what_guessing_gives():
    counts, rng = [1 + i % 4 for i in range(30)], np.random.default_rng(0)
    found = made(counts)
    owner = found.owner.numpy()
    for k in (1, 5, 10):
        hits = [(owner[rng.permutation(len(owner))[:k]] == i).any() for i in range(30) for _ in range(700)]
        chance = found.chance(k)
        assert chance["image_to_text"] == pytest.approx(np.mean(hits), abs=4 * (0.25 / len(hits)) ** 0.5)
        assert chance["text_to_image"] == pytest.approx(k / 30)
    assert found.chance(1000) == {"image_to_text": 1.0, "text_to_image": 1.0}


def test_a_model_without_an_opinion_finds_nothing():
    same = made([2] * 20)
    collapsed = Retrieval(same.images[:1].expand(20, 6), same.images[:1].expand(40, 6), same.owner, same.read, 1.0)
    broken = Retrieval(same.images * float("nan"), same.texts, same.owner, same.read, 1.0)
    for found in (collapsed, broken):
        assert found.recall(10) == {"image_to_text": 0.0, "text_to_image": 0.0}


def test_the_loss_is_the_symmetric_one_of_first_captions():
    found = made([1, 3, 2], read=[True, False, True])
    found.scale = 5.0
    firsts = [0, 4]
    logits = 5.0 * found.images[[0, 2]] @ found.texts[firsts].T
    expected = -(logits.log_softmax(1).diagonal() + logits.log_softmax(0).diagonal()).mean() / 2
    assert found.loss() == pytest.approx(float(expected))
    chances, answers = found.nearest()
    for i in range(3):
        shares = (5.0 * found.texts @ found.images[i]).softmax(0)
        assert int(answers[i]) == int(shares.argmax()) and float(chances[i]) == pytest.approx(float(shares.max()))
