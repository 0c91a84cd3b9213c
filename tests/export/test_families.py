"""Every family as a file, run without our code, against the model: batches and image sizes that export never saw."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

import vitlab
from vitlab.export import Comparison, export_model, open_export, verify
from vitlab.export.loader import DenseExported
from vitlab.export.metadata import model_metadata
from vitlab.export.onnx import set_metadata
from vitlab.export.quantize import to_int8
from vitlab.export.samples import preprocess_batch, sample_images
from vitlab.export.wrapper import in_a_row
from vitlab.images.samples import open_sample
from vitlab.layers.positions import cubic_weights, resize_grid
from vitlab.models import registry
from vitlab.models.base import features_of
from vitlab.models.dense import DenseOutput
from vitlab.reduce import reducer_of

DOCS = Path(__file__).parents[2] / "docs"


@cache
def opened_by_others(path: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Without our code; several outputs side by side."""
    if path.suffix == ".pt2":
        module = torch.export.load(path).module()
        return lambda x: in_a_row(module(x))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: in_a_row([torch.from_numpy(value) for value in session.run(None, {name: x.numpy()})])


def run_by_others(path: Path, x: torch.Tensor) -> torch.Tensor:
    return opened_by_others(path)(x)


def check(path: Path, look: Any, *shapes: tuple[int, ...]) -> None:
    for shape in shapes:
        x = torch.randn(shape)
        with torch.no_grad():
            expected = in_a_row(look(x))
        torch.testing.assert_close(run_by_others(path, x), expected, atol=1e-4, rtol=1e-4)


OPEN = ("vit", "clip", "dino", "resnet", "dinov3", "eva02", "pe")  # the others hold a ViT, or are laid out for one size


# In half of the time; their operations stand in the ONNX files of the others, and DINO below.
AS_PT2 = (
    *("dino", "hybrid", "clip_vision", "siglip", "naflex_vit", "relpos", "aimv2", "eva02", "pe", "swinv2", "pvt"),
    *("aimv2_lit", "eva02_clip", "pe_clip", "linear_head", "yolos", "dpt", "segformer"),
)


@pytest.fixture(scope="module")
def made(grown, tmp_path_factory) -> Callable[[str], tuple[Any, Path]]:
    """The smallest model of a family, and its file, made once."""

    @cache
    def make(family: str) -> tuple[Any, Path]:
        ending = ".pt2" if family in AS_PT2 else ".onnx"
        model, path = grown(family), tmp_path_factory.mktemp(family) / f"model{ending}"
        verdict = export_model(model, path, compare=Comparison(images=12), dynamic_size=family in OPEN)
        assert verdict.passed and verdict.agreement == 1.0
        return model, path

    return make


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_family(family, made):
    """Classes where there are some, otherwise the encoder's features, which are those of vitlab.embed; for any image
    size, unless the network is laid out for one.
    """
    model, path = made(family)
    c = model.config
    look = model if c.classes or family == "dpt" else features_of(model)
    (h, w), step = c.image_size, 2 * getattr(getattr(c, "encoder", c), "patch_size", 8)
    others = [(5, c.channels, h, w + step), (1, c.channels, h + 2 * step, w), (2, c.channels, h - step, w + step)]
    check(path, look, (1, c.channels, h, w), (3, c.channels, h, w), *(others if family in OPEN else []))
    shipped = open_export(path)
    assert (shipped.family, shipped.labels, shipped.preprocess) == (model.family, model.labels, model.preprocess)
    if isinstance(shipped, DenseExported):
        assert [f.name for f in fields(DenseOutput) if f.name in shipped.metadata.fields] == shipped.metadata.fields
        assert shipped.capabilities == model.answers


def test_other_sizes_are_judged_too(made, tmp_path):
    model, path = made("vit")
    small = tmp_path / "small.onnx"
    to_int8(path, small, "dynamic")
    set_metadata(small, replace(open_export(path).metadata, int8="dynamic"))
    seen, shipped = sample_images(12, channels=model.config.channels), open_export(small)
    assert verify(model, shipped, seen, agreement=0.7, rounds=1).passed
    size, run = model.config.image_size, shipped._run[0]
    shipped._run[0] = lambda x: run(x) if x.shape[-2:] == size else -run(x)
    problems = verify(model, shipped, seen, agreement=0.7, rounds=1).problems
    assert len(problems) == 2 and all(re.match(r"at \d+ x \d+ pixels only", told) for told in problems)


def test_embed_with_a_file(made, command, tmp_path):
    (model, path), table = made("dino"), tmp_path / "out.parquet"
    found = json.loads(command("embed", "digits", "-o", table, "--model", path, "--json").stdout)
    assert found["width"] == model.encoder.feature_width
    (ours,), (theirs,) = (vitlab.embed(m, [open_sample("digits#3").image]) for m in (model, open_export(path)))
    torch.testing.assert_close(torch.tensor(ours.vector), torch.tensor(theirs.vector), atol=1e-5, rtol=0)
    assert "--features" in command("embed", "digits", "-o", table, "--model", made("vit")[1], code=2).stderr


def test_convolutions_in_int8(made, tmp_path):
    """Which only the static way has; the file for all sizes is still for all sizes."""
    model, path = made("resnet")
    images = preprocess_batch(model, sample_images(40, channels=model.config.channels))
    small = tmp_path / "small.onnx"
    to_int8(path, small, "static", images[:16])
    with torch.no_grad():
        right, larger = model(images), model(F.pad(images, (8, 8)))
    assert (run_by_others(small, images) - right).abs().mean() < 0.1 * right.abs().mean()
    assert (run_by_others(small, F.pad(images, (8, 8))) - larger).abs().mean() < 0.1 * larger.abs().mean()
    nodes = onnx.load(small).graph.node
    integers = {name for node in nodes if node.op_type == "DequantizeLinear" for name in node.output}
    assert all(set(node.input[:2]) <= integers for node in nodes if node.op_type == "Conv")


