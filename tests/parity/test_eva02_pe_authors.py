"""EVA-02 and the Perception Encoder in their authors' own files and in open_clip's, by the definition in their source:

slow modules written here from it, and the stored outputs of timm's network under the authors' names.
"""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import load_with_report
from vitlab.models.eva02 import MODELS as MODELS_EVA02
from vitlab.models.pe import MODELS as MODELS_PE

from .test_golden import unpack

pytestmark = pytest.mark.filterwarnings("ignore")  # mean and std are assumed
CONFIG = "open_clip_config.json"
CONTEXT, VOCAB, TEXT_WIDTH, E = 9, 60, 24, 20


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def renamed(state: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    out = {}
    for key, value in state.items():
        for pattern, name in names.items():
            key = re.sub(pattern, name, key)
        out[key] = value
    return out


def save(content, path, wrapper: str | None = None):
    torch.save({wrapper: content, "epoch": 3} if wrapper else content, path)
    return path


# ------------------------------------------------------------------------------------------------- the definitions


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """x (..., N, d): neighbouring channels as complex numbers, turned by angles (N, d/2)."""
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(z).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, angles: Tensor | None = None, mask: Tensor | None = None):
    """(B, N, D) each; the first tokens, which have no angle, are not turned."""
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    if angles is not None:
        n = q.shape[2] - len(angles)
        q, k = (torch.cat([t[:, :, :n], turned(t[:, :, n:], angles)], dim=2) for t in (q, k))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores if mask is None else scores + mask
    return (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


class TextReference(nn.Module):
    """OpenAI's text tower; s: its tensors."""

    def __init__(self, s: dict[str, Tensor], heads: int):
        super().__init__()
        self.s, self.heads = s, heads

    def forward(self, ids: Tensor) -> Tensor:
        s, N = self.s, ids.shape[1]
        x = s["token_embedding.weight"][ids] + s["positional_embedding"][:N]
        mask = torch.full((N, N), -math.inf).triu(1)
        for i in range(len({k.split(".")[2] for k in s if k.startswith("transformer.")})):
            p = f"transformer.resblocks.{i}."
            y = norm(x, s, p + "ln_1", 1e-5)
            q, k, v = F.linear(y, s[p + "attn.in_proj_weight"], s[p + "attn.in_proj_bias"]).chunk(3, dim=-1)
            x = x + linear(attend(q, k, v, self.heads, mask=mask), s, p + "attn.out_proj")
            y = F.gelu(linear(norm(x, s, p + "ln_2", 1e-5), s, p + "mlp.c_fc"))
            x = x + linear(y, s, p + "mlp.c_proj")
        x = norm(x, s, "ln_final", 1e-5)
        return x[torch.arange(len(x)), ids.argmax(dim=-1)] @ s["text_projection"]


def linear(x: Tensor, s: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, s[name + ".weight"], s[name + ".bias"])


def norm(x: Tensor, s: dict[str, Tensor], name: str, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], s[name + ".weight"], s[name + ".bias"], eps)


