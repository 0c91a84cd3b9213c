"""CLIP: Learning Transferable Visual Models From Natural Language Supervision (arXiv:2103.00020), on vit_model.py.

    python clip.py       # coloured digits and captions such as "a red seven on blue"; a few minutes

Two encoders end in one space. In a batch of B pairs each image has to find its own text among the B, and each text its
image (figure 3). Then any sentence is a classifier: the class is the sentence whose embedding is nearest (zero-shot).
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vit_model import Attention, Block, VisionTransformer, ViTConfig, init_weights


@dataclass(frozen=True)
class TextConfig:
    vocabulary: int = 49408
    context: int = 77  # tokens of a text at most, start and end included
    width: int = 512  # D
    depth: int = 12  # L
    heads: int = 8  # h
    mlp_ratio: float = 4.0
    eps: float = 1e-5


class CausalAttention(Attention):
    """Attention in which no token sees a later one, as in a language model."""

    def forward(self, z: Tensor, maps: list[Tensor] | None = None) -> Tensor:
        B, N, D = z.shape
        h, d = self.heads, D // self.heads
        q, k, v = self.qkv(z).reshape(B, N, 3, h, d).permute(2, 0, 3, 1, 4)  # each (B, h, N, d)
        scores = q @ k.transpose(-2, -1) / d**0.5  # (B, h, N, N)
        later = torch.ones(N, N, dtype=torch.bool, device=z.device).triu(1)  # True above the diagonal
        A = scores.masked_fill(later, -math.inf).softmax(dim=-1)  # (B, h, N, N): 0 above the diagonal
        if maps is not None:
            maps.append(A)
        return self.proj((A @ v).transpose(1, 2).reshape(B, N, D))  # (B, N, D)


class TextTransformer(nn.Module):
    """A text is read at its last token, the only one that has seen all others (section 2.4)."""

    def __init__(self, c: TextConfig):
        super().__init__()
        self.embed = nn.Embedding(c.vocabulary, c.width)
        self.positions = nn.Parameter(torch.zeros(c.context, c.width))
        self.blocks = nn.ModuleList(Block(c.width, c.heads, c.mlp_ratio, eps=c.eps) for _ in range(c.depth))
        for block in self.blocks:
            block.attn = CausalAttention(c.width, c.heads)
        self.norm = nn.LayerNorm(c.width, eps=c.eps)
        self.apply(init_weights)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)

    def forward(self, tokens: Tensor, end: Tensor) -> Tensor:
        """Token numbers (B, N), and where each text ends (B,) -> (B, D)."""
        z = self.embed(tokens) + self.positions[: tokens.shape[1]]  # (B, N, D)
        for block in self.blocks:
            z = block(z)  # (B, N, D)
        return self.norm(z)[torch.arange(len(z)), end]  # (B, D)


class CLIP(nn.Module):
    """Two towers, a projection of each into the common space, and a learned temperature."""

    def __init__(self, image: ViTConfig, text: TextConfig, embed_dim: int = 512):
        super().__init__()
        self.image = VisionTransformer(image)  # image.classes is 0: no classifier
        self.text = TextTransformer(text)
        self.image_projection = nn.Linear(image.width, embed_dim, bias=False)  # W_i of figure 3
        self.text_projection = nn.Linear(text.width, embed_dim, bias=False)  # W_t
        for projection in (self.image_projection, self.text_projection):
            nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
        self.t = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # the log of the factor, which is thus never negative

    def encode_image(self, images: Tensor) -> Tensor:
        return F.normalize(self.image_projection(self.image(images)), dim=-1)  # (B, E), of length 1

    def encode_text(self, tokens: Tensor, end: Tensor) -> Tensor:
        return F.normalize(self.text_projection(self.text(tokens, end)), dim=-1)  # (B, E), of length 1

    def forward(self, images: Tensor, tokens: Tensor, end: Tensor) -> Tensor:
        """Figure 3: the loss of B pairs."""
        I_e, T_e = self.encode_image(images), self.encode_text(tokens, end)  # (B, E) each
        logits = I_e @ T_e.T * self.t.exp()  # (B, B): cosines, scaled; its own text on the diagonal
        own = torch.arange(len(images), device=images.device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2  # by rows and by columns

    @torch.no_grad()
    def clamp(self) -> None:
        """After the optimiser's step: above 100 training becomes unstable (section 2.5)."""
        self.t.clamp_(max=math.log(100))


