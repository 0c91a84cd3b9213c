"""Learning without labels, through the loop: it learns, it goes on exactly after a kill, and its encoder is of use."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vitlab.checkpoints.load import load, load_with_report
from vitlab.checkpoints.native import save
from vitlab.errors import TrainingError
from vitlab.factory import create
from vitlab.images.datasets import open_data
from vitlab.models.mae import MaskedAutoencoder
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import features, knn_accuracy
from vitlab.training.job import prepare
from vitlab.training.loop import Silent, fit
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import read_recipe, with_settings
from vitlab.training.runlog import RunLog, read_log

DATA = Path(__file__).parent.parent / "data"
QUICK = {
    "mae": ["model.depth=2", "run.epochs=8", "run.eval_every=8", "optim.warmup_epochs=2"],
    "dino": ["model.depth=2", "run.epochs=4", "run.eval_every=4", "optim.warmup_epochs=1"],
}


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A short run of each method on digits; each takes some 3 s on one core."""
    found = {}
    for method, settings in QUICK.items():
        run = tmp_path_factory.mktemp("ssl") / method
        found[method] = run, fit(with_settings(find_recipe(f"{method}_digits")[1], settings), run)
    return found


def test_mae_paints_better_than_the_mean_of_the_pixels(learned):
    run, _ = learned["mae"]
    model = load(run / "best")
    images, _ = ImageSet(open_data("digits").test, model.preprocess).normalised(np.arange(128))
    noise = torch.rand(128, 16, generator=torch.Generator().manual_seed(0))
    assert isinstance(model, MaskedAutoencoder)
    with torch.no_grad():
        out = model(images, noise)
    target, hidden = model.target(images), out.mask.bool()
    baseline = (target - target[hidden].mean(dim=0)).square().mean(dim=-1)[hidden].mean()  # the mean of each pixel
    assert out.loss < 0.8 * baseline


def test_dino_finds_the_digits_and_does_not_collapse(learned, tmp_path):
    run, result = learned["dino"]
    assert result["judged_by"] == "k-NN top-1" and result["top1"] > 0.6  # chance: 0.1
    job = prepare(read_recipe(run / "recipe.toml"), tmp_path)
    untrained = job.objective.evaluate(job.model, ImageSet(job.data.test, job.model.preprocess), final=True)
    assert result["top1"] > untrained.top(1) + 0.01  # even random convolutions tell digits apart, but less well
    last = [event for event in read_log(run) if event["kind"] == "train"][-1]
    assert last["rank"] > 5 and last["teacher_std"] > 0.1 and 0 < last["teacher_entropy"] < math.log(256)


@pytest.mark.parametrize("method", QUICK)
def test_the_encoder_can_be_fine_tuned_and_judged(method, learned, tmp_path, command):
    run, result = learned[method]
    assert (
        result["objective"] == method
        and json.loads((run / "result.json").read_text(encoding="utf-8"))["top1"] == result["top1"]
    )
    recipe = with_settings(
        find_recipe("digits")[1], ["run.epochs=2", "data.per_class=10", f"model.init_from={run}/best"]
    )
    tuned = fit(recipe, tmp_path / "tuned")
    first = load_with_report(run / "best", encoder=True, classes=10)[0]
    assert first.config.classes == 10 and tuned["params"] == sum(p.numel() for p in first.parameters())
    source = load_file(run / "best" / "weights.safetensors")
    prefix = {"mae": "encoder.", "dino": "teacher."}[method]
    for key, value in first.state_dict().items():
        assert key.startswith("head.") or torch.equal(value, source[prefix + key]), key
    data = open_data("digits")
    bank, queries = (features(first.eval(), ImageSet(part, first.preprocess)) for part in (data.train, data.test))
    assert knn_accuracy(bank, queries) == pytest.approx(result["top1"], abs=0.003)  # the run's own figure
    more = [torch.cat(pair) for pair in zip(bank, features(first, ImageSet(data.val, first.preprocess)), strict=True)]
    found = json.loads(command("eval", run / "best", "digits", "--knn", "--probe", "--json").stdout)
    assert found["knn"] == pytest.approx(knn_accuracy((more[0], more[1]), queries), abs=0.003)  # train and val
    assert found["linear_probe"] > found["knn"] - 0.1


class FirstLosses(Silent):
    def __init__(self):
        super().__init__()
        self.losses = []

    def step(self, done, numbers):
        self.losses.append(numbers["loss"])


