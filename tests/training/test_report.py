"""The run's page: well formed, self-contained, nothing unescaped; numbers, curves and pictures are those given."""

import base64
import io
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.explain.draw.heatmap import overlay
from vitlab.explain.views import views
from vitlab.images.mix import smooth_targets
from vitlab.training.heat_maps import heat_maps
from vitlab.training.label_issues import sure_suspects
from vitlab.training.report import Evidence, GalleryItem, RunReport, Smoothing, duration, write_report
from vitlab.training.report.verdict import AccuracyResult, next_step, verdict
from vitlab.training.run_report import typical_successes

X = "{http://www.w3.org/1999/xhtml}"
NASTY = [
    "<script>alert(1)</script>",
    "quote\" 'and' & more",
    "大熊猫",
    "</title></svg><img src=x onerror=y>",
    "שלום",
    "{x}",
]
RECIPE = '[data]\nsource = "my <b>data</b>"\n[model]\nname = "vit_\\"tiny\\""\n[run]\nseed = 7\n'
RESULT = dict(
    top1=0.912345, loss=0.1234567, seconds=3725.0, images_per_second=1234.5, epochs=30, params=86567656, seed=7
)


def make_log(steps=20):
    log = [{"kind": "start", "step": 0, "time": 1.7e9, "steps": steps}]
    for step in range(1, steps + 1):
        log.append(dict(kind="train", step=step, time=1.7e9 + step, loss=2 / step, lr=step * 1e-4))
        if step % 5 == 0:
            log.append(dict(kind="val", step=step, time=1.7e9 + step, loss=2.5 / step, top1=0.5 + step / 50))
    return log


def pictures(count, channels=3, size=(5, 9)):
    rng = np.random.default_rng(0)
    return [
        GalleryItem(
            image=rng.integers(0, 256, (*size, channels), dtype=np.uint8),
            truth=NASTY[i % len(NASTY)],
            predicted=NASTY[(i + 1) % len(NASTY)],
            confidence=0.5 + i / 100,
            name=f'folder/<i>{i}</i>"\x00\udcff.png',
        )
        for i in range(count)
    ]


