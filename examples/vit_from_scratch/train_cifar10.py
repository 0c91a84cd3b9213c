"""Train a plain Vision Transformer on CIFAR-10: one file, one loop, nothing but PyTorch.

    python train_cifar10.py --data cifar-10-binary.tar.gz              # 14 epochs: 68 % in an hour on one core
    python train_cifar10.py --data cifar-10-binary.tar.gz --resume     # go on with a run that was stopped or killed
    python train_cifar10.py --data cifar-10-binary.tar.gz --epochs 300 --batch-size 512 --randaugment 2 9 \\
        --mixup 0.8 --cutmix 1.0 --erasing 0.25 --stochastic-depth 0.1  # as DeiT (arXiv:2012.12877); needs a GPU

--data: the binary or the Python version of www.cs.toronto.edu/~kriz/cifar.html, as a .tar.gz or unpacked.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import pickle
import random
import tarfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from augment import crop_and_flip, erase, mix, randaugment
from torch import Tensor, nn
from vit_model import VisionTransformer, ViTConfig

# ---- data


class ArrayUnpickler(pickle.Unpickler):
    """A pickle can run any code while it is read; this reader builds numpy arrays and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a CIFAR-10 file.")


def read_batch(data: bytes) -> tuple[Tensor, Tensor]:
    """One file of either version -> images (n, 3, 32, 32) uint8, labels (n,)."""
    if data[:1] == b"\x80":  # how a pickle begins; a label is below 10
        batch = ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
        pixels, labels = batch[b"data"], np.array(batch[b"labels"])
    else:
        records = np.frombuffer(data, dtype=np.uint8).reshape(-1, 1 + 3072)  # a label, then red, green, blue
        pixels, labels = records[:, 1:], records[:, 0]
    return torch.tensor(pixels.reshape(-1, 3, 32, 32)), torch.tensor(labels.astype(np.int64))


