"""vitlab diff names what was planted: every error is made here by hand, in the weights or the config of a copy.

Partners: transformers' own hidden states and image processor, NumPy for the numbers of a row, and the remedy itself:
what it says is done, and the copies agree.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from torch import nn

import vitlab
from vitlab.checkpoints.load import AssumedWarning
from vitlab.explain.diff import Difference, diff
from vitlab.explain.diff.sides import open_side
from vitlab.images.preprocess import Preprocess
from vitlab.models.base import Network
from vitlab.models.config import Config

SMALL: dict[str, Any] = dict(
    image_size=(24, 40), patch_size=8, width=32, depth=3, heads=4, mlp_ratio=2.0, classes=5, prefix_positions="class"
)
HF_SMALL: dict[str, Any] = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, patch_size=8)


def randomise(model: nn.Module) -> Any:
    """Every parameter far from its start, so that a wrong one shows; tokens small, so that eps shows."""
    small = ("embeddings", "patch_embed", "token", "positions")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.002 if any(part in name for part in small) else 0.3)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return model.eval()


def small(**options: Any) -> Any:
    torch.manual_seed(0)
    return randomise(vitlab.create("vit_base", **{**SMALL, **options}))


def with_options(model: Any, **options: Any) -> Any:
    """The same weights in a network with other options."""
    other = vitlab.create("vit_base", **{**SMALL, **options})
    other.load_state_dict(model.state_dict())
    return other.eval()


def changed(model: Any, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        parameter = other.get_parameter(name)
        parameter.copy_(change(parameter.clone()))
    return other


def check(found: Difference, first: str, kind: str, *words: str) -> None:
    """The step, the kind of cause and its words; and that undoing it left nothing."""
    assert not found.equal
    assert found.first == first
    assert found.cause is not None, found.verdict
    assert found.cause.kind == kind, found.verdict
    for part in words:
        assert part in found.cause.words
    assert found.cause.step == first
    assert found.cause.after is not None and found.cause.after <= found.tolerance
    assert found.cause.explained is not None and found.cause.explained > 0.99
    assert found.unexplained == "" and len(found.causes) == 1, found.verdict
    assert f"first difference: {first}" in found.verdict
    assert found.remedy and found.remedy in found.verdict


# ---------------------------------------------------------------- equal copies


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(registers=3, layer_scale=0.5, classes=0),
        dict(norm="post", positions="relative"),
        dict(distill_token=True),
        dict(pooling="mean_norm", class_token=False, positions="sincos", prefix_positions="none"),
        dict(mlp="swiglu", qk_norm=True, positions="rotary", pooling="attention"),
    ],
    ids=["plain", "registers", "post", "distilled", "mean_norm", "swiglu"],
)
def test_equal_copies_agree_in_every_step(options, tmp_path):
    model = small(**options)
    path = vitlab.save(model, tmp_path / "copy")
    found = diff(model, path)
    assert found.equal and found.first is None and found.cause is None
    assert all(row.largest == 0 and row.cosine == pytest.approx(1) for row in found.rows)
    assert found.rows[0].step == "preprocess" and found.rows[1].step == "patch_embed"
    assert sum(row.step.startswith("blocks.") for row in found.rows) == 3 * (7 if options.get("norm") == "post" else 9)
    assert found.verdict.startswith(f"A and B agree in all {len(found.rows)} steps")


def test_a_row_holds_what_numpy_computes():
    a = small()
    b = changed(a, "blocks.1.mlp.fc2.weight", lambda w: w + 0.01 * torch.randn_like(w))
    images = torch.randn(3, 3, 24, 40)
    found = diff(a, b, images)
    with torch.no_grad():
        x, y = a(images).double().numpy(), b(images).double().numpy()
    row = found.rows[-1]
    assert (row.step, row.shape, row.differs) == ("head", (5,), True)
    assert row.largest == pytest.approx(np.abs(x - y).max(), rel=1e-4)
    assert row.relative == pytest.approx(np.abs(x - y).max() / max(np.abs(x).max(), np.abs(y).max()), rel=1e-4)
    assert row.cosine == pytest.approx((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()), abs=1e-6)
    assert found.first == "blocks.1.mlp.fc2"


# ---------------------------------------------------------------- the six planted errors


@pytest.mark.parametrize("eps", [1e-12, 1e-5])
def test_layer_norm_eps(eps, tmp_path):
    a = vitlab.save(small(), tmp_path / "a")
    b = vitlab.save(with_options(small(), eps=eps), tmp_path / "b")
    found = diff(a, b)
    check(found, "blocks.0.norm1", "eps", "LayerNorm eps: 1e-06 in A", f"{eps:g} in B")
    assert f"vitlab convert {a} DST --eps {eps}" in found.remedy
    assert diff(vitlab.load(a, eps=eps), b).equal


@pytest.mark.parametrize("activation", ["gelu_tanh", "quick_gelu", "relu"])
def test_gelu_kind(activation):
    a = small()
    found = diff(a, with_options(a, activation=activation))
    check(found, "blocks.0.mlp.fc1", "activation", "GELU kind: gelu in A", f"{activation} in B")
    assert f"with activation='{activation}'" in found.remedy


def test_mean_and_std(tmp_path):
    a = small()
    b = copy.deepcopy(a)
    b.preprocess = Preprocess((24, 40), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    found = diff(a, b)
    check(found, "preprocess", "preprocess", "mean and std", "mean (0.5, 0.5, 0.5) in A", "(0.229, 0.224, 0.225) in B")
    assert not any(row.differs for row in found.rows[1:])  # the networks agree
    fixed = vitlab.load(vitlab.save(a, tmp_path), preprocess=dict(mean=b.preprocess.mean, std=b.preprocess.std))
    assert diff(fixed, b).equal


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (dict(interpolation="bicubic"), "interpolation: interpolation bilinear in A, bicubic in B"),
        (dict(how="crop", resize=32), "crop: how stretch in A, crop in B"),
        (dict(scale=1.0), "scale of the pixels"),
        (dict(size=(32, 40)), "input size"),
        (dict(interpolation="lanczos", mean=(0.4, 0.5, 0.6)), "mean and std, interpolation"),
    ],
)
def test_other_settings_of_pictures(settings, name):
    a = small()
    b = copy.deepcopy(a)
    b.preprocess = Preprocess(**{"size": (24, 40), **settings})
    found = diff(a, b)
    check(found, "preprocess", "preprocess", name)


def column_by_column(table: torch.Tensor) -> torch.Tensor:
    grid = table[:, 1:].reshape(1, 3, 5, -1)
    return torch.cat([table[:, :1], grid.transpose(1, 2).flatten(1, 2)], dim=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (column_by_column, "the patches column by column"),
        (lambda t: t.roll(-1, 1), "the prefix at the end"),
        (lambda t: t[:, [0, 2, 1, *range(3, 16)]], "2 of 16 moved"),
    ],
)
def test_position_rows_in_another_order(change, words):
    a = small()
    check(diff(a, changed(a, "positions.table", change)), "positions", "positions", "another order", words)


def interpolated(table: torch.Tensor, size: tuple[int, int], antialias: bool) -> torch.Tensor:
    grid = table[:, 1:].reshape(1, 6, 10, -1).permute(0, 3, 1, 2)
    grid = nn.functional.interpolate(grid, size=size, mode="bicubic", align_corners=False, antialias=antialias)
    return torch.cat([table[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


def resized_copy(a: Any, antialias: bool) -> Any:
    """From 6 x 10 patches to 3 x 5, by torch itself; its config says nothing of it."""
    b = small()
    state = {**a.state_dict(), "positions.table": interpolated(a.positions.table, (3, 5), antialias)}
    b.load_state_dict(state)
    return b


@pytest.mark.parametrize("swapped", [False, True])
def test_positions_resized_by_another_rule(swapped):
    """A stores 6 x 10 positions; B stores 3 x 5 of them, antialiased, where A's rule would be plain bicubic."""
    a = small(image_size=(48, 80))
    b = resized_copy(a, antialias=True)
    found = diff(b, a) if swapped else diff(a, b)
    words = "A's position table is B's, resized by bicubic_antialias" if swapped else "come from bicubic_antialias"
    check(found, "positions", "positions", words)
    assert found.image_size == ((48, 80) if swapped else (24, 40))
    if not swapped:
        assert "resize_rule='bicubic_antialias'" in found.remedy
        assert diff(a, resized_copy(a, antialias=False)).equal


