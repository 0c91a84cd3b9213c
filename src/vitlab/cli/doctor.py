"""vitlab doctor."""

from __future__ import annotations

import json
from pathlib import Path

from vitlab.cli.console import out
from vitlab.training.doctor import check_installation
from vitlab.training.runlog import read_log


def run(folder: Path | None) -> None:
    if folder is not None:
        _run(folder)
        return
    rows = check_installation()
    for what, well, words in rows:
        out().print(f"{'ok ' if well else 'BAD'} {what:16s} {words}", markup=False)
    if not all(well for _, well, _ in rows):
        raise SystemExit(1)


def _run(folder: Path) -> None:
    """How a run went, from what it left behind."""
    if not (folder / "recipe.toml").is_file():
        raise ValueError(f"{folder}: holds no recipe.toml, so it is not a run. `vitlab runs` lists those in runs/.")
    console = out()
    replay = folder / "replay" / "step.json"
    if replay.is_file():
        step = json.loads(replay.read_text(encoding="utf-8"))
        console.print(f"BAD the run broke at step {step['step']}: loss {step['loss']}; {step['cause']}.", markup=False)
        console.print(
            f"    Its batch and weights are in {replay.parent}. Try optim.lr={step['lr'] / 3:.1e}.", markup=False
        )
        raise SystemExit(1)
    log = read_log(folder)
    skipped = [e for e in log if e["kind"] == "skip"]
    if skipped:
        console.print(f"BAD {len(skipped)} pictures could not be read, e.g. {skipped[0]['message']}", markup=False)
    for said in dict.fromkeys(e["text"] for e in log if e["kind"] == "doctor"):
        console.print(f"BAD {said}", markup=False)
    trained = [e for e in log if e["kind"] == "train"]
    losses = [e["loss"] for e in trained]
    if any("teacher_entropy" in e for e in trained):  # of DINO: it may rise while all is well
        last = trained[-1]
        told = {"entropy of the teacher": "teacher_entropy", "directions used": "rank", "spread": "teacher_std"}
        signs = ", ".join(f"{words} {last[key]:.2f}" for words, key in told.items() if key in last)
        console.print(f"    loss {losses[0]:.3f} -> {losses[-1]:.3f}, which says little; {signs}", markup=False)
    elif len(losses) >= 4 and losses[-1] > 0.98 * losses[0]:
        console.print(
            f"BAD the training loss has not fallen: {losses[0]:.3f} -> {losses[-1]:.3f}. Try another optim.lr."
        )
    elif losses:
        console.print(f"ok  training loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if (folder / "result.json").is_file():
        console.print("ok  the run is finished")
    else:
        console.print(f"    the run is not finished. Go on: vitlab train --resume {folder}", markup=False)
