"""The page at / as people use it, in Chromium: every part, both languages, by mouse, by keyboard alone, on a phone."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from functools import partial
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image

import vitlab
from vitlab.explain import block_view, forward_view, query_attention, relevance
from vitlab.inference import fingerprint
from vitlab.layers.edit import Edit
from vitlab.learn import page_links
from vitlab.models.task import NumberTask
from vitlab.search import Index, update
from vitlab.serve.app import create_app
from vitlab.serve.model_pool import ServedModel
from vitlab.serve.page_samples import page_samples
from vitlab.serve.search_index import open_index
from vitlab.serve.settings import Settings
from vitlab.text.tokenizer import Tokenizer


def models() -> dict:
    torch.manual_seed(0)
    shape = dict(image_size=(24, 32), patch_size=4, channels=3, classes=3, width=32, depth=3, heads=2)
    vit = vitlab.create("vit_digits", **shape)
    vit.head.weight.data.normal_(std=0.5)
    vit.labels = ["<img src=x onerror=alert(1)>", "大熊猫", "dog"]
    tokenizer = Tokenizer.train(["a dog on a beach", "two cats"], vocab=530, context=16)
    clip = vitlab.create("clip_digits", **tokenizer.options)
    clip.tokenizer = tokenizer
    kind = dict(stem="conv", class_token=False, pooling="mean", layer_scale=0.1)
    conv = vitlab.create("vit_digits", **shape, **kind)
    number = vitlab.create("vit_digits", **{**shape, "classes": 1}, registers=2, positions="rotary", mlp="swiglu")
    number.task = NumberTask(mean=3.0, std=2.0)
    known = {"small": vit, "mae": vitlab.create("mae_digits"), "clip": clip, "conv": conv, "number": number}
    return known | {"swin": vitlab.create("swin_cifar")}


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
    (folder / "first" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    known = models()
    served = [ServedModel(name, model) for name, model in known.items()]
    index = index_of(known["clip"].eval(), tmp_path_factory.mktemp("search"))
    app = create_app(served, Settings(runs=str(folder)), open_index(index, served))
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=600))
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


@pytest.fixture(scope="module")
def tabs(tabs_at, site):
    return tabs_at(f"{site[0]}/", expected="Failed to load resource")  # tests look at what the server refuses


@pytest.fixture
def page(tabs):
    """The page as if in a fresh window. Complaints of the browser and requests to anywhere else are failures.

    The page's own policy forbids the scripts by which the tests look at it; `strict` leaves it in force.
    """

    def start(width: int = 1280, locale: str = "en-US", strict: bool = False, link: str = "", theme: str = "light"):
        size = {"width": width, "height": 900}
        tab = tabs.open(link, viewport=size, locale=locale, bypass_csp=not strict, color_scheme=theme)
        if not strict:
            ready(tab)
        return tab

    yield start
    tabs.end_test()


def ready(tab) -> None:
    """The image is open in the model, and all numbers of the picture are there."""
    tab.wait_for_function(
        "['Done.', '完成。'].includes(document.getElementById('status').textContent) && vitlab.data.now"
        " && (!vitlab.data.model.offers.includes('rows') || vitlab.data.rows)",
    )


def upload(tab, picture: Path) -> None:
    tab.evaluate("document.getElementById('status').textContent = ''")
    tab.set_input_files("#file", picture)
    ready(tab)


def set_state(tab, **patch) -> None:
    tab.evaluate("(patch) => vitlab.setState(patch)", patch)


def open_block(tab, **patch) -> dict[str, np.ndarray]:
    """The numbers of the open block, as the page has them."""
    set_state(tab, **patch)
    at = "(([l, h, t]) => { const b = vitlab.data.block; return b && b.layer === l && b.head === h && b.token === t; })"
    place = tab.evaluate("[vitlab.state.layer, vitlab.state.head, vitlab.state.token]")
    tab.wait_for_function(at, arg=place)
    found = tab.evaluate(
        "Object.fromEntries(Object.entries(vitlab.data.block).filter(([, v]) => v.length).map(([n, v]) => [n, [...v]]))"
    )
    return {name: np.array(values, np.float32) for name, values in found.items()}


def test_it_opens_with_the_first_sample_its_answer_and_its_heat(page, site):
    tab, model = page(), site[1]["small"]
    with_sample = page_samples()["cat"].read()
    scores = vitlab.predict(model, with_sample, top=3)[0].scores
    assert tab.evaluate("vitlab.state.sample") == "cat"
    assert tab.inner_text("#verdict") == f"{scores[0][0]}: {100 * scores[0][1]:.1f} %"
    shown = tab.locator("#answer .bars > span:not(.number)").all_inner_texts()
    assert shown == [label for label, _ in scores]
    first = model.labels.index(scores[0][0])
    heat = relevance(model, model.preprocess(with_sample)[None], first)[0].flatten()
    np.testing.assert_allclose(tab.evaluate("[...vitlab.data.heat.data]"), heat, rtol=1e-4, atol=1e-6)
    assert tab.evaluate("vitlab.state.token") == 1 + int(heat.argmax())  # one class token; the brightest patch
    assert tab.locator("main img[src=x]").count() == 0  # a label of this model is markup, if it is taken for that


@pytest.mark.parametrize("changes", [{}, {"temperature": 2.0, "drop_heads": [[1, 0]], "mask_patches": [3, 9]}])
def test_every_number_of_a_block_is_pythons(page, site, picture, changes):
    tab, model = page(), site[1]["small"]
    upload(tab, picture)
    x, edit = model.preprocess(picture)[None], Edit.from_json(changes)
    rows = tab.evaluate_handle("vitlab.data.rows")
    set_state(tab, edit=changes)
    if changes:  # the knobs rest before the pass is run again, and then the rows of the token
        again = "(before) => vitlab.data.now !== vitlab.data.base && vitlab.data.rows !== before"
        tab.wait_for_function(again, arg=rows)
    found = open_block(tab, layer=1, head=1, token=20, step="scores")
    ours = block_view(model, x, layer=1, head=1, token=20, edit=edit).arrays()
    assert set(found) == set(ours)
    for name, value in ours.items():
        np.testing.assert_allclose(found[name], value.flatten(), rtol=1e-5, atol=1e-5, err_msg=name)
    view = forward_view(model, x, edit)
    now = tab.evaluate("vitlab.data.now")
    np.testing.assert_allclose(now["logits"], view.logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(now["by_depth"], view.by_depth, rtol=1e-5, atol=1e-5)
    rows = np.array(tab.evaluate("[...vitlab.data.rows.data]"))
    np.testing.assert_allclose(rows, query_attention(model, x, 20, edit).flatten(), rtol=1e-5, atol=1e-5)
    best = int(ours["scores"].argmax())
    assert f"= {ours['scores'][best]:.4f}".replace("-", "−") in tab.inner_text(".stage[data-step=scores] .worked")
    products = (ours["q"] * ours["keys"][best]).tolist()
    written = tab.locator(".stage[data-step=scores] td:nth-child(4)").all_inner_texts()
    assert written == [f"{value:.3f}".replace("-", "−") for value in products]


def test_the_value_under_the_pointer_and_the_sum_worked_out(page, site, picture):
    tab, model = page(), site[1]["small"]
    upload(tab, picture)
    open_block(tab, layer=0, head=0, token=5, step="scores")
    ours = block_view(model, model.preprocess(picture)[None], layer=0, head=0, token=5)
    grid = tab.locator(".stage[data-step=scores] canvas.matrix").nth(1)  # the first is the class token's
    box = grid.bounding_box()
    grid.hover(position={"x": 2.5 * box["width"] / 8, "y": 4.5 * box["height"] / 6})  # once it stands still
    key = 1 + 4 * 8 + 2
    assert tab.inner_text("#tip") == f"patch in row 5, column 3: s = {ours.scores[key]:.4f}".replace("-", "−")
    dot = float(ours.q @ ours.keys[key])
    line = tab.inner_text(".stage[data-step=scores] .worked-line")
    assert line == f"patch in row 5, column 3: {dot:.3f} / √16 = {ours.scores[key]:.4f}".replace("-", "−")
    grid.focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    assert tab.inner_text("#spoken").startswith("patch in row 6, column 4")
    tab.keyboard.press("Enter")
    tab.wait_for_function("vitlab.state.token === 44")


def test_knobs_move_the_answer_and_the_unchanged_one_stays_beside_it(page, site, picture):
    tab, model = page(), site[1]["small"]
    upload(tab, picture)
    before = vitlab.predict(model, picture)[0].scores[0]
    tab.locator("#temperature").evaluate("(s) => { s.value = 2; s.dispatchEvent(new Event('input')); }")
    tab.check("#sqrt")
    tab.select_option("#positions", "removed")
    tab.click("#drop-head")
    tab.check("#paint")
    box = tab.locator("#photo").bounding_box()
    tab.mouse.move(box["x"] + 0.5 * box["width"] / 8, box["y"] + 0.5 * box["height"] / 6)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 1.5 * box["width"] / 8, box["y"] + 0.5 * box["height"] / 6)
    tab.mouse.up()
    changes = tab.evaluate("vitlab.state.edit")
    expected = {"temperature": 4, "scale_by_sqrt_d": False, "positions": "removed", "drop_heads": [[0, 0]]}
    assert changes == expected | {"mask_patches": [0, 1]} | ({"seed": 0} if "seed" in changes else {})
    logits = forward_view(model, model.preprocess(picture)[None], Edit.from_json(changes)).logits
    close = "(wanted) => vitlab.data.now.logits.every((v, i) => Math.abs(v - wanted[i]) < 1e-4)"
    tab.wait_for_function(close, arg=logits.tolist())
    label = model.labels[int(logits.argmax())]
    assert tab.inner_text("#verdict") == f"{label}: {100 * float(logits.softmax(-1).max()):.1f} %"
    assert tab.inner_text("#unedited") == f"Unchanged, the model says {before[0]}: {100 * before[1]:.1f} %."
    tab.click("#reset")
    tab.wait_for_function("vitlab.data.now === vitlab.data.base")
    assert tab.locator("#unedited").count() == 0


def test_a_link_restores_the_state(page, site):
    changes = json.dumps({"temperature": 0.5})
    link = f"#sample=moose&model=small&layer=3&head=2&token=7&step=mix&edit={quote(changes)}&heat=attention"
    tab = page(link=link)
    tab.wait_for_selector(".stage[data-step=mix].active")
    state = tab.evaluate("vitlab.state")
    wanted = dict(sample="moose", model="small", layer=2, head=1, token=7, step="mix", heat="attention", panel=None)
    wanted |= dict(story=None, scene=0)
    assert state == wanted | {"edit": {"temperature": 0.5}}
    assert set(tab.evaluate("location.hash").split("&")) >= {"layer=3", "head=2", "token=7", "step=mix"}
    tab.evaluate("location.hash = '#sample=moose&model=small&layer=1&step=block&token=4'")
    tab.wait_for_function("vitlab.state.layer === 0 && vitlab.state.step === 'block' && vitlab.state.token === 4")
    other = page(link="#sample=nobody&model=none&layer=99&head=99&token=99999&step=x&edit=[1]&panel=y")
    state = other.evaluate("vitlab.state")
    assert state["model"] == "small" and state["layer"] == 2 and state["head"] == 1 and state["edit"] == {}
    assert state["sample"] == "cat" and state["step"] == "image" and 0 < state["token"] < 49


def test_a_link_opens_a_scene_of_a_story(page):
    tab = page(link="#sample=moose&model=small&story=class-token&scene=2")
    tab.wait_for_selector("#story .story-dots li:nth-child(2) [aria-current]")
    assert tab.evaluate("[vitlab.state.step, vitlab.state.sample]") != ["image", "cat"]
    tab.click("#story [data-do=next]")
    tab.wait_for_selector("#story .story-dots li:nth-child(3) [aria-current]")
    tab.wait_for_function("/story=class-token&scene=3/.test(location.hash)")
    tab.evaluate("location.hash = '#sample=moose&model=small'")
    tab.wait_for_selector("#story", state="hidden")
    tab.click("#stories")
    tab.wait_for_selector("#story .story-list")
    tab.keyboard.press("Escape")
    tab.wait_for_selector("#story", state="hidden")
    tab.wait_for_function("!location.hash.includes('story')")


@pytest.mark.parametrize(("step", "sign"), [("qkv", "q"), ("mix", "SA(z)"), ("fc2", "MLP(z′)")])
def test_a_number_opens_into_the_sum_behind_it(page, site, step, sign):
    tab = page(link=f"#sample=moose&model=small&layer=2&head=2&token=7&step={step}")
    area = tab.locator(f".stage[data-step={step}] .opens .matrix[aria-label^='{sign},']").first
    area.focus()
    tab.keyboard.press("ArrowRight")  # the first number
    tab.keyboard.press("Enter")
    tab.wait_for_selector(f".stage[data-step={step}] .opened:not([hidden])")
    sentence = tab.inner_text(f".stage[data-step={step}] .opened:not([hidden]) .worked-line")
    name = {"qkv": "q", "mix": "mixed", "fc2": "fc2"}[step]
    shown = tab.evaluate("(name) => vitlab.data.block[name][0]", name)
    assert sentence.startswith(f"{sign}[1] = Σ")
    assert float(sentence.rpartition("=")[2].replace("−", "-")) == pytest.approx(shown, abs=1e-4)
    tab.click(f".stage[data-step={step}] .opened:not([hidden]) button")
    assert tab.locator(f".stage[data-step={step}] .opened:not([hidden])").count() == 0


def test_a_block_opens_by_growing_and_not_where_motion_is_unwanted(page):
    tab = page(link="#sample=moose&model=small")
    tab.emulate_media(reduced_motion="reduce")
    count = """(layer) => new Promise((done) => {
      vitlab.setState({ layer, step: "norm1" });
      const look = () => document.querySelector(".block.open .stage") && vitlab.data.block?.layer === layer
        ? done(document.getAnimations().filter((one) => one.constructor === Animation).length)
        : requestAnimationFrame(look);
      look();
    })"""
    assert tab.evaluate(count, 1) == 0
    tab.evaluate("vitlab.setState({ step: 'block' })")
    tab.emulate_media(reduced_motion="no-preference")
    assert tab.evaluate(count, 2) > 3


def test_by_keyboard_alone(page, picture):
    tab = page()
    upload(tab, picture)
    tab.focus("#main")
    steps = []
    while not steps or steps[-1] != "answer":
        steps.append(tab.evaluate("vitlab.state.step"))
        if steps[-1] != "answer":
            tab.keyboard.press("ArrowRight")
    assert steps[:6] == ["image", "patches", "embed", "prefix", "positions", "norm1"]
    assert steps[18:] == ["block", "block", "norm", "pool", "head", "answer"]  # the first block step by step
    tab.keyboard.press("ArrowLeft")
    assert tab.evaluate("vitlab.state.step") == "head"
    for key, name, value in [("b", "layer", 0), ("Shift+B", "layer", 2), ("h", "head", 1), ("Shift+H", "head", 0)]:
        tab.keyboard.press(key)
        assert tab.evaluate(f"vitlab.state.{name}") == value, key
    tab.keyboard.press("o")
    tab.wait_for_selector(".block.open .stage")
    tab.keyboard.press("d")
    assert tab.evaluate("vitlab.state.edit") == {"drop_heads": [[2, 0]]}
    tab.keyboard.press("r")
    assert tab.evaluate("vitlab.state.edit") == {}
    set_state(tab, token=1)
    tab.focus("#photo")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("vitlab.state.token") == 1 + 8 + 1
    tab.keyboard.press("m")
    assert tab.evaluate("vitlab.state.edit") == {"mask_patches": [9]}
    tab.focus("#main")
    tab.keyboard.press("?")
    tab.wait_for_selector("#panel[open]")
    tab.keyboard.press("Escape")
    tab.wait_for_function("vitlab.state.panel === null")


def test_it_plays_to_the_end(page):
    tab = page(link="#step=norm1&layer=3")
    tab.select_option("#speed", "8")
    tab.focus("#main")
    tab.keyboard.press(" ")
    assert tab.get_attribute("#play", "aria-pressed") == "true"
    tab.wait_for_function("vitlab.state.step === 'qkv'")
    tab.wait_for_function("vitlab.frames.count > 3")
    tab.keyboard.press(" ")
    assert tab.get_attribute("#play", "aria-pressed") == "false"
    set_state(tab, step="head")
    tab.click("#play")
    tab.wait_for_function("document.getElementById('play').getAttribute('aria-pressed') === 'false'")
    assert tab.evaluate("vitlab.state.step") == "answer"


def test_words_follow_the_model(page, site):
    tab = page(link="#step=embed")
    assert "one matrix E" in tab.inner_text("#step-why") and tab.inner_text("#step-equation") == "x_p E"
    set_state(tab, step="prefix")
    assert tab.inner_text("#step-why").endswith("class token.")
    tab.evaluate("document.getElementById('status').textContent = ''")
    tab.select_option("#model", "conv")  # convolutional stem, no class token, LayerScale
    ready(tab)
    set_state(tab, step="embed")
    assert "convolutions" in tab.inner_text("#step-why") and "stem(x)" in tab.inner_text("#step-equation")
    assert tab.locator(".step[data-step=prefix]").count() == 0 and "x_class" not in tab.inner_text("main")
    set_state(tab, step="pool")
    assert "no class token" in tab.inner_text("#step-why")
    open_block(tab, layer=0, head=0, token=3, step="add1")
    assert "λ₁" in tab.inner_text(".stage[data-step=add1]")


def test_fewer_tokens_by_every_method(page, picture):
    tab = page()
    upload(tab, picture)
    tab.click("[data-panel=fewer]")
    for method in ("evit", "random", "tome"):
        tab.wait_for_selector("#method")
        tab.select_option("#method", method)
        tab.wait_for_function("document.querySelectorAll('#fewer-answers .bars').length === 2")
    tab.locator("#amount").evaluate("(s) => { s.value = 0; s.dispatchEvent(new Event('input')); }")
    tab.wait_for_function("document.querySelector('label:has(#after) span').textContent.includes('49 tokens')")
    answers = tab.locator("#fewer-answers .bars").all_inner_texts()
    assert answers[0] == answers[1]  # nothing was removed


def test_masks_tokens_and_sentences(page, picture):
    tab = page()
    upload(tab, picture)
    tab.click("[data-panel=mae]")
    tab.wait_for_selector("#mae-made[data-done='1']")
    box = tab.locator("#mae-seen").bounding_box()
    tab.mouse.move(box["x"] + 5, box["y"] + 5)
    tab.mouse.down()
    tab.mouse.up()
    tab.wait_for_selector("#mae-made[data-done='2']")
    tab.click("#panel-close")
    tab.click("[data-panel=sentences]")
    tab.fill("#sentences", "a dog\n<b>two</b> cats")
    tab.click("#ask")
    tab.wait_for_function("document.querySelectorAll('#clip-answers canvas').length === 2")
    assert "<b>two</b> cats" in tab.inner_text("#clip-answers")


def test_a_sentence_or_the_picture_at_hand_finds_pictures_in_order(page, site, picture):
    tab, clip = page(), site[1]["clip"]
    upload(tab, picture)
    tab.click("[data-panel=search]")

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
    tab.click("#search-like")
    tab.wait_for_selector("#hits[data-drawn='your image']")
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
    tab = page(link="#panel=training")
    tab.wait_for_function("document.querySelectorAll('#curves svg').length === 3")
    before = tab.locator("#curves polyline").first.get_attribute("points")
    with (site[2] / "first" / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps({"kind": "train", "step": 40, "loss": 1.0, "lr": 1e-3}) + "\n")
    tab.wait_for_function("(b) => document.querySelector('#curves polyline').getAttribute('points') !== b", arg=before)


def test_a_wrong_file_is_told_and_nothing_is_lost(page, picture, tmp_path):
    tab = page()
    upload(tab, picture)
    (tmp_path / "notes.txt").write_text("no picture", encoding="utf-8")
    tab.set_input_files("#file", tmp_path / "notes.txt")
    assert "notes.txt" in tab.inner_text("#alert")
    assert tab.locator("#answer .bars").count() == 1
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"0" * 40)
    with tab.expect_response(lambda r: "/page/look" in r.url) as answer:
        tab.set_input_files("#file", tmp_path / "broken.png")
    assert answer.value.status in (400, 415)
    tab.wait_for_selector("#alert:not([hidden])")


def test_nothing_on_the_page_breaks_its_own_policy(page):
    tab = page(strict=True)
    tab.wait_for_selector("#verdict")
    tab.click(".column.block .step >> nth=1")
    tab.wait_for_selector(".block.open .stage[data-step=add2]")
    shown = dict(heads="#position-similarity", fewer="#fewer-answers .bars", mae="#mae-made", alike="#similarity")
    for name, what in (shown | dict(sentences="#clip-answers canvas", training="#curves svg")).items():
        tab.click(f"[data-panel={name}]")
        tab.wait_for_selector(what)
        tab.click("#panel-close")


@pytest.mark.parametrize(
    ("width", "locale", "theme"), [(1280, "zh-CN", "light"), (375, "en-US", "dark"), (375, "zh-CN", "light")]
)
def test_everyone_can_use_it(page, axe_findings, width, locale, theme):
    tab = page(width, locale, theme=theme)
    assert tab.evaluate("document.documentElement.lang") == ("zh-CN" if locale == "zh-CN" else "en")
    places = [dict(step="image"), dict(step="scores", layer=1), dict(panel="heads")]
    for place in places + ([dict(panel=name) for name in ("compare", "alike", "training")] if width > 1000 else []):
        set_state(tab, **place)
        if "layer" in place:
            tab.wait_for_selector(".stage[data-step=scores].active")
        tab.wait_for_function(
            "!document.querySelector('#panel-body[aria-busy]')"
            " && !document.getAnimations().some((one) => one.effect.getTiming().iterations !== Infinity)"
        )
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, f"{place} is wider than the window"
        serious = axe_findings(tab)
        assert not serious, (place, serious)


def test_an_image_that_the_server_forgot_is_sent_again(page):
    tab = page()
    before = tab.evaluate("vitlab.data.look.id")
    tab.evaluate("vitlab.data.look.id = 'forgotten'")
    set_state(tab, token=3)
    tab.wait_for_function("(b) => vitlab.data.look && vitlab.data.look.id.length > 9 && vitlab.data.rows", arg=before)
    assert tab.evaluate("vitlab.data.look.id") not in (before, "forgotten")
    assert tab.is_hidden("#alert")


def test_a_change_that_the_model_cannot_follow_is_told_and_undone(page):
    tab = page()
    set_state(tab, edit={"drop_heads": [[99, 0]]})
    tab.wait_for_selector("#alert:not([hidden])")
    assert "layer 99" in tab.inner_text("#alert")
    tab.click("#reset")
    tab.wait_for_selector("#alert", state="hidden")


def test_models_of_other_kinds(page, site, picture):
    tab, model = page(link="#model=number&layer=2&step=scores"), site[1]["number"]
    upload(tab, picture)
    value = forward_view(model, model.preprocess(picture)[None]).scores
    assert tab.inner_text("#verdict") == f"Value: {float(value):.3f}".replace("-", "−")
    tab.wait_for_selector(".stage[data-step=scores].active")
    assert "rotated" in tab.inner_text("#step-why") and "Rq" in tab.inner_text("#step-equation")
    tab = page(link="#model=swin")
    scores = vitlab.predict(site[1]["swin"], page_samples()["cat"].read(), top=5)[0].scores
    assert tab.locator("#answer .number").all_inner_texts() == [f"{100 * p:.1f} %" for _, p in scores]
    assert "not a plain ViT" in tab.inner_text("#network") and tab.is_hidden("#transport")


def test_the_language_and_the_theme_are_switched(page):
    tab = page()
    tab.click("#language")
    assert tab.inner_text("[data-panel=fewer]") == "减少 token"
    before = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.click("#theme")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_every_word_is_there_in_both_languages(page):
    tab = page()
    words = tab.evaluate("import('/page/files/text.js').then((text) => text.WORDS)")
    for key, both in words.items():
        assert len(both) == 2 and all(both), key
        assert set(re.findall(r"{\w+}", both[0])) == set(re.findall(r"{\w+}", both[1])), key


def test_a_server_that_is_gone_is_told(page):
    tab = page()
    tab.route("**/page/look**", lambda route: route.abort())
    tab.click("#samples button:nth-child(2)")
    tab.wait_for_selector("#alert:not([hidden])")
    assert "vitlab serve" in tab.inner_text("#alert")


def test_a_step_and_its_exercise_know_each_other(page):
    """The fragment that `vitlab learn` prints opens the page where the exercise is shown, and there it is named."""
    tab = page(link="#model=small")
    known = tab.evaluate(
        "import('/page/files/steps.js').then((s) => { const m = vitlab.data.models.find((one) => one.name === 'small');"
        " return ['block', ...s.stepsBefore(m), ...s.stepsInside(m), ...s.stepsAfter(m)]; })"
    )
    links = page_links()
    assert sorted(step for link in links for step in link["steps"]) == sorted(set(known) - {"norm_pre", "pre_logits"})
    address, opened = tab.url.partition("#")[0], set()
    for link in links:
        fragment, place = f"{link['fragment']}&model=small", "#step-exercise" if link["steps"] else "#panel-body"
        if place in opened:
            tab.evaluate("(fragment) => { location.hash = fragment; }", fragment)
        else:
            tab.goto("about:blank")  # another fragment alone would not open the page again
            tab.goto(f"{address}{fragment}")
            ready(tab)
            opened.add(place)
        tab.wait_for_function(
            "([place, command]) => document.querySelector(place).textContent.includes(command)",
            arg=[place, link["command"]],
        )
    chinese = page(link="#step=gelu&model=small", locale="zh-CN")
    assert chinese.inner_text("#step-exercise") == "亲手写：vitlab learn mlp · 编码器块中的 MLP，式 3"