def test_two_towers_of_a_clip(made, tmp_path, monkeypatch):
    """And the lines of the docs that make probabilities of them."""
    model, path = made("clip")
    shutil.copy(path, tmp_path / "image.onnx")
    export_model(model, tmp_path / "text.onnx", gives="text", compare=Comparison(images=12))
    sentences = ["a cat", "two dogs on a boat", "b"]
    ids = model.tokenizer(sentences)
    with torch.no_grad():
        torch.testing.assert_close(
            run_by_others(tmp_path / "text.onnx", ids), model.encode_text(ids), atol=1e-5, rtol=1e-4
        )
    shipped: Any = open_export(tmp_path / "text.onnx")
    assert torch.equal(shipped.tokenizer(sentences), ids)
    monkeypatch.chdir(tmp_path)
    seen = sample_images(5)
    expected = vitlab.zero_shot(model, seen, sentences, templates=["{}"], top=3)
    for language in ("en", "zh"):
        page = (DOCS / language / "export.md").read_text(encoding="utf-8")
        (block,) = (
            text for text in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "probabilities" in text
        )
        found: dict[str, Any] = {"pixels": preprocess_batch(model, seen).numpy(), "ids": ids.numpy()}
        exec(compile(block, "export.md", "exec"), found)
        for probabilities, answer in zip(found["probabilities"], expected, strict=True):
            assert {sentences[n]: pytest.approx(p, abs=1e-5) for n, p in enumerate(probabilities)} == dict(
                answer.scores
            )


def test_the_bias_of_a_clip_with_the_sigmoid_loss_travels(grown):
    model = grown("clip", loss="sigmoid")
    about = model_metadata(model, "text")
    assert about.scale is not None and about.bias is not None
    seen, said = torch.randn(2, 8), torch.randn(3, 8)
    torch.testing.assert_close(about.scale * seen @ said.T + about.bias, model.logits(seen, said).detach())


@pytest.mark.parametrize(
    ("name", "reducer", "ending"),
    [
        ("deit_tiny_distilled", "tome:r=2", ".onnx"),
        ("dino", "evit:keep=0.6,layers=0", ".onnx"),
        ("clip", "tome:r=2", ".pt2"),  # a third of the time
        ("mae", "tome:r=2", ".pt2"),
        ("vit_base", "tome:r=2", ".onnx"),
    ],
)
def test_fewer_tokens_inside_the_file(name, reducer, ending, grown, tmp_path):
    """Of logits, or of features; the last one for all image sizes, with an odd number of patches too."""
    size: dict[str, Any] = dict(image_size=(24, 32), patch_size=8, width=24, heads=3, classes=5)
    deep = {"deit_tiny_distilled": {**size, "depth": 2}, "clip": {"image.depth": 2}}
    deep["vit_base"] = {**size, "depth": 1, "pooling": "mean"}
    model = grown(name, **deep.get(name, {"depth": 2}))  # only a second layer has the class token look at what is left
    path, all_sizes = tmp_path / f"model{ending}", name == "vit_base"
    export_model(model, path, reducer=reducer, compare=Comparison(images=12), dynamic_size=all_sizes)
    assert open_export(path).metadata.reducer == reducer
    look = lambda x, **more: model(x, **more) if model.config.classes else features_of(model, **more)(x)
    (C, h, w), way = (model.config.channels, *model.config.image_size), reducer_of(reducer)
    more = [(2, C, h, w + 8), (3, C, h + 8, w)] if all_sizes else []
    check(path, lambda x: look(x, reducer=way), (1, C, h, w), (5, C, h, w), *more)
    x = torch.randn(4, C, h, w)
    assert (run_by_others(path, x) - look(x)).abs().max() > 1e-3  # it is not the whole network


def test_relative_positions_at_sizes_not_seen_at_export(tiny, tmp_path):
    """Learned ones stand in the families' test; here a table of offsets is resized in the graph."""
    model = tiny(positions="relative", registers=2)
    path = tmp_path / "model.pt2"
    assert export_model(model, path, dynamic_size=True, compare=Comparison(images=12)).passed
    check(path, model, (3, 3, 24, 32), (1, 3, 40, 24), (2, 3, 64, 16))


def test_windows_are_laid_out_for_one_size(grown, tmp_path):
    with pytest.raises(ValueError, match="leave --dynamic-size out"):
        export_model(grown("swin"), tmp_path / "model.onnx", dynamic_size=True)


@pytest.mark.parametrize("rule", ["bicubic", "bicubic_antialias", "bicubic_offset", "bilinear_antialias"])
@pytest.mark.parametrize("new", [(7, 5), (3, 9), (7, 8), (12, 5), (20, 2)])
def test_positions_in_a_graph_for_all_sizes_are_those_of_interpolate(rule, new):
    old = (7, 5)
    table = torch.randn(1, 35, 6)
    grid = table.reshape(1, *old, 6).permute(0, 3, 1, 2)
    rows, columns = cubic_weights(old, new, rule)
    found = (rows @ grid @ columns.mT).permute(0, 2, 3, 1).reshape(1, -1, 6)
    torch.testing.assert_close(found, resize_grid(table, old, new, rule), atol=2e-5, rtol=0)
    if rule == "bicubic":
        theirs = F.interpolate(grid, size=new, mode="bicubic").permute(0, 2, 3, 1).reshape(1, -1, 6)
        torch.testing.assert_close(found, theirs, atol=2e-5, rtol=0)
