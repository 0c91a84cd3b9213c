"""The page as a reader uses it: by mouse, keyboard and finger, in Chromium; it shows what the model computed."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.explain import draw
from vitlab.explain.draw.heatmap import heat_limits
from vitlab.explain.scale import SCALES, positions
from vitlab.images.preprocess import Preprocess
from vitlab.layers.trace import Trace

NAMES = ["宽 photo.png", "tall.png"]
BRIGHT = """() => {
  const pixels = pen.getImageData(0, 0, view.width, view.height).data, box = [1e9, 1e9, -1, -1];
  for (let i = 0; i < pixels.length; i += 4) {
    if (pixels[i] + pixels[i + 1] + pixels[i + 2] < 500) continue;  // what was cut off has 411
    const x = i / 4 % view.width, y = Math.floor(i / 4 / view.width);
    box[0] = Math.min(box[0], x); box[1] = Math.min(box[1], y);
    box[2] = Math.max(box[2], x); box[3] = Math.max(box[3], y);
  }
  return box;
}"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Any, list[draw.View], Path]:
    """A cropping model on a wide and a tall picture; registers stand before the patches."""
    torch.manual_seed(0)
    shape = dict(image_size=(32, 48), patch_size=8, channels=3, classes=4, depth=3, width=32, heads=4, registers=2)
    model = vitlab.create("vit_digits", **shape).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    model.preprocess = Preprocess((32, 48), how="crop")
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, size, dtype=np.uint8) for size in ((200, 400, 3), (300, 180, 3))]
    views = draw.views(model, pictures, NAMES)
    page, note = draw.attention_page(model, pictures, views)
    assert not note
    path = tmp_path_factory.mktemp("page") / "hover.html"
    path.write_text(page, encoding="utf-8")
    trace = Trace("attention")
    with torch.inference_mode():
        model(model.preprocess.batch(pictures), trace=trace)
    return trace.stack("attention").transpose(0, 1).numpy(), views, path  # (B, L, h, N, N)


@pytest.fixture(scope="module")
def tabs(tabs_at, made):
    return tabs_at(made[2].as_uri())


@pytest.fixture
def page(tabs, made):
    """The page as if in a fresh window; anything it fetches or complains of is a failure."""
    tab = tabs.open(viewport={"width": 1200, "height": 900}, has_touch=True)
    wait_until(tab, "Boolean(document.getElementById('said').textContent)")
    yield tab
    assert tabs.requested == [made[2].as_uri()]
    tabs.end_test()


def wait_until(page, expression: str, seconds: float = 100) -> None:
    """wait_for_function evaluates its text inside the page, which the page's own policy forbids."""
    ends = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < ends, f"after {seconds} s not yet: {expression}"
        time.sleep(0.02)


def settle(page) -> None:
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def place_of(page, view: draw.View, patch: int) -> tuple[float, float]:
    """Where a patch's centre is on the screen, by the Preprocess's own account."""
    left, top, right, bottom = view.box(patch)
    H, W = view.geometry.original
    box = page.locator("#view").bounding_box()
    return box["x"] + (left + right) / 2 / W * box["width"], box["y"] + (top + bottom) / 2 / H * box["height"]


def shown(page) -> np.ndarray:
    return np.array(page.evaluate("[...shown().patches]"))


def test_it_opens_with_what_the_classifier_reads(page, made):
    weights, views, _ = made
    assert (
        page.locator("#name").inner_text() == NAMES[0] and page.locator("#answer").inner_text() == views[0].prediction
    )
    np.testing.assert_allclose(shown(page), weights[0, -1].mean(0)[0, 3:], atol=0.003)
    assert page.locator("#said strong").inner_text() == "The class token"
    assert page.locator("#note").is_hidden()