def test_one_table_resized_twice():
    a = small(image_size=(48, 80))
    found = diff(resized_copy(a, antialias=False), resized_copy(a, antialias=True))
    check(found, "positions", "positions", "as after a resize by another rule")


def test_the_rule_shows_only_at_another_size():
    a = small()
    b = with_options(a, resize_rule="bicubic_antialias")
    found = diff(a, b)
    assert found.equal
    told = "also different, without effect here: rule of position resize: bicubic in A, bicubic_antialias in B."
    assert found.notes == [told]
    check(diff(a, b, image_size=(16, 24)), "positions", "positions", "bicubic in A, bicubic_antialias in B")


def test_one_table_read_as_two_grids():
    a = small()
    b = with_options(a, image_size=(40, 24))
    check(diff(a, b), "positions", "positions", "read as two grids: 3 x 5 in A, 5 x 3 in B")


def by_part(
    change: Callable[[torch.Tensor], torch.Tensor], parts: str = "qkv"
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda w: torch.cat([change(x) if p in parts else x for p, x in zip("qkv", w.chunk(3), strict=True)])


@pytest.mark.parametrize(
    ("name", "change", "first", "words"),
    [
        ("attention.qkv", by_part(lambda w: w.T), "attention.qkv", "q, k and v: the transpose of A's"),
        ("attention.qkv", by_part(lambda w: w.T, "k"), "attention.qkv", "k: the transpose of A's"),
        ("attention.qkv", lambda w: w.T.reshape(w.shape), "attention.qkv", "reshaped, not transposed"),
        ("attention.proj", lambda w: w.T, "attention.proj", "the transpose of A's"),
        ("mlp.fc1", lambda w: w.T.reshape(w.shape), "mlp.fc1", "reshaped, not transposed"),
    ],
    ids=["qkv", "k", "qkv reshaped", "proj", "fc1"],
)
def test_transposed_weight(name, change, first, words):
    a = small()
    b = changed(a, f"blocks.1.{name}.weight", change)
    check(diff(a, b), f"blocks.1.{first}", "transposed", words, f"blocks.1.{name}.weight")


def test_all_blocks_transposed_are_one_cause():
    a = small()
    b = a
    for layer in range(3):
        b = changed(b, f"blocks.{layer}.attention.qkv.weight", by_part(lambda w: w.T))
    found = diff(a, b)
    check(found, "blocks.0.attention.qkv", "transposed", "blocks.0.attention.qkv.weight and 2 more")
    assert found.cause is not None and len(found.cause.tensors) == 3


@pytest.mark.parametrize("empty", ["A", "B"])
@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("blocks.1.attention.qkv.bias", "blocks.1.attention.qkv"),
        ("blocks.2.mlp.fc2.bias", "blocks.2.mlp.fc2"),
        ("patch_embed.proj.bias", "patch_embed"),
        ("head.bias", "head"),
    ],
)
def test_missing_bias(name, first, empty):
    whole = small()
    without = changed(whole, name, torch.zeros_like)
    found = diff(without, whole) if empty == "A" else diff(whole, without)
    other = {"A": "B", "B": "A"}[empty]
    check(found, first, "bias", "missing bias", f"all zeros in {empty}, not in {other}", name)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_bias_that_is_not_even_there(swapped):
    a = small()
    b = vitlab.create("vit_base", **SMALL, qkv_bias=False).eval()
    b.load_state_dict({k: v for k, v in a.state_dict().items() if not k.endswith("qkv.bias")})
    found = diff(b, a) if swapped else diff(a, b)
    there, none = ("B", "A") if swapped else ("A", "B")
    check(found, "blocks.0.attention.qkv", "bias", "bias of q, k and v", f"there in {there}", f"none in {none}")


