"""vitlab page build: a folder of files whose numbers, computed in Chromium, are those of the library."""

from __future__ import annotations

import base64
import io
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.checkpoints.native import on_meta
from vitlab.errors import ExportError, UsageError
from vitlab.explain.features import principal_components
from vitlab.images.preprocess import RESAMPLING, Preprocess
from vitlab.images.randomness import uniform
from vitlab.images.read import to_rgb
from vitlab.serve import page_queries
from vitlab.serve.model_pool import ServedModel, open_models
from vitlab.serve.page_queries import PageImage
from vitlab.serve.static_page import build, runtime, verify
from vitlab.text.tokenizer import Tokenizer

BROWSER = Path(build.__file__).parent / "browser"
CLOSE = 1e-4
EDITS = [
    {},
    {"mask_patches": [0, 5, 6], "temperature": 2.5, "drop_heads": [[0, 1], [1, 0]]},
    {"positions": "shuffled", "seed": 7, "scale_by_sqrt_d": False},
    {"positions": "removed"},
]
TEXTS = ["a dog on a beach", "Two  CATS, it's 12!", "大熊猫 ẞ"]


def small_models() -> dict:
    """With what the knobs must not mix up: prefix tokens with and without a position, LayerScale, an odd grid, grey."""
    torch.manual_seed(0)
    shape = dict(image_size=(24, 40), patch_size=8, channels=3, classes=3, width=24, depth=2, heads=3)
    vit = vitlab.create("vit_digits", **shape, registers=2, layer_scale=0.3)
    vit.preprocess = replace(vit.preprocess, how="crop", interpolation="bicubic", mean=(0.4, 0.5, 0.6))
    vit.labels = ["cat", "dog", "熊猫"]
    tokenizer = Tokenizer.train(["a dog on a beach", "two cats, it's 12 o'clock"], vocab=560, context=12)
    clip = vitlab.create("clip_digits", **{"image.depth": 1, "text.depth": 1}, **tokenizer.options)
    clip.tokenizer = tokenizer
    models = {"vit": vit, "mae": vitlab.create("mae_digits", depth=1), "clip": clip}
    for model in models.values():
        for parameter in model.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    for parameter in models["vit"].blocks[0].parameters():
        parameter.data = parameter.data.half().float()  # stored in half precision, and none the worse
    return models


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, model in small_models().items():
        vitlab.save(model, folder / name)
    return {name: folder / name for name in ("vit", "mae", "clip")}


@pytest.fixture(scope="module")
def library():
    """onnxruntime-web, which npm fetches while the page is built."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(runtime.runtime_files)


@pytest.fixture(scope="module")
def built(saved, library, tmp_path_factory):
    """The page, with empty files in place of onnxruntime-web."""
    folder = tmp_path_factory.mktemp("page")
    empty = [folder / name for name in runtime.FILES]
    for file in empty:
        file.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "runtime_files", lambda archive: empty)
        patch.setattr(torch.onnx, "export", partial(torch.onnx.export, optimize=False))  # saves half of the time
        return build.build_page(folder / "site", [f"{name}={path}" for name, path in saved.items()])


@pytest.fixture(scope="module")
def site(built, library):
    """The built page at an address."""
    try:
        for file in library.result():
            shutil.copyfile(file, built.folder / "page" / "files" / file.name)
    except ExportError as error:
        pytest.skip(f"onnxruntime-web could not be fetched: {error}")
    yield from serving(built.folder)


def serving(folder: Path):
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join(10)


@pytest.fixture(scope="module")
def tab(browser, site):
    """The page in Chromium, its policy in force. Messages of the console and requests to elsewhere are failures."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900}, locale="en-US")
    page = context.new_page()
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda r: r.url.startswith((site, "blob:", "data:")) or wrong.append(r.url))
    page.goto(site)
    yield page
    context.close()
    assert wrong == []


def until(page, condition: str) -> None:
    """The page's policy forbids Playwright's own way to wait for a condition."""
    for _ in range(2000):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {condition}")


def photo(kind: str) -> bytes:
    """A PNG, a PNG that is partly transparent, or a JPEG that was taken with the camera on its side."""
    random, file = np.random.default_rng(3), io.BytesIO()
    if kind == "jpeg":
        exif = Image.Exif()
        exif[274] = 6
        smooth = Image.fromarray(random.integers(0, 256, (9, 7, 3), dtype=np.uint8)).resize((61, 83))
        smooth.save(file, "JPEG", exif=exif, quality=95)
    else:
        pixels = random.integers(0, 256, (37, 53, 4 if kind == "alpha" else 3), dtype=np.uint8)
        if kind == "alpha":
            pixels[..., 3] = np.where(pixels[..., 3] > 128, 255, 0)  # a canvas rounds what is half transparent
        Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


