"""examples/vit_from_scratch/train_cifar10.py: it reads the official files, learns, and goes on where it was killed."""

import colorsys
import io
import os
import pickle
import random
import signal
import sys
import tarfile
import time
import types

import augment
import numpy as np
import pytest
import torch
import train_cifar10 as train
import visualize_attention
from PIL import Image
from vit_model import VisionTransformer, ViTConfig

import vitlab
from vitlab.images import randaugment as reference

RECORDS = 24  # in each of the six files
NAMES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
TINY = ["--width", "32", "--depth", "2", "--heads", "2", "--batch-size", "16", "--wandb", "off"]


def batches() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images (n, 3, 32, 32) and labels: each class is a colour, under noise."""
    rng = np.random.default_rng(0)
    colours = np.array([colorsys.hsv_to_rgb(i / 10, 0.9, 0.4 + 0.5 * (i % 2)) for i in range(10)]) * 255
    made = {}
    for name in NAMES:
        labels = rng.permutation(RECORDS) % 10
        planes = colours[labels][:, :, None, None] + rng.normal(0, 20, (RECORDS, 3, 32, 32))
        made[name] = planes.clip(0, 255).astype(np.uint8), labels
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The binary version as a folder."""
    folder = tmp_path_factory.mktemp("cifar-10-batches-bin")
    for name, (images, labels) in batches().items():
        records = np.concatenate([labels[:, None].astype(np.uint8), images.reshape(RECORDS, -1)], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def test_every_form_of_the_files_is_read(data, tmp_path):
    with tarfile.open(tmp_path / "binary.tar.gz", "w:gz", compresslevel=1) as tar:
        tar.add(data, "cifar-10-batches-bin")
    with tarfile.open(tmp_path / "python.tar.gz", "w:gz", compresslevel=1) as tar:
        for name, (images, labels) in batches().items():
            content = pickle.dumps({b"data": images.reshape(RECORDS, -1), b"labels": labels.tolist()}, protocol=4)
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    parts = [batches()[name] for name in NAMES]
    images, labels = (np.concatenate(part) for part in zip(*parts[:5], strict=True))
    for path in (data, tmp_path / "binary.tar.gz", tmp_path / "python.tar.gz"):
        (x, y), (test_x, test_y) = train.read_cifar10(path)
        assert x.dtype == torch.uint8 and np.array_equal(x, images) and np.array_equal(y, labels)
        assert np.array_equal(test_x, parts[5][0]) and np.array_equal(test_y, parts[5][1])


class Malicious:
    def __reduce__(self):
        return print, ("executed",)


def test_a_pickle_cannot_run_code(tmp_path, capsys):
    for name in NAMES:
        (tmp_path / name).write_bytes(pickle.dumps({b"data": Malicious()}, protocol=4))
    with pytest.raises(pickle.UnpicklingError, match="print does not belong"):
        train.read_cifar10(tmp_path)
    assert "executed" not in capsys.readouterr().out
    (tmp_path / "test_batch").unlink()
    with pytest.raises(SystemExit, match="no test_batch in it"):
        train.read_cifar10(tmp_path)


def test_it_learns_and_its_checkpoint_is_drawn_and_loaded(data, tmp_path, capsys, monkeypatch):
    calls = []
    tracker = types.SimpleNamespace(init=lambda **options: calls.append(options), log=calls.append)
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    command = ["--data", str(data), "--out", str(tmp_path), "--epochs", "8", "--lr", "3e-3", *TINY]
    train.main([*command, "--wandb", "offline"])
    printed = capsys.readouterr().out
    assert calls[0]["mode"] == "offline" and [call["epoch"] for call in calls[1:]] == list(range(1, 9))
    top1 = float(printed.split("test top-1 ")[1].split("%")[0]) / 100
    assert top1 > 0.7  # chance is 0.1

    model = visualize_attention.load(tmp_path / "last.pt").eval()
    pixels = dict(mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic", how="crop")
    theirs = vitlab.load(tmp_path / "last.pt", heads=2, image_size=32, eps=1e-6, activation="gelu", preprocess=pixels)
    images, labels = batches()["test_batch"]
    x = torch.from_numpy(images).float() / 127.5 - 1
    with torch.inference_mode():
        logits = model(x)
        torch.testing.assert_close(theirs(x), logits, rtol=0, atol=1e-5)
    assert (logits.argmax(1).numpy() == labels).mean() == pytest.approx(top1, abs=1e-4)


def test_killed_and_resumed_it_has_the_same_weights(data, tmp_path):
    command = ["--data", str(data), "--epochs", "4", *TINY, "--randaugment", "2", "9", "--mixup", "0.8"]
    command += ["--cutmix", "1", "--erasing", "0.5", "--stochastic-depth", "0.2", "--pool", "mean"]
    train.main([*command, "--out", str(tmp_path / "straight")])

    saved = tmp_path / "killed" / "last.pt"
    child = os.fork()
    if child == 0:
        train.main([*command, "--out", str(saved.parent)])
        os._exit(0)
    deadline = time.monotonic() + 60
    while not saved.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert torch.load(saved)["epoch"] < 4

    with pytest.raises(SystemExit, match="--epochs was 4"):
        train.main([*command, "--out", str(saved.parent), "--epochs", "5", "--resume"])
    train.main([*command, "--out", str(saved.parent), "--resume"])
    straight, resumed = torch.load(tmp_path / "straight" / "last.pt"), torch.load(saved)
    assert straight["epoch"] == resumed["epoch"] == 4
    for key, value in straight["model"].items():
        assert torch.equal(value, resumed["model"][key]), key


def test_learning_rate_is_torchs_linear_and_cosine():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 10, total_iters=9)
    rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], milestones=[10])
    for step in range(50):
        assert train.learning_rate(step, 50, 10, 0.3) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        schedule.step()


