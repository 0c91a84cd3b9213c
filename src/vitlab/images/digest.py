"""Digests of images: equal for equal contents, whatever the name, the folder or the dataset.

An image file and the same file in a shard have one digest; an image in memory is known by its pixels.
"""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import numpy as np

from vitlab.special_files import special_kind

BYTES = 16  # of a digest


def file_digest(path: Path) -> bytes:
    if kind := special_kind(path):
        raise OSError(errno.EINVAL, f"it is {kind}")
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=BYTES)).digest()


def bytes_digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=BYTES).digest()


def pixel_digest(pixels: np.ndarray) -> bytes:
    """(H, W, C) uint8; the shape counts too."""
    return bytes_digest(repr((pixels.shape, pixels.dtype.str)).encode() + np.ascontiguousarray(pixels).tobytes())