def report(folder: Path, **changes):
    given = dict(
        log=make_log(),
        recipe_text=RECIPE,
        result=RESULT,
        classes=NASTY,
        confusion=np.diag([3, 4, 5, 6, 7, 0]) + np.eye(6, k=1, dtype=int),
        mistakes=pictures(5),
        samples=[],
        environment={"python": "3.11", "cpu": '<fast> & "cheap"', "gpu": {"name": "无"}},
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = write_report(folder, RunReport(**{**given, **changes}))
    text = path.read_text(encoding="utf-8")
    return text, ElementTree.fromstring(text)


def all_text(element, hidden="zh-CN") -> str:
    """What the page shows in English, or with hidden="en" in Chinese."""
    if element.get("lang") == hidden and element.tag == f"{X}span":
        return ""
    return (element.text or "") + "".join(all_text(child, hidden) + (child.tail or "") for child in element)


def section(page, title: str):
    found = [s for s in page.iter(f"{X}section") if all_text(s.find(f"{X}h2")).startswith(title)]
    assert len(found) <= 1
    return found[0] if found else None


class Strict(HTMLParser):
    """What a browser sees: every tag closed in order, and each attribute that could fetch or run something."""

    void = ("meta", "img", "link", "br")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links = [], set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        assert not [n for n in names if n.startswith("on")], (tag, attrs)
        self.links += [v for n, v in attrs if n in ("src", "href", "xlink:href", "action", "data", "srcset", "poster")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.void:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_page(text: str) -> None:
    seen = Strict()
    seen.feed(text)
    assert seen.open == []
    assert not seen.tags & {"script", "iframe", "link", "object", "embed", "form", "base"}
    assert all(link.startswith("data:image/") for link in seen.links), seen.links
    assert not re.search(r"url\(|@import|javascript:", text)
    without = text.replace("http://www.w3.org/1999/xhtml", "")  # a name, never fetched
    assert not re.search(r"(?i)(https?:)?//[a-z]", re.sub(r"base64,[A-Za-z0-9+/=]*", "", without))


def test_page_is_well_formed_self_contained_and_escaped(tmp_path):
    text, page = report(tmp_path / 'run <x> "1"', samples=pictures(3, channels=1))
    check_page(text)
    assert "default-src 'none'" in text
    for name in NASTY:  # each is there, as text
        assert name in all_text(section(page, "Accuracy per class"))
    assert all_text(page.find(f".//{X}h1")) == 'run <x> "1"'
    assert "my <b>data</b>" in all_text(page.find(f".//{X}header"))
    assert 'folder/<i>0</i>"\ufffd\ufffd.png' in all_text(section(page, "Worst mistakes"))
    environment = section(page, "Environment")
    assert [all_text(cell) for cell in environment.iter(f"{X}td")] == ["3.11", '<fast> & "cheap"', "无"]
    assert all_text(section(page, "Recipe").find(f"{X}pre")) == RECIPE.strip()
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    titles = {all_text(heading, hidden="en") for heading in page.iter(f"{X}h2")}
    assert {"曲线", "混淆矩阵", "各类准确率", "最严重的错误", "预测示例", "配方", "环境"} <= titles


def test_numbers_are_those_given(tmp_path):
    _, page = report(tmp_path)
    tiles = page.find(f"{X}body/{X}main/{X}dl")
    shown = [(all_text(d), float(d.get("value"))) for d in tiles.iter(f"{X}data")]
    assert shown == [
        ("91.23 %", 0.912345), ("0.1235", 0.1234567), ("86,567,656", 86567656), ("30", 30),
        ("1 h 02 min", 3725.0), ("1,234", 1234.5),
    ]  # fmt: skip
    table = {all_text(row[0]): row[1] for row in section(page, "All numbers").iter(f"{X}tr")}
    assert {key: float(cell.find(f"{X}data").get("value")) for key, cell in table.items()} == RESULT
    assert "seed 7" in all_text(page.find(f".//{X}header"))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.44, "0.4 s"), (59.9, "59.9 s"), (75, "1 min 15 s"), (7199.6, "2 h 00 min")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_results_that_are_not_numbers(tmp_path):
    result = dict(top1=math.nan, loss=math.inf, seconds=1.0, epochs=None, split="<test>", nested={"a": [1, 2]})
    text, page = report(tmp_path, result=result)
    check_page(text)
    table = {all_text(row[0]): all_text(row[1]) for row in section(page, "All numbers").iter(f"{X}tr")}
    assert table == dict(top1="nan", loss="inf", seconds="1.0 s", epochs="–", split="<test>", **{"nested.a": "[1, 2]"})


def charts(page) -> dict:
    return {all_text(f.find(f"{X}h3")): f for f in section(page, "Curves").iter(f"{X}figure")}


def number(text: str) -> float:
    text = text.replace(" %", "e-2").replace("k", "e3").replace("M", "e6")
    return float(text)


def curve(figure, kind: str, logarithmic=False) -> list[tuple[float, float]]:
    """Back from the drawing to numbers, by nothing but the labels of its axes."""
    svg = figure.find(f"{X}svg")

    def axis(which: str, place: str):
        ticks = [t for t in svg.iter(f"{X}text") if t.get("class") == f"{which} tick"]
        values = [math.log10(number(t.text)) if logarithmic and which == "y" else number(t.text) for t in ticks]
        slope, start = np.polyfit([float(t.get(place)) for t in ticks], values, 1)
        np.testing.assert_allclose([start + slope * float(t.get(place)) for t in ticks], values, atol=1e-2 * abs(slope))
        return lambda position: start + slope * position

    x, y = axis("x", "x"), axis("y", "y")
    path = next(p for p in svg.iter(f"{X}path") if p.get("class") in (kind, f"{kind} raw"))
    points = [tuple(map(float, point.split(","))) for point in re.findall(r"[ML]([\d.]+,[\d.]+)", path.get("d"))]
    return [(x(a), 10 ** y(b) if logarithmic else y(b)) for a, b in points]


def test_curves_hold_the_points_of_the_log(tmp_path):
    _, page = report(tmp_path)
    drawn = charts(page)
    assert set(drawn) == {"Loss", "Accuracy", "Learning rate"}
    expected = {
        ("Loss", "train"): [(s, 2 / s) for s in range(1, 21)],
        ("Loss", "val"): [(s, 2.5 / s) for s in (5, 10, 15, 20)],
        ("Accuracy", "val"): [(s, 0.5 + s / 50) for s in (5, 10, 15, 20)],
        ("Learning rate", "train"): [(s, s * 1e-4) for s in range(1, 21)],
    }
    for (title, kind), points in expected.items():
        top = max(y for _, y in points)
        np.testing.assert_allclose(curve(drawn[title], kind), points, rtol=1e-3, atol=2e-3 * top)
    told = [all_text(t) for t in drawn["Accuracy"].iter(f"{X}title")]
    assert told == [f"val, step {s}: {50 + 2 * s} %" for s in (5, 10, 15, 20)]
    assert "last 90 %, best 90 % at step 20" in all_text(drawn["Accuracy"].find(f"{X}figcaption"))


def test_a_run_without_labels_shows_its_signs_of_health(tmp_path):
    """And not the loss of those who judge it beside its own, which is another thing."""
    signs = dict(teacher_entropy=3.0, rank=20.0, teacher_std=0.5, centre_norm=2.0)
    log = [dict(kind="train", step=s, loss=4.0 + s, **{k: v + s for k, v in signs.items()}) for s in (1, 2, 3)]
    log.append(dict(kind="val", step=3, loss=1.5, top1=0.75))
    _, page = report(tmp_path, log=log, result={"judged_by": "k-NN top-1", "top1": 0.75, "loss": 1.5})
    drawn = charts(page)
    for title, key in {
        "Entropy of the teacher": "teacher_entropy",
        "Directions that features use": "rank",
        "Spread of features": "teacher_std",
        "Norm of the centre": "centre_norm",
    }.items():
        expected = [(s, signs[key] + s) for s in (1, 2, 3)]
        np.testing.assert_allclose(curve(drawn[title], "train"), expected, rtol=2e-3, atol=2e-2)
    assert "val" not in all_text(drawn["Loss"].find(f"{X}figcaption"))
    assert "Loss (k-NN)" in all_text(page)
    log[-1]["reconstruction"] = 6.5  # of MAE: what it is taught, on pictures that it has not seen
    _, page = report(tmp_path, log=log, result={"judged_by": "k-NN top-1", "top1": 0.75, "loss": 1.5})
    np.testing.assert_allclose(curve(charts(page)["Loss"], "val"), [(3, 6.5)], rtol=2e-3, atol=1e-2)


def test_speed_from_images_and_seconds(tmp_path):
    log = [
        dict(kind="train", step=s, loss=1.0, images=64 * s, seconds=0.5 * s if s < 3 else 1 + (s - 2))
        for s in (1, 2, 3, 4)
    ]
    _, page = report(tmp_path, log=log)
    points = curve(charts(page)["Images per second"], "train")
    np.testing.assert_allclose(points, [(1, 128), (2, 128), (3, 64), (4, 64)], atol=0.2)


def test_a_loss_over_decades_is_drawn_on_a_logarithmic_axis(tmp_path):
    log = [dict(kind="train", step=s, loss=10.0 ** (2 - s)) for s in range(6)]
    _, page = report(tmp_path, log=log)
    points = curve(charts(page)["Loss (logarithmic)"], "train", logarithmic=True)
    np.testing.assert_allclose(points, [(s, 10.0 ** (2 - s)) for s in range(6)], rtol=2e-3, atol=1e-9)


def test_values_that_are_not_finite_break_the_line_and_are_marked(tmp_path):
    losses = [1.0, 0.5, math.nan, 0.75, math.inf, 0.25]
    log = [dict(kind="train", step=s, loss=loss) for s, loss in enumerate(losses, 1)]
    _, page = report(tmp_path, log=log)
    figure = charts(page)["Loss"]
    path = next(figure.iter(f"{X}path"))
    assert re.sub(r"[^ML]", "", path.get("d")) == "MLMM"
    np.testing.assert_allclose([y for _, y in curve(figure, "train")], [1.0, 0.5, 0.75, 0.25], atol=5e-3)
    marks = [all_text(t) for t in figure.iter(f"{X}text") if t.get("class") == "broken"]
    assert marks == ["×step 3: nan", "×step 5: inf"]
    assert "2 not finite" in all_text(figure.find(f"{X}figcaption"))
    text, _ = report(tmp_path, log=[dict(kind="train", step=1, loss=math.nan)])
    check_page(text)


def test_a_long_curve_is_thinned_without_losing_a_spike(tmp_path):
    rng = np.random.default_rng(0)
    losses = 1 + 0.1 * rng.random(30_000)
    losses[12_345] = 9.0
    log = [dict(kind="train", step=s + 1, loss=float(y)) for s, y in enumerate(losses)]
    text, page = report(tmp_path, log=log, mistakes=[])
    points = curve(charts(page)["Loss"], "train")
    assert len(points) < 1000 and len(text) < 60_000
    step, height = max(points, key=lambda p: p[1])
    assert abs(step - 12_346) < 5 and abs(height - 9) < 0.02
    mean = next(p for p in page.iter(f"{X}path") if p.get("class") == "train mean")
    assert len(re.findall("L", mean.get("d"))) > 100


@pytest.mark.parametrize("log", [[], [dict(kind="note", step=0, text="only <words>")], make_log(1)[:2]])
def test_short_logs(tmp_path, log):
    text, page = report(tmp_path, log=log)
    check_page(text)
    assert (section(page, "Curves") is not None) == any(line["kind"] == "train" for line in log)


@pytest.mark.parametrize("K", [2, 3, 12, 13, 26, 100])
def test_confusion_matrix_has_every_count_in_its_place(tmp_path, K):
    rng = np.random.default_rng(K)
    counts = rng.poisson(0.3, (K, K)) + np.diag(rng.integers(5, 2000, K))
    counts[1] = 0  # a class without pictures
    names = [f"类别 {k} <b>" for k in range(K)]
    text, page = report(tmp_path, confusion=counts, classes=names, mistakes=[])
    check_page(text)
    matrix = section(page, "Confusion matrix")
    found = np.zeros_like(counts)
    boxes = [r for r in matrix.iter(f"{X}rect") if r.get("data-at")]
    for box in boxes:
        i, j = map(int, box.get("data-at").split(","))
        found[i, j] = int(box.get("data-n"))
        assert all_text(box).startswith(f"{names[i]} → {names[j]}: {counts[i, j]} (")
        assert box.get("class") == ("right" if i == j else "wrong")
    np.testing.assert_array_equal(found, counts)
    # where a box stands: the same row and column for the same class, evenly spaced
    frame = next(r for r in matrix.iter(f"{X}rect") if r.get("class") == "frame")
    cell = float(frame.get("width")) / K
    for box in boxes:
        i, j = map(int, box.get("data-at").split(","))
        assert float(box.get("x")) == pytest.approx(float(frame.get("x")) + j * cell, abs=0.11)
        assert float(box.get("y")) == pytest.approx(float(frame.get("y")) + i * cell, abs=0.11)
    rows = [t for t in matrix.iter(f"{X}text") if t.get("class") == "row"]
    assert [all_text(t.find(f"{X}title")) for t in rows] == names
    assert f"{np.trace(counts):,} of {counts.sum():,} right" in all_text(matrix)
    assert ("Most often confused" in all_text(matrix)) == (K > 12)


def test_more_classes_than_a_page_can_name_become_a_picture(tmp_path):
    K = 137
    counts = np.diag(np.full(K, 9))
    counts[5, 77] = 3
    text, page = report(tmp_path, confusion=counts, classes=[f"c{k}" for k in range(K)], mistakes=[])
    check_page(text)
    source = next(section(page, "Confusion matrix").iter(f"{X}img")).get("src")
    pixels = np.array(Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))))  # (K, K, RGBA)
    np.testing.assert_array_equal(pixels[..., 3] > 0, counts > 0)
    cells = [all_text(cell) for cell in section(page, "Confusion matrix").iter(f"{X}td")]
    assert cells == ["c5", "c77", "3", "25.0 %"]


