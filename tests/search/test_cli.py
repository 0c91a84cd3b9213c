"""vitlab index and vitlab search as people type them, against the model called by hand; one process and two."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
import vitlab.cli.main
from vitlab.images.samples import open_sample
from vitlab.search.database import ImageDatabase
from vitlab.text.tokenizer import Tokenizer


@torch.no_grad()
def by_hand(look, preprocess, folder: Path) -> dict[str, torch.Tensor]:
    """Every picture by itself: its vector, of length 1."""
    found = {}
    for path in sorted(folder.rglob("*.png")):
        vector = look(preprocess(path)[None])[0]
        found[str(path)] = vector / vector.norm()
    return found


def ranked(known: dict[str, torch.Tensor], query: torch.Tensor, top: int) -> list[tuple[str, float]]:
    scores = {path: float(vector @ query) for path, vector in known.items()}
    return sorted(scores.items(), key=lambda item: -item[1])[:top]


def assert_same(found: list[dict], expected: list[tuple[str, float]]) -> None:
    assert [hit["image"] for hit in found] == [path for path, _ in expected]
    assert [hit["score"] for hit in found] == pytest.approx([score for _, score in expected], abs=1e-5)


def pooled(model):
    model.eval()
    return lambda x: model.forward_head(model.forward_features(x), pre_logits=True)


def test_pictures_like_a_picture(command, checkpoint, photos, tmp_path, monkeypatch):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    found = json.loads(command("index", photos, "-o", tmp_path / "ix", "--model", checkpoint, "--json").stdout)
    assert (found["new"], found["embedded"], found["pictures"], found["unreadable"]) == (23, 23, 23, {})
    assert found["model"] == str(checkpoint)
    again = json.loads(command("index", photos, "-o", tmp_path / "other", "--model", checkpoint, "--json").stdout)
    assert (again["new"], again["embedded"]) == (23, 0)  # their features are known by their contents
    asked = photos / "a" / "03.png"
    found = json.loads(command("search", tmp_path / "ix", "--image", asked, "--top", 7, "--json").stdout)
    model = vitlab.load(checkpoint)
    known = by_hand(pooled(model), model.preprocess, photos)
    assert_same(found["hits"], ranked(known, known[str(asked)], 7))
    assert found["hits"][0]["image"] == str(asked) and found["query"] == {"image": str(asked)}
    assert (found["pictures"], found["folder"], found["model"]) == (23, str(photos), str(checkpoint))
    text = command("search", tmp_path / "ix", "--image", asked, "--top", 2).stdout
    assert text.splitlines()[0] == f" 1.000  {asked}" and len(text.splitlines()) == 2


@pytest.mark.parametrize("name", ["mae_digits", "dino_digits"])
def test_the_encoder_of_a_model_that_learned_without_labels(name, command, photos, tmp_path):
    vitlab.save(vitlab.create(name), tmp_path / "model")
    command("index", photos, "-o", tmp_path / "ix", "--model", tmp_path / "model")
    asked = photos / "a" / "03.png"
    found = json.loads(command("search", tmp_path / "ix", "--image", asked, "--json").stdout)
    model = vitlab.load(tmp_path / "model")
    known = by_hand(pooled(model.encoder), model.preprocess, photos)
    assert_same(found["hits"], ranked(known, known[str(asked)], 10))


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["a dog on a beach", "two cats", "一只狗在海边"], vocab=530, context=16)
    model = vitlab.create("clip_digits", embed_dim=24, **tokenizer.options)  # not the tower's width, as in real ones
    model.tokenizer = tokenizer
    return vitlab.save(model, tmp_path_factory.mktemp("model") / "clip")


@torch.no_grad()
def test_pictures_by_words(clip, command, photos, tmp_path):
    command("index", photos, "-o", tmp_path / "ix", "--model", clip)
    model = vitlab.load(clip)
    known = by_hand(lambda x: model.encode_image(x, normalise=False), model.preprocess, photos)
    for words in ("a dog on a beach", "一只狗", "a very long sentence " * 9):
        found = json.loads(command("search", tmp_path / "ix", words, "--top", 5, "--json").stdout)
        query = model.encode_text(model.tokenizer(words))[0]
        assert_same(found["hits"], ranked(known, query, 5))
        assert found["query"] == {"text": words}
    asked = photos / "a" / "03.png"
    found = json.loads(command("search", tmp_path / "ix", "--image", asked, "--json").stdout)
    assert_same(found["hits"], ranked(known, known[str(asked)], 10))


def test_words_to_a_model_that_knows_none(command, checkpoint, photos, tmp_path):
    command("index", photos, "-o", tmp_path / "ix", "--model", checkpoint)
    said = command("search", tmp_path / "ix", "a dog", code=2).stderr
    assert f"made with {checkpoint}, a model that reads no text" in said and "--image x.jpg" in said
    with pytest.raises(ValueError, match=r"\(vit\) reads no text"):
        vitlab.embed_text(vitlab.load(checkpoint), "a dog")


def test_a_clip_without_its_tokenizer(clip, command, photos, tmp_path):
    shutil.copytree(clip, tmp_path / "clip")
    command("index", photos, "-o", tmp_path / "ix", "--model", tmp_path / "clip")
    (tmp_path / "clip" / "tokenizer.json").unlink()
    card = tmp_path / "clip" / "model.json"
    card.write_text(
        json.dumps({**json.loads(card.read_text(encoding="utf-8")), "digests": None, "seal": None}), encoding="utf-8"
    )
    said = command("search", tmp_path / "ix", "a dog", code=2).stderr
    assert "came without its tokenizer" in said and "vitlab convert CHECKPOINT FOLDER --tokenizer FILE" in said


def test_another_model_and_one_that_was_moved(command, checkpoint, photos, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    command("index", photos, "-o", tmp_path / "ix", "--model", tmp_path / "model")
    asked = photos / "a" / "03.png"
    for verb in (["search", tmp_path / "ix", "--image", asked], ["index", photos, "-o", tmp_path / "ix"]):
        said = command(*verb, "--model", "bundled:digits", code=2).stderr
        assert f"made with {tmp_path / 'model'}, which is another model than bundled:digits" in said
        assert f"vitlab index {photos} -o OTHER --model bundled:digits" in said
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    said = command("search", tmp_path / "ix", "--image", asked, code=2).stderr
    assert f"{tmp_path / 'model'}: no such file or folder" in said and "--model CHECKPOINT" in said
    command("search", tmp_path / "ix", "--image", asked, "--model", tmp_path / "elsewhere")
    retrained = vitlab.load(checkpoint)
    retrained.blocks[0].mlp.fc1.weight.data[0, 0] += 1e-3
    vitlab.save(retrained, tmp_path / "model")
    assert "as it was then" in command("search", tmp_path / "ix", "--image", asked, code=2).stderr


def test_again_without_naming_the_model(command, checkpoint, photos, tmp_path, draw):
    assert "Add --model CHECKPOINT" in command("index", photos, "-o", tmp_path / "ix", code=2).stderr
    command("index", photos, "-o", tmp_path / "ix", "--model", checkpoint)
    draw(photos / "new.png", 100)
    (photos / "a" / "00.png").unlink()
    (photos / "[bad].png").write_bytes(b"nothing")
    done = command("index", photos, "-o", tmp_path / "ix")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][-5:] == ["23", "images", "can", "be", "found"]
    assert lines[1:] == [["new", "2"], ["removed", "1"], ["unchanged", "22"], ["unreadable", "1"]]
    assert done.stderr.startswith("vitlab: [bad].png: not an image that can be read.")
    found = json.loads(command("index", photos, "-o", tmp_path / "ix", "--json").stdout)
    assert list(found["unreadable"]) == ["[bad].png"] and found["embedded"] == 0


def test_a_removed_graph_is_rebuilt_by_index_which_says_so(command, checkpoint, photos, tmp_path):
    command("index", photos, "-o", tmp_path / "ix", "--model", checkpoint)
    for options in ([], ["--model", checkpoint]):
        (tmp_path / "ix" / "vectors.usearch").unlink()
        found = json.loads(command("index", photos, "-o", tmp_path / "ix", *options, "--json").stdout)
        assert found["rebuilt"] == 1
    (tmp_path / "ix" / "vectors.usearch").unlink()
    assert "was rebuilt" in command("index", photos, "-o", tmp_path / "ix").stderr


def test_questions_that_are_none(command, checkpoint, photos, tmp_path):
    command("index", photos, "-o", tmp_path / "ix", "--model", checkpoint)
    (tmp_path / "bad.png").write_bytes(b"nothing")
    for args, words in (
        ([], "search by a text or by an image"),
        (["a dog", "--image", "x.jpg"], "search by a text or by an image"),
        (["--image", tmp_path / "bad.png"], "bad.png: not an image that can be read"),
        (["--image", tmp_path / "none.png"], "none.png: no such file"),
        (["--image", "digits#3", "--sheet", tmp_path / "x.txt"], "Name a .png, .svg or .pdf file"),
        (["--image", "digits#3", "--html", tmp_path / "x.png"], "name an .html file"),
    ):
        assert words in command("search", tmp_path / "ix", *args, code=2).stderr
    assert "no such index" in command("search", tmp_path / "none", "--image", "digits#3", code=2).stderr


def test_sheet_and_page(command, checkpoint, photos, tmp_path):
    """What is drawn is what was found; names are shown as they are, and do nothing."""
    bad = "<img src=x onerror=alert(1)> & '{{title}}'.png"
    (photos / "a" / "03.png").rename(photos / bad)
    command("index", photos, "-o", tmp_path / "ix", "--model", checkpoint)
    (photos / "a" / "06.png").unlink()
    args = ("search", tmp_path / "ix", "--image", photos / bad, "--top", 23, "--json")
    done = command(*args, "--sheet", tmp_path / "s.png", "--html", tmp_path / "out" / "s.html")
    hits = json.loads(done.stdout)["hits"]
    assert f"written: {tmp_path / 's.png'}" in done.stderr
    page = (tmp_path / "out" / "s.html").read_text(encoding="utf-8")
    assert "<img src=x" not in page and "{{" in page and f"Like {html.escape(bad)}</h1>" in page
    shown = re.findall(r'<span><a href="(.*?)">(.*?)</a></span><data value="(.*?)">', page)
    assert [(html.unescape(link), html.unescape(name), float(score)) for link, name, score in shown] == [
        (Path(hit["image"]).as_uri(), str(Path(hit["image"]).relative_to(photos)), hit["score"]) for hit in hits
    ]
    assert page.count("data:image/png;base64,") == 22 + 1 and page.count(">gone</div>") == 1
    assert not re.search(r'(src|href)="(?!data:|file:)', page)
    with Image.open(tmp_path / "s.png") as sheet:
        pixels = np.asarray(sheet.convert("RGB"), dtype=np.int16)
    asked = np.asarray(Image.open(photos / bad).convert("RGB"), dtype=np.int16)
    cell = np.asarray(Image.fromarray(asked.astype(np.uint8)).resize((200, 129), Image.Resampling.NEAREST), np.int16)
    top = 30 + 190 + 24  # below the heading
    first = pixels[top : top + 200, 30:230]
    shift = [np.abs(first[y : y + 129] - cell).mean() for y in range(200 - 129)]
    assert min(shift) < 12 < np.median(shift)  # it stands in the first place, in its own shape


def test_a_picture_of_a_data_source(command, tmp_path):
    """The neighbours of a digit are that digit: bundled:digits has learned them."""
    for number in range(60):
        sample = open_sample(f"digits#{number}")
        (tmp_path / "digits" / sample.label).mkdir(parents=True, exist_ok=True)
        sample.image.save(tmp_path / "digits" / sample.label / f"{number}.png")
    command("index", tmp_path / "digits", "-o", tmp_path / "ix", "--model", "bundled:digits")
    right = []
    for name in ("digits#60", "digits#61", "digits#62"):
        found = json.loads(command("search", tmp_path / "ix", "--image", name, "--top", 3, "--json").stdout)
        right += [Path(hit["image"]).parent.name == open_sample(name).label for hit in found["hits"]]
    assert np.mean(right) > 0.8


def rows(index: Path) -> dict[str, tuple]:
    with ImageDatabase(index / "pictures.sqlite") as database:
        numbers, paths = database.numbers(), database.paths(database.numbers())
        parts = [zip(part.tolist(), found, strict=True) for part, found in database.vectors(numbers)]
        vectors = {paths[number]: vector for part in parts for number, vector in part}
        return {path: (known, vectors.get(path)) for path, known in database.file_states().items()}


def test_two_processes_make_the_index_that_one_makes(command_in_two, command, checkpoint, photos, tmp_path, draw):
    (photos / "bad.png").write_bytes(b"nothing")

    def compare() -> None:
        one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
        assert one.keys() == two.keys()
        for path, (known, vector) in one.items():
            assert two[path][0] == known
            assert (vector is None) == (two[path][1] is None) == (path == "bad.png")
            if vector is not None:
                np.testing.assert_allclose(two[path][1], vector, atol=1e-6)
        assert not list((tmp_path / "two").glob("part-*"))

    options = ["--model", checkpoint, "--batch-size", 5, "--device", "cpu"]
    command("index", photos, "-o", tmp_path / "one", *options)
    assert command_in_two(["index", photos, "-o", tmp_path / "two", *options]) == [0, 0]
    compare()
    draw(photos / "new.png", 100)
    draw(photos / "b/c/01.png", 101)
    (photos / "a" / "00.png").unlink()
    command("index", photos, "-o", tmp_path / "one")
    before = rows(tmp_path / "two")
    assert command_in_two(["index", photos, "-o", tmp_path / "two", "--device", "cpu"]) == [0, 0]
    compare()
    changed = {path for path, row in rows(tmp_path / "two").items() if before.get(path, (None,))[0] != row[0]}
    assert changed == {"new.png", "b/c/01.png"}
    asked = photos / "b/c/01.png"
    found = [json.loads(command("search", tmp_path / ix, "--image", asked, "--json").stdout) for ix in ("one", "two")]
    assert_same(found[1]["hits"], [(hit["image"], hit["score"]) for hit in found[0]["hits"]])
