"""Matching and losses of sets against transformers' EoMT and DETR losses, on random outputs; boxes against torch."""

from types import SimpleNamespace

import pytest
import torch
from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss, HungarianMatcher, generalized_box_iou
from transformers.models.eomt.modeling_eomt import EomtHungarianMatcher, EomtLoss

import vitlab
from vitlab.layers.boxes import centres, corners, generalised_iou, mask_boxes
from vitlab.models.dense import DenseOutput, DenseTarget
from vitlab.models.set_loss import LossWeights, match, set_loss

K, Q = 4, 9
MASKS = LossWeights(points=60)
BOXES = LossWeights(classes=1, masks=0, dice=0, boxes=5, giou=2)


def random_boxes(*shape: int) -> torch.Tensor:
    return torch.cat([0.3 + 0.4 * torch.rand(*shape, 2), 0.05 + 0.5 * torch.rand(*shape, 2)], dim=-1)


def output(batch: int = 3) -> DenseOutput:
    torch.manual_seed(0)
    logits, masks = torch.randn(batch, Q, K + 1), 3 * torch.randn(batch, Q, 7, 11)
    return DenseOutput(
        classes=logits.requires_grad_(), masks=masks.requires_grad_(), boxes=random_boxes(batch, Q).requires_grad_()
    )


def targets(counts: tuple[int, ...] = (3, 1, 5)) -> list[DenseTarget]:
    torch.manual_seed(1)
    return [
        DenseTarget(torch.randint(K, (n,)), masks=torch.rand(n, 28, 44) > 0.6, boxes=random_boxes(n)) for n in counts
    ]


def eomt(weights: LossWeights) -> EomtLoss:
    config = SimpleNamespace(
        num_labels=K,
        no_object_weight=weights.no_object,
        class_weight=weights.classes,
        mask_weight=weights.masks,
        dice_weight=weights.dice,
        train_num_points=weights.points,
        oversample_ratio=weights.oversampling,
        importance_sample_ratio=weights.uncertain,
    )
    return EomtLoss(config, {})


@pytest.mark.parametrize("counts", [(3, 1, 5), (2, 0, 12)], ids=["few", "none, and more than queries"])
def test_masks_are_matched_and_compared_as_transformers_eomt_does(counts):
    ours, theirs, wanted = output(), output(), targets(counts)
    masks, labels = [t.masks.float() for t in wanted], [t.labels for t in wanted]
    seen = DenseOutput(classes=ours.classes, masks=ours.masks)
    torch.manual_seed(2)
    found = match(seen, wanted, MASKS)
    torch.manual_seed(2)
    matcher = EomtHungarianMatcher(MASKS.classes, MASKS.masks, MASKS.dice, MASKS.points)
    expected = matcher(theirs.masks, theirs.classes, masks, labels)
    assert all(torch.equal(a, b) for pair in zip(found, expected, strict=True) for a, b in zip(*pair, strict=True))
    torch.manual_seed(2)
    terms = set_loss(seen, wanted, MASKS)
    torch.manual_seed(2)
    loss = eomt(MASKS)(theirs.masks, theirs.classes, masks, labels)
    values = {"classes": 2 * loss["loss_cross_entropy"], "masks": 5 * loss["loss_mask"], "dice": 5 * loss["loss_dice"]}
    for name, value in values.items():
        torch.testing.assert_close(terms[name], value, atol=1e-5, rtol=0)
    sum(terms.values()).backward()
    sum(values.values()).backward()
    torch.testing.assert_close(ours.masks.grad, theirs.masks.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.classes.grad, theirs.classes.grad, atol=1e-6, rtol=1e-5)