@pytest.mark.parametrize("patch", [0, 8, 23])
def test_moving_over_a_patch_shows_where_it_looks(page, made, patch):
    weights, views, _ = made
    page.mouse.move(*place_of(page, views[0], patch))
    settle(page)
    assert page.evaluate("state.query") == 3 + patch
    row = weights[0, -1].mean(0)[3 + patch]
    np.testing.assert_allclose(shown(page), row[3:], atol=0.003)
    text = page.locator("#said").inner_text()
    assert f"The patch at row {patch // 6}, column {patch % 6} looks" in text
    best = int(row[3:].argmax())
    assert f"most at row {best // 6}, column {best % 6}" in text
    assert f"{100 * row[1:3].sum():.1f} %" in text and "2 register tokens" in text


def test_what_the_crop_cut_off_is_grey_and_no_patch(page, made):
    _, views, _ = made
    left, top, *_ = views[0].geometry.to_original((0, 0, 48, 32))
    assert left > 20 and top == 0
    box = page.locator("#view").bounding_box()
    before = page.evaluate("state.query")
    page.mouse.move(box["x"] + 3, box["y"] + box["height"] / 2)
    settle(page)
    assert page.evaluate("state.query") == before
    pixel = page.evaluate("[...pen.getImageData(3, 100, 1, 1).data]")
    assert pixel[0] == pixel[1] == pixel[2]


def test_a_click_holds_the_patch(page, made):
    _, views, _ = made
    page.mouse.click(*place_of(page, views[0], 7))
    page.mouse.move(*place_of(page, views[0], 20))
    settle(page)
    assert page.evaluate("state.query") == 10 and "Held" in page.locator("#hint").inner_text()
    page.mouse.click(*place_of(page, views[0], 20))
    page.mouse.move(*place_of(page, views[0], 21))
    settle(page)
    assert page.evaluate("state.query") == 24


def test_layer_and_head_are_chosen(page, made):
    weights, views, _ = made
    page.mouse.move(*place_of(page, views[0], 9))
    page.select_option("#layer", label="layer 2")
    page.select_option("#head", label="head 3")
    settle(page)
    np.testing.assert_allclose(shown(page), weights[0, 1, 2, 12, 3:], atol=0.003)
    page.evaluate("all.scrollIntoView()")
    box = page.locator("#all").bounding_box()
    tile = page.evaluate("tiles.find(t => t.layer === 0 && t.head === 4)")
    page.mouse.click(box["x"] + tile["x"] + 5, box["y"] + tile["y"] + 5)  # head 3 of layer 0, after the mean
    settle(page)
    np.testing.assert_allclose(shown(page), weights[0, 0, 3, 12, 3:], atol=0.003)
    assert page.locator("#layer").input_value() == "0" and page.locator("#head").input_value() == "4"


def test_the_keyboard_reaches_everything(page, made):
    weights, _, _ = made
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "view":
            break
    assert page.evaluate("document.activeElement.id") == "view"
    page.keyboard.press("ArrowRight")  # from no patch to the middle
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    settle(page)
    assert page.evaluate("state.query") == 3 + 3 * 6 + 2
    for _ in range(9):
        page.keyboard.press("ArrowDown")
    settle(page)
    assert page.evaluate("state.query") == 3 + 3 * 6 + 2  # the border
    page.keyboard.press("Home")
    settle(page)
    np.testing.assert_allclose(shown(page), weights[0, -1].mean(0)[0, 3:], atol=0.003)
    page.get_by_role("button", name="mean of all patches").focus()
    page.keyboard.press("Enter")
    settle(page)
    np.testing.assert_allclose(shown(page), weights[0, -1].mean(0)[3:, 3:].mean(0), atol=0.003)


def test_a_finger_does_too_and_the_other_picture_has_its_own(page, made):
    weights, views, _ = made
    page.get_by_role("button", name=views[1].prediction).last.click()
    wait_until(page, f"document.getElementById('name').textContent === {NAMES[1]!r} && Boolean(current().pixels)")
    page.touchscreen.tap(*place_of(page, views[1], 14))
    settle(page)
    assert page.evaluate("[state.item, state.query]") == [1, 17]
    np.testing.assert_allclose(shown(page), weights[1, -1].mean(0)[17, 3:], atol=0.003)
    page.touchscreen.tap(*place_of(page, views[1], 3))
    settle(page)
    assert page.evaluate("state.query") == 6


