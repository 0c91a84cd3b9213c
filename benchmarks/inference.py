"""Eager float32 forward of our ViT, or Swin, against transformers' with the same weights, in one process, alternating.

    python benchmarks/inference.py [--models S/16,B/16] [--batch 8] [--rounds 21] [--json]
    python benchmarks/inference.py --models swin_tiny

Prints the median and spread of each, the ratio of medians (ours / theirs; 1.03 or less counts as no slower), and how
much of the machine's own matrix-product rate each reaches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import machine
from transformers import SwinConfig, SwinForImageClassification, ViTForImageClassification
from transformers import ViTConfig as HFConfig

from vitlab.checkpoints import hf, keymap, swin
from vitlab.explain.sizes import size_of
from vitlab.export.timing import alternate, summary
from vitlab.models.registry import build, find


def pair(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Our model and transformers', with equal weights."""
    entry, _ = find(name)
    ours = build(entry.family, entry.config).eval()
    if entry.family == "swin":
        return ours, their_swin(ours)
    rules, prefix = hf.write_rules(ours.config)
    state = keymap.write("transformers", rules, dict(ours.state_dict()), prefix=prefix, heads=ours.config.heads)
    config = {k: v for k, v in hf.config_for(ours.config, None).items() if k not in ("architectures", "dtype")}
    config["attn_implementation"] = "sdpa"
    theirs = ViTForImageClassification(HFConfig(**config)).eval()
    missing = theirs.load_state_dict(in_memory_names(state), strict=True)
    assert not missing.missing_keys
    return ours, theirs


def their_swin(ours: Any) -> torch.nn.Module:
    state, config = swin.write(ours, dict(ours.state_dict()), "hf")
    assert config["drop_path_rate"] == 0.0  # nothing is left out in training
    config: Any = {k: v for k, v in config.items() if k not in ("architectures", "dtype")}
    config |= {"attn_implementation": "sdpa"}
    theirs = SwinForImageClassification(SwinConfig(**config)).eval()
    changes = (
        ("attention.self.query", "attention.q_proj"),
        ("attention.self.key", "attention.k_proj"),
        ("attention.self.value", "attention.v_proj"),
        (
            "attention.self.relative_position_bias_table",
            "attention.relative_position_bias.relative_position_bias_table",
        ),
        ("attention.output.dense", "attention.o_proj"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.dense", "mlp.fc2"),
    )
    named = _replaced({key: value for key, value in state.items() if "position_index" not in key}, changes)
    theirs.load_state_dict(named, strict=True)
    return theirs


def in_memory_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers 5 uses other names in memory than in files."""
    changes = (
        ("encoder.layer.", "layers."),
        ("attention.attention.query", "attention.q_proj"),
        ("attention.attention.key", "attention.k_proj"),
        ("attention.attention.value", "attention.v_proj"),
        ("attention.output.dense", "attention.o_proj"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.dense", "mlp.fc2"),
    )
    return _replaced(state, changes)


def _replaced(state: dict[str, torch.Tensor], changes: tuple[tuple[str, str], ...]) -> dict[str, torch.Tensor]:
    found = {}
    for key, value in state.items():
        for old, new in changes:
            key = key.replace(old, new)
        found[key] = value
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="S/16,B/16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    if not args.json:
        print(machine())
    rows = []
    for name in args.models.split(","):
        ours, theirs = pair(name)
        title = name if name.startswith("swin") else f"ViT-{name}"
        images = torch.randn(args.batch, 3, *ours.config.image_size)  # type: ignore[union-attr]
        a, b = torch.randn(2, 1536, 1536)
        with torch.inference_mode():
            difference = float((ours(images) - theirs(images).logits).abs().max())
            runs: dict[str, Callable[[], object]] = {
                "vitlab": partial(ours, images),
                "transformers": partial(theirs, images),
                "gemm": partial(torch.mm, a, b),
            }
            times = {who: summary(values) for who, values in alternate(runs, args.rounds).items()}
        macs = size_of(find(name)[0].name)[1] * args.batch
        rate = 1536**3 / times["gemm"]["median"]
        ratio = times["vitlab"]["median"] / times["transformers"]["median"]
        share = {who: macs / times[who]["median"] / rate for who in ("vitlab", "transformers")}
        rows.append(
            {"model": name, "batch": args.batch, "ratio": ratio, "difference": difference, "gemm_share": share, **times}
        )
        if not args.json:
            for who in ("vitlab", "transformers"):
                t = times[who]
                print(
                    f"{title} batch {args.batch} {who:13s} median {1e3 * t['median']:7.1f} ms, half of the runs in "
                    f"{1e3 * t['quarter']:.1f} .. {1e3 * t['three_quarters']:.1f} ms, n={t['n']}, "
                    f"{share[who]:.0%} of the GEMM rate"
                )
            verdict = "no slower" if ratio <= 1.03 else "SLOWER"
            print(f"{title} ratio of medians {ratio:.3f} ({verdict}); largest logit difference {difference:.1e}")
    if args.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
