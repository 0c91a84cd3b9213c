"""Low-rank adapters against peft: its files, training steps and merged weights (made by tests/data/peft/make.py)."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import vitlab
from vitlab.checkpoints.adapters import CARD, CONFIG, WEIGHTS, load_adapter, save_adapter
from vitlab.checkpoints.convert import write
from vitlab.errors import CheckpointError, UsageError
from vitlab.layers.lora import add_lora, lora_layers, merge_lora, merged

PEFT = Path(__file__).parents[1] / "data" / "peft"
GOLDEN = load_file(PEFT / "golden.safetensors")
RATE, DECAY = 1e-2, 0.05  # as make.py has them


def our_name(theirs: str) -> str:
    name = theirs.split("base_model.model.")[1].replace("modules_to_save.default.", "").replace(".default", "")
    return name.replace("lora_A.weight", "lora_a").replace("lora_B.weight", "lora_b")


def stored(state: str) -> dict[str, torch.Tensor]:
    return {our_name(key): value for key, value in GOLDEN.items() if key.startswith(f"{state}.base_model")}


def base_with_lora(seed: int = 0):
    torch.manual_seed(seed)
    model = vitlab.load(PEFT / "base")
    add_lora(model, rank=3, alpha=5, trained=("head.",))
    for layer in lora_layers(model).values():
        torch.nn.init.normal_(layer.lora_b, std=0.1)
    return model


def test_training_steps_are_pefts():
    model = vitlab.load(PEFT / "base").train()
    add_lora(model, rank=3, alpha=5, trained=("head.",))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == stored("initial").keys()
    model.load_state_dict(stored("initial"), strict=False)
    model.double()  # Adam makes steps of full size even of gradients that are rounding errors
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=DECAY)
    losses = []
    for _ in GOLDEN["losses"]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(GOLDEN["images"].double()), GOLDEN["labels"])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(torch.stack(losses), GOLDEN["losses"], atol=1e-9, rtol=0)
    for name, value in stored("final").items():
        torch.testing.assert_close(trained[name].detach(), value, atol=1e-9, rtol=0)


def test_what_peft_saved_loads_and_merges_to_the_same_weights():
    model = vitlab.load(PEFT / "adapter", base=PEFT / "base")
    assert not lora_layers(model)
    for key, value in GOLDEN.items():
        if key.startswith("merged."):
            torch.testing.assert_close(model.state_dict()[key.removeprefix("merged.")], value, atol=1e-6, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(model(GOLDEN["images"]), GOLDEN["logits"], atol=1e-5, rtol=0)
        assert (vitlab.load(PEFT / "base")(GOLDEN["images"]) - GOLDEN["logits"]).abs().max() > 0.1  # it can fail


def test_our_files_are_as_pefts(tmp_path):
    model = load_adapter(vitlab.load(PEFT / "base"), PEFT / "adapter")
    save_adapter(model, tmp_path, base=PEFT / "base")
    ours, theirs = load_file(tmp_path / WEIGHTS), load_file(PEFT / "adapter" / WEIGHTS)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    config, known = (
        json.loads((folder / CONFIG).read_text(encoding="utf-8")) for folder in (tmp_path, PEFT / "adapter")
    )
    assert config.keys() <= known.keys()
    same = ("peft_type", "r", "lora_alpha", "modules_to_save", "bias", "lora_dropout")
    assert {key: config[key] for key in same} == {key: known[key] for key in same}
    assert all(name.endswith(tuple(known["target_modules"])) for name in config["target_modules"])
    assert (
        sum(path.stat().st_size for path in tmp_path.iterdir()) < (PEFT / "base" / "weights.safetensors").stat().st_size
    )


def test_an_adapter_comes_back_on_its_base_to_the_bit(tmp_path):
    model = base_with_lora()
    model.labels = list("abcde")
    save_adapter(model, tmp_path / "adapter", base=PEFT / "base")
    expected = vitlab.load(vitlab.save(model, tmp_path / "merged")).state_dict()
    again = vitlab.load(tmp_path / "adapter")
    assert again.labels == list("abcde")
    assert all(torch.equal(value, expected[key]) for key, value in again.state_dict().items())
    shutil.copytree(PEFT / "base", tmp_path / "moved")
    assert vitlab.load(tmp_path / "adapter", base=tmp_path / "moved", classes=0).config.classes == 0


def test_the_bases_options_come_back(tmp_path):
    """Another image size and other classes than the base's own."""
    model = vitlab.load(PEFT / "base", image_size=(12, 8), classes=3)
    add_lora(model, rank=2, trained=("head.",))
    save_adapter(model, tmp_path, base=PEFT / "base")
    again = vitlab.load(tmp_path)
    images = torch.randn(2, 1, 12, 8)
    assert again.config == model.config and torch.equal(again(images), model.eval()(images))


