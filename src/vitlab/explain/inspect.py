"""Every step of a forward pass in order: shape, meaning, parameters, MACs, activation memory. No weights are needed.

    vitlab.inspect("vit_base").steps[0]

The model runs on meta tensors, where torch's FLOP counter also sees fused attention (on CPU tensors it counts 0), and
once on fake CPU tensors to see what a backward pass would have to keep.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from vitlab.checkpoints import load
from vitlab.checkpoints.files import CheckpointError
from vitlab.explain.inspect_stages import MEANINGS as STAGE_MEANINGS
from vitlab.explain.inspect_stages import count_stages, stage_words
from vitlab.layers.attention import kernel_name
from vitlab.layers.trace import LayerTrace, TokenLayout, Trace
from vitlab.models import registry
from vitlab.models.hierarchy import StagedConfig
from vitlab.models.resnet import ResNetConfig

PARTS = {"qkv": "attention", "heads": "attention", "proj": "attention", "fc1": "mlp", "fc2": "mlp"}
MEANINGS: dict[str, str] = {
    "patch_embed": "every {patch_size}x{patch_size} patch becomes a token of {width} numbers (eq. 1)",
    "prefix": "{layout}",
    "positions": "+ {positions} positions{resized} (eq. 1)",
    "visible": "only the patches that are not hidden go on",
    "norm_pre": "LayerNorm before the blocks",
    "norm1": "LayerNorm",
    "qkv": "queries, keys, values: 3 x {heads} heads x {head_dim}",
    "heads": "softmax(q k^T / sqrt({head_dim})) v; {heads} heads side by side",
    "proj": "heads mixed",
    "after_attention": "+ residual (eq. 2)",
    "norm2": "LayerNorm",
    "fc1": "{mlp}: {width} to {hidden} channels",
    "fc2": "{mlp}: back to {width}",
    "tokens": "+ residual (eq. 3)",
    "norm": "final LayerNorm (eq. 4)",
    "stem": "{stem}",
    "conv1": "convolution, batch norm, relu",
    "conv2": "convolution, batch norm{relu_of_2}",
    "conv3": "convolution, batch norm",
    "shortcut": "the input, made to fit by a 1x1 convolution and batch norm",
    "block": "+ residual, relu (eqs. 1-2)",
    "pool": "{pooling} pooling: one vector per image",
    "pre_logits": "tanh layer before the classifier",
    "head": "one score for each of {classes} classes",
    "decoder.embed": "to the decoder's width, {width}",
    "decoder.masked": "a mask token wherever a patch is hidden",
    "decoder.norm": "LayerNorm",
    "decoder.pixels": "{patch_size}x{patch_size} pixels for every patch",
    "projection": "into the space that pictures and words share",
    "text.embed": "every token of the text becomes {width} numbers",
    "text.positions": "+ learned positions",
    "text.heads": "softmax(q k^T / sqrt({head_dim})) v, no later token; {heads} heads side by side",
    "text.norm": "final LayerNorm",
    "text.end": "the token that ends the text: one vector per text",
    "logits": "scale x cosine, every image with every text",
}
DECODER, TEXT = "decoder.", "text."  # what the steps of MAE's decoder and of CLIP's text tower are called by


@dataclass
class Step:
    name: str  # blocks.0.attention.qkv
    shape: tuple[int, ...]
    meaning: str = ""
    parameters: int = 0
    macs: int = 0
    memory: int = 0  # bytes that a backward pass keeps from this step


@dataclass
class Inspection:
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
    """A trace that is shown every step and keeps only its name, shape and what was counted since the last one."""

    def __init__(self, since_last: Callable[[], Any]):
        super().__init__("every step")
        self.since_last = since_last
        self.marks: list[tuple[str, int | None, tuple[int, ...], Any]] = []

    def begin(self, *, depth: int, offers: Iterable[str], layout: TokenLayout, places: tuple[Any, ...] = ()) -> None:
        self.layout, self.places = layout, places

    def at(self, layer: int) -> LayerTrace:
        return LayerTrace(self, layer)

    def wants(self, kind: str) -> bool:
        return False  # nothing is to be computed beside the pass

    def mark(self, kind: str, value: Tensor, layer: int | None = None, pick: Any = None) -> None:
        if pick is None:  # per-head values are computed only when asked for; here nobody asks
            self.marks.append((kind, layer, tuple(value.shape), self.since_last()))


class _PartRecorder(_Recorder):
    """The same for a second part of the model, which runs after the encoder; its steps' names begin with the part's."""

    def __init__(self, encoder: _Recorder, part: str):
        super().__init__(encoder.since_last)
        self.encoder, self.part = encoder, part

    def mark(self, kind: str, value: Tensor, layer: int | None = None, pick: Any = None) -> None:
        self.encoder.mark(self.part + kind, value, layer, pick)


def _run(model: Any, images: Tensor, recorder: _Recorder) -> None:
    if model.family == "clip":  # as many texts as images
        c = model.config.text
        ids = torch.full((len(images), c.context), c.end_id, device=images.device)
        seen = model.encode_image(images, trace=recorder)
        read = model.encode_text(ids, trace=_PartRecorder(recorder, TEXT))
        recorder.mark("logits", model.logits(seen, read))
        return
    masked = {"decoder_trace": _PartRecorder(recorder, DECODER)} if model.family == "mae" else {}
    model(images, trace=recorder, **masked)


class _ParametersRead(TorchDispatchMode):
    """Notes which parameters the operations read, by their storage, so that each step is charged for its own."""

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
    what: Any, *, image_size: int | tuple[int, int] | None = None, batch: int = 1, **options: Any
) -> Inspection:
    """Inspect a model, a registered name or a checkpoint at any image size that fits; no weights are allocated."""
    _check_batch(batch)
    asked = _size(image_size)
    family, config, name, _ = _resolve(what, asked, options)
    size: tuple[int, int] = asked or config.image_size
    shape = (batch, config.channels, *size)
    with torch.device("meta"):
        model = registry.build(family, config).eval().requires_grad_(False)
        images = torch.empty(shape)
        used = _ParametersRead(model)
        flops = FlopCounterMode(display=False)
        last = 0

        def counted() -> tuple[int, list[str]]:
            nonlocal last
            before, last = last, flops.get_total_flops()
            return (last - before) // 2, used.since_last()

        recorder = _Recorder(counted)
        with torch.no_grad(), flops, used:
            _run(model, images, recorder)
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    memory = _memory(family, config, shape)

    def meaning(kind: str, layer: int | None) -> str:
        if isinstance(config, StagedConfig):
            return (MEANINGS | STAGE_MEANINGS)[kind].format(**stage_words(model, size, layer))
        if kind.startswith(TEXT):
            return _meaning(kind, _text_words(config))
        return _meaning(kind, _words(config.decoder_stack if kind.startswith(DECODER) else config, recorder.layout))

    steps = [
        Step(
            step_name(kind, layer, config),
            found,
            meaning(kind, layer),
            sum(sizes[n] for n in names),
            macs,
            memory.get((kind, layer), 0),
        )
        for kind, layer, found, (macs, names) in recorder.marks
    ]
    unused = [n for names in used.names.values() for n in names]
    tokens = "none" if isinstance(config, ResNetConfig) else str(recorder.layout)
    if isinstance(config, StagedConfig):
        tokens += "".join(f", then {rows} x {columns}" for rows, columns in config.grids(*size)[1:])
    return Inspection(name, size, batch, tokens, kernel_name(model), steps, unused)


def _resolve(what: Any, size: tuple[int, int] | None, options: dict[str, Any]) -> tuple[str, Any, str, Any]:
    """A model, a name or a checkpoint -> family, config, what to call it, and the model where there is one.

    Of DINO it is the encoder, which is what the others read.
    """
    family, config, name, model = _named(what, size, options)
    if not hasattr(config, "encoder") or family in ("mae", "clip"):
        return family, config, name, model
    encoder = None if model is None else copy.deepcopy(model.encoder).requires_grad_(True)  # DINO's teacher is frozen
    return *_encoder(family, config), f"{name}, its encoder", encoder


def _encoder(family: str, config: Any) -> tuple[str, Any]:
    return ("vit", config.encoder) if hasattr(config, "encoder") else (family, config)


def _named(what: Any, size: tuple[int, int] | None, options: dict[str, Any]) -> tuple[str, Any, str, Any]:
    if not isinstance(what, str | Path):
        if not hasattr(what, "family") or not hasattr(what, "config"):
            raise ValueError(f"expected a model, a model's name or a checkpoint's path, found a {type(what).__name__}.")
        return what.family, what.config.with_options(**options), type(what).__name__, what
    if load.is_checkpoint(what):
        model = _load(what, size, options)
        return model.family, model.config, str(what), model
    entry, config = registry.build_config(str(what), **options)
    return entry.family, config, entry.name, None


def _load(what: str | Path, size: tuple[int, int] | None, options: dict[str, Any]) -> Any:
    """At the size it was saved with; only a bare file that does not tell its grid is told the asked size."""
    try:
        return load.load(what, **options)
    except CheckpointError as error:
        if size is None or "--image-size" not in str(error) or not Path(what).expanduser().is_file():
            raise
        return load.load(what, image_size=size, **options)


def _check_batch(batch: int) -> None:
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise ValueError(f"batch={batch!r} must be a whole number, at least 1.")


def _size(image_size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if image_size is None:
        return None
    pair = (image_size, image_size) if isinstance(image_size, int) else image_size
    whole = isinstance(pair, list | tuple) and all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
    if not whole or len(pair) != 2:
        raise ValueError(f"image_size={image_size!r} must be a whole number or a pair: image_size=(384, 256).")
    return (pair[0], pair[1])


def _memory(family: str, config: Any, shape: tuple[int, ...]) -> dict[tuple[str, int | None], int]:
    """Bytes that each step leaves behind for the backward pass of one training step in float32."""
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


def _meaning(kind: str, words: dict[str, Any]) -> str:
    plain = kind.removeprefix(DECODER).removeprefix(TEXT)
    return MEANINGS.get(kind, MEANINGS.get(plain, "")).format(**words)


def step_name(kind: str, layer: int | None, config: Any = None) -> str:
    """What a step that Trace names by kind and layer is called: blocks.0.attention.qkv."""
    if layer is None:
        return kind
    for part in (DECODER, TEXT):
        if kind.startswith(part):
            return part + step_name(kind.removeprefix(part), layer, config)
    if hasattr(config, "place"):  # stages of blocks
        return f"{config.place(layer)}.{kind}"
    return f"blocks.{layer}.{PARTS[kind]}.{kind}" if kind in PARTS else f"blocks.{layer}.{kind}"


def _words(config: Any, layout: TokenLayout | None) -> dict[str, Any]:
    """What the meanings are filled with."""
    if isinstance(config, ResNetConfig):
        stem = {"imagenet": "7x7 convolution by 2, batch norm, relu, 3x3 max-pooling by 2"}
        relu = ", relu" if config.block == "bottleneck" else ""
        words = {"stem": stem.get(config.stem, "3x3 convolution, batch norm, relu"), "relu_of_2": relu}
        return {**words, "pooling": "mean", "classes": config.classes}
    config = config.encoder if hasattr(config, "encoder") else config
    rows, columns = config.grid
    resized = "" if layout is None or layout.grid == config.grid else f", resized from {rows} x {columns}"
    return {
        "resized": resized,
        "layout": layout,
        "patch_size": config.patch_size,
        "width": config.width,
        "heads": config.heads,
        "head_dim": config.head_dim or config.width // config.heads,
        "hidden": config.mlp_hidden,
        "positions": config.positions.kind,
        "mlp": "SwiGLU" if config.mlp.kind == "swiglu" else f"MLP, {config.mlp.activation}",
        "pooling": config.head.pooling,
        "classes": config.classes,
    }


def _text_words(config: Any) -> dict[str, Any]:
    c = config.text
    hidden = round(c.width * c.mlp_ratio)
    sizes = {"width": c.width, "heads": c.heads, "head_dim": c.width // c.heads, "hidden": hidden}
    return {**sizes, "mlp": f"MLP, {c.activation}"}


@dataclass
class Gradient:
    name: str
    norm: float
    verdict: str = ""  # "dead", "exploding", or "frozen" where none is asked for


def gradients(
    what: Any, *, image_size: int | tuple[int, int] | None = None, batch: int = 2, seed: int = 0, **options: Any
) -> list[Gradient]:
    """One backward pass on random images and labels: the gradient's norm of every parameter, in order.

    Dropout and stochastic depth are off, or a branch left out by chance would look dead. The model's own gradients and
    modes stay as they were.
    """
    _check_batch(batch)
    asked = _size(image_size)
    family, c, _, model = _resolve(what, asked, options)
    if not isinstance(what, str | Path) and options:
        raise ValueError(f"a model that is built cannot take {', '.join(options)}: give its name, or a checkpoint.")
    model = registry.build(family, c) if model is None else model
    like = next(model.parameters())
    if like.is_meta:
        raise ValueError("the model is on the meta device, where nothing is computed: build it on the CPU or a GPU.")
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, c.channels, *(asked or c.image_size), generator=generator).to(like.device, like.dtype)
    labels = torch.randint(c.classes, (batch,), generator=generator).to(like.device) if c.classes else None
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    slopes: dict[str, Tensor | None] = {}
    if trained:
        with _evaluating(model), torch.enable_grad():
            out: Any = model(images) if family != "clip" else None
            if family == "mae":
                loss = out.loss
            elif family == "clip":
                loss = model.loss(model.encode_image(images), model.encode_text(_texts(c, batch, generator, like)))
            else:
                loss = out.float().square().mean() if labels is None else F.cross_entropy(out.float(), labels)
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        slopes = dict(zip(trained, found, strict=True))
    return [_gradient(name, name in trained, slopes.get(name)) for name, _ in model.named_parameters()]


def _texts(c: Any, batch: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Texts of any tokens, as long as they may be."""
    ids = torch.randint(c.text.vocab, (batch, c.text.context), generator=generator)
    ids[ids == c.text.end_id] = 0
    ids[:, -1] = c.text.end_id
    return ids.to(like.device)


