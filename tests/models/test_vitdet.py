"""The simple pyramid on a plain ViT, step by step against what the paper says in plain matrices."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitlab
from vitlab.models.hierarchy import Level
from vitlab.models.vitdet import SimplePyramid


def small(patch_size: int = 16, **options) -> SimplePyramid:
    torch.manual_seed(0)
    encoder = vitlab.create(
        "vit_tiny", width=24, heads=3, depth=2, patch_size=patch_size, image_size=(4 * patch_size, 6 * patch_size)
    )
    return SimplePyramid(encoder, channels=10, **options).eval()


def norm(x: Tensor, layer) -> Tensor:
    """Of each place's channels: their mean 0, their variance 1, then weight and bias."""
    x = (x - x.mean(dim=1, keepdim=True)) / (x.var(dim=1, keepdim=True, unbiased=False) + layer.eps).sqrt()
    return x * layer.weight[:, None, None] + layer.bias[:, None, None]


def doubled(x: Tensor, layer) -> Tensor:
    """Every place becomes 2 x 2 of half the channels, each by its own matrix."""
    found = x.new_zeros(len(x), layer.weight.shape[1], 2 * x.shape[2], 2 * x.shape[3])
    for down in (0, 1):
        for right in (0, 1):
            matrix = layer.weight[:, :, down, right]
            found[:, :, down::2, right::2] = torch.einsum("bchw,cd->bdhw", x, matrix) + layer.bias[:, None, None]
    return found


def test_every_level_is_what_the_paper_says():
    model, images = small(), torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        for parameter in model.levels.parameters():  # so that a forgotten one shows
            parameter.add_(torch.randn_like(parameter) * 0.3)
        maps = model.forward_pyramid(images)
        tokens = model.encoder.intermediate_features(images, [-1], norm=False)[0][:, 1:]
        x = tokens.transpose(1, 2).reshape(2, 24, 4, 6)
        finest, fine, same, coarse = model.levels
        before = [
            doubled(F.gelu(norm(doubled(x, finest[0]), finest[1])), finest[3]),
            doubled(x, fine[0]),
            x,
            x.reshape(2, 24, 2, 2, 3, 2).amax(dim=(3, 5)),
        ]
        for level, y, found in zip(model.levels, before, maps, strict=True):
            one, first, three, second = level[-4:]
            y = norm(torch.einsum("bchw,dc->bdhw", y, one.weight[:, :, 0, 0]), first)
            y = norm(F.conv2d(y, three.weight, padding=1), second)
            torch.testing.assert_close(found, y, atol=1e-5, rtol=1e-5)
    assert model.pyramid == tuple(Level(stride, 10) for stride in (4, 8, 16, 32))
    assert [tuple(m.shape[2:]) for m in maps] == [(64 // s, 96 // s) for s in (4, 8, 16, 32)]
    assert len(same) == 4 and len(coarse) == 5


@pytest.mark.parametrize(("patch_size", "strides"), [(8, (4, 8, 16, 32)), (32, (4, 8, 16, 32)), (14, (7, 14, 28))])
def test_other_patches_reach_their_strides_too(patch_size, strides):
    model = small(patch_size, strides=strides)
    side = 2 * strides[-1]
    with torch.no_grad():
        maps = model(torch.randn(1, 3, side, 2 * side))
    assert [tuple(m.shape) for m in maps] == [(1, 10, side // s, 2 * side // s) for s in strides]


def test_it_learns_through_the_encoder():
    model = small()
    sum(m.square().mean() for m in model(torch.randn(1, 3, 64, 96))).backward()
    still = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert still == {"encoder.norm.weight", "encoder.norm.bias", "encoder.head.weight", "encoder.head.bias"}


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match=r"stride 4 is not patch_size=14 doubled or halved: use strides=\(7, 14, 28\)"):
        small(14)
    with pytest.raises(ValueError, match="halves the width 24 4 times"):
        small(32, strides=(2, 4))
