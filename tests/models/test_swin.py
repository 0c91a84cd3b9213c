"""Swin alone: its names, windows on maps of any size, and another window for trained weights."""

import pytest
import torch
import torch.nn.functional as F

import vitlab
from vitlab.layers.windows import Windows
from vitlab.models.swin import PatchMerging, SwinConfig


@pytest.mark.parametrize(
    ("name", "size", "window", "width"),
    [
        ("Swin-T", 224, 7, 96),
        ("swin_s", 224, 7, 96),
        ("swin_base_patch4_window12_384", 384, 12, 128),
        ("swin_large_patch4_window7_224.ms_in22k", 224, 7, 192),
        ("swin_tiny_patch4_window8_256", 256, 8, 96),
        ("swin_tiny_256", 256, 7, 96),
        ("swin_small_384", 384, 12, 96),
    ],
)
def test_names_from_elsewhere(name, size, window, width):
    with torch.device("meta"):
        model = vitlab.create(name, depths=(1, 1, 1, 1))
    c = model.config
    assert (c.image_size, c.window, c.width) == ((size, size), window, width)
    assert model.preprocess.size == (size, size) and model.preprocess.mean[0] == 0.485


def test_windows_of_the_paper():
    """Fig. 4: 7 x 7, every second layer moved by 3; the last stage of 224 px is one window."""
    with torch.device("meta"):
        places = vitlab.create("swin_tiny").places(224, 224)
    assert places[0] == Windows((56, 56), (7, 7)) and places[1] == Windows((56, 56), (7, 7), (3, 3))
    assert places[2:4] == (Windows((28, 28), (7, 7)), Windows((28, 28), (7, 7), (3, 3)))
    assert places[10] == places[11] == Windows((7, 7), (7, 7))


def test_maps_that_fit_into_a_window_are_not_shifted():
    c = SwinConfig(window=4)
    assert c.windows((3, 9), 4, shifted=True) == Windows((3, 9), (3, 4))  # as the paper's code: neither axis
    each = c.with_options(shift_axes="each")
    assert each.windows((3, 9), 4, shifted=True) == Windows((3, 9), (3, 4), (0, 2))  # as timm
    assert each.windows((4, 4), 4, shifted=True) == Windows((4, 4), (4, 4))
    assert c.windows((5, 9), 4, shifted=True) == Windows((5, 9), (4, 4), (2, 2))


def test_merging_is_four_neighbours_side_by_side():
    merge = PatchMerging(2, eps=1e-5).eval()
    z = torch.randn(2, 5 * 3, 2)
    x = F.pad(z.reshape(2, 5, 3, 2), (0, 0, 0, 1, 0, 1))  # 6 x 4
    for i in range(3):
        for j in range(2):
            four = [x[:, 2 * i + down, 2 * j + right] for right in (0, 1) for down in (0, 1)]
            expected = merge.reduction(merge.norm(torch.cat(four, dim=1)))
            torch.testing.assert_close(merge(z, (5, 3))[:, i * 2 + j], expected)


def test_a_smaller_map_reads_the_same_offsets():
    """A model made for windows of 7, on a map of 4 x 4: what it learned of offsets up to 3 holds."""
    torch.manual_seed(0)
    options = dict(width=8, depths=(1,), heads=(2,), classes=3, image_size=(16, 16))
    large, fitting = vitlab.create("swin_tiny", window=7, **options), vitlab.create("swin_tiny", window=4, **options)
    state = large.state_dict()
    table = torch.randn(13, 13, 2)
    state["stages.0.0.attention.relative.table"] = table.reshape(169, 2)
    large.load_state_dict(state)
    fitting.load_state_dict({**state, "stages.0.0.attention.relative.table": table[3:10, 3:10].reshape(49, 2)})
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(large.eval()(images), fitting.eval()(images))


def test_another_window_resizes_the_tables(tmp_path):
    model = vitlab.create("swin_cifar", width=12, heads=(1, 2, 3))
    with torch.no_grad():
        for block in model.blocks:  # 2 x row - column, which a resize keeps as it is, but for the border
            row, column = torch.meshgrid(torch.arange(7.0), torch.arange(7.0), indexing="ij")
            block.attention.relative.table.copy_((2 * row - column).reshape(49, 1).expand(-1, block.attention.heads))
    vitlab.save(model, tmp_path)
    from vitlab.checkpoints.load import load_with_report

    larger, report = load_with_report(tmp_path, window=8, image_size=64)
    resized = [row for row in report.rows if row.status == "resized"]
    assert len(resized) == 6 and resized[0].note == "from 49x1, grid 4x4 to 8x8"
    found = larger.blocks[0].attention.relative.table.reshape(15, 15)
    expected = F.interpolate(
        model.blocks[0].attention.relative.table.reshape(1, 1, 7, 7), (15, 15), mode="bicubic", align_corners=False
    )
    torch.testing.assert_close(found, expected[0, 0])
    assert larger.config.window == 8 and larger(torch.randn(1, 3, 64, 64)).shape == (1, 10)


def test_another_image_size_needs_no_change(tmp_path):
    model = vitlab.create("swin_cifar", width=12, heads=(1, 2, 3)).eval()
    vitlab.save(model, tmp_path)
    other, images = vitlab.load(tmp_path, image_size=(40, 56)), torch.randn(2, 3, 40, 56)
    assert other.preprocess.size == (40, 56)
    with torch.no_grad():
        assert torch.equal(other(images), model(images))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(heads=(3, 5, 12)), "use 4 there"),
        (dict(window=0), "window=0"),
        (dict(depths=(2, 0, 2)), r"depths=\(2, 0, 2\) must be at least 1"),
        (dict(embed_dim=48), "Did you mean 'width'"),
        (dict(window_size=4), "Did you mean 'window'"),
        (dict(heads=3), "expected a list of whole numbers"),
        (dict(shift_axes="both"), "together | each"),
        (dict(stochastic_depth=1.0), "below 1"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        vitlab.create("swin_cifar", **options)
