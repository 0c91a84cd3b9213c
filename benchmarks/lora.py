"""Low-rank adapters against full fine-tuning: parameters that learn, memory, disk, accuracy.

    python benchmarks/lora.py
    python benchmarks/lora.py --memory-model vit_base --batch 8 --rank 8 --seeds 5

Accuracy: bundled:digits without its head learns digits again from a few labels, by each method with several seeds.
Memory: training steps (forward, backward, AdamW) of a larger network, each method in a process of its own; stated is
the peak resident memory less that of the process before the model is built. No time is measured.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measure import Watch, machine, mean_and_spread, print_table

import vitlab
from vitlab.layers.lora import add_lora
from vitlab.training.loop import fit
from vitlab.training.optim import Optimisers
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import OptimRecipe, with_settings

METHODS = {"full fine-tuning": [], "head alone": ["model.freeze=encoder"], "LoRA": ["model.lora={rank}"]}
RATES = {"full fine-tuning": 5e-4, "head alone": 5e-3, "LoRA": 5e-3}  # the adapters start at zero and bear more


def peak() -> int:
    """Highest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_memory(name: str, batch: int, rank: int, method: str) -> dict[str, int]:
    """Parameters that learn, optimiser state and peak memory of two steps."""
    torch.manual_seed(0)
    before = peak()
    model = vitlab.create(name, classes=10).train()
    if method == "LoRA":
        add_lora(model, rank, trained=("head.",))
    elif method == "head alone":
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(key.startswith("head."))
    optimisers = Optimisers(model, OptimRecipe())
    images = torch.randn(batch, model.config.channels, *model.input_size)
    for _ in range(2):
        optimisers.zero_grad()
        model(images).logsumexp(dim=1).mean().backward()
        for part in optimisers.parts:
            part.step()
    learns = sum(p.numel() for p in model.parameters() if p.requires_grad)
    state = sum(value.nbytes for value in optimisers.tensors().values())
    return {
        "learns": learns,
        "all": sum(p.numel() for p in model.parameters()),
        "state": state,
        "peak": peak() - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-model", default="vit_base")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure_memory(args.memory_model, args.batch, args.rank, args.child)))
        return
    print(machine(), flush=True)
    print(f"\n{args.memory_model}, batches of {args.batch}, rank {args.rank}, float32, AdamW\n", flush=True)
    rows = []
    for method in METHODS:
        command = [sys.executable, __file__, "--child", method, "--memory-model", args.memory_model]
        command += ["--batch", str(args.batch), "--rank", str(args.rank)]
        values = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout
        )
        share = f"{values['learns']:,} ({values['learns'] / values['all']:.2%})"
        rows.append([method, share, f"{values['state'] / 2**20:.1f} MiB", f"{values['peak'] / 2**20:.0f} MiB"])
    print_table(["method", "parameters that learn", "optimiser state", "peak memory of a step"], rows)
    recipe = find_recipe("digits")[1]
    common = [f"data.per_class={args.per_class}", f"run.epochs={args.epochs}", f"run.eval_every={args.epochs}"]
    common += ["data.batch_size=32", "optim.name=adamw", "augment.drop_patches=0", "run.save_every=100000"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        base = vitlab.save(vitlab.load("bundled:digits", classes=0), Path(folder) / "base")
        for number, (method, settings) in enumerate(METHODS.items()):
            scores, sizes = [], set[int]()
            for seed in range(args.seeds):
                own = [setting.format(rank=args.rank) for setting in settings]
                own += [f"run.seed={seed}", f"optim.lr={RATES[method]}", f"model.init_from={base}"]
                run = Path(folder) / f"{number}-{seed}"
                scores.append(fit(with_settings(recipe, [*common, *own]), run, show=Watch())["top1"])
                saved = run / ("adapter" if method == "LoRA" else "best")
                sizes.add(sum(path.stat().st_size for path in saved.iterdir()))
            rows.append([method, mean_and_spread(scores), f"{max(sizes) / 1024:.0f} KiB"])
    print(f"\ndigits, {args.per_class} labels of each class, {args.epochs} epochs, n = {args.seeds}\n")
    print_table(["method", "test top-1, mean (spread)", "saved alone"], rows)


if __name__ == "__main__":
    main()
