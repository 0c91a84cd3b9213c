"""The scale of heat maps, against NumPy's percentiles; a planted outlier no longer turns a map black."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vitlab.errors import UsageError
from vitlab.explain import draw
from vitlab.explain.draw.heatmap import heat_limits
from vitlab.explain.scale import SCALES, limits, positions
from vitlab.images.preprocess import Preprocess

VALUES = np.random.default_rng(3).gamma(2.0, size=(13, 17))


def view_of(grid, **preprocess) -> draw.View:
    size = (8 * grid[0], 8 * grid[1])
    original = preprocess.pop("original", size)
    geometry = Preprocess(size, **preprocess).geometry(original)
    return draw.View(Image.new("RGB", original[::-1], (90, 120, 150)), geometry, size, 8)


def test_limits_are_percentiles():
    np.testing.assert_allclose(limits(VALUES), np.percentile(VALUES, [1, 99]))
    np.testing.assert_allclose(limits(VALUES, "minmax"), (VALUES.min(), VALUES.max()))
    np.testing.assert_allclose(limits(VALUES, "log"), (max(VALUES.min(), VALUES.max() / 1000), VALUES.max()))
    signed = VALUES - 1.5
    high = np.percentile(np.abs(signed), 99)
    np.testing.assert_allclose(limits(signed, signed=True), (-high, high))


def test_positions_by_hand():
    values = np.array([[0.0, 1.0, 10.0, 100.0, 1e9, np.nan]])
    np.testing.assert_allclose(positions(values, 1, 100, "log"), [[0, 0, 0.5, 1, 1, 0]], atol=1e-12)
    np.testing.assert_allclose(positions(values, 0, 100, "minmax"), [[0, 0.01, 0.1, 1, 1, 0]])
    signed = np.array([[-200.0, -50.0, 0.0, 50.0, np.nan]])
    np.testing.assert_allclose(positions(signed, -100, 100, "percentile", True), [[0, 0.25, 0.5, 0.75, 0.5]])
    decades = np.array([[-1000.0, -10.0, 0.0, 1.0, 1000.0]])  # 3 decades on either side of 0
    np.testing.assert_allclose(positions(decades, -1000, 1000, "log", True), [[0, 1 / 3, 0.5, 0.5, 1]])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("value", [0.0, 7.0, -3.0, np.nan])
def test_a_constant_map_has_no_heat(scale, value):
    flat = np.full((5, 7), value)
    assert (positions(flat, *limits(flat, scale), scale) == 0).all()
    assert np.isfinite(positions(flat, *limits(flat, scale, True), scale, True)).all()


def test_a_single_patch_in_a_map_of_zeros_is_seen():
    """Both percentiles are 0 then, so all values count."""
    heat = np.zeros((20, 30))
    heat[4, 5] = 0.3
    assert limits(heat) == (0, 0.3)


def test_a_planted_outlier_does_not_own_the_scale():
    """One value of a hundred times the others: from lowest to highest all is black, by percentiles nothing changes."""
    heat = VALUES.copy()
    heat[6, 6] = 100 * VALUES.max()
    low, high = limits(heat)
    assert high < VALUES.max() * 1.01
    others = np.arange(heat.size) != 6 * 17 + 6
    assert positions(heat, *limits(heat, "minmax"), "minmax").ravel()[others].max() < 0.011
    plain = positions(VALUES, *limits(VALUES)).ravel()[others]
    assert np.abs(positions(heat, low, high).ravel()[others] - plain).max() < 0.1
    view = view_of(heat.shape)
    dark, clear = (draw.overlay(heat, view, scale=scale).astype(float) for scale in ("minmax", "percentile"))
    assert clear.std() > 3 * dark.std()


def test_a_spike_stays_as_wide_as_a_patch():
    """Clipped after smoothing it would fill its neighbours; beyond two patches nothing changes."""
    heat = np.tile(np.linspace(0, 1, 24), (16, 1))
    view, spike = view_of((16, 24)), heat.copy()
    spike[8, 3] = 1e6
    limits_alike = limits(spike) == pytest.approx(limits(heat), abs=0.02)
    assert limits_alike
    changed = np.abs(draw.overlay(spike, view, side=192).astype(int) - draw.overlay(heat, view, side=192)).max(2) > 30
    rows, columns = np.nonzero(changed.any(1))[0], np.nonzero(changed.any(0))[0]
    assert np.ptp(rows) < 2 * 8 and np.ptp(columns) < 2 * 8


def test_padding_does_not_count():
    """fit: a wide image in a square input; rows 0, 1, 6 and 7 show padding only."""
    heat = np.random.default_rng(0).random((8, 8))
    heat[:2], heat[-2:] = 50, -50
    view = view_of((8, 8), how="fit", original=(40, 80))
    np.testing.assert_allclose(heat_limits(heat, view), np.percentile(heat[2:6], [1, 99]))


def test_the_picture_says_its_scale():
    view = view_of((4, 6))
    heat = np.random.default_rng(0).random((1, 4, 6))
    said = {"percentile": "1st percentile of each map", "log": "its highest, log scale", "minmax": "its highest"}
    for scale, words in said.items():
        figure = draw.heat([view], {"a": heat}, title="t", scale=scale)
        texts = [text.get_text() for axes in figure.axes for text in axes.texts]
        assert words in texts
        signed = draw.heat([view], {"a": heat - 0.5}, title="t", scale=scale, signed=["a"])
        line = next(t.get_text() for axes in signed.axes for t in axes.texts if t.get_text().startswith("Red"))
        assert line == f"Red speaks for the class, blue against it. {SCALES[scale].signed}".strip()


def test_an_unknown_scale_names_the_known():
    with pytest.raises(UsageError, match=r"no scale 'percentiles'. Did you mean 'percentile'\? There are: percentile,"):
        limits(VALUES, "percentiles")
