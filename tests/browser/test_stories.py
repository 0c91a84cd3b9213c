"""The guided stories in Chromium: each to its end, in both languages; their numbers against Python's; keys; playing."""

from __future__ import annotations

import io
import re
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image

import vitlab
from vitlab.explain.distance import attention_statistics
from vitlab.explain.inputs import as_batch
from vitlab.explain.weights import position_similarity
from vitlab.layers.edit import Edit
from vitlab.layers.trace import Trace
from vitlab.models.base import evaluating
from vitlab.serve.app import create_app
from vitlab.serve.model_pool import ServedModel, open_models
from vitlab.serve.page_queries import model_info
from vitlab.serve.page_samples import page_samples
from vitlab.serve.settings import Settings
from vitlab.text.tokenizer import Tokenizer

STORIES = ("patch", "class-token", "positions", "heads", "fewer", "mae", "dino", "clip")


def models() -> dict[str, Any]:
    torch.manual_seed(0)
    shape = dict(image_size=(24, 32), patch_size=4, channels=3, width=32, depth=3, heads=2)
    vit: Any = vitlab.create("vit_digits", **shape, classes=3)
    for block in vit.blocks:
        block.attention.qkv.weight.data.normal_(std=0.3)
    vit.positions.table.data.normal_(std=0.5)
    vit.head.weight.data.normal_(std=0.5)
    vit.labels = ["cat", "大熊猫", "dog"]
    tokenizer = Tokenizer.train(["a photo of a cat", "two ships"], vocab=530, context=16)
    clip: Any = vitlab.create("clip_digits", **tokenizer.options)
    clip.tokenizer = tokenizer
    dino = vitlab.create("vit_digits", **shape, classes=0)
    return {"small": vit, "mae": vitlab.create("mae_digits"), "dino": dino, "clip": clip}


@pytest.fixture(scope="module")
def site():
    """A server in a thread: its address and its models."""
    known = models()
    server = uvicorn.Server(
        uvicorn.Config(
            create_app([ServedModel(*one) for one in known.items()], Settings()),
            log_level="warning",
            timeout_keep_alive=600,
        )
    )
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}", known
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def modules(browser, site):
    """A page that can import the modules."""
    tab = browser.new_page(bypass_csp=True)
    tab.goto(f"{site[0]}/page/files/icon.svg")
    yield tab
    tab.context.close()


MEASURES = """async ([attention, shape, similarity, grid]) => {
  const m = await import("/page/files/story_measures.js"), A = { data: Float32Array.from(attention), shape };
  const about = (reads) => ({ grid, prefix: ["class", "register"], reads });
  return {
    token: [...m.readerRow(A, about(1))], mean: [...m.readerRow(A, about(null))], row: [...m.headRow(A, 2, 5)],
    distances: m.meanDistances(A, about(null)), even: m.evenDistance(grid), spreads: m.spreads(A),
    habits: m.habits(A, about(null)),
    places: m.similarityByPlace({ data: Float32Array.from(similarity), shape: [...grid, ...grid] }),
    overlap: m.overlap(m.headRow(A, 0, 3), m.headRow(A, 1, 3)), cosine: m.cosine([1, 2, 3], [-2, 0.5, 4]),
    settled: [[[1, 0], [0, 1], [0, 1]], [[0, 1], [0, 1]], [[0, 1], [1, 0], [0, 1]]].map(m.settledAt),
  };
}"""


