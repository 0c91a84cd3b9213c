"""The page at / as people use it, in Chromium: every part, both languages, by mouse, by keyboard alone, on a phone."""

from __future__ import annotations

import json
import socket
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from PIL import Image

import vitlab
from vitlab.explain import attention_maps
from vitlab.inference import fingerprint
from vitlab.search import Index, update
from vitlab.serve.app import create_app
from vitlab.serve.model_pool import ServedModel
from vitlab.serve.search_index import open_index
from vitlab.serve.settings import Settings
from vitlab.text.tokenizer import Tokenizer

TABS = ("try", "walk", "attention", "fewer", "more", "training")


def models() -> dict:
    torch.manual_seed(0)
    shape = dict(image_size=(24, 32), patch_size=4, channels=3, classes=3, width=32, depth=3, heads=2)
    vit = vitlab.create("vit_digits", **shape)
    vit.head.weight.data.normal_(std=0.5)
    vit.labels = ["<img src=x onerror=alert(1)>", "大熊猫", "dog"]
    tokenizer = Tokenizer.train(["a dog on a beach", "two cats"], vocab=530, context=16)
    clip = vitlab.create("clip_digits", **tokenizer.options)
    clip.tokenizer = tokenizer
    return {"small": vit, "mae": vitlab.create("mae_digits"), "clip": clip}


