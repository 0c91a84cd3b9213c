"""The two sides of a comparison: a model of ours, or a transformers folder run by transformers itself.

Each side gives its steps and weights under our names, and its own input for an image. Our models use Trace; the other
library's model has forward hooks on the layers that our rename table knows, so it works for every naming we can load.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vitlab.checkpoints import hf, keymap, native
from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.load import ModelOrName, load_with_report, locate
from vitlab.device import pick_device
from vitlab.errors import UsageError
from vitlab.explain.diff.steps import Key, Steps, run_steps
from vitlab.images.preprocess import Preprocess
from vitlab.models import registry
from vitlab.models.base import Network, unwrap
from vitlab.models.vit_config import ViTConfig
from vitlab.optional import require

PREFIX = "transformers:"
State = dict[str, Tensor]


class Side:
    """A model of ours."""

    def __init__(self, letter: str, model: Network, path: str | None = None):
        if not isinstance(model.encoder.config, ViTConfig):
            raise UsageError(
                f"{letter} is a {type(model).__name__}, and diff follows the steps of a ViT. `vitlab convert --check` "
                "compares it with transformers' own."
            )
        self.letter, self.path = letter, path  # path: as typed; None for a model object
        self.name = path or type(model).__name__
        self.config, self.family, self.labels = model.config, model.family, model.labels
        self.preprocess = None if model.preprocess is None else model.preprocess.at_one_size()
        self.weights: State = dict(model.state_dict())
        self.notes: list[str] = []
        self.network: nn.Module = model  # what runs

    @property
    def input_size(self) -> tuple[int, int]:
        """(H, W) of the model's input."""
        return self.config.image_size if self.preprocess is None else self.preprocess.size

    def steps(self, images: Tensor) -> Steps:
        assert isinstance(self.network, Network)
        return run_steps(self.network, images)

    def view(self, images: list[Image.Image], size: tuple[int, int] | None) -> Tensor | None:
        """Upright images -> (B, C, H, W) by this side's preprocess, at `size` (None: its own); None without one."""
        preprocess = self.preprocess_at(size)
        return None if preprocess is None else preprocess.batch(images)

    def preprocess_at(self, size: tuple[int, int] | None) -> Preprocess | None:
        """This side's preprocess for another size than its own."""
        if self.preprocess is None or size is None or size == self.input_size:
            return self.preprocess
        return self.preprocess.with_size(size)

    @property
    def eps(self) -> set[float]:
        """The eps of its LayerNorms, which may differ from the config."""
        return {module.eps for module in self.network.modules() if isinstance(module, nn.LayerNorm)}

    def rebuilt(self, options: Mapping[str, object], tensors: State, other: State) -> Network:
        """A new network of this config and these weights, with options and tensors changed.

        A tensor that this side does not have is taken from `other`.
        """
        config = self.config.with_options(**options)
        model = native.on_meta(lambda: registry.build(self.family, config))
        like = next(iter(self.weights.values()))
        state: State = {}
        for key, wanted in model.state_dict().items():
            fitting = (s[key] for s in (tensors, self.weights, other) if key in s and s[key].shape == wanted.shape)
            if (tensor := next(fitting, None)) is None:
                raise UsageError(f"neither side has {key} in the shape {tuple(wanted.shape)}.")
            state[key] = tensor.detach().to(like.device, like.dtype)
        model.load_state_dict(state, assign=True)
        return model.eval()


