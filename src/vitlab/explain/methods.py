"""The table of methods that score patches. Command line, server, page, help and comparison read it.

    METHODS["rollout"](model, images)          # (B, grid_h, grid_w), higher is more important

A new method is one function `method(model, images, target=None)` in a file of this folder, and one row here. This
module does not import torch; a method's own file is imported when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from vitlab.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from vitlab.checkpoints.load import ModelOrName
    from vitlab.explain.inputs import Images
    from vitlab.explain.relevance import Target
    from vitlab.layers.edit import Edit
    from vitlab.models.base import Network

    MapFunction = Callable[[ModelOrName, Images, Target], Tensor]


@dataclass(frozen=True)
class ScoringMethod:
    """One way to score patches."""

    name: str  # as typed: --method grad_cam
    title: str  # as shown in figures
    function: str  # module.function in this package
    needs: tuple[str, ...] = ()  # what the model's trace must offer
    by_class: bool = False  # scores patches for one class; False: `target` is ignored
    signed: bool = False  # values below 0 speak against the class
    baseline: bool = False  # only to compare others with
    edits: bool = False  # takes edit=, changes to the pass

    @property
    def module(self) -> str:
        return self.function.partition(".")[0]

    def __call__(self, model: ModelOrName, images: Images, target: Target = None, edit: Edit | None = None) -> Tensor:
        """(B, grid_h, grid_w). `edit`: changes to the pass, for methods that take them."""
        run = getattr(import_module(f"vitlab.explain.{self.module}"), self.function.partition(".")[2])
        arguments = (model, images, target) if self.by_class else (model, images)
        if edit is None:
            return run(*arguments)
        if not self.edits:
            able = ", ".join(name for name, method in METHODS.items() if method.edits)
            raise UsageError(f"{self.name} does not take changes to the pass: {able} do.")
        return run(*arguments, edit=edit)

    def supports(self, model: Network) -> bool:
        return not self.missing_in(model)

    def missing_in(self, model: Network) -> str:
        """What it needs and the model has not, in words; empty where it is supported."""
        lacking = [f"no {step} to trace" for step in self.needs if step not in model.traceable]
        return " and ".join([*lacking, *(["no classes"] if self.by_class and not model.classes else [])])


METHODS: dict[str, ScoringMethod] = {
    method.name: method
    for method in (
        ScoringMethod("attention", "Attention", "attention_maps.last_attention", ("attention",)),
        ScoringMethod("rollout", "Rollout", "rollout.rollout", ("attention",)),
        ScoringMethod("relevance", "Relevance", "relevance.relevance", ("attention",), True, edits=True),
        ScoringMethod("grad_cam", "Grad-CAM", "relevance.grad_cam", ("tokens",), True, edits=True),
        ScoringMethod(
            "gradient_x_input",
            "Gradient x input",
            "relevance.gradient_x_input",
            ("patch_embed",),
            by_class=True,
            signed=True,
            edits=True,
        ),
        ScoringMethod("random", "Random", "faithfulness.random_map", baseline=True),
    )
}
BY_CLASS = tuple(name for name, method in METHODS.items() if method.by_class)
SHOWN = tuple(name for name, method in METHODS.items() if not method.baseline)
COMPARED = tuple(name for name in SHOWN if not METHODS[name].signed)  # what `vitlab explain compare` shows by default


def find_methods(names: Sequence[str], among: Iterable[str] = METHODS) -> list[str]:
    """The names, each once; raises for one that is not `among` these methods."""
    choices = list(among)
    for name in names:
        if name not in choices:
            near = get_close_matches(str(name), choices, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"there is no method {name!r}.{hint} There are: {', '.join(choices)}.")
    return list(dict.fromkeys(names))


def find_method(method: str | MapFunction) -> MapFunction:
    """A method by its name; a function with the same signature is returned unchanged."""
    return method if callable(method) else METHODS[find_methods([method])[0]]
