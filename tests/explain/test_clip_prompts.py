"""explain.ask: relevance for a sentence equals that of transformers' CLIP, finds what was planted, and draws it."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import vitlab
import vitlab.cli.main
from vitlab.checkpoints.load import load_with_report
from vitlab.explain import ask, grad_cam, gradient_x_input, relevance, rollout
from vitlab.images.preprocess import Preprocess
from vitlab.models.clip import CLIP, CLIPConfig, clip_vit
from vitlab.models.two_towers import TextConfig
from vitlab.text.tokenizer import Tokenizer

COLOURS = {"red": (1.0, -1.0, -1.0), "green": (-1.0, 1.0, -1.0), "blue": (-1.0, -1.0, 1.0)}
SENTENCES = [f"a {name} square" for name in COLOURS]
GRID, P = (4, 6), 4
MEAN = dict(class_token=False, pooling="mean")


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.train(SENTENCES * 3, vocab=530, context=12)


def planted(count: int, squares: int, seed: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Grey noise with squares of different colours, each filling a patch: images; colours, patches (n, squares)."""
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(0.2 * rng.standard_normal((count, 3, GRID[0] * P, GRID[1] * P))).float()
    colours = np.stack([rng.permutation(3)[:squares] for _ in range(count)])
    patches = np.stack([rng.permutation(GRID[0] * GRID[1])[:squares] for _ in range(count)])
    for image, names, places in zip(images, colours, patches, strict=True):
        for name, place in zip(names, places, strict=True):
            y, x = place // GRID[1] * P, place % GRID[1] * P
            image[:, y : y + P, x : x + P] += torch.tensor(COLOURS[list(COLOURS)[name]])[:, None, None]
    return images, colours, patches


@pytest.fixture(scope="module")
def taught(words) -> CLIP:
    """A CLIP that has read of one square at a time: some 2 s on one core."""
    torch.manual_seed(0)
    image = clip_vit(image_size=(GRID[0] * P, GRID[1] * P), patch_size=P, width=32, depth=1, heads=2, **MEAN)
    text = TextConfig(width=32, depth=1, heads=2, **words.options)
    model = CLIP(CLIPConfig(image, text, 16)).train()
    model.tokenizer, model.preprocess = words, Preprocess(image.image_size)
    ids = words(SENTENCES)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(100):
        images, colours, _ = planted(24, 1, seed=1000 + step)
        said = torch.from_numpy(colours[:, 0])
        same = said[:, None] == said[None]
        loss = model.loss(model.encode_image(images), model.encode_text(ids[said]), same)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        model.clamp_scale()
    return model.eval()


def test_the_square_that_a_sentence_speaks_of_is_found(taught):
    """Two squares lie in each picture: what tells them apart can only be the sentence. Rollout cannot know it."""
    asked = ask(taught, SENTENCES)
    images, colours, _ = planted(24, 1, seed=2)
    assert (asked(images).argmax(1).numpy() == colours[:, 0]).mean() > 0.9
    images, colours, patches = planted(24, 2, seed=1)
    first, second = (relevance(asked, images, colours[:, i], batch_size=24).flatten(1).argmax(1) for i in (0, 1))
    blind = rollout(asked, images, batch_size=24).flatten(1).argmax(1)
    found, other, guessed = (
        (place.numpy() == patches[:, i]).mean() for place, i in ((first, 0), (second, 1), (blind, 0))
    )
    assert min(found, other) > 0.9 and guessed < 0.7, (found, other, guessed)
    by_name = relevance(asked, images[:1], target="a green square")
    assert torch.equal(by_name, relevance(asked, images[:1], 1))
    assert torch.allclose(
        by_name, relevance(ask(taught, "a green square"), images[:1]), atol=1e-6
    )  # others have no part


