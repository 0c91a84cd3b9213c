"""Shipped recipes: each can be read, its model built, and its first lines say how to run it and what came out."""

import re
import shlex
from dataclasses import replace

import pytest
import torch

from vitlab.errors import UsageError
from vitlab.images.sources import SOURCES
from vitlab.models.dense import DenseOutput
from vitlab.training.finetune import build_model
from vitlab.training.presets import find_recipe, recipes
from vitlab.training.recipe import read_recipe, with_settings


def header(name: str) -> list[str]:
    """The comment lines before the first table."""
    lines = recipes()[name].read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").strip() for line in lines[:first]]


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_is_read_and_its_model_builds(name):
    recipe = read_recipe(recipes()[name])
    options = replace(recipe.model, init_from=None, init_image=None)  # may lie anywhere; the network is the named one
    if recipe.objective.name == "clip":
        options = replace(options, freeze="none")  # a tower that has learned nothing is not locked
    with torch.device("meta"):
        model, _ = build_model(replace(recipe, model=options), [str(i) for i in range(10)], 3)
        images = torch.zeros(2, 3, *model.config.image_size)
        if recipe.objective.name in ("mae", "dino"):
            assert model.family == recipe.objective.name and model.encoder(images).shape == (2, model.config.width)
            return
        if recipe.objective.name == "clip":
            images = torch.zeros(2, model.config.channels, *model.config.image_size)
            assert model.encode_image(images).shape == (2, model.config.embed_dim)
            return
        logits = model(images)
    if isinstance(logits, DenseOutput):
        shapes = {key: tuple(value.shape[:2]) for key, value in logits.tensors().items()}
        assert set(shapes.values()) == {(2, 10 if recipe.objective.name == "segment" else model.config.queries)}
        return
    assert logits.shape == (2, 10)
    learning = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
    everything = [key for key, _ in model.named_parameters()]
    assert learning == (["head.weight", "head.bias"] if recipe.model.freeze == "encoder" else everything)


@pytest.mark.parametrize("name", recipes())
def test_its_first_line_runs_it(name, tmp_path):
    program, verb, what, *settings = shlex.split(header(name)[0])
    assert (program, verb) == ("vitlab", "train")
    if what == "FOLDER":
        assert find_recipe(str(tmp_path))[1] == with_settings(
            read_recipe(recipes()[name]), [f"data.source={tmp_path}", *settings]
        )
    else:
        found, recipe = find_recipe(what)
        assert (found, recipe) == (name, read_recipe(recipes()[name]))
        with_settings(recipe, settings)  # an unknown key is an error


@pytest.mark.parametrize("name", recipes())
def test_its_first_lines_say_what_came_out(name):
    said = " ".join(header(name))
    if "not yet run" in said:
        assert "top-1" not in said
        return
    judged = r"(top-1|zero-shot|k-NN|recall@10)[^%]* \d+(\.\d+)? %"
    for what in (r"\bCPU|\bGPU", r"\d (s|min|minutes|hours)\b", judged, r"\bseeds?\b"):
        assert re.search(what, said), f"hardware, time, what came out and seeds are stated; found no {what}"


def test_recipes_are_found_by_name_source_file_and_folder(tmp_path):
    assert find_recipe(None)[1].data.source == find_recipe("digits")[1].data.source == "digits"
    assert find_recipe("cifar100")[1].data.source == "cifar100"
    assert find_recipe("mnist")[1].model.name == "vit_mnist"
    (tmp_path / "mine.toml").write_text("[run]\nepochs = 3\n", encoding="utf-8")
    name, recipe = find_recipe(str(tmp_path / "mine.toml"))
    assert (name, recipe.run.epochs) == ("mine", 3)
    assert find_recipe(str(tmp_path))[1].data.source == str(tmp_path)
    with pytest.raises(ValueError, match="Did you mean 'digits'"):
        find_recipe("digit")


def test_a_source_without_a_recipe_is_trained_like_a_folder(monkeypatch):
    monkeypatch.setitem(SOURCES, "stripes", "stripes.open_stripes")
    like_a_folder = with_settings(read_recipe(recipes()["folder"]), ["data.source=stripes"])
    assert find_recipe("stripes") == ("stripes", like_a_folder)
    with pytest.raises(UsageError, match="Did you mean 'stripes'"):
        find_recipe("strips")