def test_measures_equal_numpy_loops(modules):
    heads, rows, columns, prefix = 3, 3, 5, 2
    rng = np.random.default_rng(0)
    N = prefix + rows * columns
    A = np.exp(2 * rng.normal(size=(heads, N, N)))
    A = (A / A.sum(-1, keepdims=True)).astype(np.float32)
    like = rng.normal(size=(rows * columns, rows * columns)).astype(np.float32)
    argument = [A.ravel().tolist(), list(A.shape), like.ravel().tolist(), [rows, columns]]
    found = modules.evaluate(MEASURES, argument)
    close = lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    close(found["token"], A[:, 1].mean(0))
    close(found["mean"], A[:, prefix:].mean((0, 1)))
    close(found["row"], A[2, 5])
    places = [(r, c) for r in range(rows) for c in range(columns)]
    far = np.array([[np.hypot(a[0] - b[0], a[1] - b[1]) for b in places] for a in places])
    patches = A[:, prefix:, prefix:].astype(float)
    close(found["distances"], ((patches * far).sum(-1) / patches.sum(-1)).mean(-1))
    close(found["even"], far.mean())
    close(found["spreads"], np.exp(-(A * np.log(A)).sum(-1).mean(-1)))
    for h, habit in enumerate(found["habits"]):
        shares = {}
        for down, right in [(d, r) for d in (-1, 0, 1) for r in (-1, 0, 1) if (d, r) != (0, 0)]:
            pairs = [
                (i, places.index((r + down, c + right)))
                for i, (r, c) in enumerate(places)
                if (r + down, c + right) in places
            ]
            shares[down, right] = np.mean([patches[h, i, j] for i, j in pairs])
        assert tuple(habit["offset"]) == max(shares, key=lambda offset: shares[offset])
        close(habit["share"], max(shares.values()))
    kinds = {"near": [], "far": [], "row": [], "column": [], "elsewhere": []}
    for i, (r, c) in enumerate(places):
        for j, (r2, c2) in enumerate(places):
            if i != j:
                kinds["row" if r == r2 else "column" if c == c2 else "elsewhere"].append(like[i, j])
                if far[i, j] == 1:
                    kinds["near"].append(like[i, j])
                if far[i, j] >= columns / 2:
                    kinds["far"].append(like[i, j])
    for kind, values in kinds.items():
        close(found["places"][kind], np.mean(values))
    close(found["overlap"], np.minimum(A[0, 3], A[1, 3]).sum())
    close(found["cosine"], 11 / np.sqrt(14 * 20.25))
    assert found["settled"] == [1, 0, 2]


WORDS = """async () => {
  const w = await import("/page/files/story_words.js"), facts = { n: 3, who: { en: "head {n}", zh: "第 {n} 个头" } };
  let missing = null;
  try { w.fill("{nothing}", facts, "en"); } catch (error) { missing = error.message; }
  return {
    filled: ["en", "zh"].map((language) => w.fill("{who}: {n}", facts, language)), missing,
    decimals: [w.decimal(-0.2), w.decimal(-0.001), w.decimal(2.345, 1)], place: w.place(13, [3, 5]),
    seconds: [w.readingSeconds("one two three", "en"), w.readingSeconds("两个 token。", "zh")],
  };
}"""


def test_texts_are_filled_with_facts_and_a_missing_fact_is_an_error(modules):
    found = modules.evaluate(WORDS)
    assert found["filled"] == ["head 3: 3", "第 3 个头: 3"]
    assert 'no fact "nothing"' in found["missing"]
    assert found["decimals"] == ["−0.20", "0.00", "2.3"]
    assert found["place"] == {"en": "row 3, column 4", "zh": "第 3 行第 4 列"}
    assert found["seconds"] == pytest.approx([3 * 60 / 200, 3 * 60 / 300])


@pytest.fixture(scope="module")
def tabs(tabs_at, site):
    return tabs_at(f"{site[0]}/")


@pytest.fixture
def page(tabs):
    """The page as if in a fresh window. Complaints of the browser and requests to anywhere else are failures."""

    def start(locale: str = "en-US", width: int = 1280, **options: Any):
        tab = tabs.open(viewport={"width": width, "height": 900}, locale=locale, **options)
        tab.wait_for_selector("#verdict")
        return tab

    yield start
    tabs.end_test()


def open_stories(tab) -> None:
    tab.click("#stories")
    tab.wait_for_selector(".story-choice")


def begin(tab, story: str) -> None:
    tab.click(f".story-choice[data-story='{story}']")
    tab.wait_for_selector("#story:not([aria-busy]) .story-text p")


def scene_text(tab) -> str:
    return tab.inner_text(".story-text").replace("\u00a0", " ")


def following_scene(tab) -> None:
    before = tab.inner_text(".story-text")
    tab.click("[data-do=next]")
    tab.wait_for_function("(before) => document.querySelector('.story-text').innerText !== before", arg=before)


def play_through(tab) -> list[str]:
    """The text of every scene, answers included."""
    texts = []
    while True:
        if tab.is_visible("[data-do=reveal]"):
            question = scene_text(tab)
            tab.click("[data-do=reveal]")
            assert scene_text(tab).startswith(question)
            assert len(scene_text(tab)) > len(question)
        texts.append(scene_text(tab))
        if tab.is_disabled("[data-do=next]"):
            return texts
        following_scene(tab)


