"""Every bad checkpoint gets its own clear error, which names the file and what to do; and nothing in it is executed."""

from __future__ import annotations

import argparse
import json
import pickle
import re
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import vitlab
from vitlab.checkpoints import convert, files, keymap, native, timm
from vitlab.checkpoints.load import AssumedWarning, load_with_report
from vitlab.errors import CheckpointError, VitlabError

TOLD = dict(heads=4, eps=1e-6, activation="gelu")  # what a bare state dict of width 48 leaves open
UNSAFE = ("weights_only", "allow_pickle", "add_safe_globals")  # torch's and numpy's advice to open a file unsafely


def tiny(**options):
    size = dict(image_size=16, patch_size=8, width=48, depth=2, heads=4, channels=3, classes=5)
    return vitlab.create("vit_digits", **{**size, **options}).eval()


def timm_state(model) -> dict[str, torch.Tensor]:
    state = {key: value.detach() for key, value in model.state_dict().items()}
    return keymap.write("timm", timm.RULES, state, heads=model.config.heads)


def images():
    return torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)


def logits(model):
    with torch.inference_mode():
        return model(images())


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tiny()


@pytest.fixture
def state(model):
    return timm_state(model)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """The same weights, undamaged, in every kind of file."""
    folder = tmp_path_factory.mktemp("whole")
    save_file(timm_state(model), folder / "model.safetensors")
    torch.save(timm_state(model), folder / "model.pth")
    torch.save(timm_state(model), folder / "legacy.pth", _use_new_zipfile_serialization=False)
    convert.write(model, folder / "model.npz", "jax")
    return folder


def refused(source, *parts: str, **options) -> str:
    """load() raises a CheckpointError that names the source and has these parts; returns it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError) as caught:
            vitlab.load(source, **options)
    message = str(caught.value)
    assert str(source) in message
    for part in parts:
        assert part in message
    assert not any(word in message for word in UNSAFE), message
    assert caught.value.__context__ is None or caught.value.__suppress_context__  # one error, not a chain of them
    return message


# files that are not whole, or not weights


WHOLE = ["model.safetensors", "model.pth", "legacy.pth", "model.npz"]


@pytest.mark.parametrize("name", WHOLE)
def test_whole_file_loads(whole, model, name):
    assert torch.equal(logits(vitlab.load(whole / name, **TOLD)), logits(model))


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("share", [0, 1e-4, 0.01, 0.5, 0.999, 1])
def test_cut_off_file(whole, tmp_path, name, share):
    data = (whole / name).read_bytes()
    cut = tmp_path / name
    cut.write_bytes(data[: min(int(share * len(data)) + 3, len(data) - 1)])
    refused(cut, "not a complete", "fetch it again", **TOLD)


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_empty_file(tmp_path, suffix):
    path = tmp_path / f"empty{suffix}"
    path.touch()
    refused(path, "empty", "Fetch it again")


@pytest.mark.parametrize("suffix", files.SUFFIXES)
@pytest.mark.parametrize("text", ["Not Found", "<!DOCTYPE html>\n<html><body>404</body></html>", '{"error": 1}\n' * 50])
def test_text_is_not_weights(tmp_path, suffix, text):
    path = tmp_path / f"page{suffix}"
    path.write_text(text, encoding="utf-8")
    refused(path, "is text, not weights", "Fetch it again")


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_git_lfs_pointer(tmp_path, suffix):
    path = tmp_path / f"pointer{suffix}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 12345\n", encoding="utf-8")
    refused(path, "git-lfs pointer", "git lfs pull")


@pytest.mark.parametrize("suffix", files.SUFFIXES)
@pytest.mark.parametrize("byte", [b"\x00", b"\x80", b"\xff"])
def test_bytes_without_meaning(tmp_path, suffix, byte):
    path = tmp_path / f"noise{suffix}"
    path.write_bytes(byte * 5000)
    refused(path, "not a complete", "fetch it again")


@pytest.mark.parametrize("really", [".safetensors", ".npz", ".pth"])
@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pth", ".bin", ".ckpt"])
def test_file_under_another_name(whole, tmp_path, really, suffix):
    path = tmp_path / f"model{suffix}"
    path.write_bytes((whole / f"model{really}").read_bytes())
    if really == suffix or (really == ".pth" and suffix in (".bin", ".ckpt")):
        vitlab.load(path, **TOLD)
    else:
        refused(path, f"is a {really} file under another name", f"Rename it to model{really}")


def test_unknown_ending(tmp_path):
    (tmp_path / "model.h5").write_bytes(b"\x89HDF")
    refused(tmp_path / "model.h5", "unknown kind of file .h5", ".safetensors")


# files that would run code, or hold something else


class RunsCode:
    """Pickled, this is a program: opening it would write the marker."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (exec, (f"open({str(self.marker)!r}, 'w').close()",))


