"""Every value of the JSON files beside weights, replaced by hostile ones: used as it says, or refused in words."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import load_with_report
from vitlab.errors import LONGEST, CheckpointError
from vitlab.text.tokenizer import Tokenizer

SMALL: dict[str, Any] = dict(image_size=16, patch_size=8, width=16, depth=1, heads=2, classes=3, mlp_ratio=2.0)
STAGES: dict[str, Any] = dict(depths=(1, 1), widths=(8, 16), heads=(1, 2), reductions=(2, 1), mlp_ratios=(2, 2))
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # layout and model -> how it is made
    "hf vit": ("vit_base", SMALL),
    "hf deit": ("deit_tiny_distilled", SMALL),
    "hf dinov2": ("vit_base", {**SMALL, "layer_scale": 1e-5, "registers": 2, "pooling": "class_mean"}),
    "hf mae": (
        "mae_tiny",
        dict(image_size=16, patch_size=8, width=16, depth=1, heads=2, decoder=dict(width=16, depth=1, heads=2)),
    ),
    "hf resnet": ("resnet18", dict(depths=(1, 1), widths=(8, 16), stem_width=8, classes=3)),
    "hf swin": ("swin_tiny", dict(image_size=16, width=8, depths=(1, 1), heads=(1, 2), window=2, classes=3)),
    "hf swinv2": ("swinv2_tiny", dict(image_size=16, width=8, depths=(1, 1), heads=(1, 2), window=2, classes=3)),
    "hf pvt": ("pvt_tiny", {**STAGES, "image_size": 16, "classes": 3}),
    "hf pvt_v2": ("pvt_v2_b0", {**STAGES, "image_size": 16, "classes": 3}),
    "hf clip": ("clip_nano", {"image.depth": 1, "text.depth": 1, "image.width": 16, "text.width": 16, "embed_dim": 8}),
    "open_clip clip": (
        "clip_nano",
        {"image.depth": 1, "text.depth": 1, "image.width": 64, "text.width": 64, "image.heads": 1},
    ),
    "timm vit": ("vit_base", SMALL),
}
HOSTILE: list[Any] = [
    *(None, True, "x", "", [], ["gelu"], [1], {}, {"a": 1}, {"height": None}),
    *(-1, 0, 10**6, 10**9, 10**40, 10**400, 0.5, -1.5, 1e300, "\x1b[2Jx\n"),
]
EVERY = 7  # of the hostile values each place gets two or three, in turns: the families share most names


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    found = {}
    for title, (name, options) in MODELS.items():
        layout = title.split()[0]
        tokenizer = None
        if "clip" in title:
            tokenizer = Tokenizer.train(["a cat", "a dog"], vocab=520, context=8)
            options = {**options, **tokenizer.options}
        model = vitlab.create(name, **options).eval()
        if tokenizer is not None:
            model.tokenizer = tokenizer
        elif model.config.classes:
            model.labels = ["cat", "dog", "boat"]
        found[title] = tmp_path_factory.mktemp("weights") / "folder"
        convert.write(model, found[title], layout)
    return found


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a JSON object values stand; of a list, its first entry."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in list(value.items())[:60]:
            yield from places(inner, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    found = copy.deepcopy(value)
    inner = found
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = new
    return found


def all_of(model: Any) -> str:
    """What loading took from the files, as one text."""
    held = [model.config.to_dict(), model.preprocess and model.preprocess.to_dict(), model.labels]
    return json.dumps(held)


def is_said(value: Any, found: str) -> bool:
    """Whether the loaded model shows the value, as it is or as a float. A table of unknown names says nothing."""
    number = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**300
    return (
        json.dumps(value).strip("[]{}") in found or (number and str(float(value)) in found) or isinstance(value, dict)
    )


def problem(folder: Path, value: Any, usual: str) -> str | None:
    """What is wrong with how loading ended, if anything."""
    try:
        found = all_of(load_with_report(folder)[0])
    except CheckpointError as error:
        told = str(error)
        fine = len(told) <= LONGEST and told.isprintable() and folder.name in told
        return None if fine else f"not one line that names the folder: {told!r:.200}"
    except Exception as error:
        return f"{error!r:.200}"
    fine = found == usual or value is None or value is True or is_said(value, found)  # true where a flag stands
    return None if fine else f"loaded as something else: {found}"


@pytest.mark.parametrize("number", range(len(MODELS)), ids=list(MODELS))
def test_a_hostile_value_is_used_as_it_says_or_refused_in_words(number, folders):
    folder, wrong, turn = list(folders.values())[number], [], number
    usual = all_of(load_with_report(folder)[0])
    for file in sorted(folder.glob("*.json")):
        if file.name in ("tokenizer.json", "vocab.json"):
            continue
        text = file.read_text(encoding="utf-8")
        for path in places(json.loads(text)):
            turn += 1
            for value in HOSTILE[turn % EVERY :: EVERY]:
                file.write_text(json.dumps(replaced(json.loads(text), path, value)), encoding="utf-8")
                if told := problem(folder, value, usual):
                    wrong.append(f"{file.name} {path} = {value!r:.40}: {told}")
        file.write_text(text, encoding="utf-8")
    assert not wrong, "\n".join(wrong)