@pytest.mark.parametrize("method", QUICK)
def test_training_continues_from_an_encoder_alone(method, learned, tmp_path):
    """Features and k-NN before the first step are the file's; the decoder or head is new; sizes are the file's."""
    run, result = learned[method]
    encoder = load(run / "best", encoder=True)
    save(encoder, tmp_path / "encoder")
    recipe = find_recipe(f"{method}_digits")[1]  # of another depth
    job = prepare(with_settings(recipe, [f"model.init_from={tmp_path / 'encoder'}"]), tmp_path / "job")
    images = torch.randn(4, 1, 8, 8)
    job.model.eval()
    with torch.no_grad():
        assert torch.equal(job.model.features(images), encoder.features(images))
    scores = job.objective.evaluate(job.model, ImageSet(job.data.test, job.model.preprocess), final=True)
    assert scores.top(1) == pytest.approx(result["top1"], abs=1e-6) and job.model.config.depth == 2
    whole = load_file(run / "best" / "weights.safetensors")
    new = {key.split(".")[0] for key, value in job.model.state_dict().items() if not torch.equal(value, whole[key])}
    assert new <= {"decoder", "student", "student_head", "teacher_head", "centre"} and new & {"decoder", "student_head"}
    if method == "dino":  # the student begins as the teacher
        assert all(torch.equal(v, job.model.teacher.state_dict()[k]) for k, v in job.model.student.state_dict().items())
    assert any("Untrained: " in note and "encoder" in note for note in job.notes)


def test_a_whole_mae_continues_with_smaller_patches(learned, tmp_path):
    """An image of 8 x 8 in patches of 1: the projection is that of the file, resized; the decoder is new."""
    run, _ = learned["mae"]
    recipe = with_settings(find_recipe("mae_digits")[1], [f"model.init_from={run / 'best'}", "model.patch_size=1"])
    job = prepare(recipe, tmp_path / "job")
    before = load_file(run / "best" / "weights.safetensors")
    after = job.model.state_dict()
    assert job.model.encoder.grid_of((8, 8)) == (8, 8) and any("Untrained: decoder" in note for note in job.notes)
    assert torch.equal(after["encoder.blocks.0.attention.qkv.weight"], before["encoder.blocks.0.attention.qkv.weight"])
    weight = "encoder.patch_embed.proj.weight"
    assert torch.allclose(after[weight], before[weight].sum((2, 3), keepdim=True), atol=1e-5)  # a flat patch: equal


def test_a_whole_checkpoint_continues_with_its_loss(learned, tmp_path):
    """The first steps of a new run start where the old one ended, far below a start from scratch."""
    run, _ = learned["mae"]
    losses = {}
    for name, source in {"continued": [f"model.init_from={run / 'best'}"], "scratch": []}.items():
        settings = ["model.depth=2", "run.epochs=1", "data.per_class=32", "run.seed=3", *source]
        show = FirstLosses()
        fit(with_settings(find_recipe("mae_digits")[1], settings), tmp_path / name, show=show)
        losses[name] = show.losses[0]
    last = [event["loss"] for event in read_log(run) if event["kind"] == "train"][-1]
    assert losses["continued"] < 1.3 * last and losses["scratch"] > 1.7 * last


def test_a_new_decoder_learns_before_the_encoder_and_the_loss_falls_below_a_new_start(tmp_path):
    """mae_encoder: the encoder alone of 60 epochs. At the same seed its run ends far below one from scratch."""
    encoder, size = DATA / "mae_encoder", ["model.width=32", "model.heads=2", "model.depth=2"]
    common = [*size, "run.epochs=5", "run.eval_every=5", "optim.warmup_epochs=1", "run.seed=3"]
    waits = [f"model.init_from={encoder}", "objective.freeze_encoder_epochs=2"]
    losses, notes = {}, {}
    for name, settings in {"scratch": [], "encoder": waits}.items():
        show = FirstLosses()
        fit(with_settings(find_recipe("mae_digits")[1], [*common, *settings]), tmp_path / name, show=show)
        losses[name], notes[name] = np.mean(show.losses[-16:]), show.notes
    assert losses["encoder"] < 0.93 * losses["scratch"]
    assert any("frozen for the first 32 steps (2 epochs)" in note for note in notes["encoder"])
    assert not any("frozen" in note for note in notes["scratch"])


