"""Which patches speak for a class: three methods that weigh what a network holds by the gradient of that class's logit.

    heat = relevance(model, "cat.jpg")                         # (B, grid_h, grid_w), for each image's top class
    heat = grad_cam(model, images, target="tabby")             # or a class's number, or a list with one for each image

    heat = relevance(model, images, edit=Edit().zero("heads", layer=2, heads=[1]))      # of an edited pass

Gradients are taken of traced values, never of the weights: .grad and requires_grad stay unchanged, and a frozen model
works as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from operator import index

import numpy as np
import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.inputs import Images, TokenModel, batches, check_layer, logits_of, token_model, wide
from vitlab.explain.stages import Stages, row_of
from vitlab.layers.edit import Edit
from vitlab.layers.trace import Trace, check_offered
from vitlab.models.base import Network, evaluation_mode
from vitlab.models.hierarchy import Hierarchy

Target = int | str | Sequence[int | str] | Tensor | np.ndarray | None


def relevance(
    model: ModelOrName, images: Images, target: Target = None, *, batch_size: int = 8, edit: Edit | None = None
) -> Tensor:
    """(B, grid_h, grid_w): gradient-weighted attention through all layers, eqs. 5-6 of arXiv:2103.15679.

    Abar = E_h[(dy/dA * A)^+] and R <- R + Abar R, from R = I; the map is the row of R of the token that the head reads:
    the class token's (the mean with the distillation token's where there are two heads), the mean of the patches' rows
    for mean-pooled models, both halves for class_mean. Attention pooling counts as a mean.

    In stages (Swin, PVT, Twins) R <- R + N Abar R, with Abar over the tokens of its stage: windows put back in place, a
    reduced key's weight spread evenly over its tokens. N is the number of tokens of the stage, as each of them is about
    1/N of what the head reads: dy/dA has that factor once and the row of R again, so without N a layer of 49 tokens
    would weigh 64 times as much as one of 3136. (The head reads all of a class token: its row of Abar has no factor.)
    Merging splits a token's relevance equally between the tokens it was merged from; finer detail comes from the
    attention of the finer stages.
    """
    model = classifier(model)
    check_offered(["attention"], model.traceable)
    return _maps(model, images, target, batch_size, partial(_relevance, edit=edit))


def grad_cam(
    model: ModelOrName,
    images: Images,
    target: Target = None,
    layer: int = -1,
    *,
    batch_size: int = 8,
    edit: Edit | None = None,
) -> Tensor:
    """(B, grid_h, grid_w): Grad-CAM (arXiv:1610.02391) with patch tokens for pixels: (sum_k alpha_k T_k)^+, where alpha
    is the gradient's mean over the patches.

    T is the output of norm1 in block `layer`, where patches still reach the class token: a class-token head does not
    read the last block's patches, so their gradient is 0. A post-norm block has no norm1; T is its input, which the
    block before it has normalised.

    In stages (Swin, PVT, Twins) the tokens of that block lie on a coarser grid; every patch has its token's value.
    """
    model = classifier(model)
    kind, at = _tokens_read(model, layer)

    def cam(model: TokenModel, x: Tensor, classes: Target) -> Tensor:
        stages = Stages(model, *x.shape[-2:]) if isinstance(model, Hierarchy) else None
        rows, columns = model.layout(*x.shape[-2:]).grid if stages is None else stages.layers[layer].grid
        T, slope = (wide(v[:, -rows * columns :]) for v in _gradient(model, x, classes, (kind, at), edit))  # (B, N, D)
        alpha = slope.mean(1, keepdim=True)  # (B, 1, D)
        heat = (alpha * T).sum(-1).clamp(min=0)  # (B, N)
        return heat if stages is None else stages.paint(heat, stages.layers[layer].stage)

    return _maps(model, images, target, batch_size, cam)


def gradient_x_input(
    model: ModelOrName,
    images: Images,
    target: Target = None,
    tokens: bool = True,
    *,
    batch_size: int = 8,
    edit: Edit | None = None,
) -> Tensor:
    """Gradient times input, with its sign: above 0 speaks for the class, below 0 against it.

    tokens=True: the input is each patch's embedding, before positions are added: (B, grid_h, grid_w). tokens=False: it
    is each normalised pixel, summed over colours: (B, H, W).
    """
    model = classifier(model)

    def of_tokens(model: TokenModel, x: Tensor, classes: Target) -> Tensor:
        z, slope = _gradient(model, x, classes, ("patch_embed", None), edit)
        return (wide(z) * wide(slope)).sum(-1)  # (B, N)

    def of_pixels(model: TokenModel, x: Tensor, classes: Target) -> Tensor:
        (slope,) = torch.autograd.grad(_score(model, x, classes, None, edit), x)
        return (wide(x) * wide(slope)).sum(1)  # (B, H, W)

    return _maps(model, images, target, batch_size, of_tokens if tokens else of_pixels)


def class_numbers(model: Network, logits: Tensor, target: Target) -> Tensor:
    """(B,): the class of each image. None: the top one; a number or a name for all, or a list with one per image."""
    if target is None:
        return logits.argmax(dim=1)
    B, classes = logits.shape
    listed = _as_list(target)
    assert listed is not None
    targets = listed if isinstance(listed, list) else [listed] * B
    if len(targets) != B:
        raise UsageError(_one_for_each(len(targets), B))
    return torch.tensor([_class_number(model, one, classes) for one in targets], device=logits.device)


def target_classes(model: ModelOrName, images: Tensor, target: Target = None, *, batch_size: int = 8) -> list[int]:
    """The number of the class to explain for each image."""
    model = classifier(model)
    return class_numbers(model, logits_of(model, images, batch_size), target).tolist()


def _as_list(target: Target) -> int | str | list[int | str] | None:
    """Tensors and sequences as a list; None, a number or a name unchanged."""
    if isinstance(target, Tensor | np.ndarray):
        return target.tolist()
    return list(target) if isinstance(target, Sequence) and not isinstance(target, str) else target


def _one_for_each(classes: int, images: int) -> str:
    return f"target lists {classes} classes for {images} images: give one for each, or one for all."


def _class_number(model: Network, target: int | str, classes: int) -> int:
    labels = model.labels or []
    if isinstance(target, str):
        if target in labels:
            return labels.index(target)
        if not target.isdecimal() or len(target) > 9:
            near = get_close_matches(target, labels, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else "" if labels else " It knows no class names."
            raise UsageError(f"{target=} is no class of this model.{hint} Or give a number, 0 to {classes - 1}.")
        target = int(target)
    try:
        number = index(target)
    except TypeError:
        raise UsageError(f"{target=} must be a class's number or name, or a list with one per image.") from None
    if isinstance(target, bool) or not 0 <= number < classes:
        raise UsageError(f"{target=} does not exist: this model has classes 0 to {classes - 1}.")
    return number


def classifier(model: ModelOrName) -> TokenModel:
    """The model, or the one that a name loads; raises if it has no classes."""
    model = token_model(model)
    if not model.config.classes:
        raise UsageError(
            "this model has no classes (classes=0), so nothing speaks for one. vitlab explain attention, rollout and "
            "features need none. A CLIP or SigLIP is asked in words: --text 'a dog', explain.ask."
        )
    return model


def _maps(
    model: TokenModel,
    images: Images,
    target: Target,
    batch_size: int,
    method: Callable[[TokenModel, Tensor, Target], Tensor],
) -> Tensor:
    """The method's (B, N) for every batch, as a grid; (B, H, W) stays."""
    parts = []
    for x, classes in target_parts(model, images, target, batch_size):
        with evaluation_mode(model), torch.inference_mode(False), torch.enable_grad():
            x = x.detach().clone().requires_grad_(True)  # builds a graph even if the weights are frozen
            heat = method(model, x, classes).detach().cpu()
        parts.append(heat if heat.ndim == 3 else heat.unflatten(1, model.layout(*x.shape[-2:]).grid))
    return torch.cat(parts)