def read_cifar10(path: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(images, labels) to train on, and (images, labels) to test on."""
    if path.is_dir():
        files = {file.stem: file.read_bytes() for file in path.rglob("*_batch*")}
    else:
        with tarfile.open(path) as tar:
            members = [member for member in tar if member.isfile() and "_batch" in member.name]
            files = {Path(member.name).stem: tar.extractfile(member).read() for member in members}
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    if missing := [name for name in names if name not in files]:
        raise SystemExit(f"{path}: no {missing[0]} in it. Get cifar-10-binary.tar.gz from www.cs.toronto.edu/~kriz/")
    *train, test = (read_batch(files[name]) for name in names)
    images, labels = zip(*train, strict=True)
    return (torch.cat(images), torch.cat(labels)), test


def normalize(x: Tensor) -> Tensor:
    return x.float() / 127.5 - 1  # 0 .. 255 -> -1 .. 1


# ---- training


def seed_all(*place: object) -> None:
    """What is drawn depends on (seed, step) alone, so a resumed run draws what it would have drawn without a stop."""
    random.seed(repr(place))
    torch.manual_seed(random.getrandbits(63))


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Rises in a line while gradients still point anywhere, then falls along a cosine to 0, where the loss settles."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def adamw(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """Only matrices decay; norms, biases, positions and the class token do not."""
    matrices = [p for p in model.parameters() if p.ndim in (2, 4)]
    others = [p for p in model.parameters() if p.ndim not in (2, 4)]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.999))


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, device: str) -> float:
    model.eval()
    correct = 0
    for x, y in zip(images.split(500), labels.split(500), strict=True):
        correct += int((model(normalize(x.to(device))).argmax(dim=1).cpu() == y).sum())
    return correct / len(labels)


def save(path: Path, content: object) -> None:
    """First under another name: whoever is killed while saving still has the file before."""
    torch.save(content, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="cifar-10-binary.tar.gz, cifar-10-python.tar.gz, or a folder")
    add("--out", type=Path, default=Path("runs/vit_from_scratch"), help="folder for last.pt and log.json")
    add("--resume", action="store_true", help="continue from last.pt in --out")
    add("--epochs", type=int, default=14)
    add("--batch-size", type=int, default=128)
    add("--lr", type=float, default=1e-3)
    add("--weight-decay", type=float, default=0.05)
    add("--warmup", type=float, default=0.05, help="share of the steps")
    add("--smoothing", type=float, default=0.1, help="label smoothing")
    add("--randaugment", type=float, nargs=2, default=[0, 0], metavar=("N", "M"), help="operations and strength: 2 9")
    add("--mixup", type=float, default=0.0, metavar="ALPHA")
    add("--cutmix", type=float, default=0.0, metavar="ALPHA")
    add("--erasing", type=float, default=0.0, metavar="PROBABILITY")
    add("--stochastic-depth", type=float, default=0.0, metavar="RATE")
    add("--width", type=int, default=128)
    add("--depth", type=int, default=6)
    add("--heads", type=int, default=4)
    add("--pool", choices=("class", "mean"), default="class")
    add("--amp", choices=("off", "bfloat16", "float16"), default="off", help="mixed precision, for a GPU")
    add("--wandb", choices=("off", "offline", "online"), default="off")
    add("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (images, labels), (test_images, test_labels) = read_cifar10(args.data)
    val = max(len(images) // 50, 1)  # 2 % to look at during training; test images are used once, at the end
    images, labels, val_images, val_labels = images[val:], labels[val:], images[:val], labels[:val]

    seed_all(args.seed, "weights")
    shape = dict(width=args.width, depth=args.depth, heads=args.heads, mlp_ratio=2.0, pool=args.pool)
    shape |= dict(image_size=32, patch_size=4, classes=10, stochastic_depth=args.stochastic_depth)
    model = VisionTransformer(ViTConfig(**shape)).to(device)
    optimizer = adamw(model, args.weight_decay)
    scaler = torch.amp.GradScaler(device, enabled=args.amp == "float16")  # float16 gradients would underflow
    per_epoch = len(images) // args.batch_size
    steps = args.epochs * per_epoch
    start, history = 0, []
    fixed = {name: value for name, value in vars(args).items() if name not in ("data", "out", "resume", "wandb")}
    args.out.mkdir(parents=True, exist_ok=True)
    if args.resume:
        last = torch.load(args.out / "last.pt", map_location=device, weights_only=True)
        if changed := [name for name in fixed if last["options"][name] != fixed[name]]:
            raise SystemExit(
                f"--{changed[0].replace('_', '-')} was {last['options'][changed[0]]}: resume with the same."
            )
        model.load_state_dict(last["model"])
        optimizer.load_state_dict(last["optimizer"])
        scaler.load_state_dict(last["scaler"])
        start, history = last["epoch"], last["history"]
    if args.wandb != "off":
        import wandb

        wandb.init(project="vit_from_scratch", dir=args.out, mode=args.wandb, config=fixed)

    for epoch in range(start, args.epochs):
        seed_all(args.seed, "order", epoch)
        order, total, began = torch.randperm(len(images)), 0.0, time.perf_counter()
        model.train()
        for i in range(per_epoch):
            step = epoch * per_epoch + i
            seed_all(args.seed, "step", step)
            batch = order[i * args.batch_size : (i + 1) * args.batch_size]
            x = crop_and_flip(images[batch])  # (B, 3, 32, 32) uint8
            if args.randaugment[0]:
                x = randaugment(x, int(args.randaugment[0]), args.randaugment[1])
            x, y = normalize(x), F.one_hot(labels[batch], 10).float()  # (B, 3, 32, 32), (B, 10)
            y = y * (1 - args.smoothing) + args.smoothing / 10
            x = erase(x, args.erasing)
            if args.mixup or args.cutmix:
                x, y = mix(x, y, args.mixup, args.cutmix)
            x, y = x.to(device), y.to(device)

            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, round(args.warmup * steps), args.lr)
            with torch.autocast(device, getattr(torch, args.amp, None), enabled=args.amp != "off"):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            total += loss.item()
        speed = per_epoch * args.batch_size / (time.perf_counter() - began)
        top1 = accuracy(model, val_images, val_labels, device)
        history.append(dict(epoch=epoch + 1, loss=total / per_epoch, val_top1=top1, images_per_second=round(speed)))
        print(", ".join(f"{k} {v:.4g}" for k, v in history[-1].items()), flush=True)
        if args.wandb != "off":
            wandb.log(history[-1])
        state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict())
        state |= dict(config=asdict(model.config), options=fixed, epoch=epoch + 1, history=history)
        save(args.out / "last.pt", state)

    top1 = accuracy(model, test_images, test_labels, device)
    (args.out / "log.json").write_text(json.dumps(dict(epochs=history, test_top1=top1), indent=1), encoding="utf-8")
    print(f"test top-1 {top1:.2%}; weights: {args.out / 'last.pt'}")


if __name__ == "__main__":
    main()
