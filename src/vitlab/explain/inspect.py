"""Every step of a forward pass: shape, meaning, parameters, MACs, activation memory. No weights are needed.

    vitlab.inspect("vit_base").steps[0]

The model runs on meta tensors, where torch's FLOP counter also sees fused attention (on CPU tensors it counts 0), and
once on fake CPU tensors to see what a backward pass would have to keep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitlab.checkpoints.load import ModelOrName
from vitlab.explain.flops import flop_counter
from vitlab.explain.inspect_table import inspection_table
from vitlab.explain.resolve import check_batch, image_size_pair, input_size_of, resolve
from vitlab.explain.step_meanings import DECODER, TEXT, meaning
from vitlab.layers.attention import kernel_name
from vitlab.layers.trace import PARTIAL_KINDS, LayerTrace, TokenLayout, Trace
from vitlab.models import registry
from vitlab.models.base import Network
from vitlab.models.hierarchy import StagedConfig
from vitlab.models.mae import MaskedAutoencoder
from vitlab.models.resnet import ResNetConfig
from vitlab.models.two_towers import TwoTowers
from vitlab.tables import Table, Tabular

PARTS = {"qkv": "attention", "heads": "attention", "proj": "attention", "fc1": "mlp", "fc2": "mlp"}


@dataclass
class Step:
    name: str  # blocks.0.attention.qkv
    shape: tuple[int, ...]
    meaning: str = ""
    parameters: int = 0
    macs: int = 0
    memory: int = 0  # bytes that a backward pass keeps from this step


@dataclass
class Inspection(Tabular):
    """Every step of a forward pass. `print` shows it as a table, as does a notebook."""

    name: str
    image_size: tuple[int, int]
    batch: int
    tokens: str
    backend: str
    steps: list[Step]
    unused: list[str] = field(default_factory=list)  # parameters that no step read

    @property
    def parameters(self) -> int:
        return sum(step.parameters for step in self.steps)

    @property
    def macs(self) -> int:
        return sum(step.macs for step in self.steps)

    @property
    def memory(self) -> int:
        return sum(step.memory for step in self.steps)

    def table(self, depth: int = 4, all_blocks: bool = False) -> Table:
        return inspection_table(self, depth, all_blocks)

    def to_dict(self) -> dict[str, Any]:
        total = {
            "parameters": self.parameters,
            "macs": self.macs,
            "flops": 2 * self.macs,
            "activation_bytes": self.memory,
        }
        return {**asdict(self), "total": total}

    def at_depth(self, depth: int) -> list[Step]:
        """Steps summed to `depth` name parts: 1 model, 2 blocks, 3 their parts, 4 everything."""
        groups: dict[str, list[Step]] = defaultdict(list)
        for step in self.steps:
            parts = depth + step.name.startswith((DECODER, TEXT))
            groups[".".join(step.name.split(".")[:parts])].append(step)
        return [
            steps[0]
            if len(steps) == 1
            else Step(
                name,
                steps[-1].shape,
                f"{len(steps)} steps" if depth == 1 else "",
                sum(s.parameters for s in steps),
                sum(s.macs for s in steps),
                sum(s.memory for s in steps),
            )
            for name, steps in groups.items()
        ]


class _Recorder(Trace):
    """A trace that records every step's name and shape, and what `since_last` counted."""

    def __init__(self, since_last: Callable[[], Any]):
        super().__init__("every step")
        self.since_last = since_last
        self.marks: list[tuple[str, int | None, tuple[int, ...], Any]] = []

    def begin(self, *, depth: int, offers: Iterable[str], layout: TokenLayout, places: tuple[Any, ...] = ()) -> None:
        self.layout, self.places = layout, places

    def at(self, layer: int) -> LayerTrace:
        return LayerTrace(self, layer)

    def wants(self, kind: str) -> bool:
        return False  # compute nothing beside the pass

    def mark(self, kind: str, value: Tensor, layer: int | None = None, pick: Any = None) -> Tensor:
        if pick is None and kind not in PARTIAL_KINDS:  # per-head values are computed on request only
            self.marks.append((kind, layer, tuple(value.shape), self.since_last()))
        return value


class _PartRecorder(_Recorder):
    """Records a second part of the model, which runs after the encoder, under its own prefix."""

    def __init__(self, encoder: _Recorder, part: str):
        super().__init__(encoder.since_last)
        self.encoder, self.part = encoder, part

    def mark(self, kind: str, value: Tensor, layer: int | None = None, pick: Any = None) -> Tensor:
        return value if kind in PARTIAL_KINDS else self.encoder.mark(self.part + kind, value, layer, pick)


