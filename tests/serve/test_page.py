"""Every number that the page gets is the library's own; the page's files come from here alone, within limits."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest
import torch

from vitlab import explain
from vitlab.explain.clip_prompts import ask
from vitlab.explain.methods import SHOWN
from vitlab.inference import predict
from vitlab.layers.edit import Edit
from vitlab.reduce.parse import reducer_of
from vitlab.serve import page_queries, page_routes
from vitlab.serve.model_pool import ServedModel
from vitlab.serve.request import MAX_PAGE_IMAGES

from .conftest import picture


def looked(client, model: str, image: bytes) -> str:
    answer = client.post(f"/page/look?model={model}", files={"image": ("x.png", image)})
    assert answer.status_code == 200, answer.text
    return answer.json()["look"]


def array(answer) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    shape = [int(n) for n in answer.headers["X-Shape"].split(",")]
    return np.frombuffer(answer.content, answer.headers["X-Type"]).reshape(shape)


@pytest.fixture(scope="module")
def asked(client, models):
    """part, options -> the answer for one picture; and the picture as each model takes it."""
    image = picture(3)
    numbers = {name: looked(client, name, image) for name in models}

    def ask(model: str, part: str, **options):
        return client.get(f"/page/look/{numbers[model]}/{part}", params=options)

    tensors = {name: model.preprocess(image)[None] for name, model in models.items()}
    return ask, tensors, image


def test_predictions_and_the_walk_are_those_of_the_library(asked, models):
    ask, tensors, image = asked
    found = ask("small", "predict").json()
    ours = predict(models["small"], image, top=5)[0].scores
    assert [s["label"] for s in found["scores"]] == [label for label, _ in ours]
    np.testing.assert_allclose([s["probability"] for s in found["scores"]], [p for _, p in ours], rtol=1e-5)
    walk = ask("small", "walk").json()
    ours = explain.walk_through(models["small"], tensors["small"])
    assert [s["name"] for s in walk["steps"]] == [s.name for s in ours.steps]
    np.testing.assert_allclose(walk["by_depth"], ours.by_depth, rtol=1e-5)
    assert walk["labels"] == models["small"].labels


def test_attention_is_that_of_a_trace(asked, models):
    ask, tensors, _ = asked
    model = models["small"]
    for layer in range(model.config.depth):
        found = array(ask("small", "attention", layer=layer)).astype(np.float32)
        maps = explain.attention_maps(model, tensors["small"], layers=[layer], query=2)[0, 0].flatten(1)  # (h, N)
        np.testing.assert_allclose(
            found[:, 3, 1:], maps, rtol=1e-3, atol=1e-6
        )  # one class token before; half precision
        np.testing.assert_allclose(found.sum(-1), 1, rtol=2e-3)


@pytest.mark.parametrize("changes", [{}, {"temperature": 2.5, "drop_heads": [[0, 1]], "mask_patches": [2, 3]}])
def test_a_block_and_the_pass_are_those_of_explain(asked, models, changes):
    ask, tensors, _ = asked
    model, x, edit = models["small"], tensors["small"], Edit.from_json(changes)
    options = {"edit": json.dumps(changes)} if changes else {}
    found = ask("small", "forward", **options).json()
    view = explain.forward_view(model, x, edit)
    np.testing.assert_allclose(found["logits"], view.logits, rtol=1e-5)
    np.testing.assert_allclose(found["by_depth"], view.by_depth, rtol=1e-5)
    for step, lengths in view.lengths.items():
        np.testing.assert_allclose(found["lengths"][step], lengths, rtol=1e-5, err_msg=step)
    answer = ask("small", "block", layer=1, head=1, token=3, **options)
    shapes, at = json.loads(answer.headers["X-Arrays"]), 0
    ours = explain.block_view(model, x, layer=1, head=1, token=3, edit=edit).arrays()
    assert list(shapes) == list(ours)
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        values = np.frombuffer(answer.content, "<f4", count, at).reshape(shape)
        np.testing.assert_allclose(values, ours[name], rtol=1e-5, atol=1e-6, err_msg=name)
        at += 4 * count
    assert at == len(answer.content)
    rows = array(ask("small", "rows", token=3, **options))
    np.testing.assert_allclose(rows, explain.query_attention(model, x, 3, edit), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("part", "options", "ours"),
    [
        ("rollout", {}, lambda model, x: explain.rollout(model, x)[0]),
        ("relevance", {"class": 2}, lambda model, x: explain.relevance(model, x, 2)[0]),
        ("grad_cam", {"class": 1}, lambda model, x: explain.grad_cam(model, x, 1)[0]),
        ("gradient_x_input", {"class": 1}, lambda model, x: explain.gradient_x_input(model, x, 1)[0]),
        ("positions", {}, lambda model, x: explain.position_similarity(model)),
        ("colours", {}, lambda model, x: (explain.pca_rgb(model, x)[0] * 255).round()),
    ],
)
def test_maps_are_those_of_the_library(asked, models, part, options, ours):
    ask, tensors, _ = asked
    np.testing.assert_allclose(
        array(ask("small", part, **options)), ours(models["small"], tensors["small"]), rtol=1e-5, atol=1e-7
    )


def test_distance_similarity_and_fewer_tokens(asked, models):
    ask, tensors, _ = asked
    model, x = models["small"], tensors["small"]
    np.testing.assert_allclose(
        ask("small", "distance").json()["distance"], explain.attention_distance(model, x), rtol=1e-5
    )
    like = array(ask("small", "similarity"))
    np.testing.assert_allclose(like[4], explain.patch_similarity(model, x, 4)[0].flatten(), atol=1e-3)
    found = ask("small", "fewer", reducer="tome:r=1").json()
    ours = explain.pruned_patches(model, x, reducer_of("tome:r=1"))
    assert found["groups"] == ours.groups[0].tolist()
    assert found["tokens"] == ours.tokens[0].tolist()
    with torch.no_grad():
        chances = model(x, reducer=reducer_of("tome:r=1"))[0].softmax(-1)
    assert found["scores"][0]["probability"] == pytest.approx(float(chances.max()), rel=1e-5)


def test_a_painted_mask_hides_those_patches_and_no_others(asked, models):
    ask, tensors, _ = asked
    model = models["mae"]
    rows, columns = model.encoder.config.grid
    mask = "".join(np.random.default_rng(0).permutation([*"1" * 5, *"0" * (rows * columns - 5)]))
    found = ask("mae", "painted", mask=mask).json()
    assert found["mask"] == mask
    bits = torch.tensor([one == "1" for one in mask]).unflatten(0, (rows, columns))
    ours = explain.reconstruct(model, tensors["mae"], mask=bits)
    assert found["error"] == pytest.approx(float(ours.error[0]), rel=1e-5)
    pixels = np.frombuffer(base64.b64decode(found["pixels"]), np.uint8).reshape(found["shape"])
    hidden = ours.hidden[0, 0].numpy()
    assert (pixels[2][~hidden] == pixels[0][~hidden]).all()  # what was seen is left as it is
    assert (pixels[1][hidden] == pixels[1][hidden][0]).all()
    random = ask("mae", "painted", percent=75, seed=1).json()
    assert random["mask"].count("1") == round(0.75 * rows * columns)


def test_sentences_are_those_of_explain(asked, models):
    ask_page, tensors, _ = asked
    texts = ["a dog on a beach", "两只猫"]
    found = ask_page("clip", "sentences", texts="\n".join(texts)).json()
    both = ask(models["clip"], texts)
    np.testing.assert_allclose(found["cosine"], both.cosines(tensors["clip"])[0], rtol=1e-5)
    np.testing.assert_allclose(found["maps"][1], explain.relevance(both, tensors["clip"], 1)[0], rtol=1e-4, atol=1e-7)
    assert sum(found["probability"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("model", "part", "options", "status"),
    [
        ("small", "attention", {"layer": 99}, 422),
        ("small", "attention", {"layer": "x"}, 422),
        ("small", "block", {"layer": 0, "head": 9, "token": 0}, 422),
        ("small", "rows", {"token": 999}, 422),
        ("small", "forward", {"edit": "{"}, 422),
        ("small", "forward", {"edit": '{"temperature": -1}'}, 422),
        ("small", "forward", {"edit": '{"drop_heads": [[77, 0]]}'}, 422),
        ("small", "forward", {"edit": '{"changes": []}'}, 422),
        ("small", "forward", {"edit": '{"mask_patches": [' + "0, " * 9000 + "0]}"}, 422),
        ("small", "relevance", {"class": -1}, 422),
        ("small", "fewer", {"reducer": "melt:r=1"}, 422),
        ("small", "painted", {"percent": 50, "seed": 0}, 404),
        ("mae", "painted", {"mask": "01"}, 422),
        ("mae", "painted", {"mask": "0" * 16}, 422),
        ("clip", "sentences", {"texts": ""}, 422),
        ("clip", "__class__", {}, 404),
    ],
)
def test_what_cannot_be_had_is_told(asked, model, part, options, status):
    answer = asked[0](model, part, **options)
    assert answer.status_code == status
    assert set(answer.json()) == {"error", "remedy"}


def test_a_picture_is_forgotten_in_time_and_cannot_be_guessed(client, models, monkeypatch):
    first = looked(client, "small", picture(1))
    assert client.get(f"/page/look/{first}/predict").status_code == 200
    assert client.get("/page/look/0/predict").status_code == 404
    for seed in range(MAX_PAGE_IMAGES):
        looked(client, "small", picture(seed, 8, 8))
    assert "Send it again" in client.get(f"/page/look/{first}/predict").json()["remedy"]


def test_the_page_can_ask_which_exercise_belongs_to_a_step(client):
    links = client.get("/page/exercises").json()
    exercise_of = {step: link for link in links for step in link["steps"]}
    assert exercise_of["softmax"]["exercise"] == "attention" and exercise_of["add1"]["command"] == "vitlab learn block"
    assert {link["panel"]: link["exercise"] for link in links if link["panel"]} == {
        "mae": "mae-masking",
        "sentences": "clip-loss",
    }
    assert all(set(link["titles"]) == {"en", "zh"} for link in links)


def test_the_page_is_made_of_files_of_its_own(client):
    page = client.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    for entry in page_routes.FILES.iterdir():
        assert client.get(f"/page/files/{entry.name}").status_code == 200
        assert "http://" not in entry.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    for name in ("..%2Fapp.py", "../app.py", "page_queries.py", "x.js"):
        assert client.get(f"/page/files/{name}").status_code == 404


def test_the_page_loads_all_its_modules_at_once(client):
    """Otherwise each would be asked for only when the one that imports it has come. Stories come when asked for."""
    named = set(re.findall(r"page/files/(\w+\.js)", client.get("/").text))
    modules = {entry.name for entry in page_routes.FILES.iterdir() if entry.name.endswith(".js")}
    assert named == {name for name in modules if not name.startswith("stor")} and "app.js" in named


def test_with_a_token_only_the_page_itself_is_open(serving):
    client = serving(token="secret")
    assert client.get("/").status_code == 200
    assert client.get("/page/files/app.js").status_code == 200
    for path in ("/page/models", "/page/samples", "/page/runs"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"Authorization": "Bearer secret"}).status_code == 200


def test_runs_are_followed_line_by_line(serving, tmp_path):
    (tmp_path / "a<b").mkdir()
    log = tmp_path / "a<b" / "log.jsonl"
    log.write_text(
        '{"kind": "damaged\n' + json.dumps({"kind": "train", "step": 1, "loss": 2.5}) + "\n" + '{"kind": "tr',
        encoding="utf-8",
    )
    client = serving(runs=str(tmp_path))
    assert client.get("/page/runs").json() == ["a<b"]
    found = client.get("/page/runs/a<b").json()
    assert [line["step"] for line in found["lines"]] == [1] and not found["ended"]
    with log.open("a", encoding="utf-8") as more:
        more.write('ain", "step": 2, "loss": 2.0}\n')
    (tmp_path / "a<b" / "result.json").write_text("{}", encoding="utf-8")
    found = client.get("/page/runs/a<b", params={"after": found["after"]}).json()
    assert [line["step"] for line in found["lines"]] == [2] and found["ended"]
    assert client.get("/page/runs/..").status_code == 404
    assert client.get("/page/runs/a<b", params={"after": 10**20}).status_code == 422


def test_each_model_says_what_it_has(client, models):
    found = {one["name"]: one for one in client.get("/page/models").json()}
    assert "fewer" in found["small"]["offers"] and "painted" not in found["small"]["offers"]
    assert "painted" in found["mae"]["offers"] and "predict" not in found["mae"]["offers"]
    assert "sentences" in found["clip"]["offers"]
    methods = {name: [method["name"] for method in one["methods"]] for name, one in found.items()}
    assert methods["small"] == list(SHOWN[1:]) and methods["mae"] == ["rollout"]
    assert [*page_queries.supported_queries(ServedModel("small", models["small"])), "edit"] == found["small"]["offers"]