def test_nothing_in_a_file_is_executed(tmp_path, state):
    marker = tmp_path / "code_ran"
    bad = RunsCode(marker)
    torch.save({"model": state, "optimizer": bad}, tmp_path / "new.pth")
    torch.save({"model": state, "optimizer": bad}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("new.pth", "old.pt"):
        refused(tmp_path / name, "could run foreign code", "torch.save(model.state_dict()")
    for protocol in range(1, pickle.HIGHEST_PROTOCOL + 1):
        for suffix in (".pth", ".ckpt", ".npz", ".safetensors"):
            path = tmp_path / f"plain{protocol}{suffix}"
            path.write_bytes(pickle.dumps(bad, protocol=protocol))
            refused(path)
    np.savez(tmp_path / "objects.npz", weights=np.array([bad], dtype=object))
    refused(tmp_path / "objects.npz", "could run foreign code", "np.savez")
    assert not marker.exists()
    pickle.loads(pickle.dumps(bad))
    assert marker.exists()  # the trap does work


def test_pickled_module(tmp_path, model):
    torch.save(model, tmp_path / "module.pth")
    refused(tmp_path / "module.pth", "holds Python objects", "torch.save(model.state_dict()")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript(tmp_path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(3, 2)), tmp_path / "program.pt")
    refused(tmp_path / "program.pt", "TorchScript", "torch.jit.load(path).state_dict()")


@pytest.mark.parametrize("found, said", [([1, 2], "a list"), (torch.ones(3), "a Tensor"), ({}, "no tensors")])
def test_not_a_state_dict(tmp_path, found, said):
    torch.save(found, tmp_path / "other.pth")
    refused(tmp_path / "other.pth", said, "a state dict: names -> tensors")


