"""A stranger's network through the user's own rename table, to the bit; and what is wrong with a table is said."""

from __future__ import annotations

import json

import pytest
import torch

import vitlab
from vitlab.checkpoints.load import load_with_report
from vitlab.errors import CheckpointError
from vitlab.images.preprocess import Preprocess

TABLE = r"""
[model]
heads = 4
eps = 1e-5
activation = "quick_gelu"

[preprocess]
size = 16
how = "crop"
interpolation = "bicubic"
mean = [0.1, 0.2, 0.3]
std = [0.4, 0.5, 0.6]

[keys]
"patch_embed.proj.*" = "stem.conv.*"
class_token = "stem.cls"
"positions.table" = "stem.grid"
"blocks.{i}.norm1.*" = "layers.{i}.before_mixing.*"
"blocks.{i}.attention.qkv.*" = ["layers.{i}.q.*", "layers.{i}.k.*", "layers.{i}.v.*"]
"blocks.{i}.attention.proj.*" = "layers.{i}.out.*"
"blocks.{i}.norm2.*" = "layers.{i}.before_mlp.*"
"blocks.{i}.mlp.fc1.weight" = { key = "layers.{i}.up", transpose = true }
"blocks.{i}.mlp.fc1.bias" = "layers.{i}.up_bias"
"blocks.{i}.mlp.fc2.*" = { key = "layers.{i}.down.*" }
"norm.*" = "last_norm.*"
"head.*" = "classify.*"

[ignore]
"ema\\..*" = "running averages"
"steps" = "a counter"
"""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    size = dict(image_size=16, patch_size=8, width=48, depth=2, heads=4, channels=3, classes=5)
    return vitlab.create("vit_digits", **size, eps=1e-5, activation="quick_gelu").eval()


@pytest.fixture
def stranger(model):
    """The same weights as somebody else would name them: renamed by hand, not by the table."""
    s = {key: value.detach() for key, value in model.state_dict().items()}
    found = {
        "stem.conv.weight": s["patch_embed.proj.weight"],
        "stem.conv.bias": s["patch_embed.proj.bias"],
        "stem.cls": s["class_token"],
        "stem.grid": s["positions.table"],
        "last_norm.weight": s["norm.weight"],
        "last_norm.bias": s["norm.bias"],
        "classify.weight": s["head.weight"],
        "classify.bias": s["head.bias"],
        "ema.stem.conv.weight": torch.zeros(3),
        "steps": torch.tensor(100),
    }
    for i in range(2):
        block, layer = f"blocks.{i}.", f"layers.{i}."
        found[layer + "up"] = s[block + "mlp.fc1.weight"].T.contiguous()
        found[layer + "up_bias"] = s[block + "mlp.fc1.bias"]
        for kind in ("weight", "bias"):
            q, k, v = s[f"{block}attention.qkv.{kind}"].split(48)
            found |= {f"{layer}q.{kind}": q.clone(), f"{layer}k.{kind}": k.clone(), f"{layer}v.{kind}": v.clone()}
            found[f"{layer}out.{kind}"] = s[f"{block}attention.proj.{kind}"]
            found[f"{layer}before_mixing.{kind}"] = s[f"{block}norm1.{kind}"]
            found[f"{layer}before_mlp.{kind}"] = s[f"{block}norm2.{kind}"]
            found[f"{layer}down.{kind}"] = s[f"{block}mlp.fc2.{kind}"]
    return found


@pytest.fixture
def files(stranger, tmp_path):
    """(weights, table)"""
    torch.save({"model": stranger, "epoch": 3}, tmp_path / "strange.pth")
    (tmp_path / "keys.toml").write_text(TABLE, encoding="utf-8")
    return tmp_path / "strange.pth", tmp_path / "keys.toml"


def logits(model):
    with torch.inference_mode():
        return model(torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16))


