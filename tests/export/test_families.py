"""Every family as a file, run without our code, against the model: batches and image sizes that export never saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F

from vitlab.export import export_model, open_export
from vitlab.layers.positions import cubic_weights, resize_grid
from vitlab.models import registry
from vitlab.models.around import AroundEncoder
from vitlab.models.features import features_of
from vitlab.reduce import reducer_of


def run_by_others(path: Path, x: torch.Tensor) -> torch.Tensor:
    """Without our code."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(x)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def check(path: Path, look: Any, *shapes: tuple[int, ...]) -> None:
    for shape in shapes:
        x = torch.randn(shape)
        with torch.no_grad():
            expected = look(x)
        torch.testing.assert_close(run_by_others(path, x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_family(family, grown, tmp_path):
    """Classes where there are some, otherwise the encoder's features, which are those of vitlab.embed; for any image
    size, unless the network is laid out for one. What is around a ViT in training is not exported, so these graphs are
    the ViT's, and are read from a .pt2, which takes a third of the time.
    """
    model = grown(family)
    c = model.config
    dynamic = family in ("vit", "resnet")  # the others hold a ViT, or are laid out for one size
    path = tmp_path / ("model.pt2" if isinstance(model, AroundEncoder) else "model.onnx")
    verdict = export_model(model, path, images=12, dynamic_size=dynamic)
    assert verdict.passed and verdict.agreement == 1.0
    (h, w), step = c.image_size, 2 * getattr(getattr(c, "encoder", c), "patch_size", 8)
    others = [(5, c.channels, h, w + step), (1, c.channels, h + 2 * step, w), (2, c.channels, h - step, w + step)]
    check(path, model if c.classes else features_of(model), (1, c.channels, h, w), (3, c.channels, h, w))
    if dynamic:
        check(path, model if c.classes else features_of(model), *others)
    shipped = open_export(path)
    assert (shipped.family, shipped.labels, shipped.preprocess) == (model.family, model.labels, model.preprocess)


def test_text_tower_of_a_clip(grown, tmp_path):
    model = grown("clip")
    path = tmp_path / "text.onnx"
    export_model(model, path, text=True, images=12)
    ids = model.tokenizer(["a cat", "two dogs on a boat", "b"])
    with torch.no_grad():
        torch.testing.assert_close(run_by_others(path, ids), model.encode_text(ids), atol=1e-5, rtol=1e-4)
    shipped: Any = open_export(path)
    assert torch.equal(shipped.tokenizer(["a cat"]), ids[:1])


@pytest.mark.parametrize(
    ("name", "reducer"), [("deit_tiny_distilled", "tome:r=2"), ("vit_base", "evit:keep=0.6,layers=0")]
)
def test_fewer_tokens_inside_the_file(name, reducer, grown, tmp_path):
    size: dict[str, Any] = dict(image_size=(24, 32), patch_size=4, width=24, heads=3, classes=5)
    model = grown(name, **size, depth=2)  # only a second layer has the class token look at what is left
    path = tmp_path / "model.onnx"
    export_model(model, path, reducer=reducer, images=12)
    with_all = open_export(path)
    assert with_all.about.reducer == reducer
    way = reducer_of(reducer)
    check(path, lambda x: model(x, reducer=way), (1, 3, 24, 32), (5, 3, 24, 32))
    x = torch.randn(4, 3, 24, 32)
    assert (run_by_others(path, x) - model(x)).abs().max() > 1e-3  # it is not the whole network


def test_relative_positions_at_sizes_not_seen_at_export(tiny, tmp_path):
    """Learned ones stand in the families' test; here a table of offsets is resized in the graph."""
    model = tiny(positions="relative", registers=2)
    path = tmp_path / "model.pt2"
    assert export_model(model, path, dynamic_size=True, images=12).passed
    check(path, model, (3, 3, 24, 32), (1, 3, 40, 24), (2, 3, 64, 16))


def test_windows_are_laid_out_for_one_size(grown, tmp_path):
    with pytest.raises(ValueError, match="leave --dynamic-size out"):
        export_model(grown("swin"), tmp_path / "model.onnx", dynamic_size=True)


@pytest.mark.parametrize("rule", ["bicubic", "bicubic_antialias", "bicubic_offset"])
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