@pytest.mark.parametrize(
    ("method", "freeze", "waits"),
    [("mae", "none", True), ("mae", "0", False), ("dino", "none", False), ("dino", "0", False), ("dino", "1", True)],
)
def test_the_encoder_waits_for_what_is_new_around_it(method, freeze, waits, tmp_path):
    """MAE's by default for the warm-up, but half of the run at most; DINO's if it is told. The new part never waits."""
    save(create(f"{method}_digits", **({"stem": "conv"} if method == "dino" else {})), tmp_path / "whole")
    save(load(tmp_path / "whole", encoder=True), tmp_path / "encoder")
    settings = ["data.per_class=32", "run.epochs=2", "run.save_every=1", f"objective.freeze_encoder_epochs={freeze}"]
    recipe = with_settings(find_recipe(f"{method}_digits")[1], [*settings, f"model.init_from={tmp_path / 'encoder'}"])
    job = prepare(recipe, tmp_path / "job")
    assert job.objective.frozen_steps == (job.plan.total // 2 if waits else 0)
    parts = {
        "encoder": job.objective.trained_encoder(),
        "new": job.model.decoder if method == "mae" else job.model.student_head,
    }
    for parameter in job.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    job.objective.before_update(0)
    assert all((p.grad is None) == waits for p in parts["encoder"].parameters())
    assert all(p.grad is not None for p in parts["new"].parameters())
    whole = prepare(
        with_settings(recipe, [f"model.init_from={tmp_path / 'whole'}", "objective.freeze_encoder_epochs=none"]),
        tmp_path / "job",
    )
    assert whole.objective.frozen_steps == 0  # nothing around the encoder is new


def test_training_continues_from_other_libraries_encoders(tmp_path):
    """transformers' ViTMAE, DINO, DINOv2 and DINOv3 without heads, of their own sizes; what does not fit is refused."""
    transformers = pytest.importorskip("transformers")
    common = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, num_channels=1)
    torch.manual_seed(0)
    kinds = {
        "mae": transformers.ViTMAEModel(
            transformers.ViTMAEConfig(**common, intermediate_size=48, image_size=8, patch_size=2)
        ),
        "dino": transformers.ViTModel(
            transformers.ViTConfig(**common, intermediate_size=40, image_size=8, patch_size=4)
        ),
        "dinov2": transformers.Dinov2Model(transformers.Dinov2Config(**common, image_size=12, patch_size=2)),
        "dinov3": transformers.DINOv3ViTModel(
            transformers.DINOv3ViTConfig(
                **{**common, "num_attention_heads": 2}, intermediate_size=48, image_size=8, patch_size=2
            )
        ),
    }
    grey = {"image_mean": [0.5], "image_std": [0.5], "image_processor_type": "ViTImageProcessor"}
    for name, theirs in kinds.items():
        theirs.eval().save_pretrained(tmp_path / name)
        size = theirs.config.image_size
        (tmp_path / name / "preprocessor_config.json").write_text(json.dumps({**grey, "size": size}), encoding="utf-8")
    for method, name in (("mae", "mae"), ("mae", "dino"), *(("dino", name) for name in kinds)):
        recipe = with_settings(find_recipe(f"{method}_digits")[1], [f"model.init_from={tmp_path / name}"])
        recipe = with_settings(recipe, ["model.stochastic_depth=0.1", "model.width=64"] if method == "dino" else [])
        job = prepare(recipe, tmp_path / "job")
        size = kinds[name].config.image_size
        images = torch.randn(2, 1, size, size)
        with torch.no_grad():
            ours = job.model.eval().forward_features(images)
            options = {"noise": torch.arange(16.0).expand(2, 16)} if name == "mae" else {}
            if name == "mae":
                kinds[name].config.mask_ratio = 0.0
            theirs = kinds[name](images, **options).last_hidden_state
        assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 1e-5, (method, name)
        assert any("model.width=64 is not used" in note for note in job.notes) == (method == "dino")
        save(job.model, tmp_path / "saved")
        assert load(tmp_path / "saved").config == job.model.config
    recipe = with_settings(find_recipe("mae_digits")[1], [f"model.init_from={tmp_path / 'dinov2'}"])
    with pytest.raises(TrainingError, match=r"cannot be continued by mae: .* this one has residual.layer_scale"):
        prepare(recipe, tmp_path / "job")
    with pytest.raises(TrainingError, match=r"model.name must be a mae, not vit_digits"):
        prepare(with_settings(recipe, ["model.name=vit_digits"]), tmp_path / "job")