def test_npz_without_numbers(tmp_path):
    np.savez(tmp_path / "words.npz", words=np.array(["a", "b"]))
    refused(tmp_path / "words.npz", "words in it is not an array of numbers", "np.savez")
    with zipfile.ZipFile(tmp_path / "zip.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(tmp_path / "zip.npz", "readme.txt in it is not an array of numbers", "np.savez")


# tensors that do not fit


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity(tmp_path, state, bad):
    state["norm.weight"] = state["norm.weight"].clone()
    state["norm.weight"][7] = bad
    save_file(state, tmp_path / "diverged.safetensors")
    refused(tmp_path / "diverged.safetensors", "norm.weight (1 of 48 values)", "allow_nan=True", **TOLD)
    found = vitlab.load(tmp_path / "diverged.safetensors", allow_nan=True, **TOLD)
    assert (~torch.isfinite(found.state_dict()["norm.weight"])).nonzero().tolist() == [[7]]


MISSING = [
    "blocks.1.attn.qkv.weight",
    "blocks.1.norm2.bias",
    "blocks.0.attn.proj.weight",
    "blocks.0.mlp.fc2.weight",
    "norm.weight",
    "head.bias",
    "blocks.0.mlp.fc1.weight",
]


@pytest.mark.parametrize("key", MISSING)
def test_missing_key(tmp_path, state, key):
    del state[key]
    save_file(state, tmp_path / "part.safetensors")
    refused(tmp_path / "part.safetensors", f"{key.replace('attn', 'attention')} is missing", **TOLD)


def test_unknown_key(tmp_path, state):
    save_file({**state, "blocks.0.attn.bonus": torch.ones(3)}, tmp_path / "more.safetensors")
    refused(tmp_path / "more.safetensors", "blocks.0.attn.bonus", "map='keys.toml'", "--map keys.toml", **TOLD)


def test_wrong_shape(tmp_path, state):
    state["blocks.1.mlp.fc1.weight"] = torch.zeros(96, 40)
    save_file(state, tmp_path / "bent.safetensors")
    refused(tmp_path / "bent.safetensors", "blocks.1.mlp.fc1.weight is 96x40, expected 96x48", **TOLD)


FLAT = ["patch_embed.proj.weight", "pos_embed", "head.weight", "blocks.0.mlp.fc2.weight"]


@pytest.mark.parametrize("key", FLAT)
def test_wrong_number_of_dimensions(tmp_path, state, key):
    state[key] = state[key].flatten()
    save_file(state, tmp_path / "flat.safetensors")
    refused(tmp_path / "flat.safetensors", str(state[key].numel()), **TOLD)


def test_unknown_layout(tmp_path):
    save_file({"features.0.weight": torch.ones(3), "fc.bias": torch.ones(2)}, tmp_path / "cnn.safetensors")
    refused(tmp_path / "cnn.safetensors", "2 keys of an unknown layout", "fc.bias", "timm", "map='keys.toml'")


def test_native_weights_without_their_card(tmp_path, model):
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    refused(tmp_path / "weights.safetensors", "without their model.json", "Name the folder")


# what bare weights cannot tell


def suggested(message: str) -> dict:
    """The options of the vitlab.load(...) call that an error suggests."""
    call = re.search(r"vitlab\.load\(path, (\w+)=(.+?)\)\.", message)
    assert call, message
    return {call[1]: eval(call[2], {})}


def test_heads_are_asked_for(whole):
    message = refused(whole / "model.safetensors", "number of heads", eps=1e-6, activation="gelu")
    found = vitlab.load(whole / "model.safetensors", eps=1e-6, activation="gelu", **suggested(message))
    assert found.config.heads == suggested(message)["heads"]


@pytest.mark.parametrize("heads", [5, 7, 96])
def test_wrong_heads(whole, heads):
    refused(whole / "model.safetensors", f"heads={heads} does not divide", "48", heads=heads)


@pytest.mark.parametrize("heads", [0, "4"])
def test_heads_that_are_no_number(whole, heads):
    with pytest.raises(ValueError, match="heads"):
        vitlab.load(whole / "model.safetensors", heads=heads)


@pytest.mark.parametrize("options", [dict(prefix_positions=[1]), dict(preprocess=dict(mean=0.5))], ids=str)
def test_values_of_another_kind_are_refused(whole, options):
    with pytest.raises(VitlabError):
        load_with_report(whole / "model.pth", **TOLD, **options)


def test_grid_is_asked_for(tmp_path):
    wide = tiny(image_size=(16, 24))
    path = tmp_path / "wide.safetensors"
    save_file(timm_state(wide), path)
    message = refused(path, "6 patch positions are no square", "image_size=(16, 24)", **TOLD)
    assert vitlab.load(path, **TOLD, **suggested(message)).config.image_size == (16, 24)
    refused(path, "7 positions do not fit a grid of 2x2", grid=(2, 2), **TOLD)


@pytest.mark.parametrize("wrong, right", [("hedas", "heads"), ("imagesize", "image_size"), ("klasses", "classes")])
@pytest.mark.parametrize("kind", ["native", "timm"])
def test_misspelt_option_suggests_the_nearest(tmp_path, model, kind, wrong, right):
    convert.write(model, tmp_path / kind, kind)
    with pytest.raises(ValueError, match=f"no option '{wrong}'. Did you mean '{right}'"):
        vitlab.load(tmp_path / kind, **{wrong: 4})


def test_head_for_heads(tmp_path, model):
    with pytest.raises(ValueError, match="heads"):
        vitlab.load(native.save(model, tmp_path / "native"), head=4)


# folders


def change(path: Path, **values) -> None:
    """Set values in a JSON file, as its owner may; ... removes one."""
    found = {**json.loads(path.read_text(encoding="utf-8")), "seal": ..., **values}
    path.write_text(json.dumps({k: v for k, v in found.items() if v is not ...}), encoding="utf-8")


@pytest.fixture
def ours(tmp_path, model):
    return native.save(model, tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path, model):
    convert.write(model, tmp_path / "theirs", "hf")
    return tmp_path / "theirs"


def test_folder_without_weights(tmp_path):
    refused(tmp_path, "weights files in it: none", "another folder")


def test_folder_with_two_weights_files(tmp_path, state):
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "b.pth")
    refused(tmp_path, "a.safetensors, b.pth", "Name one of them")