def test_the_keys_bias_alone():
    a = small()
    b = changed(a, "blocks.0.attention.qkv.bias", by_part(torch.zeros_like, "k"))
    found = diff(a, b)
    # a constant in every key adds the same number to a query's scores, so only this step shows it
    check(found, "blocks.0.attention.qkv", "bias", "k: all zeros in B, not in A")
    assert not found.rows[-1].differs


# ---------------------------------------------------------------- other causes


def head_by_head(w: torch.Tensor) -> torch.Tensor:
    return w.reshape(3, 4, 8, -1).transpose(0, 1).reshape(w.shape)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: torch.cat([w.chunk(3)[i] for i in (1, 0, 2)]), "in the order k, q, v of A's q, k, v"),
        (head_by_head, "head by head"),
        (lambda w: w.reshape(3, 4, 8, -1).permute(1, 2, 0, 3).reshape(w.shape), "channel by channel"),
        (lambda w: w.reshape(4, 3, 8, -1).transpose(0, 1).reshape(w.shape), "part by part, in A head by head"),
    ],
)
def test_queries_keys_and_values_in_another_layout(change, words):
    a = small()
    b = changed(changed(a, "blocks.0.attention.qkv.weight", change), "blocks.0.attention.qkv.bias", change)
    found = diff(a, b)
    check(found, "blocks.0.attention.qkv", "qkv", words)
    assert found.cause is not None and len(found.cause.tensors) == 2


