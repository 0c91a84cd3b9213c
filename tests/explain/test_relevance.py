"""relevance, grad_cam, gradient_x_input equal slow loops over transformers' own tensors; the model stays as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitlab.explain.relevance import class_numbers, grad_cam, gradient_x_input, relevance
from vitlab.layers.patches import patchify
from vitlab.layers.trace import Trace
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import ViTConfig

SMALL = dict(image_size=(32, 48), patch_size=8, width=48, depth=3, heads=4, classes=7)
METHODS = {"relevance": relevance, "grad_cam": grad_cam, "gradient_x_input": gradient_x_input}
OPTIONS = [
    {},
    {"registers": 3},
    {"distill_token": True},
    {"pooling": "mean", "registers": 2},
    {"pooling": "mean_norm", "class_token": False},
    {"pooling": "class_mean"},
    {"pooling": "attention", "class_token": False},
    {"norm": "post"},
    {"positions": "relative"},
    {"positions": "rotary"},
]


def small(**options) -> VisionTransformer:
    model = VisionTransformer(ViTConfig().with_options(**{**SMALL, **options})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def images(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, 32, 48, generator=torch.Generator().manual_seed(1))


def test_relevance_equals_the_papers_equations_on_transformers_tensors(pair, relevance_by_loops):
    out = pair.theirs(pair.images, output_attentions=True)
    score = out.logits[0, 3] + out.logits[1, 0]
    gradients = [g.numpy() for g in torch.autograd.grad(score, out.attentions)]
    R = relevance_by_loops([a.detach().numpy() for a in out.attentions], gradients)
    reads = {  # by tokens before the patches: what each family's head reads
        1: lambda: R[:, 0],
        2: lambda: (R[:, 0] + R[:, 1]) / 2,  # two heads, whose mean is the answer
        4: lambda: (R[:, 0] + R[:, 4:].mean(1)) / 2,  # the class token beside the mean of the patches
    }
    expected = reads[pair.prefix]()[:, pair.prefix :].reshape(2, 4, 6)
    found = relevance(pair.ours, pair.images, [3, 0])
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6 * expected.max(), rtol=0)
    assert np.ptp(expected[0]) > 0.1 * expected[0].max()  # there was something to find


@pytest.mark.parametrize("layer", [-1, 0, 1])
def test_grad_cam_equals_a_loop_on_transformers_hidden_states(pair, layer):
    norms = [m for name, m in pair.theirs.named_modules() if name.endswith(("layernorm_before", "norm1"))]
    kept: list[torch.Tensor] = []
    hook = norms[layer].register_forward_hook(lambda *args: kept.append(args[-1]))
    logits = pair.theirs(pair.images).logits
    hook.remove()
    (slope,) = torch.autograd.grad(logits.amax(1).sum(), kept[0])
    tokens, slope = kept[0][:, pair.prefix :].detach().numpy(), slope[:, pair.prefix :].numpy()
    expected = np.zeros((2, 24))
    for b in range(2):
        for n in range(24):
            for channel in range(48):
                expected[b, n] += slope[b, :, channel].mean() * tokens[b, n, channel]
    expected = np.maximum(expected, 0).reshape(2, 4, 6)
    found = grad_cam(pair.ours, pair.images, layer=layer)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6 * expected.max(), rtol=0)
    assert len(norms) == 3 and (expected > 0).any()


def test_gradient_x_input_equals_transformers(pair):
    x = pair.images.clone().requires_grad_()
    (slope,) = torch.autograd.grad(pair.theirs(x).logits[:, 4].sum(), x)
    expected = (slope * x).sum(1).detach()
    torch.testing.assert_close(gradient_x_input(pair.ours, x, 4, tokens=False), expected, atol=1e-6, rtol=1e-5)


def test_gradient_x_tokens_are_sums_over_pixels_where_the_embedding_is_linear():
    model, x = small(patch_bias=False).double(), images().double()
    pixels = gradient_x_input(model, x, 5, tokens=False)[:, None]
    sums = patchify(pixels, 8).sum(-1).unflatten(1, (4, 6))
    torch.testing.assert_close(gradient_x_input(model, x, 5), sums, atol=1e-9, rtol=1e-6)


def whole_relevance(model, x, classes) -> torch.Tensor:
    """All of R (B, N, N), the plain way."""
    trace = Trace("attention", gradients=True)
    logits = model(x, trace=trace)
    logits.gather(1, torch.tensor(classes)[:, None]).sum().backward()
    R = torch.eye(trace["attention", 0].shape[-1], dtype=x.dtype).expand(len(x), -1, -1)
    for layer in range(3):
        product = trace["attention", layer] * trace.gradient("attention", layer)
        R = R + product.clamp(min=0).mean(1) @ R
    return R.detach()


@pytest.mark.parametrize(
    ("options", "row"),
    [
        ({"registers": 3}, lambda R: R[:, 0, 4:]),
        ({"distill_token": True, "registers": 2}, lambda R: (R[:, 0, 4:] + R[:, 1, 4:]) / 2),
        ({"pooling": "mean", "registers": 2}, lambda R: R[:, 3:, 3:].mean(1)),
        ({"pooling": "mean_norm", "class_token": False}, lambda R: R.mean(1)),
        ({"pooling": "class_mean"}, lambda R: (R[:, 0, 1:] + R[:, 1:, 1:].mean(1)) / 2),
        ({"norm": "post"}, lambda R: R[:, 0, 1:]),
        ({"positions": "relative"}, lambda R: R[:, 0, 1:]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_the_row_that_the_head_reads_without_prefix_tokens(options, row):
    model, x, classes = small(**options).double(), images().double(), [2, 6, 0]
    expected = row(whole_relevance(model, x, classes)).unflatten(1, (4, 6))
    torch.testing.assert_close(relevance(model, x, classes), expected, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_batch_equals_one_by_one(options, method):
    model, x = small(**options), images()
    alone = torch.cat([method(model, image[None]) for image in x])
    assert alone.shape == (3, 4, 6) and alone.isfinite().all()
    for size in (8, 2):
        torch.testing.assert_close(method(model, x, batch_size=size), alone, atol=1e-5, rtol=1e-4)
    assert float((alone[0] - alone[1]).abs().max()) > 1e-4


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_target_chooses_the_class(method):
    model, x = small(), images()
    model.labels = ["ant", "bee", "cat", "dog", "elk", "3", "gnu"]
    top = model(x).argmax(1)
    assert torch.equal(method(model, x), method(model, x, top))
    assert torch.equal(method(model, x, "dog"), method(model, x, 3))
    assert torch.equal(method(model, x, "3"), method(model, x, 5))  # a name goes before a number
    mixed = method(model, x, ["cat", 1, np.int64(4)], batch_size=2)
    for row, number in enumerate((2, 1, 4)):
        torch.testing.assert_close(mixed[row], method(model, x, number)[row], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(method(model, x, 0), method(model, x, 1))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_model_stays_as_it_was_and_may_be_frozen(method):
    model, x = small(dropout=0.5, stochastic_depth=0.5).train(), images()
    model.blocks[1].eval().requires_grad_(False)
    modes, flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    first = method(model, x)
    assert torch.equal(first, method(model, x))  # without dropout
    assert all(p.grad is None for p in model.parameters()) and x.grad is None and not x.requires_grad
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert not first.requires_grad
    model.requires_grad_(False)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(method(model, x.clone()), first)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("options", [{"registers": 2}, {"distill_token": True}, {"pooling": "mean"}], ids=str)
def test_half_precision_is_finite_and_near(options, method):
    model, x = small(**options), images()
    exact = method(model, x, 1)
    half = method(model.bfloat16(), x, 1)
    assert half.dtype == torch.float32 and half.isfinite().all()
    same = torch.corrcoef(torch.stack([half.flatten(), exact.flatten()]))[0, 1]
    assert same > 0.95


def test_pictures_of_other_sizes_and_paddings():
    model = small(pad=True)
    x = torch.randn(2, 3, 30, 41)
    for method in METHODS.values():
        assert method(model, x).shape == (2, 4, 6)
    assert gradient_x_input(model, x, tokens=False).shape == (2, 30, 41)


def test_what_cannot_be_is_refused():
    model, x = small(), images()
    with pytest.raises(ValueError, match="classes 0 to 6"):
        relevance(model, x, 7)
    with pytest.raises(ValueError, match="2 classes for 3 images"):
        grad_cam(model, x, [1, 2])
    with pytest.raises(ValueError, match="3 classes for 2 images"):
        relevance(model, x[:2], [1, 2, 3])
    with pytest.raises(ValueError, match="no class names"):
        relevance(model, x, "dog")
    model.labels = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu"]
    with pytest.raises(ValueError, match="Did you mean 'dog'"):
        relevance(model, x, "dogg")
    with pytest.raises(ValueError, match="number or name"):
        relevance(model, x, [1.5, 1, 1])
    with pytest.raises(ValueError, match="layers 0 to 2"):
        grad_cam(model, x, layer=3)
    with pytest.raises(ValueError, match="attention, rollout and features need none"):
        relevance(small(classes=0), x)
    with pytest.raises(ValueError, match='attention="auto"'):
        relevance(small(attention="fused"), x)
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert class_numbers(model, logits, None).tolist() == [1]
