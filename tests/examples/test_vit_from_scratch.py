"""examples/vit_from_scratch: it computes what vitlab and transformers compute, and uses neither."""

import ast
import re
import runpy
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import visualize_attention as visualize
from PIL import Image
from safetensors.torch import load_file
from transformers import ViTConfig as TransformersConfig
from transformers import ViTForImageClassification
from vit_model import VisionTransformer, ViTConfig, vit_base, vit_huge, vit_large, vit_small, vit_tiny

import vitlab
from vitlab.checkpoints.convert import write

FOLDER = Path(__file__).parents[2] / "examples" / "vit_from_scratch"
LINES = {"vit_model": 200, "train_cifar10": 250, "mae": 250, "clip": 250, "dino": 250}
SHAPE = dict(image_size=48, patch_size=8, channels=3, classes=5, width=48, depth=3, heads=3)


def randomized(model):
    """Every weight random: zeros and ones would hide where a bias or a norm is left out."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model.eval()


def test_it_imports_nothing_of_vitlab_and_stays_short():
    for file in FOLDER.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {name.split(".")[0] for name in imported} & {"vitlab", "torchvision", "timm", "transformers"}, file
        assert len(text.splitlines()) <= LINES.get(file.stem, 300), file


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_the_readme_counts_lines_and_shows_pictures_that_are_drawn(readme, tmp_path, monkeypatch):
    text = (FOLDER / readme).read_text(encoding="utf-8")
    rows = [row.split("|")[1:4] for row in text.splitlines() if re.match(r"\| \[\w+\.py\]", row)]
    counted = {
        file: int(count)
        for files, _, counts in rows
        for file, count in zip(re.findall(r"\((\w+\.py)\)", files), re.split("[,、]", counts), strict=True)
    }
    assert counted == {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in FOLDER.glob("*.py")}
    for target in re.findall(r"\]\(([^):]+)\)", text):
        assert (FOLDER / target).exists(), target

    drawing = runpy.run_path(str(FOLDER / "pictures" / "draw.py"))
    monkeypatch.setitem(drawing["architecture"].__globals__, "OUT", tmp_path)
    for name in ("architecture", "block", "attention"):
        drawing[name]("zh" in readme)
    assert len(list(tmp_path.glob("*.svg"))) == 3
    for drawn in tmp_path.glob("*.svg"):
        assert drawn.read_text(encoding="utf-8") == (FOLDER / "pictures" / drawn.name).read_text(encoding="utf-8")
        assert f"pictures/{drawn.name}" in text


@pytest.mark.parametrize("pool", ["class", "mean"])
@pytest.mark.parametrize("size", [(48, 48), (32, 72)], ids=str)
def test_vitlabs_weights_give_vitlabs_logits(tmp_path, pool, size):
    """(32, 72) also compares how positions are resized."""
    theirs = randomized(vitlab.create("vit_tiny", **SHAPE, pooling=pool))
    write(theirs, tmp_path / "weights.safetensors", "timm")
    ours = VisionTransformer(ViTConfig(**SHAPE, pool=pool)).eval()
    ours.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    images = torch.randn(2, 3, *size)
    with torch.inference_mode():
        torch.testing.assert_close(ours.double()(images.double()), theirs.double()(images.double()), rtol=0, atol=1e-6)


def test_vitlab_loads_what_it_saves(tmp_path):
    ours = randomized(VisionTransformer(ViTConfig(**SHAPE)))
    torch.save({"model": ours.state_dict(), "config": asdict(ours.config)}, tmp_path / "last.pt")
    pixels = dict(mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic", how="crop")
    theirs = vitlab.load(tmp_path / "last.pt", heads=3, image_size=48, eps=1e-6, activation="gelu", preprocess=pixels)
    images = torch.randn(2, 3, 48, 48)
    with torch.inference_mode():
        torch.testing.assert_close(theirs.double()(images.double()), ours.double()(images.double()), rtol=0, atol=1e-6)


RENAMED = {  # transformers' names -> ours
    "vit.embeddings.patch_embeddings.projection": "patch_embed.proj",
    "vit.embeddings.cls_token": "cls_token",
    "vit.embeddings.position_embeddings": "pos_embed",
    "vit.encoder.layer.": "blocks.",
    "layernorm_before": "norm1",
    "attention.output.dense": "attn.proj",
    "layernorm_after": "norm2",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "vit.layernorm": "norm",
    "classifier": "head",
}


def test_transformers_weights_give_transformers_logits(tmp_path):
    config = TransformersConfig(
        image_size=48,
        patch_size=8,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=192,
        num_labels=5,
        layer_norm_eps=1e-6,
    )
    theirs = randomized(ViTForImageClassification(config))
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        for kind in ("weight", "bias"):
            place = f"vit.encoder.layer.{layer}.attention.attention"
            three = [state.pop(f"{place}.{part}.{kind}") for part in ("query", "key", "value")]
            state[f"blocks.{layer}.attn.qkv.{kind}"] = torch.cat(three)
    for old, new in RENAMED.items():
        state = {key.replace(old, new): value for key, value in state.items()}
    ours = VisionTransformer(ViTConfig(**SHAPE)).eval()
    ours.load_state_dict(state)
    images = torch.randn(2, 3, 48, 48, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(ours.double()(images), theirs.double()(images).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("build", [vit_tiny, vit_small, vit_base, vit_large, vit_huge], ids=lambda f: f.__name__)
def test_sizes_are_vitlabs(build):
    with torch.device("meta"):
        ours, theirs = build(), vitlab.create(build.__name__)
    c, d = ours.config, theirs.config
    assert (c.width, c.depth, c.heads, c.patch_size) == (d.width, d.depth, d.heads, d.patch_size)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


# ---- pictures


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_numbers_of_the_drawings_are_vitlabs(tmp_path, pool):
    theirs = randomized(vitlab.create("vit_tiny", **SHAPE, pooling=pool))
    write(theirs, tmp_path / "weights.safetensors", "timm")
    ours = VisionTransformer(ViTConfig(**SHAPE, pool=pool))
    ours.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    images = torch.randn(2, 3, 48, 48)
    A = visualize.attention(ours, images)
    close = lambda x, y: torch.testing.assert_close(x, y.to(x.dtype), rtol=0, atol=1e-5)
    close(visualize.reader_maps(A, (6, 6), pool).transpose(0, 1), vitlab.explain.attention_maps(theirs, images))
    close(visualize.rollout(A, (6, 6), pool), vitlab.explain.rollout(theirs, images))
    close(visualize.position_similarity(ours), vitlab.explain.position_similarity(theirs))
    close(visualize.attention_distance(A, (6, 6), 8), vitlab.explain.attention_distance(theirs, images))
    filters, expected = visualize.embedding_filters(ours, 9).flatten(1), vitlab.explain.filters(theirs, 9).flatten(1)
    close((filters * expected).sum(1).abs(), torch.ones(9))  # of unit length, the same but for the sign


def test_drawings_show_the_numbers():
    maps = torch.rand(3, 2, 4, 5)
    figure = visualize.draw_attention(Image.new("RGB", (40, 32)), maps)
    shown = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    np.testing.assert_allclose(np.stack(shown[1:]).reshape(3, 2, 4, 5), maps)  # the first is the image
    similarity, distance = torch.rand(3, 4, 3, 4), torch.rand(3, 2)
    left, centre, right = visualize.draw_figure7(torch.rand(28, 4, 4, 3), similarity, distance).axes[:3]
    assert left.images[0].get_array().shape == (4 * 5 - 1, 7 * 5 - 1, 3)
    tile = centre.images[0].get_array()[2 * 4 : 2 * 4 + 3, 1 * 5 : 1 * 5 + 4]  # of row 2, column 1; gaps of one
    np.testing.assert_allclose(tile, similarity[2, 1])
    np.testing.assert_allclose(np.stack([line.get_ydata() for line in right.lines], axis=1), distance)


def test_it_draws_a_checkpoint_and_can_do_without(tmp_path):
    model = VisionTransformer(ViTConfig(image_size=16, patch_size=4, classes=3, width=32, depth=2, heads=2))
    torch.save({"model": model.state_dict(), "config": asdict(model.config)}, tmp_path / "last.pt")
    visualize.main([str(visualize.CAT), "--checkpoint", str(tmp_path / "last.pt"), "--out", str(tmp_path / "drawn")])
    for name in ("attention", "rollout", "figure7"):
        with Image.open(tmp_path / "drawn" / f"{name}.png") as image:
            assert min(image.size) > 200 and len(image.convert("RGB").getcolors(1 << 20)) > 50
    assert visualize.load(None).config.image_size == 32