class TransformersSide(Side):
    """A folder run by transformers, with config, preprocess and labels as we read them."""

    def __init__(self, letter: str, path: str, device: torch.device | None = None):
        require(path, "transformers", otherwise=f"Without {PREFIX!r} the folder is read and run by vitlab.")
        folder = locate(path.removeprefix(PREFIX))
        if not (folder / "config.json").is_file():
            raise UsageError(f"{path}: no transformers folder: {folder / 'config.json'} is not there.")
        config = read_json(folder / "config.json")
        model, report = load_with_report(folder)
        super().__init__(letter, model, path)
        self.notes += report.notes
        self.folder = folder
        network, absent = _run_by_transformers(path, folder, config)
        self.network = network if device is None else network.to(device)
        if absent:
            self.notes.append(
                f"{path}: transformers did not find {', '.join(absent[:3])}{', ...' if len(absent) > 3 else ''} in the "
                "file and made up random values."
            )
        renamed = keymap.read(hf.DIALECT, self.network.state_dict())
        self.origin = renamed.origin
        self.weights |= renamed.tensors  # what runs, not what the file says
        self.processor: Any = None
        if (folder / "preprocessor_config.json").is_file():
            self.processor = _processor(path, folder, self.notes)

    def steps(self, images: Tensor) -> Steps:
        images = images.float().to(next(self.network.parameters()).device)
        raw: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}  # our layer, part of it -> their input and output

        def watch(where: tuple[str, int], module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            raw[where] = (args[0], out)

        handles = [
            module.register_forward_hook(partial(watch, (ours, part)))
            for ours, _, _ in self._watched()
            for part, module in enumerate(self._modules(ours))
        ]
        options: dict[str, Any] = {}
        takes = inspect.signature(self.network.forward).parameters
        if "interpolate_pos_encoding" in takes and tuple(images.shape[-2:]) != self.config.image_size:
            options["interpolate_pos_encoding"] = True
        try:
            with torch.no_grad():
                out = self.network(images, **options)
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise UsageError(f"{self.name}: transformers could not run it ({first}).") from None
        finally:
            for handle in handles:
                handle.remove()
        seen: Steps = {}
        for ours, into, out_of in self._watched():
            parts = [raw[ours, part] for part in range(3) if (ours, part) in raw]
            if parts and into is not None:
                seen[into] = parts[0][0]
            if parts and out_of is not None:
                seen[out_of] = torch.cat([out for _, out in parts], dim=-1)  # q, k and v side by side: (B, N, 3hd)
        if ("patch_embed", None) in seen:
            seen["patch_embed", None] = seen["patch_embed", None].flatten(2).transpose(1, 2)  # (B, N, D)
        pooled, logits = getattr(out, "pooler_output", None), getattr(out, "logits", None)
        if pooled is not None:
            seen[("pre_logits" if self.config.head.head_hidden else "pool"), None] = pooled
        if logits is not None:
            seen["head", None] = logits
        return seen

    def view(self, images: list[Image.Image], size: tuple[int, int] | None) -> Tensor | None:
        """By its own image processor, if the folder has one and `size` is its own."""
        if self.processor is None or size not in (None, self.input_size):
            return super().view(images, size)
        mode = "L" if self.config.channels == 1 else "RGB"
        return self.processor(images=[p.convert(mode) for p in images], return_tensors="pt")["pixel_values"]

    def _modules(self, ours: str) -> list[nn.Module]:
        """Their layers for one of ours: three where q, k and v are separate."""
        keys = self.origin.get(f"{ours}.weight", ())
        return [self.network.get_submodule(key.rpartition(".")[0]) for key in keys]

    def _watched(self) -> list[tuple[str, Key | None, Key | None]]:
        """Our layer, and the trace names of its counterpart's input and output (pre-norm networks)."""
        watched: list[tuple[str, Key | None, Key | None]] = [("patch_embed.proj", None, ("patch_embed", None))]
        for i in range(self.config.depth):
            block = f"blocks.{i}."
            watched += [
                (block + "norm1", ("tokens", i - 1) if i else ("positions", None), ("norm1", i)),
                (block + "attention.qkv", None, ("qkv", i)),
                (block + "attention.proj", ("heads", i), ("proj", i)),
                (block + "norm2", ("after_attention", i), ("norm2", i)),
                (block + "mlp.fc2", ("fc1", i), ("fc2", i)),
            ]
        watched.append(("norm", ("tokens", self.config.depth - 1), ("norm", None)))
        if not self.config.tokens.distill_token:
            watched.append(("pre_logits" if self.config.head.head_hidden else "head", ("pool", None), None))
        return watched


def open_side(
    letter: str, what: ModelOrName, heads: int | None, size: tuple[int, int] | None, device: str | None = None
) -> Side:
    """A path, a name with a prefix, or a model."""
    place = None if device is None else pick_device(device)
    if not isinstance(what, str | os.PathLike):
        return Side(letter, unwrap(what).encoder.to(place))
    path = os.fspath(what)
    if path.startswith(PREFIX):
        return TransformersSide(letter, path, place)
    options: dict[str, Any] = {}
    if Path(path).expanduser().is_file():  # a bare file may not store these
        options = {name: value for name, value in (("heads", heads), ("image_size", size)) if value is not None}
    model, report = load_with_report(path, **options)
    side = Side(letter, model.encoder.to(place), path)
    if model.encoder is not model:
        side.notes.append(f"{path}: a {model.family} model, of which the encoder is compared.")
    side.notes += [f"{path}: {note}" for note in report.notes]
    return side


def _run_by_transformers(path: str, folder: Path, config: dict[str, Any]) -> tuple[nn.Module, list[str]]:
    """The model in its own library, and the tensors missing from the file."""
    import transformers

    if config.get("model_type") not in hf.CLASSES:
        raise UsageError(
            f"{path}: a {config.get('model_type')!r} model is not run by transformers here; known are "
            f"{', '.join(hf.CLASSES)}. Without {PREFIX!r} the folder is read and run by vitlab."
        )
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    names = [*(config.get("architectures") or []), hf.CLASSES[config["model_type"]][1]]
    build = getattr(transformers, names[0], None)
    if build is None:
        raise UsageError(f"{path}: config.json names the architecture {names[0]!r}, which transformers does not have.")
    try:
        network, info = build.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    except (ValueError, RuntimeError, TypeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path}: transformers could not load it ({first}).") from None
    return network.float().eval(), sorted(info.get("missing_keys", ()))


def _processor(path: str, folder: Path, notes: list[str]) -> Any:
    import transformers

    try:
        return transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    except (ValueError, ImportError, OSError, KeyError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        notes.append(f"{path}: transformers cannot make its image processor ({first}): images go through vitlab's.")
        return None
