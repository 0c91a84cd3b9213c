"""WebDataset tar shards, read through an offset index: any sample by one seek, so that a sample has coordinates.

    shards/train-{000000..000009}.tar     samples are files that share a name: 0001.jpg + 0001.cls (or .json, .txt)

With captions instead of classes, a sample is 0001.jpg + 0001.txt, one caption a line, or a .json with "caption(s)".

The index of a shard is made once, by reading its tar headers, and kept beside it as shard.tar.index.json (in the cache
where that folder cannot be written); it holds for a shard of the same size and time of change. Shards are opened for
each read, so that forked workers and threads share no file position and thousands of shards no limit on open files.

A shard must end as a tar does, with a block of zeros: where a download broke off between two files, only the missing
end shows it. An index is stored of complete shards alone.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import secrets
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.errors import DataError, ImageError
from vitlab.images.digest import bytes_digest
from vitlab.images.read import EXTENSIONS, read_image
from vitlab.images.sources.dataset import (
    SPLIT_NAMES,
    Allow,
    Captioned,
    Captions,
    Splits,
    Strings,
    how_to_allow,
    is_text,
    refuse_special,
)
from vitlab.images.sources.download import cache_dir
from vitlab.images.sources.labels import number_labels
from vitlab.parsing import parse_json

VERSION = 2  # of the index files; those of version 1 were also made of shards that were cut off
BLOCK = tarfile.BLOCKSIZE  # 512 bytes: a header, or a part of a file
MOST_PADDING = 1 << 16  # bytes of zeros at the end; tar programs fill the last 10,240
MOST_SHARDS = 1_000_000
LONGEST_LABEL = 200  # characters
PEEKED = 100  # files of a shard that tell whether it holds classes or captions
SPLIT = re.compile(rf"(?:^|[^a-z])({'|'.join(SPLIT_NAMES)})(?:[^a-z]|$)")


@dataclass
class ShardIndex:
    """Positions of the images in a shard, by column."""

    size: int  # of the shard, bytes
    mtime_ns: int
    version: int = VERSION
    names: list[str] = field(default_factory=list)  # of the image in the tar
    labels: list[str] = field(default_factory=list)  # as written; or the captions, one a line
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    cut: str = ""  # what shows that the shard is incomplete; such an index is not stored


class ShardDataset:
    """A split of tar shards; always RGB."""

    channels = 3
    images = stored = None
    groups: np.ndarray | None = None

    def __init__(
        self, shards: Sequence[Path], indexes: Sequence[ShardIndex], labels: np.ndarray, classes: list[str]
    ) -> None:
        self.shards = [str(shard) for shard in shards]
        self.firsts = np.array([0, *accumulate(len(index.names) for index in indexes)])  # of each shard's samples
        self.names = Strings(name for index in indexes for name in index.names)
        self.offsets = np.array([n for index in indexes for n in index.offsets], dtype=np.int64)
        self.sizes = np.array([n for index in indexes for n in index.sizes], dtype=np.int64)
        self.labels = np.asarray(labels, dtype=np.int64)
        self.classes = classes
        assert len(self.names) == len(self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> np.ndarray:
        return np.array(read_image(self._bytes(index), name=self.name_of(index)))  # (H, W, 3)

    def source(self, index: int) -> bytes:
        return self._bytes(index)

    def name_of(self, index: int) -> str:
        return f"{self._shard(index)}/{self.names[index]}"

    def digest(self, index: int) -> bytes:
        return bytes_digest(self._bytes(index))

    def _bytes(self, index: int) -> bytes:
        shard, name, size = self._shard(index), self.name_of(index), int(self.sizes[index])
        try:
            with open(shard, "rb") as file:  # noqa: PTH123
                file.seek(self.offsets[index])
                data = file.read(size)
        except OSError as error:
            raise ImageError(f"{name}: the shard cannot be read ({error.strerror}).") from None
        if len(data) < size:
            raise ImageError(f"{name}: the shard ends after {len(data)} of its {size} bytes. Fetch the shard again.")
        return data

    def _shard(self, index: int) -> str:
        return self.shards[int(np.searchsorted(self.firsts, range(len(self))[index], side="right")) - 1]


def open_shards(source: str, captions: bool, allow: Allow) -> Splits:
    """A pattern ({000000..000009}, *, several joined by ::), one .tar, or a folder of them; splits go by file names.

    `captions`: a .txt without a .cls is a caption, not a class name.
    """
    shards = _by_split(source, find_shards(source))
    captions = captions and holds_captions(shards["train"][0])
    indexes = {split: [index_of(shard, captions, allow.cut) for shard in paths] for split, paths in shards.items()}
    for split, held in indexes.items():
        if not any(index.names for index in held):
            expected = "0001.jpg + 0001.txt" if captions else "0001.jpg + 0001.cls"
            raise DataError(f"{source}: no samples in the {len(held)} shards of {split}. Expected {expected} ...")
    notes = [
        f"{shard} is incomplete ({index.cut}): its first {len(index.names)} samples are used."
        for split, held in indexes.items()
        for shard, index in zip(shards[split], held, strict=True)
        if index.cut
    ]
    if captions:
        return _captioned(shards, indexes, notes)

    def place(split: str, at: int) -> str:
        for shard, index in zip(shards[split], indexes[split], strict=True):
            if at < len(index.names):
                return f"{shard}, {index.names[at]}"
            at -= len(index.names)
        raise AssertionError(at)

    written = {split: [label for index in held for label in index.labels] for split, held in indexes.items()}
    classes, numbers = number_labels(written, place, shards["train"][0].with_name("classes.txt"))
    datasets = {s: ShardDataset(shards[s], indexes[s], numbers[s], classes) for s in shards}
    return Splits(classes, datasets["train"], datasets.get("val"), datasets.get("test"), notes)


def _captioned(shards: dict[str, list[Path]], indexes: dict[str, list[ShardIndex]], notes: list[str]) -> Splits:
    splits = {}
    for split, held in indexes.items():
        texts = Captions(label.split("\n") for index in held for label in index.labels)
        splits[split] = Captioned(ShardDataset(shards[split], held, np.zeros(len(texts), np.int64), []), texts)
    return Splits([], splits["train"], splits.get("val"), splits.get("test"), notes)


def holds_captions(shard: Path) -> bool:
    """By its first files: no .cls, and a .json with captions or without a label, or a .txt."""
    endings: dict[str, tarfile.TarInfo] = {}
    with contextlib.suppress(tarfile.TarError, OSError, ValueError), tarfile.open(shard, "r:") as tar:
        for _, info in zip(range(PEEKED), tar, strict=False):
            if info.isreg():
                endings.setdefault(info.name.rpartition("/")[2].partition(".")[2].lower(), info)
        if "json" in endings and "cls" not in endings:
            values = parse_json(_text(tar, endings["json"]))
            return "caption" in values or "captions" in values or ("txt" in endings and "label" not in values)
    return "txt" in endings and "cls" not in endings


def find_shards(source: str) -> list[Path]:
    """The files of a source, in order."""
    shards: list[Path] = []
    for pattern in (p for part in source.split("::") for p in expand(part)):
        path = Path(pattern).expanduser()
        if path.is_dir():
            inside = [*path.glob("*.tar"), *(tar for name in SPLIT_NAMES for tar in path.glob(f"{name}/*.tar"))]
            shards += sorted(inside)
            if not inside:
                raise DataError(f"{path}: no .tar files in this folder.")
        elif path.is_file():
            shards.append(path)
        elif matches := sorted(glob.glob(str(path))):  # noqa: PTH207 - Path.glob takes no absolute pattern
            shards += map(Path, matches)
        else:
            raise DataError(f"{pattern}: no such shard (from {source!r}). Check the pattern and the numbers in it.")
    for path in shards:
        refuse_special(path)
        if path.suffix != ".tar":
            raise DataError(f"{path}: shards are plain .tar files. A compressed one must be unpacked first (gunzip).")
    return list(dict.fromkeys(shards))


def expand(pattern: str) -> list[str]:
    """{000000..000009} and {train,val}, as the shell reads them."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    if numbers := re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", match[1]):
        first, last = int(numbers[1]), int(numbers[2])
        if not first <= last < first + MOST_SHARDS:
            raise DataError(f"{pattern}: {{{match[1]}}} must count upwards, to at most {MOST_SHARDS:,} shards.")
        width = len(numbers[1]) if numbers[1].startswith("0") else 0
        middles = [f"{i:0{width}d}" for i in range(first, last + 1)]
    else:
        middles = match[1].split(",")
    return [pattern[: match.start()] + middle + rest for middle in middles for rest in expand(pattern[match.end() :])]