CALL = """async ([model, photo, calls]) => {
  const { source } = await import("./page/files/source.js");
  const bytes = Uint8Array.from(atob(photo), (one) => one.charCodeAt(0));
  const look = await source.open(model, new Blob([bytes]));
  const plain = (value) => (ArrayBuffer.isView(value) ? Array.from(value)
    : Array.isArray(value) ? value.map(plain)
    : value && typeof value === "object" ? Object.fromEntries(Object.entries(value).map(([k, v]) => [k, plain(v)]))
    : value);
  const found = [Array.from(look.input)];
  for (const [name, ...given] of calls) found.push(plain(await source[name](look, ...given)));
  return found;
}"""


def ask(tab, model: str, picture: bytes, *calls: list) -> list:
    """The model's input, then what each function of the source answers."""
    return tab.evaluate(CALL, [model, base64.b64encode(picture).decode(), list(calls)])


def served(saved, name: str) -> ServedModel:
    (one,) = open_models([f"{name}={saved[name]}"])
    return one


def answer(one: ServedModel, picture: bytes, query: str, edit: dict | None = None, **options):
    """What the server says, as numbers."""
    x = one.preprocess(picture)[None]
    given = {key: str(value) for key, value in options.items()} | ({"edit": json.dumps(edit)} if edit else {})
    return page_queries.QUERIES[query](one, PageImage(one.name, x), given)


def close(actual, expected, tolerance: float = CLOSE) -> None:
    expected = np.asarray(expected, dtype=np.float64)
    np.testing.assert_allclose(np.asarray(actual, dtype=np.float64).reshape(expected.shape), expected, 0, tolerance)


# ---------------------------------------------------------------- in the browser


@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_every_number_of_a_pass_is_that_of_the_library(tab, saved, edit):
    one, picture = served(saved, "vit"), photo("png")
    where = {"layer": 1, "head": 2, "token": 9}
    _, forward, block, first, rows, attention = ask(
        *(tab, "vit", picture, ["forward", edit], ["block", where, edit], ["block", {**where, "layer": 0}, edit]),
        *(["rows", 0, edit], ["attention", 1, edit]),
    )
    expected = answer(one, picture, "forward", edit)
    for name in ("logits", "probabilities", "by_depth"):
        close(forward[name], expected[name])
    assert forward["lengths"].keys() == expected["lengths"].keys()
    for name, lengths in expected["lengths"].items():
        close(forward["lengths"][name], lengths)
    for actual, layer in ((block, 1), (first, 0)):
        arrays = answer(one, picture, "block", edit, **{**where, "layer": layer}).arrays
        assert actual.keys() == arrays.keys()
        for name, value in arrays.items():
            close(actual[name], value)
    close(rows["data"], answer(one, picture, "rows", edit, token=0))
    close(attention["data"], answer(one, picture, "attention", edit, layer=1), 1e-3)  # the server sends halves


def test_maps_of_the_patches_are_those_of_the_library(tab, saved):
    one, picture = served(saved, "vit"), photo("png")
    methods = ["rollout", "relevance", "grad_cam", "gradient_x_input"]
    by_class = [name for name in methods if name != "rollout"]
    others = ["positions", "similarity", "colours", "distance", "predict"]
    calls = [["heat", name, 2 if name in by_class else None, {}] for name in methods] + [[name] for name in others]
    _, *found = ask(tab, "vit", picture, *calls)
    for name, actual in zip(methods, found, strict=False):
        close(actual["data"], answer(one, picture, name, **({"class": 2} if name in by_class else {})))
    positions, similarity, colours, distance, predict = found[len(methods) :]
    close(positions["data"], answer(one, picture, "positions"))
    close(similarity["data"], answer(one, picture, "similarity"), 1e-3)  # the server sends halves
    close(colours["data"], answer(one, picture, "colours"), 1)  # bytes
    close(distance["distance"], answer(one, picture, "distance")["distance"])
    scores = answer(one, picture, "predict")["scores"]
    assert [score["label"] for score in predict["scores"]] == [score["label"] for score in scores]
    close([s["probability"] for s in predict["scores"]], [s["probability"] for s in scores])


