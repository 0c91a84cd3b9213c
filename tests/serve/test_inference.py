"""What the server says is what the library says offline, of pictures of every kind, alone and in company."""

from __future__ import annotations

import asyncio
import io
import threading
import time

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab import explain
from vitlab.errors import CheckpointError, UsageError
from vitlab.serve.app import create_app
from vitlab.serve.image_io import prepare
from vitlab.serve.model_pool import ServedModel, open_models
from vitlab.serve.settings import Settings

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def check(answer: dict, offline) -> None:
    assert [s["label"] for s in answer["scores"]] == [label for label, _ in offline.scores]
    assert [s["probability"] for s in answer["scores"]] == pytest.approx([p for _, p in offline.scores], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_predict(client, models, picture, ask, kind):
    image = picture(1, 40, 33, kind)
    found = ask(client, "/predict?model=small&top=3", image, "no-name-matters.txt")
    assert found.status_code == 200, found.text
    check(found.json(), vitlab.predict(models["small"], image, top=3)[0])
    assert found.json()["model"] == "small" and found.json()["batch"] == 1
    assert set(found.json()["milliseconds"]) == {"received", "decoded", "waited", "ran", "total"}


def test_a_turned_photo_and_one_with_alpha(client, models, ask):
    turned = Image.fromarray(np.random.default_rng(3).integers(0, 256, (20, 50, 3), dtype=np.uint8))
    exif = turned.getexif()
    exif[0x0112] = 6
    for image, more in ((turned, {"exif": exif}), (turned.convert("LA"), {}), (turned.convert("P"), {})):
        file = io.BytesIO()
        image.save(file, "PNG", **more)
        found = ask(client, "/predict?model=small", file.getvalue()).json()
        check(found, vitlab.predict(models["small"], file.getvalue())[0])


def test_embed(client, models, picture, ask):
    for name, model in models.items():
        found = ask(client, f"/embed?model={name}", picture(2)).json()
        offline = vitlab.embed(model, picture(2))[0].vector
        np.testing.assert_allclose(found["embedding"], offline, atol=1e-6)


def test_zeroshot(client, models, picture, ask):
    offline = vitlab.zero_shot(models["clip"], picture(4), ["dog", "two cats", "海边"], top=2)[0]
    for labels in ("dog, two cats,海边", ["dog", "two cats", "海边"]):
        check(ask(client, "/zeroshot?top=2", picture(4), labels=labels).json(), offline)
    offline = vitlab.zero_shot(models["clip"], picture(4), ["a, b", "c"], templates="one {}|the {} here")[0]
    again = ask(client, "/zeroshot", picture(4), labels=["a, b", "c"], templates="one {}|the {} here")
    check(again.json(), offline)


@pytest.mark.parametrize("method", ["attention", "rollout", "relevance", "grad_cam", "gradient_x_input"])
def test_explain(client, models, picture, ask, method):
    image = Image.open(io.BytesIO(picture(5)))
    model = models["small"]
    for target in (None, "dog", "0"):
        if target is not None and method in ("attention", "rollout"):
            continue
        asked = "" if target is None else f"&target={target}"
        found = ask(client, f"/explain?model=small&method={method}{asked}", picture(5)).json()
        offline = {
            "attention": lambda: explain.attention_maps(model, image, layers=[-1], heads="mean")[:, 0, 0],
            "rollout": lambda: explain.rollout(model, image),
        }.get(method, lambda: getattr(explain, method)(model, image, target))()  # noqa: B023
        np.testing.assert_allclose(found["map"], offline[0], rtol=1e-5, atol=1e-6)  # float32, in other memory
        chances = dict(vitlab.predict(model, image)[0].scores)
        assert found["label"] == {None: max(chances, key=chances.get), "dog": "dog", "0": "<b>fox</b>"}[target]
        assert found["probability"] == pytest.approx(chances[found["label"]], abs=1e-6)
        assert found["grid"] == [2, 3] and found["size"] == [31, 57] and found["box"] == [0, 0, 57, 31]


def test_explain_a_sentence_and_a_model_without_classes(client, models, picture, ask):
    image = Image.open(io.BytesIO(picture(5)))
    found = ask(client, "/explain?model=clip&target=two cats", picture(5), text=["a dog", "two cats"]).json()
    offline = explain.relevance(explain.ask(models["clip"], ["a dog", "two cats"]), image, "two cats")[0]
    np.testing.assert_allclose(found["map"], offline, atol=1e-6)
    assert found["label"] == "two cats" and found["method"] == "relevance"
    found = ask(client, "/explain?model=mae", picture(5)).json()
    offline = explain.attention_maps(models["mae"].encoder, image, layers=[-1], heads="mean")[0, 0, 0]
    np.testing.assert_allclose(found["map"], offline, atol=1e-6)
    assert found["method"] == "attention" and found["label"] is None


def test_explain_as_a_picture(client, models, picture, ask):
    from vitlab.explain.draw import overlay, views

    found = ask(client, "/explain?model=small&format=png", picture(6))
    assert found.headers["content-type"] == "image/png"
    image = Image.open(io.BytesIO(picture(6)))
    heat = explain.relevance(models["small"], image)[0].numpy()
    drawn = overlay(heat, views(models["small"], image)[0])
    np.testing.assert_allclose(np.asarray(Image.open(io.BytesIO(found.content))).astype(int), drawn, atol=1)
    log = overlay(heat, views(models["small"], image)[0], scale="log")
    found = ask(client, "/explain?model=small&format=png&scale=log", picture(6))
    np.testing.assert_allclose(np.asarray(Image.open(io.BytesIO(found.content))).astype(int), log, atol=1)
    for scale, limits in {"percentile": np.percentile(heat, [1, 99]), "minmax": [heat.min(), heat.max()]}.items():
        found = ask(client, f"/explain?model=small&scale={scale}", picture(6)).json()
        np.testing.assert_allclose(found["limits"], limits, rtol=1e-4, atol=1e-6)


def test_a_request_without_a_name_goes_to_the_first_that_can(client, picture, ask):
    assert ask(client, "/predict", picture(1)).json()["model"] == "small"
    assert ask(client, "/zeroshot", picture(1), labels="cat,dog").json()["model"] == "clip"


def test_models(client, models):
    found = {about["name"]: about for about in client.get("/models").json()}
    assert list(found) == ["small", "clip", "mae"]
    assert found["small"]["verbs"] == ["predict", "embed", "explain"] and found["small"]["image_size"] == [16, 24]
    assert found["clip"]["verbs"] == ["embed", "zeroshot", "explain"] and found["mae"]["classes"] == 0
    assert found["small"]["parameters"] == sum(p.numel() for p in models["small"].parameters())
    assert client.get("/models/small").json()["labels"] == models["small"].labels


def test_names_of_models(tmp_path):
    model = vitlab.create("vit_digits")
    for place in ("cats/best", "dogs/last", "plain"):
        vitlab.save(model, tmp_path / place)
    asked = [str(tmp_path / place) for place in ("cats/best", "dogs/last", "plain", "plain")]
    names = [one.name for one in open_models([*asked, f"mine={tmp_path / 'plain'}", "bundled:digits"])]
    assert names == ["cats", "dogs", "plain", "plain-2", "mine", "digits"]


# Together


def together(app, requests: list[tuple[str, bytes, dict]], busy: str = "small") -> list[httpx.Response]:
    """All at once, while the model is held busy, so that they wait for each other."""

    async def run() -> list[httpx.Response]:
        async with app.router.lifespan_context(app):
            pool = app.state.pool
            while not pool.warm:
                await asyncio.sleep(0.01)
            held = threading.Event()
            worker = pool.models[busy].worker
            holding = asyncio.create_task(worker.run(lambda items: [held.wait(30)], None, 0, time.monotonic() + 60))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
                asked = [
                    asyncio.create_task(client.post(path, files={"image": ("x", image)}, data=fields))
                    for path, image, fields in requests
                ]
                while sum(task.done() for task in asked) + len(worker._jobs) < len(asked):
                    await asyncio.sleep(0.01)
                held.set()
                await holding
                return await asyncio.gather(*asked)

    return asyncio.run(run())


def test_batches_change_no_answer(models, picture):
    """22 pictures in batches of up to 8, two verbs mixed; each is answered as if it had come alone."""
    served = [ServedModel("small", models["small"])]
    images = [picture(seed, 20 + seed, 60 - seed) for seed in range(22)]
    verbs = ["/predict?model=small" if n % 3 else "/embed?model=small" for n in range(22)]
    found = together(
        create_app(served, Settings(max_batch=8)), [(v, i, {}) for v, i in zip(verbs, images, strict=True)]
    )
    assert [one.status_code for one in found] == [200] * 22
    for verb, image, one in zip(verbs, images, found, strict=True):
        if "predict" in verb:
            offline = vitlab.predict(models["small"], image)[0]
            check(one.json(), offline)
        else:
            offline = vitlab.embed(models["small"], image)[0]
            np.testing.assert_allclose(one.json()["embedding"], offline.vector, atol=1e-6)
    assert max(one.json()["batch"] for one in found) == 8


def test_a_full_queue(models, picture):
    served = [ServedModel("small", models["small"])]
    app = create_app(served, Settings(queue=5, max_batch=2))
    found = together(app, [("/predict", picture(seed), {}) for seed in range(12)])
    codes = sorted(one.status_code for one in found)
    assert codes == [200] * 5 + [503] * 7
    for one in found:
        if one.status_code == 503:
            assert int(one.headers["retry-after"]) >= 1
            assert "the queue of small is full" in one.json()["error"] and "Try again in" in one.json()["remedy"]
    assert app.state.pool.models["small"].in_progress == 0


def test_a_model_with_damaged_weights(picture, ask, models, caplog):
    from starlette.testclient import TestClient

    broken = vitlab.create("vit_digits", image_size=16, channels=3, classes=4)
    broken.head.weight.data.fill_(torch.nan)
    app = create_app([ServedModel("broken", broken)])
    with TestClient(app, "http://127.0.0.1", raise_server_exceptions=False) as client:
        found = ask(client, "/predict", picture(1))
        assert found.status_code == 500 and found.json()["error"] == "the server failed at this request."
        assert "Traceback" not in found.text and "not finite" not in found.text
        assert "not finite" in caplog.text


def test_a_model_that_cannot_run_is_told_at_once(models, picture, ask, caplog):
    from starlette.testclient import TestClient

    broken = vitlab.create("vit_digits", image_size=16, channels=3, classes=4)
    known = [ServedModel(name, model) for name, model in (("broken", broken), ("small", models["small"]))]
    broken.blocks[0].forward = None
    with TestClient(create_app(known), "http://127.0.0.1") as client:
        while "warmed up" in (told := client.get("/ready")).text:
            time.sleep(0.01)
        assert told.status_code == 503 and "broken cannot run" in told.json()["error"]
        assert ask(client, "/predict?model=small", picture(1)).status_code == 200
    assert "broken fails" in caplog.text


def test_a_large_picture_waits_in_a_small_size(models):
    """What is drawn on is made smaller before it waits; places are told in the picture as it was sent."""
    file = io.BytesIO()
    Image.new("RGB", (4000, 2400)).save(file, "PNG")
    found = prepare(models["small"].preprocess, file.getvalue(), Settings(), keep_original=True)
    assert found.original.size == (1600, 960) and found.geometry.original == (2400, 4000)


def test_an_exported_file(picture, ask, shallow, tmp_path):
    """Served by the name of the file; it answers as the file does offline, and as the model it was made of."""
    from starlette.testclient import TestClient

    from vitlab.export import Comparison, export_model

    export_model(shallow, tmp_path / "small.onnx", compare=Comparison(images=8))
    served = open_models([str(tmp_path / "small.onnx")])
    assert [(one.name, one.verbs) for one in served] == [("small", ["predict"])]
    with TestClient(create_app(served), "http://127.0.0.1") as client:
        answer = ask(client, "/predict", picture(1)).json()
        check(answer, vitlab.predict(served[0].model, picture(1))[0])
        offline = dict(vitlab.predict(shallow, picture(1))[0].scores)
        assert all(abs(s["probability"] - offline[s["label"]]) < 1e-5 for s in answer["scores"])
        for path, words in (("/embed", "--features"), ("/explain", "")):
            found = ask(client, path, picture(1))
            assert found.status_code == 422 and words in found.json()["error"]
        assert client.get("/models/small").json()["labels"] == shallow.labels
        assert client.get("/models").json()[0]["parameters"] is None
        look = ask(client, "/page/look", picture(1)).json()["look"]  # the page shows what it can
        assert client.get("/page/models").json()[0]["offers"] == ["predict"]
        assert client.get(f"/page/look/{look}/predict").json()["scores"] == answer["scores"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(UsageError("no such thing"), 422), (CheckpointError("/secret/path is damaged"), 500), (ValueError("a bug"), 500)],
)
def test_only_errors_of_the_request_are_told(error, status, serving):
    """What a client can mend is shown to it; what names the server's files, and bugs, go to the log."""

    def fail():
        raise error

    client = serving()
    client.app.add_api_route("/fail", fail)
    answer = client.get("/fail")
    assert answer.status_code == status and (str(error) in answer.text) == (status == 422)
