"""Windows: where every token goes, against slow loops; attention inside them, against torch on each window alone."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from vitlab.layers.positions import RelativeBias
from vitlab.layers.trace import LayerTrace, TokenLayout, Trace
from vitlab.layers.windows import APART, Reorder, WindowAttention, Windows

CASES = {  # grid, window, shift
    "whole windows": ((6, 9), (3, 3), (0, 0)),
    "shifted": ((6, 9), (3, 3), (1, 1)),
    "filled up": ((5, 7), (3, 3), (0, 0)),
    "filled up, shifted": ((5, 7), (3, 3), (1, 1)),
    "windows that are not square": ((5, 6), (2, 3), (1, 0)),
    "one window": ((4, 3), (4, 3), (0, 0)),
    "larger than the grid": ((2, 3), (4, 4), (0, 0)),
}


def members(w: Windows) -> list[list[tuple[int, int] | None]]:
    """For each window the tokens in it, by a loop over what sec. 3.2 of Swin says; None on what was filled up."""
    (rows, columns), (tall, broad), (down, right) = w.grid, w.window, w.shift
    high, wide = tall * -(-rows // tall), broad * -(-columns // broad)
    found = []
    for top, left in itertools.product(range(0, high, tall), range(0, wide, broad)):
        window = []
        for i, j in itertools.product(range(tall), range(broad)):
            row, column = (top + i + down) % high, (left + j + right) % wide  # a roll up and left moves this one here
            window.append((row, column) if row < rows and column < columns else None)
        found.append(window)
    return found


ONE_SHIFTED = ((2, 3), (4, 4), (2, 2))  # which Swin v2 has: its numbers are compared in tests/parity/test_swinv2.py


@pytest.mark.parametrize("case", [*CASES.values(), ONE_SHIFTED], ids=[*CASES, "one window, shifted"])
def test_every_token_goes_where_a_slow_loop_puts_it(case):
    w = Windows(*case)
    rows, columns = w.grid
    x = torch.randn(2, rows * columns, 3)
    cut = w.cut(x).unflatten(0, (2, -1))  # (B, count, n, D)
    expected = members(w)
    assert cut.shape[1:3] == (len(expected), len(expected[0])) and w.count == len(expected)
    for n, window in enumerate(expected):
        for k, token in enumerate(window):
            value = torch.zeros(2, 3) if token is None else x[:, token[0] * columns + token[1]]
            assert torch.equal(cut[:, n, k], value)
            assert w.places()[n, k] == (-1 if token is None else token[0] * columns + token[1])
    assert torch.equal(w.join(cut.flatten(0, 1)), x)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_mask_parts_what_only_the_roll_brought_together(case):
    """Two tokens of a window may look at each other if they lie in one window's reach on the grid itself."""
    w = Windows(*case)
    mask = w.mask(torch.device("cpu"))
    if w.shift == (0, 0):
        assert mask is None
        return
    (tall, broad), high = w.window, w.padded[0]
    (down, right), wide = w.shift, w.padded[1]
    for n, (top, left) in enumerate(itertools.product(range(0, high, tall), range(0, wide, broad))):
        places = [((top + i + down) % high, (left + j + right) % wide) for i in range(tall) for j in range(broad)]
        for (a, p), (b, q) in itertools.product(enumerate(places), repeat=2):
            near = abs(p[0] - q[0]) < tall and abs(p[1] - q[1]) < broad
            assert mask[n, 0, a, b] == (0 if near else APART)


def test_reordering_has_its_own_gradient_twice():
    order = torch.tensor([2, 0, 3, 1])
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: Reorder.apply(x, order, order.argsort()), x)
    assert torch.autograd.gradgradcheck(lambda x: Reorder.apply(x, order, order.argsort()).square(), x)