def times(factor: float, parts: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return by_part(lambda w: w * factor, parts)


@pytest.mark.parametrize(
    ("name", "change", "first", "kind", "words"),
    [
        ("patch_embed.proj.weight", lambda w: w.flip(1), "patch_embed", "channels", "RGB, BGR"),
        ("patch_embed.proj.weight", lambda w: w.transpose(2, 3), "patch_embed", "transposed", "of every patch swapped"),
        ("blocks.0.attention.qkv.weight", times(0.125, "q"), "blocks.0.attention.qkv", "scaled", "q: A's times 0.125"),
        ("class_token", torch.zeros_like, "prefix", "zero", "all zeros in B"),
        ("blocks.2.mlp.fc1.weight", lambda w: w.half().float(), "blocks.2.mlp.fc1", "rounded", "rounded to float16"),
        ("norm.weight", lambda w: w + 0.1 * torch.randn_like(w), "norm", "values", "norm.weight"),
        ("head.weight", lambda w: w[[0, 2, 1, 4, 3]], "head", "classes", "rows in another order"),
    ],
    ids=["bgr", "patches", "scaled", "class token", "half", "values", "classes"],
)
def test_other_changes_of_a_tensor(name, change, first, kind, words):
    a = small()
    check(diff(a, changed(a, name, change)), first, kind, words)


@pytest.mark.parametrize(
    ("options", "first", "kind", "words"),
    [
        (dict(pooling="mean"), "pool", "pooling", "pooling: class in A, mean in B"),
        (dict(heads=8), "blocks.0.attention.heads", "heads", "number of heads: 4 in A, 8 in B"),
    ],
)
def test_other_options(options, first, kind, words):
    a = small()
    check(diff(a, with_options(a, **options)), first, kind, words)


def test_another_classifier():
    a = small()
    b = copy.deepcopy(a)
    b.reset_classifier(7)
    found = diff(a, b)
    check(found, "head", "classes", "number of classes: 5 in A, 7 in B")
    assert "first difference: head (5 in A, 7 in B)." in found.verdict
    assert (found.rows[-1].shape, found.rows[-1].other_shape) == ((5,), (7,))


def test_no_class_token():
    a = small(pooling="mean")
    b = vitlab.create("vit_base", **{**SMALL, "pooling": "mean", "class_token": False}).eval()
    state = {k: v for k, v in a.state_dict().items() if k != "class_token"}
    b.load_state_dict({**state, "positions.table": state["positions.table"][:, 1:]})
    found = diff(a, b)
    check(found, "positions", "tokens", "class token: there in A, none in B")
    assert "first difference: positions (16 x 32 in A, 15 x 32 in B)." in found.verdict


def test_label_order():
    a = small()
    a.labels = ["ant", "bee", "cat", "dog", "eel"]
    b = copy.deepcopy(a)
    b.labels = ["ant", "cat", "bee", "dog", "eel"]
    found = diff(a, b)
    assert not found.equal and found.first == "labels"
    assert not any(row.differs for row in found.rows)
    assert found.cause is not None and found.cause.kind == "labels"
    assert "class 1 is 'bee' in A, 'cat' in B" in found.cause.words
    b.labels = ["ant", "Biene", "cat", "dog", "eel"]  # another language is no error
    found = diff(a, b)
    assert found.equal and found.notes == ["label names differ: class 1 is 'bee' in A, 'Biene' in B."]


@pytest.mark.parametrize("along", [True, False])
def test_classes_in_another_order_with_their_names(along):
    order = [0, 2, 1, 4, 3]
    a = small()
    a.labels = ["ant", "bee", "cat", "dog", "eel"]
    b = changed(changed(a, "head.weight", lambda w: w[order]), "head.bias", lambda w: w[order])
    b.labels = [a.labels[i] for i in order] if along else a.labels
    found = diff(a, b)
    check(found, "head", "classes", "the label names moved along" if along else "did not move along")
    assert found.cause is not None and set(found.cause.tensors) == {"head.weight", "head.bias"}


def test_several_errors_are_found_one_behind_the_other():
    a = small()
    b = with_options(a, eps=1e-12, activation="quick_gelu")
    b = changed(b, "blocks.1.attention.proj.weight", lambda w: w.T)
    b = changed(b, "blocks.2.mlp.fc2.bias", torch.zeros_like)
    b.preprocess = Preprocess((24, 40), mean=(0.4, 0.4, 0.4))
    found = diff(a, b)
    assert [cause.kind for cause in found.causes] == ["preprocess", "eps", "activation", "transposed", "bias"]
    steps = ["preprocess", "blocks.0.norm1", "blocks.0.mlp.fc1", "blocks.1.attention.proj", "blocks.2.mlp.fc2"]
    assert [cause.step for cause in found.causes] == steps
    assert found.first == "preprocess" and found.unexplained == ""


def test_two_errors_in_one_step():
    a = small()
    b = with_options(a, eps=1e-12, resize_rule="bicubic_offset")  # the rule plays no part
    b = changed(b, "blocks.0.norm1.bias", torch.zeros_like)
    found = diff(a, b)
    check(found, "blocks.0.norm1", "eps", "LayerNorm eps", "; and missing bias")
    assert found.cause is not None and "resize" not in found.cause.words
    assert len(found.notes) == 1 and "without effect here: rule of position resize" in found.notes[0]


def test_a_trained_copy_is_not_explained():
    a = small()
    b = copy.deepcopy(a)
    with torch.no_grad():
        for parameter in b.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn_like(parameter))
    found = diff(a, b)
    assert not found.equal and found.causes == [] and found.first == "patch_embed"
    total = len(list(a.parameters()))
    assert f"No known cause repairs patch_embed: {total} of {total} tensors differ" in found.unexplained
    assert "One looks like a trained copy of the other." in found.unexplained
    torch.manual_seed(5)
    found = diff(a, randomise(copy.deepcopy(a)))
    assert "They look like two trainings." in found.unexplained


