"""CIFAR-10 in a page: everything that recipes/cifar10_30min.toml does, with the loop written out.

    python examples/train_cifar10.py --data cifar-10-binary.tar.gz

It ends with the weights that `vitlab train cifar10_30min` has after its last step, to the bit; a test compares them.
Then `vitlab predict runs/train_cifar10 cat.png` asks the model about an image of yours.
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import vitlab
from vitlab.images.augment import Augment, AugmentOptions
from vitlab.images.datasets import Dataset, open_data
from vitlab.images.mix import smooth_targets
from vitlab.images.randomness import permutation, torch_seed
from vitlab.training.batches import ORDER
from vitlab.training.job import MODEL as WEIGHTS  # the draws of a model: first weights, dropped patches
from vitlab.training.optim import Optimisers, lr_factor
from vitlab.training.recipe import OptimRecipe
from vitlab.training.runlog import RunLog

SEED, EPOCHS, BATCH = 0, 13, 128
VAL = 0.02  # of the training images are kept for validation; the test set is looked at once, at the end
# A 4 x 4 patch of CIFAR says little by itself: the convolutional stem sees its neighbours too and learns faster.
MODEL = dict(width=128, depth=6, heads=4, stem="conv", class_token=False, pooling="mean", layer_scale=0.1)
# A cat moved by a few pixels, or mirrored, is still a cat: 50,000 images become many more.
AUGMENT = AugmentOptions(crop="padded", padding=4, flip=True)
SMOOTHING = 0.1  # of the labels: nobody is quite sure, so the model need not be either
DROP_PATCHES, DROP_UNTIL = 0.5, 0.65  # half of the patches, for this part of the run: a step takes about half as long
# Muon makes the momentum of every matrix in the blocks orthogonal before it steps; AdamW takes the rest.
OPTIM = OptimRecipe(name="muon", lr=2e-3, muon_lr=0.014, weight_decay=0.05, schedule="linear", warmup_epochs=0.5)


def pixels(split: Dataset) -> tuple[Tensor, Tensor]:
    """All images of a split, (N, 3, 32, 32) uint8, and their labels (N,)."""
    images = np.stack([split.read(i) for i in range(len(split))])  # (N, 32, 32, 3)
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(split.labels)


@torch.inference_mode()
def accuracy(model: torch.nn.Module, augment: Augment, images: Tensor, labels: Tensor) -> float:
    """Share of right answers; each image is asked twice, once mirrored, which gains a little for free."""
    model.eval()
    right = 0
    for x, y in zip(images.split(500), labels.split(500), strict=True):
        x = augment.normalize(x)
        right += int(((model(x) + model(x.flip(-1))).argmax(dim=1) == y).sum())
    return right / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="cifar-10-binary.tar.gz or its folder; without it: found, or downloaded")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--limit", type=int, help="train on this many images only")
    parser.add_argument("--wandb", choices=("offline", "online", "off"), default="offline")
    parser.add_argument("--out", type=Path, default=Path("runs/train_cifar10"), help="folder for the model and its log")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    data = open_data("cifar10", path=args.data, seed=SEED, val_fraction=VAL)
    if data.test is None:
        raise SystemExit(f"{args.data}: has no test split. Pass cifar-10-binary.tar.gz, or add test/ beside train/.")
    (train, labels), (val, val_labels), (test, test_labels) = map(pixels, (data.train, data.val, data.test))
    train, labels = train[: args.limit], labels[: args.limit]
    val, val_labels, test, test_labels = (t.to(device) for t in (val, val_labels, test, test_labels))

    # Nothing random depends on what was drawn before, only on (seed, epoch, image) or (seed, step): a run can be
    # repeated, and one that was killed could go on, without any state of a generator.
    torch.manual_seed(torch_seed(SEED, WEIGHTS))
    model = vitlab.create("vit_cifar", classes=len(data.classes), **MODEL).to(device)
    model.labels = data.classes  # travels in the checkpoint
    augment = Augment(AUGMENT, model.preprocess.size, model.preprocess.mean, model.preprocess.std)
    optimisers = Optimisers(model, OPTIM)  # norms, biases and positions do not decay
    batch = min(BATCH, len(train))
    steps = len(train) // batch  # of an epoch
    total, warmup = steps * args.epochs, round(OPTIM.warmup_epochs * steps)
    track = args.wandb if find_spec("wandb") else "off"
    settings = dict(model=MODEL, optim=OPTIM.to_dict(), epochs=args.epochs, batch=batch, images=len(train))
    log = RunLog(args.out, wandb=track, config=settings, name="train_cifar10")
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(train):,} images, {parameters:,} parameters, {total:,} steps, wandb {track}", flush=True)

    start = time.perf_counter()
    for epoch in range(args.epochs):
        model.train()
        order = permutation(len(train), SEED, ORDER, epoch)  # every epoch its own
        losses = 0.0
        for step in range(epoch * steps, (epoch + 1) * steps):
            indices = order[step % steps * batch :][:batch]
            x = augment(train[indices], indices, seed=SEED, epoch=epoch).to(device)  # (B, 3, 32, 32)
            targets = smooth_targets(labels[indices], len(data.classes), SMOOTHING).to(device)  # (B, 10)
            # Warm-up: the first gradients point anywhere. Then the rate falls in a line to 0, where the loss settles.
            lr = optimisers.set_factor(lr_factor(step, total, warmup=warmup, schedule=OPTIM.schedule, final=0.0))
            model.patch_dropout = DROP_PATCHES if step < DROP_UNTIL * total else 0.0
            torch.manual_seed(torch_seed(SEED, WEIGHTS, step, 0, 0))  # which patches are dropped

            loss = F.cross_entropy(model(x), targets)
            optimisers.zero_grad()
            loss.backward()
            for part in optimisers.parts:  # Muon, AdamW
                part.step()
            losses += float(loss.detach())
            log.write("train", step + 1, loss=float(loss.detach()), lr=lr)
        top1 = accuracy(model, augment, val, val_labels)
        log.write("val", (epoch + 1) * steps, epoch=epoch, top1=top1)
        line = f"epoch {epoch + 1:2d} of {args.epochs}: loss {losses / steps:.3f}, val top-1 {top1:.2%}"
        print(f"{line}, {time.perf_counter() - start:.0f} s", flush=True)

    top1 = accuracy(model, augment, test, test_labels)
    log.write("result", total, top1=top1)
    log.close()
    vitlab.save(model, args.out)
    print(f"test top-1 {top1:.2%}, with flip\nmodel: {args.out}")


if __name__ == "__main__":
    main()
