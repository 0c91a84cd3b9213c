"""What the exercises on positions, MAE and CLIP are checked against, compared with transformers and with slow loops."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import erf
from transformers.models.clip.modeling_clip import image_text_contrastive_loss
from transformers.models.vit_mae.configuration_vit_mae import ViTMAEConfig
from transformers.models.vit_mae.modeling_vit_mae import (
    ViTMAEEmbeddings,
    build_2d_sinusoidal_position_embedding,
)

from vitlab.learn.exercises import EXERCISES


def cases(name, learned=None):
    return [c for c in EXERCISES[name].all_cases() if learned is None or c.sizes["learned"] == learned]


def added(case):
    """What `Positions` adds to the tokens, (1 + N, D)."""
    (x,), y = case.inputs, case.ours()[0]
    tokens = torch.cat([case.weights["class_token"].expand(len(x), -1, -1), x.flatten(1, 2)], dim=1)
    torch.testing.assert_close(y - tokens, (y - tokens)[:1].expand_as(y))  # the same for every image
    return (y - tokens)[0].double().numpy()


def cubic(t, a=-0.75):
    """Keys' kernel (1981), with the a of torch, OpenCV and PyTorch's released ViTs."""
    t = abs(t)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


@pytest.mark.parametrize("case", cases("positions", learned=0), ids=lambda case: str(case.sizes))
def test_sincos_positions_are_those_of_a_loop_and_of_transformers(case):
    rows, columns, D = (case.sizes[key] for key in ("rows", "columns", "D"))
    expected = np.zeros((1 + rows * columns, D))
    for row in range(rows):
        for column in range(columns):
            for i in range(D // 4):
                for half, place in enumerate((column, row)):
                    angle = place / 10000 ** (i / (D / 4))
                    expected[1 + row * columns + column, half * D // 2 + i] = np.sin(angle)
                    expected[1 + row * columns + column, half * D // 2 + D // 4 + i] = np.cos(angle)
    np.testing.assert_allclose(added(case), expected, atol=1e-6)
    theirs = build_2d_sinusoidal_position_embedding(rows, columns, D, cls_token=True).numpy()  # the row comes first
    np.testing.assert_allclose(added(case), np.roll(theirs, D // 2, axis=1), atol=1e-6)


@pytest.mark.parametrize("case", cases("positions", learned=1), ids=lambda case: str(case.sizes))
def test_resized_positions_are_those_of_a_loop(case):
    rows, columns, old_rows, old_columns = (case.sizes[k] for k in ("rows", "columns", "old rows", "old columns"))
    table = case.weights["positions.table"][0].double().numpy()
    old = table[1:].reshape(old_rows, old_columns, -1)
    expected = [table[0]]
    for row in range(rows):
        for column in range(columns):
            y, x = (row + 0.5) * old_rows / rows - 0.5, (column + 0.5) * old_columns / columns - 0.5
            total = np.zeros(old.shape[-1])
            for r in range(int(np.floor(y)) - 1, int(np.floor(y)) + 3):
                for c in range(int(np.floor(x)) - 1, int(np.floor(x)) + 3):
                    at = old[np.clip(r, 0, old_rows - 1), np.clip(c, 0, old_columns - 1)]
                    total += cubic(y - r) * cubic(x - c) * at
            expected.append(total)
    np.testing.assert_allclose(added(case), np.stack(expected), atol=2e-6)


@pytest.mark.parametrize("case", cases("mae-masking"), ids=lambda case: str(case.sizes))
def test_masking_and_restoring_are_those_of_transformers(case):
    """Its `random_masking` chooses, its decoder's gather restores; the loss is the mean over its mask."""
    (patches, noise), s = case.inputs, case.sizes
    steps = case.steps()
    theirs = ViTMAEEmbeddings(
        ViTMAEConfig(hidden_size=s["D"] // 4 * 4, image_size=4, patch_size=2, mask_ratio=s["mask percent"] / 100)
    )
    visible, mask, restore = theirs.random_masking(steps["embedded"], noise)
    latent = case.module.encoder(visible)
    full = torch.cat([latent, case.weights["mask_token"].expand(len(noise), s["N"] - latent.shape[1], -1)], dim=1)
    full = full.gather(1, restore[..., None].expand_as(full))
    torch.testing.assert_close(steps["restored"], full)
    error = F.mse_loss(steps["prediction"], patches, reduction="none").mean(-1)
    torch.testing.assert_close(case.ours()[0], error[mask.bool()].mean())


def block_by_numpy(w, x, heads):
    """Eqs. 2-3 of ViT on (N, D), head after head, query after query."""

    def norm(name, x):
        scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    (N, D), d = x.shape, x.shape[1] // heads
    qkv, side_by_side = linear("attention.qkv", norm("norm1", x)), np.zeros((N, D))
    for head in range(heads):
        q, k, v = (qkv[:, part * D + head * d : part * D + (head + 1) * d] for part in range(3))
        for query in range(N):
            scores = np.exp([q[query] @ k[key] / np.sqrt(d) for key in range(N)])
            side_by_side[query, head * d : (head + 1) * d] = scores / scores.sum() @ v
    x = x + linear("attention.proj", side_by_side)
    hidden = linear("mlp.fc1", norm("norm2", x))
    return x + linear("mlp.fc2", hidden * (1 + erf(hidden / np.sqrt(2))) / 2)


@pytest.mark.parametrize("case", cases("mae-masking"), ids=lambda case: str(case.sizes))
def test_the_loss_of_masking_is_that_of_a_loop(case):
    (patches, noise), s = (x.double().numpy() for x in case.inputs), case.sizes
    w = {key: value.double().numpy() for key, value in case.weights.items()}
    of = lambda part: {key.removeprefix(part): value for key, value in w.items() if key.startswith(part)}
    n = {75: 8, 60: 6}[s["mask percent"]]  # a quarter of 35, two fifths of 16
    errors = []
    for values, chance in zip(patches, noise, strict=True):
        visible = [patch for patch in range(s["N"]) if sum(chance < chance[patch]) < n]
        tokens = values @ w["embed.weight"].T + w["embed.bias"] + w["positions"][0]
        latent = block_by_numpy(of("encoder."), tokens[visible], s["h"])
        full = np.repeat(w["mask_token"][0], s["N"], axis=0)
        full[visible] = latent
        decoded = block_by_numpy(of("decoder."), full + w["decoder_positions"][0], s["h"])
        prediction = decoded @ w["pixels.weight"].T + w["pixels.bias"]
        errors += [np.mean((prediction[p] - values[p]) ** 2) for p in range(s["N"]) if p not in visible]
    assert len(errors) == s["B"] * (s["N"] - n)
    np.testing.assert_allclose(case.ours()[0].item(), np.mean(errors), rtol=1e-5)


@pytest.mark.parametrize("case", cases("clip-loss"), ids=lambda case: str(case.sizes))
def test_the_loss_of_clip_is_that_of_a_loop_and_of_transformers(case):
    images, texts = (x.double().numpy() for x in case.inputs)
    w = {key: value.double().numpy() for key, value in case.weights.items()}
    I_f, T_f = images @ w["image_projection.weight"].T, texts @ w["text_projection.weight"].T
    logits = np.array(
        [[np.exp(w["log_scale"]) * i @ t / (np.sqrt(i @ i) * np.sqrt(t @ t)) for t in T_f] for i in I_f]
    )  # (B, B)
    B = len(logits)
    of_images = -sum(np.log(np.exp(logits[i, i]) / sum(np.exp(logits[i, j]) for j in range(B))) for i in range(B)) / B
    of_texts = -sum(np.log(np.exp(logits[i, i]) / sum(np.exp(logits[j, i]) for j in range(B))) for i in range(B)) / B
    ours = case.ours()[0]
    np.testing.assert_allclose(ours.item(), (of_images + of_texts) / 2, rtol=1e-6)
    theirs = image_text_contrastive_loss(torch.tensor(logits.T))
    np.testing.assert_allclose(ours.item(), theirs.item(), rtol=1e-6)
    assert abs(of_images - of_texts) > 1e-3  # so that one direction alone is another number
