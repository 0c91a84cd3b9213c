"""What is wrong with a run, in plain words: a loss that is NaN or explodes, the layer where it starts, and a remedy."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vitlab.errors import CheckpointError, TrainingError, VitlabError
from vitlab.layers.trace import Trace
from vitlab.models.base import Network
from vitlab.optional import missing_package
from vitlab.training.objectives import DEFAULT, objective_class
from vitlab.training.recipe import read_recipe
from vitlab.training.run_lock import lock_holder
from vitlab.training.runlog import from_json, read_log, to_json
from vitlab.training.state import check_best, check_recipe_file, check_result, generations, read_save


class DivergedError(TrainingError):
    """A run that cannot continue; the message says where, why and what to try."""


def explodes(loss: float) -> bool:
    """NaN, infinite, or so large that no classifier comes back from it (chance on 1000 classes is 6.9)."""
    return not math.isfinite(loss) or loss > 1e4


def first_bad_layer(model: Network, images: Tensor) -> str:
    """The first step of a forward pass whose values are not finite, or the first parameter that is not."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"the weights of {name} are not finite"
    if not torch.isfinite(images).all():
        return "the images of the batch hold NaN or infinity"
    trace = Trace(*model.encoder.traceable)
    with torch.no_grad():
        model.encoder(images, trace=trace)
    for (kind, layer), value in trace.items():
        if not torch.isfinite(value).all():
            where = f"block {layer}, {kind}" if layer is not None else kind
            return f"the first values that are not finite come out of {where}"
    return "every layer gives finite values: the loss itself, or its gradient, broke"


def stop_run(run: Path, model: Network, inputs: dict[str, Tensor], numbers: dict[str, Any]) -> DivergedError:
    """Save what is needed to replay the step, and say what happened and what to try."""
    cause = first_bad_layer(model, next(iter(inputs.values())))
    folder = run / "replay"
    folder.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in inputs.items()}, folder / "batch.safetensors")
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "weights.safetensors")
    (folder / "step.json").write_text(to_json({**numbers, "cause": cause}), encoding="utf-8")
    return DivergedError(
        f"step {numbers['step']} (epoch {numbers['epoch']}): the loss is {numbers['loss']}; {cause}. "
        f"Images of the batch: {numbers['indices'][:8]} ... Try optim.lr={numbers['lr'] / 3:.1e}, a longer warm-up "
        f"(optim.warmup_epochs), optim.clip=1.0, or run.amp=off. The batch and weights are in {folder}."
    )


WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"


def check_half(amp: str, device: torch.device) -> None:
    """Refuse bf16 and fp16 on a processor that would kill the process for them."""
    if amp != "off" and device.type == "cpu" and not half_works():
        raise TrainingError(
            f"run.amp={amp}: this processor says that it has AMX, but the system does not let it be used, and torch "
            f"would die of an illegal instruction. Type {WITHOUT_AMX} before the command, or set run.amp=off."
        )


def half_works() -> bool:
    """Whether half precision works, tried in a subprocess where the processor reports AMX."""
    about = Path("/proc/cpuinfo")
    if (
        "ONEDNN_MAX_CPU_ISA" in os.environ
        or not about.is_file()
        or " amx_tile" not in about.read_text(encoding="utf-8")
    ):
        return True
    code = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def check_run(run: Path) -> list[tuple[bool | None, str]]:
    """(passed, message) for each check of a run folder; None: a fact that is neither good nor bad."""
    if not (run / "recipe.toml").is_file():
        raise TrainingError(f"{run}: holds no recipe.toml, so it is not a run. `vitlab runs` lists those in runs/.")
    rows = check_files(run)
    replay = run / "replay" / "step.json"
    if replay.is_file():
        try:
            step = from_json(replay.read_bytes())
            broke = f"the run broke at step {step['step']}: loss {step['loss']}; {step['cause']}."
            remedy = f"Its batch and weights are in {replay.parent}. Try optim.lr={step['lr'] / 3:.1e}."
        except (ValueError, KeyError, TypeError) as error:
            raise TrainingError(
                f"{replay}: cannot be read ({error}). The run broke; {run / 'log.jsonl'} shows its last steps."
            ) from None
        return [*rows, (False, broke), (None, remedy)]
    log = read_log(run)
    if skipped := [e for e in log if e["kind"] == "skip"]:
        rows.append((False, f"{len(skipped)} images could not be read, e.g. {skipped[0].get('message')}"))
    rows += [(False, text) for text in dict.fromkeys(str(e.get("text")) for e in log if e["kind"] == "doctor")]
    if lines := [e for e in log if e["kind"] == "train" and isinstance(e.get("loss"), int | float)]:
        rows.append(objective_class(_objective_name(run)).describe_loss(lines))
    finished = (run / "result.json").is_file()
    unfinished = f"the run is not finished. Go on: vitlab train --resume {run}"
    return [*rows, (True, "the run is finished") if finished else (None, unfinished)]


def check_files(run: Path) -> list[tuple[bool | None, str]]:
    """Every save, the best model, recipe and result, compared with their digests."""
    if holder := lock_holder(run):
        return [(None, f"being written by {holder}; its files are not checked meanwhile")]
    rows: list[tuple[bool | None, str]] = []
    newest, with_ema = None, read_recipe(run / "recipe.toml").optim.ema > 0
    for folder in generations(run):
        try:
            saved = read_save(folder, with_ema)
        except (CheckpointError, OSError) as error:
            rows.append((False, f"{folder.name}: damaged. {error}"))
            continue
        newest = newest or saved
        rows.append((True, f"{folder.name}: whole, saved at step {saved.progress.step}"))
    if newest is None:
        message = "no save is whole" if rows else "nothing was saved yet"
        return [*rows, (False if rows else None, message)]
    checks = {"best": check_best, "recipe.toml": check_recipe_file, "result.json": check_result}
    for name, check in checks.items():
        try:
            check(run, newest)
        except (CheckpointError, OSError) as error:
            rows.append((False, str(error)))
        else:
            rows += [(True, f"{name}: whole")] if (run / name).exists() else []
    return rows


def _objective_name(run: Path) -> str:
    try:
        return read_recipe(run / "recipe.toml").objective.name
    except VitlabError:  # damaged: check_files reports it
        return DEFAULT


def check_installation() -> list[tuple[str, bool, str]]:
    """(name, passed, message) for everything training needs."""
    rows: list[tuple[str, bool, str]] = [("python", True, platform.python_version())]
    for name in ("torch", "numpy", "PIL", "safetensors", "sklearn", "rich", "matplotlib", "huggingface_hub"):
        rows.append(_imports(name, needed=True))
    for name in ("transformers", "wandb", "tensorboard"):
        rows.append(_imports(name, needed=False))
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    rows.append(("device", True, f"{device}, {torch.get_num_threads()} threads"))
    with torch.no_grad():
        product = float((torch.ones(64, 64) @ torch.ones(64, 64)).sum())
    half = half_works()
    message = "right" if half else f"would kill the process (AMX is reported and not allowed): set {WITHOUT_AMX}"
    rows.append(("half precision", True, message))  # float32 does without
    rows.append(("matrix product", product == 64.0**3, "right" if product == 64.0**3 else f"wrong: {product}"))
    return rows


def _imports(name: str, needed: bool) -> tuple[str, bool, str]:
    import importlib

    try:
        module = importlib.import_module(name)
    except Exception as error:
        advice = missing_package(error) or type(error).__name__
        return name, not needed, f"{'missing' if needed else 'not installed (optional)'}: {advice}"
    return name, True, str(getattr(module, "__version__", "installed"))