@pytest.mark.parametrize("kind", ["png", "alpha", "jpeg"])
@pytest.mark.parametrize("model", ["vit", "mae"])
def test_the_model_reads_the_same_pixels(tab, saved, model, kind):
    one = served(saved, model)
    (found,) = ask(tab, model, photo(kind))
    close(found, one.preprocess(photo(kind)), 0 if kind == "png" else 1.5 / 255 / min(one.preprocess.std))


def test_heat_follows_the_knobs(tab, saved):
    """Against torch's gradient of the pass under the same edit; without a class, of the top one."""
    one, picture, edit = served(saved, "vit"), photo("png"), EDITS[2]
    _, actual, top, best = ask(
        *(tab, "vit", picture, ["heat", "gradient_x_input", 1, edit]),
        *(["heat", "relevance", None, {}], ["forward", {}]),
    )
    model, x = one.model, one.preprocess(picture)[None]
    change = vitlab.layers.edit.Edit.from_json(edit)
    trace = vitlab.Trace("patch_embed", gradients=True)
    logits = model(x.requires_grad_(), trace=trace, edit=change)
    z = trace["patch_embed"]
    (slope,) = torch.autograd.grad(logits[0, 1], z)
    close(actual["data"], (z * slope).sum(-1)[0].detach())
    close(top["data"], answer(one, picture, "relevance", **{"class": int(np.argmax(best["logits"]))}))


def test_an_mae_paints_the_same(tab, saved):
    one, picture = served(saved, "mae"), photo("png")
    hide = [{"percent": 75, "seed": 3}, {"mask": "0110" * 4}]
    _, *found = ask(tab, "mae", picture, *(["reconstruction", options] for options in hide))
    for actual, options in zip(found, hide, strict=True):
        expected = answer(one, picture, "painted", **options)
        assert actual["mask"] == expected["mask"] and actual["shape"] == expected["shape"]
        close(actual["error"], expected["error"])
        ours, theirs = (np.frombuffer(base64.b64decode(x["pixels"]), np.uint8) for x in (actual, expected))
        close(ours, theirs, 1)  # a painted value may lie between two bytes


def test_a_clip_reads_the_same_sentences(tab, saved):
    one, picture, lines = served(saved, "clip"), photo("png"), "\n".join(TEXTS)
    _, actual = ask(tab, "clip", picture, ["sentences", lines])
    expected = answer(one, picture, "sentences", texts=lines)
    assert actual["texts"] == expected["texts"]
    for name in ("cosine", "probability", "maps"):
        close(actual[name], expected[name])


def test_the_page_opens_with_an_answer_and_says_what_it_cannot_do(tab):
    until(tab, "() => Boolean(window.vitlab?.data.heat && window.vitlab.data.rows)")
    assert tab.inner_text("#answer").startswith(("cat", "dog", "熊猫"))
    assert "in your browser" in tab.inner_text("footer")
    for panel, says in (("search", "no images to search"), ("fewer", "cannot merge"), ("training", "cannot train")):
        tab.click(f"[data-panel={panel}]")
        assert says in tab.inner_text("#panel-body") and "vitlab serve" in tab.inner_text("#panel-body")
        tab.click("#panel-close")


# ---------------------------------------------------------------- JavaScript that needs no model


@pytest.fixture(scope="module")
def modules(browser, tmp_path_factory):
    """A page that can import browser/*.js."""
    folder = tmp_path_factory.mktemp("modules")
    shutil.copytree(BROWSER, folder, dirs_exist_ok=True)
    (folder / "index.html").write_text("<!doctype html><title>modules</title>", encoding="utf-8")
    for address in serving(folder):
        page = browser.new_page()
        page.goto(address)
        yield page
        page.close()


def views() -> list[tuple[Preprocess, np.ndarray]]:
    random, cases = np.random.default_rng(0), []
    layouts = [("stretch", None), ("crop", None), ("crop", 21), ("crop", (25, 23)), ("fit", None)]
    for filter in RESAMPLING:
        for how, resize in layouts if filter in ("bilinear", "bicubic") else layouts[:1]:
            for number, shape in enumerate([(37, 53), (91, 20), (16, 24), (64, 64), (17, 32)]):
                mean, std = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)) if number % 2 else ((0.3,), (0.7,))
                preprocess = Preprocess((16, 24), how, resize, filter, mean, std)
                cases.append((preprocess, random.integers(0, 256, (*shape, 3), dtype=np.uint8)))
    return cases


