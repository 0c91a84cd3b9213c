"""What each part of vit_model.py does, with numbers: run it and read, or let pytest check it.

python test_model.py
pytest test_model.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vit_model import (
    MLP,
    Attention,
    Block,
    PatchEmbed,
    VisionTransformer,
    ViTConfig,
    init_weights,
    vit_base,
    vit_huge,
    vit_large,
    vit_small,
    vit_tiny,
)

PUBLISHED = {vit_tiny: 5_717_416, vit_small: 22_050_664, vit_base: 86_567_656, vit_large: 304_326_632}
PUBLISHED |= {vit_huge: 632_045_800}  # parameters with 1000 classes at 224 x 224 pixels


def small(**options) -> VisionTransformer:
    torch.manual_seed(0)
    shape = dict(image_size=32, patch_size=8, classes=10, width=48, depth=4, heads=3)
    return VisionTransformer(ViTConfig(**shape | options)).eval()


def show(what: str, *values: object) -> None:
    print(f"  {what:<46}", *(tuple(v.shape) if isinstance(v, Tensor) else v for v in values))


def test_shapes_of_every_part():
    """ViT-B/16 on two images of 224 x 224 pixels."""
    maps: list[Tensor] = []
    with torch.device("meta"):  # shapes are worked out, numbers are not
        images = torch.randn(2, 3, 224, 224)
        x = PatchEmbed(patch_size=16, channels=3, width=768)(images)
        z = torch.cat([torch.zeros(2, 1, 768), x], dim=1)
        attended = Attention(width=768, heads=12)(z, maps)
        changed = MLP(width=768, hidden=3072)(z)
        encoded = Block(width=768, heads=12, mlp_ratio=4.0)(z)
        logits = vit_base()(images)
    for what, value in {
        "images (B, C, H, W)": images,
        "PatchEmbed (B, N, D), N = (224 / 16)^2": x,
        "with the class token (B, 1 + N, D)": z,
        "Attention (B, 1 + N, D)": attended,
        "its map A (B, h, 1 + N, 1 + N)": maps[0],
        "MLP (B, 1 + N, D)": changed,
        "Block (B, 1 + N, D)": encoded,
        "VisionTransformer (B, K)": logits,
    }.items():
        show(what, value)
    assert x.shape == (2, 196, 768) and maps[0].shape == (2, 12, 197, 197)
    assert attended.shape == changed.shape == encoded.shape == z.shape == (2, 197, 768)
    assert logits.shape == (2, 1000)


def test_other_image_sizes():
    """The weights do not depend on the image's size, but for the positions, which are resized."""
    model = small()
    for H, W in ((32, 32), (48, 48), (32, 72)):
        maps: list[Tensor] = []
        logits = model(torch.randn(1, 3, H, W), maps)
        tokens = maps[0].shape[-1]
        show(f"{H} x {W} pixels", f"{tokens} tokens, {tokens**2:,} pairs in each head;", logits)
        assert tokens == 1 + H * W // 64 and logits.shape == (1, 10)


def test_structure():
    """The children of a small model, with their parameters."""
    model = small()
    for name, child in model.named_children():
        show(name, f"{type(child).__name__:<12}", f"{sum(p.numel() for p in child.parameters()):>8,}")
        for inner, part in child[0].named_children() if isinstance(child, nn.ModuleList) else ():
            show(
                f"  {name}.0.{inner}", f"{type(part).__name__:<12}", f"{sum(p.numel() for p in part.parameters()):>8,}"
            )
    assert [name for name, _ in model.named_children()] == ["patch_embed", "blocks", "norm", "head"]
    assert [name for name, _ in model.blocks[0].named_children()] == ["norm1", "attn", "norm2", "mlp"]


def test_parameters_term_by_term():
    """ViT-B/16: where its 86.6 million parameters are."""
    P, C, D, L, K, N = 16, 3, 768, 12, 1000, 196
    terms = {
        "patches: P^2 C D + D": P * P * C * D + D,
        "class token: D": D,
        "positions: (1 + N) D": (1 + N) * D,
        "attention: L (3 D^2 + 3 D + D^2 + D)": L * (4 * D * D + 4 * D),
        "MLP: L (4 D^2 + 4 D + 4 D^2 + D)": L * (8 * D * D + 5 * D),
        "norms: 2 D for two in a block, one at the end": (2 * L + 1) * 2 * D,
        "classifier: D K + K": D * K + K,
    }
    for what, count in terms.items():
        show(what, f"{count:>11,}")
    show("sum", f"{sum(terms.values()):>11,}")
    for build, count in PUBLISHED.items():
        with torch.device("meta"):  # shapes without memory: ViT-H would need 2.5 GB
            parameters = sum(p.numel() for p in build().parameters())
        show(build.__name__, f"{parameters:>11,}")
        assert parameters == count
    assert sum(terms.values()) == PUBLISHED[vit_base]


def test_convolution_is_unfold_and_linear():
    """Eq. 1 has a matrix E; the code has a convolution. They are the same map."""
    embed, images = PatchEmbed(patch_size=8, channels=3, width=48), torch.randn(2, 3, 32, 48)
    patches = F.unfold(images, kernel_size=8, stride=8).transpose(1, 2)  # (B, N, C*P*P)
    E = embed.proj.weight.flatten(1)  # (D, C*P*P)
    by_matrix = F.linear(patches, E, embed.proj.bias)  # (B, N, D)
    show("unfolded patches (B, N, C*P*P)", patches)
    show("E, the kernel flattened (D, C*P*P)", E)
    difference = (by_matrix - embed(images)).abs().max().item()
    show("largest difference", f"{difference:.1e}")
    assert difference < 1e-5