def test_a_strangers_network_loads_to_the_bit(files, model):
    weights, table = files
    found = vitlab.load(weights, map=table)
    assert torch.equal(logits(found), logits(model))
    assert (found.config.norm.eps, found.config.mlp.activation) == (1e-5, "quick_gelu")
    assert found.preprocess == Preprocess(16, "crop", None, "bicubic", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def test_the_report_accounts_for_every_key(files, stranger):
    _, report = load_with_report(files[0], map=str(files[1]))
    assert report.counts() == {"matched": 32, "resized": 0, "new": 0, "missing": 0, "unused": 2}
    assert sorted(key for row in report.rows for key in row.theirs) == sorted(stranger)
    assert {row.theirs[0]: row.note for row in report.rows if row.status == "unused"} == {
        "ema.stem.conv.weight": "running averages",
        "steps": "a counter",
    }
    assert report.notes == []  # the table says everything


def test_an_option_given_to_load_wins_over_the_table(files, model):
    found = vitlab.load(files[0], map=files[1], heads=8, classes=3)
    assert (found.config.heads, found.config.classes) == (8, 3)


def test_what_the_table_does_not_say_is_assumed_aloud(files):
    weights, table = files
    table.write_text(TABLE.replace("eps = 1e-5\n", ""), encoding="utf-8")
    _, report = load_with_report(weights, map=table)
    assert len(report.notes) == 1
    assert report.notes[0] == "keys.toml does not say eps=1e-06: assumed. [model] in it can say otherwise."
    table.write_text(TABLE.replace("mean = [0.1, 0.2, 0.3]\nstd = [0.4, 0.5, 0.6]\n", ""), encoding="utf-8")
    (note,) = load_with_report(weights, map=table)[1].notes
    assert note.startswith("keys.toml does not say mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5): assumed. [preprocess]")
    assert load_with_report(weights, map=table, preprocess=dict(mean=(0, 0, 0), std=(1, 1, 1)))[1].notes == []


def test_without_the_table_the_layout_is_unknown(files):
    with pytest.raises(CheckpointError, match=r"unknown layout.*map='keys.toml'"):
        vitlab.load(files[0])


WRONG = {
    "no TOML": ("[keys\n", "is not valid TOML"),
    "empty": ("", "is empty. A rename table has at least [keys]"),
    "a comment alone": ("# nothing yet", "is empty"),
    "no keys": ("[model]\nheads = 4\n", "has no [keys]"),
    "keys without lines": ("[keys]\n", "has no [keys]"),
    "unknown section": (
        TABLE + "\n[rename]\na = 'b'\n",
        "unknown section [rename]. Known are [model], [preprocess], [keys], [ignore]",
    ),
    "a misspelt section": (TABLE.replace("[preprocess]", "[preproces]"), "Did you mean 'preprocess'?"),
    "not a finite number": (TABLE.replace("eps = 1e-5", "eps = nan"), "is not valid TOML"),
    "a misspelt preprocess option": (
        TABLE.replace("mean = [", "maen = ["),
        "[preprocess] has no option 'maen'. Did you",
    ),
    "a mean without std": (TABLE.replace("std = [0.4, 0.5, 0.6]", ""), "[preprocess] has mean but no std"),
    "a std of zero": (TABLE.replace("0.4, 0.5", "0, 0.5"), "[preprocess] mean="),
    "one number for three channels": (
        TABLE.replace("[0.1, 0.2, 0.3]", "[0.1]").replace("[0.4, 0.5, 0.6]", "[0.4]"),
        "[preprocess] mean and std have 1 numbers, but the network reads 3",
    ),
    "an unknown way to resize": (TABLE.replace('"crop"', '"squash"'), "[preprocess] how='squash' must be"),
    "an ignore line without a reason": (TABLE.replace('"a counter"', "true"), "[ignore] 'steps' = True is of no known"),
    "a list under ignore": (TABLE.replace('"steps" = "a counter"', "keys = ['steps']"), "[ignore] 'keys' = ['steps']"),
    "transpose as text": ("[keys]\nclass_token = { key = 'a', transpose = 'no' }\n", "transpose = true"),
    "a line that takes nothing": (TABLE.replace("[ignore]", "'pre_logits.*' = 'neck.*'\n[ignore]"), "takes no key of"),
    "a key taken twice": (
        TABLE.replace("[ignore]", "register_tokens = 'stem.cls'\n[ignore]"),
        "another line has taken",
    ),
    "keys as a value": ("keys = 3\n", "write [keys]"),
    "model as a value": ("model = 3\n" + TABLE.replace("[model]", "[ignored]"), "unknown section [ignored]"),
    "a number for a key": ("[keys]\nclass_token = 3\n", "'class_token' must be a key, a list of keys"),
    "an empty list": ("[keys]\nclass_token = []\n", "'class_token' must be a key, a list of keys"),
    "a list of numbers": ("[keys]\nclass_token = [1]\n", "'class_token' must be a key, a list of keys"),
    "a misspelt word": ("[keys]\nclass_token = { key = 'a', transposed = true }\n", "transpose = true"),
    "no key to transpose": ("[keys]\nclass_token = { transpose = true }\n", "'class_token' must be a key"),
    "{i} on one side": ("[keys]\n'blocks.{i}.norm1.*' = 'layers.0.norm.*'\n", "{i} must stand on both sides"),
    "* on one side": ("[keys]\n'norm.*' = 'last_norm'\n", "* must stand on both sides"),
    "a misspelt option": (
        TABLE.replace("heads = 4", "haeds = 4"),
        "[model] has no option 'haeds'. Did you mean 'heads'",
    ),
    "no regular expression": (TABLE.replace("steps", "ste(ps"), "[ignore] 'ste(ps' is not a regular expression"),
}


@pytest.mark.parametrize("text, said", WRONG.values(), ids=WRONG)
def test_a_wrong_table_is_told(files, text, said):
    weights, table = files
    table.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        vitlab.load(weights, map=table)
    assert f"{table}: " in str(caught.value)
    assert said in str(caught.value)


def test_a_table_that_is_not_text_or_not_there(files):
    weights, table = files
    table.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="is not valid TOML"):
        vitlab.load(weights, map=table)
    with pytest.raises(CheckpointError, match=r"nothing.toml: cannot be read"):
        vitlab.load(weights, map=table.with_name("nothing.toml"))


