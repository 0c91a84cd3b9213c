"""vitlab check finds what was planted in a folder of textured images; its table is applied, its page shows it."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

import vitlab
from vitlab.data_check import new_folder
from vitlab.errors import DataError, UsageError
from vitlab.images.datasets import TargetColumns, open_data

MODEL = "bundled:dino"


def texture(seed: int, size: tuple[int, int] = (150, 110), hue: int = 0) -> Image.Image:
    """Random blobs at several scales, unlike those of any other seed; `hue` tints it."""
    random = np.random.default_rng(seed)
    layers = []
    for cells in (4, 9, 21):
        noise = random.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        layers.append(np.asarray(Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC), dtype=np.float32))
    image = np.mean(layers, axis=0)
    image = 0.5 * image
    image[..., hue] += 120
    return Image.fromarray(image.clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two classes, red and blue, with one of each problem."""
    root = tmp_path_factory.mktemp("data") / "photos"
    for split, first, count in (("train", 0, 26), ("val", 100, 9)):
        for hue, name in ((0, "red"), (2, "blue")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                texture(1000 * hue + first + i, hue=hue).save(root / split / name / f"{i}.png")
    shutil.copy(root / "val/red/3.png", root / "train/red/leak.png")  # the same file in two splits
    near = Image.open(root / "val/blue/4.png")
    near.crop((9, 4, 144, 103)).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(
        root / "train/blue/near.jpg", quality=50
    )
    Image.open(root / "train/red/5.png").save(root / "train/red/5.bmp")  # the same pixels in another file
    shutil.copy(root / "train/red/7.png", root / "train/blue/conflict.png")
    (root / "train/red/8.png").rename(root / "train/blue/wrong.png")
    (root / "train/blue/broken.png").write_bytes(b"not an image")
    texture(555, (400, 60)).save(root / "train/red/long.png")
    texture(777, (20, 15), 2).save(root / "train/blue/tiny.png")
    Image.new("RGB", (150, 110), (190, 20, 20)).save(root / "train/red/blank.png")
    return root


@pytest.fixture(scope="module")
def result(folder, tmp_path_factory):
    return vitlab.check(folder, model=MODEL, out=tmp_path_factory.mktemp("checks") / "photos")


def names(result, copies):
    return {(result.images[c.image].path, result.images[c.of].path, c.kind, c.mirrored) for c in copies}


def test_every_planted_problem_is_found_and_nothing_else(result):
    paths = [info.path for info in result.images]
    assert names(result, result.leaks) == {
        ("val/red/3.png", "train/red/leak.png", "same file", False),
        ("val/blue/4.png", "train/blue/near.jpg", "near", True),
    }
    assert names(result, result.conflicts) == {("train/red/7.png", "train/blue/conflict.png", "same file", False)}
    assert names(result, result.duplicates) == {
        ("train/red/5.png", "train/red/5.bmp", "same pixels", False),
        ("train/red/7.png", "train/blue/conflict.png", "same file", False),
    }
    assert [paths[image] for image in result.unreadable] == ["train/blue/broken.png"]
    assert {paths[i]: size for i, size in result.tiny.items()} == {"train/blue/tiny.png": (15, 20)}
    assert [paths[i] for i in result.extreme] == ["train/red/long.png"]
    assert [paths[i] for i in result.blank] == ["train/red/blank.png"]
    suspects = {paths[s.image]: result.classes[s.suggested] for s in result.suspects}
    assert suspects["train/blue/wrong.png"] == "red" and suspects["train/blue/conflict.png"] == "red"
    assert "train/red/blank.png" in [paths[o.image] for o in result.outliers]
    assert result.counts == {"train": [31, 29], "val": [9, 9]} and result.imbalance == 31 / 29
    assert result.serious == 4


def test_exact_copies_are_those_of_hashlib(result, folder):
    """Of files that are the same to the byte, every one but the first is listed."""
    by_content: dict[str, list[str]] = {}
    for info in result.images:
        digest = hashlib.sha256((folder / info.path).read_bytes()).hexdigest()
        by_content.setdefault(digest, []).append(info.path)
    same = {frozenset(paths) for paths in by_content.values() if len(paths) > 1}
    listed = {
        frozenset((result.images[c.image].path, result.images[c.of].path))
        for c in (*result.leaks, *result.duplicates)
        if c.kind == "same file"
    }
    assert listed == same and len(same) == 2


def test_the_table_drops_what_needs_no_judgement(result):
    rows = list(csv.DictReader(result.table.read_text(encoding="utf-8-sig").splitlines()))
    assert list(rows[0]) == ["path", "split", "label", "problems", "suggested_label", "action"]
    dropped = {row["path"] for row in rows if row["action"] == "drop"}
    assert dropped == {"train/blue/broken.png", "train/red/leak.png", "train/blue/near.jpg", "train/red/5.png"}
    by_path = {row["path"]: row for row in rows}
    assert by_path["train/blue/wrong.png"]["suggested_label"] == "red"
    assert by_path["val/red/3.png"]["problems"].startswith("in train too: train/red/leak.png")


def edited(result, path: Path, actions: dict[str, tuple[str, str]]) -> Path:
    rows = list(csv.DictReader(result.table.read_text(encoding="utf-8-sig").splitlines()))
    for row in rows:
        if row["path"] in actions:
            row["action"], row["suggested_label"] = actions[row["path"]]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=";")  # as some spreadsheets save it
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_corrections_are_applied_to_every_split(result, folder, tmp_path):
    table = edited(result, tmp_path / "mine.csv", {"train/blue/wrong.png": ("relabel", "red")})
    before, data = open_data(str(folder)), open_data(str(folder), apply=str(table))
    left = {data.train.name_of(i): data.classes[data.train.labels[i]] for i in range(len(data.train))}
    full = {before.train.name_of(i): before.classes[before.train.labels[i]] for i in range(len(before.train))}
    gone = {"train/blue/broken.png", "train/red/leak.png", "train/blue/near.jpg", "train/red/5.png"}
    assert full.keys() - left.keys() == {str(folder / path) for path in gone}
    assert {k for k in left if left[k] != full[k]} == {str(folder / "train/blue/wrong.png")}
    assert len(data.val) == len(before.val)
    assert data.notes == [f"{table}: corrections applied: train 4 left out and 1 relabelled."]
    again = vitlab.check(folder, model=MODEL, apply=table)
    assert not again.leaks and not again.unreadable and len(again.duplicates) == 1
    assert all(path.is_file() for path in map(Path, full))  # nothing of the folder was changed


