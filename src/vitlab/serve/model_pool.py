"""The models of a server by name: what each supports, its worker, and how many requests it has accepted."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from PIL import Image
from torch import Tensor

from vitlab import inference
from vitlab.checkpoints import bundled
from vitlab.errors import UsageError, VitlabError
from vitlab.explain.inputs import token_model
from vitlab.explain.walk import ForwardView
from vitlab.export.optimize import Optimized
from vitlab.images.preprocess import Preprocess
from vitlab.models.base import Network, features_of
from vitlab.serve.batching import Worker
from vitlab.serve.errors import RequestError, busy_error, logger
from vitlab.serve.settings import Settings

Value = TypeVar("Value")

SUFFIXES = (".onnx", ".pt2", ".safetensors", ".npz", ".pth", ".pt", ".bin")
VERBS = ("predict", "embed", "zeroshot", "explain")
BATCH_FUNCTIONS = {
    "predict": inference.class_probabilities,
    "embed": inference.image_vectors,
    "zeroshot": inference.image_features,
}


class LRUCache(Generic[Value]):
    """Keeps the `size` most recently used values."""

    def __init__(self, size: int):
        self.size, self._values = size, OrderedDict[Hashable, Value]()

    def get(self, key: Hashable) -> Value | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Hashable, value: Value) -> None:
        self._values[key] = value
        if len(self._values) > self.size:
            self._values.popitem(last=False)


@dataclass
class ServedModel:
    name: str
    model: Network
    engine: Optimized | None = None  # that answers predict in place of the model: see serve/engine.py
    preprocess: Preprocess = field(init=False)
    worker: Worker = field(init=False)  # set by `ModelPool.start`
    capacity: int = 1  # requests that may be in progress
    in_progress: int = 0
    label_cache: LRUCache[Tensor] = field(default_factory=lambda: LRUCache(4096))  # (label, templates) -> embedding
    pass_cache: LRUCache[ForwardView] = field(default_factory=lambda: LRUCache(2))  # of the page: as it is, and edited
    unsupported: dict[str, str] = field(init=False)  # verb -> reason

    def __post_init__(self) -> None:
        if self.model.preprocess is None:
            raise UsageError(f"{self.name}: the model has no preprocess, so it cannot read images.")
        self.preprocess = self.model.preprocess
        self.model.eval()
        self.unsupported = self._find_unsupported()

    @property
    def encoder(self) -> Network:
        """The image encoder; of most models, the model itself."""
        return self.model.encoder

    @property
    def verbs(self) -> list[str]:
        return [verb for verb in VERBS if verb not in self.unsupported]

    @property
    def fingerprint(self) -> str:
        """Of the weights that make its embeddings."""
        return inference.fingerprint(inference.encoder_of(self.model))

    def check_capacity(self) -> None:
        if self.in_progress >= self.capacity:
            error = f"the queue of {self.name} is full: {self.in_progress} requests are before yours."
            raise busy_error(error, self.in_progress * self.worker.seconds_per_image)

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Count a request as in progress."""
        self.check_capacity()
        self.in_progress += 1
        try:
            yield
        finally:
            self.in_progress -= 1

    def batch_function(self, verb: str) -> Callable[[list[Tensor]], list[Tensor]]:
        """Runs the verb on a batch of prepared images."""
        model: Network = self.engine if verb == "predict" and self.engine is not None else self.model
        return lambda tensors: list(BATCH_FUNCTIONS[verb](model, tensors))

    def summary(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "family": self.model.family,
            "verbs": self.verbs,
            "classes": self.model.config.classes if "predict" in self.verbs else 0,
            "image_size": list(self.preprocess.size),
            "parameters": sum(p.numel() for p in self.model.parameters()) or None,  # unknown of an exported file
        }

    def _find_unsupported(self) -> dict[str, str]:
        checks = {
            "predict": lambda: inference.check_predicts(self.model),
            "embed": lambda: features_of(self.model),
            "zeroshot": self._check_zero_shot,
            "explain": lambda: token_model(self.encoder),
        }
        reasons = {}
        for verb, check in checks.items():
            try:
                check()
            except VitlabError as error:
                reasons[verb] = str(error)
        return reasons

    def _check_zero_shot(self) -> None:
        if not inference.reads_text(self.model):
            raise UsageError(f"A model of the family {self.model.family} reads no text: this needs a CLIP or SigLIP.")
        if self.model.tokenizer is None:
            raise UsageError("This model has no tokenizer, so it reads no text.")


