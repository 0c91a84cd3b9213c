"""Reconstruction: hidden patches and painted pixels against the model's own output, patch by patch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.explain import draw
from vitlab.explain.reconstruct import reconstruct
from vitlab.images.preprocess import Preprocess

P, GRID = 8, (4, 6)


def small(**options):
    shape = dict(image_size=(32, 48), patch_size=P, width=32, depth=2, heads=4)
    model = vitlab.create("mae_cifar", **shape, decoder=dict(width=16, depth=1, heads=2), **options)
    model.preprocess = Preprocess((32, 48), how="crop", mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def pictures(count: int = 3) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (40 + 8 * i, 60, 3), dtype=np.uint8)) for i in range(count)]


@pytest.mark.parametrize("norm_pix", [False, True])
def test_painted_pixels_are_the_prediction_in_the_scale_of_the_image(norm_pix):
    model = small(norm_pix=norm_pix)
    found = reconstruct(model, pictures())
    assert found.mask.shape == (3, *GRID) and found.mask.sum((1, 2)).tolist() == [18, 18, 18]
    for image in range(3):
        for patch in range(24):
            row, column = divmod(patch, GRID[1])
            here = (image, slice(None), slice(row * P, row * P + P), slice(column * P, column * P + P))
            true = found.images[here].permute(1, 2, 0).flatten().numpy()
            said = found.prediction[image, patch].numpy()
            if norm_pix:
                said = said * np.sqrt(true.var(ddof=1) + 1e-6) + true.mean()
            np.testing.assert_allclose(found.painted[here].permute(1, 2, 0).flatten(), said, atol=1e-5)
            shown = found.painted if found.mask[image, row, column] else found.images
            assert torch.equal(found.pasted[here], shown[here])
            assert bool(found.hidden[image, 0, row * P, column * P]) == bool(found.mask[image, row, column])


def test_errors_are_each_pictures_loss():
    model = small(norm_pix=True)
    found = reconstruct(model, pictures(), mask_ratio=0.5, seed=3)
    for i in range(3):
        noise = found.mask[i].flatten().float()[None]  # hides the same patches again
        with torch.no_grad():
            out = model.eval()(found.images[i : i + 1], noise, mask_ratio=0.5)
        assert torch.equal(out.mask[0].bool().reshape(GRID), found.mask[i])
        assert found.error[i].item() == pytest.approx(out.loss.item(), rel=1e-5)


def test_masks_depend_on_seed_and_number_alone():
    model = small().train()
    whole, parts = reconstruct(model, pictures(), seed=1), reconstruct(model, pictures(), seed=1, batch_size=2)
    assert torch.equal(whole.mask, parts.mask)
    torch.testing.assert_close(whole.painted, parts.painted, atol=1e-5, rtol=0)
    assert not torch.equal(whole.mask[0], whole.mask[1])
    assert not torch.equal(whole.mask, reconstruct(model, pictures(), seed=2).mask)
    assert torch.equal(whole.mask[:1], reconstruct(model, pictures(1), seed=1).mask)
    assert model.training and model.encoder.training  # as before


def test_another_size_and_a_tensor():
    found = reconstruct(small(), torch.randn(2, 3, 48, 64))
    assert found.mask.shape == (2, 6, 8) and found.painted.shape == (2, 3, 48, 64)


def test_what_cannot_paint_is_refused():
    with pytest.raises(ValueError, match=r"without a decoder.*take one with its decoder.*vitlab train mae_cifar10"):
        reconstruct(small().encoder, pictures())
    with pytest.raises(ValueError, match="this is a vit model without a decoder"):
        reconstruct(vitlab.create("vit_digits"), pictures())
    with pytest.raises(ValueError, match="runs/mae/best: no such file"):
        reconstruct("runs/mae/best", pictures())
    with pytest.raises(ValueError, match=r"mask_ratio=0.99 of 24 patches leaves none visible"):
        reconstruct(small(), pictures(), mask_ratio=0.99)


def pixels_on(figure, size: tuple[int, int]) -> list[np.ndarray]:
    """The pictures of a sheet, in order, brought back to the model's size."""
    arrays = [np.asarray(image.get_array()) for axes in figure.axes for image in axes.images]
    return [np.asarray(Image.fromarray(a).resize(size[::-1], Image.Resampling.NEAREST)) for a in arrays]


def test_the_drawing_shows_seen_masked_painted_and_pasted():
    model = small()
    found = reconstruct(model, pictures(2))
    views = draw.views(model.encoder, pictures(2), ["a.png", "b.png"])
    figure = draw.reconstruction(views, found, model.preprocess, title="Painted", note="a note")
    shown = pixels_on(figure, (32, 48))
    assert len(shown) == 8
    for i in range(2):
        seen, left, painted, pasted = shown[4 * i : 4 * i + 4]
        hidden = found.hidden[i, 0].numpy()
        np.testing.assert_array_equal(seen, np.asarray(model.preprocess.view(pictures(2)[i])))
        np.testing.assert_array_equal(left[~hidden], seen[~hidden])
        assert (left[hidden] == 128).all()
        np.testing.assert_array_equal(painted, np.asarray(model.preprocess.to_image(found.painted[i])))
        np.testing.assert_array_equal(pasted[~hidden], seen[~hidden])
        np.testing.assert_array_equal(pasted[hidden], painted[hidden])
    words = "\n".join(text.get_text() for axes in figure.axes for text in axes.texts)
    for part in ("Painted", "a note", "18 of 24 patches are hidden", "a.png", f"error {found.error[1]:.3f}"):
        assert part in words


def test_grey_pictures_are_drawn_too():
    model = vitlab.create("mae_digits", depth=1)
    image = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4)
    views = draw.views(model.encoder, [image], ["digit"])
    figure = draw.reconstruction(views, reconstruct(model, [image]), model.preprocess)
    assert pixels_on(figure, (8, 8))[0].shape == (8, 8, 3)
