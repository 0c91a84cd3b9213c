"""explain.figures from Python: by a checkpoint's name, what `vitlab explain` draws and writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vitlab
from vitlab.errors import DataError, ImageError, UsageError
from vitlab.explain import figures, open_subject
from vitlab.explain.methods import BY_CLASS
from vitlab.explain.subject import check_output

NAME, SAMPLES = "bundled:digits", ["digits#3", "digits#5"]


@pytest.fixture(scope="module")
def subject():
    return open_subject(NAME, SAMPLES)


def test_functions_take_a_name(subject):
    model = vitlab.load(NAME)
    torch.testing.assert_close(
        vitlab.explain.rollout(NAME, subject.images), vitlab.explain.rollout(model, subject.images)
    )
    for name in ("attention_maps", "relevance", "pca_rgb", "attention_distance", "token_norms"):
        function = getattr(vitlab.explain, name)
        torch.testing.assert_close(function(NAME, subject.images), function(model, subject.images))


def test_an_explanation_is_written_with_its_numbers(subject, tmp_path):
    files = figures.rollout(subject, 0.5).save(tmp_path / "r.svg", html=True)
    assert [file.name for file in files] == ["r.svg", "r.html", "r.npz"]
    with np.load(tmp_path / "r.npz") as numbers:
        assert numbers["image"].tolist() == SAMPLES and numbers["discard"] == 0.5
        np.testing.assert_allclose(numbers["maps"], vitlab.explain.rollout(NAME, subject.images, 0.5))
    assert [f.name for f in figures.figure7(open_subject(NAME)).save(tmp_path / "w.html")] == ["w.html", "w.npz"]


@pytest.mark.parametrize("method", BY_CLASS)
def test_every_method_for_classes_is_drawn(subject, method):
    explanation = figures.relevance(subject, method, target="7")
    expected = {"class": [7, 7], "explained": ["7", "7"], "outliers": [[], []], "scale": "percentile"}
    assert explanation.results == expected
    assert explanation.figure() is not None and explanation.page().startswith("<!DOCTYPE html>")


def test_columns_are_headed_by_titles_and_numbers_by_names(subject, monkeypatch):
    headings = []
    monkeypatch.setattr(
        figures.draw, "heat", lambda views, columns, signed, **more: headings.append((*columns, *signed))
    )
    explanation = figures.compare(subject, ["grad_cam", "gradient_x_input"])
    explanation.figure()
    figures.compare(subject, ["grad_cam"], other=open_subject(NAME, subject.sources)).figure()
    assert headings == [("Grad-CAM", "Gradient x input", "Gradient x input"), ("A: Grad-CAM", "B: Grad-CAM")]
    assert explanation.results["agreement"][0]["first"] == "grad_cam" and "grad_cam" in explanation.numbers


def test_a_message_of_several_lines_is_shown_in_one(monkeypatch):
    def fail(*_):
        raise DataError("cifar10: could not be downloaded:\n  a: gone\n  b: gone\nTry again.")

    monkeypatch.setattr("vitlab.images.samples._place", fail)
    failed = open_subject(NAME, ["cifar10#3"], skip_unreadable=True).failed
    assert failed == {"cifar10#3": "cifar10: could not be downloaded: a: gone b: gone Try again."}


def test_two_models(subject):
    rows = figures.compare(subject, ["rollout"], other=open_subject(NAME, subject.sources)).results["agreement"]
    assert [(row["first"], row["second"]) for row in rows] == [("A: rollout", "B: rollout")]
    np.testing.assert_allclose(rows[0]["agreement"], [1, 1])


def test_what_cannot_be_read_is_left_out_or_raised(tmp_path):
    (tmp_path / "no.png").write_text("not an image", encoding="utf-8")
    part = open_subject(NAME, [str(tmp_path / "no.png"), *SAMPLES], skip_unreadable=True)
    assert list(part.failed) == [str(tmp_path / "no.png")] and part.sources == SAMPLES
    with pytest.raises(ImageError, match=r"no\.png"):
        open_subject(NAME, tmp_path / "no.png")
    with pytest.raises(UsageError, match="at least one"):
        figures.rollout(open_subject(NAME))


def test_a_source_is_not_overwritten(tmp_path):
    (tmp_path / "cat.png").write_bytes(b"")
    with pytest.raises(UsageError, match=r"would write over .*cat\.png"):
        check_output(tmp_path / "cat.png", [str(tmp_path / "cat.png")])