def test_what_explains_most_is_named_where_nothing_explains_all():
    """From the first MLP on it is a copy that was trained a little further, and there the activation differs too."""
    a = small()
    b = with_options(a, eps=1e-12, activation="quick_gelu")
    with torch.no_grad():
        for name, parameter in b.named_parameters():
            if name.startswith(("blocks.0.mlp", "blocks.1", "blocks.2", "norm", "head")):
                parameter.add_(1e-3 * parameter.std() * torch.randn_like(parameter))
    found = diff(a, b)
    assert [cause.kind for cause in found.causes] == ["eps"]
    assert "No known cause repairs what comes then, blocks.0.mlp.fc1: 32 of 44 tensors differ" in found.unexplained
    assert "Nearest comes GELU kind: gelu in A, quick_gelu in B, which explains" in found.unexplained
    assert found.notes == ["also different: GELU kind: gelu in A, quick_gelu in B."]


def test_not_a_number_is_a_difference():
    a = small()
    b = changed(a, "blocks.1.mlp.fc2.bias", lambda w: w * float("nan"))
    found = diff(a, b)
    assert found.first == "blocks.1.mlp.fc2" and found.causes == []
    assert "blocks.1.mlp.fc2 (not a number in one of them)" in found.verdict
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("swapped", [False, True])
def test_norms_that_differ_from_their_config(swapped):
    """The configs agree; one network was changed behind its config's back."""
    a = small()
    b = copy.deepcopy(a)
    for module in b.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 3e-4
    found = diff(b, a) if swapped else diff(a, b)
    letter = "A" if swapped else "B"
    check(found, "blocks.0.norm1", "eps", f"{letter} computes as with 0.0003, although its config says 1e-06")


