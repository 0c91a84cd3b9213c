"""Running statistics of batch norm: averaged with the weights, and one and the same in all processes."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import vitlab
from vitlab.training.batchnorm import statistics, update_average
from vitlab.training.job import TrainingJob, prepare, steps_of
from vitlab.training.recipe import Recipe, with_settings

TINY = ["model.name=resnet_cifar", "model.image_size=8", "model.stem_width=8", "model.widths=[8, 12, 16]"]
ONE_STEP = [
    *(*TINY, "data.source=digits", "data.per_class=6", "data.batch_size=30", "run.epochs=1"),
    *("optim.name=sgd", "optim.lr=0.1", "optim.weight_decay=0"),
]


def buffers(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def test_the_average_of_the_weights_averages_the_statistics_too():
    model = vitlab.create("resnet_cifar", stem_width=4, widths=[4, 4, 4]).train()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    expected: dict[str, torch.Tensor] = {}
    for step in range(4):
        with torch.no_grad():
            for value in model.parameters():
                value.add_(torch.randn_like(value), alpha=0.1)
            model(2 * torch.randn(4, 3, 16, 16) + step)
        update_average(average, model, 0.8)
        now = {**buffers(model), **{name: value.detach().clone() for name, value in model.named_parameters()}}
        if not step:
            expected = {name: value.double() for name, value in now.items()}
        expected = {name: 0.8 * expected[name] + 0.2 * now[name].double() for name in now}
    found = average.module.state_dict()
    assert len(statistics(average)) == 2 * sum(name.endswith("running_var") for name in found) > 10
    for name, value in found.items():
        if name.endswith("num_batches_tracked"):
            assert value == 4
        else:
            torch.testing.assert_close(value.double(), expected[name], msg=name, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_all_processes_have_the_mean_of_their_statistics_when_they_judge(sharding, tmp_path, monkeypatch, fit_in_two):
    kept = TrainingJob.save_best

    def telling(job):
        save_file(buffers(job.evaluated_model), tmp_path / f"judged{job.who.rank}.safetensors")
        kept(job)

    monkeypatch.setattr(TrainingJob, "save_best", telling)
    recipe = with_settings(Recipe(), [*ONE_STEP, f"run.sharding={sharding}", "optim.ema=0.5"])
    assert fit_in_two(recipe, tmp_path / "two") == [0, 0]
    judged = [load_file(tmp_path / f"judged{rank}.safetensors") for rank in range(2)]

    job = prepare(with_settings(Recipe(), ONE_STEP), tmp_path / "one")  # the same first weights
    parts = []
    for rank in range(2):
        model = copy.deepcopy(job.model).train()
        model(steps_of(recipe, job.data, model.preprocess, rank, 2)[0, 0].images)
        parts.append(buffers(model))
    for name, value in parts[0].items():
        other = parts[1][name]
        assert torch.equal(judged[0][name], judged[1][name]), name
        torch.testing.assert_close(
            judged[0][name], (value + other) / 2 if value.is_floating_point() else value, msg=name
        )
        assert not value.is_floating_point() or (value - other).abs().max() > 1e-4, name
    assert json.loads((tmp_path / "two" / "result.json").read_text(encoding="utf-8"))["steps"] == 1
