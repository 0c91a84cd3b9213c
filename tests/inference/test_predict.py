"""predict against the model called by hand, one picture at a time; and `vitlab predict` as a user runs it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.images.preprocess import Preprocess

LABELS = ["[red] fox", "大熊猫", ":dog: [/b]", "plain"]
SIZES = [(16, 16), (31, 57), (90, 20), (5, 3), (16, 40), (64, 64), (23, 19)]


@pytest.fixture
def model():
    return small_model()


def small_model():
    torch.manual_seed(0)
    model = vitlab.create("vit_digits", image_size=16, channels=3, classes=4)
    model.head.weight.data.normal_(std=0.5)  # a new head gives every class the same chance
    model.labels = LABELS
    return model


def picture(height: int, width: int) -> Image.Image:
    noise = np.random.default_rng([height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def save(folder: Path, size: tuple[int, int]) -> Path:
    file = folder / f"{size[0]}x{size[1]}.png"
    picture(*size).save(file)
    return file


@torch.no_grad()
def by_hand(model, image: Image.Image) -> dict[str, float]:
    x = model.preprocess(image)[None]
    e = torch.exp(model.eval()(x)[0].double())
    return dict(zip(LABELS, (e / e.sum()).tolist(), strict=True))


def check(found, expected: dict[str, float]) -> None:
    """The best first, each with its probability."""
    best = sorted(expected, key=expected.__getitem__, reverse=True)
    assert [label for label, _ in found.scores] == best[: len(found.scores)]
    assert found.label == best[0]
    for label, probability in found.scores:
        assert abs(probability - expected[label]) < 1e-6


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_probabilities_are_the_softmax_of_each_picture_alone(model, batch_size):
    images = [picture(*size) for size in SIZES]
    found = vitlab.predict(model, images, batch_size=batch_size)
    assert len({p.scores[0][1] for p in found}) == len(SIZES)  # no two are alike, so a mix-up would be seen
    for p, image in zip(found, images, strict=True):
        check(p, by_hand(model, image))


def test_every_kind_of_source_gives_the_same(model, tmp_path):
    file, image = save(tmp_path, (31, 57)), picture(31, 57)
    sources = [str(file), file, file.read_bytes(), image, np.asarray(image)]
    together = vitlab.predict(model, sources)
    assert [p.name for p in together] == [str(file), str(file), "image 2", "image 3", "image 4"]
    for source, p in zip(sources, together, strict=True):
        (alone,) = vitlab.predict(model, source)
        check(p, by_hand(model, image))
        check(alone, by_hand(model, image))


def test_sources_may_come_from_a_generator_and_be_none_at_all(model):
    assert len(vitlab.predict(model, (picture(*size) for size in SIZES), batch_size=2)) == len(SIZES)
    assert vitlab.predict(model, []) == []


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_bad_pictures_are_reported_in_their_place_and_the_others_go_on(model, tmp_path, batch_size):
    text = tmp_path / "text.jpg"
    text.write_text("not a picture", encoding="utf-8")
    buffer = io.BytesIO()
    picture(60, 70).save(buffer, "JPEG")
    cut = Image.open(io.BytesIO(buffer.getvalue()[:1000]))  # Pillow finds out only when the pixels are asked for
    good = [save(tmp_path, size) for size in SIZES[:3]]
    sources = [text, good[0], tmp_path / "none.png", good[1], cut, np.full((4, 4), np.nan), good[2], b"", tmp_path]
    done = []
    found = vitlab.predict(model, sources, batch_size=batch_size, progress=done.append)
    assert sum(done) == len(sources)
    for i, size in zip((1, 3, 6), SIZES, strict=False):
        assert found[i].error is None
        check(found[i], by_hand(model, picture(*size)))
    for i, name in (
        (0, str(text)),
        (2, "none.png"),
        (4, "image 4"),
        (5, "image 5"),
        (7, "image 7"),
        (8, str(tmp_path)),
    ):
        assert found[i].scores == []
        assert found[i].label is None
        assert name in found[i].error and name in found[i].name
        assert found[i].to_dict() == {"image": found[i].name, "error": found[i].error}


def test_top_counts_from_the_best_and_may_exceed_the_classes(model):
    for top, shown in ((1, 1), (3, 3), (4, 4), (99, 4)):
        (found,) = vitlab.predict(model, picture(31, 57), top=top)
        assert len(found.scores) == shown
        check(found, by_hand(model, picture(31, 57)))


def test_without_labels_classes_have_numbers(model):
    model.labels = None
    (found,) = vitlab.predict(model, picture(31, 57), top=1)
    expected = list(by_hand(model, picture(31, 57)).values())
    assert found.label == f"class {expected.index(max(expected))}"


def test_a_crop_preprocess_is_used_as_it_is(model):
    model.preprocess = Preprocess((16, 16), how="crop", resize=24, mean=(0.2, 0.5, 0.7), std=(0.3, 0.2, 0.1))
    for p, size in zip(vitlab.predict(model, [picture(*s) for s in SIZES]), SIZES, strict=True):
        check(p, by_hand(model, picture(*size)))


def test_each_part_is_in_training_mode_again_afterwards(model):
    model.train()
    model.blocks[0].eval()  # a frozen part
    modes = [m.training for m in model.modules()]
    vitlab.predict(model, picture(16, 16))
    assert [m.training for m in model.modules()] == modes
    model.eval()
    vitlab.predict(model, picture(16, 16))
    assert not any(m.training for m in model.modules())


def test_dropout_is_off_while_predicting():
    torch.manual_seed(0)
    model = vitlab.create("vit_digits", image_size=16, channels=3, classes=4, dropout=0.5).train()
    first, second = (vitlab.predict(model, picture(31, 57))[0].scores for _ in range(2))
    assert first == second
    assert model.training


def test_training_mode_returns_even_after_an_error(model):
    model.train()
    model.preprocess = Preprocess((16, 16), mean=(0.5,), std=(0.5,))  # one channel for a model of three
    with pytest.raises(ValueError, match="channel"):
        vitlab.predict(model, picture(16, 16))
    assert all(m.training for m in model.modules())


def test_what_cannot_be_predicted_is_refused(model):
    features = vitlab.create("vit_digits", image_size=16, channels=3, classes=0)
    with pytest.raises(ValueError, match="no classes"):
        vitlab.predict(features, picture(16, 16))
    with pytest.raises(ValueError, match="top=0"):
        vitlab.predict(model, picture(16, 16), top=0)
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"batch_size={size}"):
            vitlab.predict(model, picture(16, 16), batch_size=size)
    model.preprocess = None
    with pytest.raises(ValueError, match="no preprocess"):
        vitlab.predict(model, picture(16, 16))


# The command


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, list[Path]]:
    """A checkpoint, and two pictures."""
    folder = tmp_path_factory.mktemp("cli")
    return vitlab.save(small_model(), folder / "checkpoint"), [save(folder, size) for size in SIZES[:2]]


def test_json_holds_good_and_bad_files_and_stderr_names_the_bad_one(files, model, command, tmp_path):
    checkpoint, good = files
    bad = tmp_path / "bad [x].jpg"
    bad.write_text("not a picture", encoding="utf-8")
    out, err = command("predict", checkpoint, good[0], bad, good[1], "--json", "--top", 3, code=1)
    first, broken, second = json.loads(out)
    assert str(bad) in err and "1 of 3" in err
    assert not any(str(file) in err for file in good)
    assert broken["image"] == str(bad) and str(bad) in broken["error"]
    for result, file, size in zip((first, second), good, SIZES, strict=False):
        expected = by_hand(model, picture(*size))
        assert result["image"] == str(file)
        best = sorted(expected, key=expected.__getitem__, reverse=True)[:3]
        assert [s["label"] for s in result["scores"]] == best
        assert [s["probability"] for s in result["scores"]] == pytest.approx([expected[b] for b in best], abs=1e-6)


def test_a_table_shows_class_names_as_they_are(files, model):
    """In a process of its own: nothing that it imports may complain."""
    checkpoint, good = files
    script, env = Path(sys.executable).with_name("vitlab"), {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe: dict = dict(capture_output=True, text=True, encoding="utf-8", timeout=120)
    done = subprocess.run([script, "predict", checkpoint, *good], env=env, **pipe)
    out = done.stdout
    assert done.returncode == 0
    assert done.stderr == ""
    for file, size in zip(good, SIZES, strict=False):
        start = out.index(file.name)
        for label, probability in by_hand(model, picture(*size)).items():
            assert f"{label} " in out[start:]
            assert f"{probability:.1%}" in out[start:]


def test_a_missing_checkpoint_is_one_clear_line(files, command):
    checkpoint, good = files
    out, err = command("predict", checkpoint.with_name("none"), *good, code=2)
    assert out == ""
    assert "none: no such file or folder" in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