# ---------------------------------------------------------------- pictures


@pytest.fixture
def pictures(tmp_path) -> list[Any]:
    paths = []
    for number, size in enumerate([(61, 40), (33, 90), (50, 50)]):
        pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        paths.append(tmp_path / f"{number}.png")
    return paths


def test_pictures_and_networks_are_told_apart(pictures):
    a = small()
    b = with_options(a, activation="quick_gelu")
    b.preprocess = Preprocess((24, 40), mean=(0.2, 0.2, 0.2))
    found = diff(a, b, pictures)
    assert found.images == 3
    assert [cause.kind for cause in found.causes] == ["preprocess", "activation"]
    steps = {row.step: row for row in found.rows}
    assert not steps["patch_embed"].differs  # both networks got the same tensor
    assert steps["blocks.0.mlp.fc1"].differs
    with torch.no_grad():  # the whole path, each side by itself
        x, y = (model(torch.stack([model.preprocess(p) for p in pictures])) for model in (a, b))
    assert found.own is not None and found.own.largest == pytest.approx(float((x - y).abs().max()), rel=1e-4)
    assert found.same_class == int((x.argmax(1) == y.argmax(1)).sum())


def test_several_pictures_count_as_one_row(pictures):
    a = small()
    b = changed(a, "blocks.1.mlp.fc2.weight", lambda w: w.T.reshape(w.shape))
    together = diff(a, b, pictures)
    alone = [diff(a, b, [path]) for path in pictures]
    for number, row in enumerate(together.rows):
        assert row.largest == pytest.approx(max(found.rows[number].largest for found in alone), rel=1e-6)
    check(together, "blocks.1.mlp.fc2", "transposed")


def test_equal_pictures_agree(pictures):
    found = diff(small(), small(), pictures)
    assert found.equal and found.own is not None and found.own.largest == 0 and found.same_class == 3


# ---------------------------------------------------------------- transformers


def vit(folder: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    settings = {**HF_SMALL, "image_size": (32, 48), "intermediate_size": 96, "num_labels": 5, **options}
    theirs = randomise(hf.ViTForImageClassification(hf.ViTConfig(**settings)))
    theirs.save_pretrained(folder)
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 48}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return theirs


def test_transformers_steps_are_its_own_hidden_states(tmp_path):
    theirs = vit(tmp_path)
    images = torch.randn(2, 3, 32, 48)
    steps = open_side("B", f"transformers:{tmp_path}", None, None).steps(images)
    with torch.no_grad():
        out = theirs(images, output_hidden_states=True)
    torch.testing.assert_close(steps["positions", None], out.hidden_states[0], atol=0, rtol=0)
    for layer in range(3):
        torch.testing.assert_close(steps["tokens", layer], out.hidden_states[layer + 1], atol=0, rtol=0)
    torch.testing.assert_close(steps["head", None], out.logits, atol=0, rtol=0)


FAMILIES = {
    "vit": (hf.ViTConfig, hf.ViTForImageClassification, dict(image_size=(32, 48), intermediate_size=96)),
    "vit without head": (hf.ViTConfig, hf.ViTModel, dict(image_size=32, intermediate_size=96)),
    "distilled": (hf.DeiTConfig, hf.DeiTForImageClassificationWithTeacher, dict(image_size=32, intermediate_size=96)),
    "dinov2": (hf.Dinov2Config, hf.Dinov2ForImageClassification, dict(image_size=32)),
    "swiglu": (hf.Dinov2Config, hf.Dinov2Model, dict(image_size=32, use_swiglu_ffn=True)),
    "registers": (
        *(hf.Dinov2WithRegistersConfig, hf.Dinov2WithRegistersForImageClassification),
        dict(image_size=32, num_register_tokens=3),
    ),
}


