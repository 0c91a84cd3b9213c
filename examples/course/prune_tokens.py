"""Evening 7: keep the patches that the class token attends to. Fill in keep_tokens, then run this file.

python examples/course/prune_tokens.py
"""

import torch
from torch import Tensor

from vitlab.reduce import KeepRatio
from vitlab.reduce.evit import EViT


def keep_tokens(tokens: Tensor, attention: Tensor, keep: int) -> Tensor:
    """tokens (B, 1 + N, D), the class token first; attention (B, h, N): the class token's attention to each patch.
    Returns (B, 1 + keep, D): the class token, then the `keep` patches with the most attention, averaged over the
    heads, in the order in which they were.
    """
    raise NotImplementedError


def check() -> None:
    """Compare with vitlab's EViT on odd sizes."""
    torch.manual_seed(0)
    for images, heads, patches, width, keep in ((2, 3, 7, 5, 4), (1, 1, 12, 8, 1), (3, 4, 9, 6, 9)):
        tokens, attention = torch.randn(images, 1 + patches, width), torch.rand(images, heads, patches)
        yours = keep_tokens(tokens, attention, keep)
        expected = (images, 1 + keep, width)
        if tuple(yours.shape) != expected:
            raise SystemExit(f"not yet: the shape is {tuple(yours.shape)}, and should be {expected}.")
        if not torch.equal(yours[:, 0], tokens[:, 0]):
            raise SystemExit("not yet: the class token must stay, unchanged, in the first place.")
        reference = _reference(tokens, attention, patches - keep)
        if not torch.equal(yours, reference):
            same = torch.equal(yours.sort(dim=1).values, reference.sort(dim=1).values)
            problem = "these are the right patches in another order" if same else "these are other patches"
            raise SystemExit(f"not yet: {problem}. Average over the heads, keep the best, sort their indices.")
    print("right: your function keeps the same tokens as EViT.")


def _reference(tokens: Tensor, attention: Tensor, remove: int) -> Tensor:
    if not remove:
        return tokens
    whole = torch.cat([torch.zeros(*attention.shape[:2], 1), attention], dim=2)  # (B, h, 1 + N)
    reducer = EViT(KeepRatio(0.5), fuse=False)
    return reducer.reduce(tokens, remove, 1, torch.ones(tokens.shape[:2]), {"class_attention": whole}).tokens


if __name__ == "__main__":
    check()
