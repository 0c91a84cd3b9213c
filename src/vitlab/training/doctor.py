"""What is wrong with a run, in plain words: a loss that is NaN or explodes, the layer where it starts, and a remedy."""

from __future__ import annotations

import json
import math
import platform
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vitlab.layers.trace import Trace


class TrainingError(ValueError):
    """A run that cannot go on; the message says where, why and what to try."""


def explodes(loss: float) -> bool:
    """NaN, infinite, or so large that no classifier comes back from it (chance on 1000 classes is 6.9)."""
    return not math.isfinite(loss) or loss > 1e4


def first_bad_layer(model: Any, images: Tensor) -> str:
    """The first step of a forward pass whose values are not finite, or the first parameter that is not."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"the weights of {name} are not finite"
    if not torch.isfinite(images).all():
        return "the images of the batch hold NaN or infinity"
    encoder = getattr(model, "encoder", model)  # of a model that is pre-trained
    trace = Trace(*encoder.traceable)
    with torch.no_grad():
        encoder(images, trace=trace)
    for (kind, layer), value in trace.items():
        if not torch.isfinite(value).all():
            where = f"block {layer}, {kind}" if layer is not None else kind
            return f"the first values that are not finite come out of {where}"
    return "every layer gives finite values: the loss itself, or its gradient, broke"


def stop_run(run: Path, model: Any, inputs: dict[str, Tensor], numbers: dict[str, Any]) -> TrainingError:
    """Save what is needed to replay the step, and say what happened and what to try."""
    cause = first_bad_layer(model, next(iter(inputs.values())))
    folder = run / "replay"
    folder.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in inputs.items()}, folder / "batch.safetensors")
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "weights.safetensors")
    (folder / "step.json").write_text(json.dumps({**numbers, "cause": cause}, default=str, indent=2) + "\n")
    return TrainingError(
        f"step {numbers['step']} (epoch {numbers['epoch']}): the loss is {numbers['loss']}; {cause}. "
        f"Images of the batch: {numbers['indices'][:8]} ... Try optim.lr={numbers['lr'] / 3:.1e}, a longer warm-up "
        f"(optim.warmup_epochs), optim.clip=1.0, or run.amp=off. The batch and weights are in {folder}."
    )


def check_installation() -> list[tuple[str, bool, str]]:
    """(what, is it well, words) for everything training needs."""
    rows: list[tuple[str, bool, str]] = [("python", True, platform.python_version())]
    for name in ("torch", "numpy", "PIL", "safetensors", "sklearn", "rich", "matplotlib", "huggingface_hub"):
        rows.append(_imports(name, needed=True))
    for name in ("transformers", "wandb", "tensorboard"):
        rows.append(_imports(name, needed=False))
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    rows.append(("device", True, f"{device}, {torch.get_num_threads()} threads"))
    with torch.no_grad():
        product = float((torch.ones(64, 64) @ torch.ones(64, 64)).sum())
    rows.append(("matrix product", product == 64.0**3, "right" if product == 64.0**3 else f"wrong: {product}"))
    return rows


def _imports(name: str, needed: bool) -> tuple[str, bool, str]:
    import importlib

    try:
        module = importlib.import_module(name)
    except Exception as error:
        return name, not needed, f"{'missing' if needed else 'not installed (optional)'}: {type(error).__name__}"
    return name, True, str(getattr(module, "__version__", "installed"))