WRONG = {
    "unknown path": ("train/red/none.png,train,red,,,drop", r"line 2: train/red/none.png \(train\)"),
    "unknown split": ("train/red/1.png,dev,red,,,drop", r"line 2: split is 'dev'"),
    "unknown action": ("train/red/1.png,train,red,,,remove", r"line 2: the action is 'remove'; write keep, drop"),
    "no action": ("train/red/1.png,train,red,,,", r"line 2: the action is ''"),
    "unknown label": ("train/red/1.png,train,red,,bleu,relabel", r"line 2: .*'bleu' is no class.*mean 'blue'"),
    "no label": ("train/red/1.png,train,red,,,relabel", r"line 2: relabel, but suggested_label is empty"),
    "label edited": ("train/red/1.png,train,blue,,,keep", r"line 2: says .* the label 'blue', but .* 'red'"),
    "twice": ("train/red/1.png,train,red,,,keep\ntrain/red/1.png,train,red,,,drop", r"line 3: names .* again"),
}


@pytest.mark.parametrize(("lines", "message"), WRONG.values(), ids=WRONG)
def test_a_line_that_does_not_fit_is_named(folder, tmp_path, lines, message):
    table = tmp_path / "c.csv"
    table.write_text(f"path,split,label,problems,suggested_label,action\n{lines}\n", encoding="utf-8")
    with pytest.raises(DataError, match=message):
        open_data(str(folder), apply=str(table))


