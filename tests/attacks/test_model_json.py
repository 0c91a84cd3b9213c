"""Whatever a model.json says, loading ends at once: as before, or with one line; so do odd weights beside it."""

from __future__ import annotations

import io
import json
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import vitlab
from vitlab.checkpoints.load import load_with_report
from vitlab.errors import LONGEST, CheckpointError

SMALL: dict[str, Any] = dict(image_size=16, patch_size=8, width=16, depth=1, heads=2)
STAGES: dict[str, Any] = dict(
    image_size=16, depths=(1, 1), widths=(8, 16), heads=(1, 2), reductions=(2, 1), mlp_ratios=(2, 2)
)
MODELS: dict[str, dict[str, Any]] = {
    "vit_base": {**SMALL, "classes": 3},
    "mae_tiny": {**SMALL, "decoder": dict(width=16, depth=1, heads=2)},
    "dino_cifar": {**SMALL, "projection": dict(out_dim=8, hidden=8, bottleneck=4)},
    "clip_digits": {"image.depth": 1, "text.depth": 1, "vocab": 600, "end_id": 599, "pad_id": 599},
    "resnet_cifar": dict(depths=(1, 1), widths=(8, 16), stem_width=8),
    "swin_tiny": dict(image_size=16, width=8, depths=(1, 1), heads=(1, 2), window=2, classes=3),
    "pvt_tiny": STAGES,
    "pvt_v2_b0": STAGES,
    "twins_svt_small": {**STAGES, "window": 2},
}
HOSTILE: list[Any] = [10**6, 10**9, 10**12, 10**400, -1, 0, True, "x", None, [10**6], [1] * 1000, {"a": 1}, 0.5, 1e300]


def seconds_of(folder: Path) -> float:
    """How much processor time loading takes, which either works or ends in one line that names the file."""
    began = time.process_time()
    try:
        load_with_report(folder)
    except CheckpointError as error:
        told = str(error)
        assert folder.name in told and told.isprintable() and len(told) <= LONGEST, told
    return time.process_time() - began


def numbers(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in numbers(inner, (*path, key))]
    return [path] if isinstance(value, int | float | list) and not isinstance(value, bool) else []


@pytest.mark.parametrize("name", MODELS)
def test_no_number_of_a_config_makes_loading_hang_or_trace_back(name, tmp_path):
    folder = vitlab.save(vitlab.create(name, **MODELS[name]), tmp_path / "model")
    card = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    load_with_report(folder)  # as it is, it loads
    for turn, path in enumerate(numbers(card["config"])):
        for value in (10**9, HOSTILE[turn % len(HOSTILE)], HOSTILE[(turn * 5 + 3) % len(HOSTILE)]):
            changed = {**json.loads(json.dumps(card)), "seal": None}  # as its owner may edit it
            inner = changed["config"]
            for part in path[:-1]:
                inner = inner[part]
            inner[path[-1]] = [value] * len(inner[path[-1]]) if isinstance(inner[path[-1]], list) else value
            (folder / "model.json").write_text(json.dumps(changed), encoding="utf-8")
            assert seconds_of(folder) < 5, (path, value)


@pytest.fixture
def folder(tmp_path) -> Path:
    model = vitlab.create("vit_base", **{**SMALL, "classes": 3})
    model.labels = ["a", "b", "c"]
    return vitlab.save(model, tmp_path / "model")


def with_card(folder: Path, **values: Any) -> Path:
    card = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    (folder / "model.json").write_text(json.dumps({**card, "seal": None, **values}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("depth", 10**6, "depth is 1000000, but weights.safetensors has at most 1 blocks in a row"),
        ("width", 10**9, "width is 1000000000, but the longest side of a tensor"),
        ("image_size", [10**9, 10**9], "image_size is 1000000000"),
        ("heads", 10**9, "heads is 1000000000"),
        ("depth", 2, "depth is 2"),
        ("width", 24, "do not fit the network"),
    ],
)
def test_config_and_weights_must_belong_together(option, value, message, folder):
    card = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    with_card(folder, config={**card["config"], option: value})
    with pytest.raises(CheckpointError, match=message):
        load_with_report(folder)


