"""This vitlab's plain ViT against that of another checkout, in one process, alternating: has a change made it slower?

    git worktree add ../before v0.2 && python benchmarks/versions.py ../before [--model S/16] [--rounds 21]

Prints how many operations of torch a training step runs in each, median and quartiles of a forward pass and of a
training step, and the ratio of medians (now / before).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import machine

import vitlab
from vitlab.export.timing import alternate, summary


def package_at(source: Path) -> Any:
    """The vitlab of another checkout, beside this one: its modules leave sys.modules again."""
    own = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vitlab"}
    for name in own:
        del sys.modules[name]
    sys.path.insert(0, str(source))
    try:
        import vitlab as other

        if not Path(str(other.__file__)).is_relative_to(source):
            sys.exit(f"{source}: there is no vitlab in it; name a checkout's folder.")
        other.create("vit_digits")  # imports what is imported late
        return other
    finally:
        sys.path.remove(str(source))
        for name in [name for name in sys.modules if name.split(".")[0] == "vitlab"]:
            del sys.modules[name]
        sys.modules.update(own)


def train_step(model: torch.nn.Module, images: torch.Tensor) -> None:
    model.zero_grad()
    model(images).square().mean().backward()


def operations(model: torch.nn.Module, images: torch.Tensor) -> Counter[str]:
    """How often a training step calls each operation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train_step(model.train(), images)
    return Counter(event.name for event in profile.events() or ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the folder of another checkout")
    parser.add_argument("--model", default="S/16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    print(machine())
    now = vitlab.create(args.model)
    before = package_at(args.before.resolve() / "src").create(args.model)
    before.load_state_dict(now.state_dict())
    images = torch.randn(args.batch, 3, *now.config.image_size)
    with torch.inference_mode():
        assert torch.equal(now.eval()(images), before.eval()(images)), "the two give different numbers"
    now_runs, before_runs = operations(now, images), operations(before, images)
    differ = {name: (now_runs[name], before_runs[name]) for name in now_runs | before_runs}
    differ = {name: pair for name, pair in differ.items() if pair[0] != pair[1]}
    print(f"operations of a training step: {now_runs.total():,} and {before_runs.total():,}; {differ or 'none differ'}")
    runs: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {"now": partial(now, images), "before": partial(before, images)},
        "training step": {"now": partial(train_step, now, images), "before": partial(train_step, before, images)},
    }
    for name, pair in runs.items():
        with torch.inference_mode(name == "forward"):
            now.train(name != "forward")
            before.train(name != "forward")
            times = {key: summary(seconds) for key, seconds in alternate(pair, args.rounds).items()}
        for key, row in times.items():
            low, median, high = (row[key] * 1000 for key in ("quarter", "median", "three_quarters"))
            print(f"{name}, {key}: {median:.1f} ms (quartiles {low:.1f} .. {high:.1f})")
        print(f"{name}: now / before {times['now']['median'] / times['before']['median']:.3f}, n = {args.rounds}")


if __name__ == "__main__":
    main()