@pytest.mark.parametrize(("config", "build", "options"), FAMILIES.values(), ids=FAMILIES)
def test_our_reading_agrees_with_transformers(config, build, options, tmp_path):
    torch.manual_seed(1)
    randomise(build(config(**HF_SMALL, **options))).save_pretrained(tmp_path)
    for found in (diff(tmp_path, f"transformers:{tmp_path}"), diff(f"transformers:{tmp_path}", tmp_path)):
        assert found.equal, found.verdict
        steps = {row.step for row in found.rows}
        inside = ("norm1", "attention.qkv", "attention.heads", "attention.proj", "after_attention", "norm2")
        wanted = {f"blocks.{i}.{kind}" for i in range(3) for kind in (*inside, "mlp.fc1", "mlp.fc2", "tokens")}
        assert wanted | {"preprocess", "patch_embed", "positions", "norm"} <= steps
        assert steps & {"head", "pool"}


@pytest.mark.parametrize("swapped", [False, True])
def test_a_wrong_activation_is_found_against_transformers(swapped, tmp_path):
    vit(tmp_path)
    ours = vitlab.load(tmp_path, activation="gelu_tanh")
    other = f"transformers:{tmp_path}"
    found = diff(other, ours) if swapped else diff(ours, other)
    check(found, "blocks.0.mlp.fc1", "activation", "gelu in A" if swapped else "gelu_tanh in A")


def test_a_transposed_matrix_and_eps_are_found_against_transformers(tmp_path):
    vit(tmp_path)
    ours = vitlab.load(tmp_path, eps=1e-6)
    ours = changed(ours, "blocks.1.attention.qkv.weight", by_part(lambda w: w.T))
    found = diff(ours, f"transformers:{tmp_path}")
    assert [cause.kind for cause in found.causes] == ["eps", "transposed"]
    assert [cause.step for cause in found.causes] == ["blocks.0.norm1", "blocks.1.attention.qkv"]
    assert found.unexplained == ""


def test_two_folders_both_by_transformers(tmp_path):
    for name, options in (("a", {}), ("b", dict(hidden_act="quick_gelu"))):
        (tmp_path / name).mkdir()
        vit(tmp_path / name, **options)
    found = diff(f"transformers:{tmp_path / 'a'}", f"transformers:{tmp_path / 'b'}")
    check(found, "blocks.0.mlp.fc1", "activation", "gelu in A, quick_gelu in B")


def test_a_head_that_transformers_made_up_is_told(tmp_path):
    """A folder of features named as a classifier: transformers draws a random head."""
    vit(tmp_path)
    from safetensors.torch import load_file, save_file

    state = load_file(tmp_path / "model.safetensors")
    state = {key: value for key, value in state.items() if not key.startswith("classifier.")}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = diff(tmp_path, f"transformers:{tmp_path}")
    assert any("did not find classifier.bias, classifier.weight in the file" in note for note in found.notes)


def test_transformers_own_image_processor_is_used(tmp_path, pictures):
    folder = tmp_path / "hf"
    folder.mkdir()
    vit(folder)
    path = folder / "preprocessor_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), "image_mean": [0.1, 0.2, 0.3]}), encoding="utf-8"
    )
    ours = vitlab.load(folder)
    assert diff(ours, f"transformers:{folder}", pictures).equal
    ours.preprocess = Preprocess((32, 48))
    found = diff(ours, f"transformers:{folder}", pictures)
    check(found, "preprocess", "preprocess", "mean (0.5, 0.5, 0.5) in A, (0.1, 0.2, 0.3) in B")
    processor = hf.AutoImageProcessor.from_pretrained(folder)
    side = open_side("B", f"transformers:{folder}", None, None)
    images = [Image.open(p) for p in pictures]
    expected = processor(images=images, return_tensors="pt")["pixel_values"]
    seen = side.view(images, (32, 48))
    assert seen is not None
    torch.testing.assert_close(seen, expected, atol=0, rtol=0)


def test_transformers_resizes_positions_at_another_size(tmp_path):
    vit(tmp_path, image_size=32)
    (tmp_path / "preprocessor_config.json").unlink()
    assert diff(tmp_path, f"transformers:{tmp_path}", image_size=(40, 56)).equal
    other = vitlab.load(tmp_path, resize_rule="bicubic_offset")
    found = diff(other, f"transformers:{tmp_path}", image_size=(40, 56))
    check(found, "positions", "positions", "bicubic_offset in A, bicubic in B")


