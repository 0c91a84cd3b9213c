"""Positions: sin-cos against transformers' MAE, rotary against complex numbers, resizing against torch."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

import vitlab
from vitlab.checkpoints import convert, keymap, timm
from vitlab.checkpoints.load import load_with_report
from vitlab.layers.positions import LearnedPositions, resize_grid, resize_relative, rotary_2d, rotate, sincos_2d


def test_sincos_matches_mae():
    row_then_column = build_2d_sinusoidal_position_embedding(5, 7, embed_dim=48)
    theirs = row_then_column.roll(24, dims=1)  # released MAE weights have the column's half first
    torch.testing.assert_close(sincos_2d((5, 7), 48)[0], theirs.float(), atol=1e-6, rtol=0)


def test_sincos_of_a_wide_grid_is_the_corner_of_a_square_one():
    square = sincos_2d((7, 7), 32)[0].reshape(7, 7, 32)
    assert torch.equal(sincos_2d((3, 7), 32)[0].reshape(3, 7, 32), square[:3])


def test_rotation_is_a_product_of_complex_numbers():
    grid, d = (3, 5), 16
    x = torch.randn(2, 4, 15, d)
    turned = rotate(x, rotary_2d(grid, d, 100.0, prefix=0))
    z = torch.view_as_complex(x.unflatten(-1, (d // 2, 2)).contiguous())
    for n, (row, column) in enumerate((r, c) for r in range(3) for c in range(5)):
        for pair in range(d // 2):
            place, i = (row, pair) if pair < d // 4 else (column, pair - d // 4)
            angle = place * 100.0 ** (-i / (d // 4))
            expected = z[:, :, n, pair] * torch.polar(torch.tensor(1.0), torch.tensor(angle))
            torch.testing.assert_close(turned[:, :, n, 2 * pair], expected.real, atol=1e-5, rtol=0)
            torch.testing.assert_close(turned[:, :, n, 2 * pair + 1], expected.imag, atol=1e-5, rtol=0)


def test_rotary_scores_depend_on_the_offset_only():
    rope = rotary_2d((6, 7), 32, 100.0, prefix=0)
    q = rotate(torch.randn(1, 1, 1, 32).expand(1, 1, 42, 32), rope)[0, 0].reshape(6, 7, 32)
    k = rotate(torch.randn(1, 1, 1, 32).expand(1, 1, 42, 32), rope)[0, 0].reshape(6, 7, 32)
    torch.testing.assert_close(q[1, 2] @ k[3, 5], q[2, 1] @ k[4, 4], atol=1e-4, rtol=0)
    assert abs(q[1, 2] @ k[3, 5] - q[1, 2] @ k[5, 3]) > 1e-3


def test_prefix_tokens_are_not_turned():
    x = torch.randn(2, 3, 2 + 6, 8)
    turned = rotate(x, rotary_2d((2, 3), 8, 100.0, prefix=2))
    assert torch.equal(turned[:, :, :2], x[:, :, :2])
    assert not torch.equal(turned[:, :, 3:], x[:, :, 3:])


@pytest.mark.parametrize("rule", ["bicubic", "bicubic_antialias"])
@pytest.mark.parametrize("new", [(24, 24), (7, 28), (9, 5)])
def test_resize_is_torchs_bicubic_on_the_grid(rule, new):
    values = torch.randn(1, 14 * 14, 8)
    picture = values.reshape(1, 14, 14, 8).permute(0, 3, 1, 2)
    theirs = F.interpolate(picture, size=new, mode="bicubic", antialias=rule != "bicubic")
    assert torch.equal(resize_grid(values, (14, 14), new, rule), theirs.flatten(2).transpose(1, 2))


def test_facebooks_rule_resizes_by_scale():
    """A resized sample lies at (i + 0.5) / scale - 0.5 of the old grid, with scale (new + 0.1) / old."""
    values = torch.randn(1, 16, 1)
    found = resize_grid(values, (4, 4), (6, 6), "bicubic_offset").reshape(6, 6)
    grid = values.reshape(4, 4)

    def kernel(x, a=-0.75):
        x = abs(x)
        return (a + 2) * x**3 - (a + 3) * x**2 + 1 if x <= 1 else a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0

    def at(i):
        place = (i + 0.5) / (6.1 / 4) - 0.5
        base = int(place // 1)
        return [(min(max(base + k, 0), 3), kernel(place - base - k)) for k in range(-1, 3)]

    for i in range(6):
        for j in range(6):
            expected = sum(wr * wc * grid[r, c] for r, wr in at(i) for c, wc in at(j))
            torch.testing.assert_close(found[i, j], expected, atol=1e-5, rtol=0)


def test_equal_counts_of_other_grids_are_resized():
    """196 = 14 x 14 = 7 x 28: the grid decides, not the count."""
    positions = LearnedPositions((14, 14), 8, prefix=1)
    table = positions((7, 28), like=torch.zeros(1))
    assert table.shape == positions.table.shape
    assert not torch.equal(table, positions.table)
    assert torch.equal(table[:, :1], positions.table[:, :1])


def test_same_grid_changes_nothing():
    positions = LearnedPositions((3, 5), 8, prefix=2)
    assert positions((3, 5), like=torch.zeros(1)) is positions.table


def test_constant_positions_stay_constant_when_resized():
    values = torch.full((1, 15, 4), 0.7)
    for rule in ("bicubic", "bicubic_antialias", "bicubic_offset"):
        torch.testing.assert_close(resize_grid(values, (3, 5), (7, 4), rule), torch.full((1, 28, 4), 0.7))


def test_relative_tables_keep_their_prefix_entries():
    table = torch.randn(5 * 7 + 3, 2)
    new = resize_relative(table, (3, 4), (4, 6))
    assert new.shape == (7 * 11 + 3, 2)
    assert torch.equal(new[-3:], table[-3:])
    torch.testing.assert_close(new[3 * 11 + 5], table[2 * 7 + 3])  # offset (0, 0) stays in the middle


# ---------------------------------------------------------------- each library's own rule, when a file is loaded

SMALL = dict(image_size=40, patch_size=8, width=48, depth=1, heads=4, classes=3)  # a grid of 5 x 5
NEW = {"smaller": (24, 32), "larger": (56, 48), "one of each": (24, 64)}


def by_torch(table: Tensor, prefix: int, size: tuple[int, int], rule: str) -> Tensor:
    """The stored 5 x 5 grid at another image size, as F.interpolate gives it."""
    new = (size[0] // 8, size[1] // 8)
    options = {
        "bicubic": dict(size=new),
        "bicubic_antialias": dict(size=new, antialias=True),
        "bicubic_offset": dict(scale_factor=((new[0] + 0.1) / 5, (new[1] + 0.1) / 5)),
    }[rule]
    picture = table[:, prefix:].reshape(1, 5, 5, 48).permute(0, 3, 1, 2)
    resized = F.interpolate(picture, mode="bicubic", align_corners=False, **options)
    return torch.cat([table[:, :prefix], resized.flatten(2).mT], dim=1)


def check_resized(path, size: tuple[int, int], rule: str, **told) -> None:
    """Loaded at another size the table is torch's under this rule, and no other rule's; so it is at forward time."""
    stored, _ = load_with_report(path, **told)
    model, report = load_with_report(path, image_size=size, **told)
    assert report.counts()["resized"] == 1
    n = model.config.positioned_prefix
    expected = {each: by_torch(stored.positions.table, n, size, each) for each in ("bicubic", rule)}
    torch.testing.assert_close(model.positions.table, expected[rule], atol=1e-6, rtol=0)
    if rule == "bicubic_offset" or (rule == "bicubic_antialias" and min(size) < 40):
        assert (expected["bicubic"] - expected[rule]).abs().max() > 1e-3  # the rules are told apart
    images = torch.randn(2, 3, *size)
    torch.testing.assert_close(stored(images), model(images), atol=1e-5, rtol=0)


@pytest.fixture
def made():
    """A model whose positions vary, so that every rule shows; written where a test says."""

    def make(**options):
        model = vitlab.create("vit_base", **{**SMALL, **options}).eval()
        torch.nn.init.normal_(model.positions.table)
        return model

    return make


@pytest.mark.parametrize("size", NEW.values(), ids=NEW)
def test_a_timm_folder_is_resized_with_antialiasing(size, made, tmp_path):
    convert.write(made(), tmp_path / "timm", "timm")
    assert (
        "resize_rule" not in json.loads((tmp_path / "timm" / "config.json").read_text(encoding="utf-8"))["model_args"]
    )
    check_resized(tmp_path / "timm", size, "bicubic_antialias")


@pytest.mark.parametrize("size", NEW.values(), ids=NEW)
def test_a_transformers_folder_is_resized_without(size, made, tmp_path):
    convert.write(made(), tmp_path / "hf", "hf")
    check_resized(tmp_path / "hf", size, "bicubic")


@pytest.mark.parametrize("size", NEW.values(), ids=NEW)
@pytest.mark.parametrize(("registers", "rule"), [(0, "bicubic_offset"), (3, "bicubic_antialias")])
def test_facebooks_dinov2_is_resized_by_scale_and_with_registers_antialiased(registers, rule, size, made, tmp_path):
    model = made(registers=registers, layer_scale=0.1, classes=0)
    state = keymap.write("timm", timm.RULES, dict(model.state_dict()), heads=4)
    state["mask_token"] = torch.zeros(1, 48)
    if registers:
        state["register_tokens"] = state.pop("reg_token")
    save_file(state, tmp_path / "dinov2.safetensors")
    told = dict(heads=4, eps=1e-6, activation="gelu")
    model, report = load_with_report(tmp_path / "dinov2.safetensors", **told)
    assert (report.dialect, model.config.positions.resize_rule) == ("facebook", rule)
    check_resized(tmp_path / "dinov2.safetensors", size, rule, **told)


@pytest.mark.parametrize("rule", ["bicubic", "bicubic_antialias", "bicubic_offset"])
def test_a_native_folder_remembers_its_rule(rule, made, tmp_path):
    vitlab.save(made(resize_rule=rule, registers=2), tmp_path)
    assert load_file(tmp_path / "weights.safetensors")["positions.table"].shape == (1, 26, 48)
    check_resized(tmp_path, (24, 32), rule)


@pytest.mark.parametrize("size", ["small", "base", "large", "giant"])
@pytest.mark.parametrize(
    ("name", "rule"), [("dinov2_{}", "bicubic_offset"), ("dinov2_{}_registers", "bicubic_antialias")]
)
def test_registered_dinov2_resizes_as_its_release(name, rule, size):
    with torch.device("meta"):
        model = vitlab.create(name.format(size), depth=1)
    assert (model.config.positions.resize_rule, model.positions.rule) == (rule, rule)
    assert (model.config.norm.eps, model.norm.eps, model.blocks[0].norm1.eps) == (1e-6, 1e-6, 1e-6)