@pytest.mark.parametrize(
    "values",
    [
        *(
            {"labels": held}
            for held in ([1, 2, 3], ["a", None, "c"], ["a", "b", {"c": 1}], ["a"], "abc", {"0": "a"}, 3)
        ),
        *({key: held} for key in ("name", "source", "licence") for held in (3, ["x"], {})),
        *({"metrics": held} for held in ("x", [1], 3)),
        *(
            {"preprocess": held}
            for held in ("x", [1], {"size": None}, {"size": [10**9, 10**9]}, {"size": 16, "std": [0, 0, 0]})
        ),
        *({"family": held} for held in (["vit"], {}, 3, "\x1b[2J")),
        *({"config": held} for held in ([], "x", None, {"\x1b[2J": 1}, {"tokens": [1]}, {"norm": {"eps": "x"}})),
    ],
    ids=lambda values: json.dumps(values)[:40],
)
def test_what_is_not_of_its_kind_is_refused_in_words(values, folder, command):
    with_card(folder, **values)
    with pytest.raises(CheckpointError) as told:
        load_with_report(folder)
    assert "model.json" in str(told.value) or "family" in str(told.value)
    shown = command("predict", folder, "digits#3", code=2)
    assert shown.stderr.startswith("vitlab: error: ") and shown.stderr.count("\n") == 1
    assert shown.stderr[:-1].isprintable()


def header_of(count: int, name: str = "a{}") -> bytes:
    """A .safetensors file of so many empty tensors."""
    key, value = json.dumps(name), '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = ("{" + ",".join(f"{key.replace('{}', str(n))}:{value}" for n in range(count)) + "}").encode()
    return struct.pack("<Q", len(text)) + text


def empty_arrays(count: int) -> bytes:
    array, held = io.BytesIO(), io.BytesIO()
    np.save(array, np.zeros(0, dtype=np.float32))
    with zipfile.ZipFile(held, "w") as archive:
        for n in range(count):
            archive.writestr(f"a{n}.npy", array.getvalue())
    return held.getvalue()


def pickled(count: int) -> bytes:
    held, empty = io.BytesIO(), torch.zeros(0)
    torch.save({f"a{n}": empty for n in range(count)}, held)
    return held.getvalue()


@pytest.mark.parametrize(
    ("file", "held"),
    [
        ("many.safetensors", lambda: header_of(10**6)),
        ("some.safetensors", lambda: header_of(20_000)),
        ("some.npz", lambda: empty_arrays(12_000)),
        ("some.pth", lambda: pickled(12_000)),
        ("empty.safetensors", lambda: header_of(1)),
        ("long.safetensors", lambda: header_of(1, name="x" * 10**6)),
        ("control.safetensors", lambda: header_of(3, name="\x1b[2J\r\n{}")),
    ],
    ids=lambda held: held if isinstance(held, str) else "",
)
def test_odd_weights_end_at_once_in_one_line(file, held, tmp_path):
    (tmp_path / file).write_bytes(held())
    began = time.process_time()
    with pytest.raises(CheckpointError, match=file) as told:
        load_with_report(tmp_path / file)
    assert time.process_time() - began < 5
    assert str(told.value).isprintable() and len(str(told.value)) <= LONGEST


@pytest.mark.parametrize("shape", [(), (1,), (0, 16), (1, 1, 1, 1, 1), (16, 3, 8, 8)], ids=str)
def test_no_tensor_of_another_shape_traces_back(shape, folder, tmp_path):
    """Every tensor in turn, of our own layout and of transformers' names."""
    from vitlab.checkpoints import convert

    theirs = tmp_path / "hf"
    convert.write(vitlab.load(folder), theirs, "hf")
    for weights in (folder / "weights.safetensors", theirs / "model.safetensors"):
        usual = load_file(weights)
        for key in usual:
            if usual[key].shape == shape:
                continue
            save_file({**usual, key: torch.zeros(shape)}, weights)
            with pytest.raises(CheckpointError):
                load_with_report(weights.parent)


def test_metrics_of_a_run_that_diverged_can_be_saved_and_loaded(folder):
    model = vitlab.load(folder)
    model.card.metrics = {"loss": float("nan"), "curve": [float("inf"), 1.0]}
    found = vitlab.load(vitlab.save(model, folder)).card.metrics
    assert found == {"loss": "NaN", "curve": ["Infinity", 1.0]}
