"""Runs a learner's file in a process of its own: `python -m vitlab.learn.child FILE FOLDER`.

FOLDER holds the task (task.json, case0.safetensors, ...); the answer is written beside it (answer.json,
output0.safetensors, ...). What goes wrong in the learner's code is an answer too. An endless loop ends itself: the
watchdog writes where it was to stuck.txt.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import json
import linecache
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

MOST_STEPS, MOST_VALUES = 3000, 100_000


class LearnerError(Exception):
    """What is wrong with the file, by a key of messages.toml and what it says."""

    def __init__(self, key: str, **said: Any):
        super().__init__(key)
        self.key, self.said = key, said


class Recorder(TorchFunctionMode):
    """Every tensor that a forward pass computes, in order. A learner's code has no Trace to ask."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if type(value) in (Tensor, nn.Parameter) and value.is_floating_point() and value.numel() <= MOST_VALUES:
                self.found += [value.detach().clone()] * (len(self.found) < MOST_STEPS)
        return result


def examine(file: Path, task: dict[str, Any], cases: list[dict[str, Tensor]]) -> tuple[dict, list[dict[str, Tensor]]]:
    """Answer and outputs; what the learner's code raises becomes an answer."""
    outputs: list[dict[str, Tensor]] = []
    try:
        made = _class(_import(file), task["class_name"])
        for number, case in enumerate(cases):
            module = _build(made, task["arguments"][number], task["signature"], file)
            weights = {key.removeprefix("weight."): v for key, v in case.items() if key.startswith("weight.")}
            _copy(weights, module)
            outputs.append(_run(module.eval(), case["input"], case["probe"], file))
    except LearnerError as failed:
        return {"failed": failed.key, **failed.said, "case": len(outputs)}, outputs
    return {"failed": None}, outputs


def _import(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"learner_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise LearnerError("not python", file=file.name)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))  # so that the learner's other files can be imported
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise LearnerError(
            "syntax", file=Path(error.filename or file).name, line=error.lineno, code=line, error=error.msg
        ) from None
    except (Exception, SystemExit) as error:
        raise LearnerError("import", **_where(error, file)) from None
    finally:
        sys.path.remove(str(file.parent))
    return module


def _class(module: ModuleType, name: str) -> type[nn.Module]:
    made = getattr(module, name, None)
    own = [k for k, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__]
    if made is None:
        raise LearnerError("no class", name=name, found=", ".join(own) or "-")
    if not (inspect.isclass(made) and issubclass(made, nn.Module)):
        raise LearnerError("no module", name=name)
    return made


def _build(made: type[nn.Module], arguments: list, signature: str, file: Path) -> nn.Module:
    arguments = [tuple(a) if isinstance(a, list) else a for a in arguments]
    try:
        inspect.signature(made).bind(*arguments)
    except TypeError as error:
        raise LearnerError(
            "signature", signature=signature, found=f"{made.__name__}{inspect.signature(made)}", error=str(error)
        ) from None
    try:
        return made(*arguments)
    except NotImplementedError:
        raise LearnerError("to write") from None
    except Exception as error:
        raise LearnerError("init", **_where(error, file)) from None


def _copy(weights: dict[str, Tensor], module: nn.Module) -> None:
    """Our weights into the learner's module; the matrix of patches may be a convolution's or a linear layer's."""
    own = module.state_dict()
    parameters = {key for key, _ in module.named_parameters()}
    missing = [key for key in weights if key not in own]
    extra = [key for key in parameters if key not in weights]
    if missing or extra:
        like = [f"{a} -> {b}" for b in missing for a in extra if own[a].shape == weights[b].shape]
        raise LearnerError(
            "names", missing=", ".join(missing) or "-", extra=", ".join(sorted(extra)) or "-", like=", ".join(like[:4])
        )
    for key, weight in weights.items():
        fits = own[key].shape == weight.shape or own[key].shape == weight.flatten(1).shape
        if not fits:
            shapes = [" x ".join(map(str, w.shape)) for w in (own[key], weight)]
            raise LearnerError("weight shape", name=key, found=shapes[0], wanted=shapes[1])
        with torch.no_grad():
            own[key].copy_(weight.reshape(own[key].shape))


def _run(module: nn.Module, x: Tensor, probe: Tensor, file: Path) -> dict[str, Tensor]:
    given = x.clone()
    recorder = Recorder()
    with torch.no_grad(), recorder:
        y = _forward(module, given, file)
    again = _forward(module, x.clone(), file)
    found = {"output": y.detach().clone().float(), "again": again.detach().clone().float()}
    found["changed"] = torch.tensor(not torch.equal(given, x))
    leaf = x.clone().requires_grad_()
    try:
        y = module(leaf + 0)  # + 0: a learner may write into what comes in
        (y * probe.reshape(y.shape)).sum().backward()
    except Exception:  # nothing to take gradients of, or another number of values than ours has
        leaf.grad = None
    if leaf.grad is not None:
        found["gradient"] = leaf.grad.float()
    found |= {f"step.{i:05}": step.contiguous() for i, step in enumerate(recorder.found)}
    return {key: value.contiguous() for key, value in found.items()}


def _forward(module: nn.Module, x: Tensor, file: Path) -> Tensor:
    try:
        y = module(x)
    except NotImplementedError:
        raise LearnerError("to write") from None
    except (Exception, SystemExit) as error:
        raise LearnerError("forward", **_where(error, file)) from None
    if y is None:
        raise LearnerError("returns nothing")
    if not isinstance(y, Tensor):
        raise LearnerError("returns other", found=type(y).__name__)
    return y


def _where(error: BaseException, file: Path) -> dict[str, Any]:
    """The error in words, and the last line of the learner's own file that led to it."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == file.resolve()]
    said = {"error": f"{type(error).__name__}: {error}".strip(": "), "file": file.name, "line": 0, "code": ""}
    if lines:
        said |= {"line": lines[-1].lineno, "code": (lines[-1].line or "").strip()}
    return said


def main(file: Path, folder: Path) -> None:
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    with (folder / "stuck.txt").open("w") as stuck:
        faulthandler.dump_traceback_later(task["seconds"], exit=True, file=stuck)  # from here on, not torch's import
        cases = [load_file(folder / f"case{n}.safetensors") for n in range(len(task["arguments"]))]
        answer, outputs = examine(file, task, cases)
        faulthandler.cancel_dump_traceback_later()
    linecache.clearcache()
    for number, output in enumerate(outputs):
        save_file(output, folder / f"output{number}.safetensors")
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
