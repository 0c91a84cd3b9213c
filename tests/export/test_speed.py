"""Folding, optimize and bench: the same answers by every way, and what is picked. Speed itself is not tested."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import vitlab
import vitlab.cli.main
from vitlab import optional
from vitlab.errors import UsageError
from vitlab.export import Comparison
from vitlab.export.bench import BackendResult, default_reducers, fastest, run_bench
from vitlab.export.fold import fold, without_layer_scale
from vitlab.export.runners import RunnerFactory
from vitlab.export.timing import peak_memory, summary
from vitlab.reduce import reducer_of


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("vit_base", dict(layer_scale=0.3, qkv_bias=False, width=24, depth=2, heads=3, patch_size=8), (24, 32)),
        ("vit_base", dict(norm="post", qk_norm=True, width=24, depth=2, heads=3, patch_size=8), (24, 32)),
        ("swin_cifar", dict(), (22, 30)),  # windows are filled up
        ("resnet_cifar", dict(), (32, 32)),
    ],
)
def test_folded_is_the_same_function(name, options, size, grown):
    model = grown(name, image_size=size, classes=5, **options).double()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        torch.testing.assert_close(fold(model)(x), model(x), atol=1e-10, rtol=1e-10)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_without_layer_scale_is_the_same_function_and_saves_as_a_plain_vit(tiny, tmp_path):
    model = tiny(layer_scale=0.1).eval()
    plain = without_layer_scale(model)
    assert plain.config == model.config.with_options(layer_scale=0.0)
    assert not any("scale" in name for name, _ in plain.named_parameters())
    x = torch.randn(2, 3, *model.config.image_size)
    torch.testing.assert_close(plain(x), model(x), atol=1e-5, rtol=0)
    vitlab.save(plain, tmp_path)
    assert torch.equal(vitlab.load(tmp_path)(x), plain(x))


def test_folded_under_a_reducer(tiny):
    model = tiny().double()
    x, reducer = torch.randn(2, 3, 24, 32, dtype=torch.float64), reducer_of("evit:keep=0.6")
    torch.testing.assert_close(fold(model)(x, reducer=reducer), model(x, reducer=reducer), atol=1e-10, rtol=1e-10)


def test_compiled_and_frozen_is_the_same_function(tiny, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # processes that compile would each import torch
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", True)  # is not tried by compiling for it
    model = tiny(depth=1)
    runner = RunnerFactory(model).make("compiled")
    for batch in (2, 2):
        x = torch.randn(batch, 3, 24, 32)
        with torch.no_grad():
            torch.testing.assert_close(runner.run(x), model(x), atol=1e-5, rtol=1e-5)


def test_bench_compares_with_eager_and_picks(tiny):
    model = tiny()
    bench = run_bench(
        model,
        batch=2,
        rounds=3,
        compare=Comparison(images=5),
        backends=("folded", "onnx", "int8"),
        reducers=[],
        against=["transformers"],
    )
    assert not bench.notes
    rows = {row.title: row for row in bench.rows}
    exact = ["eager", "folded", "onnx", "transformers"]
    assert list(rows) == ["eager", "folded", "onnx", "int8", "transformers"]
    for title, row in rows.items():
        assert row.within == (title in exact), title
        assert len(row.seconds) == 3 and row.bytes > 0
    assert rows["int8"].bytes < rows["onnx"].bytes
    assert bench.picked is not None and bench.picked.name != "transformers"
    assert json.loads(json.dumps(bench.to_dict()))["rows"][0]["speedup"] == 1.0


def row(name: str, seconds: float, agreement: float, within: bool, ours: bool = True) -> BackendResult:
    return BackendResult(name, None, agreement, 0.0, within, 1, None, [seconds] * 3, 1.0, ours)


def test_picked_is_the_fastest_that_agrees():
    rows = [
        row("eager", 4, 1.0, True),
        row("onnx", 3, 1.0, True),
        row("int8", 2, 0.995, False),
        row("merged", 1, 0.9, False),
        row("theirs", 0.5, 1.0, True, ours=False),
    ]
    assert [fastest(rows, asked).name for asked in (1.0, 0.99, 0.9)] == ["onnx", "int8", "merged"]  # type: ignore


@pytest.mark.parametrize("goal", ["exact", "small", "fast"])
def test_optimize(goal, tiny, monkeypatch):
    """By ways that need no compiler; the result takes the model's place."""
    from vitlab.export import optimize as module

    for name in ("exact", "fast"):
        monkeypatch.setitem(module.BACKENDS, name, ("eager", "folded"))
    model, merged = tiny(depth=2), "tome:r=2"
    x = torch.randn(4, 3, 24, 32)
    best = vitlab.optimize(model, x, goal, agreement=0.5 if goal == "small" else 0.0, reducers=[merged], rounds=1)
    tried = {"exact": [], "small": ["int8"], "fast": [f"eager + {merged}", f"folded + {merged}"]}[goal]
    assert [row.title for row in best.rows] == ["eager", *(["folded"] if goal != "small" else []), *tried]
    if goal == "small":
        assert best.chosen.title == "int8"
    else:  # the fastest of those that may be taken: by rounding alone, or all
        allowed = [row for row in best.rows if row.within or goal == "fast"]
        assert best.chosen is min(allowed, key=lambda row: summary(row.seconds)["median"])
    with torch.no_grad():
        expected = model(x, reducer=reducer_of(merged)) if best.chosen.reducer else model(x)
    assert (best(x) - expected).abs().max() < (1.0 if goal == "small" else 1e-5)
    picture = torch.randint(0, 255, (24, 32, 3), dtype=torch.uint8).numpy()
    assert vitlab.predict(best, picture)[0].label in model.labels


