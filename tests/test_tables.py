"""Results as tables: what a reader of the HTML sees is what `print` shows, and no name of a file or class runs."""

from __future__ import annotations

from dataclasses import is_dataclass
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab import explain
from vitlab.explain import figures
from vitlab.explain.diff import diff
from vitlab.explain.gradients import gradients
from vitlab.images.preprocess import Preprocess
from vitlab.inference import Prediction, Predictions
from vitlab.reduce import reducer_of
from vitlab.tables import Bar, Table, Tabular
from vitlab.training.runs import list_runs
from vitlab.training.train import TrainedRun

EVIL = '<img src=x onerror="alert(1)">&\x1b[2J"><script>'
NAMES = ["<b>fox</b>", "大熊猫", EVIL, "plain"]


class Reader(HTMLParser):
    """The cells of all tables, row by row; tags that must not be there; addresses."""

    def __init__(self, html: str):
        super().__init__()
        self.rows, self.tags, self.urls, self.text, self.inside = [], [], [], [], False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.urls += [value for name, value in attributes if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = tag not in ("td", "th") and self.inside

    def handle_data(self, data):
        self.text.append(data)
        if self.inside:
            self.rows[-1][-1] += data


def check(html: str) -> Reader:
    """Light, dark and offline: no scripts, styles of its own colours, handlers or outside addresses."""
    reader = Reader(html)
    for tag, attributes in reader.tags:
        assert tag not in ("script", "link", "style", "meta", "object")
        assert not [name for name in attributes if name.startswith("on")]
        assert "#" not in attributes.get("style", "")  # colours are those of the notebook
    assert all(url.startswith("data:image/") for url in reader.urls)
    assert "\x1b" not in html
    return reader


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = dict(image_size=(16, 24), patch_size=8, channels=3, classes=4, depth=3, width=32, heads=2)
    network = vitlab.create("vit_digits", **shape).eval()
    network.labels, network.preprocess = NAMES, Preprocess((16, 24))
    return network


@pytest.fixture(scope="module")
def photo() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)


def test_text_and_html_hold_the_same_cells():
    rows = [["大熊猫", "7", Bar(0.5)], ["a", "1,234", Bar(0.05)]]
    table = Table(["名", "number", ""], rows, ("number",), ["heading", "below"], ["sum", "1,241", ""], ["a note"])
    lines = str(table).split("\n")
    assert lines[:2] == ["heading", "below"] and lines[-1] == "a note"
    assert lines[2:6] == [
        "名      number",
        "大熊猫       7  ██████████",
        "a        1,234  █",
        "sum      1,241",
    ]
    reader = check(table._repr_html_())
    assert reader.rows == [["名", "number", ""], ["大熊猫", "7", ""], ["a", "1,234", ""], ["sum", "1,241", ""]]


def test_names_are_text_not_markup():
    predictions = Predictions([Prediction(EVIL, [(EVIL, 0.75), ("<b>", 0.25)]), Prediction("x.png", error=EVIL)])
    reader = check(predictions._repr_html_())
    shown = EVIL.replace("\x1b", "\\x1b")
    assert reader.rows[1][1:4] == [shown.rpartition("/")[2], shown, "75.0%"] and reader.rows[3][-1] == shown
    assert "\x1b" not in str(predictions)


def test_predictions_are_a_list_with_small_images(model, photo, tmp_path):
    Image.fromarray(photo).save(tmp_path / "own.png")
    predictions = vitlab.predict(model, [tmp_path / "own.png", photo, tmp_path / "none.png"], top=2)
    assert isinstance(predictions, list) and len(predictions) == 3
    reader = check(predictions._repr_html_())
    assert len(reader.urls) == 1  # the array has no file, and none.png does not exist
    with torch.inference_mode():
        logits = model(model.preprocess.batch([tmp_path / "own.png"])).softmax(-1)[0]
    assert reader.rows[1][3] == f"{float(logits.max()):.1%}"
    assert str(predictions[0]).count("\n") == 2 and "own.png" in str(predictions[0])


def test_a_long_list_is_cut():
    predictions = Predictions(Prediction(f"{i}.png", [("cat", 0.5)]) for i in range(123))
    assert str(predictions).endswith("and 73 more") and len(predictions) == 123
    numbers = Predictions([Prediction("a.png", value=2.5, quantity="<age>")])
    assert check(numbers._repr_html_()).rows == [["", "image", "<age>"], ["", "a.png", "2.5"]]


