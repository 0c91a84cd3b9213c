"""scikit-learn's 1,797 digits of 8 x 8 (UCI, 1998), values 0..16 scaled to 0..255."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from vitlab.errors import DataError, UsageError
from vitlab.images.sources.dataset import ArrayDataset, Splits, subset
from vitlab.images.sources.splits import stratified_split

SPLIT = (0.6, 0.2, 0.2)
SEED = 1998  # of that split, whatever the run's seed, so that test is the same for everybody


def open_digits(name: str, path: Path | None, download: bool) -> Splits:
    if path is not None:
        raise UsageError(f"digits: come with scikit-learn and need no path. Leave out {path}.")
    values, labels = np.split(_digits_table(), [64], axis=1)  # (N, 64), (N, 1)
    labels = labels[:, 0]
    pixels = np.rint(values * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    dataset = ArrayDataset(pixels, labels, [str(i) for i in range(10)], name)
    train, val, test = (subset(dataset, part) for part in stratified_split(labels, SPLIT, SEED))
    return Splits(dataset.classes, train, val, test)


def _digits_table() -> np.ndarray:
    """(N, 65): 64 values and the label. From scikit-learn's file itself: its loader imports all of scipy for that."""
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise DataError("digits: come with scikit-learn, which is not installed. Type: pip install scikit-learn")
    file = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if not file.is_file():  # moved, in a version to come
        from sklearn.datasets import load_digits

        values, labels = load_digits(return_X_y=True)
        return np.column_stack([values, labels]).astype(np.int64)
    with gzip.open(file, "rt", encoding="ascii") as table:
        return np.loadtxt(table, delimiter=",", dtype=np.int64)