def index_of(clip, folder: Path) -> Path:
    """Of 14 pictures; the name of one is markup, if it is taken for that."""
    noise = np.random.default_rng(1).integers(0, 256, (14, 20, 30, 3), dtype=np.uint8)
    names = ["<img src=x onerror=alert(1)>", *(f"photo {number}" for number in range(1, 14))]
    (folder / "photos").mkdir()
    for name, pixels in zip(names, noise, strict=True):
        Image.fromarray(pixels).save(folder / "photos" / f"{name}.png")
    made_by = {"checkpoint": "clip", "fingerprint": fingerprint(clip), "reads_text": True}
    update(folder / "index", folder / "photos", made_by, partial(vitlab.embed, clip))
    return folder / "index"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A server in a thread: its address, its models, its folder of runs, and its index."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "first").mkdir()
    lines = [{"kind": "train", "step": n, "loss": 2 / n, "lr": 1e-3} for n in range(1, 20)]
    lines.append({"kind": "val", "step": 20, "top1": 0.5})
    (folder / "first" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    known = models()
    served = [ServedModel(name, model) for name, model in known.items()]
    index = index_of(known["clip"].eval(), tmp_path_factory.mktemp("search"))
    app = create_app(served, Settings(runs=str(folder)), open_index(index, served))
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield address, known, folder, index
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def picture(tmp_path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


@pytest.fixture
def page(browser, site):
    """A fresh window at the page. Complaints of the browser and requests to anywhere else are failures.

    The page's own policy forbids the scripts by which the tests look at it; `strict` leaves it in force.
    """
    opened, wrong = [], []

    def start(width: int = 1280, locale: str = "en-US", strict: bool = False):
        context = browser.new_context(viewport={"width": width, "height": 900}, locale=locale, bypass_csp=not strict)
        context.route(lambda url: not url.startswith((site[0], "blob:", "data:")), lambda route: route.abort())
        tab = context.new_page()
        tab.on("console", lambda m: m.text.startswith("Failed to load resource") or wrong.append(m.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda r: r.url.startswith((site[0], "blob:", "data:")) or wrong.append(r.url))
        tab.goto(site[0])
        tab.wait_for_selector("#samples button:nth-child(5)")
        opened.append(context)
        return tab

    yield start
    for context in opened:
        context.close()
    assert wrong == []


def ready(tab) -> None:
    tab.wait_for_function("['Done.', '完成。'].includes(document.getElementById('status').textContent)", timeout=60_000)


def upload(tab, picture: Path) -> None:
    tab.set_input_files("#file", picture)
    ready(tab)


def go(tab, name: str) -> None:
    tab.click(f"#tab-{name}")
    ready(tab)


def test_try_shows_the_answers_and_runs_no_markup_of_a_label(page, site, picture):
    tab = page()
    upload(tab, picture)
    ours = vitlab.predict(site[1]["small"], picture)[0].scores
    shown = tab.locator("[data-model=small] .bars > span:not(.number)").all_inner_texts()
    assert shown == [label for label, _ in ours]
    numbers = tab.locator("[data-model=small] .number").all_inner_texts()
    assert numbers == [f"{100 * p:.1f} %" for _, p in ours]
    assert tab.locator("main img[src=x]").count() == 0


def test_the_walk_has_every_step_and_the_slider_changes_the_answer(page, picture):
    tab = page()
    upload(tab, picture)
    go(tab, "walk")
    names = [button.get_attribute("data-step") for button in tab.locator("ol.steps button").all()]
    assert names[:3] == ["picture", "patches", "patch_embed"] and names[-2:] == ["head", "softmax"]
    for name in names:
        tab.click(f"[data-step='{name}']")
        tab.wait_for_function("document.querySelector('#step .equation')")
    before = tab.inner_text("#by-depth")
    tab.locator("#depth").evaluate("(s) => { s.value = 1; s.dispatchEvent(new Event('input')); }")
    tab.wait_for_function("(before) => document.getElementById('by-depth').innerText !== before", arg=before)


def test_pointing_at_a_patch_shows_where_it_looks_at_once(page, site, picture):
    tab = page()
    upload(tab, picture)
    go(tab, "attention")
    tab.wait_for_selector("#attention[data-loaded=all]")
    box = tab.locator("#attention").bounding_box()
    for column in range(8):
        tab.mouse.move(box["x"] + (column + 0.5) * box["width"] / 8, box["y"] + 2.5 * box["height"] / 6)
    model = site[1]["small"]
    rows = attention_maps(model, model.preprocess(picture)[None], layers=[-1], heads="mean", query=2 * 8 + 7)[0, 0, 0]
    most = int(rows.argmax())
    told = tab.inner_text("#told")
    assert "row 3, column 8" in told and f"{100 * float(rows.sum()):.1f} %" in told
    assert told.endswith(f"row {most // 8 + 1}, column {most % 8 + 1}.")
    spent = tab.evaluate("vitlab.timings.slice(-6)")
    assert sorted(spent)[len(spent) // 2] < 50, f"a redraw took {spent} ms"
    for mode in ("rollout", "relevance", "gradient_x_input"):
        tab.select_option("#mode", mode)
        tab.wait_for_function("document.getElementById('told').textContent === ''")
    tab.locator("#all-heads").click(position={"x": 100, "y": 10})  # first layer, second head
    tab.wait_for_function("document.getElementById('head').value === '1'")
    assert tab.input_value("#layer") == "1"


def test_fewer_tokens_by_every_method(page, picture):
    tab = page()
    upload(tab, picture)
    go(tab, "fewer")
    for method in ("evit", "random", "tome"):
        tab.select_option("#method", method)
        tab.wait_for_function("document.querySelectorAll('#fewer-answers .bars').length === 2")
    tab.locator("#amount").evaluate("(s) => { s.value = 0; s.dispatchEvent(new Event('input')); }")
    tab.wait_for_function("document.querySelector('label:has(#after) span').textContent.includes('49 tokens')")
    answers = tab.locator("#fewer-answers .bars").all_inner_texts()
    assert answers[0] == answers[1]  # nothing was removed


def test_masks_tokens_and_sentences(page, picture):
    tab = page()
    upload(tab, picture)
    go(tab, "more")
    tab.wait_for_selector("#mae-made[data-done='1']")
    box = tab.locator("#mae-seen").bounding_box()
    tab.mouse.move(box["x"] + 5, box["y"] + 5)
    tab.mouse.down()
    tab.mouse.up()
    tab.wait_for_selector("#mae-made[data-done='2']")
    tab.fill("#sentences", "a dog\n<b>two</b> cats")
    tab.click("#ask")
    tab.wait_for_function("document.querySelectorAll('#clip-answers canvas').length === 2")
    assert "<b>two</b> cats" in tab.inner_text("#clip-answers")


def test_a_sentence_or_the_picture_at_hand_finds_pictures_in_order(page, site, picture):
    tab, clip = page(), site[1]["clip"]
    tab.click("#tab-more")
    assert tab.is_disabled("#search-like")  # there is no picture yet, and words need none

    def found(vector) -> list[str]:
        with Index(site[3]) as index:
            return [f"{hit.path.name}\nsimilarity {hit.score:.3f}" for hit in index.search(vector, 12)]

    def shown() -> list[str]:
        tab.wait_for_function("[...document.querySelectorAll('#hits img')].filter((i) => i.naturalWidth).length === 12")
        return [text.strip() for text in tab.locator("#hits li").all_inner_texts()]

    tab.fill("#search-text", "two cats")
    tab.keyboard.press("Enter")
    assert shown() == found(vitlab.embed_text(clip, "two cats")[0])
    assert "12 nearest of 14 images" in tab.inner_text("#search-told")
    upload(tab, picture)
    tab.click("#search-like")
    assert shown() == found(vitlab.embed(clip, picture)[0].vector)
    assert tab.locator("#hits img[onerror]").count() == 0
    with Index(site[3]) as index:
        first = index.search(vitlab.embed_text(clip, "a dog")[0], 1)[0].path
    content = first.read_bytes()
    first.unlink()
    tab.fill("#search-text", "a dog")
    tab.click("#search-ask")
    tab.wait_for_selector("#hits li:first-child .quiet:has-text('cannot be shown')")
    first.write_bytes(content)


def test_curves_follow_a_run(page, site):
    tab = page()
    tab.click("#tab-training")
    tab.wait_for_function("document.querySelectorAll('#curves svg').length === 3")
    before = tab.locator("#curves polyline").first.get_attribute("points")
    with (site[2] / "first" / "log.jsonl").open("a") as log:
        log.write(json.dumps({"kind": "train", "step": 40, "loss": 1.0, "lr": 1e-3}) + "\n")
    tab.wait_for_function("(b) => document.querySelector('#curves polyline').getAttribute('points') !== b", arg=before)


def test_a_wrong_file_is_told_and_nothing_is_lost(page, picture, tmp_path):
    tab = page()
    upload(tab, picture)
    (tmp_path / "notes.txt").write_text("no picture")
    tab.set_input_files("#file", tmp_path / "notes.txt")
    assert "notes.txt" in tab.inner_text("#alert")
    assert tab.locator("[data-model=small] .bars").count() == 1
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"0" * 40)
    with tab.expect_response(lambda r: "/page/look" in r.url) as answer:
        tab.set_input_files("#file", tmp_path / "broken.png")
    assert answer.value.status in (400, 415)
    tab.wait_for_selector("#alert:not([hidden])")


def test_nothing_on_the_page_breaks_its_own_policy(page, picture):
    tab = page(strict=True)
    tab.set_input_files("#file", picture)
    shown = (
        "[data-model=small] .bars",
        "#step",
        "#attention[data-loaded=all]",
        "#fewer-answers .bars",
        "#clip-answers canvas",
    )
    for name, what in zip(TABS, (*shown, "#curves svg"), strict=True):
        tab.click(f"#tab-{name}")
        tab.wait_for_selector(what)


def test_by_keyboard_alone(page, picture):
    tab = page()
    upload(tab, picture)
    tab.focus("#tab-try")
    for name in TABS[1:3]:
        tab.keyboard.press("ArrowRight")
        assert tab.evaluate("document.activeElement.id") == f"tab-{name}"
    ready(tab)
    tab.wait_for_selector("#attention[data-loaded=all]")
    tab.focus("#attention")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowRight")
    assert "row 2, column 2" in tab.inner_text("#told")
    tab.keyboard.press("Escape")
    assert tab.inner_text("#told").startswith("Class token")


@pytest.mark.parametrize(("width", "locale"), [(1280, "zh-CN"), (375, "en-US")])
def test_everyone_can_use_it(page, picture, width, locale):
    tab = page(width, locale)
    upload(tab, picture)
    assert tab.evaluate("document.documentElement.lang") == ("zh-CN" if locale == "zh-CN" else "en")
    for name in TABS:
        go(tab, name) if name != "training" else tab.click("#tab-training")
        tab.wait_for_timeout(200)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than the window"
        found = Axe().run(tab).response["violations"]
        serious = [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")]
        assert not serious, (name, serious)


def test_the_language_and_the_theme_are_switched(page, picture):
    tab = page()
    upload(tab, picture)
    tab.click("#language")
    ready(tab)
    assert tab.inner_text("#tab-attention") == "注意力"
    before = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.click("#theme")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_a_server_that_is_gone_is_told(page, picture):
    tab = page()
    upload(tab, picture)
    tab.route("**/page/look**", lambda route: route.abort())
    tab.click("#samples button")
    tab.wait_for_selector("#alert:not([hidden])")
    assert "vitlab serve" in tab.inner_text("#alert")
