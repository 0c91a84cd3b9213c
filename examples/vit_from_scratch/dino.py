"""DINO: Emerging Properties in Self-Supervised Vision Transformers (arXiv:2104.14294), on the ViT of vit_model.py.

    python dino.py       # on scikit-learn's digits, without their labels; a few minutes

No labels: a student says of every view of an image what a teacher says of two large ones. The teacher is a running
mean of the student. What keeps both from always giving the same answer: the teacher's outputs are centred, so that no
output wins everywhere, and sharpened, so that not all are alike.
"""

from __future__ import annotations

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vit_model import VisionTransformer, ViTConfig


class Head(nn.Module):
    """h of section 3.1: three layers, then K directions; outputs are cosines with them."""

    def __init__(self, width: int, hidden: int, bottleneck: int, outputs: int):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        self.directions = nn.Parameter(torch.randn(outputs, bottleneck))
        for layer in self.mlp[::2]:
            nn.init.trunc_normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.normalize(self.mlp(x), dim=-1)  # (B, bottleneck), of length 1
        return x @ F.normalize(self.directions, dim=-1).T  # (B, K)


class DINO(nn.Module):
    """g = h(f(x)), twice: a student that learns and a teacher that follows."""

    def __init__(self, config: ViTConfig, hidden: int = 2048, bottleneck: int = 256, outputs: int = 65536):
        super().__init__()
        self.student = nn.Sequential(VisionTransformer(config), Head(config.width, hidden, bottleneck, outputs))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(outputs))  # c

    @property
    def encoder(self) -> VisionTransformer:
        """f of the teacher: it is better than the student's throughout training (section 5.1)."""
        return self.teacher[0]

    def forward(self, views: list[Tensor], tau_t: float, tau_s: float = 0.1) -> tuple[Tensor, Tensor]:
        """Views (B, C, H, W), the two global ones first -> the loss, and the teacher's outputs (2, B, K)."""
        with torch.no_grad():
            outputs = torch.stack([self.teacher(view) for view in views[:2]])  # (2, B, K)
            P_t = ((outputs - self.centre) / tau_t).softmax(dim=-1)  # (2, B, K), eq. 1, centred and sharpened
        log_P_s = [(self.student(view) / tau_s).log_softmax(dim=-1) for view in views]  # each (B, K)
        losses = []
        for i, target in enumerate(P_t):
            for j, answer in enumerate(log_P_s):
                if i != j:  # a view is not compared with itself
                    losses.append(-(target * answer).sum(dim=-1).mean())  # H(P_t, P_s), eqs. 2-3
        return torch.stack(losses).mean(), outputs

    @torch.no_grad()
    def update(self, outputs: Tensor, momentum: float, centre_momentum: float = 0.9) -> None:
        """After the optimiser's step: the teacher follows the student, the centre follows the teacher's outputs."""
        for theta_t, theta_s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            theta_t.lerp_(theta_s, 1 - momentum)  # theta_t <- lambda theta_t + (1 - lambda) theta_s
        self.centre.lerp_(outputs.mean(dim=(0, 1)), 1 - centre_momentum)  # eq. 4


def random_crops(images: Tensor, size: int, scale: tuple[float, float]) -> Tensor:
    """From each image a square of a random share of its area, anywhere, resized: (B, C, size, size)."""
    B = len(images)
    side = torch.empty(B).uniform_(*scale).sqrt()  # (B,), 1 is the whole image
    centre = (torch.rand(B, 2) * 2 - 1) * (1 - side)[:, None]  # (B, 2), so that the square stays inside -1 .. 1
    theta = torch.zeros(B, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = side
    theta[:, :, 2] = centre
    places = F.affine_grid(theta, [B, images.shape[1], size, size], align_corners=False)  # (B, size, size, 2)
    return F.grid_sample(images, places, padding_mode="border", align_corners=False)


def multi_crop(images: Tensor, small: int, locals_: int) -> list[Tensor]:
    """Two global views, and local ones of less of the image: not too little, a quarter of a digit is no digit."""
    size = images.shape[-1]
    views = [random_crops(images, size, (0.7, 1.0)) for _ in range(2)]
    views += [random_crops(images, small, (0.4, 0.8)) for _ in range(locals_)]
    contrast = [torch.empty(len(images), 1, 1, 1).uniform_(0.6, 1.4) for _ in views]
    return [view * factor + 0.1 * torch.randn_like(view) for view, factor in zip(views, contrast, strict=True)]


def cosine(start: float, end: float, step: int, steps: int) -> float:
    """From start at step 0 to end at the last one."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * step / steps))


# ---- a small run


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits: images (1797, 1, 8, 8) from -1 to 1, labels (1797,)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images[:, None] / 8 - 1, dtype=torch.float32), torch.tensor(data.target)


@torch.inference_mode()
def nearest_neighbours(encoder: VisionTransformer, images: Tensor, labels: Tensor, train: int, k: int = 10) -> float:
    """Share of test images to which their k nearest training images give the right label, by cosine."""
    features = F.normalize(encoder.eval()(images), dim=-1)  # (n, D)
    near = (features[train:] @ features[:train].T).topk(k, dim=1).indices  # (test, k)
    votes = F.one_hot(labels[near], 10).sum(dim=1)  # (test, 10)
    return (votes.argmax(dim=1) == labels[train:]).float().mean().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--no-centre", action="store_true", help="leave the centre at 0")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    images, labels = digits()
    train, K = 1500, 256
    tau_t = 0.02  # the paper warms up from 0.04 to 0.07; in so short a run outputs would stay all alike
    config = ViTConfig(image_size=8, patch_size=2, channels=1, classes=0, width=64, depth=4, heads=4, mlp_ratio=2.0)
    model = DINO(config, hidden=128, bottleneck=64, outputs=K)
    print(f"before: 10 nearest neighbours {nearest_neighbours(model.encoder, images, labels, train):.1%}")
    optimizer = torch.optim.AdamW(model.student.parameters(), lr=1e-3, weight_decay=0.04)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=args.steps)
    for step in range(args.steps):
        views = multi_crop(images[torch.randint(train, (args.batch_size,))], small=6, locals_=2)
        loss, outputs = model(views, tau_t)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.student.parameters(), 3.0)
        optimizer.step()
        schedule.step()
        model.update(outputs, cosine(0.98, 1.0, step, args.steps), centre_momentum=1.0 if args.no_centre else 0.9)
        if (step + 1) % max(args.steps // 10, 1) == 0:
            P_t = ((outputs - model.centre) / tau_t).softmax(dim=-1)  # (2, B, K)
            entropy = -(P_t * P_t.clamp_min(1e-12).log()).sum(dim=-1).mean()  # 0: one output; ln K: all alike
            used = P_t.argmax(dim=-1).unique().numel()  # 1: collapsed
            print(f"step {step + 1}: loss {loss.item():.3f}, entropy {entropy:.2f} of {math.log(K):.2f}, {used} used")
    print(f"after: 10 nearest neighbours {nearest_neighbours(model.encoder, images, labels, train):.1%}")


if __name__ == "__main__":
    main()