def test_interval_equals_scipys(tmp_path):
    from scipy import stats

    for right, total in ((95, 100), (60, 60), (1, 3), (0, 7)):
        counts = np.array([[right, total - right], [0, 0]])
        _, page = report(tmp_path, confusion=counts, classes=["a", "b"])
        low, high = stats.binomtest(right, total).proportion_ci(method="wilson")
        assert f"interval {100 * low:.1f} % to {100 * high:.1f} %." in all_text(section(page, "Confusion matrix"))


def test_accuracy_per_class_worst_first(tmp_path):
    counts = np.array([[3, 1, 0], [0, 0, 0], [2, 2, 4]])
    _, page = report(tmp_path, confusion=counts, classes=["a", "empty", "c"], mistakes=[])
    rows = [[all_text(cell) for cell in row] for row in section(page, "Accuracy per class").iter(f"{X}tr")]
    assert rows[1:] == [
        ["c", "50.0 %", "4 / 8", "a (2)"],
        ["a", "75.0 %", "3 / 4", "empty (1)"],
        ["empty", "no images", "0 / 0", ""],
    ]


def test_without_classes_there_is_no_matrix(tmp_path):
    text, page = report(tmp_path, confusion=None, classes=[], mistakes=[])
    check_page(text)
    assert section(page, "Confusion matrix") is None and section(page, "Worst mistakes") is None


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_those_given_most_confident_first(tmp_path, channels):
    given = pictures(4, channels)
    _, page = report(tmp_path, mistakes=given, samples=given)
    for title, order in (("Worst mistakes", given[::-1]), ("Sample predictions", given)):
        figures = list(section(page, title).iter(f"{X}figure"))
        assert len(figures) == len(order)
        for figure, picture in zip(figures, order, strict=True):
            source = figure.find(f"{X}img").get("src")
            pixels = np.array(Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))))
            np.testing.assert_array_equal(pixels.reshape(picture.image.shape), picture.image)
            names = [all_text(name) for name in figure.iter(f"{X}bdi")]
            assert names[:2] == [picture.truth, picture.predicted]
            assert float(next(figure.iter(f"{X}data")).get("value")) == picture.confidence


