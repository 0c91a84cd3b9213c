"""Each thing that can be wrong with data, a checkpoint or a run folder has its own message with a remedy, the same for
train, eval and Python: exit code 2, no traceback, and nothing is left behind or lost.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.errors import DataError
from vitlab.images.datasets import open_data
from vitlab.images.sources import cifar, download, idx
from vitlab.images.sources.download import Remote

VITLAB = Path(sys.executable).parent / "vitlab"
TINY = ["model.name=vit_digits", "model.image_size=16", "model.patch_size=8", "model.depth=1", "data.workers=0"]
TINY += ["data.batch_size=8", "run.epochs=1", "augment.crop=none", "augment.randaugment=0"]


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    """Nothing outside the test's folder is looked at, and nothing is downloaded."""
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VITLAB_DATA", raising=False)
    monkeypatch.setattr(idx, "DEBIAN", {})
    for name, remote in download.REMOTES.items():
        monkeypatch.setitem(download.REMOTES, name, Remote(("https://x.org/",), remote.files))


def class_folders(root: Path, counts: dict[str, int], mode: str = "RGB") -> Path:
    rng = np.random.default_rng(len(counts))
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            pixels = rng.integers(0, 256, (16, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).convert(mode).save(root / name / f"{i}.png")
    return root


def model_of(labels: list[str] | None, classes: int = 2, channels: int = 3, seed: int = 0):
    torch.manual_seed(seed)
    options = dict(image_size=16, patch_size=8, depth=1, channels=channels)
    model = vitlab.create("vit_digits", classes=classes, **options)
    torch.nn.init.normal_(model.head.weight)
    model.labels = labels
    return model.eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return vitlab.save(model_of(["cat", "dog"]), tmp_path_factory.mktemp("model") / "cats")


# Data


class Case(NamedTuple):
    source: str
    path: Path | None = None


def no_pictures(root: Path, monkeypatch) -> Case:
    (root / "data").mkdir()
    return Case(str(root / "data"))


def one_class(root: Path, monkeypatch) -> Case:
    return Case(str(class_folders(root / "data", {"cat": 4})))


def val_lacks_dog(root: Path, monkeypatch) -> Case:
    class_folders(root / "data/train", {"cat": 4, "dog": 4})
    class_folders(root / "data/val", {"cat": 2})
    return Case(str(root / "data"))


def zebra_in_test(root: Path, monkeypatch) -> Case:
    class_folders(root / "data/train", {"cat": 4, "dog": 4})
    class_folders(root / "data/test", {"cat": 2, "zebra": 1})
    return Case(str(root / "data"))


def csv_label_beyond(root: Path, monkeypatch) -> Case:
    class_folders(root / "data", {"x": 3})
    (root / "data/classes.txt").write_text("cat\ndog\n", encoding="utf-8")
    (root / "data/list.csv").write_text("path,label\nx/0.png,0\nx/1.png,1\nx/2.png,2\n", encoding="utf-8")
    return Case(str(root / "data/list.csv"))


def shard_label_beyond(root: Path, monkeypatch) -> Case:
    class_folders(root / "data", {"x": 3})
    with tarfile.open(root / "data/train-0.tar", "w") as tar:
        for i, label in enumerate((0, 1, 77)):
            tar.add(root / f"data/x/{i}.png", f"{i}.png")
            info = tarfile.TarInfo(f"{i}.cls")
            info.size = len(str(label))
            tar.addfile(info, io.BytesIO(str(label).encode()))
    (root / "data/classes.txt").write_text("cat\ndog\n", encoding="utf-8")
    return Case(str(root / "data/train-0.tar"))


def idx_label_77(root: Path, monkeypatch) -> Case:
    (root / "data").mkdir()
    for stem, count in (("train", 30), ("t10k", 20)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        labels[7] = 77 if stem == "t10k" else labels[7]
        images = np.zeros((count, 8, 8), dtype=np.uint8)
        for name, array in ((f"{stem}-images-idx3-ubyte", images), (f"{stem}-labels-idx1-ubyte", labels)):
            head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (root / "data" / f"{name}.gz").write_bytes(gzip.compress(head + array.tobytes()))
    return Case("mnist", root / "data")


def cifar_tar(root: Path, monkeypatch, source: str, change: Callable[[dict[str, bytearray]], None]) -> Path:
    """The official files with few records, their checksums taken before the change."""
    kind, records = cifar.KINDS[source], 200
    files, members = {}, {}
    for name, member in kind.members.items():
        labels = np.arange(records)[:, None] % len(kind.classes)
        rows = np.concatenate([labels.repeat(kind.label_bytes, 1), np.zeros((records, 3072))], axis=1)
        files[name] = bytearray(rows.astype(np.uint8).tobytes())
        sha1 = hashlib.sha1(files[name]).hexdigest() if member.sha1 else None
        members[name] = dataclasses.replace(member, records=records, sha1=sha1)
    monkeypatch.setitem(cifar.KINDS, source, dataclasses.replace(kind, members=members))
    change(files)
    with tarfile.open(root / "c.tar.gz", "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{kind.folder}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return root / "c.tar.gz"


def cifar_label_200(root: Path, monkeypatch) -> Case:
    def change(files: dict[str, bytearray]) -> None:
        files["train.bin"][3 * 3074 + 1] = 200

    return Case("cifar100", cifar_tar(root, monkeypatch, "cifar100", change))


def cifar_checksum(root: Path, monkeypatch) -> Case:
    def change(files: dict[str, bytearray]) -> None:
        files["data_batch_4.bin"][1000] ^= 1

    return Case("cifar10", cifar_tar(root, monkeypatch, "cifar10", change))


def a_text_file(root: Path, monkeypatch) -> Case:
    (root / "notes.txt").write_text("hello", encoding="utf-8")
    return Case(str(root / "notes.txt"))


def single_pictures(root: Path, monkeypatch) -> Case:
    return Case(str(class_folders(root / "data", {"cat": 1, "dog": 1})))


BAD: dict[str, tuple[Callable[..., Case], list[str]]] = {  # what is wrong -> found, expected, what to do
    "empty folder": (no_pictures, ["data: the folder is empty", "Put the images of each class into a folder"]),
    "one class": (one_class, ["only one class, 'cat'", "needs two or more", "data/dog/2.jpg"]),
    "class missing in val": (val_lacks_dog, ["val has no images of dog", "val/dog", "remove val"]),
    "class missing in train": (zebra_in_test, ["class 'zebra' is not in", "Add images of it to train, or take"]),
    "CSV label": (csv_label_beyond, ["list.csv, line 4: label 2 is outside the 2 classes", "(0..1). Correct one"]),
    "shard label": (shard_label_beyond, ["train-0.tar, 2.png: label 77 is outside", "classes.txt (0..1). Correct"]),
    "IDX label": (idx_label_77, ["labels-idx1-ubyte.gz: label 7 is 77, outside 0..9", "Fetch https://x.org/t10k"]),
    "CIFAR label": (
        cifar_label_200,
        ["record 3 of train has label 200, outside 0..99", "Fetch https://x.org/cifar-100"],
    ),
    "CIFAR checksum": (cifar_checksum, ["wrong checksum of data_batch_4.bin: SHA-1 is", "expected", "Fetch https://x"]),
    "no data": (a_text_file, ["notes.txt: no kind of data known", "a folder of class folders"]),
    "nothing for val": (single_pictures, ["each class has a single image", "Add images, or a val split"]),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_data(what, tmp_path, monkeypatch, command, checkpoint):
    build, words = BAD[what]
    source, path = build(tmp_path, monkeypatch)
    with pytest.raises(DataError) as error:
        open_data(source, path=None if path is None else str(path))
    settings = [f"data.path={path}"] if path else []
    trained = command("train", source, *TINY, *settings, f"run.dir={tmp_path / 'run'}", code=2)
    judged = command("eval", checkpoint, source, *(["--path", path] if path else []), code=2)
    for text in (str(error.value), trained.stderr, judged.stderr):
        for word in words:
            assert word in text
        assert "Traceback" not in text
    assert trained.stderr == judged.stderr == f"vitlab: error: {error.value}\n"
    assert trained.stdout == judged.stdout == "" and not (tmp_path / "run").exists()


def test_checksums_found_and_expected_are_those_of_the_member(tmp_path, monkeypatch):
    """Against hashlib on what the tar holds."""
    _, path = cifar_checksum(tmp_path, monkeypatch)
    with pytest.raises(DataError) as error:
        open_data("cifar10", path=str(path))
    with tarfile.open(path) as tar:
        held = tar.extractfile("cifar-10-batches-bin/data_batch_4.bin").read()  # type: ignore[union-attr]
    mended = bytearray(held)
    mended[1000] ^= 1
    assert f"SHA-1 is {hashlib.sha1(held).hexdigest()}" in str(error.value)
    assert f"expected {hashlib.sha1(mended).hexdigest()}" in str(error.value)


def test_a_folder_that_is_not_there(command, tmp_path, checkpoint):
    source = tmp_path / "nowhere"
    said = command("train", source, code=2).stderr
    assert f"{source}: no such file or folder (from " in said and "Did you mean" not in said
    assert "no recipe, data source or folder" in command("train", "nowhere", code=2).stderr
    found = command("eval", checkpoint, source, code=2).stderr
    assert f"{source}: no such file or folder" in found and "A source is one of digits" in found
    found = command("train", "digits", f"data.source={source}", f"run.dir={tmp_path / 'run'}", code=2).stderr
    assert f"{source}: no such file or folder" in found and not (tmp_path / "run").exists()
    assert "no such shard" in command("train", f"{tmp_path}/train-{{0..3}}.tar", code=2).stderr


def test_the_installed_command_says_it_in_one_line(tmp_path, command, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    installed = subprocess.run(
        [VITLAB, "train", "empty"], capture_output=True, text=True, timeout=100, encoding="utf-8"
    )
    assert installed.returncode == 2
    for done in (installed, command("eval", "nothing", "empty", code=2)):
        assert done.stdout == ""
        assert done.stderr.startswith("vitlab: error: ") and done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_few_labels_keep_their_classes(tmp_path, command):
    """A val that is whole is no hindrance to a train of one picture a class."""
    class_folders(tmp_path / "data/train", {"cat": 5, "dog": 5})
    class_folders(tmp_path / "data/val", {"cat": 1, "dog": 1})
    command("train", tmp_path / "data", *TINY, "data.per_class=1", f"run.dir={tmp_path / 'run'}")
    assert json.loads((tmp_path / "run/result.json").read_text(encoding="utf-8"))["unreadable"] == 0


# Settings and run folders


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.val_fraction=1", "val_fraction=1.0 must be above 0 and below 1"),
        ("data.val_fraction=0", "val_fraction=0.0 must be above 0 and below 1"),
        ("data.per_class=99", "per_class=99, but train holds only"),
        ("model.channels=2", "use model.channels=1 or 3"),
        ("model.classes=7", "7 classes but the data have 2"),
        ("run.device=tpu", "use auto, cpu, cuda"),
        ("data.batch_sise=4", "Did you mean data.batch_size=4"),
    ],
)
def test_settings_that_do_not_fit(setting, words, tmp_path, command):
    source = class_folders(tmp_path / "data", {"cat": 3, "dog": 3})
    text = command("train", source, *TINY, setting, f"run.dir={tmp_path / 'run'}", code=2).stderr
    assert words in text and text.startswith("vitlab: error: ") and not (tmp_path / "run").exists()


def test_an_image_size_that_patches_do_not_fill(tmp_path, command):
    source = class_folders(tmp_path / "data", {"cat": 3, "dog": 3})
    text = command("train", source, *TINY, "model.image_size=20", f"run.dir={tmp_path / 'run'}", code=2).stderr
    assert "20 is not a multiple of 8: use 24 (or 16)" in text


def test_run_folders_that_cannot_be_written(tmp_path, command, monkeypatch):
    source = class_folders(tmp_path / "data", {"cat": 3, "dog": 3})
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        text = command("train", source, *TINY, f"run.dir={place}", code=2).stderr
        assert f"run.dir={place}: {tmp_path / 'file'} is a file" in text and "run.dir=..." in text
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
    monkeypatch.setattr("os.access", lambda *_: False)  # tests may run as root, whom nothing refuses
    text = command("train", source, *TINY, f"run.dir={tmp_path / 'a' / 'b'}", code=2).stderr
    assert f"{tmp_path} cannot be written" in text and not (tmp_path / "a").exists()


def test_a_run_folder_that_holds_a_run_is_left_alone(tmp_path, command):
    source = class_folders(tmp_path / "data", {"cat": 3, "dog": 3})
    command("train", source, *TINY, f"run.dir={tmp_path / 'run'}")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    text = command("train", source, *TINY, f"run.dir={tmp_path / 'run'}", code=2).stderr
    assert "holds a run already" in text and "--resume" in text
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


# Checkpoints and their classes


def by_prediction(model, folder: Path) -> float:
    """Top-1 by vitlab.predict, which goes by names and knows nothing of class numbers."""
    files = sorted(folder.glob("*/*.png"))
    found = vitlab.predict(model, files, top=1)
    return float(np.mean([p.label == file.parent.name for p, file in zip(found, files, strict=True)]))


def test_the_same_classes_in_another_order_are_matched_by_name(tmp_path, command):
    source = class_folders(tmp_path / "data/train", {"ant": 5, "bee": 6, "cow": 7}).parent
    class_folders(source / "val", {"ant": 5, "bee": 6, "cow": 7})
    model = model_of(["bee", "cow", "ant"], classes=3)  # the data's order is ant, bee, cow
    vitlab.save(model, tmp_path / "model")
    found = json.loads(command("eval", tmp_path / "model", source, "--json").stdout)
    assert found["top1"] == pytest.approx(by_prediction(model, source / "val"))
    assert found["classes"] == ["ant", "bee", "cow"]
    rows = np.array(found["confusion"])
    assert rows.sum(axis=1).tolist() == [5, 6, 7] and rows.trace() / 18 == pytest.approx(found["top1"])
    model.labels = ["ant", "bee", "cow"]  # another model: the same outputs under other names
    vitlab.save(model, tmp_path / "other")
    other = json.loads(command("eval", tmp_path / "other", source, "--json").stdout)
    assert other["top1"] == pytest.approx(by_prediction(model, source / "val"))
    np.testing.assert_array_equal(np.array(other["confusion"])[:, [2, 0, 1]], rows)


def test_other_classes_are_an_error_that_lists_them(tmp_path, command, checkpoint):
    source = class_folders(tmp_path / "data", {"cat": 6, "emu": 6, "yak": 6})
    text = command("eval", checkpoint, source, code=2).stderr
    assert "only the checkpoint has dog; only the data has emu, yak" in text
    assert f"vitlab train {source} model.init_from={checkpoint}" in text and "--knn" in text
    found = command("eval", checkpoint, source, "--knn", "--json")
    assert "Only its features are evaluated" in found.stderr
    assert 0 <= json.loads(found.stdout)["knn"] <= 1 and "top1" not in found.stdout
    kept = [s for s in TINY if not s.startswith("model.")]
    trained = command("train", source, *kept, f"model.init_from={checkpoint}", f"run.dir={tmp_path / 'tuned'}")
    assert "with a new head for 3 classes" in trained.stdout
    assert vitlab.load(tmp_path / "tuned/best").labels == ["cat", "emu", "yak"]


def test_a_checkpoint_without_names(tmp_path, command):
    source = class_folders(tmp_path / "data", {"cat": 8, "dog": 8})
    vitlab.save(model_of(None), tmp_path / "two")
    done = command("eval", tmp_path / "two", source, "--json")
    assert "does not name its classes: they are taken to be cat, dog, in this order" in done.stderr
    assert json.loads(done.stdout)["images"] == 2
    vitlab.save(model_of(None, classes=5), tmp_path / "five")
    text = command("eval", tmp_path / "five", source, code=2).stderr
    assert "has 5 classes, which it does not name" in text and "data has 2" in text and "model.init_from" in text


def test_a_run_is_not_resumed_on_other_classes(tmp_path, command):
    source = class_folders(tmp_path / "data", {"cat": 4, "dog": 4})
    settings = [*TINY, "run.epochs=2", f"run.dir={tmp_path / 'run'}"]
    command("train", source, *settings)
    (tmp_path / "run/result.json").unlink()  # so that the end has to be done again
    before = (tmp_path / "run/last/weights.safetensors").read_bytes()
    (source / "dog").rename(source / "wolf")
    text = command("train", "--resume", tmp_path / "run", code=2).stderr
    assert "only the run has dog; only the data has wolf" in text and "model.init_from=" in text
    assert (tmp_path / "run/last/weights.safetensors").read_bytes() == before
    (source / "wolf").rename(source / "dog")
    command("train", "--resume", tmp_path / "run")


def test_splits_that_are_not_there(tmp_path, command, checkpoint):
    source = class_folders(tmp_path / "data", {"cat": 8, "dog": 8})
    assert "use --split train or val" in command("eval", checkpoint, source, "--split", "test", code=2).stderr
    assert "use --split train or val" in command("eval", checkpoint, source, "--split", "best", code=2).stderr
    assert "learn from train" in command("eval", checkpoint, source, "--split", "train", "--knn", code=2).stderr


def test_val_is_split_off_as_it_was_in_the_run(tmp_path, command):
    """A run's own model is not judged on pictures that it was trained on."""
    source = class_folders(tmp_path / "data", {"cat": 12, "dog": 12})
    command("train", source, *TINY, "run.seed=5", "data.val_fraction=0.25", f"run.dir={tmp_path / 'run'}")
    result = json.loads((tmp_path / "run/result.json").read_text(encoding="utf-8"))
    found = json.loads(command("eval", tmp_path / "run/best", source, "--json").stdout)
    assert found["split"] == "val" and found["images"] == 6
    assert found["loss"] == pytest.approx(result["loss"], rel=1e-5)


# Channels


@pytest.mark.parametrize(("mode", "channels"), [("L", 3), ("RGB", 1)])
def test_grey_and_colour_pictures_are_converted(mode, channels, tmp_path, command):
    source = class_folders(tmp_path / "data/train", {"cat": 8, "dog": 9}, mode).parent
    class_folders(source / "val", {"cat": 8, "dog": 9}, mode)
    model = model_of(["cat", "dog"], channels=channels)
    vitlab.save(model, tmp_path / "model")
    found = json.loads(command("eval", tmp_path / "model", source, "--json").stdout)
    assert found["top1"] == pytest.approx(by_prediction(model, source / "val"))
    command("train", source, *TINY, f"model.channels={channels}", f"run.dir={tmp_path / 'run'}")
    assert vitlab.load(tmp_path / "run/best").config.channels == channels


def test_grey_digits_through_a_colour_checkpoint(tmp_path, command):
    model = model_of([str(i) for i in range(10)], classes=10)
    vitlab.save(model, tmp_path / "model")
    found = json.loads(command("eval", tmp_path / "model", "digits", "--split", "val", "--json").stdout)
    val = open_data("digits").val
    answers = vitlab.predict(model, [val.read(i)[..., 0] for i in range(len(val))], top=1)
    right = [p.label == val.classes[label] for p, label in zip(answers, val.labels, strict=True)]
    assert found["top1"] == pytest.approx(np.mean(right))


WHOLE = {
    "resnet_cifar10 data.source=digits": "a resnet needs all patches",
    "digits model.positions=relative": "the whole grid",
    "mae_digits": "objective.name=mae decides itself",
}


@pytest.mark.parametrize(("what", "why"), WHOLE.items())
def test_patches_cannot_be_dropped_from_every_network(what, why, tmp_path, command):
    asked = [*what.split(), "augment.drop_patches=0.5", f"run.dir={tmp_path / 'run'}"]
    said = " ".join(command("train", *asked, code=2).stderr.split())
    assert why in said and "augment.drop_patches=0.5" in said and not (tmp_path / "run").exists()
