"""The evaluation of a network for segmentation or detection: mIoU, AP and PQ on one split of a dataset."""

from __future__ import annotations

from vitlab.errors import UsageError
from vitlab.images.datasets import Data, Dataset
from vitlab.images.sources.dataset import REGION_NAMES, Annotated
from vitlab.inference_regions import kind_of
from vitlab.models.dense_network import DenseNetwork
from vitlab.training.batches import ImageSet
from vitlab.training.dense_scores import BATCH, RegionScores, evaluate_regions
from vitlab.training.features import Count, adding
from vitlab.training.labels import differing


def evaluate_network(
    network: DenseNetwork, name: str, data: Data, split: Dataset, progress: Count | None, batch_size: int
) -> RegionScores:
    """`name`: of the checkpoint, for messages."""
    kind = kind_of(network)
    if not isinstance(split, Annotated) or split.kind != kind:
        has = REGION_NAMES[split.kind] if isinstance(split, Annotated) else "no masks or boxes"
        raise UsageError(f"{name} gives {REGION_NAMES[kind]}, and {data.name} has {has}.")
    if network.labels != data.classes:
        labels = network.labels or [network.label_of(k) for k in range(network.classes)]
        what = differing(labels, data.classes, "the checkpoint", "the data")
        raise UsageError(f"{name} knows other classes than {data.name} has, or in another order: {what}.")
    image_set = ImageSet(split, network.require_preprocess())
    count = adding(progress, data.name, len(image_set))
    return evaluate_regions(network, image_set, kind, batch_size=min(batch_size, BATCH), progress=count)
