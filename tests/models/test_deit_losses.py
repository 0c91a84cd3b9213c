"""DeiT's two losses against slow loops over eqs. 2 and 3 in float64, and against torch's own parts; both heads by the
mean at inference (their logits are compared with transformers in tests/parity/test_transformers.py)."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vitlab
from vitlab.models.deit import TwoHeads, hard_loss, soft_loss

B, K = 5, 7


def drawn(seed: int = 0):
    """Two heads, mixed labels, a sure teacher."""
    generator = torch.Generator().manual_seed(seed)
    first, second, teacher = (torch.randn(B, K, generator=generator) * scale for scale in (1, 2, 6))
    targets = torch.rand(B, K, generator=generator)
    return (first, second), targets / targets.sum(dim=1, keepdim=True), teacher


def softmax(z: np.ndarray) -> np.ndarray:
    return np.exp(z) / np.exp(z).sum()


def cross_entropy(z: np.ndarray, y: np.ndarray) -> float:
    return -sum(y[k] * np.log(softmax(z)[k]) for k in range(len(z)))


def by_hand(kind: str, heads, targets, teacher, share: float, tau: float) -> float:
    """Picture by picture, class by class, as the paper defines it."""
    (first, second), y, z_t = (h.double().numpy() for h in heads), targets.double().numpy(), teacher.double().numpy()
    total = 0.0
    for b in range(B):
        by_labels = cross_entropy(first[b], y[b])
        if kind == "hard":
            answer = np.eye(K)[int(np.argmax(z_t[b]))]
            by_teacher = cross_entropy(second[b], answer)
        else:
            p, q = softmax(z_t[b] / tau), softmax(second[b] / tau)
            by_teacher = tau**2 * sum(p[k] * np.log(p[k] / q[k]) for k in range(K))
        total += (1 - share) * by_labels + share * by_teacher
    return total / B


@pytest.mark.parametrize(("share", "tau"), [(0.1, 3.0), (0.7, 1.0), (0.0, 2.0), (1.0, 5.0)])
def test_soft_is_equation_2(share, tau):
    heads, targets, teacher = drawn()
    ours = soft_loss(heads, targets, teacher, share=share, temperature=tau)
    assert float(ours) == pytest.approx(by_hand("soft", heads, targets, teacher, share, tau), rel=1e-5)


@pytest.mark.parametrize("share", [0.5, 0.2, 0.0, 1.0])
def test_hard_is_equation_3(share):
    heads, targets, teacher = drawn(1)
    ours = hard_loss(heads, targets, teacher, share=share)
    assert float(ours) == pytest.approx(by_hand("hard", heads, targets, teacher, share, 1.0), rel=1e-5)


def test_the_papers_values_are_the_defaults():
    heads, targets, teacher = drawn(2)
    assert float(soft_loss(heads, targets, teacher)) == pytest.approx(
        by_hand("soft", heads, targets, teacher, 0.1, 3.0), rel=1e-5
    )
    assert float(hard_loss(heads, targets, teacher)) == pytest.approx(
        by_hand("hard", heads, targets, teacher, 0.5, 1.0), rel=1e-5
    )


def test_the_soft_term_is_torchs_divergence_from_the_teacher():
    heads, targets, teacher = drawn(3)
    p = torch.distributions.Categorical(logits=teacher / 3)
    q = torch.distributions.Categorical(logits=heads[1] / 3)
    expected = 9 * torch.distributions.kl_divergence(p, q).mean()
    torch.testing.assert_close(soft_loss(heads, targets, teacher, share=1.0), expected)


def test_class_numbers_are_targets_too():
    heads, _, teacher = drawn(4)
    numbers = torch.tensor([0, 3, 6, 2, 2])
    whole = F.one_hot(numbers, K).float()
    for loss in (soft_loss, hard_loss):
        torch.testing.assert_close(loss(heads, numbers, teacher), loss(heads, whole, teacher))


def test_a_student_that_agrees_with_its_teacher_loses_nothing_by_it():
    _, targets, teacher = drawn(5)
    heads = (teacher.clone(), teacher.clone())
    assert float(soft_loss(heads, targets, teacher, share=1.0)) == pytest.approx(0, abs=1e-6)


def test_each_head_learns_from_its_own_part():
    """The class head from the labels, the distillation head from the teacher; the teacher from nothing."""
    for loss in (soft_loss, hard_loss):
        (first, second), targets, teacher = drawn(6)
        first, second = first.requires_grad_(), second.requires_grad_()
        loss((first, second), targets, teacher, share=1.0).backward()
        assert not first.grad.any() and second.grad.abs().max() > 0
        first.grad = second.grad = None
        loss((first, second), targets, teacher, share=0.0).backward()
        assert first.grad.abs().max() > 0 and not second.grad.any()


def test_another_number_of_classes_is_refused():
    heads, targets, teacher = drawn()
    with pytest.raises(ValueError, match=r"logits of \(5, 7\) and the teacher of \(5, 6\)"):
        soft_loss(heads, targets, teacher[:, :6])


def test_two_heads_of_a_distilled_student():
    torch.manual_seed(0)
    model = vitlab.create("vit_digits", distill_token=True).eval()
    images = torch.randn(3, 1, 8, 8)
    first, second = TwoHeads(model)(images)
    assert (first - second).abs().max() > 1e-4
    torch.testing.assert_close((first + second) / 2, model(images))  # DeiT, sec. 4: the answer at inference
    loss = hard_loss((first, second), torch.tensor([1, 2, 3]), torch.randn(3, 10))
    loss.backward()
    assert model.distill_token.grad.abs().max() > 0 and model.head_distill.weight.grad.abs().max() > 0


@pytest.mark.parametrize(("name", "options"), [("vit_digits", {}), ("resnet_cifar", dict(channels=1, image_size=8))])
def test_a_student_of_one_head_learns_everything_by_it(name, options):
    torch.manual_seed(0)
    model = vitlab.create(name, **options)
    images, targets, teacher = torch.randn(3, 1, 8, 8), torch.tensor([1, 2, 3]), torch.randn(3, 10)
    first, second = TwoHeads(model)(images)
    assert first is second
    expected = 0.5 * F.cross_entropy(first, targets) + 0.5 * F.cross_entropy(first, teacher.argmax(dim=1))
    torch.testing.assert_close(hard_loss((first, second), targets, teacher), expected)