def test_print_of_inspect_is_the_table_of_the_command(command):
    printed = str(vitlab.inspect("vit_digits"))
    said = [line.rstrip() for line in command("inspect", "vit_digits").stdout.rstrip().split("\n")]
    assert said == printed.split("\n")
    reader = check(vitlab.inspect("vit_digits")._repr_html_())
    assert reader.rows[-1][:3] == ["total", "", f"{sum(p.numel() for p in vitlab.create('vit_digits').parameters()):,}"]


def test_a_trace_lists_what_it_holds_as_it_is_read(model):
    trace = vitlab.Trace("attention", "tokens", layers=[0, -1])
    assert "empty" in str(trace)
    model(torch.randn(2, 3, 16, 24), trace=trace)
    rows = check(trace._repr_html_()).rows[1:]
    assert [row[0] for row in rows] == [f'trace["{kind}", {n}]' for n in (0, 2) for kind in ("attention", "tokens")]
    for expression, shape, low, high in rows:
        value = eval(expression, {"trace": trace})
        assert shape == " x ".join(map(str, value.shape))
        assert (float(low), float(high)) == pytest.approx((float(value.min()), float(value.max())), rel=1e-3)


def test_every_result_of_explain_shows_itself(model, photo):
    mae = vitlab.create("mae_digits").eval()
    results = [
        explain.walk_through(model, photo),
        explain.attention_statistics(model, photo),
        explain.high_norm_tokens(model, photo),
        explain.pruned_patches(model, photo, reducer_of("tome:r=1")),
        explain.compare_methods(model, photo, ["rollout"], steps=2),
        explain.nearest(model, photo, [photo, photo[::-1]], k=2),
        explain.reconstruct(mae, torch.randn(2, 1, 8, 8)),
        explain.open_subject(model, photo),
        explain.open_subject(model, photo).views[0],
        gradients("vit_digits"),
        diff(model, model, photo),
    ]
    for result in results:
        assert isinstance(result, Tabular) and (is_dataclass(result) or isinstance(result, list))
        texts = [[cell for cell in row if cell] for row in check(result._repr_html_()).rows]
        plain = str(result)
        assert len(texts) > 1 and all(cell in plain for row in texts for cell in row), type(result)
    assert len(str(results[0]).split("\n")) == len(results[0].steps) + 3


def test_an_explanation_shows_its_figure(model, photo):
    explanation = figures.rollout(explain.open_subject(model, photo))
    explanation.notes.append(EVIL)
    reader = check(explanation._repr_html_())
    assert len(reader.urls) == 1 and reader.urls[0].startswith("data:image/png;base64,")


def test_runs_show_themselves(tmp_path):
    run = tmp_path / "<b>one"
    run.mkdir()
    (run / "recipe.toml").write_text('[data]\nsource = "digits"\n[model]\nname = "vit_digits"\n', encoding="utf-8")
    (run / "result.json").write_text('{"top1": 0.975, "seconds": 61.25}', encoding="utf-8")
    (tmp_path / "other").mkdir()
    listed = list_runs(tmp_path)
    reader = check(listed._repr_html_())
    assert reader.rows[1][:4] == ["<b>one", "digits", "vit_digits", "97.50 %"]
    assert "skipped: " in "".join(reader.text) and "97.50 %" in str(listed.runs[0])
    assert f"report: {run / 'report.html'}" in str(TrainedRun(run, {}))


@pytest.mark.parametrize(("width", "kept"), [(48, "abcd"), (47, "acd"), (36, "acd"), (35, "ad"), (1, "ad")])
def test_a_narrow_terminal_goes_without_the_droppable_columns(width, kept):
    """In their order, and no more of them than it must: each column takes ten characters and a gap of two."""
    row = [letter * 10 for letter in "abcd"]
    table = Table(list("abcd"), [row, row], total=row, droppable=("b", "c")).fitted(width)
    assert table.titles == list(kept) and table.rows == [[letter * 10 for letter in kept]] * 2
    assert table.total == table.rows[0]
    long = Table(["a", "note"], [["x" * 10, "y" * 99]], prose=("note",), droppable=("a",))
    assert long.fitted(34).titles == ["a", "note"] and long.fitted(33).titles == ["note"]  # prose is folded at 20


def test_the_best_row_is_strong():
    reader = check(Table(["a"], [["1"], ["2"]], strong=[1])._repr_html_())
    assert reader.rows == [["a"], ["1"], ["2"]]
    assert Table(["a"], [["1"], ["2"]], strong=[1])._repr_html_().count("<th") == 2
