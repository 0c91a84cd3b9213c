"""Images that are unlike the others of their class: far from their nearest neighbours in it, for that class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.data_check.neighbours import nearest

NEAREST = 5  # neighbours of its class that an image is compared with
FEWEST = 20  # images of a class that say what is usual in it
FAR = 5.0  # robust standard deviations beyond the class's median


@dataclass(frozen=True)
class OutlierImage:
    image: int  # row of the features
    distance: float  # mean of 1 - cosine to the nearest of its class
    deviation: float  # robust z: standard deviations beyond the class's median


def find_outliers(features: Tensor, labels: np.ndarray) -> list[OutlierImage]:
    """features (n, E), labels (n,); the farthest first."""
    unit, outliers = F.normalize(features, dim=1), []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        if len(members) < FEWEST:
            continue
        rows = unit[torch.from_numpy(members)]
        distances = (1 - nearest(rows, rows, NEAREST)[0]).mean(dim=1).double().numpy()
        deviations = robust_z(distances)
        outliers += [
            OutlierImage(int(members[i]), float(distances[i]), float(deviations[i]))
            for i in np.flatnonzero(deviations > FAR)
        ]
    return sorted(outliers, key=lambda outlier: -outlier.deviation)


def robust_z(values: np.ndarray) -> np.ndarray:
    """Distances from the median, in units of 1.4826 median absolute deviations; 0 where there is no deviation."""
    middle = np.median(values)
    spread = 1.4826 * np.median(np.abs(values - middle))
    return (values - middle) / spread if spread > 1e-9 else np.zeros_like(values)
