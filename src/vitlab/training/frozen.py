"""Training behind a frozen encoder: it runs over the images once, and a step runs the classifier on its features.

Mirror images are images of their own, so a run that only mirrors (augment.flip) is the same run, many times faster.
Other augmentation makes new images in every epoch, and the encoder must run in every step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]  # the base of all three

from vitlab.images.augment import Augment
from vitlab.layers.reducer import Reducer
from vitlab.models.base import Network
from vitlab.models.config import option_paths
from vitlab.training.batches import BatchDataset, ImageSet, TrainingBatch
from vitlab.training.evaluate import Scores
from vitlab.training.features import Count, FeatureSet, adding, dataset_features
from vitlab.training.processes import Processes
from vitlab.training.recipe import Recipe

NOISE = ("dropout", "attention_dropout", "patch_dropout", "stochastic_depth")


def why_in_every_step(recipe: Recipe, model: Network) -> str | None:
    """What makes the encoder run in every step although it is frozen; None: its features can be kept."""
    a, c = recipe.augment, model.config
    if recipe.run.sharding != "none":
        return f"run.sharding={recipe.run.sharding} shares it out"
    if model.linear_head is None:
        return "its classifier is more than one linear layer"
    learns = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if others := [name for name in learns if not name.startswith("head.")]:
        return f"{others[0]} learns too"
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        return "it has batch norms, whose statistics change"
    if noisy := [name for name in NOISE if name in option_paths(type(c)) and c.option(name)]:
        return f"model.{noisy[0]}={c.option(noisy[0])} makes it noisy: set it to 0"
    if recipe.model.reducer is not None:
        return f"model.reducer={recipe.model.reducer}"
    makes = {name: getattr(a, name) for name in ("randaugment", "jitter", "erasing", "mixup", "cutmix", "drop_patches")}
    makes |= {"crop": a.crop} if a.crop != "none" else {}
    return next((f"augment.{name}={value} makes new images" for name, value in makes.items() if value), None)


class Classifier(nn.Module):
    """The classifier alone, on features (B, E)."""

    def __init__(self, model: Network):
        super().__init__()
        assert model.linear_head is not None
        self.head = model.linear_head

    def forward(self, features: Tensor, reducer: Reducer | None = None) -> Tensor:
        return self.head(features)  # (B, classes)


class FeatureBatches(BatchDataset):
    """Batches of features in place of images; of mirror images where the augmentation would mirror."""

    def __init__(self, steps: BatchDataset, originals: FeatureSet, mirrored: FeatureSet | None):
        super().__init__(steps.image_set, steps.plan, steps.augment)
        self.originals, self.mirrored = originals, mirrored
        self.row = np.full(len(steps.image_set), -1)
        self.row[originals.indices] = np.arange(len(originals.indices))

    def batch(self, epoch: int, indices: np.ndarray, repeat: np.ndarray) -> TrainingBatch:
        readable = self.row[indices] >= 0
        indices, repeat = indices[readable], repeat[readable]
        numbers, rows = torch.from_numpy(indices), torch.from_numpy(self.row[indices])
        if not len(indices):
            blank, unknown = (
                torch.zeros(1, self.originals.vectors.shape[1]),
                torch.zeros_like(self.image_set.labels[:1]),
            )
            return TrainingBatch(blank, unknown, numbers, self.originals.skipped)
        features = self.originals.vectors[rows]  # (B, E)
        if self.mirrored is not None:
            assert isinstance(self.augment, Augment)
            mirrored = self.augment.mirrored(indices, seed=self.plan.seed, epoch=epoch, repeat=repeat)
            features = torch.where(torch.from_numpy(mirrored)[:, None], self.mirrored.vectors[rows], features)
        return TrainingBatch(features, self.image_set.labels[numbers], numbers, self.originals.skipped)


class FrozenEncoder:
    """The features of a run's images, each split computed when it is first needed."""

    def __init__(self, model: Network, who: Processes):
        self.model, self.who = model, who
        self._cache: dict[tuple[int, bool], tuple[ImageSet, FeatureSet]] = {}

    def features(self, image_set: ImageSet, *, mirrored: bool = False, count: Count | None = None) -> FeatureSet:
        key = id(image_set.data), mirrored
        if key not in self._cache:
            what = "features of mirror images" if mirrored else "features"
            progress = adding(count, what, len(image_set))
            features = dataset_features(self.model, image_set, mirrored=mirrored, processes=self.who, progress=progress)
            self._cache[key] = image_set, features
        return self._cache[key][1]

    def batches(self, steps: BatchDataset, flip: bool, count: Count | None) -> FeatureBatches:
        originals = self.features(steps.image_set, count=count)
        mirrored = self.features(steps.image_set, mirrored=True, count=count) if flip else None
        return FeatureBatches(steps, originals, mirrored)

    def evaluate(self, model: Network, image_set: ImageSet, *, flip: bool) -> Scores:
        """Scores of the classifier that the model has now."""
        head, n = model.linear_head, len(image_set)
        assert head is not None
        logits, read = torch.zeros(n, head.out_features), torch.zeros(n, dtype=torch.bool)
        views = [self.features(image_set, mirrored=mirrored) for mirrored in ([False, True] if flip else [False])]
        with torch.no_grad():
            for view in views:
                answers = head(view.vectors.to(head.weight.device)).float().cpu()
                logits[view.indices] += answers / len(views)
                read[view.indices] = True
        return Scores(logits, image_set.labels, read, sum(view.seconds for view in views), views[0].skipped)
