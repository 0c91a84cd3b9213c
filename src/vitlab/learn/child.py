"""Runs a learner's file in its own process: `main`, with FILE and FOLDER as arguments.

FOLDER holds the task (task.json, case0.safetensors, ...) and receives the answer (answer.json, output0.safetensors,
...). Errors of the learner's code are answers too. A watchdog ends endless loops and writes their stack to stuck.txt.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import json
import linecache
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

MOST_STEPS, MOST_VALUES = 3000, 100_000


class Task(TypedDict):
    """How to build the learner's class in each case."""

    class_name: str
    signature: str
    arguments: list[list[Any]]


@dataclass(frozen=True)
class Failure:
    """Why the learner's code returned no numbers: a key of messages.toml and its values."""

    key: str
    values: dict[str, Any] = field(default_factory=dict)
    case: int = 0


class LearnerError(Exception):
    """A problem with the learner's file, as Failure tells it."""

    def __init__(self, key: str, **values: object):
        super().__init__(key)
        self.key, self.values = key, values
        self.tensors: list[Tensor] = []  # what forward computed before it


class Recorder(TorchFunctionMode):
    """Records every tensor of a forward pass in order, because a learner's code has no Trace."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if type(value) in (Tensor, nn.Parameter) and value.is_floating_point() and value.numel() <= MOST_VALUES:
                self.tensors += [value.detach().clone()] * (len(self.tensors) < MOST_STEPS)
        return result


def examine(file: Path, task: Task, cases: list[dict[str, Tensor]]) -> tuple[Failure | None, list[dict[str, Tensor]]]:
    """Outputs of the learner's code; if it has an error, that, and the tensors it computed before."""
    outputs: list[dict[str, Tensor]] = []
    try:
        learner_class = _class(_import(file), task["class_name"])
        for number, case in enumerate(cases):
            module = _build(learner_class, task["arguments"][number], task["signature"], file)
            weights = {key.removeprefix("weight."): v for key, v in case.items() if key.startswith("weight.")}
            _copy(weights, module)
            inputs = [case[f"input.{n}"] for n in range(sum(key.startswith("input.") for key in case))]
            outputs.append(_run(module.eval(), inputs, case["probe"], file))
    except LearnerError as error:
        return Failure(error.key, error.values, len(outputs)), [*outputs, _numbered(error.tensors)]
    return None, outputs