def test_a_class_is_not_dropped_by_accident(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / "d" / name).mkdir(parents=True)
        for i in range(2):
            texture(i).save(tmp_path / "d" / name / f"{i}.png")
    table = tmp_path / "c.csv"
    lines = "".join(f"c/{i}.png,train,c,,,drop\n" for i in range(2))
    table.write_text(f"path,split,label,suggested_label,action\n{lines}".replace(",,,", ",,"), encoding="utf-8")
    with pytest.raises(DataError, match="leaves no training image of class 'c'"):
        open_data(str(tmp_path / "d"), apply=str(table))
    with pytest.raises(DataError, match="cannot be read"):
        open_data(str(tmp_path / "d"), apply=str(tmp_path / "none.csv"))


def test_a_run_keeps_its_corrections(result, folder, tmp_path, command, monkeypatch):
    """`vitlab train --apply`: noted in the log and the report, and resuming does not see later edits."""
    monkeypatch.chdir(tmp_path)
    table = edited(result, tmp_path / "mine.csv", {"train/blue/wrong.png": ("relabel", "red")})
    settings = ["model.name=vit_digits", "model.image_size=16", "model.patch_size=8", "model.depth=1", "run.epochs=1"]
    settings += ["data.workers=0", "augment.randaugment=0", "run.dir=run", "optim.warmup_epochs=0"]
    done = command("train", folder, *settings, "--apply", table)
    note = "corrections applied: train 4 left out and 1 relabelled"
    assert note in done.stdout
    assert note in Path("run/log.jsonl").read_text(encoding="utf-8") and note in Path("run/report.html").read_text(
        encoding="utf-8"
    )
    assert Path("run/cleaned.csv").read_bytes() == table.read_bytes()
    assert 'apply = "run/cleaned.csv"' in Path("run/recipe.toml").read_text(encoding="utf-8")
    table.unlink()  # the run has its own
    assert "run" in command("train", "--resume", "run").stdout
    assert any(note in text for text in vitlab.evaluate("run/best", folder).notes)
    command("train", folder, "run.dir=other", "--apply", table, code=2)
    assert not Path("other").exists()


def test_the_page_shows_the_images(result):
    text = result.page.read_text(encoding="utf-8")
    page = ET.fromstring(text)  # it is also XML
    space = "{http://www.w3.org/1999/xhtml}"
    titles = {s.find(f"{space}h2/{space}span[@lang='en']").text: s for s in page.iter(f"{space}section")}
    assert list(titles)[:4] == ["What to do", "In two splits", "Copies with different labels", "Unreadable"]
    shown = [img.get("alt") for img in titles["In two splits"].iter(f"{space}img")]
    assert sorted(shown) == ["train/blue/near.jpg", "train/red/leak.png", "val/blue/4.png", "val/red/3.png"]
    images = list(page.iter(f"{space}img"))
    assert all(img.get("src").startswith("data:image/") for img in images)
    assert not list(page.iter(f"{space}link")) and not list(page.iter(f"{space}script"))
    assert "跨划分重复" in text and "vitlab train" in text
    main = page.find(f".//{space}main")
    for element in [e for e in main.iter() if e.get("lang")]:  # of two languages one is shown at a time
        element.text = None
        for child in list(element):
            element.remove(child)
    left = "".join(main.itertext())
    assert not re.search(r"[\u4e00-\u9fff]", left) and "cop" not in left and "label" not in left