def test_broken_card(ours):
    (ours / "model.json").write_text('{"format": 1,', encoding="utf-8")
    refused(ours, "model.json", "not valid JSON", "Fetch or write it again")
    (ours / "model.json").write_bytes(b"\xff\xfe\x00")
    refused(ours, "model.json", "not valid JSON")
    (ours / "model.json").write_text("[1, 2]", encoding="utf-8")
    refused(ours, "model.json", "expected a JSON object, found a list")


@pytest.mark.parametrize("number", [99, None, "1", ...])
def test_unknown_format(ours, number):
    change(ours / "model.json", format=number)
    refused(ours, "model.json", "reads 1", "pip install -U vitlab")


@pytest.mark.parametrize("values", [dict(config=...), dict(config=None), dict(family=...), dict(family=["vit"])])
def test_card_without_its_network(ours, values):
    change(ours / "model.json", **values)
    refused(ours, "model.json", f"{next(iter(values))!r} is missing", "again")


def test_unknown_family(ours):
    change(ours / "model.json", family="resnext")
    refused(ours, "'resnext' is not known", "Update vitlab")


def test_card_without_weights(ours):
    (ours / "weights.safetensors").unlink()
    refused(ours, "weights.safetensors is missing")


def test_card_of_another_network(ours, model):
    change(ours / "model.json", config={**model.config.to_dict(), "width": 64})
    refused(ours, "do not fit the network", "expected 64")


def test_unknown_option_in_the_card(ours, model):
    change(ours / "model.json", config={**model.config.to_dict(), "haeds": 4})
    with pytest.raises(ValueError, match=r"no option 'haeds'. Did you mean 'heads'"):
        vitlab.load(ours)


CARDS = {
    "unknown option": dict(haeds=4),
    "unknown option in a group": dict(norm={"epz": 1e-6}),
    "wrong kind of value": dict(width="wide"),
}


@pytest.mark.parametrize("values", CARDS.values(), ids=CARDS)
def test_card_errors_name_the_file(ours, model, values):
    change(ours / "model.json", config={**model.config.to_dict(), **values})
    refused(ours)


THEIRS = {
    "model_type": (dict(model_type="bert"), "'bert'; known are vit, deit"),
    "activation": (dict(hidden_act="swish"), "'swish'; known are gelu"),
    "pooler": (dict(pooler_act="relu"), "only tanh is known"),
    "patch": (dict(patch_size=[8, 4]), "only square patches"),
}


@pytest.mark.parametrize("values, said", THEIRS.values(), ids=THEIRS)
def test_transformers_config_that_is_not_known(theirs, values, said):
    change(theirs / "config.json", **values)
    with pytest.raises(ValueError, match=said):
        vitlab.load(theirs)


@pytest.mark.parametrize("values, said", THEIRS.values(), ids=THEIRS)
def test_transformers_config_errors_name_the_folder(theirs, values, said):
    change(theirs / "config.json", **values)
    refused(theirs, said)


