"""Fewer tokens: ToMe and EViT against slow loops from the papers; what is kept, where it went, and what it weighs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import vitlab
from vitlab.layers.trace import Trace
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import ViTConfig
from vitlab.reduce import (
    Constant,
    Decreasing,
    EViT,
    KeepRatio,
    RandomDrop,
    Same,
    ToMe,
    for_training,
    r_for,
    reducer_of,
)
from vitlab.reduce.tome import match, merge

OPTIONS = dict(image_size=(24, 32), patch_size=4, width=24, depth=4, heads=3, classes=5, registers=2)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def model(**options) -> VisionTransformer:
    """48 patches, and a prefix of three."""
    built = VisionTransformer(ViTConfig().with_options(**{**OPTIONS, **options})).double().eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return built


def images(batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 3, 24, 32, dtype=torch.float64)


# ---- ToMe


def tome_by_hand(x: np.ndarray, keys: np.ndarray, sizes: np.ndarray, r: int, prefix: int):
    """Section 3 of the paper for one image, a token at a time: tokens, sizes and who went where."""
    patches = list(range(prefix, len(x)))
    a, b = patches[1::2], patches[::2]
    edges = []
    for i in a:
        cosines = [keys[i] @ keys[j] / np.linalg.norm(keys[i]) / np.linalg.norm(keys[j]) for j in b]
        edges.append((max(cosines), i, b[int(np.argmax(cosines))]))
    edges = sorted(edges, reverse=True)[:r]
    goes = {i: j for _, i, j in edges}
    tokens, counts, place = [], [], {}
    for n in range(len(x)):
        if n in goes:
            continue
        members = [n, *(i for i, j in goes.items() if j == n)]
        count = sum(sizes[m] for m in members)
        tokens.append(sum(sizes[m] * x[m] for m in members) / count)
        counts.append(count)
        place[n] = len(tokens) - 1
    return np.stack(tokens), np.array(counts), [place[goes.get(n, n)] for n in range(len(x))]


@pytest.mark.parametrize("r", [1, 7, 10])
def test_merging_equals_the_slow_loop(r):
    prefix, N = 2, 23
    x, keys = torch.randn(3, N, 8, dtype=torch.float64), torch.randn(3, 4, N, 6, dtype=torch.float64)
    sizes = torch.randint(1, 5, (3, N)).double()
    found = ToMe(Constant(r)).reduce(x, r, prefix, sizes, {"keys": keys})
    for b in range(3):
        tokens, counts, places = tome_by_hand(x[b].numpy(), keys[b].mean(0).numpy(), sizes[b].numpy(), r, prefix)
        np.testing.assert_allclose(found.tokens[b], tokens, rtol=1e-12)
        np.testing.assert_allclose(found.sizes[b], counts)
        assert found.assignment[b].tolist() == places
    torch.testing.assert_close(found.key_bias, found.sizes.log())


def forward_by_hand(m: VisionTransformer, x: torch.Tensor, r: int) -> torch.Tensor:
    """The whole network with merging, block by block, attention written out with log s (eq. 1)."""
    z, _ = m.embed(x, m.layout(24, 32))
    sizes = torch.ones(z.shape[:2], dtype=z.dtype)
    prefix = len(m.config.prefix)
    for block in m.blocks:
        y = block.norm1(z)
        q, k, v = block.attention.qkv(y).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(8) + sizes.log()[:, None, None]
        z = z + block.attention.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        rows = [tome_by_hand(z[b].numpy(), k[b].mean(0).numpy(), sizes[b].numpy(), r, prefix) for b in range(len(z))]
        z = torch.from_numpy(np.stack([row[0] for row in rows]))
        sizes = torch.from_numpy(np.stack([row[1] for row in rows]))
        z = z + block.mlp(block.norm2(z))
    return m.head(m.norm(z)[:, 0])


@torch.no_grad()
@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_a_network_that_merges_equals_the_slow_loop(attention):
    m, x = model(attention=attention), images()
    torch.testing.assert_close(m(x, reducer=ToMe(Constant(9))), forward_by_hand(m, x, 9), rtol=1e-9, atol=1e-9)


def test_merging_never_takes_more_than_half_and_the_prefix_stays():
    reducer = ToMe(Constant(1000))
    assert reducer.removes(0, 4, tokens=51, prefix=3) == 24
    assert reducer.removes(0, 4, tokens=4, prefix=3) == 0
    trace = Trace("assignment", "sizes")
    model()(images(), trace=trace, reducer=ToMe(Constant(9)))
    assert (trace["assignment", -1][:, :3] == torch.arange(3)).all()
    assert trace["sizes", -1].shape[1] == 51 - 4 * 9
    assert (trace["sizes", -1].sum(dim=1) == 51).all()  # nothing is lost
    assert trace["sizes", -1].max() > 2


def test_equal_patches_merge_first():
    keys = torch.nn.functional.normalize(torch.randn(1, 10, 16), dim=-1)
    keys[0, 7] = keys[0, 4]
    merged, into = match(keys, 1)
    assert (merged.item(), into.item()) == (7, 4)
    x = torch.arange(10.0)[None, :, None]
    assert merge(x, torch.ones(1, 10), merged, into, proportional=False).tokens[0, 4].item() == 5.5


# ---- EViT


def test_evit_equals_the_slow_loop():
    prefix, N, keep = 2, 20, 11
    x, attention = torch.randn(2, N, 6, dtype=torch.float64), torch.rand(2, 4, N, dtype=torch.float64)
    attention /= attention.sum(-1, keepdim=True)
    sizes = torch.ones(2, N, dtype=torch.float64)
    found = EViT(KeepRatio(0.6)).reduce(x, N - prefix - keep - 1, prefix, sizes, {"class_attention": attention})
    for b in range(2):
        score = attention[b].mean(0)[prefix:].numpy()
        best = sorted(sorted(range(18), key=lambda n: -score[n])[:keep])
        rest = [n for n in range(18) if n not in best]
        fused = sum(score[n] * x[b, prefix + n].numpy() for n in rest)
        expected = [*x[b, :prefix].numpy(), *(x[b, prefix + n].numpy() for n in best), fused]
        np.testing.assert_allclose(found.tokens[b], np.stack(expected), rtol=1e-12)
        assert found.assignment[b, prefix:].tolist() == [
            prefix + best.index(n) if n in best else prefix + keep for n in range(18)
        ]
        assert found.sizes[b, -1] == len(rest)


def test_evit_without_the_summary_drops_the_others():
    prefix, N, keep = 2, 20, 11
    x, attention = torch.randn(2, N, 6, dtype=torch.float64), torch.rand(2, 4, N, dtype=torch.float64)
    sizes = torch.ones(2, N, dtype=torch.float64)
    reducer = EViT(KeepRatio(0.6), fuse=False)
    assert reducer.removes(1, 4, N, prefix) == N - prefix - keep
    found = reducer.reduce(x, N - prefix - keep, prefix, sizes, {"class_attention": attention})
    for b in range(2):
        score = attention[b].mean(0)[prefix:].tolist()
        best = sorted(sorted(range(18), key=lambda n: -score[n])[:keep])
        assert torch.equal(found.tokens[b], x[b, [0, 1, *(prefix + n for n in best)]])
        assert found.assignment[b].tolist() == [0, 1, *(prefix + best.index(n) if n in best else -1 for n in range(18))]
    assert torch.equal(found.sizes, torch.ones(2, prefix + keep, dtype=torch.float64))


def evit_by_hand(m: VisionTransformer, x: torch.Tensor, keep: int, at: int) -> torch.Tensor:
    """Eq. 4 in plain autograd: attention written out, one image and one patch at a time."""
    z, _ = m.embed(x, m.layout(24, 32))
    prefix = len(m.config.prefix)
    for layer, block in enumerate(m.blocks):
        q, k, v = block.attention.qkv(block.norm1(z)).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        attention = (q @ k.mT / math.sqrt(8)).softmax(-1)  # (B, h, N, N)
        z = z + block.attention.proj((attention @ v).transpose(1, 2).flatten(2))
        if layer == at:
            rows = []
            for tokens, weights in zip(z, attention[:, :, 0].mean(1), strict=True):
                order = sorted(range(prefix, len(tokens)), key=lambda n: -weights[n].item())
                summary = sum(weights[n] * tokens[n] for n in order[keep:])
                rows.append(torch.stack([*tokens[:prefix], *(tokens[n] for n in sorted(order[:keep])), summary]))
            z = torch.stack(rows)
        z = z + block.mlp(block.norm2(z))
    return m.head(m.norm(z)[:, 0])


def gradients(m: VisionTransformer, out: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(out.square().sum(), list(m.parameters())))


@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_training_goes_through_the_weights_of_the_summary(attention):
    m, x = model(attention=attention, depth=3), images(2)
    found = gradients(m, m(x, reducer=EViT(KeepRatio(0.5, layers=(1,)))))
    torch.testing.assert_close(found, gradients(m, evit_by_hand(m, x, 24, at=1)), rtol=1e-7, atol=1e-9)


def test_evit_keeps_what_the_class_token_looks_at():
    m, x, trace = model(), images(), Trace("class_attention", "assignment", layers=[1])
    m(x, trace=trace, reducer=EViT(KeepRatio(0.5, layers=(1,))))
    best = trace["class_attention", 1].mean(1)[:, 3:].topk(24).indices
    assert (trace["assignment", 1][:, 3:].gather(1, best) < 27).all()
    assert (trace["assignment", 1] == 27).sum() == 3 * 24  # the summary


def test_evit_needs_a_class_token():
    m = model(class_token=False, registers=0, pooling="mean")
    with pytest.raises(ValueError, match="needs 'class_attention'"):
        m(images(), reducer=EViT(KeepRatio(0.5)))


# ---- all of them


@torch.no_grad()
@pytest.mark.parametrize("text", ["tome:r=0", "evit:keep=1", "random:keep=1", "tome:r=0,schedule=decreasing"])
def test_keeping_all_changes_nothing_to_the_bit(text):
    m, x = model(), images()
    assert torch.equal(m(x, reducer=reducer_of(text)), m(x))


@pytest.mark.parametrize("text", ["tome:r=9", "evit:keep=0.6", "random:keep=0.6"])
def test_an_image_alone_gives_what_it_gives_in_a_batch_and_gradients_flow(text):
    m, x = model(), images(1).expand(3, -1, -1, -1).contiguous()
    out = m(x, reducer=reducer_of(text))
    if not text.startswith("random"):  # which draws for each row
        torch.testing.assert_close(out, m(x[:1], reducer=reducer_of(text)).expand_as(out))
    assert not torch.allclose(out, m(x))
    out.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in m.parameters())


@pytest.mark.parametrize("text", ["tome:r=9", "evit:keep=0.6", "random:keep=0.6"])
def test_blocks_that_run_twice_for_their_gradients_reduce_alike(text):
    plain, x = model(dropout=0.2, stochastic_depth=0.3).train(), images()
    twice = model(dropout=0.2, stochastic_depth=0.3, gradient_checkpointing=True).train()
    twice.load_state_dict(plain.state_dict())
    found, ran = [], []
    for m in (plain, twice):
        m.blocks[0].register_forward_pre_hook(lambda *_: ran.append(1))
        torch.manual_seed(3)
        found.append(gradients(m, m(x, reducer=for_training(reducer_of(text)))))
    assert len(ran) == 3  # the second network's block ran again
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_in_training_random_drop_follows_the_seed_of_the_step():
    m, x, kept = model(), images(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        trace = Trace("assignment", layers=[1])
        m(x, trace=trace, reducer=for_training(reducer_of("random:keep=0.5")))
        kept.append(trace["assignment", 1])
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], kept[2])
    tome = reducer_of("tome:r=9")
    assert for_training(tome) is tome


@pytest.mark.parametrize("text", ["tome:r=9", "tome:r=9,schedule=decreasing", "evit:keep=0.6", "evit:keep=0.3"])
def test_random_drop_may_take_as_many_as_another_at_every_layer(text):
    counts = []
    for reducer in (text, f"random:like={text}"):
        trace = Trace("tokens")
        model()(images(), trace=trace, reducer=reducer_of(reducer))
        counts.append([trace["tokens", layer].shape[1] for layer in range(4)])
    assert counts[0] == counts[1]
    assert counts[0][-1] < 51


def test_random_drop_repeats_itself_and_drops_other_patches_of_each_image():
    trace, x = Trace("assignment"), images()
    m, reducer = model(), RandomDrop(KeepRatio(0.5, layers=(0,)))
    m(x, trace=trace, reducer=reducer)
    first = trace["assignment", 0]
    m(x, trace=trace, reducer=reducer)
    assert torch.equal(first, trace["assignment", 0])
    assert not torch.equal(first[0], first[1])
    assert ((first[:, 3:] >= 0).sum(1) == 24).all()


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16", "mae_digits", "dino_digits", "clip_digits"])
def test_every_encoder_of_ours(name):
    m = vitlab.create(name).eval()
    encoder = getattr(m, "encoder", m)
    c = encoder.config
    x = torch.randn(2, c.channels, *c.image_size)
    trace = Trace("sizes")
    assert torch.isfinite(encoder(x, trace=trace, reducer=ToMe(Constant(2)))).all()
    assert trace["sizes", 0].shape[1] == math.prod(c.grid) + len(c.prefix) - 2


# ---- schedules and names


def test_schedules():
    assert [Constant(5).removes(i, 4, 100) for i in range(4)] == [5, 5, 5, 5]
    falling = [Decreasing(13).removes(i, 12, 1000) for i in range(12)]
    assert sum(falling) == 13 * 12
    assert falling[0] == 26
    assert falling[-1] == 0
    assert falling == sorted(falling, reverse=True)
    assert [KeepRatio(0.7).removes(i, 12, 196) for i in range(12)] == [0, 0, 0, 58, 0, 0, 58, 0, 0, 58, 0, 0]
    assert [KeepRatio(0.5, layers=(-1,)).removes(i, 4, 9) for i in range(4)] == [0, 0, 0, 4]
    assert r_for(0.5, patches=196, depth=12) == 8
    assert r_for(0.1, patches=4, depth=12) == 1


@pytest.mark.parametrize("layer", [12, -13])
def test_a_layer_that_does_not_exist(layer):
    with pytest.raises(ValueError, match=f"layer {layer} does not exist: this model has layers 0 to 11"):
        KeepRatio(0.5, layers=(3, layer)).removes(0, 12, 196)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tome:r=13", ToMe(Constant(13))),
        ("tome:r=13,schedule=decreasing", ToMe(Decreasing(13))),
        ("evit:keep=0.7", EViT(KeepRatio(0.7))),
        ("random:keep=0.5,layers=3/6", RandomDrop(KeepRatio(0.5, (3, 6)))),
        ("random:like=tome:r=13,schedule=decreasing", RandomDrop(Same(ToMe(Decreasing(13))))),
    ],
)
def test_in_words(text, expected):
    assert reducer_of(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tomme:r=3", "Did you mean 'tome'"),
        ("random:like=tomme:r=3", "Did you mean 'tome'"),
        ("tome", "give the number to remove"),
        ("tome:r=3,keep=0.5", "give the number to remove"),
        ("tome:s=3", "'s=3' is not understood"),
        ("tome:r=-1", "must be an integer"),
        ("tome:r=x", "invalid literal"),
        ("evit:keep=0", "must be above 0"),
        ("evit:keep=0.5,schedule=constant", "schedule belongs to r"),
        ("tome:r=3,layers=1", "layers belongs to keep"),
        ("tome:r=3,schedule=rising", "constant or decreasing"),
    ],
)
def test_wrong_words(text, words):
    with pytest.raises(ValueError, match=words):
        reducer_of(text)