def _import(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"learner_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise LearnerError("not python", file=file.name)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))  # so that the learner's other files can be imported
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        name, code = Path(error.filename or file).name, (error.text or "").strip()
        raise LearnerError("syntax", file=name, line=error.lineno, code=code, error=error.msg) from None
    except (Exception, SystemExit) as error:
        raise LearnerError("import", **_where(error, file)) from None
    finally:
        sys.path.remove(str(file.parent))
    return module


def _class(module: ModuleType, name: str) -> type[nn.Module]:
    learner_class = getattr(module, name, None)
    own = [k for k, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__]
    if learner_class is None:
        raise LearnerError("no class", name=name, found=", ".join(own) or "-")
    if not (inspect.isclass(learner_class) and issubclass(learner_class, nn.Module)):
        raise LearnerError("no module", name=name)
    return learner_class


def _build(learner_class: type[nn.Module], arguments: list[object], signature: str, file: Path) -> nn.Module:
    arguments = [tuple(a) if isinstance(a, list) else a for a in arguments]
    try:
        inspect.signature(learner_class).bind(*arguments)
    except TypeError as error:
        actual = f"{learner_class.__name__}{inspect.signature(learner_class)}"
        raise LearnerError("signature", signature=signature, found=actual, error=str(error)) from None
    try:
        return learner_class(*arguments)
    except NotImplementedError as error:
        raise LearnerError("to write", **_where(error, file)) from None
    except Exception as error:
        raise LearnerError("init", **_where(error, file)) from None


def _copy(weights: dict[str, Tensor], module: nn.Module) -> None:
    """Copy our weights into the learner's module; the patch projection may be a convolution or a linear layer."""
    own = module.state_dict()
    parameters = {key for key, _ in module.named_parameters()}
    missing = [key for key in weights if key not in own]
    extra = [key for key in parameters if key not in weights]
    if missing or extra:
        like = [f"{a} -> {b}" for b in missing for a in extra if own[a].shape == weights[b].shape]
        names = {"missing": ", ".join(missing) or "-", "extra": ", ".join(sorted(extra)) or "-"}
        raise LearnerError("names", **names, like=", ".join(like[:4]))
    for key, weight in weights.items():
        alike = own[key].shape == weight.shape or (weight.ndim > 1 and own[key].shape == weight.flatten(1).shape)
        if not alike:
            shapes = [" x ".join(map(str, w.shape)) or "()" for w in (own[key], weight)]
            raise LearnerError("weight shape", name=key, found=shapes[0], wanted=shapes[1])
        with torch.no_grad():
            own[key].copy_(weight.reshape(own[key].shape))


def _run(module: nn.Module, inputs: list[Tensor], probe: Tensor, file: Path) -> dict[str, Tensor]:
    copied = [x.clone() for x in inputs]
    recorder = Recorder()
    try:
        with torch.no_grad(), recorder:
            y = _forward(module, copied, file)
    except LearnerError as error:
        error.tensors = recorder.tensors
        raise
    again = _forward(module, [x.clone() for x in inputs], file)
    results = {"output": y.detach().clone().float(), "again": again.detach().clone().float()}
    results["changed"] = torch.tensor(not all(map(torch.equal, copied, inputs)))
    leaves = [x.clone().requires_grad_() for x in inputs]
    with suppress(Exception):  # no gradient, or another number of outputs than ours
        y = module(*(x + 0 for x in leaves))  # + 0: the learner's code may modify its input
        (y * probe.reshape(y.shape)).sum().backward()
        results["gradient"] = joined_gradients(leaves)
    return {key: value.contiguous() for key, value in {**results, **_numbered(recorder.tensors)}.items()}


def joined_gradients(leaves: list[Tensor]) -> Tensor:
    """One row; zeros for an input that the output does not depend on smoothly (the noise that chooses patches)."""
    if all(leaf.grad is None for leaf in leaves):
        raise ValueError("no input has a gradient.")
    return torch.cat([(torch.zeros_like(x) if x.grad is None else x.grad).flatten().float() for x in leaves])


def _numbered(tensors: list[Tensor]) -> dict[str, Tensor]:
    return {f"step.{i:05}": tensor.contiguous() for i, tensor in enumerate(tensors)}


def _forward(module: nn.Module, inputs: list[Tensor], file: Path) -> Tensor:
    try:
        y = module(*inputs)
    except NotImplementedError as error:
        raise LearnerError("to write", **_where(error, file)) from None
    except (Exception, SystemExit) as error:
        raise LearnerError("forward", **_where(error, file)) from None
    if y is None:
        raise LearnerError("returns nothing")
    if not isinstance(y, Tensor):
        raise LearnerError("returns other", found=type(y).__name__)
    return y


def _where(error: BaseException, file: Path) -> dict[str, Any]:
    """The error, and the last line of the learner's file in its traceback."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == file.resolve()]
    values = {"error": f"{type(error).__name__}: {error}".strip(": "), "file": file.name}
    values |= {"line": 0, "code": "", "function": "forward"}
    if lines:
        values |= {"line": lines[-1].lineno, "code": (lines[-1].line or "").strip(), "function": lines[-1].name}
    return values


def main() -> None:
    file, folder = map(Path, sys.argv[1:])
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    with (folder / "stuck.txt").open("w", encoding="utf-8") as stuck:
        faulthandler.dump_traceback_later(task["seconds"], exit=True, file=stuck)  # without torch's import
        cases = [load_file(folder / f"case{n}.safetensors") for n in range(len(task["arguments"]))]
        failure, outputs = examine(file, task, cases)
        faulthandler.cancel_dump_traceback_later()
    linecache.clearcache()
    for number, output in enumerate(outputs):
        save_file(output, folder / f"output{number}.safetensors")
    (folder / "answer.json").write_text(json.dumps(failure and asdict(failure)), encoding="utf-8")
