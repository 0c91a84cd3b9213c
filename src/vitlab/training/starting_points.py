"""model.init_from=auto: which trained weights a run on somebody's own images starts from.

start = find_start(Need(images=4_000, seconds=600.0, device="cpu"))
start.name, start.licence, start.why                       # name is None where there is nothing to start from
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from vitlab.checkpoints import hub
from vitlab.checkpoints.hub_models import BY_NAME
from vitlab.errors import CheckpointError

SHARE = 0.5  # of the time that running the encoder over the images once may take
BUNDLED = "bundled:dino"  # where nothing else can be had: small, and better than nothing


@dataclass(frozen=True)
class StartingPoint:
    """Weights whose features are known to transfer; the most capable first in the table below."""

    name: str  # on the hub
    cost: float  # GMACs for one image of its own size
    devices: tuple[str, ...]  # where tuning it takes minutes and not hours
    about: str


STARTING_POINTS = (  # all under a permissive licence (hub_models.py has them)
    StartingPoint("facebook/dinov2-base", 22.2, ("cuda", "mps"), "its features transfer best at this size"),
    StartingPoint("facebook/dinov2-small", 5.7, ("cuda", "mps", "cpu"), "it has the best features for its cost"),
    StartingPoint("WinKawaks/vit-tiny-patch16-224", 1.3, ("cpu",), "it is four times cheaper than DINOv2-small"),
)


@dataclass(frozen=True)
class Need:
    """What the weights are for."""

    images: int  # that go through the encoder once
    seconds: float | None  # for the whole run; None: as long as it takes
    device: str


@dataclass(frozen=True)
class Start:
    """Where a run starts from, and why."""

    name: str | None  # for model.init_from; None: from scratch
    why: str
    licence: str | None = None
    expected: float | None = None  # seconds for running the encoder over the images once

    def __str__(self) -> str:
        if self.name is None:
            return f"no trained weights: {self.why}. {BUNDLED} and a new network are compared"
        terms = f", licence {self.licence}" if self.licence else ""
        return f"starting from {self.name}{terms}: {self.why}"


def find_start(need: Need) -> Start:
    """The first of the table that suits the device and the time, and is in the hub's cache or can be downloaded."""
    speed = machine_speed(need.device)
    suitable = [point for point in STARTING_POINTS if need.device in point.devices]
    in_time = [p for p in suitable if need.seconds is None or need.images * p.cost / speed <= SHARE * need.seconds]
    order = [*in_time, *reversed([point for point in suitable if point not in in_time])]  # then the cheapest
    failed = ""
    for point in order:
        try:
            hub.fetch(hub.PREFIX + point.name)
        except CheckpointError as error:
            failed = failed or str(error)
            continue
        model, seconds = BY_NAME[point.name], need.images * point.cost / speed
        why = f"{point.about}; about {seconds:.0f} s for {need.images:,} images on this {need.device}"
        return Start(hub.PREFIX + point.name, why, model.licence, seconds)
    return Start(None, f"{failed.rstrip('.')}. Without them a small set of photos is learned far less well")


def machine_speed(device: str) -> float:
    """About how many GMACs a second a ViT runs at here: half of what one large matrix product reaches."""
    n, times = 1024, []
    a = torch.randn(n, n, device=device)
    for _ in range(6):
        began = time.perf_counter()
        float((a @ a)[0, 0])  # reading a number waits for the device
        times.append(time.perf_counter() - began)
    return 0.5 * n**3 / min(times) / 1e9
