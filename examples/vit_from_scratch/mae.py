"""MAE: Masked Autoencoders Are Scalable Vision Learners (arXiv:2111.06377), on the ViT of vit_model.py.

    python mae.py        # learns to paint the hidden three quarters of scikit-learn's digits: mae.png; a few minutes

No labels: hide 75 % of the patches, encode the other 25 %, and let a small decoder paint what is hidden. The encoder
never sees a mask token, so it runs on a quarter of the tokens, and it is what one keeps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from vit_model import Block, VisionTransformer, ViTConfig, init_weights


def patchify(images: Tensor, P: int) -> Tensor:
    """(B, C, H, W) -> (B, N, P*P*C): patches row by row, and so the pixels in each."""
    B, C, H, W = images.shape
    x = images.reshape(B, C, H // P, P, W // P, P)  # (B, C, rows, P, columns, P)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(B, -1, P * P * C)  # (B, N, P*P*C)


def unpatchify(patches: Tensor, P: int, grid: tuple[int, int]) -> Tensor:
    """The inverse of patchify."""
    x = patches.reshape(len(patches), *grid, P, P, -1)  # (B, rows, columns, P, P, C)
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)  # (B, C, H, W)


def sincos_positions(grid: tuple[int, int], width: int) -> Tensor:
    """Fixed positions, (1, 1 + N, D): waves along the columns and along the rows; zeros for the class token."""
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    frequency = 10000 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))  # (D/4,), from 1 down
    halves = []
    for place in (columns, rows):
        angle = place.flatten()[:, None] * frequency  # (N, D/4)
        halves += [angle.sin(), angle.cos()]
    patches = torch.cat(halves, dim=1).float()  # (N, D)
    return F.pad(patches, (0, 0, 1, 0))[None]  # (1, 1 + N, D)


def choose_visible(B: int, N: int, mask_ratio: float, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Which patches stay visible, (B, n), and the mask, (B, N): 1 where a patch is hidden."""
    noise = torch.rand(B, N) if noise is None else noise
    visible = noise.argsort(dim=1)[:, : int(N * (1 - mask_ratio))]  # (B, n): those of lowest noise
    return visible, torch.ones(B, N).scatter(1, visible, 0.0)