@pytest.fixture(scope="module")
def both(tmp_path_factory, words):
    """transformers' CLIPModel in float64, and the same weights read by us."""
    import transformers as hf

    torch.manual_seed(3)
    text = dict(vocab_size=words.vocab, max_position_embeddings=12, hidden_size=20, intermediate_size=44)
    text |= dict(num_hidden_layers=2, num_attention_heads=4, bos_token_id=words.start_id, eos_token_id=words.end_id)
    vision = dict(hidden_size=24, intermediate_size=60, num_hidden_layers=3, num_attention_heads=3)
    vision |= dict(image_size=24, patch_size=8)
    config = hf.CLIPConfig(text_config={**text, "pad_token_id": words.pad_id}, vision_config=vision, projection_dim=12)  # type: ignore
    config._attn_implementation = "eager"
    theirs = hf.CLIPModel(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(mean=float("norm" in name and name.endswith("weight")), std=0.3)
        theirs.logit_scale.fill_(2.0)
    folder = tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(folder)
    words.save(folder)
    return load_with_report(folder)[0].double(), theirs.double()


def test_maps_equal_the_papers_equations_on_transformers_tensors(both, relevance_by_loops):
    """The gradient of their logits_per_image in their attention, then eqs. 5-6 of arXiv:2103.15679 by loops."""
    ours, theirs = both  # float64, but for their softmax
    images = torch.randn(2, 3, 24, 24).double()
    asked, ids = ask(ours, SENTENCES), ours.tokenizer(SENTENCES)
    pixels = images.clone().requires_grad_()
    out = theirs(input_ids=ids, pixel_values=pixels, output_attentions=True)
    torch.testing.assert_close(asked(images), out.logits_per_image, atol=1e-5, rtol=0)
    cosines = out.logits_per_image.detach() / theirs.logit_scale.exp().detach()
    torch.testing.assert_close(asked.cosines(images, batch_size=1), cosines, atol=1e-5, rtol=0)
    score = out.logits_per_image[0, 2] + out.logits_per_image[1, 0]
    attentions = out.vision_model_output.attentions
    *gradients, slope = torch.autograd.grad(score, [*attentions, pixels])
    R = relevance_by_loops([a.detach().numpy() for a in attentions], [g.numpy() for g in gradients])
    expected = R[:, 0, 1:].reshape(2, 3, 3)
    assert np.ptp(expected[0]) > 0.1 * expected[0].max()  # there was something to find
    found = relevance(asked, images, [SENTENCES[2], 0])
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5 * expected.max(), rtol=0)
    of_pixels = gradient_x_input(asked, images, [2, 0], tokens=False)
    torch.testing.assert_close(of_pixels, (slope * images).sum(1), atol=1e-5, rtol=1e-5)
    assert grad_cam(asked, images, 1).shape == (2, 3, 3)


def test_the_model_stays_as_it_was(taught):
    model = taught.train()
    images = planted(3, 2, seed=5)[0]
    first = relevance(ask(model, SENTENCES[:2]), images)
    assert all(module.training for module in model.modules())
    model.eval().requires_grad_(False)
    assert torch.allclose(first, relevance(ask(model, [*SENTENCES[:2], SENTENCES[0]]), images))  # twice is once
    model.requires_grad_(True)


def test_what_cannot_be_asked_is_told(taught, words):
    with pytest.raises(ValueError, match="only a CLIP or SigLIP reads sentences, and this is a vit"):
        ask(vitlab.load("bundled:digits"), "a dog")
    for nothing in ([], "", ["a dog", " "], [3]):
        with pytest.raises(ValueError, match="each with a word in it"):
            ask(taught, nothing)
    with pytest.raises(ValueError, match=r"explain\.ask"):
        relevance(taught, torch.randn(1, 3, 16, 24))
    with pytest.raises(ValueError, match="asked in words: --text"):
        relevance(taught.encoder, torch.randn(1, 3, 16, 24))
    with pytest.raises(ValueError, match="Did you mean 'a red square'"):
        relevance(ask(taught, SENTENCES), torch.randn(1, 3, 16, 24), target="a red squar")
    taught.tokenizer = None
    try:
        with pytest.raises(ValueError, match="without its tokenizer"):
            ask(taught, "a dog")
    finally:
        taught.tokenizer = words