def test_optimize_refuses_what_it_does_not_know(tiny):
    with pytest.raises(ValueError, match="exact, fast, small"):
        vitlab.optimize(tiny(), torch.randn(1, 3, 24, 32), "faster")  # type: ignore[arg-type]


def test_bench_with_fewer_tokens(tiny):
    bench = run_bench(
        tiny(patch_size=4, depth=2),
        batch=2,
        rounds=3,
        compare=Comparison(images=5),
        backends=("eager", "folded"),
        reducers=["tome:r=9"],
    )
    assert [row.title for row in bench.rows] == ["eager", "folded", "eager + tome:r=9", "folded + tome:r=9"]
    assert [row.within for row in bench.rows] == [True, True, False, False]
    assert default_reducers(tiny(patch_size=4)) == ["tome:r=24"]  # half of 48 patches, in one layer


def test_a_rival_that_is_not_installed_is_named_before_anything_runs(tiny, monkeypatch):
    monkeypatch.setattr(optional, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--against transformers needs transformers.*vitlab\[compare\]"):
        run_bench(tiny(), batch=2, rounds=1, backends=("folded",), reducers=[], against=["transformers"])


def test_memory_is_what_a_run_needs_and_not_what_is_left_of_the_last_one():
    """In pieces that the C library keeps after they are freed."""
    work = lambda: [torch.ones(2**14) for _ in range(512)]  # 32 MiB
    for _ in range(2):
        found = peak_memory(work)
        assert found is None or 0.8 * 2**25 < found < 1.5 * 2**25


def test_bench_command(capsys, monkeypatch):
    asked = ["--ways", "folded", "--reducer", "none", "--rounds", "3", "--images", "8", "--json"]
    monkeypatch.setattr(sys, "argv", ["vitlab", "bench", "bundled:digits", *asked])
    with pytest.raises(SystemExit) as stopped:
        vitlab.cli.main.run()
    found = json.loads(capsys.readouterr().out)
    assert not stopped.value.code
    assert [row["way"] for row in found["rows"]] == ["eager", "folded"]
    assert found["picked"] in ("eager", "folded")
