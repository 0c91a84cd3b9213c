"""The most memory that a forward pass holds at once, as torch's profiler sees every allocation and release.

What counts is tensors: activations and the buffers of torch's own kernels, without weights and images. It is exact and
the same every time; scratch space that a library takes for itself is not in it. It runs in a process of its own,
because the profiler writes lines of its own to stderr and a size too large may end the process:

    peaks({"vit@96": (("vit_tiny", {"attention": "explicit"}), 96)}, batch=1)     # {"vit@96": bytes}
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from vitlab.study.model_spec import Named


def peaks(asked: dict[str, tuple[Named, int]], batch: int) -> dict[str, int]:
    """Bytes for each model and image size; those that the process did not live to measure are left out."""
    lines = json.dumps([[name, *named, size, batch] for name, (named, size) in asked.items()])
    command = [sys.executable, "-m", "vitlab.study.memory"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    return dict(json.loads(line) for line in done.stdout.splitlines())


def peak_of(call: Callable[[], object]) -> int:
    """Bytes that were alive at once during a call, beyond those before it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    recorded: Any = seen.profiler
    events = [(e.start_ns(), e.nbytes()) for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for _, change in sorted(events, key=lambda event: event[0]):  # releases are negative
        alive += change
        most = max(most, alive)
    return most


def main() -> None:
    import torch

    from vitlab.checkpoints.load import create

    for called, name, options, size, batch in json.loads(sys.stdin.read()):
        model = create(name, **{**options, "image_size": size}).eval()
        images = torch.randn(batch, model.config.channels, size, size)
        with torch.inference_mode():
            model(images)  # what is made once and kept is not the pass's
            most = peak_of(lambda model=model, images=images: model(images))
        sys.stdout.write(json.dumps([called, most]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