WRONG = {
    "objective.name=distill": "objective.teacher=runs/NAME/best",
    "objective.teacher=runs/a/best": "is for objective.name=distill",
    "objective.cache=true": "objective.name=supervised",
    "objective.name=mae augment.mixup=0.2": "does not learn",
}


@pytest.mark.parametrize(("settings", "says"), WRONG.items())
def test_what_does_not_belong_together_is_told(settings, says, command, tmp_path):
    recipe = "mae_digits" if "mae" in settings else "digits"
    assert says in command("train", recipe, *settings.split(), f"run.dir={tmp_path / 'run'}", code=2).stderr
    assert not (tmp_path / "run").exists()


def test_a_method_and_its_model_must_fit(command):
    text = command("train", "digits", "model.name=mae_digits", code=2).stderr
    assert "objective.name=mae" in text
    text = command("train", "mae_digits", "model.name=vit_digits", code=2).stderr
    assert "family mae" in text and "model.name=mae_cifar" in text


def run_with(method: str, settings: list[str], run) -> list[str]:
    """What the doctor says of a short run."""
    common = ["run.epochs=2", "run.eval_every=2", "model.width=32", "model.depth=2"]
    common += ["data.batch_size=32", "data.per_class=16"]  # ten steps
    fit(with_settings(find_recipe(f"{method}_digits")[1], [*common, *settings]), run)
    return [event["text"] for event in read_log(run) if event["kind"] == "doctor"]


def test_the_doctor_sees_a_learning_rate_of_nothing(tmp_path, command):
    for method in ("mae", "dino"):
        said = run_with(method, ["optim.lr=1e-30", "optim.muon_lr=1e-30", "optim.weight_decay=0"], tmp_path / method)
        assert any("no weight moves" in words for words in said), said


def test_the_doctor_sees_a_collapse_without_centring(tmp_path, command):
    """Without centring, and with a sure teacher that follows at once, every picture gets the same output."""
    sure = ["model.centring=false", "objective.teacher_temperature=[0.005, 0.005]", "objective.momentum=0.5"]
    said = run_with(
        "dino", [*sure, "objective.freeze_last_epochs=0", "run.epochs=12", "run.eval_every=12"], tmp_path / "run"
    )
    assert any("centring" in words for words in said), said
    assert "BAD" in command("doctor", tmp_path / "run", code=1).stdout


def test_the_doctor_sees_a_mask_that_is_the_wrong_way_round(tmp_path, monkeypatch):
    from vitlab.models import mae

    right = mae.choose_visible
    monkeypatch.setattr(mae, "choose_visible", lambda *a: (lambda keep, mask: (keep, 1 - mask))(*right(*a)))
    said = run_with("mae", [], tmp_path / "run")
    assert any("wrong way round" in words for words in said), said


def test_a_batch_of_nan_stops_the_run_and_says_where(tmp_path, monkeypatch):
    from vitlab.training.doctor import DivergedError
    from vitlab.training.objectives.mae import MaskedReconstruction

    plain = MaskedReconstruction.inputs

    def broken(self, batch, at):
        inputs = plain(self, batch, at)
        return {k: v * float("nan") if at.step == 5 else v for k, v in inputs.items()}

    monkeypatch.setattr(MaskedReconstruction, "inputs", broken)
    with pytest.raises(DivergedError, match=r"step 5 .*the images of the batch hold NaN"):
        run_with("mae", [], tmp_path / "run")


def test_the_doctor_is_silent_about_a_healthy_run(learned, command):
    for method, (run, _) in learned.items():
        assert not [event for event in read_log(run) if event["kind"] == "doctor"], method
        assert "BAD" not in command("doctor", run).stdout, method
    assert "entropy of the teacher" in command("doctor", learned["dino"][0]).stdout


def test_a_loss_of_dino_that_rises_is_no_fault(tmp_path, command):
    """The teacher is unsure first; only then there is something to say."""
    (tmp_path / "recipe.toml").write_text('[objective]\nname = "dino"\n', encoding="utf-8")
    with RunLog(tmp_path) as log:
        for step in range(1, 9):
            log.write("train", step, loss=3.0 + step / 10, lr=1e-3, teacher_entropy=2.5, rank=9.0, teacher_std=0.3)
    assert "BAD" not in command("doctor", tmp_path).stdout