def slow(layer: WindowAttention, x: torch.Tensor, w: Windows) -> torch.Tensor:
    """One window, one head, one token at a time; zeros that filled up are keys and values too."""
    B, _, D = x.shape
    out = torch.zeros_like(x)
    qkv = layer.qkv.weight, layer.qkv.bias
    high, wide = w.padded
    (tall, broad), (down, right) = w.window, w.shift
    for b, (top, left) in itertools.product(range(B), itertools.product(range(0, high, tall), range(0, wide, broad))):
        places = [((top + i + down) % high, (left + j + right) % wide) for i in range(tall) for j in range(broad)]
        inside = [r < w.grid[0] and c < w.grid[1] for r, c in places]
        tokens = torch.stack(
            [
                x[b, r * w.grid[1] + c] if real else torch.zeros(D, dtype=x.dtype)
                for (r, c), real in zip(places, inside, strict=True)
            ]
        )
        q, k, v = F.linear(tokens, *qkv).chunk(3, dim=-1)
        for head in range(layer.heads):
            part = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
            for i, p in enumerate(places):
                if not inside[i]:
                    continue
                scores = k[:, part] @ q[i, part] / layer.head_dim**0.5
                for j, o in enumerate(places):
                    if layer.relative is not None:
                        M = layer.relative.grid[1]
                        row = i // broad - j // broad + layer.relative.grid[0] - 1
                        scores[j] += layer.relative.table[row * (2 * M - 1) + i % broad - j % broad + M - 1, head]
                    if (down or right) and (abs(p[0] - o[0]) >= tall or abs(p[1] - o[1]) >= broad):
                        scores[j] += APART
                out[b, p[0] * w.grid[1] + p[1], part] = scores.softmax(0) @ v[:, part]
    return F.linear(out, layer.proj.weight, layer.proj.bias)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_in_windows_matches_a_slow_loop(case, relative):
    w = Windows(*case)
    table = RelativeBias((4, 5), 2, prefix=0) if relative else None  # of larger windows, whose offsets hold these
    layer = WindowAttention(8, 2, relative=table).double()
    if table is not None:
        torch.nn.init.normal_(table.table)
    x = torch.randn(2, w.grid[0] * w.grid[1], 8, dtype=torch.float64)
    expected = slow(layer, x, w)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, w), expected, atol=1e-12, rtol=0)  # torch's kernel
    torch.testing.assert_close(layer(x, w), expected, atol=1e-12, rtol=0)  # the way that learns the bias
    layer.path = "explicit"
    torch.testing.assert_close(layer(x, w), expected, atol=1e-12, rtol=0)


def test_both_ways_have_the_same_gradient():
    w = Windows((5, 7), (3, 3), (1, 1))
    x = torch.randn(2, 35, 8, dtype=torch.float64, requires_grad=True)
    found = []
    layer = WindowAttention(8, 2, relative=RelativeBias((3, 3), 2, prefix=0)).double()
    for path in ("auto", "fused", "explicit"):
        layer.path = path
        loss = (layer(x, w) * torch.linspace(-1, 1, 8, dtype=torch.float64)).square().sum()
        found.append(torch.autograd.grad(loss, [x, layer.relative.table, layer.qkv.weight]))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_a_trace_gets_attention_by_window():
    w = Windows((4, 6), (2, 3), (1, 1))
    layer = WindowAttention(8, 2)
    x = torch.randn(3, 24, 8)
    trace = Trace("attention", "keys", heads=[1])
    trace.begin(depth=1, offers=("attention", "keys"), layout=TokenLayout((), (4, 6)), places=(w,))
    with torch.no_grad():
        plain, traced = layer(x, w), layer(x, w, LayerTrace(trace, 0))
    assert torch.equal(plain, traced)
    weights = trace["attention", 0]
    assert weights.shape == (3, 1, 4, 6, 6) and trace["keys", 0].shape == (3, 1, 4, 6, 4)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 1, 4, 6))
    q, k, _ = layer.qkv(w.cut(x)).chunk(3, dim=-1)
    scores = q[:, :, 4:] @ k[:, :, 4:].transpose(1, 2) / 2 + w.mask(x.device)[:, 0].repeat(3, 1, 1)
    torch.testing.assert_close(weights, scores.softmax(-1).unflatten(0, (3, 4))[:, None])


def test_gradients_of_attention_in_windows():
    """What is shown is a view of the windows in the batch; its gradient comes from the tensor on the way."""
    w = Windows((4, 4), (2, 2), (1, 1))
    layer = WindowAttention(4, 2)
    trace = Trace("attention", gradients=True)
    trace.begin(depth=1, offers=("attention",), layout=TokenLayout((), (4, 4)), places=(w,))
    out = layer(torch.randn(2, 16, 4), w, LayerTrace(trace, 0))
    whole, pick = trace.on_path("attention", 0)
    (slope,) = torch.autograd.grad(out.square().sum(), whole, retain_graph=True)
    whole.grad = None  # it is kept there too
    out.square().sum().backward()
    assert trace["attention", 0].shape == (2, 2, 4, 4, 4)
    torch.testing.assert_close(trace.gradient("attention", 0), pick(slope))
    assert slope.abs().max() > 0
