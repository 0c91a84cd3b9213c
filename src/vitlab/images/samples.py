"""SOURCE#N: image number N of a data source's test split (val where there is none), wherever an image is expected.

vitlab predict bundled:digits digits#3
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike, fspath
from pathlib import Path

from PIL import Image

from vitlab.errors import DataError
from vitlab.images.datasets import Captioned, Data, open_data
from vitlab.images.read import Source


@dataclass(frozen=True)
class Sample:
    image: Image.Image
    label: str  # the first caption, where there are no classes
    name: str


def is_sample(text: str) -> bool:
    return bool(re.fullmatch(r".+#\d{1,18}", text)) and not Path(text).exists()


def replace_sample(source: Source) -> Source:
    """The image of a sample by its name, "digits#3"; any other source unchanged."""
    if not isinstance(source, str | PathLike) or not is_sample(fspath(source)):
        return source
    image = open_sample(fspath(source)).image
    image.filename = fspath(source)  # type: ignore[attr-defined]  # used in messages
    return image


def open_sample(text: str) -> Sample:
    source, _, number = text.rpartition("#")
    data = _opened(source)
    split = data.val if data.test is None else data.test
    if int(number) >= len(split):
        raise DataError(f"{text}: {data.name} has {len(split)} images to choose from, {source}#0 to #{len(split) - 1}.")
    pixels = split.read(int(number))  # (H, W, C)
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    captioned = isinstance(split, Captioned)
    label = split.captions[int(number)][0] if captioned else data.classes[int(split.labels[int(number)])]
    return Sample(image, label, text)


@lru_cache(maxsize=2)
def _opened(source: str) -> Data:
    """Cached, so that several samples of one source open it once."""
    return open_data(source)
