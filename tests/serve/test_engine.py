"""The engine of a server: other arithmetic, the same scores; a backend that gives others is not used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vitlab
from vitlab.export.runners import Runner, RunnerFactory
from vitlab.serve import engine as module
from vitlab.serve.engine import exact_engine
from vitlab.serve.model_pool import ServedModel


@pytest.fixture
def small():
    torch.manual_seed(3)
    return vitlab.create("vit_cifar", depth=1, width=32, heads=2, classes=5)


def test_scores_are_the_models_in_every_size_of_batch(small, monkeypatch):
    monkeypatch.setattr(module, "BACKENDS", ("eager", "onnx"))
    monkeypatch.setattr(module, "fastest", lambda rows, agreement: rows[1] if rows[1].within else None)
    plain, fast = ServedModel("plain", small), ServedModel("fast", small, exact_engine(small, 3))
    assert fast.engine is not None and fast.engine.chosen.name == "onnx"
    images = [
        small.preprocess(np.random.default_rng(i).integers(0, 256, (40, 50, 3), dtype=np.uint8)) for i in range(4)
    ]
    for batch in (images[:1], images[:3], images):
        for ours, theirs in zip(
            fast.batch_function("predict")(batch), plain.batch_function("predict")(batch), strict=True
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    for ours, theirs in zip(fast.batch_function("embed")(images), plain.batch_function("embed")(images), strict=True):
        assert torch.equal(ours, theirs)  # by the model itself


def test_a_backend_with_other_scores_is_not_used(small, monkeypatch):
    made = RunnerFactory.make

    def wrong(factory: RunnerFactory, backend: str, reducer: str | None = None) -> Runner:
        runner = made(factory, "eager", reducer)
        if backend != "eager":
            runner = Runner(backend, lambda x, run=runner.run: run(x) + 0.01, runner.bytes)
        return runner

    monkeypatch.setattr(RunnerFactory, "make", wrong)
    monkeypatch.setattr(module, "ROUNDS", 2)
    assert exact_engine(small, 2) is None


def test_what_has_no_classifier_runs_as_it_is():
    assert exact_engine(vitlab.create("mae_digits", depth=1), 2) is None