def _by_split(source: str, shards: list[Path]) -> dict[str, list[Path]]:
    """By the word train, val or test in a shard's name, or in its folder's where shards lie in several."""
    several = len({shard.parent for shard in shards}) > 1
    splits: dict[str, list[Path]] = {}
    for shard in shards:
        match = SPLIT.search(shard.stem.lower()) or (SPLIT.search(shard.parent.name.lower()) if several else None)
        splits.setdefault(SPLIT_NAMES[match[1]] if match else "train", []).append(shard)
    if "train" not in splits:
        if len(splits) > 1:
            raise DataError(
                f"{source}: shards of {' and '.join(splits)}, but none of train. Name them train-000000.tar."
            )
        return {"train": shards}  # val-*.tar alone is what the user named
    return splits


def index_of(shard: Path, captions: bool = False, allow_cut: bool = False) -> ShardIndex:
    """The shard's index, of classes or captions: the stored one if it fits, else made and stored."""
    if index := stored_index(shard, captions):
        return index
    status = _status(shard)
    index = _scan(shard, ShardIndex(status.st_size, status.st_mtime_ns), _captions if captions else _label, allow_cut)
    if index.cut:
        return index
    for store in _stores(shard, captions):
        partial = store.with_name(f".{store.name}.{secrets.token_hex(4)}")
        try:
            store.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(asdict(index)), encoding="utf-8")
            partial.replace(store)
            break
        except OSError:  # not writable: the next place; with no place at all, the index is made each time
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
    return index