def test_attention_is_the_formula():
    """Eqs. 5-8 one head at a time, against the layer, with and without the fused kernel."""
    layer, z = Attention(width=48, heads=3).double(), torch.randn(2, 7, 48, dtype=torch.float64)
    U_q, U_k, U_v = layer.qkv.weight.chunk(3)  # each (D, D): d rows for each head
    b_q, b_k, b_v = layer.qkv.bias.chunk(3)
    heads = []
    for head in (slice(0, 16), slice(16, 32), slice(32, 48)):  # d = 16
        q, k, v = (z @ U[head].T + b[head] for U, b in ((U_q, b_q), (U_k, b_k), (U_v, b_v)))  # (B, N, d)
        heads.append(torch.softmax(q @ k.mT / 16**0.5, dim=-1) @ v)  # (B, N, d)
    expected = layer.proj(torch.cat(heads, dim=-1))  # (B, N, D)
    maps: list[Tensor] = []
    differences = [(layer(z) - expected).abs().max().item(), (layer(z, maps) - expected).abs().max().item()]
    show("largest difference, fused and written out", *(f"{d:.1e}" for d in differences))
    show("sums of the rows of A", *(f"{s:.3f}" for s in maps[0].sum(-1).unique(sorted=True)[[0, -1]].tolist()))
    assert max(differences) < 1e-12
    assert torch.allclose(maps[0].sum(-1), torch.ones(2, 3, 7, dtype=torch.float64))


def test_why_scores_are_divided_by_sqrt_d():
    """Queries and keys of unit variance: the larger d, the closer to a hard choice, unless scores are divided."""
    torch.manual_seed(0)
    for d in (4, 64, 1024):
        q, k = torch.randn(64, d), torch.randn(64, d)
        largest = [(q @ k.T / scale).softmax(-1).amax(-1).mean().item() for scale in (1.0, d**0.5)]
        show(f"d = {d}: largest weight of 64, plain and divided", *(f"{value:.2f}" for value in largest))
        assert largest[1] < 0.2
    assert largest[0] > 0.9


def test_without_positions_order_does_not_matter():
    """Why positions: shuffle the patches of an image, and without E_pos the answer is the same."""
    model, images = small().double(), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    patches = F.unfold(images, 8, stride=8)  # (1, C*P*P, N)
    shuffled = F.fold(patches[..., torch.randperm(16)], (32, 32), 8, stride=8)  # (1, 3, 32, 32)
    model.pos_embed.data.normal_()
    with_positions = (model(images) - model(shuffled)).abs().max().item()
    model.pos_embed.data.zero_()
    without = (model(images) - model(shuffled)).abs().max().item()
    show("change of the logits, with and without positions", f"{with_positions:.1e}", f"{without:.1e}")
    assert without < 1e-12 < 1e-3 < with_positions


class PostNormBlock(Block):
    """The block of the first Transformer (arXiv:1706.03762): the norm stands after the sum, on the residual path."""

    def forward(self, z: Tensor, maps: list[Tensor] | None = None) -> Tensor:
        z = self.norm1(z + self.attn(z, maps))  # (B, N, D)
        return self.norm2(z + self.mlp(z))  # (B, N, D)


def untrained(block: type[Block], depth: int) -> tuple[float, float]:
    """Standard deviation of the last tokens, before the final norm; the loss's gradient in the last layer."""
    torch.manual_seed(0)
    blocks = [block(width=64, heads=4, mlp_ratio=4.0) for _ in range(depth)]
    for layer in blocks:
        layer.apply(init_weights)
    z = torch.randn(8, 16, 64)  # (B, N, D)
    for layer in blocks:
        z = layer(z)  # (B, N, D)
    F.layer_norm(z, (64,))[:, 0, 0].sum().backward()
    return z.std().item(), blocks[-1].mlp.fc2.weight.grad.norm().item()


def test_pre_norm_against_post_norm():
    """In a deeper network, pre-norm layers have smaller gradients, post-norm layers do not (arXiv:2002.04745)."""
    gradients = {}
    for block in (Block, PostNormBlock):
        for depth in (3, 12, 48):
            deviation, gradients[block, depth] = untrained(block, depth)
            values = f"tokens {deviation:.2f}, gradient of the last layer {gradients[block, depth]:.2f}"
            show(f"{block.__name__}, {depth} of them:", values)
            assert block is Block or abs(deviation - 1) < 0.01  # its output is always normalised
    # Every branch adds to the tokens, so the final norm divides by more: four times as many layers, half the gradient.
    assert 0.3 < gradients[Block, 48] / gradients[Block, 12] < 0.7
    assert gradients[PostNormBlock, 48] / gradients[PostNormBlock, 12] > 0.8  # nothing calms it but a long warm-up


def test_stochastic_depth_keeps_the_mean():
    """A branch is left out or scaled up; in evaluation it is always there, unscaled."""
    block, ones = Block(width=48, heads=3, mlp_ratio=4.0, stochastic_depth=0.25), torch.ones(20_000, 1, 1)
    skipped = block.train().skip(ones)
    show("values, and their mean", *(f"{v:.3f}" for v in (*skipped.unique().tolist(), skipped.mean().item())))
    assert torch.allclose(skipped.unique(), torch.tensor([0.0, 1 / 0.75])) and abs(skipped.mean() - 1) < 0.02
    assert torch.equal(block.eval().skip(ones), ones)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            print(f"\n{name.removeprefix('test_').replace('_', ' ')}: {test.__doc__}")
            test()
    print("\nall as it should be")
