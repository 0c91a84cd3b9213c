"""What the files of networks for segmentation, detection and depth have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from vitlab.checkpoints import hf
from vitlab.checkpoints.family import Clues, Written
from vitlab.checkpoints.keymap import Options, Rule, State
from vitlab.images.preprocess import Preprocess


def encoder_rules(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Rules of an encoder for the network around it."""
    return tuple(Rule(f"encoder.{rule.ours}", rule.theirs, rule.codec) for rule in rules)


def encoder_clues(clues: Clues, own: Collection[str]) -> Clues:
    """What is stated about the encoder alone: all but the head's `own` options."""
    shared = {name: value for name, value in clues.stated.options.items() if name not in own}
    return replace(clues, stated=replace(clues.stated, options=shared))


def count_numbered(state: State, prefix: str) -> int:
    """upscale.0.norm.weight, upscale.1.norm.weight -> 2"""
    return len({key.removeprefix(prefix).split(".")[0] for key in state if key.startswith(prefix)})


def whole_image(
    tensors: State, config: Options, preprocess: Preprocess | None, processor: str, size: Mapping[str, int]
) -> Written:
    """A transformers folder of a network that sees the whole image, with its image processor."""
    written = hf.folder(tensors, config, preprocess)
    values = written.files.get("preprocessor_config.json")
    if values is not None:
        values |= {"image_processor_type": processor, **({"size": dict(size)} if size else {})}
    return written
