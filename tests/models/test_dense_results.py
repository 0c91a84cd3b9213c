"""Maps, instances, panoptic segments and boxes against transformers' image processors, on random outputs."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.eomt.image_processing_pil_eomt import EomtImageProcessorPil
from transformers.models.yolos.image_processing_pil_yolos import YolosImageProcessorPil

import vitlab
from vitlab.models.dense import DenseOutput
from vitlab.models.dense_results import detections, instances, panoptic, semantic_maps

K, Q = 3, 12
SIZES = [(30, 41), (52, 20)]
VIEW = dict(shortest_edge=40, longest_edge=40)


@pytest.fixture
def output() -> DenseOutput:
    """Blocks that are partly sure and partly hidden by others, and one query without a mask."""
    torch.manual_seed(3)
    masks = 4 * torch.nn.functional.interpolate(torch.randn(2, Q, 3, 3), size=(10, 10), mode="bilinear") + 1
    masks[:, 0] = -5
    boxes = torch.rand(2, Q, 4)
    return DenseOutput(classes=4 * torch.randn(2, Q, K + 1), masks=masks, boxes=boxes)


def theirs(output: DenseOutput) -> SimpleNamespace:
    return SimpleNamespace(class_queries_logits=output.classes, masks_queries_logits=output.masks, patch_offsets=None)


def contents() -> list[tuple[int, int]]:
    """How much of 40 x 40 pixels images of these sizes fill where they keep their shape."""
    return [(29, 40), (40, 15)]


def agree(found, expected) -> None:
    for ours, other in zip(found, expected, strict=True):
        assert torch.equal(ours.ids, other["segmentation"].long())
        info = other["segments_info"]
        assert [int(label) for label in ours.labels] == [segment["label_id"] for segment in info]
        assert ours.scores.tolist() == pytest.approx([segment["score"] for segment in info], abs=1e-5)


def test_semantic_maps(output):
    processor = EomtImageProcessorPil()
    expected = processor.post_process_semantic_segmentation(theirs(output), SIZES, VIEW)
    found = semantic_maps(output, (40, 40), SIZES)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    logits = DenseOutput(semantic=torch.randn(2, K, 5, 5))
    large = torch.nn.functional.interpolate(logits.semantic, size=(40, 40), mode="bilinear").argmax(1)
    assert all(torch.equal(a, b) for a, b in zip(semantic_maps(logits, (40, 40), [(40, 40)] * 2), large, strict=True))


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.99])
def test_instances(output, threshold):
    expected = EomtImageProcessorPil().post_process_instance_segmentation(theirs(output), SIZES, threshold, VIEW)
    found = instances(output, (40, 40), SIZES, contents=contents(), threshold=threshold)
    agree(found, expected)
    for one in found:
        for mask, box in zip(one.masks, one.boxes, strict=True):
            rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
            assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


@pytest.mark.parametrize("stuff", [[], [0, 2]])
@pytest.mark.parametrize("threshold", [0.3, 0.8, 0.9999])
def test_panoptic(output, threshold, stuff):
    processor = EomtImageProcessorPil()
    options = dict(threshold=threshold, overlap_mask_area_threshold=0.4, stuff_classes=stuff, size=VIEW)
    expected = processor.post_process_panoptic_segmentation(theirs(output), SIZES, **options)
    found = panoptic(output, (40, 40), SIZES, contents=contents(), threshold=threshold, overlap=0.4, stuff=stuff)
    agree(found, expected)
    if threshold == 0.3:
        assert all(len(one.labels) > 1 for one in found)


def test_detections(output):
    seen = SimpleNamespace(logits=output.classes, pred_boxes=output.boxes)
    expected = YolosImageProcessorPil().post_process_object_detection(seen, 0.5, torch.tensor(SIZES))
    for ours, other in zip(detections(output, SIZES), expected, strict=True):
        torch.testing.assert_close(ours.boxes, other["boxes"])
        torch.testing.assert_close(ours.scores, other["scores"])
        assert torch.equal(ours.labels, other["labels"])


def test_what_an_output_lacks_is_named(output):
    with pytest.raises(vitlab.UsageError, match="no masks"):
        instances(DenseOutput(classes=output.classes, boxes=output.boxes), (40, 40), SIZES)
    with pytest.raises(vitlab.UsageError, match="no boxes"):
        detections(DenseOutput(classes=output.classes, masks=output.masks), SIZES)
