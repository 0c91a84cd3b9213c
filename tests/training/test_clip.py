"""CLIP through the loop: it learns words, is judged by others, goes on exactly after a stop, and says what is wrong."""

import csv
import io
import json
import math
import os
import signal
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitlab
from vitlab.images.datasets import open_data
from vitlab.text.templates import LISTS, class_prompts, fill, read_templates
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import evaluate_zeroshot
from vitlab.training.job import prepare
from vitlab.training.loop import Silent, Stopped, fit
from vitlab.training.objectives.base import MicroStep
from vitlab.training.objectives.clip import CLIPOptions
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import read_recipe, with_settings
from vitlab.training.runlog import read_log

TINY = [
    *("model.image.width=32", "model.image.depth=1", "model.text.width=32", "model.text.depth=1", "model.stem=patch"),
    *("model.embed_dim=16", "data.batch_size=32", "run.epochs=2", "run.eval_every=2"),
]
LABELS = ",".join("0123456789")


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Two thirds of the recipe for digits: some 20 s on one core."""
    run = tmp_path_factory.mktemp("clip") / "run"
    result = fit(with_settings(find_recipe("clip_digits")[1], ["run.epochs=20", "run.eval_every=20"]), run)
    return run, result


def test_digits_are_told_apart_by_sentences_that_were_not_learned(learned):
    run, result = learned
    assert result["judged_by"] == "zero-shot top-1" and result["templates"] == "held_out"
    assert result["top1"] >= 0.9
    said = (run / "report.html").read_text(encoding="utf-8")
    assert "zero-shot top-1" in said and not [e for e in read_log(run) if e["kind"] == "doctor"]


def test_the_lists_share_no_sentence():
    assert not set(LISTS["train"]) & set(LISTS["held_out"])
    for name, templates in LISTS.items():
        assert len(set(templates)) == len(templates) and all(t.count("{}") == 1 for t in templates), name


def test_zero_shot_is_the_nearest_mean_of_sentences(learned, command):
    """Picture by picture, class by class, sentence by sentence."""
    run, result = learned
    model, data = vitlab.load(run / "best"), open_data("digits")
    sentences = read_templates("held_out")
    classes = []
    with torch.no_grad():
        for name in data.classes:
            each = [model.encode_text(model.tokenizer(s.replace("{}", name)))[0] for s in sentences]
            total = sum(vector / vector.norm() for vector in each) / len(each)
            classes.append(total / total.norm())
        right = 0
        for i in range(len(data.test)):
            pixels = torch.from_numpy(data.test.read(i)).permute(2, 0, 1).float() / 255
            image = model.encode_image((pixels[None] - 0.5) / 0.5)[0]
            answer = max(range(10), key=lambda k: float(image @ classes[k]))
            right += answer == data.test.labels[i]
    torch.testing.assert_close(model.class_embeddings(class_prompts(data.classes, sentences)), torch.stack(classes))
    assert result["top1"] == pytest.approx(right / len(data.test), abs=1e-6)
    found = json.loads(command("eval", run / "best", "digits", "--zeroshot", "--json").stdout)
    assert found["top1"] == pytest.approx(result["top1"]) and found["loss"] == pytest.approx(result["loss"], rel=1e-4)
    assert found["templates"] == {"list": "held_out", "sentences": sentences, "learned_from": 0}
    text = command("eval", run / "best", "digits", "--zeroshot", "--templates", "train").stdout
    assert "24 templates of train, 24 of them learned from" in text


def test_the_verb_zeroshot(learned, command, tmp_path):
    run, _ = learned
    model = vitlab.load(run / "best")
    found = json.loads(command("zeroshot", run / "best", "digits#3", "digits#7", "--labels", LABELS, "--json").stdout)
    weights = model.class_embeddings(class_prompts(list("0123456789"), read_templates("train")))
    with torch.no_grad():
        pixels, _ = ImageSet(open_data("digits").test, model.preprocess).normalised(np.array([3, 7]))
        chances = (model.scale * model.encode_image(pixels) @ weights.T).softmax(1)
    for row, expected in zip(found, chances, strict=True):
        values, order = expected.topk(5)
        assert [s["label"] for s in row["scores"]] == [str(int(i)) for i in order]
        assert [s["probability"] for s in row["scores"]] == pytest.approx(values.tolist(), abs=1e-5)
    (tmp_path / "words.txt").write_text("3\n\n8\n", encoding="utf-8")
    (tmp_path / "no.png").write_bytes(b"no picture")
    done = command(
        "zeroshot", run / "best", "digits#3", tmp_path / "no.png", "--labels", tmp_path / "words.txt", code=1
    )
    assert "1 of 2 images" in done.stderr and done.stdout.count("%") == 2
    once = vitlab.inference.embed_labels(model, ["3", "8"], "a {}")
    picture = np.repeat(open_data("digits").test.read(3), 3, axis=2)
    alone, reused = (vitlab.zero_shot(model, picture, labels, templates="a {}") for labels in (["3", "8"], once))
    assert alone == reused and sum(p for _, p in alone[0].scores) == pytest.approx(1)


def test_the_words_of_zeroshot_must_make_sense(learned, command):
    best = learned[0] / "best"
    for words, says in {
        ("--labels", ","): "names nothing",
        ("--labels", "3,3"): "'3' is given twice",
        ("--labels", "3", "--templates", "no such"): "Lists: train, held_out",
        ("--labels", "3", "--templates", "heldout"): "Did you mean 'held_out'?",
        ("--labels", "3", "--templates", "a {} and a {}"): "must hold {} once",
    }.items():
        assert says in command("zeroshot", best, "digits#3", *words, code=2).stderr
    assert "reads no text" in command("zeroshot", "bundled:digits", "digits#3", "--labels", "3", code=2).stderr
    assert "vitlab zeroshot" in command("predict", best, "digits#3", code=2).stderr
    assert "family vit" in command("eval", "bundled:digits", "digits", "--zeroshot", code=2).stderr
    assert "leave them out" in command("eval", best, "digits", "--zeroshot", "--knn", code=2).stderr


def test_it_can_be_fine_tuned_and_its_features_judged(learned, tmp_path, command):
    """As a CLIP that goes on, and as an encoder that gets a classifier."""
    run, result = learned
    on = with_settings(find_recipe("clip_finetune")[1], [f"model.init_from={run}/best", "optim.lr=1e-30"])
    on = with_settings(on, ["data.source=digits", "data.workers=0", "data.per_class=13", "optim.weight_decay=0"])
    on = with_settings(on, ["run.epochs=1", "augment.crop=none", "augment.flip=false"])
    assert fit(on, tmp_path / "on")["top1"] == pytest.approx(result["top1"])  # nothing has moved
    files = [run / "best" / "tokenizer.json", tmp_path / "on" / "best" / "tokenizer.json"]
    assert files[0].read_text(encoding="utf-8") == files[1].read_text(encoding="utf-8")
    settings = [f"model.init_from={run}/best", "run.epochs=1", "data.per_class=10", "optim.warmup_epochs=0"]
    tuned = fit(with_settings(find_recipe("digits")[1], settings), tmp_path / "tuned")
    assert tuned["judged_by"] == "top-1" and vitlab.load(tmp_path / "tuned" / "best").family == "vit"
    found = json.loads(command("eval", run / "best", "digits", "--knn", "--json").stdout)
    assert found["knn"] > 0.9


def test_a_locked_image_tower_stays_as_it_was(tmp_path):
    """LiT (arXiv:2111.07991): the bundled ViT, whose classes are gone, learns to be asked in words."""
    recipe = find_recipe("clip_digits")[1]
    recipe = replace_model(recipe, ["model.init_image=bundled:digits", "model.freeze=encoder"])
    recipe = with_settings(recipe, ["run.epochs=8", "run.eval_every=8", "augment.crop=none", "optim.name=adamw"])
    show = Silent()
    result = fit(recipe, tmp_path / "run", show=show)
    assert result["top1"] > 0.8 and any("locked" in note for note in show.notes)
    tower = vitlab.load("bundled:digits").state_dict()
    kept = load_file(tmp_path / "run" / "last" / "weights.safetensors")
    for key in (key for key in kept if key.startswith("image.")):
        assert torch.equal(kept[key], tower[key.removeprefix("image.")]), key
    assert not any(key.startswith("image.") for key in load_file(tmp_path / "run" / "last" / "optimizer.safetensors"))
    assert vitlab.load(tmp_path / "run" / "best").preprocess == vitlab.load("bundled:digits").preprocess


def test_a_tower_of_another_checkpoint_is_taken_as_it_is_or_at_another_size(tmp_path):
    """Grey digits of 8 px for a ViT that has read colour at 32: its own preprocess sees to that."""
    recipe = replace_model(find_recipe("clip_digits")[1], [*TINY[2:4], "model.init_image=bundled:cifar10"])
    job = prepare(recipe, tmp_path / "as it is")
    tower = vitlab.load("bundled:cifar10", classes=0)
    for key, value in job.model.image.state_dict().items():
        assert torch.equal(value, tower.state_dict()[key]), key
    assert job.steps[0, 0].images.shape[1:] == (3, 32, 32) and job.model.preprocess == tower.preprocess
    job = prepare(with_settings(recipe, ["model.image_size=48"]), tmp_path / "larger")
    larger = vitlab.load("bundled:cifar10", classes=0, image_size=48)
    torch.testing.assert_close(job.model.image.positions.table, larger.positions.table)
    assert job.model.preprocess.size == (48, 48) and any("resized from" in note for note in job.notes)


def replace_model(recipe, settings: list[str]):
    """Of the model only what the settings say; its own options are those of another network."""
    from dataclasses import replace

    plain = replace(recipe, model=type(recipe.model)(name=recipe.model.name))
    return with_settings(plain, settings)


# ---- the loss of a step


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_pictures_of_one_class_are_no_negatives_of_each_other(loss, tmp_path):
    settings = [*TINY, f"objective.loss={loss}", "objective.templates=a {}|one {}"]
    job = prepare(with_settings(find_recipe("clip_digits")[1], settings), tmp_path)
    batch = job.steps[3, 0]
    job.objective.begin_step(3, job.optimisers)
    inputs = job.objective.inputs(batch, MicroStep(0, 3))
    with torch.no_grad():
        found, _ = job.objective.loss(job.forward, inputs)
        images, texts = job.forward(inputs["images"], inputs["ids"])
    scale, labels, n = job.model.scale.item(), batch.labels.tolist(), len(batch.labels)
    assert len(set(labels)) < n
    total = 0.0
    for i in range(n):
        mine = float(images[i] @ texts[i])
        rivals = [j for j in range(n) if labels[j] != labels[i]]
        if loss == "softmax":
            for others in (
                [float(images[i] @ texts[j]) for j in rivals],
                [float(images[j] @ texts[i]) for j in rivals],
            ):
                whole = math.log(sum(math.exp(scale * x) for x in (mine, *others)))
                total += (whole - scale * mine) / (2 * n)
        else:
            bias = job.model.bias.item()
            total += math.log1p(math.exp(-(scale * mine + bias))) / n
            total += sum(math.log1p(math.exp(scale * float(images[i] @ texts[j]) + bias)) for j in rivals) / n
    assert float(found) == pytest.approx(total, rel=1e-4)


def test_sentences_are_drawn_by_seed_epoch_and_index(tmp_path):
    job = prepare(with_settings(find_recipe("clip_digits")[1], TINY), tmp_path)
    words, indices = job.objective.captions, np.array([5, 900, 5])
    drawn = words.draw(indices, seed=0, epoch=4)
    assert drawn == words.draw(indices, seed=0, epoch=4) and drawn[0] == drawn[2]
    over = {words.draw(np.array([5]), seed=0, epoch=epoch)[0] for epoch in range(300)}
    name = job.data.classes[job.data.train.labels[5]]
    assert over == {fill(template, name) for template in LISTS["train"]}
    per_epoch = job.plan.steps_per_epoch
    batch = job.steps[per_epoch, 0]
    ids = job.objective.inputs(batch, MicroStep(0, per_epoch))["ids"]
    expected = job.model.tokenizer(words.draw(batch.indices.numpy(), seed=0, epoch=1))
    assert torch.equal(ids, expected[:, : ids.shape[1]]) and (expected[:, ids.shape[1] :] == expected[0, -1]).all()


# ---- captions


COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "grey": (128, 128, 128)}


@pytest.fixture(scope="module")
def painted(tmp_path_factory) -> Path:
    """A tar of 2 x 2 colours with two captions each, which name the upper and the lower two."""
    rng, rows = np.random.default_rng(0), io.StringIO()
    table, files = csv.writer(rows), {}
    table.writerow(["image", "split", "caption"])
    for i in range(192):
        names = [list(COLOURS)[k] for k in rng.integers(0, 4, 4)]
        pixels = np.array([COLOURS[name] for name in names], dtype=np.uint8).reshape(2, 2, 3)
        file = io.BytesIO()
        Image.fromarray(pixels.repeat(8, 0).repeat(8, 1)).save(file, "PNG")
        files[f"images/{i}.png"] = file.getvalue()
        split = "train" if i < 128 else "val" if i < 160 else "test"
        table.writerow([f"{i}.png", split, "{} and {} above {} and {}".format(*names)])
        table.writerow([f"{i}.png", split, "{3} beside {2} , below {1} beside {0}".format(*names)])
    path = tmp_path_factory.mktemp("painted") / "painted.tar"
    with tarfile.open(path, "w") as tar:
        for name, data in {**files, "captions.csv": rows.getvalue().encode()}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def captioned(painted: Path, *settings: str):
    plain = replace_model(find_recipe("clip_folder")[1], [*TINY, f"data.source={painted}", "data.workers=0"])
    small = ["model.image_size=16", "model.patch_size=8", "augment.crop=none", "augment.flip=false", "text.vocab=600"]
    return with_settings(plain, [*small, "text.context=16", "run.save_every=3", "optim.warmup_epochs=0", *settings])


def test_captions_are_learned_and_judged_by_recall(painted, tmp_path, command):
    run = tmp_path / "run"
    result = fit(captioned(painted, "run.epochs=30", "run.eval_every=10", "optim.lr=3e-3"), run)
    assert result["judged_by"] == "recall@1" and result["split"] == "test"
    for way in ("image_to_text", "text_to_image"):
        assert result["recall"][way]["5"] > 2 * result["chance"][way]["5"], result["recall"]
    found = json.loads(command("eval", run / "best", painted, "--json").stdout)
    assert found["recall"] == {way: pytest.approx(result["recall"][way]) for way in found["recall"]}
    assert found["captions"] == 2 * found["images"] == 64
    text = command("eval", run / "best", painted, "--split", "val").stdout
    assert "image -> caption" in text and "recall@10" in text and "chance" in text
    assert "above" in (run / "report.html").read_text(encoding="utf-8")  # captions of samples
    assert "leave out --zeroshot" in command("eval", run / "best", painted, "--zeroshot", code=2).stderr
    assert "family vit" in command("eval", "bundled:digits", painted, code=2).stderr
    assert "captions   train 256 (2 per image)" in command("data", painted).stdout


class StopAt(Silent):
    def __init__(self, step: int):
        super().__init__()
        self.at = step

    def step(self, done, numbers):
        if done == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


def test_with_captions_a_stopped_run_goes_on_to_the_same_bits(painted, tmp_path):
    recipe = captioned(painted, "augment.crop=resized", "optim.ema=0.9")
    straight = fit(recipe, tmp_path / "straight")
    with pytest.raises(Stopped):
        fit(recipe, tmp_path / "run", show=StopAt(5))
    assert fit(recipe, tmp_path / "run", resume=True)["recall"] == straight["recall"]
    for name in ("weights", "optimizer", "ema"):
        one, other = (load_file(tmp_path / run / "last" / f"{name}.safetensors") for run in ("straight", "run"))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), name


def test_a_picture_that_cannot_be_read_is_left_out(tmp_path):
    for i in range(12):
        Image.new("RGB", (9, 9), (20 * i, 0, 0)).save(tmp_path / f"{i:02d}.png")
        (tmp_path / f"{i:02d}.txt").write_text(f"shade {i}", encoding="utf-8")
    (tmp_path / "05.png").write_bytes(b"broken")
    result = fit(captioned(tmp_path, "data.batch_size=1", "data.val_fraction=0.3", "run.epochs=1"), tmp_path / "run")
    assert result["unreadable"] == 1 and math.isfinite(result["loss"])


# ---- what is wrong


def said_by_the_doctor(settings: list[str], run: Path) -> list[str]:
    short = ["optim.warmup_epochs=0", "run.epochs=4", "data.per_class=40"]
    recipe = with_settings(find_recipe("clip_digits")[1], [*TINY, *short, *settings])
    fit(recipe, run)
    return [event["text"] for event in read_log(run) if event["kind"] == "doctor"]


def test_the_doctor_sees_a_loss_that_stays_at_ln_b_and_a_collapse(tmp_path, monkeypatch):
    said = said_by_the_doctor(["optim.lr=1e-6", "optim.muon_lr=1e-6"], tmp_path / "slow")
    assert any("are not matched yet" in words for words in said), said
    said = said_by_the_doctor(["objective.loss=sigmoid", "optim.lr=1e-9", "optim.muon_lr=1e-9"], tmp_path / "sigmoid")
    assert any("are not matched yet" in words for words in said), said
    from vitlab.models.clip import CLIP

    plain = CLIP.encode_text
    monkeypatch.setattr(CLIP, "encode_text", lambda self, ids, **more: 0 * plain(self, ids, **more) + 0.25)
    said = said_by_the_doctor([], tmp_path / "collapsed")
    assert any("all texts get nearly the same embedding" in words for words in said), said


WRONG = {
    "clip_digits augment.mixup=0.2": "does not learn",
    "clip_digits model.name=vit_digits": "model.name=clip_nano",
    "clip_digits objective.templates=nothing": "Lists: train, held_out",
    "clip_digits objective.eval_templates=heldout": "Did you mean 'held_out'?",
    "clip_digits text.tokenizer=nothing.json": "no such file",
    "clip_digits text.vocab=100": "too small",
    "clip_digits model.init_image=a model.init_from=b": "leave out model.init_image",
    "clip_digits model.init_from=bundled:digits": "of the family clip",
    "clip_digits model.init_image=bundled:mae": "the weights have stem=patch",
    "clip_digits model.init_image=bundled:digits model.image.width=32": "vitlab train clip_lit",
    "clip_digits model.init_image=nowhere": "no such file or folder",
    "clip_digits model.freeze=encoder": "model.init_image=bundled:cifar10",
    "clip_digits run.sharding=fsdp": "not yet for clip",
    "digits model.init_image=bundled:digits": "objective.name=clip",
    "digits model.name=clip_digits": "objective.name=clip",
}


@pytest.mark.parametrize(("settings", "says"), WRONG.items())
def test_what_does_not_belong_together_is_told(settings, says, command, tmp_path):
    short = ["run.epochs=1", "data.per_class=2"]  # should one of them begin to train
    said = command("train", *settings.split(), *short, f"run.dir={tmp_path / 'run'}", code=2).stderr
    assert says in " ".join(said.split())
    assert not (tmp_path / "run").exists()


def test_captions_without_an_objective_for_them(painted, command, tmp_path):
    folder = f"run.dir={tmp_path / 'run'}"
    text = command("train", "digits", f"data.source={painted}", folder, code=2).stderr
    assert "has captions and no classes" in text and "vitlab train clip_folder" in text
    assert find_recipe(str(painted))[1] == with_settings(find_recipe("clip_folder")[1], [f"data.source={painted}"])
    assert "clip_folder" in command("train", painted, "--minutes", "1", folder, code=2).stderr


def test_the_recipe_of_a_run_tells_how_it_was_judged(learned):
    recipe = read_recipe(learned[0] / "recipe.toml")
    assert (CLIPOptions.of(recipe).templates, CLIPOptions.of(recipe).eval_templates) == ("train", "held_out")
    model = vitlab.load(learned[0] / "best")
    other = evaluate_zeroshot(model, ImageSet(open_data("digits").test, model.preprocess), list("0123456789"), ["{}"])
    assert other.top(1) > 0.85  # the bare name, too, is a sentence it has not seen