class MAE(nn.Module):
    """Hide, encode what is left, decode, compare what was hidden (figure 1)."""

    def __init__(
        self,
        config: ViTConfig,
        decoder_width: int = 512,
        decoder_depth: int = 8,
        decoder_heads: int = 16,
        mask_ratio: float = 0.75,
        norm_pix: bool = True,
    ):
        super().__init__()
        self.mask_ratio, self.norm_pix, self.patch_size = mask_ratio, norm_pix, config.patch_size
        self.encoder = VisionTransformer(config)  # config.classes is 0: no classifier
        grid, width = self.encoder.grid, decoder_width
        self.encoder.pos_embed = nn.Parameter(sincos_positions(grid, config.width), requires_grad=False)
        self.embed = nn.Linear(config.width, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.register_buffer("positions", sincos_positions(grid, width), persistent=False)
        self.blocks = nn.ModuleList(Block(width, decoder_heads, mlp_ratio=4.0) for _ in range(decoder_depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pixels = nn.Linear(width, config.patch_size**2 * config.channels)
        for part in (self.embed, self.blocks, self.pixels):
            part.apply(init_weights)
        nn.init.trunc_normal_(self.mask_token, std=0.02)

    def forward(self, images: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, C, H, W) -> the loss, what was painted (B, N, P*P*C), and the mask (B, N)."""
        target = self.target(images)  # (B, N, P*P*C)
        B, N, _ = target.shape
        visible, mask = choose_visible(B, N, self.mask_ratio, noise)  # (B, n), (B, N)
        z = self.encode(images, visible)  # (B, 1 + n, D)
        painted = self.decode(z, visible)  # (B, N, P*P*C)
        error = (painted - target).square().mean(dim=-1)  # (B, N)
        return (error * mask).sum() / mask.sum(), painted, mask  # the loss is over hidden patches only

    def target(self, images: Tensor) -> Tensor:
        """Pixels; with norm_pix those of each patch less their mean, over their deviation: contrast is what counts."""
        pixels = patchify(images, self.patch_size)  # (B, N, P*P*C)
        if not self.norm_pix:
            return pixels
        mean, variance = pixels.mean(dim=-1, keepdim=True), pixels.var(dim=-1, keepdim=True)  # (B, N, 1)
        return (pixels - mean) / (variance + 1e-6).sqrt()

    def encode(self, images: Tensor, visible: Tensor) -> Tensor:
        """VisionTransformer.tokens, with the hidden patches left out after they got their positions."""
        vit = self.encoder
        x = vit.patch_embed(images) + vit.pos_embed[:, 1:]  # (B, N, D)
        x = x.gather(1, visible[..., None].expand(-1, -1, x.shape[-1]))  # (B, n, D)
        x_class = (vit.cls_token + vit.pos_embed[:, :1]).expand(len(x), -1, -1)  # (B, 1, D)
        z = torch.cat([x_class, x], dim=1)  # (B, 1 + n, D)
        for block in vit.blocks:
            z = block(z)  # (B, 1 + n, D)
        return vit.norm(z)

    def decode(self, z: Tensor, visible: Tensor) -> Tensor:
        """Put each visible token in its place, mask tokens elsewhere; a few blocks; pixels."""
        z = self.embed(z)  # (B, 1 + n, D')
        B, N, width = len(z), self.positions.shape[1] - 1, z.shape[-1]
        x = self.mask_token.expand(B, N, -1)  # (B, N, D')
        x = x.scatter(1, visible[..., None].expand(-1, -1, width), z[:, 1:])  # (B, N, D')
        z = torch.cat([z[:, :1], x], dim=1) + self.positions  # (B, 1 + N, D')
        for block in self.blocks:
            z = block(z)  # (B, 1 + N, D')
        return self.pixels(self.norm(z)[:, 1:])  # (B, N, P*P*C)


# ---- a small run


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits: images (1797, 1, 8, 8) from -1 to 1, labels (1797,)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images[:, None] / 8 - 1, dtype=torch.float32), torch.tensor(data.target)


def draw(model: MAE, images: Tensor, path: Path) -> None:
    """Three rows: what the encoder sees, what the decoder makes of it, the image."""
    _, painted, mask = model(images)
    hidden = mask[..., None].bool()  # (B, N, 1)
    pixels = patchify(images, model.patch_size)  # (B, N, P*P*C)
    rows = [pixels.masked_fill(hidden, -0.5), torch.where(hidden, painted, pixels), pixels]
    rows = [unpatchify(row, model.patch_size, model.encoder.grid) for row in rows]  # each (B, 1, 8, 8)
    sheet = torch.cat([F.pad(torch.cat([*F.pad(row, (0, 1))], dim=2), (0, 0, 0, 1)) for row in rows], dim=1)[0]
    grey = ((sheet.clamp(-1, 1) + 1) * 127.5).byte().numpy()
    Image.fromarray(grey).resize((grey.shape[1] * 8, grey.shape[0] * 8), Image.Resampling.NEAREST).save(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--mask-ratio", type=float, default=0.75)
    parser.add_argument("--out", type=Path, default=Path("mae.png"))
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    images, _ = digits()
    train, test = images[:1500], images[1500:]
    config = ViTConfig(image_size=8, patch_size=2, channels=1, classes=0, width=64, depth=4, heads=4, mlp_ratio=2.0)
    # Pixels are left as they are, so that the error is in grey levels; the paper's best models have norm_pix.
    model = MAE(config, decoder_width=32, decoder_depth=1, decoder_heads=2, mask_ratio=args.mask_ratio, norm_pix=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=args.steps)
    for step in range(args.steps):
        loss, _, _ = model(train[torch.randint(len(train), (args.batch_size,))])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % max(args.steps // 10, 1) == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)

    model.eval()
    with torch.inference_mode():
        loss, _, mask = model(test)
        target = patchify(test, config.patch_size)
        blind = (target - patchify(train, config.patch_size).mean(dim=0)).square().mean(dim=-1)
        print(f"test loss {loss:.3f}; painting the mean image instead: {(blind * mask).sum() / mask.sum():.3f}")
        draw(model, test[:12], args.out)
    print(args.out)


if __name__ == "__main__":
    main()