def test_resizing_is_pillows_to_the_pixel(modules):
    cases = views()
    opaque = [np.dstack([pixels, np.full(pixels.shape[:2], 255, np.uint8)]) for _, pixels in cases]
    sent = [
        {"preprocess": p.to_dict(), "shape": rgba.shape[:2], "rgba": base64.b64encode(rgba.tobytes()).decode()}
        for (p, _), rgba in zip(cases, opaque, strict=True)
    ]
    found = modules.evaluate(
        """async (cases) => {
          const { viewOf, normalise } = await import("./preprocess.js");
          return cases.map(({ preprocess, shape, rgba }) => {
            const bytes = Uint8Array.from(atob(rgba), (one) => one.charCodeAt(0));
            const { pixels, geometry } = viewOf(preprocess, bytes, shape);
            return { geometry, values: Array.from(normalise(pixels, preprocess)) };
          });
        }""",
        sent,
    )
    for (preprocess, pixels), actual in zip(cases, found, strict=True):
        expected = preprocess(pixels)
        assert actual["geometry"] == json.loads(json.dumps(vars(preprocess.geometry(pixels.shape[:2]))))
        np.testing.assert_array_equal(
            np.float32(actual["values"]).reshape(expected.shape), expected, err_msg=str(preprocess)
        )


def test_what_is_transparent_lies_on_white(modules):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 256, 4), dtype=np.uint8)
    pixels[..., 3] = np.arange(256)
    found = modules.evaluate(
        """async (rgba) => {
          const { viewOf } = await import("./preprocess.js");
          const bytes = Uint8Array.from(atob(rgba), (one) => one.charCodeAt(0));
          const about = { size: [64, 256], how: "stretch", mean: [0, 0, 0], interpolation: "box" };
          return Array.from(viewOf(about, bytes, [64, 256]).pixels);
        }""",
        base64.b64encode(pixels.tobytes()).decode(),
    )
    np.testing.assert_array_equal(np.uint8(found).reshape(64, 256, 3), np.asarray(to_rgb(Image.fromarray(pixels))))


def test_random_numbers_are_those_of_the_library(modules):
    orders, numbers = modules.evaluate(
        """async () => {
          const { torchPermutation, uniform } = await import("./random.js");
          const orders = [[9, 0], [256, 5], [700, 4294967301]].map((one) => torchPermutation(...one));
          return [orders, Array.from(uniform(5, 7, 3))];
        }"""
    )
    for order, (count, seed) in zip(orders, [(9, 0), (256, 5), (700, 4294967301)], strict=True):
        assert order == torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    assert numbers == uniform(7, 3, count=5)[0].tolist()


def test_words_are_cut_as_the_tokenizer_cuts_them(modules):
    tokenizer = Tokenizer.train(["a dog on a beach", "two cats, it's 12 o'clock", "大熊猫"], vocab=600, context=16)
    texts = [*TEXTS, "", "don't  stop!!\n(now)", "İstanbul ﬁne é", "a " * 40, "<|endoftext|> x"]
    found = modules.evaluate(
        """async ([about, texts]) => {
          const { tokenIds } = await import("./tokenizer.js");
          return texts.map((text) => tokenIds(about, text));
        }""",
        [build.byte_pairs(tokenizer), texts],
    )
    assert found == tokenizer(texts).tolist()


@pytest.mark.parametrize(("count", "width"), [(65, 40), (12, 33), (7, 3)])
def test_colours_are_principal_components(modules, count, width):
    values = np.random.default_rng(1).normal(size=(count, width)).astype(np.float32)
    found = modules.evaluate(
        """async ([values, count, width]) => {
          const { principalColours } = await import("./maps.js");
          return Array.from(principalColours(Float32Array.from(values), count, width));
        }""",
        [values.flatten().tolist(), count, width],
    )
    components = principal_components(torch.from_numpy(values), 3)
    low, high = components.amin(0), components.amax(0)
    close(found, (components - low) / (high - low), 1e-5)


# ---------------------------------------------------------------- the folder