def test_other_model_type_with_other_keys(tmp_path):
    save_file({"bert.embeddings.word_embeddings.weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    refused(tmp_path, "config.json has model_type 'bert'; known are vit, deit", "of transformers")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    refused(
        tmp_path,
        "model_type 'vit'",
        "e.g. bert.embeddings.word_embeddings.weight, are of no layout that is read",
        "map='keys.toml'",
    )


@pytest.mark.parametrize("absent", ["key", "value"])
def test_query_without_key_or_value(theirs, absent):
    weights = load_file(theirs / "model.safetensors")
    query, other = (f"vit.encoder.layer.1.attention.attention.{part}.weight" for part in ("query", absent))
    del weights[other]
    save_file(weights, theirs / "model.safetensors")
    refused(theirs, f"{query} is there but {other} is missing")


def test_query_and_key_of_different_shapes(theirs):
    weights = load_file(theirs / "model.safetensors")
    weights["vit.encoder.layer.1.attention.attention.query.weight"] = torch.zeros(48, 5)
    save_file(weights, theirs / "model.safetensors")
    refused(theirs, "vit.encoder.layer.1.attention.attention.query.weight")


@pytest.fixture
def shards(theirs):
    """The same folder, with its weights in two files and an index."""
    weights = load_file(theirs / "model.safetensors")
    (theirs / "model.safetensors").unlink()
    where = {key: f"part{i % 2}.safetensors" for i, key in enumerate(sorted(weights))}
    for part in set(where.values()):
        save_file({key: weights[key] for key in where if where[key] == part}, theirs / part)
    (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    return theirs


def test_shards(shards, model):
    assert torch.equal(logits(vitlab.load(shards)), logits(model))
    (shards / "part1.safetensors").unlink()
    refused(shards, "model.safetensors.index.json", "'part1.safetensors'", "Fetch it too")


@pytest.mark.parametrize("outside", ["../secret.safetensors", "/etc/passwd", "..", "sub/part.safetensors"])
def test_shards_outside_the_folder_are_not_opened(shards, state, outside):
    save_file(state, shards.parent / "secret.safetensors")
    change(shards / "model.safetensors.index.json", weight_map={"classifier.weight": outside})
    refused(shards, "model.safetensors.index.json", repr(outside), "not in the folder")


@pytest.mark.parametrize("listed", [..., {}, ["part0.safetensors"], {"classifier.weight": 1}])
def test_index_without_its_list(shards, listed):
    change(shards / "model.safetensors.index.json", weight_map=listed)
    refused(shards, "model.safetensors.index.json", "weight_map", "Fetch it again")


# names that are no files


@pytest.mark.parametrize("name", ["vit_base", "vit_base_patch16_224", "ViT-B/16"])
def test_a_models_name_is_not_a_file(name):
    refused(name, "no such file or folder", "vitlab.create('vit_base_patch16')")


def test_a_hub_name_without_its_prefix():
    refused("google/vit", "no such file or folder", "hf-hub:google/vit")


def test_no_such_file(tmp_path):
    refused(tmp_path / "nothing.pth", "no such file or folder")


# what training scripts put around a state dict


WRAPPED = {
    "facebook": lambda sd: {"model": sd, "args": argparse.Namespace(lr=0.1, data=["a"]), "epoch": 3, "optimizer": {}},
    "data parallel": lambda sd: {"state_dict": {f"module.{k}": v for k, v in sd.items()}, "arch": "vit"},
    "best accuracy": lambda sd: {"state_dict": sd, "best_acc1": torch.tensor(76.1), "epoch": 90},
    "compiled": lambda sd: {f"_orig_mod.{k}": v for k, v in sd.items()},
    "compiled, then parallel": lambda sd: {f"module._orig_mod.{k}": v for k, v in sd.items()},
    "parallel, then compiled": lambda sd: {f"_orig_mod.module.{k}": v for k, v in sd.items()},
    "lightning": lambda sd: {"state_dict": {f"model.{k}": v for k, v in sd.items()}, "global_step": 7},
    "nested": lambda sd: {"model": {"state_dict": sd}},
    "beside numbers": lambda sd: {**sd, "epoch": 3, "model": {"depth": 2}},
    "parameters": lambda sd: {k: torch.nn.Parameter(v) for k, v in sd.items()},
    "ema": lambda sd: {"model": {k: v + 1 for k, v in sd.items()}, "model_ema": sd},
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_wrapped_state_dicts(tmp_path, model, state, wrap):
    torch.save(wrap(state), tmp_path / "run.pth")
    assert torch.equal(logits(load_with_report(tmp_path / "run.pth", **TOLD)[0]), logits(model))


def test_dino_teacher(tmp_path):
    """The backbone is loaded; the projection head is reported as unused, key by key."""
    model = tiny(classes=0)
    backbone = {f"backbone.{k}": v for k, v in timm_state(model).items()}
    head = {"head.mlp.0.weight": torch.ones(8, 48), "head.last_layer.weight_v": torch.ones(16, 8)}
    student = {f"module.{k}": v + 1 for k, v in {**backbone, **head}.items()}
    torch.save({"student": student, "teacher": {**backbone, **head}, "epoch": 9}, tmp_path / "dino.pth")
    found, report = load_with_report(tmp_path / "dino.pth", **TOLD)
    assert torch.equal(logits(found), logits(model))
    unused = [row for row in report.rows if row.status == "unused"]
    assert sorted(row.theirs[0].removeprefix(files.BESIDE) for row in unused) == sorted(head)
    assert all("projection head" in row.note for row in unused)


def test_what_a_file_does_not_say_is_told(whole):
    with pytest.warns(AssumedWarning, match=r"model.pth: timm weights do not say eps=1e-06, activation=gelu"):
        vitlab.load(whole / "model.pth", heads=4)


# a write that fails


def full_disk(state, path, **_):
    Path(path).write_bytes(b"the first bytes")
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("to", ["native", "timm", "hf"])
def test_full_disk_leaves_the_old_checkpoint(tmp_path, model, monkeypatch, to):
    folder = tmp_path / to
    convert.write(model, folder, to)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(files, "save_file", full_disk)
        with pytest.raises(OSError, match="No space left"):
            convert.write(tiny(classes=9), folder, to)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before  # and no temporary file
    assert torch.equal(logits(vitlab.load(folder)), logits(model))
    convert.write(tiny(classes=9), folder, to)
    assert vitlab.load(folder).config.classes == 9


def test_full_disk_leaves_the_old_npz(tmp_path, model, monkeypatch):
    path = tmp_path / "model.npz"
    convert.write(model, path, "jax")
    monkeypatch.setattr(convert.np, "savez", lambda file, **arrays: full_disk(arrays, file.name))
    with pytest.raises(OSError, match="No space left"):
        convert.write(tiny(classes=9), path, "jax")
    assert [p.name for p in tmp_path.iterdir()] == ["model.npz"]
    assert torch.equal(logits(vitlab.load(path, **TOLD)), logits(model))


@pytest.mark.parametrize("to", ["native", "timm", "hf"])
def test_weights_and_card_change_together(tmp_path, model, monkeypatch, to):
    """A model.json or config.json that cannot be written must not leave new weights beside the old one."""
    folder = tmp_path / to
    convert.write(model, folder, to)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda path, text, **_: full_disk(text, path))
        with pytest.raises(OSError, match="No space left"):
            convert.write(tiny(classes=9), folder, to)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_card_that_is_not_json_is_found_before_writing(tmp_path, model):
    folder = native.save(model, tmp_path / "model")
    other = tiny(classes=9)
    other.card.metrics["top1"] = torch.ones(1)
    with pytest.raises(TypeError):
        native.save(other, folder)
    assert torch.equal(logits(vitlab.load(folder)), logits(model))


def test_a_file_is_not_written_over_by_a_folder(tmp_path, model):
    (tmp_path / "taken").write_text("mine", encoding="utf-8")
    for to in ("native", "timm", "hf"):
        with pytest.raises(CheckpointError, match="taken: is a file"):
            convert.write(model, tmp_path / "taken", to)
    assert (tmp_path / "taken").read_text(encoding="utf-8") == "mine"