def test_norms_biases_positions_and_class_token_do_not_decay():
    model = VisionTransformer(ViTConfig(image_size=16, patch_size=8, width=16, depth=1, heads=2))
    decaying, others = (
        {name for name, p in model.named_parameters() if any(p is q for q in group["params"])}
        for group in train.adamw(model, 0.05).param_groups
    )
    assert {name for name in others if name.endswith("weight")} == {
        *("blocks.0.norm1.weight", "blocks.0.norm2.weight", "norm.weight")
    }
    assert decaying == {f"{name}.weight" for name in ("patch_embed.proj", "head")} | {
        f"blocks.0.{name}.weight" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    }


# ---- augmentation


def test_crops_are_windows_of_the_padded_image():
    images = torch.randint(1, 256, (64, 3, 32, 32), dtype=torch.uint8)
    out = augment.crop_and_flip(images)
    places = set()
    for before, after in zip(images, out, strict=True):
        fits = []
        for flipped in (False, True):
            padded = np.pad((before.flip(-1) if flipped else before).numpy(), ((0, 0), (4, 4), (4, 4)))
            for row in range(9):
                for column in range(9):
                    if np.array_equal(padded[:, row : row + 32, column : column + 32], after):
                        fits.append((flipped, row, column))
        assert len(fits) == 1
        places.update(fits)
    assert {flipped for flipped, _, _ in places} == {False, True} and len(places) > 30


COLOURS = (
    "identity",
    "autocontrast",
    "equalize",
    "solarize",
    "posterize",
    "color",
    "contrast",
    "brightness",
    "sharpness",
)


@pytest.mark.parametrize("magnitude", [-0.9, 0.9, 0.3])
def test_operations_on_colours_are_vitlabs(magnitude):
    image = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    for name, ours in zip(COLOURS, augment.OPERATIONS, strict=False):
        operation = reference.OPERATIONS[name]
        strength = magnitude if operation.signed else abs(magnitude)
        value = torch.tensor([operation.rest + (operation.full - operation.rest) * strength], dtype=torch.float64)
        if name in ("solarize", "posterize"):
            value = value.round()
        expected = operation.apply(image, value, torch.zeros(3, dtype=torch.uint8))
        picture = ours(Image.fromarray(image[0].permute(1, 2, 0).numpy()), magnitude)
        assert np.array_equal(np.asarray(picture).transpose(2, 0, 1), expected[0]), name


def test_geometry_moves_the_image():
    """A dot at row 8, column 20 of 32."""
    array = np.zeros((32, 32, 3), dtype=np.uint8)
    array[8, 20] = 255
    names = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
    where = {}
    for name, operation in zip(names, augment.OPERATIONS[len(COLOURS) :], strict=True):
        bright = np.asarray(operation(Image.fromarray(array), 1.0)).min(axis=2) == 255
        where[name] = tuple(int(i) for i in np.argwhere(bright)[0]) if bright.any() else None
    assert where["translate_x"] == (8, 20 - 14) and where["translate_y"] is None  # 0.45 * 32 = 14.4: it left
    assert where["shear_x"][0] == 8 and where["shear_x"][1] < 20 and where["shear_y"][1] == 20
    row, column = where["rotate"]
    assert abs((row - 15.5) ** 2 + (column - 15.5) ** 2 - (7.5**2 + 4.5**2)) < 15  # as far from the centre


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_labels_are_mixed_as_the_pixels_are(kind):
    random.seed(0)
    colour = torch.arange(8.0).reshape(8, 1, 1, 1).expand(8, 3, 32, 32)  # the image's number in each pixel
    options = dict(mixup=1.0, cutmix=0.0) if kind == "mixup" else dict(mixup=0.0, cutmix=1.0)
    for _ in range(20):
        mixed, targets = augment.mix(colour, torch.eye(8), **options)
        expected = (targets * torch.arange(8.0)).sum(dim=1)  # the mean number, by the labels
        torch.testing.assert_close(mixed.mean(dim=(1, 2, 3)), expected, rtol=0, atol=1e-5)
        if kind == "cutmix":
            assert torch.equal(mixed, mixed.round())  # pixels are pasted, not blended


def test_erasing_replaces_a_box_in_some_images():
    random.seed(0)
    out = augment.erase(torch.full((400, 3, 32, 32), 9.0), probability=0.25)
    changed = (out != 9).all(dim=1)  # (B, 32, 32)
    share = changed.float().mean(dim=(1, 2))
    assert 0.15 < (share > 0).float().mean() < 0.35 and share.max() <= 0.36
    for mask in changed[share > 0]:
        rows, columns = mask.any(dim=1), mask.any(dim=0)
        assert mask.sum() == rows.sum() * columns.sum()  # a box