def check_texts(texts: list[str], language: str) -> None:
    assert 6 <= len(texts) <= 10
    chinese = [len(re.findall(r"[\u4e00-\u9fff]", text)) for text in texts]
    for text, count in zip(texts, chinese, strict=True):
        assert not re.search(r"[{}]|undefined|NaN|null|\[object", text), text
        assert count > 10 if language == "zh" else count == 0 or "大熊猫" in text, text
    words = sum(chinese) if language == "zh" else sum(len(text.split()) for text in texts)
    assert 200 < words < (650 if language == "zh" else 350)  # about two minutes


def test_every_story_plays_to_its_end(page):
    tab = page()
    open_stories(tab)
    assert tab.locator(".story-choice").count() == len(STORIES)
    for story in STORIES:
        begin(tab, story)
        texts = play_through(tab)
        check_texts(texts, "en")
        assert tab.locator(".story-dots button").count() == len(texts)
        tab.click("[data-do=all]")


CHINESE = """async () => {
  const load = (name) => import(`/page/files/${name}.js`), { STORIES, suits } = await load("stories");
  const { questions } = await load("story_questions"), { fill } = await load("story_words"), found = {};
  for (const story of STORIES) {
    const about = vitlab.data.models.find((model) => suits(story, model)), { source } = vitlab;
    const ask = questions(source, await source.open(about.name, vitlab.data.image), about);
    const facts = await story.facts(ask);
    found[story.name] = await Promise.all(story.scenes.map(async (scene) => {
      const more = { ...facts, ...(await scene.facts?.(ask, facts)) };
      return [scene, scene.reveal].filter(Boolean).map(({ zh }) => fill(zh, more, "zh")).join(" ");
    }));
  }
  return found;
}"""


def test_every_story_has_its_texts_in_chinese(page):
    tab = page("zh-CN", bypass_csp=True)
    found = tab.evaluate(CHINESE)
    assert tuple(found) == STORIES
    for texts in found.values():
        check_texts(texts, "zh")
    open_stories(tab)
    begin(tab, "mae")
    assert [text.split() for text in play_through(tab)] == [
        text.replace("\u00a0", " ").split() for text in found["mae"]
    ]


@pytest.fixture(scope="module")
def cat(site):
    """The model of the first stories, and the page's first image as it sees it."""
    model = site[1]["small"].eval()
    return model, as_batch(model, Image.open(io.BytesIO(page_samples()["cat"].read()))).images


def probabilities(model, x, edit: Edit | None = None) -> np.ndarray:
    with evaluating(model):
        return model(x, edit=edit)[0].softmax(-1).numpy()


def test_what_stories_say_is_what_python_computes(page, cat):
    model, x = cat
    tab = page()
    open_stories(tab)
    begin(tab, "patch")
    texts = play_through(tab)
    trace = Trace("attention", layers=[-1])
    with evaluating(model):
        model(x, trace=trace)
    patch = int(trace["attention", -1][0, :, 0, 1:].mean(0).argmax())
    full, without = probabilities(model, x), probabilities(model, x, Edit().mask_patches([patch]))
    best = int(full.argmax())
    label = model.labels[best]
    assert f"We follow the one in row {patch // 8 + 1}, column {patch % 8 + 1}." in texts[1]
    assert f"the answer is {label}, {100 * full[best]:.1f} %." in texts[-1]
    assert f"{label} gets {100 * without[best]:.1f} %." in texts[-1]
    assert tab.inner_text("#unedited").endswith(
        f"{label}: {100 * full[best]:.1f} %."
    )  # the picture shows the same pass

    tab.click("[data-do=all]")
    begin(tab, "heads")
    following_scene(tab)
    following_scene(tab)
    distance = attention_statistics(model, x).distance / model.config.patch_size
    found = re.findall(r"[Hh]ead (\d) of block (\d): (\d+\.\d)", scene_text(tab))
    for (head, block, value), place in zip(found, (distance.argmin(), distance.argmax()), strict=True):
        assert (int(block) - 1) * 2 + int(head) - 1 == int(place)
        assert float(value) == pytest.approx(float(distance.flatten()[place]), abs=0.051)

    tab.click("[data-do=all]")
    begin(tab, "positions")
    texts = play_through(tab)
    similarity = position_similarity(model).numpy()
    pairs = [(a, b) for a in np.ndindex(6, 8) for b in np.ndindex(6, 8) if abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1]
    near = float(np.mean([similarity[a + b] for a, b in pairs]))
    assert f"Neighbours have a cosine of {near:.2f}".replace("-", "−") in texts[2]
    removed = probabilities(model, x, Edit.from_json({"positions": "removed"}))
    assert f"{model.labels[removed.argmax()]}, {100 * removed.max():.1f} %." in texts[4]
    shuffled = probabilities(model, x, Edit.from_json({"positions": "shuffled", "seed": 0}))
    assert f"{model.labels[shuffled.argmax()]}, {100 * shuffled.max():.1f} %." in texts[5]


