"""A teacher sees what the student sees, in its own colours and size; its answers keep on disk and are told apart."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vitlab
from vitlab.images.preprocess import Preprocess
from vitlab.images.sources.dataset import ArrayDataset, FileDataset
from vitlab.training import teacher as module
from vitlab.training.teacher import Teacher, data_fingerprint, keep_answers

CLASSES = ["cat", "dog", "[bird]"]
IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
HALF = Preprocess((32, 32))


def resnet(**options):
    torch.manual_seed(0)
    model = vitlab.create("resnet_cifar", **{"widths": (8, 12, 16), "stem_width": 8, "classes": 3, **options})
    model.labels = list(CLASSES)
    with torch.no_grad():
        model.head.weight.normal_()  # answers that differ from picture to picture
    return model


def pictures(n: int, size=(32, 32), channels: int = 3) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, *size, channels), dtype=np.uint8)


def data_of(n: int = 11, **options) -> ArrayDataset:
    return ArrayDataset(pictures(n, **options), np.arange(n) % 3, CLASSES, "toy/train")


def seen(preprocess: Preprocess, images: np.ndarray) -> torch.Tensor:
    return torch.stack([preprocess(image) for image in images])


# ---------------------------------------------------------------- what it sees


def test_a_teacher_is_frozen_and_gives_what_its_model_gives(tmp_path):
    vitlab.save(resnet(), tmp_path / "best")
    teacher = Teacher.load(tmp_path / "best", CLASSES, HALF)
    images = seen(HALF, pictures(4)).requires_grad_()
    assert teacher.notes == [] and not teacher.model.training
    assert not any(p.requires_grad for p in teacher.model.parameters())
    out = teacher(images)
    assert not out.requires_grad
    with torch.no_grad():
        assert torch.equal(out, vitlab.load(tmp_path / "best")(images))
    before = {k: v.clone() for k, v in teacher.model.state_dict().items()}
    teacher(images * 3)
    assert all(torch.equal(v, before[k]) for k, v in teacher.model.state_dict().items())  # statistics too


@pytest.mark.parametrize(
    ("student", "own"),
    [
        (Preprocess((32, 32)), Preprocess((32, 32), **IMAGENET)),
        (Preprocess((32, 32), **IMAGENET), Preprocess((32, 32))),
        (Preprocess((32, 32), scale=1.0, mean=(120.0,) * 3, std=(60.0,) * 3), Preprocess((32, 32), **IMAGENET)),
    ],
)
def test_colours_become_the_teachers(student, own):
    """The same pictures through each one's own preprocess."""
    model, images = resnet(), pictures(4)
    model.preprocess = own
    teacher = Teacher(model, CLASSES, student)
    torch.testing.assert_close(teacher.view(seen(student, images)), seen(own, images), atol=1e-5, rtol=0)


def test_equal_colours_and_size_are_left_alone():
    images = torch.randn(2, 3, 32, 32)
    assert Teacher(resnet(), CLASSES, HALF).view(images) is images


def test_grey_pictures_for_a_teacher_of_colours():
    student, images = Preprocess((32, 32), mean=(0.3,), std=(0.4,)), pictures(3, channels=1)[..., 0]
    model = resnet()
    model.preprocess = Preprocess((32, 32), **IMAGENET)
    found = Teacher(model, CLASSES, student).view(seen(student, images))
    torch.testing.assert_close(found, seen(model.preprocess, images), atol=1e-5, rtol=0)
    grey = resnet(channels=1)
    with pytest.raises(ValueError, match="sees grey images and the student colours"):
        Teacher(grey, CLASSES, HALF)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_size_becomes_the_teachers(interpolation):
    model = resnet(image_size=(20, 48))
    model.preprocess = Preprocess((20, 48), interpolation=interpolation, **IMAGENET)
    images = pictures(3)
    found = Teacher(model, CLASSES, HALF).view(seen(HALF, images))
    assert found.shape == (3, 3, 20, 48)
    # Pillow resizes 8-bit pixels and rounds: half a step of 1/255 / 0.224, and for bicubic the overshoot it cuts off
    difference = (found - seen(model.preprocess, images)).abs()
    assert difference.mean() < 0.02 and difference.quantile(0.9) < 0.05