def stored_index(shard: Path, captions: bool = False) -> ShardIndex | None:
    """The stored index of the shard, if it is up to date."""
    status = _status(shard)
    for store in _stores(shard, captions):
        with contextlib.suppress(OSError, ValueError, TypeError):  # absent, or not what it should be: made anew
            if not store.is_file():  # a FIFO would be waited for
                continue
            index = ShardIndex(**parse_json(store.read_text(encoding="utf-8")))
            fits = (index.version, index.size, index.mtime_ns) == (VERSION, status.st_size, status.st_mtime_ns)
            if fits and _is_sound(index):
                return index
    return None


def _is_sound(index: ShardIndex) -> bool:
    """Whether a stored index holds as many texts and places as samples, all of them inside the shard."""
    columns = (index.names, index.labels, index.offsets, index.sizes)
    if not all(isinstance(column, list) and len(column) == len(index.names) for column in columns):
        return False
    texts, numbers = [*index.names, *index.labels], [*index.offsets, *index.sizes]
    if not all(type(text) is str for text in texts) or not all(type(n) is int and n >= 0 for n in numbers):
        return False
    ends = (offset + size for offset, size in zip(index.offsets, index.sizes, strict=True))
    return index.cut == "" and max(ends, default=0) <= index.size


def _stores(shard: Path, captions: bool) -> list[Path]:
    digest = hashlib.sha1(os.fsencode(shard.absolute()), usedforsecurity=False).hexdigest()
    ending = "captions.json" if captions else "index.json"
    return [shard.with_name(f"{shard.name}.{ending}"), cache_dir() / "shards" / f"{digest}.{ending}"]


def _status(shard: Path) -> os.stat_result:
    try:
        return shard.stat()
    except OSError as error:
        raise DataError(f"{shard}: cannot be read ({error.strerror}).") from None


Reads = Callable[[tarfile.TarFile, Path, str, dict[str, tarfile.TarInfo]], str]


def whole_members(tar: tarfile.TarFile) -> tuple[list[tarfile.TarInfo], str]:
    """The members whose bytes are all there; and, where the archive does not end as it should, what shows that.

    tarfile itself stops without a word at a header that is cut or damaged, unless it is the first.
    """
    members: list[tarfile.TarInfo] = []
    stream: Any = tar.fileobj
    size = stream.seek(0, os.SEEK_END)
    try:
        for info in tar:
            members.append(info)  # one by one: those before an error count
        stream.seek(tar.offset)
        end, cut = stream.read(MOST_PADDING), ""
        if len(end) < BLOCK or end[:BLOCK].strip(b"\0"):
            cut = f"no end-of-archive block at byte {tar.offset:,}"
        elif end.strip(b"\0") or size - tar.offset > MOST_PADDING:
            cut = f"{size - tar.offset:,} bytes follow its end at byte {tar.offset:,}"
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:  # also sizes that no file can have
        cut = str(error)
    return [info for info in members if info.offset_data + info.size <= size], cut


def cut_off(shard: Path, why: str) -> DataError:
    return DataError(
        f"{shard}: not a plain tar file, damaged, or cut off ({why}). Fetch it again; or use the samples that are "
        f"whole: {how_to_allow('cut')}."
    )