def _run(model: Network, images: Tensor, recorder: _Recorder) -> None:
    if isinstance(model, TwoTowers):  # as many texts as images
        ids = model.text.blank_ids(len(images))
        seen = model.encode_image(images, trace=recorder)
        read = model.encode_text(ids, trace=_PartRecorder(recorder, TEXT))
        recorder.mark("logits", model.logits(seen, read))
        return
    decoder = {"decoder_trace": _PartRecorder(recorder, DECODER)} if isinstance(model, MaskedAutoencoder) else {}
    model(images, trace=recorder, **decoder)


class _ParametersRead(TorchDispatchMode):
    """Records which parameters the operations read, by storage, to count them for the step that uses them."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters():
            self.names[_storage(parameter)].append(name)
        self.read: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self.read += self.names.pop(_storage(tensor), [])
        return func(*args, **(kwargs or {}))

    def since_last(self) -> list[str]:
        read, self.read = self.read, []
        return read


def inspect(
    what: ModelOrName, *, image_size: int | tuple[int, int] | None = None, batch: int = 1, **options: Any
) -> Inspection:
    """Inspect a model, a registered name or a checkpoint at any image size that fits; no weights are allocated."""
    check_batch(batch)
    given = image_size_pair(image_size)
    family, config, name, model = resolve(what, given, options)
    size = given or input_size_of(model, config, options)
    input_shape = (batch, config.channels, *size)
    with torch.device("meta"):
        model = registry.build(family, config).eval().requires_grad_(False)
        images = torch.empty(input_shape)
        used = _ParametersRead(model)
        flops = flop_counter()
        last = 0

        def counted() -> tuple[int, list[str]]:
            nonlocal last
            before, last = last, flops.get_total_flops()
            return (last - before) // 2, used.since_last()

        recorder = _Recorder(counted)
        with torch.no_grad(), flops, used:
            _run(model, images, recorder)
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    memory = _memory(family, config, input_shape)

    steps = [
        Step(
            step_name(kind, layer, config),
            shape,
            meaning(model, kind, layer, size, recorder.layout),
            sum(sizes[n] for n in names),
            macs,
            memory.get((kind, layer), 0),
        )
        for kind, layer, shape, (macs, names) in recorder.marks
    ]
    unused = [n for names in used.names.values() for n in names]
    tokens = "none" if isinstance(config, ResNetConfig) else str(recorder.layout)
    if isinstance(config, StagedConfig):
        tokens += "".join(f", then {rows} x {columns}" for rows, columns in config.grids(*size)[1:])
    return Inspection(name, size, batch, tokens, kernel_name(model), steps, unused)


def _memory(family: str, config: Any, shape: tuple[int, ...]) -> dict[tuple[str, int | None], int]:
    """Bytes that each step keeps for the backward pass of one training step in float32."""
    kept: dict[int, int] = {}
    held: list[Tensor] = []  # storages must stay alive, or their addresses come up again
    counted = 0

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        kept.setdefault(_storage(tensor), tensor.untyped_storage().nbytes())
        return tensor

    def since_last() -> int:
        nonlocal counted
        before, counted = counted, sum(kept.values())
        return counted - before

    with torch.device("meta"):
        again = {"gradient_checkpointing": False} if hasattr(config, "gradient_checkpointing") else {}
        model = registry.build(family, config.with_options(**again)).train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")  # fake: CPU kernels are chosen, nothing is allocated
        for parameter in model.parameters():
            kept[_storage(parameter)] = 0  # weights are kept anyway
        recorder = _Recorder(since_last)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            _run(model, torch.empty(shape), recorder)
    return {(kind, layer): count for kind, layer, _, count in recorder.marks}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def step_name(kind: str, layer: int | None, config: Any = None) -> str:
    """The full name of a step that Trace names by kind and layer: blocks.0.attention.qkv."""
    if layer is None:
        return kind
    for part in (DECODER, TEXT):
        if kind.startswith(part):
            return part + step_name(kind.removeprefix(part), layer, config)
    if isinstance(config, StagedConfig | ResNetConfig):
        return f"{config.place(layer)}.{kind}"
    return f"blocks.{layer}.{PARTS[kind]}.{kind}" if kind in PARTS else f"blocks.{layer}.{kind}"
