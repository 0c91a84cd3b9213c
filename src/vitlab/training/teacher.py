"""The teacher of a distilled run: any frozen checkpoint. It gets the student's images in its own preprocessing.

teacher = Teacher.load("runs/resnet/best", data.classes, student.preprocess)
teacher(images)                                                  # (B, K)
answers = keep_answers(folder, teacher, data.train, data.name)   # computed once per image, kept on disk
answers.take(batch.indices)                                      # (B, K)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.checkpoints import native
from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.load import load_with_report
from vitlab.errors import ImageError, TrainingError
from vitlab.images.datasets import Dataset, first_few, subset
from vitlab.images.preprocess import Preprocess
from vitlab.models.base import Network
from vitlab.training.batches import ImageSet
from vitlab.training.labels import class_order, differing
from vitlab.training.processes import Processes

HEADER, LOGITS = "answers.json", "logits.npy"
FORMAT = 1
SAVE_EVERY = 16  # batches between saves; an interrupted computation continues from the last one


class Teacher:
    """A frozen model in evaluation mode, called with the student's images."""

    def __init__(self, model: Network, classes: list[str], student: Preprocess, name: str = "the teacher"):
        self.model, self.name, self.classes = model.eval().requires_grad_(False), name, classes
        self.notes: list[str] = []
        self.order = self._order()
        if model.preprocess is None:
            raise TrainingError(f"{name} has no preprocess, so it is not known how it sees images: load it with one.")
        self.preprocess: Preprocess = model.preprocess
        self._adapt(student)

    @classmethod
    def load(
        cls, source: str | Path, classes: list[str], student: Preprocess, device: torch.device | str = "cpu"
    ) -> Teacher:
        """Any checkpoint, hub name or foreign folder; `student` is the preprocess of the model that learns."""
        model, report = load_with_report(source)
        teacher = cls(model.to(device), classes, student, str(source))
        teacher.notes += [f"{source}: {note}" for note in report.notes]
        return teacher

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """The student's images (B, C, H, W), normalised for it -> logits (B, K), in the order of the data's classes."""
        return self.answer(self.view(images))

    @torch.no_grad()
    def answer(self, images: Tensor) -> Tensor:
        """Images in the teacher's own preprocessing -> (B, K)."""
        logits = self.model(images)
        return logits if self.order is None else logits[:, self.order]

    def view(self, images: Tensor) -> Tensor:
        """The student's images, normalised and resized for the teacher."""
        if self.gain is not None and self.offset is not None:
            images = images * self.gain + self.offset  # one channel becomes as many as the teacher has
        if tuple(images.shape[-2:]) != self.preprocess.size:
            mode = "bicubic" if self.preprocess.interpolation in ("bicubic", "lanczos") else "bilinear"
            images = F.interpolate(images, self.preprocess.size, mode=mode, antialias=True)
        return images

    def _adapt(self, student: Preprocess) -> None:
        """x = (p - m_s) / s_s is what the student sees of a pixel p, (p - m_t) / s_t what the teacher does: a x + b."""
        own = self.preprocess
        if student.pixels != own.pixels:
            ours, theirs = (kind.stored or "photos" for kind in (student, own))
            raise TrainingError(f"{self.name} sees {theirs}, and the student {ours}: use a teacher that sees the same.")
        if len(student.mean) not in (1, len(own.mean)):
            raise TrainingError(
                f"{self.name} sees grey images and the student colours: use a teacher of 3 channels, or "
                "model.channels=1."
            )
        m_s, s_s, m_t, s_t = (torch.tensor(v).reshape(-1, 1, 1) for v in (student.mean, student.std, own.mean, own.std))
        scale = own.scale / student.scale
        same = (student.mean, student.std, student.scale) == (own.mean, own.std, own.scale)
        self.gain = None if same else (s_s * scale / s_t).to(self.device)  # (C, 1, 1)
        self.offset = None if same else ((m_s * scale - m_t) / s_t).to(self.device)

    def _order(self) -> list[int] | None:
        """For each class of the data the teacher's output; None where they are in the same order."""
        labels, count = self.model.labels, self.model.classes
        remedy = (
            f"Train a teacher on these data: vitlab train DATA model.init_from={self.name} run.dir=runs/teacher, then "
            "objective.teacher=runs/teacher/best"
        )
        if not count:
            raise TrainingError(f"{self.name} has no classes, so it cannot answer. {remedy}")
        if self.model.task.kind != "class":
            raise TrainingError(f"{self.name} gives {self.model.task.description}, and no classes. {remedy}")
        if labels is None and count == len(self.classes):
            self.notes.append(
                f"{self.name} does not name its classes: they are taken to be {first_few(self.classes)}, in this order."
            )
            return None
        order = None if labels is None else class_order(labels, self.classes)
        if order is None:
            what = f"{count} classes, which it does not name, and the data have {len(self.classes)}"
            if labels is not None:
                what = "other classes than the data: " + differing(labels, self.classes, "the teacher", "the data")
            raise TrainingError(f"{self.name} has {what}. {remedy}")
        return None if order == list(range(count)) else order

    def fingerprint(self) -> str:
        """Digest of all that decides its answers: weights, config, preprocess, order of classes."""
        identity = [self.model.family, self.model.config.to_dict(), self.preprocess.to_dict(), self.classes, self.order]
        digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16)
        for key, value in sorted(self.model.state_dict().items()):
            digest.update(key.encode())
            digest.update(value.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


class Answers:
    """A teacher's logits for every training image without augmentation: (N, K), float16, on disk."""

    def __init__(self, folder: Path, logits: np.ndarray):
        self.folder, self.logits = folder, logits

    def take(self, indices: Tensor) -> Tensor:
        """Of these images, by their numbers in the training set: (B,) -> (B, K)."""
        logits = torch.from_numpy(self.logits[indices.cpu().numpy()]).float()
        if not torch.isfinite(logits).all():
            bad = indices[~torch.isfinite(logits).all(dim=1).cpu()].tolist()
            raise TrainingError(
                f"{self.folder}: the teacher could not read image {bad[0]} when it was asked. Delete the folder, and "
                "it is asked again."
            )
        return logits


def keep_answers(
    folder: Path,
    teacher: Teacher,
    data: Dataset,
    name: str,
    *,
    who: Processes | None = None,
    batch_size: int = 256,
    rebuild: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Answers:
    """The answers stored in `folder`, computed where they are missing; an interrupted computation continues.

    Answers of another teacher, or to other images, are refused, or replaced with `rebuild`. `progress` is called
    with the number of images done, after each batch. The first process computes, the others wait.
    """
    (who or Processes()).only_first(
        lambda: _fill(folder, _header(teacher, data, name), teacher, data, batch_size, rebuild, progress)
    )
    return Answers(folder, np.load(folder / LOGITS, mmap_mode="r"))


class Header(TypedDict):
    """answers.json: what the stored answers are of."""

    format: int
    teacher: str
    teacher_fingerprint: str
    data: str
    data_fingerprint: str
    pictures: int
    classes: list[str]
    done: int  # images that are answered


def _header(teacher: Teacher, data: Dataset, name: str) -> Header:
    return {
        "format": FORMAT,
        "teacher": teacher.name,
        "teacher_fingerprint": teacher.fingerprint(),
        "data": name,
        "data_fingerprint": data_fingerprint(data),
        "pictures": len(data),
        "classes": teacher.classes,
        "done": 0,
    }


def data_fingerprint(data: Dataset) -> str:
    """Digest of the images in their order: of their pixels where they are in memory, otherwise of their names."""
    digest = hashlib.blake2b(np.ascontiguousarray(data.labels).tobytes(), digest_size=16)
    if data.images is not None:
        digest.update(np.ascontiguousarray(data.images).tobytes())
    else:
        for index in range(len(data)):
            digest.update(data.name_of(index).encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def _fill(
    folder: Path,
    header: Header,
    teacher: Teacher,
    data: Dataset,
    batch_size: int,
    rebuild: bool,
    progress: Callable[[int], object] | None,
) -> None:
    header, logits = _open(folder, header, rebuild)
    if progress is not None and header["done"]:
        progress(header["done"])
    starts = range(header["done"], len(data), batch_size)
    for number, first in enumerate(starts, 1):
        part = np.arange(first, min(first + batch_size, len(data)))
        try:
            images, kept = ImageSet(subset(data, part), teacher.preprocess).normalised(np.arange(len(part)))
            answers = teacher.answer(images.to(teacher.device)).float().clamp(-6e4, 6e4)  # float16 ends at 65504
            logits[part[kept]] = answers.cpu().numpy()
        except ImageError:
            pass  # none of them can be read: training skips them too
        if progress is not None:
            progress(len(part))
        if number % SAVE_EVERY == 0 or number == len(starts):
            logits.flush()
            _write(folder, {**header, "done": int(part[-1]) + 1})


def _open(folder: Path, header: Header, rebuild: bool) -> tuple[Header, np.memmap]:
    """The stored answers, checked to be of this teacher and these images; or a new file of NaN."""
    shape = (header["pictures"], len(header["classes"]))
    if (folder / HEADER).is_file() and not rebuild:
        stored = read_json(folder / HEADER)
        _check(folder, stored, header)
        try:
            np.load(folder / LOGITS, mmap_mode="r")  # opened for writing, a file that is cut off would be filled up
            logits = np.lib.format.open_memmap(folder / LOGITS, mode="r+")
        except (OSError, ValueError) as error:
            raise TrainingError(f"{folder / LOGITS}: is damaged ({error}). Delete {folder}.") from None
        if (logits.shape, logits.dtype) != (shape, np.float16):
            raise TrainingError(f"{folder / LOGITS}: holds {logits.shape} of {logits.dtype}. Delete {folder}.")
        return cast("Header", stored), logits
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HEADER).unlink(missing_ok=True)  # until the new file is there, nothing says what is in it
    logits = np.lib.format.open_memmap(folder / LOGITS, mode="w+", dtype=np.float16, shape=shape)
    logits[:] = np.nan
    logits.flush()
    _write(folder, header)
    return header, logits


def _check(folder: Path, stored: Mapping[str, object], expected: Header) -> None:
    problems = {
        "format": "the answers of another version of vitlab",
        "teacher_fingerprint": f"the answers of another teacher ({stored.get('teacher')}, not {expected['teacher']})",
        "data_fingerprint": f"answers to other images ({stored.get('data')}, {stored.get('pictures')} images, not "
        f"{expected['data']}, {expected['pictures']})",
    }
    for key, what in problems.items():
        if stored.get(key) != expected[key]:
            raise TrainingError(f"{folder} holds {what}. Delete it to ask anew, or name another folder.")
    done = stored.get("done")
    if not isinstance(done, int) or not 0 <= done <= expected["pictures"]:
        raise TrainingError(f"{folder / HEADER}: done={done!r} is not a number of images. Delete {folder}.")


def _write(folder: Path, header: Header) -> None:
    native.write_text(folder / HEADER, json.dumps(header, indent=2, ensure_ascii=False) + "\n")
