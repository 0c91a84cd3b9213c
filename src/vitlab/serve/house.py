"""The models of a server, by name: what each can do, its thread, and how many requests it has accepted."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vitlab.checkpoints import bundled
from vitlab.checkpoints.load import load
from vitlab.explain.inputs import check_model
from vitlab.inference import check_predicts, reads_text
from vitlab.models.base import features_of
from vitlab.serve.batching import Worker
from vitlab.serve.errors import RefusedError, busy, logger
from vitlab.serve.settings import Settings

SUFFIXES = (".onnx", ".pt2", ".safetensors", ".npz", ".pth", ".pt", ".bin")
VERBS = ("predict", "embed", "zeroshot", "explain")


class Remembered:
    """The last so many values, by key."""

    def __init__(self, size: int):
        self.size, self._values = size, OrderedDict()

    def get(self, key: Hashable) -> Any:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Hashable, value: Any) -> None:
        self._values[key] = value
        if len(self._values) > self.size:
            self._values.popitem(last=False)


@dataclass
class Served:
    """A model and its name."""

    name: str
    model: Any
    refuses: dict[str, str] = field(default_factory=dict)  # verb -> why
    worker: Worker = None  # type: ignore[assignment]  # until `House.start`
    room: int = 1  # requests that may be inside
    inside: int = 0
    labels: Remembered = field(default_factory=lambda: Remembered(4096))  # (label, templates) -> its vector

    @property
    def verbs(self) -> list[str]:
        return [verb for verb in VERBS if verb not in self.refuses]

    @property
    def to_explain(self) -> Any:
        """Of a network around an encoder, the encoder."""
        return getattr(self.model, "encoder", self.model)

    def check_room(self) -> None:
        if self.inside >= self.room:
            seconds = self.inside * self.worker.pace
            raise busy(f"the queue of {self.name} is full: {self.inside} requests are before yours.", seconds)

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of the model's places, for as long as a request is in its hands."""
        self.check_room()
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def about(self) -> dict[str, Any]:
        height, width = self.model.preprocess.size
        found = {"name": self.name, "family": self.model.family, "verbs": self.verbs}
        found["classes"] = 0 if "predict" in self.refuses else self.model.config.classes
        count = sum(p.numel() for p in self.model.parameters()) or None  # of an exported file it is not known
        return found | {"image_size": [height, width], "parameters": count}


class House:
    """All models, in the order they were named."""

    def __init__(self, models: Iterable[Served], settings: Settings):
        self.models = {served.name: served for served in models}
        self.settings = settings
        self.draining = False
        self.warm = False
        self.broken: list[str] = []  # models that failed when they were warmed up

    @property
    def ready(self) -> bool:
        return self.warm and not self.draining and not self.broken

    def start(self) -> None:
        for served in self.models.values():
            limits = self.settings
            served.room = limits.queue
            served.worker = Worker(served.name, max_batch=limits.max_batch, max_wait=limits.max_wait)

    async def warm_up(self) -> None:
        """Every model sees one grey picture, so that the first request is as fast as the others."""
        from PIL import Image

        for served in self.models.values():
            verb = next((verb for verb in ("predict", "embed") if verb in served.verbs), None)
            if verb is None:
                continue
            tensor = served.model.preprocess(Image.new("RGB", (64, 48), "grey"))
            try:
                await served.worker.run(*task(served, verb), tensor, time.monotonic() + 600)
            except Exception as error:  # whatever it is, the other models go on
                logger.error("%s fails", served.name, exc_info=error)
                self.broken.append(served.name)
        self.warm = True

    def stop(self) -> None:
        for served in self.models.values():
            served.worker.stop()

    def find(self, name: str | None, verb: str | None) -> Served:
        """The model that a request names; without a name, the first that can do this. None: nothing is asked of it."""
        if name is None:
            able = [served for served in self.models.values() if verb is None or verb in served.verbs]
            if not able:
                why = next(iter(self.models.values())).refuses[str(verb)]
                raise RefusedError(422, f"no model here can {verb}. {why}", "Start the server with one that can.")
            return able[0]
        served = self.models.get(name)
        if served is None:
            near = get_close_matches(name, self.models, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            there = ", ".join(self.models)
            raise RefusedError(404, f"there is no model {name[:100]!r} here.", f"{hint}There are: {there}.")
        if verb in served.refuses:
            able = ", ".join(other.name for other in self.models.values() if verb in other.verbs)
            remedy = f"Ask another: {able}." if able else f"It can {', '.join(served.verbs)}."
            raise RefusedError(422, f"{served.name} cannot {verb}. {served.refuses[verb]}", remedy)
        return served


def task(served: Served, verb: str) -> tuple[Callable[[list[Any]], list[Any]], str]:
    """What the worker does with a batch of prepared pictures, and how such work is called."""
    from vitlab.inference import class_probabilities, image_features, image_vectors

    run = {"predict": class_probabilities, "embed": image_vectors, "zeroshot": image_features}[verb]
    return (lambda tensors: list(run(served.model, tensors))), verb


def open_models(sources: Iterable[str] = (), load: Callable[[str], Any] = load) -> list[Served]:
    """NAME=CHECKPOINT, or a checkpoint that is called by its own name; without any, all bundled models."""
    wanted = list(sources) or [f"{bundled.PREFIX}{name}" for name in bundled.names()]
    found: dict[str, Served] = {}
    for source in wanted:
        name, source = _split(source)
        model = load(source)
        if model.preprocess is None:
            raise ValueError(f"{source}: the model has no preprocess, so it cannot read pictures.")
        name = name if name and name not in found else free_name(source, found)
        found[name] = Served(name, model.eval(), refusals(model))
    return list(found.values())


def called(source: str) -> str:
    """bundled:digits -> digits, runs/cats/best -> cats, hf-hub:google/vit-base-patch16-224 -> vit-base-patch16-224."""
    parts = [part for part in re.split(r"[/\\]", source.partition(":")[2] or source) if part not in ("", ".", "..")]
    if len(parts) > 1 and parts[-1] in ("best", "last"):
        parts = parts[:-1]
    name = parts[-1] if parts else "model"
    return Path(name).stem if Path(name).suffix in SUFFIXES else name


def free_name(source: str, taken: Container[str]) -> str:
    """What a model of this source is called where others are; the second cats is cats-2."""
    name, number = called(source), 1
    while name in taken:
        number += 1
        name = f"{called(source)}-{number}"
    return name


def refusals(model: Any) -> dict[str, str]:
    """Which verbs a model cannot do, and why."""
    checks = {
        "predict": lambda: check_predicts(model),
        "embed": lambda: features_of(model),
        "zeroshot": lambda: _check_words(model),
        "explain": lambda: check_model(model.encoder),
    }
    found = {}
    for verb, check in checks.items():
        try:
            check()
        except ValueError as error:
            found[verb] = str(error)
    return found


def _check_words(model: Any) -> None:
    if not reads_text(model):
        raise ValueError(f"A model of the family {model.family} reads no words: this needs a CLIP.")
    if model.tokenizer is None:
        raise ValueError("This CLIP came without its tokenizer, so it reads no words.")


def _split(source: str) -> tuple[str | None, str]:
    name, equals, rest = source.partition("=")
    if equals and not Path(source).exists() and re.fullmatch(r"[\w.-]+", name):
        return name, rest
    return None, source