def eva_angles(side: int, pretrained: int, d: int) -> Tensor:
    """BAAI's: (N, d/2), rows first, positions stretched to the grid of the pre-training."""
    freqs = 1 / 10000 ** (torch.arange(0, d // 2, 2).float() / (d // 2))
    t = torch.arange(side) / side * pretrained
    by = t[:, None] * freqs  # (side, d/4)
    rows = by[:, None].expand(side, side, -1)
    columns = by[None].expand(side, side, -1)
    return torch.cat([rows, columns], dim=-1).flatten(0, 1)


def eva_reference(s: dict[str, Tensor], images: Tensor, heads: int, pretrained: int) -> Tensor:
    """BAAI's image tower of EVA-02-CLIP: what its head gives."""
    P = s["patch_embed.proj.weight"].shape[-1]
    x = F.conv2d(images, s["patch_embed.proj.weight"], s["patch_embed.proj.bias"], stride=P).flatten(2).mT
    side = math.isqrt(x.shape[1])
    x = torch.cat([s["cls_token"].expand(len(x), -1, -1), x], dim=1) + s["pos_embed"]
    angles = eva_angles(side, pretrained, x.shape[-1] // heads)
    for i in range(len({k.split(".")[1] for k in s if k.startswith("blocks.")})):
        p = f"blocks.{i}."
        y = norm(x, s, p + "norm1", 1e-6)
        q = F.linear(y, s[p + "attn.q_proj.weight"], s[p + "attn.q_bias"])
        k = F.linear(y, s[p + "attn.k_proj.weight"])
        v = F.linear(y, s[p + "attn.v_proj.weight"], s[p + "attn.v_bias"])
        y = norm(attend(q, k, v, heads, angles), s, p + "attn.inner_attn_ln", 1e-6)
        x = x + linear(y, s, p + "attn.proj")
        y = norm(x, s, p + "norm2", 1e-6)
        y = norm(F.silu(linear(y, s, p + "mlp.w1")) * linear(y, s, p + "mlp.w2"), s, p + "mlp.ffn_ln", 1e-6)
        x = x + linear(y, s, p + "mlp.w3")
    return linear(norm(x, s, "norm", 1e-6)[:, 0], s, "head")


def pe_reference(s: dict[str, Tensor], images: Tensor, heads: int) -> tuple[Tensor, Tensor | None]:
    """Meta's image tower: tokens after the last block, and where it pools, the embedding."""
    P = s["conv1.weight"].shape[-1]
    grid = images.shape[-2] // P, images.shape[-1] // P
    x = F.conv2d(images, s["conv1.weight"], stride=P).flatten(2).mT
    token = "class_embedding" in s
    table = s["positional_embedding"]
    side = math.isqrt(len(table) - token)
    patches = table[token:].unflatten(0, (side, side)).permute(2, 0, 1)[None]
    patches = F.interpolate(patches, size=grid, mode="bilinear", align_corners=False)[0].flatten(1).T
    if token:
        x = torch.cat([s["class_embedding"].expand(len(x), 1, -1), x], dim=1)
    x = x + torch.cat([table[:token], patches])
    freqs = 1 / 10000 ** (torch.arange(0, x.shape[-1] // heads // 2, 2).float() / (x.shape[-1] // heads // 2))
    rows, columns = ((torch.arange(n) + token)[:, None] * freqs for n in grid)  # the class token stands at 0, 0
    angles = torch.cat([columns[None].expand(*grid, -1), rows[:, None].expand(*grid, -1)], dim=-1).flatten(0, 1)
    x = norm(x, s, "ln_pre", 1e-5)
    for i in range(len({k.split(".")[2] for k in s if k.startswith("transformer.")})):
        p = f"transformer.resblocks.{i}."
        y = norm(x, s, p + "ln_1", 1e-5)
        q, k, v = F.linear(y, s[p + "attn.in_proj_weight"], s[p + "attn.in_proj_bias"]).chunk(3, dim=-1)
        y = linear(attend(q, k, v, heads, angles), s, p + "attn.out_proj")
        x = x + y * s.get(p + "ls_1.gamma", torch.tensor(1.0))
        y = linear(F.gelu(linear(norm(x, s, p + "ln_2", 1e-5), s, p + "mlp.c_fc")), s, p + "mlp.c_proj")
        x = x + y * s.get(p + "ls_2.gamma", torch.tensor(1.0))
    if "attn_pool.probe" not in s:
        return x, None
    y = norm(x, s, "ln_post", 1e-5)
    pool = nn.MultiheadAttention(x.shape[-1], 8, batch_first=True)
    pool.load_state_dict({k.removeprefix("attn_pool.attn."): v for k, v in s.items() if "attn_pool.attn." in k})
    y = pool(s["attn_pool.probe"].expand(len(y), -1, -1), y, y, need_weights=False)[0]
    y = y + linear(
        F.gelu(linear(norm(y, s, "attn_pool.layernorm", 1e-5), s, "attn_pool.mlp.c_fc")), s, "attn_pool.mlp.c_proj"
    )
    return x, y[:, 0] @ s["proj"]


# ---------------------------------------------------------------------------------------------------- random tensors


def layer(width_in: int, width: int, name: str) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.randn(width, width_in) * 0.15, f"{name}.bias": torch.randn(width) * 0.1}


def norm_of(width: int, name: str) -> dict[str, Tensor]:
    return {f"{name}.weight": 1 + 0.2 * torch.randn(width), f"{name}.bias": 0.1 * torch.randn(width)}


def openai_block(width: int, hidden: int, name: str) -> dict[str, Tensor]:
    inner = {f"{name}.attn.in_proj_weight": torch.randn(3 * width, width) * 0.15}
    inner |= {f"{name}.attn.in_proj_bias": torch.randn(3 * width) * 0.1, **layer(width, width, f"{name}.attn.out_proj")}
    inner |= {**norm_of(width, f"{name}.ln_1"), **norm_of(width, f"{name}.ln_2")}
    return inner | layer(width, hidden, f"{name}.mlp.c_fc") | layer(hidden, width, f"{name}.mlp.c_proj")


def text_tower() -> dict[str, Tensor]:
    W = TEXT_WIDTH
    state = {"token_embedding.weight": torch.randn(VOCAB, W) * 0.1, "positional_embedding": torch.randn(CONTEXT, W)}
    for i in range(2):
        state |= openai_block(W, 40, f"transformer.resblocks.{i}")
    return state | norm_of(W, "ln_final") | {"text_projection": torch.randn(W, E) * 0.2}


def eva_tower(width: int, hidden: int, grid: int, patch: int) -> dict[str, Tensor]:
    state = {"cls_token": torch.randn(1, 1, width), "pos_embed": torch.randn(1, 1 + grid**2, width) * 0.3}
    state |= {"patch_embed.proj.weight": torch.randn(width, 3, patch, patch) * 0.05}
    state |= {"patch_embed.proj.bias": torch.randn(width) * 0.1}
    for i in range(2):
        p = f"blocks.{i}."
        state |= norm_of(width, p + "norm1") | norm_of(width, p + "norm2") | norm_of(width, p + "attn.inner_attn_ln")
        state |= {f"{p}attn.{part}_proj.weight": torch.randn(width, width) * 0.15 for part in "qkv"}
        state |= {f"{p}attn.{part}_bias": torch.randn(width) * 0.1 for part in "qv"}
        state |= layer(width, width, p + "attn.proj") | layer(width, hidden, p + "mlp.w1")
        state |= layer(width, hidden, p + "mlp.w2") | layer(hidden, width, p + "mlp.w3")
        state |= norm_of(hidden, p + "mlp.ffn_ln")
    return state | norm_of(width, "norm") | layer(width, E, "head")


def with_rope(state: dict[str, Tensor], heads: int, side: int, pretrained: int) -> dict[str, Tensor]:
    """The buffers that BAAI's files hold: once by itself, and in each block."""
    angles = eva_angles(side, pretrained, state["cls_token"].shape[-1] // heads).repeat_interleave(2, dim=1)
    places = ("rope.", *(f"blocks.{i}.attn.rope." for i in range(2)))
    return state | {f"{p}freqs_{n}": getattr(angles, n)() for p in places for n in ("cos", "sin")}


def pe_tower(width: int, grid: int, patch: int, *, token: bool, core: bool) -> dict[str, Tensor]:
    state = {"conv1.weight": torch.randn(width, 3, patch, patch) * 0.05, **norm_of(width, "ln_pre")}
    state |= {"class_embedding": torch.randn(width)} if token else {}
    state |= {"positional_embedding": torch.randn(token + grid**2, width) * 0.3}
    for i in range(2):
        state |= openai_block(width, 56, f"transformer.resblocks.{i}")
        if not core:
            state |= {f"transformer.resblocks.{i}.ls_{n}.gamma": torch.rand(width) for n in (1, 2)}
    if not core:
        return state
    p = "attn_pool."
    state |= {p + "probe": torch.randn(1, 1, width), p + "attn.in_proj_weight": torch.randn(3 * width, width) * 0.15}
    state |= {p + "attn.in_proj_bias": torch.randn(3 * width) * 0.1, **layer(width, width, p + "attn.out_proj")}
    state |= norm_of(width, p + "layernorm") | layer(width, 4 * width, p + "mlp.c_fc")
    state |= layer(4 * width, width, p + "mlp.c_proj") | norm_of(width, "ln_post")
    return state | {"proj": torch.randn(width, E) * 0.2}


def some_ids(count: int) -> Tensor:
    ids = torch.randint(1, VOCAB - 1, (count, CONTEXT))
    for row, end in zip(ids, torch.randint(1, CONTEXT, (count,)).tolist(), strict=True):
        row[end], row[end + 1 :] = VOCAB - 1, 0  # padded with zeros
    return ids


def below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + key: value for key, value in state.items()}


def back_is_equal(model, folder) -> None:
    """Written to open_clip: the same tensors, and a config that says as much."""
    convert.write(model, folder / "back", "open_clip")
    before, after = (load_file(path / "open_clip_model.safetensors") for path in (folder, folder / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    source, written = (
        json.loads((path / CONFIG).read_text(encoding="utf-8"))["model_cfg"] for path in (folder, folder / "back")
    )
    assert source["embed_dim"] == written["embed_dim"]
    names = [config["vision_cfg"].pop("timm_model_name").rsplit("_", 1)[0] for config in (source, written)]
    assert names[0] == names[1]  # up to the size, which the small network's table does not have
    for part in ("vision_cfg", "text_cfg"):
        assert source[part].items() <= written[part].items()


# ------------------------------------------------------------------------------------------------------------- EVA-02

BAAI = {  # of timm's names
    r"attn\.norm": "attn.inner_attn_ln",
    r"mlp\.norm": "mlp.ffn_ln",
    r"mlp\.fc1_g": "mlp.w1",
    r"mlp\.fc1_x": "mlp.w2",
    r"mlp\.fc1": "mlp.w12",
    r"mlp\.fc2": "mlp.w3",
}


@torch.inference_mode()
def test_timms_outputs_under_baais_names(tmp_path):
    """timm reads BAAI's files so; heads and the grid of the pre-training are in the rotary tables."""
    path, tensors = unpack("timm_eva02", tmp_path)
    state = with_rope(renamed(load_file(path), BAAI), 4, 4, 16)
    model, report = load_with_report(save(state, tmp_path / "eva02.pt", "model"))
    assert (report.dialect, model.config.heads, model.config.rotary_grid) == ("baai", 4, (16, 16))
    close(model.forward_features(tensors["input.images"]), tensors["output.features"])
    close(model(tensors["input.images"]), tensors["output.logits"])
    assert {row.note for row in report.rows if row.status == "unused"} == {"computed from the grid"}
    bare = {key: value for key, value in state.items() if "rope" not in key}
    model = vitlab.load(save(bare, tmp_path / "bare.pt", "module"), heads=4)
    close(model(tensors["input.images"]), tensors["output.logits"])
    odd = state | {"rope.freqs_cos": state["rope.freqs_cos"].flip(0)}
    with pytest.raises(vitlab.CheckpointError, match="not those of base 10000"):
        vitlab.load(save(odd, tmp_path / "odd.pt"))


@pytest.mark.parametrize(("text_prefix", "pretrained"), [("text.", 5), ("", 3)])
@torch.inference_mode()
def test_eva02_clip(text_prefix, pretrained, tmp_path):
    torch.manual_seed(0)
    image, text = eva_tower(40, 57, 3, 7), text_tower()
    state = below("visual.", with_rope(image, 5, 3, pretrained)) | below(text_prefix, text)
    state["logit_scale"] = torch.tensor(1.7)
    model, report = load_with_report(save(state, tmp_path / "EVA02_CLIP.pt"), text=dict(heads=3))
    assert (model.family, report.dialect) == ("eva02_clip", "baai")
    assert model.config.image.rotary_grid == (pretrained, pretrained) and model.config.image.heads == 5
    images, ids = torch.randn(3, 3, 21, 21), some_ids(4)
    expected, words = eva_reference(image, images, 5, pretrained), TextReference(text, 3)(ids)
    close(model.encode_image(images, normalise=False), expected)
    close(model.encode_text(ids, normalise=False), words)
    cosines = F.normalize(expected, dim=-1) @ F.normalize(words, dim=-1).mT
    close(model(images, ids).logits_per_image, math.exp(1.7) * cosines)
    vitlab.save(model, tmp_path / "native")
    again = vitlab.load(tmp_path / "native")
    assert again.config == model.config and torch.equal(again(images, ids)[0], model(images, ids)[0])
    tower = vitlab.load(tmp_path / "EVA02_CLIP.pt", encoder=True, text=dict(heads=3))
    assert tower.family == "eva02"
    close(tower(images), model.encoder(images))


@torch.inference_mode()
def test_eva02_clip_in_open_clip(tmp_path, monkeypatch):
    """The same tensors under the names of timm, which stand below visual.trunk."""
    torch.manual_seed(0)
    image, text = eva_tower(48, 57, 4, 56), text_tower()
    timm = renamed(image, {value: key.replace("\\", "") for key, value in BAAI.items() if "w12" not in value})
    timm = renamed(timm, {r"attn\.([qv])_bias": r"attn.\1_proj.bias"})
    state = below("visual.trunk.", timm) | below("text.", text) | {"logit_scale": torch.tensor(1.7)}
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "open_clip_model.safetensors")
    vision = {"image_size": 224, "timm_model_name": "eva02_base_patch16_clip_224", "timm_pool": "token"}
    words = {"context_length": CONTEXT, "vocab_size": VOCAB, "width": TEXT_WIDTH, "heads": 3, "layers": 2}
    cfg = {"embed_dim": E, "vision_cfg": {**vision, "timm_proj": None}, "text_cfg": words, "custom_text": True}
    write = (tmp_path / "open_clip_config.json").write_text
    write(json.dumps({"model_cfg": cfg}))
    model, report = load_with_report(tmp_path, heads=4)
    assert (model.family, report.dialect, model.config.image.rotary_grid) == ("eva02_clip", "open_clip", (16, 16))
    images, ids = torch.randn(2, 3, 224, 224), some_ids(3)
    close(model.encode_image(images, normalise=False), eva_reference(image, images, 4, 16))
    close(model.encode_text(ids, normalise=False), TextReference(text, 3)(ids))
    with pytest.raises(vitlab.CheckpointError, match="builds such an image tower by timm's name"):
        convert.write(model, tmp_path / "back", "open_clip")
    monkeypatch.setitem(MODELS_EVA02, "eva02_base_patch16_clip", replace(model.config.image, classes=E))
    back_is_equal(model, tmp_path)
    for part, changed in (("vision_cfg", {"timm_pool": "avg"}), ("text_cfg", {"no_causal_mask": True})):
        write(json.dumps({"model_cfg": {**cfg, part: {**cfg[part], **changed}}}))
        with pytest.raises(vitlab.CheckpointError, match=f"{part}.{next(iter(changed))}"):
            vitlab.load(tmp_path, heads=4)


# ----------------------------------------------------------------------------------------------------------------- PE

META = {  # of timm's names
    "patch_embed.proj": "conv1",
    "norm_pre": "ln_pre",
    r"^norm\.": "ln_post.",
    r"^pos_embed": "positional_embedding",
    "cls_token": "class_embedding",
    r"attn_pool\.latent": "attn_pool.probe",
    r"attn_pool\.proj": "attn_pool.attn.out_proj",
    r"attn_pool\.norm": "attn_pool.layernorm",
    r"mlp\.fc1": "mlp.c_fc",
    r"mlp\.fc2": "mlp.c_proj",
    r"^blocks": "transformer.resblocks",
    r"attn\.qkv\.": "attn.in_proj_",
    r"attn\.proj": "attn.out_proj",
    r"(resblocks\.\d+)\.norm": r"\1.ln_",
}


@torch.inference_mode()
def test_timms_outputs_under_metas_names(tmp_path):
    """At the size of the table, where both libraries count alike if timm's grid is the table's own."""
    path, tensors = unpack("timm_pe_core", tmp_path)
    timm = load_file(path)
    state = renamed({k: v for k, v in timm.items() if "attn_pool.q" not in k and "attn_pool.kv" not in k}, META)
    for part in ("weight", "bias"):
        joined = torch.cat([timm[f"attn_pool.q.{part}"], timm[f"attn_pool.kv.{part}"]])
        state[f"attn_pool.attn.in_proj_{part}"] = joined
    state["proj"] = state.pop("head.weight").T.contiguous()
    bias = state.pop("head.bias")
    state["positional_embedding"] = state["positional_embedding"][0]
    state["class_embedding"] = state["class_embedding"].flatten()
    model, report = load_with_report(save(below("visual.", state), tmp_path / "PE.pt"), heads=4)
    assert (model.family, report.dialect) == ("pe", "facebook")
    theirs = vitlab.load(path, heads=4, rotary_grid=(4, 4))
    images = tensors["input.images"]
    close(model.forward_features(images), theirs.forward_features(images))
    close(model(images) + bias, theirs(images))
    stretched = vitlab.load(path, heads=4, rotary_grid=(24, 24))  # as the stored one
    close(stretched(images), tensors["output.logits"])


@pytest.mark.parametrize("token", [True, False])
@torch.inference_mode()
def test_pe_core_with_its_text_tower(token, tmp_path):
    torch.manual_seed(0)
    image, text = pe_tower(32, 3, 7, token=token, core=True), text_tower()
    state = below("visual.", image) | text | {"logit_scale": torch.tensor(1.7)}
    model, report = load_with_report(save(state, tmp_path / "PE.pt"), heads=4, text=dict(heads=3))
    assert (model.family, report.dialect, model.preprocess.how) == ("pe_clip", "facebook", "stretch")
    ids = some_ids(4)
    words = TextReference(text, 3)(ids)
    close(model.encode_text(ids, normalise=False), words)
    for size in ((21, 21), (14, 35)):  # the size of the table, and another
        images = torch.randn(2, 3, *size)
        tokens, expected = pe_reference(image, images, 4)
        close(model.forward_features(images), tokens)
        close(model.encode_image(images, normalise=False), expected)
    cosines = F.normalize(expected, dim=-1) @ F.normalize(words, dim=-1).mT
    close(model(images, ids).logits_per_image, math.exp(1.7) * cosines)
    save({k: v for k, v in state.items() if "visual" in k}, tmp_path / "image.pt", "weights")
    alone = vitlab.load(tmp_path / "image.pt", heads=4)
    assert alone.family == "pe"
    close(alone(images), expected)


@pytest.mark.parametrize("prefix", ["", "visual."])
@torch.inference_mode()
def test_pe_lang_and_spatial(prefix, tmp_path):
    torch.manual_seed(0)
    image = pe_tower(32, 3, 7, token=True, core=False)
    model, report = load_with_report(save(below(prefix, image), tmp_path / "PE-Lang.pt"), heads=4)
    assert (model.family, report.dialect) == ("pe", "facebook")
    for size in ((21, 21), (28, 14)):
        images = torch.randn(2, 3, *size)
        close(model.forward_features(images), pe_reference(image, images, 4)[0])


@torch.inference_mode()
def test_pe_core_in_open_clip(tmp_path, monkeypatch):
    path, tensors = unpack("timm_pe_core", tmp_path)
    torch.manual_seed(0)
    text = text_tower() | {"text_projection": torch.randn(TEXT_WIDTH, 7)}
    state = below("visual.trunk.", load_file(path)) | below("text.", text) | {"logit_scale": torch.tensor(1.7)}
    path.unlink()
    save_file(state, tmp_path / "open_clip_model.safetensors")
    vision = {"image_size": 32, "timm_model_name": "vit_pe_core_tiny_patch16_384", "timm_pool": "map"}
    words = {"context_length": CONTEXT, "vocab_size": VOCAB, "width": TEXT_WIDTH, "heads": 3, "layers": 2}
    cfg = {"embed_dim": 7, "vision_cfg": {**vision, "timm_proj": None}, "text_cfg": words}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": cfg}), encoding="utf-8")
    model, report = load_with_report(tmp_path, heads=4)
    assert (model.family, report.dialect, model.config.projection_bias) == ("pe_clip", "open_clip", True)
    close(model.encode_image(tensors["input.images"], normalise=False), tensors["output.logits"])
    ids = some_ids(3)
    close(model.encode_text(ids, normalise=False), TextReference(text, 3)(ids))
    monkeypatch.setitem(MODELS_PE, "pe_core_tiny_patch16", replace(model.config.image, classes=7))
    back_is_equal(model, tmp_path)