def test_the_heat_is_where_the_value_is(browser, tmp_path):
    """One hot patch on a grey picture, seen through a crop: bright there, dark in the other patches."""
    preprocess = Preprocess((32, 48), how="crop")
    view = draw.View(Image.new("RGB", (400, 200), (120, 120, 120)), preprocess.geometry((200, 400)), (32, 48), 8, "g")
    heat = np.zeros((1, 4, 6))
    heat[0, 1, 4] = 1
    (tmp_path / "m.html").write_text(draw.maps_page([view], {"map": heat}, title="t"), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 420, "height": 800})  # a phone: one column
    tab.goto((tmp_path / "m.html").as_uri())
    wait_until(tab, "Boolean(document.getElementById('said').textContent)")
    tab.uncheck("#smooth")
    settle(tab)
    w, h = tab.evaluate("[view.width, view.height]")
    first_x, first_y, last_x, last_y = tab.evaluate(BRIGHT)
    left, top, right, bottom = view.box(10)
    found = (first_x / w * 400, first_y / h * 200, (last_x + 1) / w * 400, (last_y + 1) / h * 200)
    np.testing.assert_allclose(found, (left, top, right, bottom), atol=1.5)
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    tab.close()


@pytest.mark.parametrize("scale", SCALES)
def test_colours_are_those_of_the_figures(browser, tmp_path, scale):
    """The page's own limits and colours, against explain/scale.py: heat, and a map with a sign, of a padded image."""
    preprocess = Preprocess((40, 48), how="fit")
    view = draw.View(Image.new("RGB", (240, 120)), preprocess.geometry((120, 240)), (40, 48), 8, "g")
    heat = np.random.default_rng(4).gamma(0.3, size=(1, 5, 6)).astype(np.float32)
    heat[0, 2, 2] = 200.0
    text = draw.maps_page([view], {"heat": heat, "sign": heat - 0.4}, title="t", signed=["sign"], scale=scale)
    (tmp_path / "m.html").write_text(text, encoding="utf-8")
    tab = browser.new_page()
    tab.goto((tmp_path / "m.html").as_uri())
    wait_until(tab, "Boolean(document.getElementById('said').textContent)")
    assert tab.evaluate("document.getElementById('scale').value") == scale
    for signed in (False, True):
        values = (heat - 0.4 if signed else heat)[0]
        low, high = heat_limits(values, view, signed=signed, scale=scale)
        found = tab.evaluate("([v, s]) => [...coloured(v, s)[1]]", [values.ravel().tolist(), signed])
        expected = positions(values.astype(np.float64), low, high, scale, signed).ravel()
        np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(shown(tab), heat[0].ravel(), atol=200 / 255**2 + 0.004 * heat[0].ravel().max())
    tab.close()


def test_the_page_is_in_chinese_where_that_is_the_language(browser, tmp_path, monkeypatch):
    """Every word that it shows, also those that are put together in the browser."""
    monkeypatch.setenv("VITLAB_LANG", "zh")
    model = vitlab.load("bundled:digits")
    page, _ = draw.attention_page(model, ["digits#3"], draw.views(model, ["digits#3"], ["1.png"]))
    (tmp_path / "m.html").write_text(page, encoding="utf-8")
    tab = browser.new_page()
    tab.goto((tmp_path / "m.html").as_uri())
    wait_until(tab, "Boolean(document.getElementById('said').textContent)")
    for query in (0, 1, -1):
        tab.evaluate("query => choose({ query, pinned: query === 1 })", query)
        settle(tab)
        shown_text = tab.locator("main").inner_text()
        words = set(re.findall(r"[A-Za-z]{2,}", shown_text)) - {"token", "vitlab", "png", "Enter"}
        assert not words, shown_text
    labels = tab.evaluate("[...document.querySelectorAll('[aria-label]')].map(e => e.getAttribute('aria-label'))")
    assert not re.search("[A-Za-z]{2,}", " ".join(labels).replace("1.png", "")), labels
    assert tab.evaluate("document.documentElement.lang") == "zh-CN"
    tab.close()
