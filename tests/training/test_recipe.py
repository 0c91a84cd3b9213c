"""Recipes: TOML both ways, settings as typed, and errors with the nearest name."""

import tomllib

import pytest

import vitlab
from vitlab.training.loop import Silent
from vitlab.training.recipe import Recipe, difference, from_tables, parse_value, read_recipe, to_toml, with_settings


def test_toml_round_trip_with_every_kind_of_value(tmp_path):
    settings = [
        'data.source=C:\\pictures\\"my" cats',
        "augment.scale=[0.2, 0.9]",
        "model.depth=4",
        "model.positions=sincos",
        "model.norm.eps=1e-5",
    ]
    settings += [
        "data.per_class=10",
        "run.amp=bf16",
        "optim.betas=[0.8, 0.95]",
        "model.init_from=hf-hub:a/b",
        "augment.flip=true",
    ]
    recipe = with_settings(Recipe(), settings)
    assert from_tables(tomllib.loads(to_toml(recipe))) == recipe
    (tmp_path / "r.toml").write_text(to_toml(recipe), encoding="utf-8")
    assert read_recipe(tmp_path / "r.toml") == recipe
    assert recipe.model.options == {"depth": 4, "positions": "sincos", "norm.eps": 1e-5}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("1.e-3", 1e-3),
        ("true", True),
        ("False", False),
        ("[1, 2]", [1, 2]),
        ("a b", "a b"),
    ],
)
def test_values_as_typed(text, value):
    assert parse_value(text) == value


WRONG = {
    "run.epoch=3": "Did you mean run.epochs=3",
    "optm.lr=3": "Did you mean optim.lr=3",
    "epochs=3": "run.epochs",
    "run.epochs=three": "run.epochs='three' is not valid: expected a whole number",
    "run.epochs=0": "run.epochs=0 must be at least 1",
    "optim.name=adamm": "expected adamw | adam | sgd | muon",
    "augment.smoothing=1.5": "below 1",
    "run.epochs": "key=value",
    "optim.betas=0.9": "optim.betas=0.9 is not valid",
    "objective.local_scale=[0.5, 0.2]": "must rise",
    "objective.momentum=1": "below 1",
}


@pytest.mark.parametrize(("setting", "says"), WRONG.items())
def test_wrong_settings_are_told_the_right_ones(setting, says):
    with pytest.raises(ValueError) as error:
        with_settings(Recipe(), [setting])
    assert says in str(error.value)


def test_wrong_tables(tmp_path):
    for text, says in {
        "[rum]\nepochs = 1": "Did you mean 'run'",
        "epochs = 1": "there is no [epochs]",
        "run = 3": "must be a table",
        "[run\n": "not valid TOML",
    }.items():
        (tmp_path / "r.toml").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"r\.toml") as error:
            read_recipe(tmp_path / "r.toml")
        assert says in str(error.value)
    with pytest.raises(ValueError, match="no such recipe"):
        read_recipe(tmp_path / "none.toml")


def test_difference_names_what_changed():
    new = with_settings(Recipe(), ["optim.lr=0.5", "model.depth=3"])
    assert difference(Recipe(), new) == ["model.depth: None -> 3", "optim.lr: 0.001 -> 0.5"]


def test_none_is_nothing_where_nothing_is_allowed_and_a_word_elsewhere():
    recipe = with_settings(Recipe(), ["data.per_class=10", "model.init_from=x", "augment.crop=padded"])
    recipe = with_settings(recipe, ["data.per_class=none", "model.init_from=none", "augment.crop=none"])
    assert (recipe.data.per_class, recipe.model.init_from, recipe.augment.crop) == (None, None, "none")


def test_a_recipe_for_another_model_leaves_out_what_that_model_lacks(tmp_path):
    show = Silent()
    few = {"data.per_class": 2, "run.epochs": 1, "run.dir": str(tmp_path / "run")}
    stem = tmp_path / "stem.toml"
    stem.write_text('[data]\nsource = "digits"\n[model]\nname = "vit_digits"\nstem = "conv"\n', encoding="utf-8")
    vitlab.train(str(stem), {"model.name": "beit_digits", "model.depth": 1, **few}, show=show)
    assert any("beit_digits has no" in note and "left out" in note for note in show.notes)
    recipe = read_recipe(tmp_path / "run" / "recipe.toml")
    assert recipe.model.name == "beit_digits" and recipe.model.options["depth"] == 1
    assert vitlab.load(tmp_path / "run" / "best").config.depth == 1
