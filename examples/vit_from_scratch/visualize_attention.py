"""Draw where a Vision Transformer looks: all layers and heads, rollout, and figure 7 of the paper (arXiv:2010.11929).

    python visualize_attention.py                                                    # random weights, on the cat
    python visualize_attention.py --checkpoint runs/vit_from_scratch/last.pt         # what training made of them
    python visualize_attention.py --checkpoint runs/vit_from_scratch/last.pt *.jpg   # distances averaged over images

It writes attention.png, rollout.png and figure7.png. Each is numbers first, from a function of its own, then a drawing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image, ImageOps
from torch import Tensor
from vit_model import VisionTransformer, ViTConfig

CAT = Path(__file__).parent / "cat.jpg"  # Chelsea, by Stefan van der Walt (CC0)
SMALL = ViTConfig(image_size=32, patch_size=4, classes=10, width=128, depth=6, heads=4, mlp_ratio=2.0)

# ---- numbers


@torch.inference_mode()
def attention(model: VisionTransformer, images: Tensor) -> Tensor:
    """Every A of eq. 6: (L, B, h, 1 + N, 1 + N); row = who looks, column = at whom."""
    maps: list[Tensor] = []
    model.eval()(images, maps)
    return torch.stack(maps)


def reader_maps(A: Tensor, grid: tuple[int, int], pool: str) -> Tensor:
    """Where the class token looks (with pool="mean": the patches, on average): (L, B, h, rows, cols)."""
    rows = A[..., :1, 1:] if pool == "class" else A[..., 1:, 1:]  # (L, B, h, 1 or N, N)
    return rows.mean(dim=-2).unflatten(-1, grid)


def rollout(A: Tensor, grid: tuple[int, int], pool: str) -> Tensor:
    """Attention followed through all layers (arXiv:2005.00928): (B, rows, cols), what reaches the classifier."""
    identity = torch.eye(A.shape[-1], dtype=A.dtype)  # the residual path: a token also keeps what it was
    W = (A.mean(dim=2) + identity) / 2  # (L, B, 1 + N, 1 + N), the mean of the heads; rows sum to 1
    reached = W[0]
    for layer in W[1:]:
        reached = layer @ reached  # (B, 1 + N, 1 + N), from the first layer to this one
    return reader_maps(reached, grid, pool)


def embedding_filters(model: VisionTransformer, count: int = 28) -> Tensor:
    """Figure 7, left: principal components of the D filters in E, (count, P, P, C). Their signs are arbitrary."""
    E = model.patch_embed.proj.weight.detach()  # (D, C, P, P)
    E = E.flatten(1) - E.flatten(1).mean(dim=0)  # (D, C*P*P)
    components = torch.linalg.svd(E, full_matrices=False).Vh[:count]  # (count, C*P*P), of unit length
    _, C, P, _ = model.patch_embed.proj.weight.shape
    return components.reshape(-1, C, P, P).permute(0, 2, 3, 1)


def position_similarity(model: VisionTransformer) -> Tensor:
    """Figure 7, centre: the cosine between the positions of any two patches, (rows, cols, rows, cols)."""
    E_pos = F.normalize(model.pos_embed.detach()[0, 1:], dim=-1)  # (N, D)
    return (E_pos @ E_pos.T).reshape(*model.grid, *model.grid)


def attention_distance(A: Tensor, grid: tuple[int, int], patch_size: int) -> Tensor:
    """Figure 7, right: how far a patch looks on average, in pixels, (L, h); Appendix D.7."""
    row, column = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    places = torch.stack([row, column], dim=-1).flatten(0, 1).to(A.dtype) * patch_size  # (N, 2)
    distance = torch.cdist(places, places)  # (N, N)
    weights = A[..., 1:, 1:]  # (L, B, h, N, N), without the class token, which stands nowhere
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return (weights * distance).sum(dim=-1).mean(dim=(1, 3))  # (L, h)


# ---- drawings


def draw_attention(image: Image.Image, maps: Tensor) -> Figure:
    """The image, then a row for each layer and a column for each head; every map has its own scale."""
    L, h = maps.shape[:2]
    figure = Figure(figsize=(1.5 * (h + 1), 1.6 * L), layout="constrained")
    for (layer, column), axes in np.ndenumerate(figure.subplots(L, h + 1, squeeze=False)):
        axes.set_axis_off()
        if column:
            axes.imshow(maps[layer, column - 1].numpy(), cmap="inferno")
            axes.set_title(f"layer {layer}, head {column - 1}", fontsize=8)
        elif layer == 0:
            axes.imshow(image)
    return figure


def draw_rollout(image: Image.Image, heat: Tensor) -> Figure:
    figure = Figure(figsize=(6.6, 2.4), layout="constrained")
    plain, alone, over = figure.subplots(1, 3)
    plain.imshow(image)
    alone.imshow(heat.numpy(), cmap="inferno")
    over.imshow(image)
    over.imshow(heat.numpy(), cmap="inferno", alpha=0.6, extent=(-0.5, image.width - 0.5, image.height - 0.5, -0.5))
    for axes, title in ((plain, "image"), (alone, "rollout"), (over, "over the image")):
        axes.set_axis_off()
        axes.set_title(title, fontsize=9)
    return figure


def tiles(panels: Tensor) -> np.ndarray:
    """Panels (rows, columns, H, W, ...) side by side in one array, with gaps between them."""
    rows, columns, H, W = panels.shape[:4]
    sheet = torch.full((rows, H + 1, columns, W + 1, *panels.shape[4:]), torch.nan)
    sheet[:, :H, :, :W] = panels.transpose(1, 2)
    return sheet.flatten(2, 3).flatten(0, 1)[:-1, :-1].numpy()


def draw_figure7(filters: Tensor, similarity: Tensor, distance: Tensor) -> Figure:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, centre, right = figure.subplots(1, 3, width_ratios=(1.75, 1, 1))

    low, high = filters.amin((1, 2, 3), keepdim=True), filters.amax((1, 2, 3), keepdim=True)
    scaled = ((filters - low) / (high - low))[: len(filters) // 4 * 4].unflatten(0, (4, -1))  # (4, 7, P, P, C)
    left.imshow(np.nan_to_num(tiles(scaled), nan=1.0))
    left.set_title("RGB embedding filters\n(principal components)", fontsize=10)
    left.set_axis_off()
    shown = centre.imshow(tiles(similarity), vmin=-1, vmax=1)
    figure.colorbar(shown, ax=centre, shrink=0.7)
    centre.set_title("Position embedding similarity\n(cosine; one tile a patch)", fontsize=10)
    centre.set(xticks=[], yticks=[], xlabel="patch column", ylabel="patch row")
    for head in range(distance.shape[1]):
        right.plot(distance[:, head].numpy(), "o", label=f"head {head}")
    right.set_title("Mean attention distance\n(pixels)", fontsize=10)
    right.set(xlabel="layer", ylim=(0, 1.1 * float(distance.max())))
    right.legend(fontsize=7)
    return figure


# ---- files


def load(checkpoint: Path | None) -> VisionTransformer:
    """What train_cifar10.py wrote, or random weights."""
    if checkpoint is None:
        torch.manual_seed(0)
        return VisionTransformer(SMALL)
    last = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model = VisionTransformer(ViTConfig(**last["config"]))
    model.load_state_dict(last["model"])
    return model


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="*", type=Path, default=[CAT], help="the first one is drawn")
    parser.add_argument("--checkpoint", type=Path, help="last.pt of train_cifar10.py")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the drawings")
    args = parser.parse_args(arguments)

    model = load(args.checkpoint)
    c, side = model.config, model.config.image_size
    images = [ImageOps.fit(Image.open(path).convert("RGB"), (side, side)) for path in args.images]
    x = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1  # (B, C, H, W), as in training
    A = attention(model, x)
    drawings = {
        "attention": draw_attention(images[0], reader_maps(A, model.grid, c.pool)[:, 0]),
        "rollout": draw_rollout(images[0], rollout(A, model.grid, c.pool)[0]),
        "figure7": draw_figure7(
            embedding_filters(model), position_similarity(model), attention_distance(A, model.grid, c.patch_size)
        ),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name, figure in drawings.items():
        figure.savefig(args.out / f"{name}.png", dpi=120)
        print(args.out / f"{name}.png")


if __name__ == "__main__":
    main()
