"""Trace and Reducer: asking changes nothing, and what is written down is what happened."""

import pytest
import torch
from torch import Tensor

from vitlab.layers.reducer import Reduction
from vitlab.layers.trace import Trace
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import ViTConfig

SMALL = dict(image_size=(32, 48), patch_size=8, width=48, depth=3, heads=4, classes=7)


def small(**options) -> VisionTransformer:
    model = VisionTransformer(ViTConfig().with_options(**{**SMALL, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


IMAGES = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))
OPTIONS = [
    {},
    {"registers": 3},
    {"positions": "relative"},
    {"positions": "rotary"},
    {"qk_norm": True},
    {"norm": "post"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_asking_changes_no_bit_of_the_logits(options):
    model = small(**options)
    trace = Trace(*model.traceable)
    assert torch.equal(model(IMAGES, trace=trace), model(IMAGES))
    for layer in range(3):
        assert torch.equal(model(IMAGES, trace=Trace("attention", layers=[layer])), model(IMAGES))
    for kind in model.traceable:  # whatever a model offers, it gives
        assert (kind, 0) in trace or (kind, None) in trace


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attention_written_down_gives_the_heads_that_were_used(options):
    model = small(**options)
    trace = Trace("attention", "values", "heads")
    model(IMAGES, trace=trace)
    for layer in range(3):
        weights, values = trace["attention", layer], trace["values", layer]
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]), atol=1e-5, rtol=0)
        by_hand = (weights @ values).transpose(1, 2).flatten(2)
        torch.testing.assert_close(by_hand, trace["heads", layer], atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_explicit_model_agrees_with_fused(options):
    model = small(**options)
    explicit = VisionTransformer(model.config.with_options(attention="explicit")).eval()
    explicit.load_state_dict(model.state_dict())
    torch.testing.assert_close(explicit(IMAGES), model(IMAGES), atol=1e-5, rtol=0)
    asked, plain = Trace("attention"), Trace("attention")
    explicit(IMAGES, trace=asked)
    model(IMAGES, trace=plain)
    torch.testing.assert_close(asked.stack("attention"), plain.stack("attention"), atol=1e-5, rtol=0)


def test_class_attention_is_a_row_of_attention_and_heads_can_be_picked():
    model = small(registers=2)
    whole, row, picked = Trace("attention"), Trace("class_attention"), Trace("attention", heads=[2, -1], layers=[-1])
    for trace in (whole, row, picked):
        model(IMAGES, trace=trace)
    torch.testing.assert_close(row["class_attention", 1], whole["attention", 1][:, :, 0])
    assert torch.equal(picked["attention", 2], whole["attention", -1][:, [2, 3]])
    assert str(whole.layout) == "27 = 1 class token + 2 register tokens + 4 x 6 patches"


@pytest.mark.parametrize("kind", ["attention", "class_attention"])
def test_gradients_of_attention_match_finite_differences(kind):
    """d logit / d A is checked by nudging the weights themselves in a hand-written last block."""
    model = small(depth=1).double()
    images = IMAGES.double()
    trace = Trace(kind, "values", "after_attention", heads=[1, 3], gradients=True)
    logits = model(images, trace=trace)
    torch.testing.assert_close(logits, model(images), atol=1e-10, rtol=0)
    logits[:, 2].sum().backward()
    found = trace.gradient(kind, 0)
    full = Trace("attention", "values", "positions")
    model(images, trace=full)
    block, weights, values = model.blocks[0], full["attention", 0], full["values", 0]

    def logit(w: Tensor) -> Tensor:
        z = full["positions"] + block.attention.proj((w @ values).transpose(1, 2).flatten(2))
        z = z + block.mlp(block.norm2(z))
        return model.forward_head(model.norm(z))[:, 2].sum()

    torch.testing.assert_close(logit(weights), logits[:, 2].sum(), atol=1e-9, rtol=0)
    for picked, head in enumerate((1, 3)):
        for key in (0, 5, 24):
            up, down = weights.clone(), weights.clone()
            up[1, head, 0, key] += 1e-6
            down[1, head, 0, key] -= 1e-6
            slope = (logit(up) - logit(down)) / 2e-6
            got = found[1, picked, 0, key] if kind == "attention" else found[1, picked, key]
            torch.testing.assert_close(got, slope, atol=1e-7, rtol=1e-5)


def test_reduce_while_the_pass_goes():
    model = small()
    whole = Trace("attention")
    short = Trace("attention", reduce=lambda weights, layer: weights.mean(1) * (layer + 1))
    model(IMAGES, trace=whole)
    model(IMAGES, trace=short)
    torch.testing.assert_close(short["attention", 2], 3 * whole["attention", 2].mean(1))


def test_what_cannot_be_given_is_refused_by_name():
    model = small()
    with pytest.raises(ValueError, match="Did you mean 'attention'"):
        model(IMAGES, trace=Trace("atention"))
    with pytest.raises(ValueError, match="layers 0 to 2"):
        model(IMAGES, trace=Trace("attention", layers=[3]))
    with pytest.raises(ValueError, match="heads 0 to 3"):
        model(IMAGES, trace=Trace("attention", heads=[4]))
    with pytest.raises(ValueError, match="cannot give 'class_attention'"):
        small(class_token=False, pooling="mean")(IMAGES, trace=Trace("class_attention"))
    with pytest.raises(ValueError, match="cannot give 'norm1'"):
        small(norm="post")(IMAGES, trace=Trace("norm1"))
    with pytest.raises(ValueError, match='attention="auto"'):
        small(attention="fused")(IMAGES, trace=Trace("attention", gradients=True))
    trace = Trace("attention", layers=[0])
    with pytest.raises(KeyError, match="run model"):
        trace["attention", 0]
    model(IMAGES, trace=trace)
    with pytest.raises(KeyError, match=r"trace\['attention', 0\]"):
        trace["attention", 2]
    with pytest.raises(ValueError, match="gradients=True"):
        trace.gradient("attention", 0)


def test_intermediate_features_are_the_tokens_after_each_block():
    model = small(registers=2)
    whole = Trace("tokens")
    model(IMAGES, trace=whole)
    raw = model.intermediate_features(IMAGES, [0, 2], norm=False)
    assert torch.equal(raw[0], whole["tokens", 0])
    last = model.intermediate_features(IMAGES, [-1])[0]
    assert torch.equal(last, model.forward_features(IMAGES))
    maps = model.intermediate_features(IMAGES, [1], norm=False, maps=True)[0]
    assert maps.shape == (2, 48, 4, 6)
    assert torch.equal(maps[:, :, 2, 5], whole["tokens", 1][:, 3 + 2 * 6 + 5])


def test_intermediate_features_carry_gradients_on_the_fused_path():
    model = small(attention="fused")
    model.intermediate_features(IMAGES, [1])[0].sum().backward()
    assert model.blocks[1].mlp.fc2.weight.grad.abs().sum() > 0
    assert model.blocks[2].mlp.fc2.weight.grad is None


class DropLast:
    """Takes the last `count` tokens away at the given layers; hands later layers a key bias when asked."""

    def __init__(self, count: int, layers=(1,), bias: float | None = None, needs=("keys", "class_attention")):
        self.count, self.layers, self.bias, self.needs = count, layers, bias, needs
        self.seen: list[dict[str, Tensor]] = []

    def removes(self, layer, depth, tokens, prefix):
        return self.count if layer in self.layers else 0

    def reduce(self, tokens, remove, prefix, sizes, seen):
        self.seen.append(seen)
        B, N, _ = tokens.shape
        keep = N - remove
        assignment = torch.arange(N).where(torch.arange(N) < keep, -1).expand(B, N)
        bias = None if self.bias is None else torch.full((B, keep), self.bias)
        return Reduction(tokens[:, :keep], assignment, sizes[:, :keep], bias)


def test_keeping_every_token_is_no_reducer_to_the_bit():
    model = small()
    assert torch.equal(model(IMAGES, reducer=DropLast(0)), model(IMAGES))


def test_reducer_sees_what_it_needs_and_takes_tokens_between_the_halves():
    model = small()
    reducer, trace, plain = (
        DropLast(5),
        Trace("assignment", "sizes", "tokens"),
        Trace("after_attention", "keys", "tokens"),
    )
    model(IMAGES, reducer=reducer, trace=trace)
    model(IMAGES, trace=plain)
    assert torch.equal(reducer.seen[0]["keys"], plain["keys", 1])
    assert trace["tokens", 0].shape[1] == 25
    block = model.blocks[1]
    z = plain["after_attention", 1][:, :20]
    torch.testing.assert_close(trace["tokens", 1], z + block.mlp(block.norm2(z)), atol=1e-6, rtol=1e-5)
    assert trace["assignment", 1].tolist() == [[*range(20), *[-1] * 5]] * 2
    torch.testing.assert_close(trace["tokens", 2], block_by_hand(model.blocks[2], trace["tokens", 1]))


def block_by_hand(block, z):
    z = z + block.attention(block.norm1(z))
    return z + block.mlp(block.norm2(z))


def test_assignments_add_up_over_layers():
    trace = Trace("assignment")
    small()(IMAGES, reducer=DropLast(4, layers=(0, 2)), trace=trace)
    assert trace["assignment", 0][0].tolist() == [*range(21), *[-1] * 4]
    assert trace["assignment", 2][0].tolist() == [*range(17), *[-1] * 8]


def test_an_equal_key_bias_changes_nothing_and_fused_equals_explicit():
    model = small()
    explicit = VisionTransformer(model.config.with_options(attention="explicit")).eval()
    explicit.load_state_dict(model.state_dict())
    without, with_bias = (model(IMAGES, reducer=DropLast(3, bias=bias)) for bias in (None, 0.7))
    torch.testing.assert_close(with_bias, without, atol=1e-5, rtol=0)
    torch.testing.assert_close(explicit(IMAGES, reducer=DropLast(3, bias=0.7)), with_bias, atol=1e-5, rtol=0)


def test_positions_tied_to_a_grid_refuse_a_reducer():
    with pytest.raises(ValueError, match='positions="learned"'):
        small(positions="rotary")(IMAGES, reducer=DropLast(2))


class MergeLast:
    """Averages the last `count` + 1 tokens into one at the given layers, weighted by size; later keys get log size."""

    needs = ("class_attention",)

    def __init__(self, count: int, layers=(0,)):
        self.count, self.layers = count, layers
        self.seen: list[Tensor] = []

    def removes(self, layer, depth, tokens, prefix):
        return self.count if layer in self.layers else 0

    def reduce(self, tokens, remove, prefix, sizes, seen):
        self.seen.append(seen["class_attention"])
        keep = tokens.shape[1] - remove
        share = sizes[:, keep - 1 :, None] / sizes[:, keep - 1 :].sum(1)[:, None, None]
        merged = (tokens[:, keep - 1 :] * share).sum(1, keepdim=True)
        sizes = torch.cat([sizes[:, : keep - 1], sizes[:, keep - 1 :].sum(1, keepdim=True)], dim=1)
        places = torch.arange(tokens.shape[1]).clamp(max=keep - 1).expand(tokens.shape[:2])
        return Reduction(torch.cat([tokens[:, : keep - 1], merged], dim=1), places, sizes, 2 * sizes.log())


def attention_by_hand(layer, x: Tensor, key_bias: Tensor) -> Tensor:
    """Eqs. 5-8 in loops over images and heads, with one number per key added to the scaled product."""
    D, d = x.shape[-1], x.shape[-1] // 4
    out = torch.empty_like(x)
    for b in range(len(x)):
        q, k, v = (x[b] @ layer.qkv.weight.T + layer.qkv.bias).chunk(3, dim=-1)
        for part in (slice(i, i + d) for i in range(0, D, d)):
            scores = q[:, part] @ k[:, part].T / d**0.5 + key_bias[b]
            out[b, :, part] = scores.softmax(-1) @ v[:, part]
    return out @ layer.proj.weight.T + layer.proj.bias


@pytest.mark.parametrize("layers", [(0,), (0, 1)], ids=str)
def test_an_unequal_key_bias_is_added_in_every_later_layer(layers):
    """A merged token that stands for n patches: its column gets 2 log n, all others 0; also where it merges again."""
    model = small(registers=2)
    trace = Trace("after_attention", "tokens")
    with torch.no_grad():
        model(IMAGES, reducer=MergeLast(5, layers), trace=trace)
        for layer, merged in ((1, 6), (2, 1 + 5 * len(layers))):
            block, z = model.blocks[layer], trace["tokens", layer - 1]
            assert z.shape == (2, 3 + 24 - merged + 1, 48)
            key_bias = torch.zeros(z.shape[:2])
            key_bias[:, -1] = 2 * torch.tensor(float(merged)).log()
            z = z + attention_by_hand(block.attention, block.norm1(z), key_bias)
            torch.testing.assert_close(trace["after_attention", layer], z, atol=1e-5, rtol=1e-5)
        z = z + block.mlp(block.norm2(z))
        torch.testing.assert_close(trace["tokens", 2], z, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", [(0,), (0, 2)], ids=str)
@pytest.mark.parametrize("pooling", ["mean", "class_mean", "mean_norm"])
def test_the_mean_of_merged_tokens_is_weighted_by_their_sizes(pooling, layers):
    model = small(pooling=pooling, registers=2)
    reducer = MergeLast(5, layers)
    with torch.no_grad():
        tokens = model.forward_features(IMAGES, reducer=reducer)
        last = 1 + 5 * len(layers)
        sizes = [1.0] * (24 - last) + [float(last)]
        assert tokens.shape[1] == 3 + len(sizes)
        mean = sum(size * tokens[:, 3 + i] for i, size in enumerate(sizes)) / 24
        y = {
            "mean": mean,
            "class_mean": torch.cat([tokens[:, 0], mean], dim=1),
            "mean_norm": model.head_norm(mean) if model.head_norm is not None else None,
        }[pooling]
        torch.testing.assert_close(model(IMAGES, reducer=reducer), model.head(y), atol=1e-5, rtol=1e-5)
        assert (mean - tokens[:, 3:].mean(1)).abs().max() > 1e-2  # the plain mean is something else


def test_class_attention_holds_the_relative_bias():
    model = small(positions="relative", registers=2)
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.relative.table, std=2.0)
    whole, row = Trace("attention"), Trace("class_attention")
    for trace in (whole, row):
        model(IMAGES, trace=trace)
    for layer in range(3):
        torch.testing.assert_close(row["class_attention", layer], whole["attention", layer][:, :, 0])


@pytest.mark.parametrize("path", ["auto", "explicit"])
def test_class_attention_holds_a_reducers_key_bias(path):
    model = small(registers=2, attention=path)
    whole, row, reducer = Trace("attention", "values", "heads"), Trace("class_attention"), MergeLast(5, (0, 2))
    model(IMAGES, reducer=reducer, trace=whole)
    model(IMAGES, reducer=MergeLast(5, (0, 2)), trace=row)
    for layer in range(3):
        first_row = whole["attention", layer][:, :, 0]
        torch.testing.assert_close(row["class_attention", layer], first_row)
        head_by_head = (first_row[:, :, None] @ whole["values", layer]).flatten(1)  # (B, hd): what was computed with
        torch.testing.assert_close(head_by_head, whole["heads", layer][:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(reducer.seen[1], row["class_attention", 2])  # what the reducer scores tokens by