def test_photographs_are_made_small(tmp_path):
    photo = GalleryItem(np.full((600, 900, 3), (200, 30, 60), np.uint8), "cat", "cat", 1.0, "cat.jpg")
    _, page = report(tmp_path, samples=[photo], mistakes=[])
    source = next(section(page, "Sample predictions").iter(f"{X}img")).get("src")
    image = Image.open(io.BytesIO(base64.b64decode(source.split(",")[1])))
    assert image.size == (224, 149)
    np.testing.assert_allclose(np.array(image).mean(axis=(0, 1)), (200, 30, 60), atol=3)
    assert "✓" in all_text(section(page, "Sample predictions"))


def test_events_are_listed(tmp_path):
    log = make_log() + [
        dict(kind="note", step=20, text="resumed <b>"),
        dict(kind="skip", step=20, message="图.png: cut"),
    ]
    log += [dict(kind="skip", step=21, message=f"{i}.png") for i in range(50)] + [
        dict(kind="result", step=21, top1=0.5)
    ]
    _, page = report(tmp_path, log=log)
    rows = [[all_text(cell) for cell in row] for row in section(page, "Events").iter(f"{X}tr")]
    assert rows[1:3] == [["20", "note", "resumed <b>"], ["20", "skip", "图.png: cut"]]
    assert len(rows) == 42 and rows[-1][2] == "and 12 more, in log.jsonl"


