"""EVA-02 and the Perception Encoder against timm's stored tensors; what those leave out, against the definition."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import AssumedWarning, load_with_report
from vitlab.layers.positions import resize_positions, rotary_scaled, rotary_speeds, rotate

from .test_golden import same, unpack

SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8, "num_classes": 7}
FILES = {  # golden -> architecture, what bare weights do not say, what is assumed of them otherwise
    "timm_eva02": ("eva02_small_patch14_224", {}, r"eps=1e-06, rotary_grid=\(16, 16\), mean"),
    "timm_pe_core": ("vit_pe_core_tiny_patch16_384", dict(rotary_grid=(24, 24)), "eps=1e-05, pool_heads=8, mean"),
    "timm_pe_spatial": ("vit_pe_spatial_tiny_patch16_512", dict(rotary_grid=(32, 32)), "eps=1e-05, mean"),
}


def folder_of(name, path, **changed):
    """As timm's hub has it."""
    cfg = {"input_size": [3, 224, 224], "mean": [0.4] * 3, "std": [0.2] * 3, "interpolation": "bicubic", "crop_pct": 1}
    config = {"architecture": FILES[name][0], "model_args": SMALL, "pretrained_cfg": cfg}
    (path / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")


def agrees(model, tensors) -> None:
    with torch.inference_mode():
        tokens = model.forward_features(tensors["input.images"])
        torch.testing.assert_close(tokens, tensors["output.features"], atol=1e-5, rtol=0)
        torch.testing.assert_close(model(tensors["input.images"]), tensors["output.logits"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FILES)
def test_timm(name, tmp_path):
    path, tensors = unpack(name, tmp_path)
    _, given, assumed = FILES[name]
    with pytest.warns(AssumedWarning, match=f"timm weights do not say {assumed}"):
        agrees(vitlab.load(path, heads=4, **given), tensors)
    with pytest.raises(vitlab.CheckpointError, match="the number of heads cannot be read from weights of width 48"):
        vitlab.load(path)
    path.rename(tmp_path / "model.safetensors")
    folder_of(name, tmp_path)
    model, report = load_with_report(tmp_path)
    assert not report.notes and model.preprocess.size == (32, 32)
    agrees(model, tensors)
    vitlab.save(model, tmp_path / "native")
    same(model.state_dict(), vitlab.load(tmp_path / "native").state_dict())
    convert.write(model, tmp_path / "back", "timm")
    same(load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors"))
    again = vitlab.load(tmp_path / "back")
    assert (again.config, again.preprocess) == (model.config, model.preprocess)
    agrees(again, tensors)


WRITTEN = {
    "eva02_digits": (
        dict(eps=1e-5),
        ["attn.q_proj.weight", "attn.k_proj.weight", "mlp.fc1_g.weight", "mlp.norm.weight"],
    ),
    "eva02_clip_tower": (dict(attention_norm=True, pooling="class"), ["attn.norm.weight", "attn.v_proj.bias"]),
    "pe_digits": (dict(class_token=False, classes=0), ["attn.qkv.bias"]),
    "pe_tokens": (dict(final_norm=False, pooling="class", layer_scale=0.1), ["gamma_1"]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_other_networks_are_written_to_timm_and_come_back(name, tmp_path):
    """B and L of EVA-02 have layers of their own for queries, keys, values and gates there."""
    options, keys = WRITTEN[name]
    model = vitlab.create(f"{name.split('_')[0]}_digits", image_size=(8, 12), **options).eval()
    convert.write(model, tmp_path, "timm")
    written = load_file(tmp_path / "model.safetensors")
    assert {f"blocks.0.{key}" for key in keys} <= written.keys()
    again, images = vitlab.load(tmp_path), torch.randn(2, 1, 16, 8)
    stated = ("image_size", "eps", "pooling", "rotary_grid", "classes")
    assert all(again.config.option(name) == model.config.option(name) for name in stated)
    with torch.inference_mode():
        assert torch.equal(again(images), model(images))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("eva02_digits", dict(qkv_bias=True), "a bias of keys"),
        ("eva02_digits", dict(pooling="mean"), "pooling=mean"),
        ("pe_digits", dict(final_norm=False), "pooling=attention without the last norm"),
        ("pe_digits", dict(activation="relu"), "activation=relu"),
    ],
)
def test_what_timm_cannot_express_is_refused(name, options, message, tmp_path):
    with pytest.raises(vitlab.UsageError, match=message):
        convert.write(vitlab.create(name, **options), tmp_path / "no", "timm")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("name", FILES)
def test_what_would_be_another_network_is_refused(name, tmp_path):
    path, _ = unpack(name, tmp_path)
    path.rename(tmp_path / "model.safetensors")
    for changed, message in (
        (dict(architecture="eva_giant_patch14_224"), "architecture 'eva_giant_patch14_224', beside weights as"),
        (dict(model_args={**SMALL, "use_rot_pos_emb": False}), "use_rot_pos_emb=False is not known"),
        (dict(model_args={**SMALL, "rope_grid_offset": 0.5}), "rope_grid_offset=0.5 is not known"),
        (dict(model_args={**SMALL, "rope_grid_offset": 0.0}), "rope_grid_offset=0.0 is not known"),
        (dict(model_args={**SMALL, "img_size": 40}), "17 positions do not fit a grid of 5x5"),
        (dict(global_pool="max"), "global_pool 'max'"),
    ):
        folder_of(name, tmp_path, **changed)
        with pytest.raises(vitlab.CheckpointError, match=message):
            vitlab.load(tmp_path)


def test_bare_perception_encoders_turn_on_the_grid_of_their_table(tmp_path):
    """As all released ones do: the stored one is told otherwise by its architecture."""
    path, _ = unpack("timm_pe_core", tmp_path)
    with pytest.warns(AssumedWarning, match=r"rotary_grid=\(4, 4\), pool_heads=8"):
        assert vitlab.load(path, heads=4).config.rotary_grid == (4, 4)


def test_an_eva_of_the_first_generation_is_refused_in_words(tmp_path):
    path, _ = unpack("timm_eva02", tmp_path)
    state = load_file(path)
    state |= {key: value[:128] for key, value in state.items() if ".mlp.fc1." in key}
    save_file({key: value.contiguous() for key, value in state.items()}, path)
    with pytest.raises(vitlab.CheckpointError, match="its MLP has no gate"):
        vitlab.load(path, heads=4)


def turned_slowly(x, grid, reference, first, columns_first, base=10000.0):
    """x (h, N, d), patch by patch and pair by pair, as complex numbers."""
    h, _, d = x.shape
    out = x.clone()
    for patch in range(grid[0] * grid[1]):
        row, column = divmod(patch, grid[1])
        axes = [(row + first) * reference[0] / grid[0], (column + first) * reference[1] / grid[1]]
        for pair in range(d // 2):
            axis, speed = divmod(pair, d // 4)
            angle = axes[1 - axis if columns_first else axis] / base ** (speed / (d // 4))
            for head in range(h):
                z = complex(*x[head, patch, 2 * pair : 2 * pair + 2].tolist()) * complex(
                    math.cos(angle), math.sin(angle)
                )
                out[head, patch, 2 * pair], out[head, patch, 2 * pair + 1] = z.real, z.imag
    return out


@pytest.mark.parametrize(("first", "columns_first"), [(0, False), (1, True), (0, True)])
def test_rotary_positions_of_a_grid_that_is_no_square(first, columns_first):
    x, grid, reference = torch.randn(2, 6, 8), (2, 3), (5, 4)
    rope = rotary_scaled(grid, reference, rotary_speeds(8, 10000.0), 0, first=first, columns_first=columns_first)
    expected = turned_slowly(x, grid, reference, first, columns_first)
    torch.testing.assert_close(rotate(x[None], rope)[0], expected, atol=1e-5, rtol=0)


def grown(name, **options):
    model = vitlab.create(name, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_eva02_b_and_l_by_definition(tmp_path):
    """Queries, keys and values by themselves, norms inside, at a size that is no square: no golden has them."""
    torch.manual_seed(0)
    options = dict(image_size=16, patch_size=8, width=24, depth=1, heads=2, rotary_grid=(3, 3), classes=0)
    model = grown("eva02_base_patch16_clip", **options)
    ours, names = model.state_dict(), {"attention": "attn", "inner_norm": "norm", "class_token": "cls_token"}
    state = {}
    for key, value in ours.items():
        for old, new in {**names, "positions.table": "pos_embed"}.items():
            key = key.replace(old, new)
        state[key] = value
    weight = state.pop("blocks.0.attn.qkv.weight")
    q, k, v = weight.chunk(3)
    state |= {f"blocks.0.attn.{p}_proj.weight": w.clone() for p, w in zip("qkv", (q, k, v), strict=True)}
    for part in "qv":
        state[f"blocks.0.attn.{part}_proj.bias"] = state.pop(f"blocks.0.attn.qkv.{part}_bias")
    for kind in ("weight", "bias"):
        gate, up = state.pop(f"blocks.0.mlp.fc1.{kind}").chunk(2)
        state |= {f"blocks.0.mlp.fc1_g.{kind}": gate.clone(), f"blocks.0.mlp.fc1_x.{kind}": up.clone()}
    save_file(state, tmp_path / "clip.safetensors")
    with pytest.warns(AssumedWarning, match="eps"):
        again = vitlab.load(tmp_path / "clip.safetensors", heads=2, rotary_grid=(3, 3))
    same(ours, again.state_dict())

    images = torch.randn(1, 3, 16, 24)
    s = {key.removeprefix("blocks.0."): value for key, value in state.items()}
    norm = lambda x, at: F.layer_norm(x, x.shape[-1:], s[f"{at}.weight"], s[f"{at}.bias"], 1e-6)
    linear = lambda x, at: F.linear(x, s[f"{at}.weight"], s.get(f"{at}.bias"))
    z = F.conv2d(images, s["patch_embed.proj.weight"], s["patch_embed.proj.bias"], stride=8).flatten(2).mT
    table = resize_positions(s["pos_embed"], 1, (2, 2), (2, 3), "bicubic_antialias")
    z = (torch.cat([s["cls_token"], z], dim=1) + table)[0]  # (7, 24)
    x = norm(z, "norm1")
    q, k, v = (linear(x, f"attn.{part}_proj").unflatten(1, (2, 12)).transpose(0, 1) for part in "qkv")  # (2, 7, 12)
    q, k = (torch.cat([t[:, :1], turned_slowly(t[:, 1:], (2, 3), (3, 3), 0, False)], dim=1) for t in (q, k))
    heads = (q @ k.mT / 12**0.5).softmax(-1) @ v
    z = z + linear(norm(heads.transpose(0, 1).flatten(1), "attn.norm"), "attn.proj")
    x = norm(z, "norm2")
    z = z + linear(norm(F.silu(linear(x, "mlp.fc1_g")) * linear(x, "mlp.fc1_x"), "mlp.norm"), "mlp.fc2")
    with torch.inference_mode():
        torch.testing.assert_close(model.forward_features(images)[0], norm(z, "norm"), atol=1e-5, rtol=0)


def test_a_perception_encoder_without_class_token_or_with_layer_scale(tmp_path):
    """PE-Lang G: patches are counted from 0; its keys come back as the same network."""
    options = dict(image_size=(16, 24), patch_size=8, width=24, depth=1, heads=2, rotary_grid=(3, 3))
    model = grown("pe_lang_gigantic_patch14", **options)
    names = {"attention": "attn", "positions.table": "pos_embed", "scale1.gamma": "gamma_1", "scale2.gamma": "gamma_2"}
    state = {}
    for key, value in model.state_dict().items():
        for old, new in names.items():
            key = key.replace(old, new)
        state[key] = value
    save_file(state, tmp_path / "lang.safetensors")
    with pytest.warns(AssumedWarning, match="eps"):
        again = vitlab.load(tmp_path / "lang.safetensors", heads=2, image_size=(16, 24), rotary_grid=(3, 3))
    same(model.state_dict(), again.state_dict())
    rope, _ = again.attention_positions(again.layout(16, 24), None, torch.zeros(1))
    q = torch.randn(2, 6, 12)
    expected = turned_slowly(q, (2, 3), (3, 3), 0, True)
    torch.testing.assert_close(rotate(q[None], rope)[0], expected, atol=1e-5, rtol=0)


def test_a_name_of_another_size_than_the_weights_is_refused(tmp_path):
    """The heads and the rotary grid of a name are not those of other weights."""
    path, _ = unpack("timm_eva02", tmp_path)
    path.rename(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": "eva02_base_patch14_224", "model_args": None, "pretrained_cfg": {}}),
        encoding="utf-8",
    )
    with pytest.raises(vitlab.errors.CheckpointError, match="width=768 but the weights have 48"):
        vitlab.load(tmp_path)