def test_a_flat_picture_stays_flat_at_any_size():
    model = resnet(image_size=(20, 48))
    flat = torch.full((1, 3, 32, 32), 0.25)
    torch.testing.assert_close(Teacher(model, CLASSES, HALF).view(flat), torch.full((1, 3, 20, 48), 0.25))


def test_a_vit_can_teach_too():
    torch.manual_seed(0)
    model = vitlab.create("vit_digits", channels=3, classes=3)
    model.labels = list(CLASSES)
    teacher = Teacher(model, CLASSES, HALF)
    images = torch.randn(2, 3, 32, 32)
    small = F.interpolate(images, (8, 8), mode="bilinear", antialias=True)
    with torch.no_grad():
        torch.testing.assert_close(teacher(images), model(small))


# ---------------------------------------------------------------- classes


def test_classes_in_another_order_are_put_in_ours():
    model, images = resnet(), torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        plain = model.eval()(images)
    teacher = Teacher(model, ["[bird]", "cat", "dog"], HALF)
    assert torch.equal(teacher(images), plain[:, [2, 0, 1]])


def test_other_classes_are_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"only the teacher has \[bird\]; only the data has fish.*init_from=here"):
        Teacher(resnet(), ["cat", "dog", "fish"], HALF, "here")
    unnamed = resnet()
    unnamed.labels = None
    with pytest.raises(ValueError, match="has 3 classes, which it does not name, and the data have 2"):
        Teacher(unnamed, ["cat", "dog"], HALF)
    with pytest.raises(ValueError, match="has no classes"):
        Teacher(resnet_without_head(), CLASSES, HALF)


def resnet_without_head():
    model = resnet()
    model.reset_classifier(0)
    return model


def test_as_many_classes_without_names_are_taken_in_order_and_said():
    model = resnet()
    model.labels = None
    teacher = Teacher(model, CLASSES, HALF)
    assert teacher.notes == [
        "the teacher does not name its classes: they are taken to be cat, dog, [bird], in this order."
    ]
    assert teacher.order is None


# ---------------------------------------------------------------- answers on disk


def test_answers_are_those_of_the_pictures_as_they_are(tmp_path):
    """Through the teacher's own preprocess, from the pictures themselves, whatever size the student has."""
    model = resnet(image_size=(20, 48))
    model.preprocess = Preprocess((20, 48), **IMAGENET)
    teacher, data, counted = Teacher(model, CLASSES, HALF), data_of(), []
    answers = keep_answers(tmp_path / "kept", teacher, data, "toy", batch_size=4, progress=counted.append)
    assert counted == [4, 4, 3]
    with torch.no_grad():
        expected = model(seen(model.preprocess, data.images))
    torch.testing.assert_close(answers.take(torch.arange(11)), expected, atol=0, rtol=1e-3)  # float16
    asked = torch.tensor([7, 0, 7])
    torch.testing.assert_close(answers.take(asked), expected[asked], atol=0, rtol=1e-3)
    kept = np.load(tmp_path / "kept" / "logits.npy")
    assert (kept.shape, kept.dtype) == ((11, 3), np.float16)
    header = json.loads((tmp_path / "kept" / "answers.json").read_text(encoding="utf-8"))
    assert (header["data"], header["pictures"], header["done"], header["classes"]) == ("toy", 11, 11, CLASSES)


def test_they_are_asked_for_once(tmp_path, monkeypatch):
    teacher, data = Teacher(resnet(), CLASSES, HALF), data_of()
    first = keep_answers(tmp_path, teacher, data, "toy").take(torch.arange(11))
    monkeypatch.setattr(Teacher, "answer", lambda *_: pytest.fail("asked again"))
    again = Teacher(resnet(), CLASSES, HALF)
    assert torch.equal(keep_answers(tmp_path, again, data_of(), "toy").take(torch.arange(11)), first)