def test_a_broken_write_leaves_the_old_report(tmp_path, monkeypatch):
    before, _ = report(tmp_path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        report(tmp_path, log=[])
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == before


# ------------------------------------------------------------------------------------------- verdict and background

MEASURED = dict(top1=0.9, interval=[0.82, 0.95], images=80, majority=0.55, split="test", judged_by="top-1")


def test_the_verdict_opens_the_page_in_both_languages(tmp_path):
    evidence = Evidence("runs/x <1>", NASTY[0], 100, 0)
    text, page = report(tmp_path, result={**RESULT, **MEASURED}, evidence=evidence)
    check_page(text)
    first = next(page.iter(f"{X}section"))
    assert all_text(first.find(f"{X}h2")) == "Verdict"
    english, chinese = (all_text(first.find(f"{X}p"), hidden) for hidden in ("zh-CN", "en"))
    assert english.startswith(
        f"It is right on 90.00 % of 80 test images (95 % interval 82.0 % to 95.0 %); always answering {NASTY[0]} would "
        "be right on 55.0 %."
    )
    assert english.count(". ") == 1  # two sentences
    assert re.search("[一-鿿]", chinese) and not re.search("[一-鿿]", english)
    for word in ("right", "images", "interval", "would"):
        assert word not in chinese.replace(NASTY[0], "")
    dot = next(i for i in first.iter(f"{X}i") if i.get("class") == "dot")
    assert dot.get("style") == "left:90.00%"


@pytest.mark.parametrize("language, shown", [("en", "en"), ("zh", "zh")])
def test_the_page_opens_in_the_language_of_the_terminal(tmp_path, monkeypatch, language, shown):
    monkeypatch.setenv("VITLAB_LANG", language)
    _, page = report(tmp_path, result={**RESULT, **MEASURED})
    checked = [i.get("id") for i in page.iter(f"{X}input") if i.get("checked")]
    assert checked == [shown]
    for span in page.iter(f"{X}span"):  # no text in one language has a part in the other
        if span.get("lang") == "en":
            assert not re.search("[一-鿿]", "".join(span.itertext()).replace("大熊猫", ""))


LABELS = dict(labels=[50, 100, 200], forecast_labels=400)
GOOD = dict(LABELS, accuracies=[0.7, 0.8, 0.9], forecast=0.95, low=0.92, high=0.97)
LITTLE = dict(
    labels=[50, 100, 200], accuracies=[0.89, 0.9, 0.9], forecast=0.902, low=0.9, high=0.91, forecast_labels=400
)


@pytest.mark.parametrize(
    "changes, evidence, step",
    [
        (dict(majority=0.87), Evidence(), "start"),
        ({}, Evidence(labels=100, suspects=2), "use"),  # two may be chance
        ({}, Evidence(labels=100, suspects=3), "clean"),
        ({}, Evidence(labels=1000, suspects=19), "use"),
        (dict(stopped_early=True), Evidence(), "longer"),
        (dict(left_out=[dict(name="lora", title="LoRA", why="no time", for_time=True)]), Evidence(), "longer"),
        (dict(left_out=[dict(name="lora", title="LoRA", why="all are right", for_time=False)]), Evidence(), "use"),
        ({}, Evidence(rising=True), "longer"),
        (dict(learning_curve=GOOD), Evidence(), "label"),
        (dict(learning_curve=LITTLE), Evidence(), "use"),
        (dict(interval=[0.7, 0.95]), Evidence(), "measure"),
        (dict(top1=1.0, interval=[0.95, 1.0], stopped_early=True), Evidence(), "use"),
    ],
)
def test_the_next_step_follows_from_the_evidence(tmp_path, changes, evidence, step):
    result = {**MEASURED, "interval": [0.86, 0.94], **changes}
    assert next_step(AccuracyResult.of(result), evidence) == step
    for part in verdict(result, evidence).split("</span>"):  # and can be said, in both languages
        assert "None" not in part


@pytest.mark.parametrize("eps, classes", [(0.1, 2), (0.1, 7), (0.3, 100), (0.0, 5)])
def test_the_floor_of_a_smoothed_loss_is_the_least_that_cross_entropy_reaches(eps, classes):
    smoothing = Smoothing(eps, classes)
    targets = smooth_targets(torch.tensor([1]), classes, eps).double()
    best = torch.nn.functional.cross_entropy(targets.clamp(min=1e-300).log(), targets)
    assert smoothing.floor == pytest.approx(float(best), abs=1e-6)
    assert smoothing.confidence == pytest.approx(float(targets[0, 1]), abs=1e-6)
    other = torch.randn(50, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    losses = torch.nn.functional.cross_entropy(other, targets.expand(50, -1), reduction="none")
    assert (losses > smoothing.floor).all()


def test_rungs_start_and_smoothing_are_told(tmp_path):
    rungs = [
        dict(name="knn", title="k-NN", val_top1=0.6, interval=[0.5, 0.7], images=90, seconds=0.1, kept=False),
        dict(name="probe", title="linear probe", val_top1=0.8, interval=[0.7, 0.9], images=90, seconds=2, kept=True),
        dict(name="lora", title="LoRA", val_top1=0.81, interval=[0.7, 0.9], images=90, seconds=75, kept=False),
    ]
    start = dict(name="hf-hub:some/weights", why="they are <best>", licence="apache-2.0", expected=12.0)
    result = {**RESULT, **MEASURED, "rungs": rungs, "start": start}
    text, page = report(tmp_path, result=result, smoothing=Smoothing(0.1, 2), confidence=0.875)
    check_page(text)
    made = section(page, "How it was made")
    rows = [[all_text(cell) for cell in row] for row in made.iter(f"{X}tr")][1:]
    assert rows[1] == ["linear probe", "80.00 %", "70.0 % – 90.0 %", "2.0 s", "chosen"]
    assert [row[4] for row in rows] == ["", "chosen", ""] and rows[2][3] == "1 min 15 s"
    words = all_text(made)
    for part in ("hf-hub:some/weights (licence apache-2.0)", "they are <best>", "95 % confidence", "below 0.1985"):
        assert part in words, part
    assert "87.5 % confident, and right on 90.0 %" in words


def test_label_suspects_are_those_of_the_definition():
    """Confident learning as its paper writes it down, in loops."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, 300)
    logits = random.normal(0, 1, (300, 4)) + 3 * np.eye(4)[labels]
    wrong = random.choice(300, 20, replace=False)
    labels[wrong] = (labels[wrong] + 1) % 4
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    threshold = [np.mean([p[i, j] for i in range(300) if labels[i] == j]) for j in range(4)]
    expected = set()
    for i in range(300):
        sure = [j for j in range(4) if p[i, j] >= threshold[j]]
        if sure and (best := max(sure, key=lambda j: p[i, j])) != labels[i] and p[i, best] >= 4 * p[i, labels[i]]:
            expected.add((i, int(labels[i]), best))
    found = sure_suspects(p, labels)
    assert {(s.image, s.given, s.suggested) for s in found} == expected
    assert len({s.image for s in found} & set(wrong.tolist())) >= 12  # and they are mostly the wrong ones
    margins = [p[s.image, s.given] - np.delete(p[s.image], s.given).max() for s in found]
    assert margins == sorted(margins)
    assert sure_suspects(np.full((3, 2), 0.5), np.array([0, 0, 0])) == []  # a class without images is no alternative
    weak = np.array([[0.4, 0.6], [0.45, 0.55], [0.55, 0.45], [0.6, 0.4]])
    assert sure_suspects(weak, np.array([0, 1, 0, 1])) == []  # a model that knows little accuses nobody


def test_heat_maps_are_those_of_explain():
    model = vitlab.load("bundled:digits")
    images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    drawn = heat_maps(model, images, [3, 1, 7])
    for image, answer, picture in zip(images, [3, 1, 7], drawn, strict=True):
        heat = vitlab.explain.relevance(model, image[None], answer)[0].numpy()
        view = views(model, image[None])[0]
        np.testing.assert_array_equal(picture, overlay(heat, view, side=224))
    assert heat_maps(vitlab.create("resnet18", classes=2, image_size=32), torch.randn(1, 3, 32, 32), [0]) == []


def test_typical_successes_are_right_and_of_middling_confidence():
    chances = torch.tensor([0.5, 0.9, 0.7, 0.99, 0.6, 0.8])
    labels, right = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([True, True, True, False, True, True])
    assert typical_successes(chances, right, labels, most=2) == [2, 4]  # torch's median of two is the lower
    assert set(typical_successes(chances, right, labels)) == {0, 1, 2, 4, 5}


def test_a_gallery_shows_the_map_beside_the_image(tmp_path):
    with_heat = [replace(picture, heat=np.full((20, 30, 3), 7, np.uint8)) for picture in pictures(2)]
    text, page = report(tmp_path, mistakes=with_heat, heat="Relevance", suspects=pictures(1))
    check_page(text)
    figures = list(section(page, "Worst mistakes").iter(f"{X}figure"))
    assert [len(list(figure.iter(f"{X}img"))) for figure in figures] == [2, 2]
    assert "Relevance" in all_text(section(page, "Worst mistakes"))
    assert section(page, "Labels that may be wrong") is not None