def test_keys_lead_through_a_story_and_leaving_it_undoes_its_edits(page):
    tab = page()
    tab.evaluate("vitlab.setState({ edit: { temperature: 2 } })")
    current = lambda: int(tab.get_attribute(".story-dots [aria-current]", "aria-label").split()[1])
    at = lambda n: tab.wait_for_selector(f".story-dots [aria-current][aria-label^='Scene {n} ']")
    tab.focus("#stories")
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".story-choice")
    for _ in range(4):  # the close button, then the first three stories
        tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.dataset.story") == "positions"
    tab.keyboard.press("Enter")
    at(1)
    tab.keyboard.press("ArrowRight")
    at(2)
    tab.keyboard.press("ArrowLeft")
    at(1)
    tab.keyboard.press("End")
    at(8)
    tab.keyboard.press("Home")
    at(1)
    for n in range(2, 7):
        tab.keyboard.press("ArrowRight")
        at(n)
    assert current() == 6
    assert tab.evaluate("vitlab.state.edit") == {"positions": "shuffled", "seed": 0}
    tab.keyboard.press("Escape")
    assert tab.is_hidden("#story")
    assert tab.evaluate("document.activeElement.id") == "stories"
    assert tab.evaluate("vitlab.state.edit") == {"temperature": 2}


def test_a_story_plays_by_itself_and_stops_at_its_end(page):
    tab = page(reduced_motion="reduce")
    tab.clock.install()
    open_stories(tab)
    begin(tab, "clip")
    tab.keyboard.press("p")
    assert tab.inner_text("[data-do=play]") == "Pause"
    scenes, answers = [1], 0
    for _ in range(120):  # of 2 s each: far more than the story takes
        tab.clock.run_for(2000)
        scene = int(tab.get_attribute(".story-dots [aria-current]", "aria-label").split()[1])
        scenes += [scene] * (scene != scenes[-1])
        answers += tab.locator(".story-text p").count() == 2
        if tab.inner_text("[data-do=play]") == "Play":
            break
    assert scenes == list(range(1, 9))
    assert answers > 0  # the question's answer came by itself
    tab.click("[data-do=panel]")
    assert tab.is_visible("#sentences")
    assert tab.is_hidden("#story")


def test_the_card_has_no_serious_findings_of_axe(page, axe_findings):
    tab = page(width=375, color_scheme="dark", bypass_csp=True)
    open_stories(tab)
    found = axe_findings(tab, "#story")
    begin(tab, "mae")
    assert found + axe_findings(tab, "#story") == []


def test_a_story_goes_on_with_another_image(page):
    tab = page()
    open_stories(tab)
    begin(tab, "patch")
    following_scene(tab)
    before = scene_text(tab)
    tab.click("[data-sample=moose]")
    tab.wait_for_function("(before) => document.querySelector('.story-text').innerText !== before", arg=before)
    tab.wait_for_selector(".story-dots [aria-current][aria-label^='Scene 2 ']")


SUITED = """async (models) => {
  const { STORIES, suits } = await import("/page/files/stories.js");
  return STORIES.filter((story) => models.some((model) => suits(story, model))).map(({ name }) => name);
}"""


@pytest.mark.filterwarnings("ignore:bundled.dino")  # holds the encoder only
def test_stories_without_their_model_say_what_to_start(browser, site):
    context = browser.new_context(bypass_csp=True)
    tab = context.new_page()
    tab.route(
        "**/page/models", lambda route: route.fulfill(json=[m for m in route.fetch().json() if m["name"] == "small"])
    )
    tab.goto(site[0])
    tab.wait_for_selector("#verdict")
    open_stories(tab)
    missing = [one.get_attribute("data-story") for one in tab.locator(".story-choice:disabled").all()]
    assert missing == ["mae", "dino", "clip"]
    notes = tab.locator(".story-list li > p").all_inner_texts()
    assert [note.split(", which")[0].split(",")[0] for note in notes] == [
        "Needs a masked autoencoder",
        "Needs a DINO",
        "Needs a CLIP",
    ]
    # What they say to start serves a model for each of them.
    infos = [{**served.summary(), **model_info(served)} for served in open_models([])]
    assert tab.evaluate(SUITED, infos) == list(STORIES)
    context.close()
