"""DeiT (arXiv:2012.12877): the ViT at patch 16, and one with a distillation token and its own head, whose mean with the
class token's head is the answer at inference. The losses teach a student by labels and by a teacher's answers.

    heads = TwoHeads(student)(images)
    loss = hard_loss(heads, targets, teacher(images))
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.reducer import Reducer
from vitlab.models.base import Network
from vitlab.models.entry import IMAGENET_CROP, Entry, Paper
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import SIZES, ViTConfig

CONFIGS = {size: ViTConfig(**SIZES[size][2]) for size in ("tiny", "small", "base")}
MODELS = {
    **{f"deit_{size}_patch16": config for size, config in CONFIGS.items()},
    **{f"deit_{size}_distilled_patch16": config.with_options(distill_token=True) for size, config in CONFIGS.items()},
}
PAPER = Paper(
    *("vit", ViTConfig, VisionTransformer),
    [Entry(name, "vit", config, IMAGENET_CROP, (name.removesuffix("_patch16"),)) for name, config in MODELS.items()],
)

Heads = tuple[Tensor, Tensor]  # logits of the class token and of the distillation token, each (B, K)


class TwoHeads(nn.Module):
    """A student as it is trained: the logits of both heads. A single head takes the place of both."""

    def __init__(self, student: Network):
        super().__init__()
        self.student = student

    def forward(self, images: Tensor, *, reducer: Reducer | None = None) -> Heads:
        student = self.student
        if isinstance(student, VisionTransformer) and student.head_distill is not None:
            return student.forward_heads(student.forward_features(images, reducer=reducer))
        logits = student(images, reducer=reducer)  # (B, K)
        return logits, logits


def soft_loss(
    heads: Heads, targets: Tensor, teacher: Tensor, *, share: float = 0.1, temperature: float = 3.0
) -> Tensor:
    """Eq. 2: (1 - lambda) CE(Z_s, y) + lambda tau^2 KL(softmax(Z_t / tau) || softmax(Z_s / tau)).

    Z_s, logits of the class head in the first term and of the distillation head in the second; Z_t, the teacher's;
    y, classes (B,) or their mixed and smoothed probabilities (B, K). lambda is `share`, 0.1 in the paper.
    """
    _check(heads, teacher)
    by_labels, by_teacher = heads
    student = F.log_softmax(by_teacher.float() / temperature, dim=1)  # (B, K)
    answer = F.log_softmax(teacher.float() / temperature, dim=1)
    divergence = F.kl_div(student, answer, reduction="batchmean", log_target=True)  # summed over classes
    return (1 - share) * F.cross_entropy(by_labels, targets) + share * temperature**2 * divergence


def hard_loss(heads: Heads, targets: Tensor, teacher: Tensor, *, share: float = 0.5) -> Tensor:
    """Eq. 3: 1/2 CE(Z_s, y) + 1/2 CE(Z_s, y_t), where y_t is the class that the teacher answers; heads as in eq. 2."""
    _check(heads, teacher)
    by_labels, by_teacher = heads
    answer = teacher.argmax(dim=1)  # (B,)
    return (1 - share) * F.cross_entropy(by_labels, targets) + share * F.cross_entropy(by_teacher, answer)


def _check(heads: Heads, teacher: Tensor) -> None:
    if heads[1].shape != teacher.shape:
        raise UsageError(
            f"the student gives logits of {tuple(heads[1].shape)} and the teacher of {tuple(teacher.shape)}: both must "
            "answer the same images with the same classes."
        )