# ---- a small run: digits in colours

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = {"black": (0, 0, 0), "white": (1, 1, 1), "red": (1, 0, 0), "green": (0, 0.7, 0), "blue": (0.2, 0.2, 1)}
COLOURS |= {"yellow": (1, 1, 0), "purple": (0.6, 0, 0.8), "orange": (1, 0.5, 0)}
NAMES = tuple(COLOURS)
WORDS = ("<end>", "a", "on", *DIGITS, *NAMES)  # the vocabulary; a real tokenizer cuts words into pieces


def tokenize(captions: list[str]) -> tuple[Tensor, Tensor]:
    """One number a word, and <end> -> tokens (B, N), padded with <end>, and where each text ends (B,)."""
    rows = [[WORDS.index(word) for word in caption.split()] for caption in captions]
    longest = max(map(len, rows)) + 1
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])


def coloured(grey: Tensor, labels: Tensor, draw: torch.Generator) -> tuple[Tensor, list[tuple[str, str, str]]]:
    """Digits (B, 8, 8) from 0 to 1 -> images (B, 3, 8, 8) from -1 to 1, and (colour, digit, ground) of each."""
    palette = torch.tensor(list(COLOURS.values()))  # (8, 3)
    ink = torch.randint(len(NAMES), (len(grey),), generator=draw)
    ground = (ink + torch.randint(1, len(NAMES), (len(grey),), generator=draw)) % len(NAMES)  # another colour
    g = grey[:, None]  # (B, 1, 8, 8)
    images = g * palette[ink][..., None, None] + (1 - g) * palette[ground][..., None, None]  # (B, 3, 8, 8)
    triples = zip(ink.tolist(), labels.tolist(), ground.tolist(), strict=True)
    return images * 2 - 1, [(NAMES[i], DIGITS[n], NAMES[o]) for i, n, o in triples]


def caption(colour: str, digit: str, ground: str) -> str:
    return f"a {colour} {digit} on {ground}"


@torch.inference_mode()
def zero_shot(model: CLIP, images: Tensor, choices: list[list[str]], correct: list[int]) -> float:
    """Share of images that are nearest to the right one of their captions."""
    I_e = model.encode_image(images)  # (B, E)
    T_e = model.encode_text(*tokenize([caption for captions in choices for caption in captions]))  # (B * choices, E)
    T_e = T_e.unflatten(0, (len(images), -1))  # (B, choices, E)
    answers = (T_e @ I_e[..., None]).squeeze(-1).argmax(dim=1)  # (B,)
    return (answers == torch.tensor(correct)).float().mean().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args(arguments)
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    data = load_digits()
    grey, labels = torch.tensor(data.images / 16, dtype=torch.float32), torch.tensor(data.target)
    train = 1500
    image = ViTConfig(image_size=8, patch_size=2, channels=3, classes=0, width=64, depth=4, heads=4, mlp_ratio=2.0)
    text = TextConfig(vocabulary=len(WORDS), context=8, width=64, depth=2, heads=4, mlp_ratio=2.0)
    model = CLIP(image, text, embed_dim=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=args.steps)
    for step in range(args.steps):
        batch = torch.randint(train, (args.batch_size,), generator=draw)
        images, facts = coloured(grey[batch], labels[batch], draw)
        loss = model(images, *tokenize([caption(*fact) for fact in facts]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        model.clamp()
        if (step + 1) % max(args.steps // 10, 1) == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, factor {model.t.exp().item():.1f}", flush=True)

    model.eval()
    images, facts = coloured(grey[train:], labels[train:], draw)  # digits that were not trained on
    which_digit = [[caption(c, digit, g) for digit in DIGITS] for c, _, g in facts]
    which_colour = [[caption(colour, d, g) for colour in NAMES] for _, d, g in facts]
    digit = zero_shot(model, images, which_digit, [DIGITS.index(d) for _, d, _ in facts])
    colour = zero_shot(model, images, which_colour, [NAMES.index(c) for c, _, _ in facts])
    print(f"new images: which of 10 digits {digit:.1%}, which of {len(NAMES)} colours {colour:.1%}")


if __name__ == "__main__":
    main()
