"""Photos in the public domain that ship with the package, by name: sample:cat. README.md tells where each is from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitlab.errors import DataError

PREFIX = "sample:"
FIRST = "sample:cat"  # what a command shows that is given no image


@dataclass(frozen=True)
class SamplePhoto:
    name: str
    label: str  # the class of CIFAR-10 that it shows
    credit: str

    @property
    def path(self) -> Path:
        return Path(__file__).with_name(f"{self.name}.jpg")


PHOTOS = {
    photo.name: photo
    for photo in (
        SamplePhoto("cat", "cat", "Stéfan van der Walt, CC0 1.0"),
        SamplePhoto("grey-cat", "cat", "Pexels, CC0 1.0"),
        SamplePhoto("moose", "deer", "Ryan Hagerty, U.S. Fish and Wildlife Service, public domain"),
    )
}


def find_photo(name: str) -> SamplePhoto:
    """sample:cat, or cat."""
    photo = PHOTOS.get(name.removeprefix(PREFIX))
    if photo is None:
        names = ", ".join(PREFIX + names for names in PHOTOS)
        raise DataError(f"{name}: there is no such photo in the package; there are {names}.")
    return photo