def target_parts(model: TokenModel, images: Images, target: Target, batch_size: int) -> Iterator[tuple[Tensor, Target]]:
    """Images in batches, each with its part of the target."""
    listed, start = _as_list(target), 0
    for batch in batches(model, images, batch_size):
        end = start + len(batch)
        yield batch.images, listed[start:end] if isinstance(listed, list) else listed
        start = end
    if isinstance(listed, list) and len(listed) != start:
        raise UsageError(_one_for_each(len(listed), start))


def _score(model: TokenModel, images: Tensor, target: Target, trace: Trace | None, edit: Edit | None) -> Tensor:
    """The sum over images of the logit of their class; images are independent, so gradients are per image."""
    logits = model(images, trace=trace, edit=edit)  # (B, classes)
    return logits.gather(1, class_numbers(model, logits.detach(), target)[:, None]).sum()


def _gradient(
    model: TokenModel, images: Tensor, target: Target, place: tuple[str, int | None], edit: Edit | None
) -> tuple[Tensor, Tensor]:
    """The traced value at a kind and layer, and the gradient of the score with respect to it."""
    kind, layer = place
    trace = Trace(kind, layers="all" if layer is None else [layer], gradients=True)
    score = _score(model, images, target, trace, edit)
    value = trace[kind] if layer is None else trace[kind, layer]
    return value.detach(), torch.autograd.grad(score, value)[0]