class ModelPool:
    """All models, in the order they were given."""

    def __init__(self, models: Iterable[ServedModel], settings: Settings):
        self.models = {served.name: served for served in models}
        self.settings = settings
        self.draining = False
        self.warm = False
        self.broken: list[str] = []  # models that failed in `warm_up`

    @property
    def ready(self) -> bool:
        return self.warm and not self.draining and not self.broken

    def start(self) -> None:
        limits = self.settings
        for served in self.models.values():
            served.capacity = limits.queue
            served.worker = Worker(served.name, max_batch=limits.max_batch, max_wait=limits.max_wait)

    async def warm_up(self) -> None:
        """Run every model on a grey image, so that the first request is as fast as the others."""
        for served in self.models.values():
            verb = next((verb for verb in ("predict", "embed") if verb in served.verbs), None)
            if verb is None:
                continue
            stored = served.preprocess.stored
            grey = Image.new("RGB", (64, 48), "grey")
            tensor = served.preprocess(grey if stored is None else np.ones((48, 64, stored.channels), stored.kind))
            try:
                await served.worker.run(served.batch_function(verb), verb, tensor, time.monotonic() + 600)
            except Exception as error:  # the other models still serve
                logger.error("%s fails", served.name, exc_info=error)
                self.broken.append(served.name)
        self.warm = True

    def stop(self) -> None:
        for served in self.models.values():
            served.worker.stop()

    def find(self, name: str | None, verb: str | None) -> ServedModel:
        """The model called `name`; without a name, the first that supports `verb`."""
        if name is None:
            able = [served for served in self.models.values() if verb is None or verb in served.verbs]
            if not able:
                reason = next(iter(self.models.values())).unsupported[str(verb)]
                raise RequestError(422, f"no model here can {verb}. {reason}", "Start the server with one that can.")
            return able[0]
        served = self.models.get(name)
        if served is None:
            near = get_close_matches(name, self.models, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            remedy = f"{hint}There are: {', '.join(self.models)}."
            raise RequestError(404, f"there is no model {name[:100]!r} here.", remedy)
        if verb in served.unsupported:
            able = ", ".join(other.name for other in self.models.values() if verb in other.verbs)
            remedy = f"Use another model: {able}." if able else f"It can {', '.join(served.verbs)}."
            raise RequestError(422, f"{served.name} cannot {verb}. {served.unsupported[verb]}", remedy)
        return served


def open_models(
    sources: Iterable[str] = (), image_size: tuple[int, int] | None = None, device: str = "cpu"
) -> list[ServedModel]:
    """Open checkpoints and exported files, each given as CHECKPOINT or NAME=CHECKPOINT. Default: all bundled models.

    `image_size`: of all of them, as in vitlab.load.
    """
    options = {} if image_size is None else {"image_size": image_size}
    models: dict[str, ServedModel] = {}
    for source in list(sources) or [f"{bundled.PREFIX}{name}" for name in bundled.names()]:
        name, checkpoint = _split_name(source)
        model = inference.open_model(checkpoint, device, **options)
        if not name or name in models:
            name = unique_name(checkpoint, models)
        models[name] = ServedModel(name, model)
    return list(models.values())


def default_name(source: str) -> str:
    """bundled:digits -> digits, runs/cats/best -> cats, hf-hub:google/vit-base-patch16-224 -> vit-base-patch16-224."""
    parts = [part for part in re.split(r"[/\\]", source.partition(":")[2] or source) if part not in ("", ".", "..")]
    if len(parts) > 1 and parts[-1] in ("best", "last"):
        parts = parts[:-1]
    name = parts[-1] if parts else "model"
    return Path(name).stem if Path(name).suffix in SUFFIXES else name


def unique_name(source: str, taken: Container[str]) -> str:
    """The source's default name; if it is taken, with a number: cats-2."""
    name, number = default_name(source), 1
    while name in taken:
        number += 1
        name = f"{default_name(source)}-{number}"
    return name


def _split_name(source: str) -> tuple[str | None, str]:
    """NAME=CHECKPOINT -> both."""
    name, equals, checkpoint = source.partition("=")
    if equals and not Path(source).exists() and re.fullmatch(r"[\w.-]+", name):
        return name, checkpoint
    return None, source