# ---- the command


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def call(*args: object, code: int = 0):
        monkeypatch.setattr(sys, "argv", ["vitlab", "explain", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            vitlab.cli.main.run()
        found = capsys.readouterr()
        assert (stopped.value.code or 0) == code, found
        return found

    return call


@pytest.fixture(scope="module")
def place(taught, tmp_path_factory):
    """The model in a folder, and a picture of twice its size: red above, blue below."""
    folder = tmp_path_factory.mktemp("asked")
    vitlab.save(taught, folder / "clip")
    pixels = np.full((32, 48, 3), 128, np.uint8)
    pixels[8:16, 8:16], pixels[24:32, 32:40] = (255, 0, 0), (0, 0, 255)
    Image.fromarray(pixels).save(folder / "two squares.png")
    return folder / "clip", folder / "two squares.png"


def test_the_command_draws_a_map_for_each_sentence(place, taught, run, tmp_path):
    checkpoint, picture = place
    asked = ("--text", "a red square", "--text", "a blue square")
    told = json.loads(run("relevance", checkpoint, picture, *asked, "--html", "--json").out)
    assert told["sentences"] == ["a red square", "a blue square"]
    with np.load(tmp_path / "explain-relevance.npz") as file:
        maps = file["maps"]  # (B, sentences, rows, columns)
        np.testing.assert_allclose(file["cosine"], told["cosine"], rtol=1e-5)
    assert [divmod(int(m.argmax()), GRID[1]) for m in maps[0]] == [(1, 1), (3, 4)]
    with torch.no_grad():
        image = taught.preprocess(Image.open(picture))[None]
        text = taught.encode_text(taught.tokenizer(told["sentences"]))
        cosines = F.cosine_similarity(taught.image_projection(taught.image(image)), text)
    assert told["cosine"][0] == pytest.approx(cosines.tolist(), abs=1e-5)
    drawn = np.asarray(Image.open(tmp_path / "explain-relevance.png").convert("RGB"))
    assert drawn.std() > 10
    page = (tmp_path / "explain-relevance.html").read_text(encoding="utf-8")
    assert "a red square" in page and "a blue square" in page
    said = run("relevance", checkpoint, picture, "--text", "a red square", "--method", "grad_cam", "-o", "one.png").out
    assert "written: one.png" in said and "100 %" not in said  # one sentence alone is no choice


def test_other_verbs_take_sentences_too(place, run, tmp_path):
    checkpoint, picture = place
    asked = ("--text", "a red square", "--text", "a blue square")
    found = json.loads(run("compare", checkpoint, picture, "--methods", "rollout,relevance", *asked, "--json").out)
    assert found["images"][0]["label"] in ("a red square", "a blue square")
    more = ("--methods", "relevance", "--kinds", "deletion", "--steps", 2, "--json")
    found = run("faithfulness", checkpoint, picture, *asked, *more)
    assert {row["method"] for row in json.loads(found.out)["scores"]} == {"relevance", "random"}
    run("attention", checkpoint, picture, "-o", "attention.png")  # without words: its image tower
    assert (tmp_path / "attention.png").is_file()


def test_commands_that_make_no_sense(place, run):
    checkpoint, picture = place
    for args, says in {
        ("relevance", checkpoint, picture): "A CLIP or SigLIP is asked in words: --text",
        ("relevance", checkpoint, picture, "--text", " "): "each with a word in it",
        ("relevance", checkpoint, picture, "--text", "a", "--target", "1"): "with --text the sentences are",
        ("relevance", "bundled:digits", picture, "--text", "a"): "only a CLIP or SigLIP reads",
        ("faithfulness", checkpoint, picture, "--text", "a"): "Give a second one",
        (
            "compare",
            checkpoint,
            picture,
            "--with",
            "bundled:digits",
            "--text",
            "a",
        ): "only a CLIP or SigLIP reads sentences",
    }.items():
        assert says in " ".join(run(*args, code=2).err.split()), args
