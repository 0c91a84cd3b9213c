"""Networks of stages through the commands: train, eval, inspect, predict, convert."""

import json

import pytest
from PIL import Image

NETWORKS = {  # cut small, for images of 8 x 8
    "swin_cifar": ["model.width=12", "model.depths=[2, 1]", "model.heads=[2, 3]", "model.window=2"],
    "pvt_cifar": ["model.reductions=[2, 1]"],
    "pvt_v2_cifar": ["model.reductions=[2, 1]"],
    "twins_svt_cifar": ["model.reductions=[2, 1]", "model.window=2"],
}
WIDE = ["model.widths=[12, 24]", "model.depths=[2, 1]", "model.heads=[2, 3]", "model.mlp_ratios=[2, 2]"]


@pytest.mark.parametrize("name", NETWORKS)
def test_the_commands_take_it(name, tmp_path, command):
    settings = [f"model.name={name}", *NETWORKS[name], *([] if name == "swin_cifar" else WIDE)]
    data = ["data.per_class=16", "data.batch_size=32", "augment.crop=padded", "augment.padding=1"]
    optim = ["optim.name=adamw", "optim.lr=5e-3", "optim.warmup_epochs=0", "run.epochs=10", "run.eval_every=10"]
    run = tmp_path / "run"
    recipe = tmp_path / "tiny.toml"
    recipe.write_text('[data]\nsource = "digits"\n[model]\nimage_size = 8\n', encoding="utf-8")
    command("train", recipe, *data, *settings, *optim, f"run.dir={run}")
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    assert result["top1"] > 0.2  # far above chance, after 50 steps
    assert json.loads(command("eval", run / "best", "digits", "--json").stdout)["top1"] == result["top1"]
    text = command("inspect", run / "best", "--depth", 2).stdout
    assert "stages.1" in text and "then 2 x 2" in text
    Image.new("L", (8, 8), 90).save(tmp_path / "grey.png")
    (found,) = json.loads(command("predict", run / "best", tmp_path / "grey.png", "--json").stdout)
    assert len(found["scores"]) == 5
    if name in ("swin_cifar", "pvt_v2_cifar"):
        text = command("convert", run / "best", tmp_path / "hf", "--to", "hf").stdout
        assert json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))[
            "model_type"
        ] == name.removesuffix("_cifar")
