"""Heat lands on the picture where the patch is, judged by Pillow's resizing; figures show what they should."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr

import vitlab
from vitlab.explain import draw
from vitlab.explain.agreement import agreement
from vitlab.explain.draw.sheet import cut, ems, write_figure
from vitlab.images.fonts import families
from vitlab.images.preprocess import Preprocess
from vitlab.layers.reducer import Reduction

SIZE, P = (32, 48), 8  # 4 x 6 patches
HOW = {
    "stretch": Preprocess(SIZE),
    "crop": Preprocess(SIZE, how="crop"),
    "crop after 40": Preprocess(SIZE, how="crop", resize=40),
    "crop of exactly": Preprocess(SIZE, how="crop", resize=(70, 60)),
    "fit": Preprocess(SIZE, how="fit"),
}
SHAPES = [(96, 144), (200, 131), (61, 240), (32, 48)]


def view_of(preprocess: Preprocess, original: tuple[int, int], patch_size: int = P, picture=None) -> draw.View:
    picture = picture or Image.new("RGB", original[::-1], (90, 120, 150))
    return draw.View(picture, preprocess.geometry(original), preprocess.size, patch_size)


def hot(patch: int, grid=(4, 6)) -> np.ndarray:
    heat = np.zeros(grid)
    heat.flat[patch] = 1.0
    return heat


def small(**options):
    shape = dict(image_size=SIZE, patch_size=P, channels=3, classes=4, depth=3, width=32, heads=4)
    return vitlab.create("vit_digits", **(shape | options)).eval()


def words_of(figure) -> str:
    return "\n".join(text.get_text() for axes in figure.axes for text in axes.texts)


# ------------------------------------------------------------------------------------------------------------ geometry


@pytest.mark.parametrize("original", SHAPES, ids=str)
@pytest.mark.parametrize("preprocess", HOW.values(), ids=HOW)
def test_a_hot_patch_lights_its_box_and_no_more(preprocess, original):
    view = view_of(preprocess, original)
    H, W = original
    for patch in range(24):
        lit = np.nan_to_num(draw.spread(hot(patch), view, smooth=False)) == 1
        box = preprocess.patch_box(*divmod(patch, 6), P, original)
        left, top, right, bottom = (np.clip(v, 0, end) for v, end in zip(box, (W, H, W, H), strict=True))
        rows, columns = np.nonzero(lit.any(1))[0], np.nonzero(lit.any(0))[0]
        if right - left < 1 or bottom - top < 1:  # cut off, or in the padding
            assert lit.sum() <= max(H, W)
            continue
        assert lit.sum() == len(rows) * len(columns)  # a full rectangle
        found = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        np.testing.assert_allclose(found, (left, top, right, bottom), atol=0.51)


@pytest.mark.parametrize("original", SHAPES, ids=str)
@pytest.mark.parametrize("preprocess", HOW.values(), ids=HOW)
def test_what_is_lit_is_what_the_model_sees_in_that_patch(preprocess, original):
    """Paint the lit pixels white, let Pillow resize, crop and pad: that patch is white and no other."""
    view = view_of(preprocess, original)
    for patch in (0, 7, 8, 15, 16, 23):
        lit = np.nan_to_num(draw.spread(hot(patch), view, smooth=False)) == 1
        if not lit.any():
            continue
        painted = Image.fromarray(np.repeat(lit[..., None] * np.uint8(255), 3, axis=2))
        seen = np.asarray(preprocess.view(painted), dtype=float)[..., 0]  # (32, 48)
        means = seen.reshape(4, P, 6, P).mean((1, 3))
        padding = np.asarray(preprocess.view(Image.new("RGB", original[::-1])), dtype=float)[..., 0]
        means -= padding.reshape(4, P, 6, P).mean((1, 3))
        assert means.argmax() == patch
        others = np.delete(means.ravel(), patch)
        assert others.max() < 0.25 * means.flat[patch]  # edges between pixels are shared


def test_what_was_cut_off_is_nan_and_the_rest_is_not():
    view = view_of(HOW["crop"], (96, 96))  # seen: the middle 64 rows of 96
    laid = draw.spread(np.ones((4, 6)), view)
    assert np.isnan(laid[:16]).all() and np.isnan(laid[80:]).all() and (laid[16:80] == 1).all()
    pixels = draw.overlay(np.random.default_rng(0).random((4, 6)), view, side=96).astype(int)
    spread_of_colours = pixels.max(2) - pixels.min(2)
    assert (spread_of_colours[:16] == 0).all() and (spread_of_colours[17:79] > 0).all()  # grey; coloured


def test_padding_by_the_model_itself_takes_no_place_in_the_picture():
    """pad=True adds zeros at the right and bottom: 4 x 6 patches of 8 for a view of 30 x 44."""
    view = view_of(Preprocess((30, 44)), (60, 88))
    assert view.grid == (4, 6)
    lit = draw.spread(hot(23), view, smooth=False) == 1
    rows, columns = np.nonzero(lit.any(1))[0], np.nonzero(lit.any(0))[0]
    assert (rows[0], rows[-1], columns[0], columns[-1]) == (48, 59, 80, 87)
    cropped = view_of(Preprocess((30, 44), how="crop"), (60, 200))  # 100 columns, of which the middle 44 are seen
    assert np.isnan(draw.spread(hot(23), cropped)[:, 144:]).all()


def test_a_turned_photo_is_lit_where_it_is_upright(tmp_path):
    model = small()
    model.preprocess = HOW["crop"]
    rng = np.random.default_rng(1)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    Image.fromarray(rng.integers(0, 256, (120, 200, 3), dtype=np.uint8)).save(tmp_path / "p.jpg", exif=exif, quality=95)
    (view,) = draw.views(model, tmp_path / "p.jpg")
    assert view.image.size == (120, 200) and view.geometry.original == (200, 120)
    lit = np.nan_to_num(draw.spread(hot(8), view, smooth=False)) == 1
    upright = Image.open(tmp_path / "p.jpg").transpose(Image.Transpose.ROTATE_270)
    pixels = np.asarray(upright, dtype=float) * lit[..., None]  # only that patch is left of the photo
    seen = model.preprocess(pixels.round().astype(np.uint8)) - model.preprocess(np.zeros((200, 120, 3), np.uint8))
    energy = seen.abs().sum(0).reshape(4, P, 6, P).sum((1, 3)).flatten()
    assert energy.argmax() == 8 and energy[8] > 0.9 * energy.sum()


def test_smooth_heat_keeps_straight_slopes_and_stays_in_range():
    """Cubic interpolation draws a plane as a plane, whatever the scale; and it adds nothing beyond the values."""
    view = view_of(Preprocess(SIZE), (96, 144))
    row, column = np.mgrid[:4, :6]
    laid = draw.spread(2.0 * row - 0.5 * column, view)
    y, x = np.mgrid[:96, :144] + 0.5
    plane = 2.0 * (y / 24 - 0.5) - 0.5 * (x / 24 - 0.5)
    inside = np.s_[36:60, 36:108]  # one and a half patches from the border
    np.testing.assert_allclose(laid[inside], plane[inside], atol=1e-9)
    noise = np.random.default_rng(2).random((4, 6))
    laid = draw.spread(noise, view)
    assert noise.min() <= laid.min() and laid.max() <= noise.max()
    np.testing.assert_allclose(laid[12::24, 12::24], noise, atol=0.05)  # at the patches' centres, their values


def test_heat_of_pixels_and_of_colours_is_laid_too():
    view = view_of(Preprocess(SIZE), (64, 96))
    pixels = np.random.default_rng(3).random(SIZE)
    np.testing.assert_array_equal(draw.spread(pixels, view, smooth=False), pixels.repeat(2, 0).repeat(2, 1))
    colours = np.random.default_rng(4).random((4, 6, 3))
    np.testing.assert_array_equal(draw.spread(colours, view, smooth=False), colours.repeat(16, 0).repeat(16, 1))


@pytest.mark.parametrize("preprocess", HOW.values(), ids=HOW)
def test_the_patch_under_a_pixel_holds_it(preprocess):
    view, rng = view_of(preprocess, (131, 90)), np.random.default_rng(5)
    seen = np.isfinite(draw.spread(np.zeros((4, 6)), view))
    for x, y in zip(rng.integers(0, 90, 200), rng.integers(0, 131, 200), strict=True):
        if not seen[y, x]:
            where = [np.nonzero(seen.any(axis))[0][[0, -1]] for axis in (0, 1)]
            says = "it sees x from {} to {} and y from {} to {}".format(*where[0], *where[1])
            with pytest.raises(ValueError, match=f"cut off before the model saw it: {says}"):
                view.patch_under(x, y)
            continue
        patch = view.patch_under(x, y)
        left, top, right, bottom = view.box(patch)
        assert left <= x + 0.5 < right and top <= y + 0.5 < bottom
        assert draw.spread(hot(patch), view, smooth=False)[y, x] == 1


def test_a_pixel_outside_the_picture_is_refused():
    view = view_of(HOW["stretch"], (100, 60))
    for point in ((60, 0), (0, 100), (-1, 5)):
        with pytest.raises(ValueError, match="60 x 100 pixels: x is 0 to 59, y is 0 to 99"):
            view.patch_under(*point)
    assert view.patch_under(59, 99) == 23 and view.patch_under(0, 0) == 0


def test_large_pictures_are_drawn_smaller_and_small_ones_larger():
    heat = hot(8)
    for original, drawn in {(3000, 4500): (299, 448), (8, 12): (444, 444 * 3 // 2)}.items():
        view = view_of(Preprocess(SIZE), original)
        pixels = draw.overlay(heat, view, smooth=False, side=448 if original[0] > 8 else 672)
        h, w = pixels.shape[:2]
        assert abs(h - drawn[0]) <= 6 and abs(w - drawn[1]) <= 6
        bright = pixels.sum(2) > pixels.sum(2).mean() * 1.3
        rows, columns = np.nonzero(bright.any(1))[0], np.nonzero(bright.any(0))[0]
        np.testing.assert_allclose((rows[0] / h, (rows[-1] + 1) / h), (0.25, 0.5), atol=1.5 / h)
        np.testing.assert_allclose((columns[0] / w, (columns[-1] + 1) / w), (2 / 6, 3 / 6), atol=1.5 / w)


def test_a_constant_map_is_drawn_without_heat():
    view = view_of(Preprocess(SIZE), (32, 48), picture=Image.new("RGB", (48, 32)))
    flat = draw.overlay(np.full((4, 6), 7.0), view)
    assert (flat == draw.overlay(np.full((4, 6), -1.0), view)).all() and (flat == flat[0, 0]).all()


# --------------------------------------------------------------------------------------------------------------- views


def test_views_say_what_the_model_says(tmp_path):
    model = small()
    model.labels = ["蚂蚁", "bee", "cat", "dog"]
    names = []
    for i, size in enumerate([(50, 70), (90, 40)]):
        pixels = np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        names.append(str(tmp_path / f"{i}.png"))
    seen, said = draw.views(model, names), vitlab.predict(model, names, top=1)
    assert [v.name for v in seen] == names
    for view, one in zip(seen, said, strict=True):
        assert view.label == one.label and view.probability == pytest.approx(one.scores[0][1])
        assert view.prediction == f"{one.label} · {100 * one.scores[0][1]:.0f} %"
    tensor = model.preprocess.batch(names)
    shown = draw.views(model, tensor)
    assert [v.label for v in shown] == [v.label for v in seen] and shown[0].image.size == (48, 32)
    assert draw.views(small(classes=0), names)[0].prediction == ""


# ------------------------------------------------------------------------------------------------------------- figures


@pytest.fixture(scope="module")
def two():
    torch.manual_seed(1)
    model = small()
    model.labels = ["ant", "bee", "猫", "dog"]
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, size, dtype=np.uint8) for size in ((40, 60, 3), (80, 50, 3))]
    return model, pictures, draw.views(model, pictures, ["first.png", "second.png"])


def test_one_picture_is_a_grid_of_layers_and_heads(two):
    model, pictures, views = two
    maps = vitlab.explain.attention_maps(model, pictures[0], layers=[0, 2])
    figure = draw.attention(views[:1], maps, layers=[0, 2], title="Attention of it", patches=[5])
    words = words_of(figure)
    for part in ("Attention of it", "layer 1", "layer 3", "head 4", "mean", "first.png", views[0].prediction):
        assert part in words
    images = figure.axes[0].images
    assert len(images) == 1 + 2 * 5 + 1  # the picture, maps and means, the scale
    expected = draw.overlay(maps[0, 1, 2].numpy(), views[0], side=320)
    assert any(im.get_array().shape == expected.shape and (im.get_array() == expected).all() for im in images)


def test_several_pictures_are_rows_of_head_means(two):
    model, pictures, views = two
    maps = vitlab.explain.attention_maps(model, pictures)
    figure = draw.attention(views, maps)
    arrays = [np.asarray(im.get_array()) for im in figure.axes[0].images]
    assert len(arrays) == 2 * (1 + 3) + 1
    expected = draw.overlay(maps[1, 2].mean(0).numpy(), views[1], side=448)
    assert any(a.shape == expected.shape and (a == expected).all() for a in arrays)
    assert "second.png" in words_of(figure) and views[1].prediction in words_of(figure)


def test_maps_that_do_not_fit_the_pictures_are_refused(two):
    _, _, views = two
    with pytest.raises(ValueError, match=r"\(3, 4, 6\) for 2 images"):
        draw.heat(views, {"x": np.zeros((3, 4, 6))}, title="")


def test_every_kind_of_file_is_written_and_chinese_has_its_characters(two, tmp_path):
    model, pictures, views = two
    named = [draw.View(v.image, v.geometry, v.size, v.patch_size, "照片 $x$ _1.png", "猫", 0.9) for v in views]
    figure = draw.heat(named, {"热图": vitlab.explain.rollout(model, pictures)}, title="注意力 $a$")
    heads = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF", "jpg": b"\xff\xd8", "webp": b"RIFF"}
    for kind, head in heads.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            write_figure(figure, tmp_path / f"f.{kind}", kind)
        assert (tmp_path / f"f.{kind}").read_bytes().startswith(head)
        assert not [w for w in caught if "lyph" in str(w.message)]
    text = (tmp_path / "f.svg").read_text(encoding="utf-8")
    for part in ("注意力 $a$", "热图", "猫 · 90 %", "照片 $x$ _1.png"):
        assert part in text


def test_the_font_that_is_chosen_knows_chinese(two):
    """A missing character is drawn as a box, the same for all; two that are there differ."""
    if len(families("猫")) == 1:
        pytest.skip("no Chinese font is installed: make test installs one where it may")
    _, _, views = two
    pictures = []
    for name in ("猫猫猫猫", "狗狗狗狗"):
        figure = draw.heat(views[:1], {"m": np.eye(4, 6)[None]}, title=name)
        figure.canvas.draw_idle()
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        pictures.append(np.asarray(canvas.buffer_rgba()).copy())
    assert (pictures[0] != pictures[1]).any()


def test_save_writes_all_or_nothing(two, tmp_path):
    _, _, views = two
    figure = draw.heat(views, {"m": np.zeros((2, 4, 6))}, title="t")
    files = draw.save(figure, tmp_path / "new" / "a.svg", numbers={"x": torch.ones(2, 3)}, page="<p>猫</p>")
    assert sorted(f.name for f in files) == ["a.html", "a.npz", "a.svg"]
    np.testing.assert_array_equal(np.load(tmp_path / "new" / "a.npz")["x"], np.ones((2, 3)))
    with pytest.raises(TypeError):
        draw.save(figure, tmp_path / "b.png", numbers={"x": torch.ones(2, requires_grad=True).to_sparse()})
    assert not list(tmp_path.glob("*b*"))
    for name, says in {"x.gif": "cannot draw .gif", "x": "cannot draw that", ".": "is a folder"}.items():
        with pytest.raises(ValueError, match=says):
            draw.save(figure, tmp_path / name)


def test_long_and_odd_names_are_cut_to_fit():
    assert cut("abc", 10) == "abc" and ems("猫a") == 1.6
    assert cut("a" * 50, 12).endswith("…") and ems(cut("a" * 50, 12)) <= 12
    assert cut("folder/" * 9 + "end.png", 12, end=True).endswith("end.png")
    assert cut("a\nb\x1b[0m\udcff", 30) == "a b?[0m?"


# -------------------------------------------------------------------------------------------------------------- panels


def test_figure7_draws_what_there_is_and_says_what_there_is_not(two):
    model, pictures, views = two
    found = draw.figure7_numbers(model, pictures)
    assert not found["missing"]
    torch.testing.assert_close(torch.from_numpy(found["distance"]), vitlab.explain.attention_distance(model, pictures))
    np.testing.assert_array_equal(found["similarity"], vitlab.explain.position_similarity(model))
    np.testing.assert_array_equal(found["norms"], vitlab.explain.token_norms(model, pictures))
    figure = draw.figure7(found, view=views[0])
    dots = [c for axes in figure.axes for c in axes.collections if len(c.get_offsets()) == 12]
    np.testing.assert_allclose(np.sort(dots[0].get_offsets()[:, 1]), np.sort(found["distance"].ravel()))

    odd = small(stem="conv", positions="rotary", class_token=False, pooling="mean")
    found = draw.figure7_numbers(odd)
    np.testing.assert_array_equal(found["stem_filters"], vitlab.explain.stem_filters(odd))
    assert set(found["missing"]) == {"similarity", "distance", "entropy", "norms"}
    words = " ".join(words_of(draw.figure7(found)).split())
    for part in ("of the stem's first layer, 3 x 3 pixels", "no position vectors", "Give images to measure this"):
        assert part in words


def test_curves_are_drawn_with_their_areas(two):
    model, pictures, _ = two
    rows = vitlab.explain.compare_methods(model, pictures, ["rollout"], ["deletion", "insertion"], steps=4)
    figure = draw.faithfulness(rows)
    plots = [axes for axes in figure.axes if axes.lines and axes.get_xlabel()]
    assert len(plots) == 2
    np.testing.assert_allclose(plots[0].lines[0].get_ydata(), rows[0].curves.mean(0))
    assert f"area {float(rows[0].areas.mean()):.3f}" in words_of(figure)


class MergeAndDrop:
    """At layer 0 merges the last two tokens, at layer 2 drops the first patch."""

    needs = ()

    def removes(self, layer, depth, tokens, prefix):
        return int(layer in (0, 2))

    def reduce(self, tokens, remove, prefix, sizes, seen):
        B, N, _ = tokens.shape
        places = torch.arange(N)
        if N == 25:
            both = (tokens[:, -2:-1] + tokens[:, -1:]) / 2
            sizes = torch.cat([sizes[:, :-2], sizes[:, -2:].sum(1, keepdim=True)], 1)
            return Reduction(torch.cat([tokens[:, :-2], both], 1), places.clamp(max=N - 2).expand(B, N), sizes)
        keep = [i for i in range(N) if i != prefix]
        moved = torch.where(places < prefix, places, places - 1)
        moved[prefix] = -1
        return Reduction(tokens[:, keep], moved.expand(B, N), sizes[:, keep])


def test_what_a_reducer_merged_and_dropped_is_told_and_drawn(two):
    model, pictures, views = two
    found = vitlab.explain.pruned_patches(model, pictures, MergeAndDrop(), batch_size=1)
    assert found.changed == (0, 2) and found.tokens.tolist() == [[24, 24, 23]] * 2
    first = torch.arange(1, 25).clamp(max=23).reshape(4, 6)
    for image in found.groups:
        assert torch.equal(image[0], first) and torch.equal(image[1], first)
        last = first - 1
        last[0, 0] = -1
        assert torch.equal(image[2], last)
    groups, view = found.groups[0, 2].numpy(), views[0]
    pixels = draw.grouped(groups, view, side=60 * 7).astype(float)
    plain = np.asarray(view.image, dtype=float).repeat(7, 0).repeat(7, 1)
    laid = draw.spread(groups.astype(float), view, (280, 420), smooth=False)
    inside = np.zeros((280, 420), bool)
    inside[3:-3, 3:-3] = True
    merged = laid == 22
    np.testing.assert_allclose(np.median(pixels[merged], 0), plain[merged].mean(0), atol=1)
    assert pixels[(laid == -1) & inside].mean() < 0.5 * plain[laid == -1].mean()
    alone = laid == 7
    assert (pixels[alone] == plain[alone]).mean() > 0.99
    figure = draw.pruned(views, found)
    assert "after layer 3" in words_of(figure) and "23 tokens" in words_of(figure)


# ----------------------------------------------------------------------------------------------------------- agreement


def test_agreement_is_spearmans_rank_correlation():
    rng = np.random.default_rng(7)
    a, b = rng.random((2, 4, 6)), rng.random((2, 4, 6)).round(1)  # with ties
    views = [view_of(HOW["crop"], (90, 120))] * 2
    found = agreement(views, a, views, b)
    expected = [spearmanr(x.ravel(), y.ravel()).statistic for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(found, expected)
    np.testing.assert_allclose(agreement(views, a, views, np.exp(a)), 1)
    np.testing.assert_allclose(agreement(views, a, views, -a), -1)
    assert np.isnan(agreement(views, a, views, np.ones_like(a))).all()


def test_agreement_of_models_that_cut_differently_is_of_places():
    """The same slope over the picture, seen in 4 x 6 and in 8 x 8 patches, through a crop and whole."""
    crop, whole = view_of(HOW["crop"], (96, 96)), view_of(Preprocess((64, 64)), (96, 96))
    a, b = np.mgrid[:4, :6][1].astype(float), np.mgrid[:8, :8][1].astype(float)
    assert agreement([crop], a[None], [whole], b[None])[0] > 0.95
    assert agreement([crop], a[None], [whole], b.T[None])[0] == pytest.approx(0, abs=0.05)