def _scan(shard: Path, index: ShardIndex, read: Reads, allow_cut: bool) -> ShardIndex:
    """Fill the index from the tar's headers; of the contents, only the labels are read."""
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, dict[str, tarfile.TarInfo]] = {}
    try:
        with tarfile.open(shard, "r:") as tar:
            members, index.cut = whole_members(tar)
            if index.cut and not allow_cut:
                raise cut_off(shard, index.cut)
            key = ""
            for info in members:
                folder, _, name = info.name.rpartition("/")
                stem, dot, ending = name.partition(".")
                if not info.isreg() or not stem or not dot:  # folders, links, hidden files
                    continue
                key, ending = f"{folder}/{stem}", ending.lower()
                if f".{ending}" in EXTENSIONS:
                    if info.issparse():
                        raise DataError(f"{shard}, {info.name}: a sparse file. Make the shard again without --sparse.")
                    images.setdefault(key, info)
                elif ending in ("cls", "json", "txt"):
                    labels.setdefault(key, {})[ending] = info
            if index.cut and not (key in images and key in labels):  # the last sample: its other files are gone
                images.pop(key, None)
                labels.pop(key, None)
            for key, info in images.items():
                index.names.append(info.name)
                index.offsets.append(info.offset_data)
                index.sizes.append(info.size)
                index.labels.append(read(tar, shard, info.name, labels.pop(key, {})))
    except DataError:
        raise
    except (tarfile.TarError, OSError, ValueError) as error:  # ValueError: sizes in a header that no file can have
        raise DataError(f"{shard}: not a plain tar file, damaged, or cut off ({error}). Fetch it again.") from None
    for files in labels.values():
        name = next(iter(files.values())).name
        raise DataError(f"{shard}: {name} has no image beside it. Images end in {', '.join(EXTENSIONS)}.")
    return index


def _text(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    stream = tar.extractfile(member)
    assert stream is not None  # a regular file
    return stream.read(1 << 20).decode("utf-8-sig")


def _label(tar: tarfile.TarFile, shard: Path, image: str, files: dict[str, tarfile.TarInfo]) -> str:
    """What .cls, else .json ("label"), else .txt says, as text."""
    ending = next((ending for ending in ("cls", "json", "txt") if ending in files), None)
    if ending is None:
        raise DataError(f'{shard}: {image} has no label. Put a .cls, a .json with "label", or a .txt beside it.')
    name = files[ending].name
    try:
        label = _text(tar, files[ending]).strip()
        if ending == "json":
            label = parse_json(label).get("label")
    except (ValueError, AttributeError) as error:
        expected = 'Expected {"label": ...}, or plain text.'
        raise DataError(f"{shard}: {name} cannot be read ({error}). {expected}") from None
    if isinstance(label, bool) or not isinstance(label, (int, str)) or label == "":
        raise DataError(f"{shard}: {name} holds no label, but {label!r}. Write a class number or name.")
    if not is_text(str(label)):
        raise DataError(f"{shard}: {name} holds half a character (a lone surrogate). Correct it.")
    if len(str(label)) > LONGEST_LABEL or "\n" in str(label):
        raise DataError(
            f"{shard}: {name} holds a text, not a label. Add .cls files with the class numbers or names; or learn from "
            "the texts: objective.name=clip."
        )
    return str(label)


def _captions(tar: tarfile.TarFile, shard: Path, image: str, files: dict[str, tarfile.TarInfo]) -> str:
    """What .json ("caption", "captions") or else .txt says, one caption a line."""
    captions: Any = None
    for ending in ("json", "txt"):
        if ending not in files or captions is not None:
            continue
        try:
            text = _text(tar, files[ending])
            values = parse_json(text) if ending == "json" else {"captions": text.splitlines()}
            captions = values.get("captions", values.get("caption"))
        except (ValueError, AttributeError) as error:
            expected = '{"caption": ...}' if ending == "json" else "text in UTF-8"
            raise DataError(f"{shard}: {files[ending].name} cannot be read ({error}). Expected {expected}.") from None
    captions = [captions] if isinstance(captions, str) else captions
    if captions is None:
        raise DataError(f'{shard}: {image} has no caption. Put a .txt, or a .json with "caption", beside it.')
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        raise DataError(f"{shard}: the captions of {image} must be texts, found {captions!r:.80}.")
    if not all(map(is_text, captions)):
        raise DataError(f"{shard}: the caption of {image} holds half a character (a lone surrogate). Correct it.")
    lines = [line for caption in captions if (line := " ".join(caption.split()))]
    if not lines:
        raise DataError(f"{shard}: the caption of {image} is empty. Write one, or take the image out.")
    return "\n".join(lines)