def test_another_base_is_refused(tmp_path):
    save_adapter(base_with_lora(), tmp_path / "adapter", base=PEFT / "base")
    other = vitlab.load(PEFT / "base")
    with torch.no_grad():
        other.norm.bias[0] += 1e-3
    vitlab.save(other, tmp_path / "changed")
    with pytest.raises(CheckpointError, match="trained on other weights"):
        vitlab.load(tmp_path / "adapter", base=tmp_path / "changed")
    with pytest.raises(CheckpointError, match="width=64, so they cannot be loaded with width=24"):
        vitlab.load(tmp_path / "adapter", base="bundled:digits")
    wide = vitlab.create("vit_digits", width=48, depth=2, heads=3, image_size=(8, 12), classes=5)
    with pytest.raises(CheckpointError, match=r"blocks.0.attention.proj is \(48, 48\), the adapter for \(24, 24\)"):
        load_adapter(wide, PEFT / "adapter")
    assert not lora_layers(wide)
    with pytest.raises(CheckpointError, match="does not name its base"):
        vitlab.load(PEFT / "adapter")
    with pytest.raises(UsageError, match="base= is for a low-rank adapter"):
        vitlab.load(PEFT / "base", base="bundled:digits")
    (tmp_path / "gone").mkdir()
    save_adapter(base_with_lora(), tmp_path / "lost", base=tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"nothing: no such file.*base=\.\.\."):
        vitlab.load(tmp_path / "lost")


WRONG = {
    "use_dora": (True, "use_dora=True is not computed here"),
    "bias": ("all", "bias='all' is not computed"),
    "init_lora_weights": ("pissa", "init_lora_weights='pissa'"),
    "rank_pattern": ({"qkv": 2}, "rank_pattern"),
    "peft_type": ("IA3", "only LORA is read"),
    "r": (4, "is not of rank 4"),
    "lora_alpha": ("5", "lora_alpha '5'; expected a number"),
}


@pytest.mark.parametrize(("option", "wrong"), WRONG.items())
def test_options_of_peft_are_honoured_or_refused_by_name(option, wrong, tmp_path):
    value, message = wrong
    shutil.copytree(PEFT / "adapter", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text(encoding="utf-8"))
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps({**config, option: value}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        vitlab.load(tmp_path / "adapter", base=PEFT / "base")


def test_rank_stabilised_scaling(tmp_path):
    """use_rslora: alpha / sqrt(r) in place of alpha / r."""
    shutil.copytree(PEFT / "adapter", tmp_path / "adapter")
    config = json.loads((PEFT / "adapter" / CONFIG).read_text(encoding="utf-8"))
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps({**config, "use_rslora": True}), encoding="utf-8")
    key = "blocks.0.attention.qkv.weight"
    plain, more = (vitlab.load(path / "adapter", base=PEFT / "base").state_dict()[key] for path in (PEFT, tmp_path))
    base = vitlab.load(PEFT / "base").state_dict()[key]
    torch.testing.assert_close(more - base, (plain - base) * 3**0.5, atol=1e-6, rtol=1e-5)


def test_damage_is_seen(tmp_path):
    save_adapter(base_with_lora(), tmp_path / "a", base=PEFT / "base")
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    save_file({key: value + 1 for key, value in tensors.items()}, tmp_path / "a" / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"is damaged or was changed"):
        vitlab.load(tmp_path / "a")
    (tmp_path / "a" / CARD).unlink()
    half = {key: value for key, value in tensors.items() if not key.endswith("blocks.1.attention.qkv.lora_B.weight")}
    save_file(half, tmp_path / "a" / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"the adapter of blocks.1.attention.qkv is incomplete"):
        vitlab.load(tmp_path / "a", base=PEFT / "base")


