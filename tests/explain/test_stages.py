"""Networks in stages on the picture. Partners: transformers' Swin, whose windows are put back here by torch.roll on
numbered tokens and dense N x N matrices; patterns made by hand, whose windows are plain arithmetic; and, for what keys
and merging hold, gradients of the layers themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor

import vitlab
from vitlab.explain import attention_maps, grad_cam, relevance, rollout
from vitlab.explain.stages import Stages, sight_of
from vitlab.layers.trace import Trace

CONFIG = dict(embed_dim=12, depths=[2, 2, 2], num_heads=[2, 2, 4], window_size=3, image_size=48, patch_size=4)
SIZES = {"filled up everywhere": (53, 77), "one window wide in the end": (72, 36)}


# -------------------------------------------------------------------------------------------------- transformers' Swin


@dataclass
class Pair:
    ours: Any
    images: Tensor
    grids: list[tuple[int, int]]
    dense: list[np.ndarray]  # of every layer, (B, h, N, N): without padding, rows made to sum to 1
    lost: list[np.ndarray]  # (B,): what went to padding, mean over heads and tokens
    dense_slopes: list[np.ndarray]  # dy/dA * A of the top class, (B, h, N, N), as it is
    norm1: tuple[np.ndarray, np.ndarray]  # of the last block, and its slope: (B, N, D)


def numbered_windows(grid: tuple[int, int], shifted: bool, window: int = 3) -> Tensor:
    """(windows, n): the token in each place, by the roll that the paper's code makes; -1 on padding."""
    window_h = window_w = window
    if min(grid) <= window:
        shifted, window_h, window_w = False, min(window, min(grid)), min(window, min(grid))
    numbers = torch.arange(grid[0] * grid[1]).reshape(1, 1, *grid)
    down, right = -grid[0] % window_h, -grid[1] % window_w
    numbers = F.pad(numbers, (0, right, 0, down), value=-1)
    if shifted:
        numbers = torch.roll(numbers, (-(window_h // 2), -(window_w // 2)), dims=(2, 3))
    cut = F.unfold(numbers.double(), (window_h, window_w), stride=(window_h, window_w))  # (1, n, windows)
    return cut[0].T.long()


def densely(weights: Tensor, places: Tensor, N: int, images: int) -> np.ndarray:
    """(B * windows, h, n, n) -> (B, h, N, N), one weight at a time over windows."""
    weights = weights.detach().unflatten(0, (images, -1))  # (B, windows, h, n, n)
    found = torch.zeros(images, weights.shape[2], N, N, dtype=torch.float64)
    for number, window in enumerate(places):
        real = window >= 0
        found[:, :, window[real][:, None], window[real]] = weights[:, number][:, :, real][..., real]
    return found.numpy()


@pytest.fixture(scope="module", params=SIZES.values(), ids=list(SIZES))
def pair(request, tmp_path_factory) -> Pair:
    torch.manual_seed(3)
    options: dict[str, Any] = dict(**CONFIG, num_labels=5, attn_implementation="eager")
    theirs: Any = hf.SwinForImageClassification(hf.SwinConfig(**options)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(mean=float("norm" in name and name.endswith("weight")), std=0.2)
            if "bias_table" in name:
                parameter.normal_()
    folder = tmp_path_factory.mktemp("swin")
    theirs.save_pretrained(folder)
    kept: list[Tensor] = []

    def keep(_: Any, __: Any, out: Any) -> None:
        out[1].retain_grad()
        kept.append(out[1])

    normed: list[Tensor] = []

    def keep_norm(_: Any, __: Any, out: Tensor) -> None:
        out.retain_grad()
        normed.append(out)

    theirs = theirs.double()
    images = torch.randn(2, 3, *request.param, dtype=torch.float64)
    blocks = [block for stage in theirs.swin.encoder.layers for block in stage.blocks]
    for block in blocks:
        block.attention.register_forward_hook(keep)
    blocks[-1].layernorm_before.register_forward_hook(keep_norm)
    logits = theirs(images, output_attentions=True).logits
    logits.amax(1).sum().backward()
    grids = [(-(-request.param[0] // P), -(-request.param[1] // P)) for P in (4, 8, 16) for _ in range(2)]
    dense, lost, slopes = [], [], []
    for number, (weights, grid) in enumerate(zip(kept, grids, strict=True)):
        places = numbered_windows(grid, shifted=number % 2 == 1)
        A = densely(weights, places, grid[0] * grid[1], 2)
        dense.append(A / A.sum(-1, keepdims=True))
        lost.append(1 - A.sum(-1).mean((1, 2)))
        assert weights.grad is not None
        slopes.append(densely(weights * weights.grad, places, grid[0] * grid[1], 2))
    ours = vitlab.load(folder).double()
    torch.testing.assert_close(ours(images), logits)
    assert normed[0].grad is not None
    cam = (normed[0].detach().numpy(), normed[0].grad.numpy())
    return Pair(ours, images, grids, dense, lost, slopes, cam)


def laid(values: np.ndarray, number: int, grids: list[tuple[int, int]], whole: bool = False) -> np.ndarray:
    """(N,) on the first stage's grid, token by token; `whole`: each patch has all of its token's value."""
    found, side = np.zeros(grids[0]), 2 ** (number // 2)
    for token, value in enumerate(values):
        row, column = divmod(token, grids[number][1])
        part = found[side * row : side * row + side, side * column : side * column + side]  # less at the border
        part += value if whole else value / part.size
    return found


def token_at(patch: tuple[int, int], number: int, grids: list[tuple[int, int]]) -> int:
    side = 2 ** (number // 2)
    return patch[0] // side * grids[number][1] + patch[1] // side


@pytest.mark.parametrize("share", [(0.4, 0.6), (0.99, 0.99)], ids=["middle", "last"])
def test_every_row_is_that_of_transformers(pair, share):
    rows, columns = pair.grids[0]
    patch = (int(share[0] * rows), int(share[1] * columns))
    for layers in ([0, 1, 2, 3], [4, 5]):
        found = attention_maps(pair.ours, pair.images, layers, query=patch[0] * columns + patch[1])
        for number, of_layer in zip(layers, found.unbind(1), strict=True):
            for image, head in np.ndindex(*of_layer.shape[:2]):
                A = pair.dense[number][image, head]
                expected = laid(A[token_at(patch, number, pair.grids)], number, pair.grids)
                np.testing.assert_allclose(of_layer[image, head].numpy(), expected, atol=1e-6)
                assert np.ptp(expected) > 1e-3


def test_the_mean_of_all_and_a_pixel(pair):
    found, before = attention_maps(pair.ours, pair.images, heads="mean", prefix=True)
    for number in range(6):
        for image in range(2):
            expected = laid(pair.dense[number][image].mean((0, 1)), number, pair.grids)
            np.testing.assert_allclose(found[image, number, 0].numpy(), expected, atol=1e-6)
    torch.testing.assert_close(found.sum((-2, -1)), torch.ones(2, 6, 1, dtype=torch.float64))
    assert before.shape == (2, 6, 1, 1)
    np.testing.assert_allclose(before[:, :, 0, 0].numpy(), np.stack(pair.lost, axis=1), atol=1e-6)
    assert max(lost.max() for lost in pair.lost) > 0.01
    queries = (23, 14), 3 * pair.grids[0][1] + 5
    by_pixel, by_patch = (attention_maps(pair.ours, pair.images, heads=[0], query=query) for query in queries)
    assert torch.equal(by_pixel, by_patch)


def merged(number: int, grids: list[tuple[int, int]]) -> np.ndarray:
    """(coarse, fine) before layer `number`, rows sum to 1: which of the finer tokens each is made of."""
    M = np.zeros((grids[number][0] * grids[number][1], grids[number - 1][0] * grids[number - 1][1]))
    for fine in range(M.shape[1]):
        row, column = divmod(fine, grids[number - 1][1])
        M[row // 2 * grids[number][1] + column // 2, fine] = 1
    return M / M.sum(1, keepdims=True)


@pytest.mark.parametrize(
    "case", [{}, dict(discard=0.6), dict(start_layer=3, heads="max"), dict(query=(31, 9))], ids=str
)
def test_rollout_is_the_product_of_dense_matrices(pair, case):
    found = rollout(pair.ours, pair.images, **case)
    for image in range(2):
        product = np.eye(pair.grids[5][0] * pair.grids[5][1])
        for number in range(5, case.get("start_layer", 0) - 1, -1):
            A = pair.dense[number][image]
            W = A.max(0) if case.get("heads") == "max" else A.mean(0)
            if case.get("discard"):
                there = sorted(zip(*(W[W > 0].tolist(), *np.nonzero(W)), strict=True))  # e^-100 is above 0
                inside = numbered_windows(pair.grids[number], number % 2 == 1)
                count = sum(int((w >= 0).sum()) ** 2 for w in inside)
                for _, i, j in there[: int(case["discard"] * count) - (count - len(there))]:
                    W[i, j] = 0
            W = W + np.eye(len(W))
            product = product @ (W / W.sum(1, keepdims=True))
            if number in (2, 4) and number > case.get("start_layer", 0):
                product = product @ merged(number, pair.grids)
        row = product[token_at((2, 7), 5, pair.grids)] if "query" in case else product.mean(0)
        expected = laid(row, case.get("start_layer", 0), pair.grids)
        np.testing.assert_allclose(found[image].numpy(), expected, atol=1e-6)
        assert np.ptp(expected) > 1e-4 and abs(expected.sum() - 1) < 1e-6


def test_relevance_is_the_product_of_dense_matrices(pair):
    found = relevance(pair.ours, pair.images)
    for image in range(2):
        N = pair.grids[5][0] * pair.grids[5][1]
        row = np.full(N, 1 / N)
        for number in reversed(range(6)):
            Abar = np.maximum(pair.dense_slopes[number][image], 0).mean(0)
            row = row + len(Abar) * row @ Abar
            if number in (2, 4):
                row = row @ merged(number, pair.grids)
        np.testing.assert_allclose(found[image].numpy(), row.reshape(pair.grids[0]), atol=1e-6)
        assert np.ptp(row) > 1e-3


def test_grad_cam_has_the_value_of_the_token_above(pair):
    found = grad_cam(pair.ours, pair.images)
    for image, (T, slope) in enumerate(zip(*pair.norm1, strict=True)):
        cam = np.maximum((slope.mean(0) * T).sum(-1), 0)
        np.testing.assert_allclose(found[image].numpy(), laid(cam, 5, pair.grids, whole=True), atol=1e-6)


# ---------------------------------------------------------------------------------------------------- patterns by hand


def looking(down: int, right: int, **options: Any) -> Any:
    """A Swin in which every token looks at the one so far below and right of it, if that is in its window; otherwise at
    all that it may see alike. Nothing but the table of relative positions decides."""
    shape = dict(width=8, depths=(2, 2, 2), heads=(1, 1, 1), window=4, classes=3, image_size=(64, 64), patch_size=2)
    model = vitlab.create("swin_tiny", **{**shape, **options}).eval()
    side = 2 * model.config.window - 1
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.zero_()
            block.attention.qkv.bias.zero_()
            table = block.attention.relative.table.zero_().view(side, side, -1)
            table[side // 2 - down, side // 2 - right] = 60  # offsets are query minus key
    return model


@pytest.mark.parametrize(("size", "step"), [((64, 96), (0, 1)), ((51, 75), (2, 0)), ((75, 51), (-1, -1))], ids=str)
def test_a_pattern_made_by_hand_lands_on_its_pixels(size, step):
    """Windows by arithmetic: cuts at multiples of 4, and in shifted layers 2 further on; at the image's ends what is
    left over is a window of its own. On padding nothing is drawn."""
    model = looking(*step)
    stages = Stages(model, *size)
    for y, x in ((0, 0), (size[0] - 1, size[1] - 1), (17, 22), (size[0] // 2, size[1] - 9)):
        found = attention_maps(model, torch.zeros(1, 3, *size), query=(x, y))[0, :, 0]
        torch.testing.assert_close(found.sum((1, 2)), torch.ones(6))
        for number, layer in enumerate(stages.layers):
            pixels = 2 * 2 ** (number // 2)  # of a token
            grid = [-(-side // pixels) for side in size]
            shift = 2 if number % 2 and min(grid) > 4 else 0
            place = (y // pixels, x // pixels)
            rows, columns = (
                [i for i in range(side) if (i - shift) // 4 == (at - shift) // 4]
                for side, at in zip(grid, place, strict=True)
            )
            target = (place[0] + step[0], place[1] + step[1])
            inside = target[0] in rows and target[1] in columns
            seen = [target] if inside else [(i, j) for i in rows for j in columns]
            expected = np.zeros([-(-side // 2) for side in size])
            for i, j in seen:
                part = expected[i * pixels // 2 : (i + 1) * pixels // 2, j * pixels // 2 : (j + 1) * pixels // 2]
                part += 1 / len(seen) / part.size
            np.testing.assert_allclose(found[number], expected, atol=1e-6, err_msg=f"layer {number}, {(x, y)}")
            patch = y // 2 * -(-size[1] // 2) + x // 2
            box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
            assert layer.window(stages.token(patch, layer.stage)) == box
            side = pixels // 2
            last = (expected.shape[1], expected.shape[0]) * 2
            window = tuple(min(side * n, end) for n, end in zip(box, last, strict=True))
            assert sight_of(stages, layer, patch).window == window


def test_padding_that_takes_everything_leaves_no_hole():
    """Tokens at the border that look at padding alone: nothing is on the image, and nothing is not a number."""
    model = looking(0, 1, depths=(1,), heads=(1,))
    with torch.no_grad():
        model.blocks[0].attention.relative.table.mul_(3)  # e^-180 is 0 in float32
    found, before = attention_maps(model, torch.zeros(1, 3, 8, 10), query=(9, 0), prefix=True)  # 5 columns of 8
    assert float(before) == 1 and bool(found.isfinite().all())


# ------------------------------------------------------------------------------------------- fewer keys: PVT and Twins

FEWER = {
    "pvt": ("pvt_cifar", dict(widths=(8, 16, 24), heads=(2, 2, 2))),
    "pvt_v2": ("pvt_v2_cifar", dict(widths=(8, 16, 24), heads=(2, 2, 2))),
    "linear": ("pvt_v2_cifar", dict(widths=(8, 16, 24), heads=(2, 2, 2), linear=True)),
    "twins": ("twins_svt_cifar", dict(widths=(8, 16, 24), heads=(2, 2, 2), window=3)),
}


@dataclass
class Fewer:
    """Two images of 39 x 54. What a key holds and what a merging reads is found by the gradient of those layers."""

    model: Any
    images: Tensor
    grids: tuple[tuple[int, int], ...]
    dense: list[np.ndarray]  # of every layer, (B, h, T, T) over the tokens of its stage
    slopes: list[np.ndarray]  # dy/dA * A of class 1, the same way
    merging: list[np.ndarray]  # (coarse, fine), rows sum to 1


@pytest.fixture(scope="module", params=FEWER)
def fewer(request) -> Fewer:
    name, options = FEWER[request.param]
    torch.manual_seed(4)
    model = vitlab.create(name, **options).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    images = torch.randn(2, 3, 39, 54, dtype=torch.float64)
    trace = Trace("attention", gradients=True)
    model(images, trace=trace)[:, 1].sum().backward()
    dense, slopes = [], []
    for number, at in enumerate(model.places(39, 54)):
        A, slope = trace["attention", number].detach(), trace.gradient("attention", number)
        N = at.grid[0] * at.grid[1]
        if A.ndim == 5:
            places = numbered_windows(at.grid, False, window=3)
            A, slope = (densely(v.transpose(1, 2).flatten(0, 1), places, N, 2) for v in (A, (A * slope).clamp(min=0)))
            dense.append(A / A.sum(-1, keepdims=True))
            slopes.append(slope)
            continue
        prefix, reads = A.shape[2] - N, read_by_keys(model.blocks[number].attention, at, N)  # (keys, N)
        for values, found in ((A, dense), ((A * slope).clamp(min=0), slopes)):
            found.append(torch.cat([values[..., :prefix], values[..., prefix:] @ reads], dim=-1).numpy())
    merging = []
    for stage in (1, 2):
        fine, coarse = model.config.grids(39, 54)[stage - 1 : stage + 1]
        x = torch.zeros(1, model.config.widths[stage - 1], *fine, dtype=torch.float64, requires_grad=True)
        y = model.embeds[stage].proj(x)  # (1, D, rows, columns)
        assert y.shape[2:] == coarse
        found = [torch.autograd.grad(v.sum(), x, retain_graph=True)[0].abs().sum((0, 1)) > 0 for v in y[0].flatten(1).T]
        M = torch.stack(found).flatten(1).numpy().astype(float)
        merging.append(M / M.sum(1, keepdims=True))
    return Fewer(model, images, model.config.grids(39, 54), dense, slopes, merging)


def read_by_keys(attention: Any, at: Any, N: int) -> Tensor:
    """(keys, N), rows sum to 1: which tokens each key's gradient reaches."""
    if attention.reduction is None:
        return torch.eye(N, dtype=torch.float64)
    x = torch.zeros(1, N, attention.q.in_features, dtype=torch.float64, requires_grad=True)
    maps = x.transpose(1, 2).unflatten(2, at.grid)
    keys = attention.reduction(F.adaptive_avg_pool2d(maps, 7) if attention.pool else maps).flatten(2)[0].T  # (keys, D)
    found = [torch.autograd.grad(key.sum(), x, retain_graph=True)[0].abs().sum((0, 2)) > 0 for key in keys]
    reads = torch.stack(found).double()
    return reads / reads.sum(1, keepdim=True)


def on_patches(row: np.ndarray, stage: int, grids: Any) -> np.ndarray:
    """A stage's tokens on the first one's grid: strides are 2, and what is left over at the ends is nobody's."""
    found, side = np.zeros(grids[0]), 2**stage
    for token, value in enumerate(row):
        y, x = divmod(token, grids[stage][1])
        part = found[side * y : side * y + side, side * x : side * x + side]
        part += value / part.size
    return found


def test_reduced_keys_lie_on_what_they_hold(fewer):
    grids = fewer.grids
    for patch in (0, 7 * grids[0][1] + 11):
        found, before = attention_maps(fewer.model, fewer.images, query=patch, prefix=True)
        for number, A in enumerate(fewer.dense):
            stage, prefix = number // 2, A.shape[-1] - grids[number // 2][0] * grids[number // 2][1]
            y, x = divmod(patch, grids[0][1])
            token = prefix + y // 2**stage * grids[stage][1] + x // 2**stage
            for image, head in np.ndindex(2, 2):
                expected = on_patches(A[image, head, token, prefix:], stage, grids)
                np.testing.assert_allclose(found[image, number, head].numpy(), expected, atol=1e-9)
            np.testing.assert_allclose(before[:, number, :, :prefix], A[:, :, token, :prefix], atol=1e-9)
    share = before[..., :-1].sum(-1)  # of the class token, where there is one
    torch.testing.assert_close(found.sum((-2, -1)) + share, torch.ones_like(share))


def walked_back(fewer: Fewer, image: int, step: Any) -> np.ndarray:
    """What the head reads, a row over the last stage, through all layers and mergings."""
    grids, merging = fewer.grids, fewer.merging
    N = grids[2][0] * grids[2][1]
    row = np.full(N, 1 / N) if fewer.dense[-1].shape[-1] == N else np.eye(1 + N)[0]
    for number in reversed(range(6)):
        row = step(row, number, grids[number // 2][0] * grids[number // 2][1])
        if number in (2, 4):
            row = row[-len(merging[number // 2 - 1]) :] @ merging[number // 2 - 1]
    return row.reshape(grids[0])


def test_rollout_through_reduced_keys_and_overlapping_merging(fewer):
    found = rollout(fewer.model, fewer.images)
    for image in range(2):

        def step(row: np.ndarray, number: int, _: int, image: int = image) -> np.ndarray:
            W = fewer.dense[number][image].mean(0) + np.eye(len(row))
            return row @ (W / W.sum(1, keepdims=True))

        np.testing.assert_allclose(found[image].numpy(), walked_back(fewer, image, step), atol=1e-9)


def test_relevance_through_reduced_keys_and_overlapping_merging(fewer):
    found = relevance(fewer.model, fewer.images, target=1)
    for image in range(2):

        def step(row: np.ndarray, number: int, N: int, image: int = image) -> np.ndarray:
            times = np.full(len(row), float(N))
            times[: len(row) - N] = 1  # the class token
            return row + (times * row) @ fewer.slopes[number][image].mean(0)

        np.testing.assert_allclose(found[image].numpy(), walked_back(fewer, image, step), rtol=1e-6, atol=1e-9)
        assert float(found[image].std()) > 0


def test_grad_cam_leaves_the_class_token_out(fewer):
    trace = Trace("norm1", layers=[-1], gradients=True)
    fewer.model(fewer.images, trace=trace)[:, 1].sum().backward()
    (rows, columns), N = fewer.grids[2], fewer.grids[2][0] * fewer.grids[2][1]
    T, slope = trace["norm1", -1].detach()[:, -N:].numpy(), trace.gradient("norm1", -1)[:, -N:].numpy()
    cam = np.maximum(np.einsum("bd,bnd->bn", slope.mean(1), T), 0).reshape(2, rows, columns)
    found = grad_cam(fewer.model, fewer.images, target=1)
    upright = np.kron(cam, np.ones((1, 4, 4)))[:, : found.shape[1], : found.shape[2]]
    np.testing.assert_allclose(found[:, : upright.shape[1], : upright.shape[2]], upright, atol=1e-9)


def test_the_class_token_is_in_the_last_stage():
    model = vitlab.create("pvt_cifar", widths=(8, 16, 24), heads=(2, 2, 2)).eval()
    images = torch.randn(1, 3, 32, 32)
    both = attention_maps(model, images)
    torch.testing.assert_close(both[:, :4], attention_maps(model, images, [0, 1, 2, 3], query="mean"))
    torch.testing.assert_close(both[:, 4:], attention_maps(model, images, [4, 5], query="class"))
    with pytest.raises(ValueError, match="only the last stage has that token"):
        attention_maps(model, images, query="class")


# --------------------------------------------------------------------------------------------------------- all of them


def test_what_cannot_be_asked_is_refused_in_words():
    model = vitlab.create("swin_cifar", width=12, heads=(1, 2, 3)).eval()
    images = torch.randn(1, 3, 32, 32)
    for says, ask in {
        '0 to 1 have 1; 2 to 3 have 2; 4 to 5 have 3\\): ask for heads="mean"': dict(),
        "Ask for 'mean'": dict(query="class", heads="mean"),
        "numbered 0 to 255": dict(query=256, heads="mean"),
        "lies outside": dict(query=(32, 0), heads="mean"),
        "layer 6 does not exist": dict(layers=[6], heads="mean"),
        "head 1 does not exist": dict(heads=[1]),
    }.items():
        with pytest.raises(ValueError, match=says):
            attention_maps(model, images, **ask)
    assert attention_maps(model, images, layers=[2, 3]).shape == (1, 2, 2, 16, 16)
    assert attention_maps(model, images, heads=[0]).shape == (1, 6, 1, 16, 16)


@pytest.mark.parametrize("method", [rollout, relevance, grad_cam])
def test_a_batch_is_its_images_one_by_one_and_the_model_stays_as_it_was(method):
    torch.manual_seed(0)
    model = vitlab.create("swin_cifar", width=12, heads=(1, 2, 3)).requires_grad_(False)
    images = torch.randn(3, 3, 37, 30)
    together = method(model, images)
    assert together.shape == (3, 19, 15) and model.training
    torch.testing.assert_close(method(model, images, batch_size=2), together, atol=1e-6, rtol=1e-4)
    half = method(model.bfloat16(), images)
    assert half.dtype == torch.float32 and bool(half.isfinite().all())