def _gradient(name: str, trained: bool, slope: Tensor | None) -> Gradient:
    norm = 0.0 if slope is None else float(slope.float().norm())
    verdict = "dead" if norm == 0.0 else "exploding" if not norm < 1e3 else ""
    return Gradient(name, norm, verdict if trained else "frozen")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]  # parts of it may be frozen
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@cache
def size_of(name: str) -> tuple[int, int]:
    """Parameters and MACs (one image, and one text of a CLIP) of a registered model; of MAE and DINO, of their encoder.

    Blocks are equal, so both grow by the same step with each one: shallow models tell the deep one's size exactly.
    """
    entry, config = registry.build_config(name)
    family, config = (entry.family, config) if entry.family == "clip" else _encoder(entry.family, config)
    if family == "clip":
        depths = {"image.depth": config.image.depth, "text.depth": config.text.depth}
    elif hasattr(config, "depth"):
        depths = {"depth": config.depth}
    elif isinstance(config, StagedConfig):
        return count_stages(lambda c: registry.build(family, c), config)
    else:
        return _count(family, config)
    shallow = dict.fromkeys(depths, 1)
    one = _count(family, config.with_options(**shallow))
    parameters, macs = one
    for option, depth in depths.items():
        two = _count(family, config.with_options(**{**shallow, option: 2}))
        parameters += (two[0] - one[0]) * (depth - 1)
        macs += (two[1] - one[1]) * (depth - 1)
    return parameters, macs


def _count(family: str, config: Any) -> tuple[int, int]:
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as flops:
        model = registry.build(family, config).eval().requires_grad_(False)
        images = torch.empty(1, config.channels, *config.image_size)
        model(*((images, torch.full((1, config.text.context), config.text.end_id)) if family == "clip" else (images,)))
    return sum(p.numel() for p in model.parameters()), flops.get_total_flops() // 2