def test_an_adapter_of_transformers_network_is_sent_back(tmp_path):
    shutil.copytree(PEFT / "adapter", tmp_path / "adapter")
    pair = {"A": torch.zeros(3, 24), "B": torch.zeros(24, 3)}
    name = "base_model.model.vit.encoder.layer.0.attention.attention.query.lora_{}.weight"
    save_file({name.format(part): value for part, value in pair.items()}, tmp_path / "adapter" / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"another library's network: merge it there"):
        vitlab.load(tmp_path / "adapter", base=PEFT / "base")


# ------------------------------------------------------------------------------------------------------------ the layer

NETWORKS = {
    "vit_digits": {"depth": 2, "width": 32},
    "swin_tiny": {"depths": (1, 1, 1, 1), "width": 24, "heads": (1, 2, 2, 2), "image_size": 64},
    "swinv2_tiny": {"depths": (1, 1, 1, 1), "width": 24, "heads": (1, 2, 2, 2), "image_size": 64},
    "pvt_tiny": {"depths": (1, 1, 1, 1), "widths": (16, 16, 32, 32), "heads": (1, 1, 2, 2), "image_size": 64},
    "mae_digits": {"depth": 2, "width": 32},
    "clip_nano": {},
}


@pytest.mark.parametrize(("name", "options"), NETWORKS.items())
def test_merged_equals_unmerged(name, options, tmp_path):
    torch.manual_seed(0)
    model = vitlab.create(name, **options).eval()
    images = torch.randn(2, model.config.channels, *model.input_size)
    with torch.no_grad():
        before = model.features(images)
        layers = add_lora(model, rank=4, alpha=7, layers="attention,mlp")
        torch.testing.assert_close(model.features(images), before, atol=0, rtol=0)  # B is zero
        for layer in layers.values():
            torch.nn.init.normal_(layer.lora_b, std=0.1)
        apart, joined = model.features(images), merged(model).features(images)
        saved = vitlab.load(vitlab.save(model, tmp_path)).features(images)
    assert (apart - before).abs().max() > 1e-3
    torch.testing.assert_close(joined, apart, atol=1e-5, rtol=0)
    torch.testing.assert_close(saved, joined, atol=0, rtol=0)


def test_which_layers_and_what_learns():
    def adapted(name: str, layers: str) -> set[str]:
        return {part.rpartition(".")[2] for part in add_lora(vitlab.create(name), 2, layers=layers, trained=("head.",))}

    assert adapted("vit_digits", "attention") == {"qkv", "proj"}
    assert adapted("pvt_tiny", "attention") == {"q", "kv", "proj"}
    assert adapted("vit_digits", "mlp") == {"fc1", "fc2"}
    assert adapted("vit_digits", "qkv, fc1") == {"qkv", "fc1"}
    model = vitlab.create("vit_digits")
    add_lora(model, 2, trained=("head.",))
    assert {name.split(".")[-1] for name, p in model.named_parameters() if p.requires_grad} == {
        *("lora_a", "lora_b", "weight", "bias"),
    }
    assert all(
        name.startswith("head.") for name, p in model.named_parameters() if p.requires_grad and "lora" not in name
    )
    for wrong, message in {
        "qvk": "no matrix for 'qvk'",
        "": "names of its layers",
        "head": "learn fully anyway",
    }.items():
        with pytest.raises(UsageError, match=message):
            add_lora(vitlab.create("vit_digits"), 2, layers=wrong, trained=("head.",))
    with pytest.raises(UsageError, match="rank 65 does not fit"):
        add_lora(vitlab.create("vit_digits"), 65)
    with pytest.raises(UsageError, match="merge_lora"):
        add_lora(model, 2)
    with pytest.raises(UsageError, match="no matrix for 'attention'"):
        add_lora(vitlab.create("resnet18"), 2)
    assert merge_lora(model) is model and not lora_layers(model)


def test_other_libraries_files_hold_the_merged_weights(tmp_path):
    model = base_with_lora()
    write(model, tmp_path / "hf", "hf")
    assert lora_layers(model)  # it stays as it is
    with torch.no_grad():
        difference = vitlab.load(tmp_path / "hf")(GOLDEN["images"]) - merged(model)(GOLDEN["images"])
    assert difference.abs().max() < 1e-6


def test_an_export_is_merged(tmp_path):
    model = base_with_lora()
    result = vitlab.export_model(model, tmp_path / "model.onnx")
    assert not result.problems and result.max_difference < 1e-5
    plain = vitlab.export_model(vitlab.load(PEFT / "base"), tmp_path / "plain.onnx")
    assert abs(result.bytes["export"] - plain.bytes["export"]) < 1000  # no matrices of their own