def test_command(folder, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["check", folder, "--model", MODEL]
    told = command(*options, "--strict", code=1).stdout
    assert told.index("IN TWO SPLITS: 2") < told.index("likely wrong labels")
    assert "checks/photos/cleaned.csv" in told and Path("checks/photos/check.html").is_file()
    assert new_folder("photos") == Path("checks/photos-2")
    refused = command(*options, "-o", "checks/photos", code=2).stderr
    assert "may hold what you wrote into it" in refused and "--overwrite" in refused
    again = [*options, "-o", "checks/photos", "--overwrite", "--apply", "checks/photos/cleaned.csv", "--json"]
    found = json.loads(command(*again).stdout)
    assert found["leaks"] == [] and found["conflicts"][0]["of"]["image"] == "train/blue/conflict.png"
    assert found["table"] == "checks/photos/cleaned.csv" and found["serious"] == 1
    left = csv.DictReader(Path("checks/photos/cleaned.csv").read_text(encoding="utf-8-sig").splitlines())
    actions = {row["path"]: row["action"] for row in left}
    assert actions["train/red/leak.png"] == "drop"  # the new table is complete without the one before


def test_a_second_table_has_the_corrections_of_the_first(result, folder, tmp_path):
    changes = {"train/blue/wrong.png": ("relabel", "red"), "train/blue/conflict.png": ("drop", "")}
    first = edited(result, tmp_path / "first.csv", changes)
    again = vitlab.check(folder, model=MODEL, out=tmp_path / "again", apply=first)
    once, twice = (open_data(str(folder), apply=str(table)) for table in (first, again.table))
    for split in ("train", "val"):
        a, b = getattr(once, split), getattr(twice, split)
        kept = {b.name_of(i): int(b.labels[i]) for i in range(len(b))}
        assert kept.items() <= {a.name_of(i): int(a.labels[i]) for i in range(len(a))}.items()
    row = next(row for row in again.corrections() if row.path == "train/blue/wrong.png")
    assert (row.label, row.suggested_label, row.action) == ("blue", "red", "relabel")


def test_without_labels_the_rest_is_checked(tmp_path):
    for i in range(12):
        texture(i).save(tmp_path / f"{i}.png")
    texture(3).filter(ImageFilter.GaussianBlur(2)).save(tmp_path / "3 blurred.png")
    (tmp_path / "x.jpg").write_bytes(b"")
    result = vitlab.check(tmp_path, model=MODEL)
    assert result.classes == [] and not result.suspects and not result.conflicts and result.wrong_labels is None
    assert names(result, result.duplicates) == {("3.png", "3 blurred.png", "near", False)}
    assert len(result.unreadable) == 1 and any("no labels" in note for note in result.notes)
    actions = {row.path: row.action for row in result.corrections()}
    assert actions == {"x.jpg": "drop", "3.png": "drop", "3 blurred.png": "keep"}  # train splits val off itself
    one = tmp_path / "one"
    shutil.copytree(tmp_path, one / "cats", ignore=shutil.ignore_patterns("one"))
    alone = vitlab.check(one, model=MODEL)
    assert alone.classes == ["cats"] and not alone.suspects and len(alone.duplicates) == 1


def test_features_that_cannot_tell_the_classes_are_named(tmp_path):
    """Labels by chance: that half of them look wrong says nothing of the labels."""
    for i, label in enumerate(np.random.default_rng(0).permutation(40) % 2):
        (tmp_path / "ab"[label]).mkdir(exist_ok=True)
        texture(i).save(tmp_path / "ab"[label] / f"{i}.png")
    result = vitlab.check(tmp_path, model=MODEL)
    assert result.wrong_labels is None and any("apart poorly" in note for note in result.notes)


def test_copies_of_one_image_alone(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "d" / name).mkdir(parents=True)
        for i in range(6):
            texture(1).save(tmp_path / "d" / name / f"{i}.png")
    result = vitlab.check(tmp_path / "d", model=MODEL)
    assert "all images are copies of one, so labels are not checked." in result.notes and not result.suspects
    assert len(result.conflicts) == 6


def test_wrong_input(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        vitlab.check(tmp_path / "none")
    with pytest.raises(DataError, match="empty"):
        vitlab.check(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"no")
    with pytest.raises(DataError, match="none of the 1 images can be read"):
        vitlab.check(tmp_path)
    texture(0).save(tmp_path / "a" / "1.png")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        vitlab.check(tmp_path, out=tmp_path / "file")
    (tmp_path / "m.onnx").touch()
    with pytest.raises(UsageError, match="gives no features"):
        vitlab.check(tmp_path, model=str(tmp_path / "m.onnx"))


def test_images_that_are_all_alike_have_no_near_copies():
    """Of 8 x 8 digits many pairs look like copies; they are not."""
    result = vitlab.check("digits", model="bundled:digits")
    assert result.method.copy_threshold > 1 and not result.leaks
    assert any("too alike" in note for note in result.notes)


@pytest.fixture(scope="module")
def tagged(tmp_path_factory) -> Path:
    """Textures with discs and boxes on them, in a table of tags and sizes; four images lack or have a disc wrongly."""
    folder, random = tmp_path_factory.mktemp("tagged"), np.random.default_rng(0)
    tags, sizes = ["image,labels"], ["image,size"]
    for i in range(80):
        image, has = texture(i, (48, 48), hue=1), random.random(2) < 0.5
        draw = ImageDraw.Draw(image)
        if has[0]:
            draw.ellipse((2, 2, 24, 24), fill=(255, 0, 0))
        if has[1]:
            draw.rectangle((26, 24, 46, 44), fill=(0, 0, 255))
        image.save(folder / f"{i}.png")
        given = (has[0] != (i in (3, 17, 40, 61)), has[1])
        tags.append(f"{i}.png,{';'.join(name for name, there in zip(('disc', 'box'), given, strict=True) if there)}")
        sizes.append(f"{i}.png,{random.uniform():.3f}")
    shutil.copy(folder / "5.png", folder / "copy.png")
    (folder / "broken.png").write_bytes(b"no image")
    tags += [tags[6].replace("5.png", "copy.png"), "broken.png,box"]
    sizes += ["copy.png,7", "broken.png,1"]
    (folder / "tags.csv").write_text("\n".join(tags), encoding="utf-8")
    (folder / "sizes.csv").write_text("\n".join(sizes), encoding="utf-8")
    return folder


def test_each_label_of_several_is_examined_by_itself(tagged, tmp_path):
    result = vitlab.check(tagged / "tags.csv", model=MODEL, out=tmp_path / "out")
    wrong = {result.images[d.image].path for d in result.doubtful if result.classes[d.label] == "disc"}
    assert wrong == {"3.png", "17.png", "40.png", "61.png"}
    assert not result.suspects and result.kind == "labels" and len(result.unreadable) == 1
    listed = [
        line.partition(",")[2].split(";") for line in (tagged / "tags.csv").read_text(encoding="utf-8").splitlines()[1:]
    ]
    assert result.counts["train"] == [sum(name in row for row in listed) for name in result.classes]
    (copy,) = (copy for copy in result.duplicates if copy.kind == "same file")
    assert {result.images[copy.image].path, result.images[copy.of].path} == {"5.png", "copy.png"}
    for d in result.doubtful:
        assert d.given == (result.classes[d.label] in (result.images[d.image].label or ""))
    page = (tmp_path / "out" / "check.html").read_text(encoding="utf-8")
    assert "likely lacks" in page and "可能漏标" in page
    applied = open_data(str(tagged / "tags.csv"), val_fraction=0.2, apply=str(result.table))
    dropped = sum(row.action == "drop" for row in result.corrections())
    assert dropped >= 2 and len(applied.train) + len(applied.val) == 82 - dropped


def test_numbers_are_not_examined_and_the_images_are(tagged, tmp_path):
    with pytest.raises(DataError):  # which column?
        vitlab.check(tagged / "sizes.csv", model=MODEL)
    result = vitlab.check(tagged / "sizes.csv", model=MODEL, out=tmp_path / "out", columns=TargetColumns(target="size"))
    assert result.kind == "number" and not result.doubtful and not result.counts
    assert any("numbers are not examined" in note for note in result.notes)
    (conflict,) = (copy for copy in result.conflicts if copy.kind == "same file")
    assert result.images[conflict.image].label == "7"
    table = tmp_path / "out" / "cleaned.csv"
    table.write_text(table.read_text(encoding="utf-8-sig").replace("drop", "relabel", 1), encoding="utf-8")
    with pytest.raises(DataError, match=r"relabel is for images of one class each.*keep or drop"):
        open_data(str(tagged / "sizes.csv"), columns=TargetColumns(target="size"), apply=str(table))
