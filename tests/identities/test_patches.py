"""Patches: cutting, embedding, and the way back."""

import pytest
import torch
import torch.nn.functional as F

from vitlab.layers.patches import ConvStem, PatchEmbed, drop_patches, patchify, unpatchify


def test_unpatchify_inverts_patchify():
    images = torch.randn(2, 3, 24, 40)
    assert torch.equal(unpatchify(patchify(images, 8), 8, (3, 5)), images)


def test_patchify_matches_a_slow_loop():
    images = torch.randn(2, 3, 8, 12)
    patches = patchify(images, 4)
    for row in range(2):
        for column in range(3):
            cut = images[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            assert torch.equal(patches[:, 3 * row + column], cut.flatten(1))


def test_conv_patch_embed_is_unfold_and_a_matrix():
    embed = PatchEmbed(8, 3, 48)
    images = torch.randn(2, 3, 32, 48)
    columns = F.unfold(images, kernel_size=8, stride=8)  # (B, C*P*P, N), torch's own cutting
    by_matrix = columns.transpose(1, 2) @ embed.proj.weight.flatten(1).T + embed.proj.bias
    torch.testing.assert_close(embed(images), by_matrix, atol=1e-5, rtol=0)


def test_patch_norms_written_out():
    embed = PatchEmbed(4, 3, 20, norms=True, eps=1e-5)
    for norm in (embed.norm_in, embed.norm_out):
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
    images = torch.randn(2, 3, 8, 12)
    x = F.unfold(images, 4, stride=4).transpose(1, 2)
    x = F.layer_norm(x, (48,), embed.norm_in.weight, embed.norm_in.bias, 1e-5)
    x = x @ embed.proj.weight.flatten(1).T + embed.proj.bias
    x = F.layer_norm(x, (20,), embed.norm_out.weight, embed.norm_out.bias, 1e-5)
    torch.testing.assert_close(embed(images), x, atol=1e-5, rtol=1e-5)


def test_padding_equals_zeros_put_there_by_hand():
    embed = PatchEmbed(8, 3, 16, pad=True)
    images = torch.randn(2, 3, 30, 41)
    by_hand = torch.zeros(2, 3, 32, 48)
    by_hand[:, :, :30, :41] = images
    assert torch.equal(embed(images), embed(by_hand))


def test_conv_stem_makes_one_token_per_patch_and_sees_an_image_alone_as_in_a_batch():
    stem = ConvStem(8, 3, 64).eval()
    images = torch.randn(3, 3, 32, 48)
    together = stem(images)
    assert together.shape == (3, 24, 64)
    torch.testing.assert_close(together[1:2], stem(images[1:2]), atol=1e-5, rtol=1e-5)


def test_conv_stem_tokens_stand_row_by_row():
    stem = ConvStem(4, 1, 32)
    images = torch.zeros(1, 1, 64, 96)
    images[..., 32:36, 64:68] = 1.0  # the patch in row 8, column 16 of 16 x 24
    change = (stem(images) - stem(torch.zeros_like(images))).norm(dim=-1)[0]
    row, column = divmod(int(change.argmax()), 24)
    assert abs(row - 8) <= 1 and abs(column - 16) <= 1  # 3 x 3 kernels reach into the next patch


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ((2, 3, 222, 224), "222 is not a multiple of 16: use 224 (or 208), or pad=True"),
        ((2, 3, 224, 8), "8 is not a multiple of 16: use 16, or pad=True"),
        ((3, 224, 224), "images[None]"),
        ((2, 224, 224, 3), "permute(0, 3, 1, 2)"),
        ((2, 1, 224, 224), "channels=1"),
        ((2, 3, 0, 224), "0 is not a multiple of 16: use 16"),
    ],
)
def test_images_that_do_not_fit_are_told_what_does(shape, remedy):
    with pytest.raises(ValueError) as error:
        PatchEmbed(16, 3, 32)(torch.zeros(shape))
    assert remedy in str(error.value)


def test_byte_images_are_refused():
    with pytest.raises(ValueError, match="preprocess"):
        PatchEmbed(16, 3, 32)(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_unpatchify_refuses_another_grid():
    with pytest.raises(ValueError, match="7x28"):
        unpatchify(torch.zeros(1, 195, 3), 1, (7, 28))


def test_dropped_patches_keep_order_prefix_and_values():
    tokens = torch.arange(2 * 30.0).reshape(2, 30, 1)
    short, kept = drop_patches(tokens, prefix=2, rate=0.5)
    assert short.shape == (2, 16, 1)
    assert torch.equal(kept[:, :2], torch.tensor([[0, 1], [0, 1]]))
    assert (kept.diff(dim=1) > 0).all()
    assert torch.equal(short, tokens.gather(1, kept[..., None]))
