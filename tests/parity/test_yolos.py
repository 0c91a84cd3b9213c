"""transformers' YOLOS with the same weights: classes, boxes and losses at any image size; both ways."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import vitlab
from vitlab.checkpoints import convert
from vitlab.layers.edit import Edit
from vitlab.layers.trace import Trace
from vitlab.models.dense import DenseTarget
from vitlab.models.yolos import YOLOS, YOLOSConfig

SIZE = dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=2, intermediate_size=40, patch_size=8)
CONFIGS = {
    "tiny": dict(image_size=[32, 52], use_mid_position_embeddings=False),
    "small": dict(image_size=[32, 48], use_mid_position_embeddings=True, layer_norm_eps=1e-6, num_channels=1),
}


def their_yolos(name: str) -> hf.YolosForObjectDetection:
    torch.manual_seed(0)
    config = hf.YolosConfig(**SIZE, **CONFIGS[name], num_detection_tokens=7, num_labels=4)
    model = hf.YolosForObjectDetection(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(std=0.2)
            if "norm" in key and key.endswith("weight"):
                parameter.add_(1)
    return model


def agree(ours: YOLOS, theirs: hf.YolosForObjectDetection, size: tuple[int, int]) -> None:
    images = torch.randn(2, ours.config.channels, *size)
    with torch.inference_mode():
        a, b = ours(images), theirs(images)
    torch.testing.assert_close(a.classes, b.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(a.boxes, b.pred_boxes, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_classes_and_boxes_agree_both_ways(name, tmp_path):
    theirs = their_yolos(name)
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    assert isinstance(ours, YOLOS) and ours.config.between == (name == "small")
    for size in (ours.config.image_size, (40, 27)):  # of another size, and no multiple of the patches
        agree(ours, theirs, size)
    convert.write(ours, tmp_path / "back", "hf")
    written, source = (load_file(tmp_path / folder / "model.safetensors") for folder in ("back", "hf"))
    assert written.keys() == source.keys()
    assert all(torch.equal(value, written[key]) for key, value in source.items())
    configs = [json.loads((tmp_path / folder / "config.json").read_text(encoding="utf-8")) for folder in ("hf", "back")]
    left_out = ("transformers_version", "initializer_range")
    assert all(configs[1][key] == value for key, value in configs[0].items() if key not in left_out)
    agree(ours, hf.YolosForObjectDetection.from_pretrained(tmp_path / "back").eval(), ours.config.image_size)


def test_at_another_size_the_tables_are_resized_once(tmp_path):
    theirs = their_yolos("small")
    theirs.save_pretrained(tmp_path)
    agree(vitlab.load(tmp_path, image_size=(40, 64)), theirs, (40, 64))


def test_the_loss_and_its_gradients_agree(tmp_path):
    theirs = their_yolos("tiny").train()
    theirs.save_pretrained(tmp_path)
    ours = vitlab.load(tmp_path).train()
    images = torch.randn(2, 3, 32, 52)
    targets = [
        DenseTarget(torch.tensor(labels), boxes=0.2 + 0.3 * torch.rand(len(labels), 4)) for labels in ([0, 3, 1], [2])
    ]
    labels = [{"class_labels": t.labels, "boxes": t.boxes} for t in targets]
    expected = theirs(images, labels=labels)
    found = sum(ours.loss(ours(images), targets).values())
    torch.testing.assert_close(found, expected.loss, atol=1e-5, rtol=0)
    found.backward()
    expected.loss.backward()
    torch.testing.assert_close(ours.queries.grad, theirs.vit.embeddings.detection_tokens.grad, atol=1e-5, rtol=1e-4)


def test_another_encoder_trace_edit_and_new_classes(tmp_path):
    encoder = vitlab.create("dinov3_digits", classes=0, depth=2)
    model = YOLOS(YOLOSConfig(classes=3, queries=5).with_encoder("dinov3", encoder.config)).eval()
    images = torch.randn(2, 1, 8, 12)
    trace = Trace("tokens", "boxes")
    out = model(images, trace=trace)
    assert out.boxes.shape == (2, 5, 4) and torch.equal(trace["boxes"], out.boxes)
    assert not torch.equal(model(images, edit=Edit().zero("heads", layer=1)).boxes, out.boxes)
    vitlab.save(model, tmp_path)
    other = vitlab.load(tmp_path, classes=6)
    assert other(images).classes.shape == (2, 5, 7) and torch.equal(other(images).boxes, out.boxes)
    with pytest.raises(vitlab.UsageError, match="around dinov3: --to native"):
        convert.write(model, tmp_path / "hf", "hf")
    with pytest.raises(vitlab.UsageError, match="a swin is none"):
        YOLOSConfig().with_encoder("swin", vitlab.create("swin_cifar").config)


def test_check_compares_with_transformers(tmp_path):
    their_yolos("small").save_pretrained(tmp_path / "hf")
    rows = convert.convert(str(tmp_path / "hf"), tmp_path / "native", check=True).checks
    assert len(rows) == 2 and all(row.difference is not None and not row.wrong for row in rows)