def _tokens_read(model: TokenModel, layer: int) -> tuple[str, int | None]:
    """The trace kind and layer of the tokens that the attention of block `layer` reads."""
    layer = check_layer(model, layer)
    if "norm1" in model.traceable:
        return "norm1", layer
    if layer:
        return "tokens", layer - 1
    return next(k for k in ("norm_pre", "positions", "prefix", "patch_embed") if k in model.traceable), None


def _relevance(model: TokenModel, images: Tensor, target: Target, edit: Edit | None) -> Tensor:
    """One row of R = (I + Abar_L) ... (I + Abar_1), multiplied from the left, block by block from the last.

    Only one layer's gradient is held, and the row costs N^2 where all of R would cost N^3.
    """
    if isinstance(model, Hierarchy):
        return _relevance_in_stages(model, images, target, edit)
    trace = Trace("attention", "tokens", gradients=True)
    above, slope = _score(model, images, target, trace, edit), None
    row = _head_weights(model, images)  # (B, N)
    for layer in reversed(range(len(model.blocks))):
        A = trace["attention", layer]  # (B, h, N, N)
        below = [trace["tokens", layer - 1]] if layer else []
        slope_A, *slopes = torch.autograd.grad(above, [A, *below], slope)
        Abar = (wide(slope_A) * wide(A.detach())).clamp(min=0).mean(1)  # (B, N, N), eq. 5
        row = row + (row[:, None] @ Abar)[:, 0]  # eq. 6
        if layer:
            above, slope = below[0], slopes[0]
    rows, columns = model.layout(*images.shape[-2:]).grid
    return row[:, -rows * columns :]


def _relevance_in_stages(model: Hierarchy, images: Tensor, target: Target, edit: Edit | None) -> Tensor:
    """`_relevance` over the grids of all stages: (B, grid_h, grid_w)."""
    stages, trace = Stages(model, *images.shape[-2:]), Trace("attention", "tokens", gradients=True)
    above, slope = _score(model, images, target, trace, edit), None
    layer = stages.layers[-1]
    row = row_of(stages, layer, None).to(wide(images)).expand(len(images), -1)  # (B, tokens)
    for number in reversed(range(len(model.blocks))):
        if stages.layers[number].stage < layer.stage:
            row = stages.descend(row[:, layer.prefix :], layer.stage)
        layer = stages.layers[number]
        A, pick = trace.on_path("attention", number)
        below = [trace["tokens", number - 1]] if number else []
        slope_A, *slopes = torch.autograd.grad(above, [A, *below], slope)
        Abar = layer.windowed(pick((wide(slope_A) * wide(A.detach())).clamp(min=0))).mean(
            1
        )  # (B, windows, n, m), eq. 5
        parts = torch.full_like(row, layer.tokens - layer.prefix)  # N
        parts[:, : layer.prefix] = 1
        row = row + layer.look(parts * row, Abar)  # eq. 6
        if number:
            above, slope = below[0], slopes[0]
    return stages.lay(row[:, layer.prefix :], layer.stage)


def _head_weights(model: TokenModel, images: Tensor) -> Tensor:
    """(B, N): each token's share in what the head reads, summing to 1."""
    layout = model.layout(*images.shape[-2:])
    prefix, patches = len(layout.prefix), layout.grid[0] * layout.grid[1]
    share = torch.zeros(prefix + patches, dtype=wide(images[:0]).dtype, device=images.device)
    of_class = {"class": 1.0, "class_norm": 1.0, "class_mean": 0.5}.get(model.config.pool_kind, 0.0)
    share[prefix:] = (1 - of_class) / patches
    if of_class:
        readers = 2 if "distillation" in layout.prefix else 1
        share[:readers] = of_class / readers
    return share.expand(len(images), -1)