def test_boxes_are_matched_and_compared_as_transformers_detr_does():
    ours, theirs, wanted = output(), output(), targets()
    seen = DenseOutput(classes=ours.classes, boxes=ours.boxes)
    labels = [{"class_labels": t.labels, "boxes": t.boxes} for t in wanted]
    expected = HungarianMatcher(1, 5, 2)({"logits": theirs.classes, "pred_boxes": theirs.boxes}, labels)
    found = match(seen, wanted, BOXES)
    assert all(torch.equal(a, b) for pair in zip(found, expected, strict=True) for a, b in zip(*pair, strict=True))
    terms = set_loss(seen, wanted, BOXES)
    config = SimpleNamespace(
        class_cost=1, bbox_cost=5, giou_cost=2, num_labels=K, eos_coefficient=0.1, auxiliary_loss=False
    )
    config.bbox_loss_coefficient, config.giou_loss_coefficient = 5, 2
    loss, parts, _ = ForObjectDetectionLoss(theirs.classes, labels, "cpu", theirs.boxes, config)
    for name, value in {"classes": 1, "boxes": 5, "giou": 2}.items():
        key = {"classes": "loss_ce", "boxes": "loss_bbox", "giou": "loss_giou"}[name]
        torch.testing.assert_close(terms[name], value * parts[key], atol=1e-5, rtol=0)
    sum(terms.values()).backward()
    loss.backward()
    torch.testing.assert_close(ours.boxes.grad, theirs.boxes.grad, atol=1e-6, rtol=1e-5)


def test_predictions_of_earlier_blocks_are_matched_by_themselves_and_added():
    last, earlier, wanted = output(), output(), targets()
    earlier = DenseOutput(classes=-earlier.classes, boxes=earlier.boxes)
    last = DenseOutput(classes=last.classes, boxes=last.boxes)
    both = set_loss(DenseOutput(classes=last.classes, boxes=last.boxes, auxiliary=(earlier,)), wanted, BOXES)
    alone = [set_loss(one, wanted, BOXES) for one in (last, earlier)]
    for name, value in both.items():
        torch.testing.assert_close(value, alone[0][name] + alone[1][name])


def test_every_place_in_place_of_points():
    """A prediction that is the mask itself costs nothing, and no number is random."""
    masks = torch.zeros(2, 8, 12, dtype=torch.bool)
    masks[0, :4], masks[1, 4:, 6:] = True, True
    target = DenseTarget(torch.tensor([0, 1]), masks=masks)
    logits = torch.where(masks.flip(0)[:, ::2, ::2], 50.0, -50.0)[None]  # (1, 2, 4, 6), in the other order
    classes = torch.tensor([[[0.0, 50, 0], [50, 0, 0]]])
    weights = LossWeights(points=0)
    (queries, objects) = match(DenseOutput(classes=classes, masks=logits), [target], weights)[0]
    assert (queries.tolist(), objects.tolist()) == ([0, 1], [1, 0])
    terms = set_loss(DenseOutput(classes=classes, masks=logits), [target], weights)
    assert all(abs(term.item()) < 1e-6 for term in terms.values())


def test_images_without_objects_have_a_loss_with_gradients():
    empty = [DenseTarget(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 28, 44, dtype=torch.bool)) for _ in range(3)]
    seen = output()
    terms = set_loss(DenseOutput(classes=seen.classes, masks=seen.masks), empty, MASKS)
    assert terms["masks"].item() == terms["dice"].item() == 0 < terms["classes"].item()
    sum(terms.values()).backward()
    assert not seen.masks.grad.any() and seen.classes.grad.any()


def test_what_the_data_lacks_is_named():
    labels = DenseTarget(torch.tensor([1]))
    seen = output(batch=1)
    with pytest.raises(vitlab.UsageError, match="learns from masks"):
        set_loss(DenseOutput(classes=seen.classes, masks=seen.masks), [labels], MASKS)
    with pytest.raises(vitlab.UsageError, match="learns from boxes"):
        set_loss(DenseOutput(classes=seen.classes, boxes=seen.boxes), [labels], BOXES)
    with pytest.raises(vitlab.UsageError, match="0 or more"):
        LossWeights(dice=-1)


def test_boxes():
    a, b = corners(random_boxes(5)), corners(random_boxes(7))
    torch.testing.assert_close(generalised_iou(a[:, None], b[None]), generalized_box_iou(a, b))
    torch.testing.assert_close(corners(centres(a)), a)
    masks = torch.zeros(3, 6, 9, dtype=torch.bool)
    masks[0, 2:5, 3:4], masks[1, 0, 8] = True, True
    assert mask_boxes(masks).tolist() == [[3, 2, 4, 5], [8, 0, 9, 1], [0, 0, 0, 0]]
