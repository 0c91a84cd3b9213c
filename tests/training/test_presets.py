"""Shipped recipes: each can be read, its model built, and its first lines say how to run it and what came out."""

import re

import pytest
import torch

from vitlab.training.finetune import build_model
from vitlab.training.presets import find_recipe, recipes
from vitlab.training.recipe import read_recipe


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_says_its_command_and_result_and_builds(name):
    path = recipes()[name]
    comment = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert comment[0].startswith("# vitlab train ")
    assert re.search(r"top-1 \d|not yet run", "\n".join(comment)), "state the measured accuracy, or that there is none"
    with torch.device("meta"):
        model, _ = build_model(read_recipe(path).model, [str(i) for i in range(10)], channels=3)
    assert model.config.classes == 10


def test_recipes_are_found_by_name_source_file_and_folder(tmp_path):
    assert find_recipe(None)[1].data.source == find_recipe("digits")[1].data.source == "digits"
    assert find_recipe("cifar100")[1].data.source == "cifar100"
    assert find_recipe("mnist")[1].model.name == "vit_mnist"
    (tmp_path / "mine.toml").write_text("[run]\nepochs = 3\n")
    name, recipe = find_recipe(str(tmp_path / "mine.toml"))
    assert (name, recipe.run.epochs) == ("mine", 3)
    assert find_recipe(str(tmp_path))[1].data.source == str(tmp_path)
    with pytest.raises(ValueError, match="Did you mean 'digits'"):
        find_recipe("digit")
