"""Copies of images in a folder for each class. Images are never moved, and copies never overwrite anything.

sorted_images = SortedFolder("sorted", sources)            # refuses a folder that holds anything else
sorted_images.add("photos/1.jpg", "cat")                   # sorted/cat/1.jpg, or 1-2.jpg where that is taken
sorted_images.save()

sorted.json in the folder lists the copies. Run again, an image whose class has changed changes its folder there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

from vitlab.errors import UsageError
from vitlab.images.digest import file_digest

LISTING = "sorted.json"
NOT_IN_NAMES = re.compile(r'[\x00-\x1f\x7f<>:"/\\|?*]')  # of files, on any system


class SortedFolder:
    def __init__(self, folder: str | PathLike[str], sources: Iterable[str | PathLike[str]]):
        """`sources`: image files, and folders of images, that will be added; checked before anything is computed."""
        self.folder = Path(folder).expanduser().resolve()
        self.listing = self.folder / LISTING
        for source in map(Path, sources):
            place = source.expanduser().resolve()
            if not place.exists():
                raise UsageError(f"--sort copies image files, and {source} is none.")
            if place == self.folder or place in self.folder.parents or self.folder in place.parents:
                raise UsageError(
                    f"--sort {folder}: copies would lie among the images of {source}, and be read as images next time. "
                    "Name a folder elsewhere."
                )
        self.copies = self._read()  # image -> its copy, below the folder
        self.folders: dict[str, str] = {}  # class -> name of its folder

    def _read(self) -> dict[str, str]:
        if not self.folder.exists():
            return {}
        if not self.folder.is_dir():
            raise UsageError(f"--sort {self.folder}: is a file. Name a folder.")
        if not self.listing.is_file():
            if any(self.folder.iterdir()):
                raise UsageError(f"--sort {self.folder}: is not empty, and was not made by --sort. Name a new folder.")
            return {}
        try:
            copies = json.loads(self.listing.read_text(encoding="utf-8"))["copies"]
            if not all(isinstance(value, str) for pair in copies.items() for value in pair):
                raise ValueError("not a table of paths")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{self.listing}: is damaged ({error}). Name a new folder for --sort.") from None
        return {image: copy for image, copy in copies.items() if self._inside(copy)}

    def _inside(self, copy: str) -> bool:
        return self.folder in (self.folder / copy).resolve().parents

    def add(self, image: str | PathLike[str], label: str) -> Path:
        """Copy an image into the folder of its class; returns the copy."""
        image = Path(image)
        key, target = str(image.resolve()), self.folder / self._folder_of(label)
        before = self.folder / self.copies[key] if key in self.copies else None
        target.mkdir(parents=True, exist_ok=True)
        if before is not None and before.is_file() and file_digest(before) == file_digest(image):
            copy = before if before.parent == target else before.rename(_free(target / image.name))
        else:
            copy = _free(target / image.name)
            shutil.copy2(image, copy)
        self.copies[key] = copy.relative_to(self.folder).as_posix()
        return copy

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"made_by": "vitlab predict --sort", "copies": self.copies}, indent=1)
        self.listing.write_text(text + "\n", encoding="utf-8")

    def _folder_of(self, label: str) -> str:
        """A class's name as that of a folder; no two classes share one."""
        if label not in self.folders:
            name = NOT_IN_NAMES.sub("_", label).strip(" .") or "_"
            taken, number, free = {other.casefold() for other in self.folders.values()} | {LISTING}, 1, name
            while free.casefold() in taken:
                number += 1
                free = f"{name}-{number}"
            self.folders[label] = free
        return self.folders[label]


def _free(path: Path) -> Path:
    """The path, or 1-2.jpg, 1-3.jpg, ... where it is taken."""
    number, free = 1, path
    while free.exists() or free.is_symlink():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free
