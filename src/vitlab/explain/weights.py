"""Patch filters and position similarity (Figure 7, left and centre, of ViT, arXiv:2010.11929), token lengths, and the
high-norm tokens that registers were invented for (arXiv:2309.16588)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.inputs import Images, TokenModel, as_batch, batches, grid_of, run_trace, token_model, wide
from vitlab.explain.stages import one_grid
from vitlab.layers.hybrid_stem import HybridStem
from vitlab.layers.patches import ConvStem, PatchEmbed
from vitlab.layers.trace import check_offered
from vitlab.models.hierarchy import Hierarchy
from vitlab.tables import Table, Tabular

NO_SIMILARITY = {  # kinds of positions without a vector per patch -> why, and what to use instead
    "rotary": "they turn queries and keys inside every block. attention_distance shows what comes of it",
    "relative": "they are one number per head and offset: model.blocks[i].attention.relative.table",
    "none": "it only knows where a patch stands from what is in it",
}


@torch.no_grad()
def filters(model: ModelOrName, n: int = 28) -> Tensor:
    """(n, P, P, C): the first principal components of the patch embedding's D filters, unit length, strongest first.

    The filters' mean is subtracted first. A component's sign is arbitrary; its largest entry is made positive.
    """
    return components(patch_filters(token_model(model)), n)


@torch.no_grad()
def patch_filters(model: TokenModel) -> Tensor:
    """(D, C, P, P): what the patch embedding multiplies each patch by."""
    if isinstance(model, Hierarchy):
        return wide(model.get_parameter("embeds.0.proj.weight").detach()).cpu()
    embed = model.patch_embed
    if not isinstance(embed, PatchEmbed):
        stem = isinstance(embed, ConvStem | HybridStem)
        instead = "vitlab.explain.stem_filters(model) gives those of its first layer. " if stem else ""
        raise UsageError(
            f"this model cannot give patch filters: its stem is a {type(embed).__name__}, several layers deep, so no "
            f'filter alone reads a patch. {instead}Models with stem="patch" have them.'
        )
    E = wide(embed.proj.weight.detach()).cpu()  # (D, C, P, P)
    if embed.norm_in is not None:
        E = E * wide(embed.norm_in.weight).cpu().view_as(E[0])  # the norm's gain comes before the projection
    return E


@torch.no_grad()
def stem_filters(model: ModelOrName, n: int | None = None) -> Tensor:
    """(n, k, k, C): `filters` of the first layer of a convolutional stem (stem="conv": k=3, "hybrid": k=2).

    n=None: all of them.
    """
    model = token_model(model)
    embed = None if isinstance(model, Hierarchy) else model.patch_embed
    if isinstance(embed, HybridStem):
        weight = embed.whiten.weight
    elif isinstance(embed, ConvStem):
        weight = embed.convs[0].weight
    else:
        raise UsageError('this model has no convolutional stem (stem="conv"). filters(model) gives its patch filters.')
    assert isinstance(weight, Tensor)
    return components(wide(weight).cpu(), min(len(weight) - 1, weight[0].numel()) if n is None else n)


def components(E: Tensor, n: int) -> Tensor:
    """Filters (D, C, k, k) -> their first principal components (n, k, k, C)."""
    D, values = len(E), E[0].numel()
    if not 1 <= n <= min(D - 1, values):
        raise UsageError(f"n={n}: {D} filters of {values} values have 1 to {min(D - 1, values)} components.")
    flat = E.flatten(1)
    components = torch.linalg.svd(flat - flat.mean(0), full_matrices=False).Vh[:n]  # (n, C*k*k)
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    return (components * largest.sign()).reshape(n, *E.shape[1:]).permute(0, 2, 3, 1)


@torch.no_grad()
def position_similarity(model: ModelOrName, grid: tuple[int, int] | None = None) -> Tensor:
    """(grid_h, grid_w, grid_h, grid_w): the cosine of each patch's position vector with all others', as stored or
    resized to `grid`, as the network does for other image sizes.
    """
    model = one_grid(model, "position similarity")
    positions = model.positions
    if positions is None:
        kind = model.config.position_kind
        raise UsageError(f"this model has no position vectors to compare ({kind} positions): {NO_SIMILARITY[kind]}.")
    places: tuple[int, int] = grid or positions.grid
    table = positions(places, like=next(model.parameters()))  # (1, prefix + N, D)
    vectors = F.normalize(wide(table[0, positions.prefix :]).cpu(), dim=-1)  # (N, D)
    return (vectors @ vectors.T).unflatten(1, places).unflatten(0, places)


def token_norms(model: ModelOrName, images: Images, *, batch_size: int = 8) -> Tensor:
    """(B, layers, tokens): the length of every token after every block, prefix tokens first."""
    model = one_grid(model, "a list of token lengths")
    check_offered(["tokens"], model.traceable)
    parts = []
    for batch in batches(model, images, batch_size):
        trace = run_trace(model, batch.images, "tokens", reduce=lambda z, _: wide(z).norm(dim=-1).cpu())  # (B, N)
        parts.append(trace.stack("tokens").transpose(0, 1))  # (B, L, N)
    return torch.cat(parts)


@dataclass
class HighNormTokens(Tabular):
    """Patches whose token is far longer than the others'; a ViT without registers stores global information there."""

    share: Tensor  # (layers,), of all patch tokens after that layer
    mask: Tensor  # (B, layers, grid_h, grid_w), True where long
    threshold: Tensor  # (layers,), lengths above it are long
    layers: tuple[int, ...]  # the last ones, over which `mean_share` is taken

    def table(self) -> Table:
        pairs = enumerate(zip(self.threshold.tolist(), self.share.tolist(), strict=True))
        rows = [[str(layer + 1), f"{limit:.4g}", f"{share:.2%}"] for layer, (limit, share) in pairs]
        titles = ["layer", "longer than", "share of patches"]
        note = f"Mean share in the last layers: {self.mean_share:.2%}."
        return Table(titles, rows, titles, ["Patch tokens far longer than the others"], notes=[note])

    @property
    def mean_share(self) -> float:
        """The mean share in the last layers; the paper finds about 0.02 in large models without registers."""
        return float(self.share[list(self.layers)].mean())


def high_norm_tokens(
    model: ModelOrName, images: Images, *, factor: float = 3.0, threshold: float | None = None, batch_size: int = 8
) -> HighNormTokens:
    """The register test of arXiv:2309.16588: which patch tokens grow far longer than the rest.

    A token counts where its length is above `factor` times the median patch token of that layer (over all images), or
    above `threshold`, a length, where one is given; the paper reads 150 off DINOv2's histogram. Its outliers are about
    10 times as long as the others; a factor of 3 lies half way, on a log scale. The last quarter of the layers decides.
    """
    if factor <= 1:
        raise UsageError(f"factor={factor!r} must be above 1: it multiplies the median length.")
    model = token_model(model)
    batch = as_batch(model, images)
    grid = grid_of(model, batch)
    norms = token_norms(model, batch, batch_size=batch_size)[:, :, -grid[0] * grid[1] :]  # (B, L, patches)
    depth = norms.shape[1]
    limits = norms.transpose(0, 1).flatten(1).median(dim=1).values * factor  # (L,)
    if threshold is not None:
        limits = torch.full_like(limits, threshold)
    mask = norms > limits[:, None]  # (B, L, patches)
    return HighNormTokens(mask.double().mean((0, 2)), mask.unflatten(-1, grid), limits, last_layers(depth))


def last_layers(depth: int) -> tuple[int, ...]:
    """The last quarter of the layers, at least one."""
    return tuple(range(depth - max(1, depth // 4), depth))
