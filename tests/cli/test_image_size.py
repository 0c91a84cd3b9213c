"""--image-size: one option with one meaning, one help and one error, on every command that reads images."""

import pytest
from typer.main import get_command

from vitlab.cli.main import app
from vitlab.serve.model_pool import open_models

COMMANDS = ("predict", "zeroshot", "eval", "embed", "index", "search", "serve")


def option(name):
    command = get_command(app).commands[name]
    return next(p for p in command.params if "--image-size" in p.opts)


def test_every_command_has_the_same_option():
    helps = {(option(name).help, option(name).metavar, option(name).default) for name in COMMANDS}
    assert helps == {("Image size: 384, or height x width: 384x256.", "HxW", None)}


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "bundled:digits", "digits#3"],
        ["zeroshot", "bundled:clip", "digits#3", "--labels", "a,b"],
        ["eval", "bundled:digits", "digits"],
        ["embed", "digits", "-o", "x.parquet", "--model", "bundled:digits"],
        ["index", ".", "-o", "x", "--model", "bundled:digits"],
        ["search", "x", "--image", "digits#3"],
        ["serve", "bundled:digits", "--port", "0"],
    ],
    ids=lambda words: words[0],
)
def test_a_size_that_is_none_has_the_same_error(command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command(*words, "--image-size", "12by9", code=2)
    assert "--image-size '12by9' is not a size: write 384, or height x width: 384x256." in done.stderr


def test_served_models_read_images_at_this_size():
    served = {model.name: model for model in open_models(["bundled:digits", "c=bundled:cifar10"], (16, 24))}
    assert [served[name].summary()["image_size"] for name in ("digits", "c")] == [[16, 24]] * 2
    assert served["c"].model.config.image_size == (16, 24)