UNFIT = {
    "a key left over": ('"norm.*" = "last_norm.*"', "", r"are not known in keys.toml weights.*last_norm.bias"),
    "a key not ignored": ('"steps" = "a counter"', "", r"are not known in keys.toml weights.*steps"),
    "a part that is not there": ('"layers.{i}.k.*"', '"layers.{i}.kk.*"', r"layers.0.kk.weight is missing"),
    "one of our names misspelt": ('"norm.*" = ', '"nrom.*" = ', r"norm.bias is missing.*nrom.bias is not part"),
    "not transposed": (", transpose = true", "", r"blocks.0.mlp.fc1.weight is 48x96"),
}


@pytest.mark.parametrize("old, new, said", UNFIT.values(), ids=UNFIT)
def test_a_table_that_does_not_fit_the_weights_is_told(files, old, new, said):
    weights, table = files
    assert old in TABLE
    table.write_text(TABLE.replace(old, new), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"(?s)strange.pth.*({said})"):
        vitlab.load(weights, map=table)


def test_an_ignored_key_is_not_called_unknown(files):
    weights, table = files
    table.write_text(TABLE.replace('"norm.*" = "last_norm.*"', ""), encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        vitlab.load(weights, map=table)
    assert "2 key(s) are not known" in str(caught.value)
    assert "ema.stem" not in str(caught.value)


def test_a_table_for_a_folder_of_another_model_type(files, model, tmp_path):
    weights, table = files
    folder = tmp_path / "folder"
    folder.mkdir()
    weights.rename(folder / "pytorch_model.bin")
    (folder / "config.json").write_text('{"model_type": "strange"}', encoding="utf-8")
    assert torch.equal(logits(vitlab.load(folder, map=table)), logits(model))


def test_command_line(files, model, tmp_path, command):
    weights, table = files
    told = json.loads(command("convert", weights, tmp_path / "out", "--map", table, "--check", "--json").stdout)
    assert told["counts"]["matched"] == 32
    assert told["check"][0]["max_difference"] == 0
    assert torch.equal(logits(vitlab.load(tmp_path / "out")), logits(model))


def test_command_line_error(files, tmp_path, command):
    weights, table = files
    table.write_text(TABLE.replace("heads = 4", "haeds = 4"), encoding="utf-8")
    done = command("convert", weights, tmp_path / "out", "--map", table, code=2)
    assert done.stderr.strip() == f"vitlab: error: {table}: [model] has no option 'haeds'. Did you mean 'heads'?"
    assert not (tmp_path / "out").exists()
