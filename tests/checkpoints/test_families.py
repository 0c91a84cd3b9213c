"""The records of families: complete, and all that reading and writing a checkpoint needs to know."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import vitlab
from vitlab.checkpoints import convert, keymap, timm
from vitlab.checkpoints.families import FAMILIES, family_of
from vitlab.checkpoints.family import Writer, Written
from vitlab.checkpoints.keymap import Rule
from vitlab.models import registry

TINY = dict(image_size=16, patch_size=8, width=32, depth=2, heads=4, classes=3)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_record_fits_its_family(family):
    config = family.config()
    assert family.config is registry.FAMILIES[family.name][0]
    assert {name: config.option(name) for name in family.bare_options}
    assert set(family.writers) < set(convert.TARGETS)


def test_every_model_type_belongs_to_one_family():
    names = [name for family in FAMILIES.values() for name in family.model_types]
    assert len(names) == len(set(names))


def test_a_family_without_a_record_is_saved_natively_only(tmp_path):
    model = vitlab.create("dino_digits")
    assert family_of("dino").dialects == () and "dino" not in FAMILIES
    with pytest.raises(vitlab.UsageError, match="a DINO is not written as hf: use --to native, or its encoder alone"):
        convert.write(model, tmp_path / "out", "hf")
    convert.write(model, tmp_path / "out", "native")
    assert vitlab.load(tmp_path / "out").config == model.config


def test_a_dialect_is_read_and_written_by_its_record_alone(tmp_path, monkeypatch):
    """timm's names behind `net.`: one Dialect and one Writer, and nothing else knows of them."""
    rules = tuple(Rule(rule.ours, tuple(f"net.{key}" for key in rule.keys), rule.codec) for rule in timm.RULES)
    dialect = replace(timm.DIALECT, name="net", rules=rules, recognise=lambda keys: "net.pos_embed" in keys)
    writer = Writer(lambda model, state: Written(keymap.write("net", rules, state, heads=model.config.heads)))
    vit = FAMILIES["vit"]
    record = replace(vit, dialects=(dialect, *vit.dialects), writers={**vit.writers, "net": writer})
    monkeypatch.setitem(FAMILIES, "vit", record)
    monkeypatch.setattr(convert, "TARGETS", (*convert.TARGETS, "net"))
    torch.manual_seed(0)
    model = vitlab.create("vit_tiny_patch16", **TINY)
    convert.write(model, tmp_path / "net.safetensors", "net")
    again, report = vitlab.checkpoints.load.load_with_report(tmp_path / "net.safetensors", heads=4)
    assert report.dialect == "net"
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items())


def test_with_encoder_a_family_that_reads_the_encoder_alone_comes_first(tmp_path):
    mae = vitlab.create("mae_digits")
    convert.write(mae, tmp_path / "hf", "hf")
    state = {key: value for key, value in mae.state_dict().items() if key.startswith("encoder.")}
    encoder = vitlab.load(tmp_path / "hf", encoder=True)
    assert encoder.family == "vit" and vitlab.load(tmp_path / "hf").family == "mae"
    for key, value in encoder.state_dict().items():
        assert torch.equal(value, state[f"encoder.{key}"])


def test_a_bare_file_of_another_family_is_told_apart(tmp_path):
    """Swin's transformers folders have the mark of a ViT too."""
    swin = vitlab.create("swin_cifar")
    convert.write(swin, tmp_path / "hf", "hf")
    (tmp_path / "hf" / "config.json").rename(tmp_path / "config.json")
    with pytest.warns(UserWarning, match="do not say"):
        assert vitlab.load(tmp_path / "hf", image_size=swin.config.image_size).family == "swin"
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(vitlab.CheckpointError, match=r"config\.json has model_type 'swin', but the weights are none"):
        vitlab.load(tmp_path / "x.safetensors")
    (tmp_path / "config.json").unlink()
    with pytest.raises(vitlab.CheckpointError, match="unknown layout"):
        vitlab.load(tmp_path / "x.safetensors")


def test_a_decoder_beside_a_config_that_says_vit_is_read_too(tmp_path):
    """config.json then says nothing of masking, and the decoder's heads must be passed."""
    mae = vitlab.create("mae_digits")
    convert.write(mae, tmp_path / "hf", "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"model_type": "vit"}), encoding="utf-8")
    with pytest.raises(vitlab.CheckpointError, match="the decoder's heads cannot be read"):
        vitlab.load(tmp_path / "hf")
    with pytest.warns(UserWarning, match="do not say mask_ratio=0.75, norm_pix=False"):
        again = vitlab.load(tmp_path / "hf", decoder=dict(heads=mae.config.decoder.heads))
    assert again.config == mae.config
    assert again.preprocess.mean == mae.preprocess.mean  # a stated preprocess stays
    (tmp_path / "hf" / "preprocessor_config.json").unlink(missing_ok=True)
    with pytest.warns(UserWarning, match="interpolation=bilinear, how=stretch"):
        vitlab.load(tmp_path / "hf", decoder=dict(heads=mae.config.decoder.heads))
