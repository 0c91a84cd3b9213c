"""What is wrong with a run that learns without labels, in plain words, from the numbers in its log.

    findings = examine_dino(lines, outputs=1024, batch=128, settled=200)
    findings[0].words, findings[0].remedy

A loss that falls says little here: DINO has two dull solutions whose loss is low or constant, and MAE learns happily to
copy what it sees when its mask is the wrong way round. A CLIP whose loss stays near ln B has learned nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitlab.layers.patches import patchify, unpatchify
from vitlab.training.batches import Plan
from vitlab.training.recipe import Recipe

Line = dict[str, Any]  # one "train" event of the log: step, loss, lr, grad_norm, and what the method tells

ENOUGH = 3  # lines after the start that a judgement needs
UNIFORM = 0.98  # of ln K
SURE, CERTAIN = 0.25, 0.02  # of ln K
FEW = 2.5  # outputs
NO_BETTER = 0.98  # of what guessing costs
ALIKE_STD, ALIKE_RANK = 0.02, 1.1  # features of different pictures that are one and the same
SMALL_BATCH = 32
NOTHING = 1e-12  # a learning rate that moves no weight
MASK = "In the mask 1 is hidden and 0 visible, and the loss counts the hidden: see choose_visible in models/mae.py."


class Finding(NamedTuple):
    name: str
    words: str  # what was seen
    remedy: str  # what to type


def examine(recipe: Recipe, model: Any, plan: Plan, log: Sequence[Line]) -> list[Finding]:
    """What is wrong with this run as far as it has come; nothing where it learns from labels."""
    lines = [event for event in log if event["kind"] == "train"]
    settled = plan.total // 5
    if recipe.objective.name == "dino":
        outputs = model.config.projection.out_dim
        return examine_dino(lines, outputs=outputs, batch=plan.per_step, settled=settled)
    if recipe.objective.name == "mae":
        return examine_mae(lines, mask_ratio=model.config.mask_ratio, settled=settled)
    if recipe.objective.name == "clip":
        return examine_clip(lines, batch=plan.part * plan.world, settled=settled)
    return []


def examine_dino(lines: Sequence[Line], *, outputs: int, batch: int, settled: int = 0) -> list[Finding]:
    """lines: oldest first; outputs: K; batch: pictures in a step, over all processes.

    settled: the step from which a collapse is one: features of an untrained network are alike, too.
    """
    common = _common(lines)
    if any(finding.name == "not finite" for finding in common):
        return common  # all other numbers follow from it
    found = [*common, *_small_batch(batch)]
    recent = _recent(lines, settled)
    if len(recent) < ENOUGH:
        return found
    ln_k, loss, entropy = math.log(outputs), _mean(recent, "loss"), _mean(recent, "teacher_entropy")
    if loss is not None and loss >= UNIFORM * ln_k and (entropy is None or entropy >= UNIFORM * ln_k):
        found.append(
            Finding(
                "uniform output",
                f"the loss stays at {loss:.2f}, and ln K is {ln_k:.2f}: the teacher gives all {outputs} outputs alike, "
                "so there is nothing to learn from it.",
                "Make it surer: objective.teacher_temperature=[0.015,0.02] with model.sinkhorn=3. Make the views more "
                "alike: objective.global_scale=[0.7,1.0] objective.local_scale=[0.3,0.6]. "
                "Or start slower: a longer warm-up (optim.warmup_epochs), a third of optim.lr.",
            )
        )
    used = _mean(recent, "used_outputs")
    if entropy is not None and entropy <= (CERTAIN if used is None else SURE) * ln_k and (used or 0) <= FEW:
        chosen = "" if used is None else f" {used:.1f} of {outputs} outputs are anyone's first choice;"
        found.append(
            Finding(
                "one output",
                f"the teacher gives nearly all pictures the same answer:{chosen} its entropy is {entropy:.2f}, and "
                f"ln K is {ln_k:.2f}.",
                "Turn centring on: model.centring=true. If it is on, let the centre follow faster, "
                "model.centre_momentum=0.9, or make the teacher less sure: objective.teacher_temperature=[0.04,0.07].",
            )
        )
    spread, rank = _mean(recent, "teacher_std"), _mean(recent, "rank")
    if (spread is not None and spread <= ALIKE_STD) or (rank is not None and rank <= ALIKE_RANK):
        seen = [f"spread {spread:.3f} of 1"] if spread is not None else []
        seen += [f"effective rank {rank:.2f}"] if rank is not None else []
        found.append(
            Finding(
                "same features",
                f"the features of all pictures are nearly one and the same: {', '.join(seen)}.",
                "Learn slower: optim.lr to a third, optim.warmup_epochs longer, optim.clip=3.0; let the teacher follow "
                "more slowly: objective.momentum=0.996.",
            )
        )
    first, last = (line.get("centre_norm") for line in (recent[0], recent[-1]))
    if first is not None and last is not None and last > math.sqrt(outputs) and last > 2 * first:
        found.append(
            Finding(
                "centre grows",
                f"the centre's norm went from {first:.1f} to {last:.1f}: the answers themselves grow without end.",
                "Keep the rows of the last layer at length 1: model.norm_last_layer=true, or optim.clip=3.0.",
            )
        )
    return found


def examine_mae(lines: Sequence[Line], *, mask_ratio: float | None = None, settled: int = 0) -> list[Finding]:
    """lines: oldest first, with what `mae_numbers` gives; settled: the step from which the loss is judged."""
    common = _common(lines)
    if any(finding.name == "not finite" for finding in common):
        return common
    found = list(common)
    recent = _recent(lines, settled)
    share = _mean(recent, "hidden_share")
    if share is not None and mask_ratio is not None and abs(share - mask_ratio) > 0.1:
        turned = abs(share - (1 - mask_ratio)) < 0.1
        found.append(
            Finding(
                "wrong mask",
                f"the loss counts {share:.0%} of the patches, but {mask_ratio:.0%} are to be hidden"
                + (": those that are visible. The mask is the wrong way round." if turned else "."),
                MASK,
            )
        )
    if len(recent) < ENOUGH:
        return found
    loss, first = _mean(recent, "loss"), _mean(_recent(lines, 0, early=True), "loss")
    hidden, visible = _mean(recent, "hidden_error"), _mean(recent, "visible_error")
    falls = loss is not None and first is not None and loss < 0.9 * first
    if hidden is not None and visible is not None and falls and hidden > 3 * visible:
        found.append(
            Finding(
                "copies what it sees",
                f"visible patches are painted well (error {visible:.4f}), hidden ones are not ({hidden:.4f}): "
                "the loss is counted over the visible.",
                MASK,
            )
        )
    baseline = _mean(recent, "baseline")
    if loss is not None and baseline is not None and loss >= 0.98 * baseline:
        found.append(
            Finding(
                "no better than the mean",
                f"the loss is {loss:.4f}, that of the mean patch everywhere {baseline:.4f}: nothing was learned yet.",
                "Train longer (run.epochs), learn faster (optim.lr times 3), or hide less: model.mask_ratio=0.6.",
            )
        )
    return found


def examine_clip(lines: Sequence[Line], *, batch: int, settled: int = 0) -> list[Finding]:
    """lines: oldest first, with what `clip_numbers` gives; batch: pairs that are told apart in one loss."""
    found = _common(lines)
    if any(finding.name == "not finite" for finding in found):
        return found
    recent = _recent(lines, settled)
    loss, guessing = _mean(recent, "loss"), _mean(recent, "guessing")
    if len(recent) < ENOUGH or loss is None or guessing is None:
        return found
    alike = {"pictures": _mean(recent, "image_std"), "texts": _mean(recent, "text_std")}
    same = [name for name, std in alike.items() if std is not None and std < ALIKE_STD]
    if same:
        words = f"all {' and all '.join(same)} get nearly the same embedding: the model has collapsed."
        remedy = "Start again with optim.lr divided by 3 and a longer warm-up (optim.warmup_epochs)."
        found.append(Finding("collapse", words, remedy))
    elif loss >= NO_BETTER * guessing:
        words = (
            f"the loss is {loss:.4f}, that of guessing among the captions of a batch ({batch} pairs) {guessing:.4f}: "
            "pictures and captions have not found each other yet."
        )
        remedy = (
            "Train longer (run.epochs), or learn faster (optim.lr times 3). Are the captions those of the pictures?"
        )
        found.append(Finding("no better than guessing", words, remedy))
    return found


def clip_numbers(model: Any, images: Tensor, texts: Tensor, same: Tensor) -> dict[str, float]:
    """Features (B, E) of both towers, (B, B) equal captions -> the scale, how many find their own, what guessing costs.

    Guessing: ln B where one of B is to be found (softmax); for pairs one by one (sigmoid) the best constant answer.
    """
    with torch.no_grad():
        own = torch.arange(len(images), device=images.device)
        others = same & (own[:, None] != own[None])
        logits = (images.float() @ texts.float().T).masked_fill(others, -math.inf)
        count = (~others).sum(dim=1).float()  # candidates, the own one included
        guessing = count.log() if model.bias is None else count.log() - torch.special.xlogy(count - 1, 1 - 1 / count)
        found = {
            "scale": model.scale.item(),
            "matched": float((logits.argmax(dim=1) == own).float().mean()),
            "guessing": float(guessing.mean()),
        }
        if len(images) > 1:  # one differs from no other
            found["image_std"] = float(images.float().std(dim=0).mean() * images.shape[1] ** 0.5)
            found["text_std"] = float(texts.float().std(dim=0).mean() * texts.shape[1] ** 0.5)
        return found


def examine_mask(model: Any, images: Tensor, noise: Tensor) -> list[Finding]:
    """Paint twice, with other pixels where the mask of a MaskedAutoencoder says hidden: nothing may change by that."""
    was_training, size = model.training, model.config.patch_size
    model.eval()  # no chance but the noise
    with torch.no_grad():
        plain = model(images, noise)
        patches = patchify(images, size)  # (B, N, C*P*P)
        patches = torch.where(plain.mask[..., None].bool(), 1 - patches, patches)
        other = model(unpatchify(patches, size, model.encoder.layout(*images.shape[-2:]).grid), noise)
    model.train(was_training)
    difference = float((other.prediction - plain.prediction).abs().max())
    if difference <= 1e-5:
        return []
    words = f"the encoder sees what the mask calls hidden: other pixels there change the painting by {difference:.3g}."
    return [Finding("mask leaks", words, MASK)]


def mae_numbers(prediction: Tensor, target: Tensor, mask: Tensor) -> dict[str, float]:
    """(B, N, P), (B, N, P), (B, N) -> errors over hidden and visible patches, that of the mean patch, and the share."""
    with torch.no_grad():
        error = (prediction.float() - target.float()).square().mean(dim=-1)  # (B, N)
        plain = (target.float() - target.float().mean(dim=(0, 1))).square().mean(dim=-1)
        return {
            "hidden_error": float((error * mask).sum() / mask.sum().clamp_min(1)),
            "visible_error": float((error * (1 - mask)).sum() / (1 - mask).sum().clamp_min(1)),
            "baseline": float((plain * mask).sum() / mask.sum().clamp_min(1)),
            "hidden_share": float(mask.float().mean()),
        }


def _common(lines: Sequence[Line]) -> list[Finding]:
    """What goes wrong in any run."""
    for line in lines:
        for name in ("loss", "grad_norm"):
            value = line.get(name)
            if value is not None and not math.isfinite(value):
                rate = line.get("lr") or 0.0
                return [
                    Finding(
                        "not finite",
                        f"step {line.get('step')}: {name} is {value}.",
                        f"Try optim.lr={rate / 3:.1e} optim.clip=1.0, a longer warm-up (optim.warmup_epochs), or "
                        "run.amp=off. If it comes at once, look at the pictures of that batch.",
                    )
                ]
    if len(lines) < ENOUGH:
        return []
    rates, norms, losses = ([line[n] for line in lines if n in line] for n in ("lr", "grad_norm", "loss"))
    if rates and max(rates) < NOTHING:
        return [Finding("learning rate 0", "the learning rate is 0: no weight moves.", "Set it: optim.lr=1e-3.")]
    if norms and max(norms) == 0:
        words = "every gradient is 0: nothing that learns has a part in the loss."
        return [Finding("no gradient", words, "Unfreeze something (model.freeze=none), or start from other weights.")]
    if losses and max(losses) - min(losses) <= 1e-6 * abs(losses[0]):
        words = f"the loss is {losses[0]:.6g} at every step: it does not move."
        return [Finding("loss stands still", words, "Learn faster: optim.lr times 10.")]
    return []


def _small_batch(batch: int) -> list[Finding]:
    if batch >= SMALL_BATCH:
        return []
    words = f"{batch} pictures in a step are few to tell the teacher's mean answer by, which centring takes off."
    remedy = f"Take more: data.batch_size=128, or optim.accumulate={-(-128 // batch)}; or model.centre_momentum=0.99."
    return [Finding("small batch", words, remedy)]


def _recent(lines: Sequence[Line], settled: int, early: bool = False) -> list[Line]:
    """The later half of what was logged from `settled` on; or the first lines of all."""
    known = [line for line in lines if line.get("step", settled) >= settled]
    return known[:ENOUGH] if early else known[len(known) // 2 :]


def _mean(lines: Sequence[Line], name: str) -> float | None:
    """None where no line tells it."""
    values = [float(line[name]) for line in lines if name in line]
    return sum(values) / len(values) if values else None
