"""The counter agrees with torch's, and networks in other threads do not notice it."""

from __future__ import annotations

import threading

import torch
from torch.utils.flop_counter import FlopCounterMode

import vitlab
from vitlab.explain.flops import flop_counter


def test_totals_are_torchs():
    model, x = vitlab.create("vit_digits", depth=2), torch.randn(2, 1, 8, 8)
    with flop_counter() as ours:
        model(x)
    with FlopCounterMode(display=False) as theirs:
        model(x)
    assert ours.get_total_flops() == theirs.get_total_flops() > 0


def test_another_thread_runs_its_network_meanwhile():
    """torch's own counter fails here: its hooks would ask this network's position table for its gradient."""
    model, x, found = vitlab.create("vit_digits", depth=1).eval(), torch.randn(1, 1, 8, 8), []

    def run() -> None:
        with torch.inference_mode():
            found.append(model(x))

    with flop_counter():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(found) == 1
