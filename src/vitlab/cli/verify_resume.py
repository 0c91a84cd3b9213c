"""vitlab verify-resume."""

from __future__ import annotations

import os
from dataclasses import asdict

from vitlab.cli.console import out, print_json_text, say
from vitlab.cli.progress import following_downloads
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import with_settings
from vitlab.training.runlog import to_json
from vitlab.training.verify import ResumeReport, verify_resume

NAMED = 5  # tensors that differ


def run(what: str, settings: list[str], kills: int, steps: int, json: bool) -> None:
    _, recipe = find_recipe(what)
    # Python warns of what killed processes left behind, as it tidies up.
    os.environ["PYTHONWARNINGS"] = os.environ.get("PYTHONWARNINGS", "") + ",ignore:resource_tracker"
    with following_downloads():
        verdict = verify_resume(with_settings(recipe, settings), kills=kills, steps=steps, note=say)
    if json:
        print_json_text(to_json({"identical": verdict.identical, **asdict(verdict)}))
    else:
        _show(verdict)
    if not verdict.identical:
        raise SystemExit(1)


def _show(verdict: ResumeReport) -> None:
    from rich.table import Table

    console = out(markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("kill", "after step", "resumed at", "done again"):
        table.add_column(title, justify="right")
    for number, kill in enumerate(verdict.kills, 1):
        table.add_row(str(number), str(kill.after), str(kill.resumed), str(kill.after - kill.resumed))
    console.print(table)
    run = f"after {verdict.steps} steps and {len(verdict.kills)} kills ({verdict.seconds:.0f} s)"
    if verdict.identical:
        console.print(f"identical to the bit: {verdict.tensors} tensors of weights and optimiser {run}")
        return
    if verdict.broke:
        console.print(f"FAILED: {verdict.broke}.")
    else:
        console.print(f"DIFFERENT: {len(verdict.differences)} of {verdict.tensors} tensors {run}")
    for difference in verdict.differences[:NAMED]:
        by = "only in one of the two" if difference.largest is None else f"by up to {difference.largest:.3g}"
        console.print(f"  {difference.name} {by}")
    if verdict.repeatable is False:
        console.print("Two runs that nobody stopped differ too: this device does not repeat its own results.")
    elif verdict.repeatable:
        console.print("Two runs that nobody stopped are identical: it is the resuming that changes them.")
    console.print(f"Both runs are kept in {verdict.folder}")
