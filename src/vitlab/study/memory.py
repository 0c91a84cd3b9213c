"""Peak memory of a forward pass, from the allocations that torch's profiler records.

It counts tensors: activations and buffers of torch's kernels, without weights and images. It is exact and reproducible;
scratch space inside libraries is not counted. It runs in its own process, because the profiler writes to stderr and a
size too large may kill the process:

    peak_memory({"vit@96": (("vit_tiny", {"attention": "explicit"}), 96)}, batch=1)     # {"vit@96": bytes}
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from vitlab.factory import create
from vitlab.study.model_spec import ModelSpec


def peak_memory(models: dict[str, tuple[ModelSpec, int]], batch: int) -> dict[str, int]:
    """Bytes for each model and image size; those after a killed process are missing."""
    task = json.dumps({"models": models, "batch": batch})
    command = [sys.executable, "-m", "vitlab.study.memory"]
    done = subprocess.run(command, input=task, capture_output=True, text=True, check=False, encoding="utf-8")
    return dict(json.loads(line) for line in done.stdout.splitlines())


def forward_bytes(name: str, options: dict[str, object], size: int, batch: int) -> int:
    """Peak bytes of a forward pass; caches that are filled once are not counted."""
    model = create(name, **{**options, "image_size": size}).eval()
    images = torch.randn(batch, model.config.channels, size, size)
    with torch.inference_mode():
        model(images)
        return peak_bytes(lambda: model(images))


def peak_bytes(call: Callable[[], object]) -> int:
    """Peak bytes allocated during a call, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    recorded: Any = profiler.profiler
    events = [(e.start_ns(), e.nbytes()) for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for _, change in sorted(events, key=lambda event: event[0]):  # releases are negative
        alive += change
        peak = max(peak, alive)
    return peak


if __name__ == "__main__":
    task = json.loads(sys.stdin.read())
    for label, ((name, options), size) in task["models"].items():
        peak = forward_bytes(name, options, size, task["batch"])
        sys.stdout.write(json.dumps([label, peak]) + "\n")
        sys.stdout.flush()