def test_a_stopped_filling_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAVE_EVERY", 1)
    teacher, data, whole = Teacher(resnet(), CLASSES, HALF), data_of(), tmp_path / "whole"
    expected = keep_answers(whole, teacher, data, "toy", batch_size=3).take(torch.arange(11))
    answer, calls = Teacher.answer, []

    def stop_at_third(self, images):
        calls.append(len(images))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answer(self, images)

    monkeypatch.setattr(Teacher, "answer", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        keep_answers(tmp_path / "kept", teacher, data, "toy", batch_size=3)
    counted = []
    found = keep_answers(tmp_path / "kept", teacher, data, "toy", batch_size=3, progress=counted.append)
    assert counted == [6, 3, 2] and calls == [3, 3, 3, 3, 2]
    assert torch.equal(found.take(torch.arange(11)), expected)


def changed_weights():
    model = resnet()
    with torch.no_grad():
        model.stem.norm.running_var += 0.1  # a statistic alone
    return Teacher(model, CLASSES, HALF, "another")


def other_colours():
    model = resnet()
    model.preprocess = Preprocess((32, 32), **IMAGENET)
    return Teacher(model, CLASSES, HALF, "another")


@pytest.mark.parametrize("make", [changed_weights, other_colours])
def test_answers_of_another_teacher_are_refused(make, tmp_path):
    data = data_of()
    keep_answers(tmp_path, Teacher(resnet(), CLASSES, HALF, "one"), data, "toy")
    with pytest.raises(ValueError, match=r"the answers of another teacher \(one, not another\). Delete it"):
        keep_answers(tmp_path, make(), data, "toy")
    rebuilt = keep_answers(tmp_path, make(), data, "toy", rebuild=True)
    with torch.no_grad():
        expected = make().answer(seen(make().preprocess, data.images))
    torch.testing.assert_close(rebuilt.take(torch.arange(11)), expected, atol=0, rtol=1e-3)


def test_answers_to_other_pictures_are_refused(tmp_path):
    teacher, data = Teacher(resnet(), CLASSES, HALF), data_of()
    keep_answers(tmp_path, teacher, data, "toy")
    assert data.images is not None
    shuffled = ArrayDataset(data.images[::-1].copy(), data.labels, CLASSES, "toy/train")
    with pytest.raises(ValueError, match=r"answers to other images \(toy, 11 images, not toy, 11\)"):
        keep_answers(tmp_path, teacher, shuffled, "toy")
    with pytest.raises(ValueError, match=r"\(toy, 11 images, not toys, 9\)"):
        keep_answers(tmp_path, teacher, data_of(9), "toys")


def test_pictures_in_files_are_told_apart_by_name():
    labels = np.array([0, 1])
    one, same, other = (FileDataset(names, labels, CLASSES) for names in (["a", "bc"], ["a", "bc"], ["ab", "c"]))
    assert data_fingerprint(one) == data_fingerprint(same) != data_fingerprint(other)


def test_damaged_files_are_said(tmp_path):
    teacher, data = Teacher(resnet(), CLASSES, HALF), data_of()
    keep_answers(tmp_path, teacher, data, "toy")
    whole = (tmp_path / "logits.npy").read_bytes()
    (tmp_path / "logits.npy").write_bytes(whole[:-8])
    with pytest.raises(ValueError, match=r"logits.npy: is damaged .* Delete"):
        keep_answers(tmp_path, teacher, data, "toy")
    np.save(tmp_path / "logits.npy", np.zeros((11, 2), np.float16))
    with pytest.raises(ValueError, match=r"holds \(11, 2\) of float16"):
        keep_answers(tmp_path, teacher, data, "toy")
    header = json.loads((tmp_path / "answers.json").read_text(encoding="utf-8"))
    (tmp_path / "answers.json").write_text(json.dumps({**header, "done": 99}), encoding="utf-8")
    with pytest.raises(ValueError, match="done=99"):
        keep_answers(tmp_path, teacher, data, "toy")


def test_a_picture_that_cannot_be_read_has_no_answer(tmp_path):
    from PIL import Image

    for index, picture in enumerate(pictures(3)):
        Image.fromarray(picture).save(tmp_path / f"{index}.png")
    (tmp_path / "1.png").write_bytes(b"no picture")
    data = FileDataset([tmp_path / f"{i}.png" for i in range(3)], np.array([0, 1, 2]), CLASSES)
    answers = keep_answers(tmp_path / "kept", Teacher(resnet(), CLASSES, HALF), data, "toy", batch_size=1)
    assert torch.isfinite(answers.take(torch.tensor([0, 2]))).all()
    with pytest.raises(ValueError, match="could not read image 1"):
        answers.take(torch.tensor([0, 1]))
