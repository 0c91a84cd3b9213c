"""What of a recipe goes together, and with its model: refused here before a step is made."""

from __future__ import annotations

from typing import Any

from vitlab.reduce import reducer_of
from vitlab.training.recipe import Recipe


def check_objective(recipe: Recipe) -> None:
    """What belongs together. Settings come one by one, so a recipe cannot ask for it at each of them."""
    o = recipe.objective
    if o.name == "distill" and o.teacher is None:
        raise ValueError("objective.name=distill needs a teacher: objective.teacher=runs/NAME/best")
    if o.name != "distill" and o.teacher is not None:
        raise ValueError(f"objective.teacher={o.teacher} is for objective.name=distill, not for {o.name}.")
    if o.name != "supervised" and recipe.run.sharding == "fsdp":
        raise ValueError(f"run.sharding=fsdp is for objective.name=supervised, not yet for {o.name}: leave it out.")
    if o.cache and (o.name != "distill" or recipe.augment.mixup or recipe.augment.cutmix):
        found = f"objective.name={o.name}" if o.name != "distill" else "mixing (augment.mixup, augment.cutmix)"
        raise ValueError(f"objective.cache holds the teacher's answers to single pictures, so not with {found}.")
    if o.name in ("mae", "dino", "clip") and (recipe.augment.mixup or recipe.augment.cutmix):
        raise ValueError(f"augment.mixup and augment.cutmix mix labels, which objective.name={o.name} does not learn.")


def check_patches(recipe: Recipe, model: Any) -> None:
    """augment.drop_patches needs a network that can do without patches."""
    if not recipe.augment.drop_patches:
        return
    network, name = getattr(model, "image", model), recipe.objective.name
    why = ""
    if name in ("mae", "dino"):
        why = f"objective.name={name} decides itself what its model sees"
    elif not hasattr(network, "patch_dropout"):
        why = f"a {model.family} reads its pictures whole"
    elif network.config.positions.kind == "relative":
        why = "positions=relative belong to the whole grid"
    if why:
        raise ValueError(f"augment.drop_patches={recipe.augment.drop_patches:g} cannot be: {why}. Set it to 0.")


def check_reducer(recipe: Recipe, model: Any) -> None:
    """model.reducer needs a network whose tokens may be fewer, and what the reducer chooses them by."""
    text = recipe.model.reducer
    if text is None:
        return
    network, name = getattr(model, "image", model), recipe.objective.name
    try:
        if name in ("mae", "dino"):
            raise ValueError(f"objective.name={name} decides itself what its model sees.")
        if not hasattr(network, "reducing"):
            raise ValueError(f"a {model.family} reads its pictures whole; a ViT can do with fewer tokens.")
        reducer, c = reducer_of(text), network.config
        network.reducing(reducer)
        rows, columns = network.layout(*network.input_size).grid
        reducer.removes(0, c.depth, rows * columns + len(c.prefix), len(c.prefix))
    except ValueError as error:
        raise ValueError(f"model.reducer={text} cannot be: {error}") from None
