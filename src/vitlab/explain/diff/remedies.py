"""What to type once the cause is known. Only the user knows which side is right: a remedy makes one equal the other."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from vitlab.explain.diff.sides import PREFIX, Side

KEYS = "`vitlab convert {path} DST` lists every key that is read."
REMEDIES = {  # by the relation between two tensors
    "bias": f"A bias was not copied when one of the files was written. {KEYS}",
    "zero": f"A tensor was not copied when one of the files was written. {KEYS}",
    "rounded": "One was saved in half precision: take the other file, or compare with --tolerance 1e-2.",
    "transposed": (
        "nn.Linear keeps (out, in), JAX and Keras (in, out): turn it back where the file is written, or read it by a "
        "rename table with transpose = true: vitlab convert {path} DST --map keys.toml"
    ),
    "qkv": "List the three as q, k, v, each with all its heads; a rename table (--map) can name them one by one.",
    "positions": (
        "Position tables list the prefix, then the patches row by row. Resize both from the same file by one rule: "
        'vitlab.load(FILE, image_size=..., resize_rule="bicubic")'
    ),
    "classes": "Reorder head.weight, head.bias and the label names together.",
    "channels": "One was made for BGR images: flip the channels of patch_embed.proj.weight, or of the images.",
    "scaled": "A factor was multiplied in (often 1/sqrt(d) into q): divide it out.",
    "values": f"Copy the tensor from the file that is right. {KEYS}",
}
FLAGS = {"norm.eps": "--eps", "mlp.activation": "--activation"}
LOADS = ("head.pooling", "positions.resize_rule", "classes", "grid")  # what vitlab.load can change
OTHERWISE = {
    "bias": "The bias was left out when one of them was written: write it anew, with it.",
    "heads": "Weights do not tell their heads: say them where a bare file is read (--heads), or correct the config.",
    "resized": "Resize positions once, from the original: vitlab.load(ORIGINAL, image_size=...)",
}


def remedy(kind: str, p: Side) -> str:
    return REMEDIES[kind].format(path=shlex.quote(_path(p) or "FILE"))


def by_options(kind: str, p: Side, r: Side, options: Mapping[str, object]) -> str:
    """How to give p the options of r."""
    names = {leaf: leaf.split(".")[-1] for leaf in options}
    settings = ", ".join(f"{names[leaf]}={value!r}" for leaf, value in options.items())
    if options and all(leaf in (*FLAGS, *LOADS) for leaf in options):
        path = _path(p)
        if path is None:
            return f"To make {p.letter} as {r.letter}, build or load it with {settings}"
        if all(leaf in FLAGS for leaf in options):
            flags = " ".join(f"{FLAGS[leaf]} {value}" for leaf, value in options.items())
            return f"To make {p.letter} as {r.letter}: vitlab convert {shlex.quote(path)} DST {flags}"
        return saved_anew(p, r, settings)
    return OTHERWISE.get(kind, f"These are two networks: build {p.letter} with {r.letter}'s options.")


def saved_anew(p: Side, r: Side, settings: str) -> str:
    """Load with these keywords, and save."""
    path = _path(p)
    loaded = f"vitlab.load({path!r}, {settings})" if path is not None else f"vitlab.load(FILE, {settings})"
    return f'To make {p.letter} as {r.letter}: vitlab.save({loaded}, "DST")'


def _path(side: Side) -> str | None:
    return None if side.path is None else side.path.removeprefix(PREFIX)