def test_every_graph_was_compared_and_small(built):
    assert [model.name for model in built.models] == ["vit", "mae", "clip"]
    assert all(model.difference < CLOSE for model in built.models)
    assert 0 < built.first_load < built.everything < built.bytes
    about = json.loads((built.folder / "page" / "static" / "page.json").read_text(encoding="utf-8"))
    vit, mae, clip = about["models"]
    assert vit["labels"] == ["cat", "dog", "熊猫"] and vit["prefix"] == ["class", "register", "register"]
    assert "reconstruction" in mae["files"] and "heat" not in mae["files"] and "text" in clip["files"]
    assert {step["name"] for step in vit["walk"]["steps"]} > {"patch_embed", "blocks.1", "head"}


def test_graphs_share_their_weights_and_lose_nothing(built, saved):
    folder = built.folder / "page" / "static" / "vit"
    parameters = vitlab.load(str(saved["vit"])).state_dict()
    exact = [p for p in parameters.values() if torch.equal(p.half().float(), p)]
    assert sum(p.numel() for p in exact) > 1000  # the first block
    full = 4 * sum(p.numel() for p in parameters.values())
    assert (folder / "weights.bin").stat().st_size < full - 2 * sum(p.numel() for p in exact) + 9000
    for name in ("inside", "heat"):
        graph = onnx.load(folder / f"{name}.onnx")  # with what it takes from weights.bin
        stored = [onnx.numpy_helper.to_array(tensor).astype(np.float32) for tensor in graph.graph.initializer]
        for key in ("blocks.0.mlp.fc1.weight", "blocks.1.attention.proj.weight"):
            wanted = parameters[key].numpy()
            assert any(np.array_equal(values, wanted) or np.array_equal(values, wanted.T) for values in stored)


def test_a_graph_that_differs_is_refused(saved, built):
    session = verify.PageSession(built.folder / "page" / "static" / "vit" / "inside.onnx")
    model = vitlab.load(str(saved["vit"])).eval()
    images = model.preprocess.batch([photo("png")])
    verify.require_equal("vit", "inside", verify.compare_inside(model, session, images))
    model.blocks[1].mlp.fc2.bias.data[3] += 1e-2
    with pytest.raises(ExportError, match=r"vit: its graph 'inside' differs from the model: .* by"):
        verify.require_equal("vit", "inside", verify.compare_inside(model, session, images))


def test_the_page_loads_nothing_from_elsewhere(built):
    html = (built.folder / "index.html").read_text(encoding="utf-8")
    assert "Content-Security-Policy" in html and "default-src 'none'" in html
    assert 'href="docs"' not in html and "footer_static" in html
    for file in (built.folder / "page" / "files").glob("*.js"):
        assert "https://" not in file.read_text(encoding="utf-8"), file


def test_building_again_replaces_a_page_and_nothing_else(tmp_path, saved):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me", encoding="utf-8")
    with pytest.raises(UsageError, match="holds something else than a page"):
        build.build_page(tmp_path / "mine", [str(saved["vit"])])
    assert (tmp_path / "mine" / "notes.txt").read_text(encoding="utf-8") == "keep me"


def refused(name: str, **options) -> str:
    model = on_meta(lambda: vitlab.create(name, **options))
    with pytest.raises(UsageError) as error:
        build.check_fits(ServedModel("mine", model))
    return str(error.value)


def test_what_a_browser_cannot_show_is_refused():
    assert "this is a swin" in refused("swin_cifar") and "vitlab serve mine" in refused("swin_cifar")
    assert "346 MB of weights" in refused("vit_base")
    assert "MB of numbers in a pass are too much" in refused("vit_tiny", image_size=768)
    assert "relative position biases" in refused("vit_digits", positions="relative")


# ---------------------------------------------------------------- onnxruntime-web


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))


def test_without_npm_the_error_says_what_to_do(empty_cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        ExportError, match=r"there is no npm here: install Node.js.*npm pack onnxruntime-web@[\d.]+.*--runtime"
    ):
        runtime.runtime_files()


def test_offline_npm_is_named(empty_cache, monkeypatch, tmp_path):
    (tmp_path / "npm").write_text("#!/bin/sh\necho 'npm error network ENOTFOUND' >&2\nexit 1\n", encoding="utf-8")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(
        ExportError, match=r"npm cannot fetch onnxruntime-web@[\d.]+: npm error network ENOTFOUND. Is this"
    ):
        runtime.runtime_files()


def test_another_archive_is_refused(empty_cache, tmp_path):
    (tmp_path / "other.tgz").write_bytes(b"another")
    with pytest.raises(ExportError, match="its digest differs"):
        runtime.runtime_files(tmp_path / "other.tgz")
    assert not list((tmp_path / "cache").glob("*"))