# ---------------------------------------------------------------- what cannot be compared


def test_different_networks_are_refused_by_name():
    with pytest.raises(ValueError, match=r"different networks: width 32 in A, 64 in B; depth 3 in A, 2 in B"):
        diff(small(), small(width=64, depth=2))
    with pytest.raises(ValueError, match=r"positions learned in A, rotary in B"):
        diff(small(), small(positions="rotary"))


@pytest.mark.parametrize("tolerance", [0, -1.0, float("nan"), float("inf"), "small"])
def test_a_tolerance_that_means_nothing(tolerance):
    with pytest.raises(ValueError, match="must be a number above 0"):
        diff(small(), small(), tolerance=tolerance)


def test_wrong_input(tmp_path):
    a = small()
    with pytest.raises(ValueError, match="no such file or folder"):
        diff(a, tmp_path / "nothing")
    with pytest.raises(ValueError, match="no transformers folder"):
        diff(a, f"transformers:{tmp_path}")
    with pytest.raises(ValueError, match=r"expected a model of vitlab.*found a Linear"):
        diff(nn.Linear(2, 2), a)
    with pytest.raises(ValueError, match="found a int"):
        diff(a, a, [3])
    with pytest.raises(ValueError, match="at least one"):
        diff(a, a, [])
    with pytest.raises(ValueError, match=r"must be \(batch, 3, height, width\)"):
        diff(a, a, torch.randn(2, 1, 24, 40))
    bare = copy.deepcopy(a)
    bare.preprocess = None
    assert "B says nothing of how images are preprocessed" in diff(a, bare).notes[0]
    with pytest.raises(ValueError, match="neither A nor B says how images are preprocessed"):
        diff(bare, bare, Image.new("RGB", (30, 30)))


def test_what_transformers_cannot_run_is_told(tmp_path, monkeypatch):
    config = hf.ViTMAEConfig(**HF_SMALL, image_size=32, intermediate_size=96)
    randomise(hf.ViTMAEForPreTraining(config)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a 'vit_mae' model is not run by transformers here"):
        diff(f"transformers:{tmp_path}", tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(
        ValueError, match=r"needs transformers, which is not installed: pip install 'vitlab\[compare\]'"
    ):
        diff(f"transformers:{tmp_path}", tmp_path)


def test_a_bare_file_is_told_its_heads(tmp_path):
    from safetensors.torch import save_file

    from vitlab.checkpoints import keymap, timm

    model = small(image_size=(40, 40))
    save_file(keymap.write("timm", timm.RULES, dict(model.state_dict()), heads=4), tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match=r"heads=\d"):
        diff(model, tmp_path / "bare.safetensors")
    found = diff(model, tmp_path / "bare.safetensors", heads=4)
    assert not any(row.differs for row in found.rows[1:])
    assert any("do not say eps" in note for note in found.notes)
    with pytest.warns(AssumedWarning):  # load itself warns; diff keeps it as a note
        vitlab.load(tmp_path / "bare.safetensors", heads=4)


def test_asking_leaves_the_models_as_they_were():
    a, b = small(), with_options(small(), eps=1e-12, activation="relu")
    a.train()
    before = {name: value.clone() for name, value in a.state_dict().items()}
    diff(a, b)
    assert a.training and not b.training
    assert all(torch.equal(value, before[name]) for name, value in a.state_dict().items())
    assert all(parameter.requires_grad for parameter in a.parameters())
    assert not any(module._forward_hooks for module in a.modules())


def test_the_result_is_plain_json(tmp_path):
    a = small()
    b = copy.deepcopy(a)
    b.reset_classifier(7)
    found = json.loads(json.dumps(diff(a, b).to_dict(), allow_nan=False))
    assert found["equal"] is False and found["first"] == "head"
    assert found["rows"][-1]["largest"] is None and found["rows"][-1]["other_shape"] == [7]
    assert found["causes"][0]["kind"] == "classes" and found["causes"][0]["explained"] == 1.0


def test_what_is_no_vit_is_refused_whatever_its_family():
    class Mixer(Network):
        config = Config()

    with pytest.raises(vitlab.UsageError, match="B is a Mixer, and diff follows the steps of a ViT"):
        diff(small(), Mixer())
