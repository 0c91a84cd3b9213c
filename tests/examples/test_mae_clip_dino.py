"""examples/vit_from_scratch/{mae,clip,dino}.py: the losses are vitlab's, with its weights; a small run learns."""

import re

import clip
import dino
import mae
import pytest
import torch
from vit_model import ViTConfig

import vitlab

TOWER = dict(patch_size=8, channels=3, width=48, depth=2, heads=3)
RENAMED = {"class_token": "cls_token", "positions.table": "pos_embed", ".attention.": ".attn."}  # vitlab's -> ours


def vit_state(state, old, new):
    """Of the weights of a model of vitlab's those below `old`, renamed and put below `new`."""
    part = {key.removeprefix(old): value for key, value in state.items() if key.startswith(old)}
    for ours, theirs in RENAMED.items():
        part = {key.replace(ours, theirs): value for key, value in part.items()}
    return {new + key: value for key, value in part.items()}


def randomized(model):
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model.double().eval()


def close(x, y):
    torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("norm_pix", [True, False])
def test_mae_has_vitlabs_loss(norm_pix):
    decoder = dict(width=32, depth=1, heads=2)
    theirs = vitlab.create("mae_tiny", image_size=48, **TOWER, norm_pix=norm_pix, decoder=decoder)
    theirs = randomized(theirs)
    ours = mae.MAE(ViTConfig(image_size=48, classes=0, **TOWER), 32, 1, 2, norm_pix=norm_pix).double().eval()
    state = theirs.state_dict()
    decoder = {key: value for key, value in state.items() if not key.startswith("encoder.")}
    copied = vit_state(state, "encoder.", "encoder.") | vit_state(decoder, "decoder.", "")
    copied["encoder.pos_embed"] = ours.encoder.pos_embed  # fixed in both
    ours.load_state_dict(copied)
    images, noise = torch.randn(2, 3, 48, 48, dtype=torch.float64), torch.rand(2, 36, dtype=torch.float64)
    loss, painted, mask = ours(images, noise)
    expected = theirs(images, noise)
    close(loss, expected.loss)
    close(painted, expected.prediction)
    assert torch.equal(mask.double(), expected.mask) and mask.sum() == 2 * 27


def test_mae_puts_patches_back():
    images = torch.randn(2, 3, 24, 40)
    patches = mae.patchify(images, 8)
    assert torch.equal(mae.unpatchify(patches, 8, (3, 5)), images)
    assert torch.equal(patches[1, 7], images[1, :, 8:16, 16:24].permute(1, 2, 0).flatten())  # row 1, column 2


def test_clip_has_vitlabs_loss():
    text = dict(vocab=20, context=9, width=32, depth=2, heads=2, end_id=19, pad_id=19, activation="gelu", mlp_ratio=2.0)
    own = {f"image.{name}": value for name, value in TOWER.items()}
    own |= {"image.patch_bias": True, "image.norm_pre": False, "image.eps": 1e-6, "image.activation": "gelu"}
    own |= {"image.mlp_ratio": 2.0} | {f"text.{name}": value for name, value in text.items()}
    theirs = randomized(vitlab.create("clip_nano", image_size=48, embed_dim=24, **own))
    tower = ViTConfig(image_size=48, classes=0, mlp_ratio=2.0, **TOWER)
    ours = clip.CLIP(tower, clip.TextConfig(20, 9, 32, 2, 2, mlp_ratio=2.0), embed_dim=24).double().eval()
    state = theirs.state_dict()
    copied = vit_state(state, "image.", "image.") | vit_state(state, "text.", "text.")
    copied |= {f"{name}_projection.weight": state[f"{name}_projection.weight"] for name in ("image", "text")}
    ours.load_state_dict(copied | {"t": state["log_scale"]})
    images = torch.randn(4, 3, 48, 48, dtype=torch.float64)
    tokens, end = torch.randint(0, 19, (4, 7)), torch.tensor([3, 6, 5, 1])
    for row, place in zip(tokens, end.tolist(), strict=True):
        row[place:] = 19
    close(ours.encode_text(tokens, end), theirs.encode_text(tokens))
    close(ours(images, tokens, end), theirs.loss(theirs.encode_image(images), theirs.encode_text(tokens)))


def test_dino_has_vitlabs_loss_and_updates():
    projection = dict(out_dim=20, hidden=16, bottleneck=8)
    theirs = vitlab.create("dino_cifar", image_size=32, mlp_ratio=2.0, **TOWER, projection=projection)
    theirs = randomized(theirs)
    theirs.centre.normal_(std=0.1)
    config = ViTConfig(image_size=32, classes=0, mlp_ratio=2.0, **TOWER)
    ours = dino.DINO(config, hidden=16, bottleneck=8, outputs=20).double().eval()

    def copied():
        state = theirs.state_dict()
        parts = {"centre": state["centre"]}
        for name in ("student", "teacher"):
            parts |= vit_state(state, f"{name}.", f"{name}.0.")
            for i in range(3):
                for kind in ("weight", "bias"):
                    parts[f"{name}.1.mlp.{2 * i}.{kind}"] = state[f"{name}_head.mlp.{i}.{kind}"]
            parts[f"{name}.1.directions"] = state[f"{name}_head.last.weight"]
        return parts

    ours.load_state_dict(copied())
    views = [torch.randn(3, 3, size, size, dtype=torch.float64) for size in (32, 32, 16, 16, 16)]
    loss, outputs = ours(views, tau_t=0.05)
    expected = theirs(views, 0.05)
    close(loss, expected.loss)
    ours.update(outputs, momentum=0.9)
    theirs.update_teacher(0.9)
    theirs.update_centre(expected.teacher_mean)
    for key, value in copied().items():
        close(ours.state_dict()[key], value)


def numbers(text, pattern):
    return [float(value) for value in re.search(pattern, text).groups()]


def test_mae_paints_better_than_the_mean_image(tmp_path, capsys):
    mae.main(["--steps", "400", "--batch-size", "64", "--out", str(tmp_path / "mae.png")])
    loss, blind = numbers(capsys.readouterr().out, r"test loss ([\d.]+); .*: ([\d.]+)")
    assert loss < blind and (tmp_path / "mae.png").stat().st_size > 1000


def test_clip_learns_colours_first(capsys):
    clip.main(["--steps", "100", "--batch-size", "64"])
    (colour,) = numbers(capsys.readouterr().out, r"which of 8 colours ([\d.]+)%")
    assert colour > 90  # by chance 12.5


def test_dino_collapses_without_its_centre_and_not_with_it(capsys):
    def outputs(*options):
        dino.main(["--steps", "20", "--batch-size", "32", *options])
        return numbers(capsys.readouterr().out, r"step 20: .*entropy ([\d.]+) of ([\d.]+), (\d+) used")

    entropy, full, used = outputs()
    assert used > 10 and 1 < entropy < 0.9 * full
    entropy, _, used = outputs("--no-centre")
    assert used == 1 and entropy < 0.5
