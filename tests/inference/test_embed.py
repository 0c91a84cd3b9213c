"""embed against the model called by hand, one picture at a time; embed_text against the text tower; fingerprints."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.errors import CheckpointError, UsageError
from vitlab.inference import fingerprint
from vitlab.text.tokenizer import Tokenizer

SIZES = [(16, 16), (31, 57), (90, 20), (5, 3), (16, 40)]


def picture(height: int, width: int) -> Image.Image:
    noise = np.random.default_rng([height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def small_clip(**options):
    tokenizer = Tokenizer.train(["a dog on a beach", "two cats", "一只狗在海边"], vocab=530, context=16)
    model = vitlab.create("clip_digits", **tokenizer.options, **options)
    model.tokenizer = tokenizer
    return model


MODELS = {  # what its vectors are, by hand
    "vit_digits": (dict(channels=3, classes=4), lambda m, x: m.forward_head(m.forward_features(x), pre_logits=True)),
    "deit_tiny_distilled": (
        dict(image_size=32, depth=2),
        lambda m, x: m.forward_head(m.forward_features(x), pre_logits=True),
    ),
    "mae_digits": ({}, lambda m, x: m.encoder(x)),
    "dino_digits": ({}, lambda m, x: m.encoder(x)),
    "resnet18": (dict(image_size=32, classes=0), lambda m, x: m(x)),
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_model_called_by_hand(name):
    options, look = MODELS[name]
    model = vitlab.create(name, **options).train()
    pictures = [picture(*size) for size in SIZES]
    done = []
    found = vitlab.embed(model, pictures, batch_size=2, progress=done.append)
    assert done == [2, 2, 1] and model.training  # every part is in the mode it was in
    model.eval()
    for embedding, one in zip(found, pictures, strict=True):
        with torch.no_grad():
            expected = look(model, model.preprocess(one)[None])[0].double()
        assert embedding.vector.dtype == np.float32 and embedding.error is None
        np.testing.assert_allclose(embedding.vector, expected / expected.norm(), atol=1e-5)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@torch.no_grad()
def test_of_a_clip_pictures_and_texts_are_in_one_space(loss):
    model = small_clip(loss=loss)
    texts, pictures = ["a dog", "一只猫", "two cats " * 20], [picture(*size) for size in SIZES]
    images = np.stack([e.vector for e in vitlab.embed(model, pictures)])
    words = vitlab.embed_text(model, texts)
    model.eval()
    logits = model(model.preprocess.batch(pictures), model.tokenizer(texts)).logits_per_image
    bias = 0.0 if model.bias is None else model.bias.item()
    np.testing.assert_allclose(model.scale.item() * images @ words.T + bias, logits, atol=1e-4)
    np.testing.assert_allclose(vitlab.embed_text(model, texts[0]), words[:1], atol=1e-6)


def test_bad_pictures_are_named_and_the_others_go_on(tmp_path):
    model = vitlab.create("vit_digits", channels=3)
    (tmp_path / "bad.png").write_bytes(b"nothing")
    good, bad, other = vitlab.embed(model, [picture(9, 9), tmp_path / "bad.png", picture(7, 5)])
    assert bad.vector is None and bad.error.startswith(f"{tmp_path / 'bad.png'}: not an image")
    assert bad.to_dict() == {"image": str(tmp_path / "bad.png"), "error": bad.error}
    assert len(good.to_dict()["embedding"]) == model.feature_width and not np.allclose(good.vector, other.vector)
    model.norm.weight.data.fill_(float("nan"))
    (nan,) = vitlab.embed(model, picture(9, 9))
    assert nan.vector is None and "not finite" in nan.error


def test_what_is_refused():
    model = vitlab.create("vit_digits")
    with pytest.raises(CheckpointError, match="best: no such file or folder"):
        vitlab.embed("best", "x.jpg")
    with pytest.raises(UsageError, match=r"expected a model of vitlab .*, found a Linear"):
        vitlab.embed_text(torch.nn.Linear(1, 1), "a dog")
    with pytest.raises(ValueError, match="batch_size=0"):
        vitlab.embed(model, picture(9, 9), batch_size=0)
    with pytest.raises(ValueError, match=r"\(vit\) reads no text"):
        vitlab.embed_text(model, "a dog")
    clip = small_clip()
    clip.tokenizer = None
    with pytest.raises(ValueError, match="without its tokenizer"):
        vitlab.embed_text(clip, "a dog")


def test_a_model_may_be_given_by_its_name_and_wrapped(tmp_path):
    image, model = picture(40, 30), small_clip()
    vitlab.save(model, tmp_path)
    wrapped = torch.nn.DataParallel(torch.compile(model))
    for given in (str(tmp_path), tmp_path, wrapped):
        np.testing.assert_array_equal(vitlab.embed(given, image)[0].vector, vitlab.embed(model, image)[0].vector)
        np.testing.assert_array_equal(vitlab.embed_text(given, "a dog"), vitlab.embed_text(model, "a dog"))
        labels = ["dog", "cat"]
        assert vitlab.zero_shot(given, image, labels) == vitlab.zero_shot(model, image, labels)
    cifar = vitlab.load("bundled:cifar10")
    assert vitlab.predict("bundled:cifar10", image) == vitlab.predict(torch.compile(cifar), image)


def test_fingerprints_tell_models_apart_and_know_them_again(tmp_path):
    model = small_clip()
    vitlab.save(model, tmp_path / "clip")
    first = fingerprint(model)
    assert fingerprint(vitlab.load(tmp_path / "clip")) == first
    seen = {first}
    for key, change in {
        "a weight": lambda m: m.text.blocks[0].mlp.fc1.bias.data.view(-1)[3:4].add_(1e-6),
        "the preprocess": lambda m: setattr(m, "preprocess", m.preprocess.with_size((8, 8))) or _brighter(m),
        "the words": lambda m: setattr(m, "tokenizer", None),
    }.items():
        other = vitlab.load(tmp_path / "clip")
        change(other)
        assert fingerprint(other) not in seen, key
        seen.add(fingerprint(other))
    assert fingerprint(model.to(torch.bfloat16)) not in seen


def _brighter(model) -> None:
    model.preprocess = type(model.preprocess).from_dict({**model.preprocess.to_dict(), "mean": (0.4,)})
