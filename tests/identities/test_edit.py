"""Edit: what can be traced can be changed, and the pass computes what was asked: by identities and a slow loop."""

import json
import math

import numpy as np
import pytest
import torch

import vitlab
from vitlab.layers.edit import Change, Edit
from vitlab.layers.trace import Trace
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import ViTConfig
from vitlab.reduce import reducer_of

SMALL = dict(image_size=(32, 48), patch_size=8, width=48, depth=3, heads=4, classes=7)
IMAGES, OTHERS = torch.randn(2, 2, 3, 32, 48, generator=torch.Generator().manual_seed(1))
FAMILIES = [
    *("vit_digits", "beit_digits", "vit_relpos_digits", "eva02_digits", "dinov3_digits", "aimv2_digits", "pe_digits"),
    *("swin_cifar", "swinv2_cifar", "pvt_cifar", "pvt_v2_cifar", "twins_pcpvt_cifar", "twins_svt_cifar"),
    *("clip_digits", "siglip_digits", "tipsv2_digits", "naflex_digits", "mae_digits", "dino_digits", "resnet_cifar"),
]


def noisy(model):
    """No parameter stays at zero or one, where a wrong result could hide."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def small(**options) -> VisionTransformer:
    torch.manual_seed(0)
    return noisy(VisionTransformer(ViTConfig().with_options(**{**SMALL, **options})))


def answer(model, images, **seams):
    with torch.no_grad():
        return model(images, **seams) if model.classes else model.features(images, **seams)


def traced(model, images, *kinds, **seams) -> Trace:
    trace = Trace(*(kinds or [kind for kind in model.traceable if kind != "class_attention"]))
    answer(model, images, trace=trace, **seams)
    return trace


# ---------------------------------------------------------------- activation patching


@pytest.mark.parametrize("name", FAMILIES)
def test_patching_the_same_image_changes_no_bit_and_another_image_gives_its_answer(name):
    model = noisy(vitlab.create(name))
    a, b = torch.randn(
        2, 2, model.config.channels, *model.config.image_size, generator=torch.Generator().manual_seed(2)
    )
    own, other = (dict(traced(model, images).items()) for images in (a, b))
    plain, wanted, everything = answer(model, a), answer(model, b), Edit()
    assert not torch.equal(plain, wanted)
    for (kind, layer), value in own.items():
        everything = everything if kind == "attention" else everything.replace(kind, other[kind, layer], layer=layer)
        same = answer(model, a, edit=Edit().replace(kind, value, layer=layer))
        if kind == "attention":  # whose weights are then written out
            torch.testing.assert_close(same, plain, atol=1e-4, rtol=1e-4)
        else:
            assert torch.equal(same, plain), (kind, layer)
    assert torch.equal(answer(model, a, edit=everything), wanted)
    seen = traced(model, a, edit=everything)  # a trace records what the edited pass computed
    assert all(torch.equal(value, other[key]) for key, value in seen.items() if key[0] != "attention")


@pytest.mark.parametrize("layer", [0, 1, -1])
def test_all_tokens_of_one_layer_give_the_other_images_answer(layer):
    model = small(registers=2)
    tokens = traced(model, OTHERS, "tokens")["tokens", layer]
    patched = answer(model, IMAGES, edit=Edit().replace("tokens", tokens, layer=layer))
    assert torch.equal(patched, answer(model, OTHERS))


def test_only_the_chosen_tokens_are_replaced():
    model, other = small(), traced(small(), OTHERS, "tokens")
    seen = traced(model, IMAGES, "tokens", edit=Edit().replace("tokens", other["tokens", 1], layer=1, tokens=[4, 5]))
    own = traced(model, IMAGES, "tokens")
    places = [4, 5]
    rest = [token for token in range(25) if token not in places]
    assert torch.equal(seen["tokens", 1][:, places], other["tokens", 1][:, places])
    assert torch.equal(seen["tokens", 1][:, rest], own["tokens", 1][:, rest])
    assert torch.equal(seen["tokens", 0], own["tokens", 0]) and not torch.equal(seen["tokens", 2], own["tokens", 2])


# ---------------------------------------------------------------- against other ways to the same numbers


@pytest.mark.parametrize("name", ["vit_digits", "eva02_digits", "swin_cifar", "pvt_cifar", "clip_digits"])
def test_dropping_a_head_equals_zero_columns_of_its_projection(name):
    model = noisy(vitlab.create(name))
    images = torch.randn(2, model.config.channels, *model.config.image_size)
    encoder = model.encoder
    attention = encoder.blocks[-1].attention
    dropped = answer(model, images, edit=Edit().drop_heads([(-1, 2)]))
    columns = slice(2 * attention.head_dim, 3 * attention.head_dim)
    with torch.no_grad():
        attention.proj.weight[:, columns] = 0
    torch.testing.assert_close(dropped, answer(model, images), atol=1e-5, rtol=1e-5)


def numpy_vit(model, image, temperature=1.0, by_sqrt_d=True, hidden=(), dropped=()):
    """A forward pass of one image, token by token and head by head."""
    w = {name: value.numpy().astype(np.float64) for name, value in model.state_dict().items()}
    c, P = model.config, model.config.patch_size
    h, d = c.heads, c.width // c.heads

    def norm(x, name):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + c.norm.eps) * w[name + ".weight"] + w[name + ".bias"]

    tokens = [w["class_token"][0, 0]]
    for row in range(image.shape[1] // P):
        for column in range(image.shape[2] // P):
            patch = image[:, row * P : row * P + P, column * P : column * P + P]
            tokens.append((w["patch_embed.proj.weight"] * patch).sum((1, 2, 3)) + w["patch_embed.proj.bias"])
    z = np.stack(tokens) + w["positions.table"][0]
    for layer in range(c.depth):
        name = f"blocks.{layer}."
        qkv = norm(z, name + "norm1") @ w[name + "attention.qkv.weight"].T + w[name + "attention.qkv.bias"]
        out = np.zeros((len(z), h * d))
        for head in range(h):
            q, k, v = (qkv[:, part * h * d + head * d :][:, :d] for part in range(3))
            for token in range(len(z)):
                if (layer, head) in dropped:
                    continue
                scores = np.array([sum(q[token] * k[other]) for other in range(len(z))])
                scores = scores / (math.sqrt(d) if by_sqrt_d else 1) / temperature
                weights = np.exp(scores - scores.max())
                weights[list(hidden)] = 0
                for other in range(len(z)):
                    out[token, head * d : head * d + d] += weights[other] / weights.sum() * v[other]
        z = z + out @ w[name + "attention.proj.weight"].T + w[name + "attention.proj.bias"]
        y = norm(z, name + "norm2") @ w[name + "mlp.fc1.weight"].T + w[name + "mlp.fc1.bias"]
        y = np.vectorize(lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))))(y)
        z = z + y @ w[name + "mlp.fc2.weight"].T + w[name + "mlp.fc2.bias"]
    return norm(z, "norm")[0] @ w["head.weight"].T + w["head.bias"]


@pytest.mark.parametrize(
    ("edit", "options"),
    [
        (Edit(), {}),
        (Edit().temperature(2.5), dict(temperature=2.5)),
        (Edit().without_sqrt_d(), dict(by_sqrt_d=False)),
        (Edit().hide_keys([0, 7, 11]), dict(hidden=[0, 7, 11])),
        (Edit().drop_heads([(0, 1), (1, 2)]), dict(dropped=[(0, 1), (1, 2)])),
        (
            Edit().temperature(0.7).without_sqrt_d().hide_patches([2]).drop_heads([(1, 0)]),
            dict(temperature=0.7, by_sqrt_d=False, hidden=[3], dropped=[(1, 0)]),
        ),
    ],
    ids=["plain", "temperature", "sqrt(d)", "keys", "heads", "all"],
)
def test_a_slow_numpy_loop_agrees(edit, options):
    model = small(depth=2, heads=3, width=24)
    image = IMAGES[:1]
    wanted = numpy_vit(model, image[0].numpy(), **options)
    np.testing.assert_allclose(answer(model, image, edit=edit)[0].numpy(), wanted, atol=2e-5, rtol=2e-5)


def test_hiding_patches_equals_leaving_them_out():
    model = small(registers=1)
    hidden = [0, 5, 23]
    keep = torch.tensor([[patch for patch in range(24) if patch not in hidden]] * 2)
    with torch.no_grad():
        tokens, _ = model.encode(IMAGES, keep=keep)
        wanted = model.forward_head(tokens)
    torch.testing.assert_close(answer(model, IMAGES, edit=Edit().hide_patches(hidden)), wanted, atol=1e-5, rtol=0)


def test_masked_patches_give_the_same_whatever_they_show():
    model = small()
    changed = IMAGES.clone()
    changed[:, :, 8:16, 16:24] = 3.0  # row 1, column 2 of 6: patch 8
    edit = Edit().mask_patches([8])
    assert torch.equal(answer(model, changed, edit=edit), answer(model, IMAGES, edit=edit))
    assert not torch.equal(answer(model, changed), answer(model, IMAGES))


@pytest.mark.parametrize(
    "options", [{}, {"positions": "sincos"}, {"positions": "rotary"}, {"positions": "relative"}], ids=str
)
def test_without_positions_patches_can_change_places(options):
    """A network that is not told where patches stand gives the class token the same answer for any order of them."""
    model = small(**options)
    pieces = IMAGES.unflatten(2, (4, 8)).unflatten(4, (6, 8))  # (B, C, 4, 8, 6, 8)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    tiles = pieces.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)[:, order]  # (B, 24, C, 8, 8)
    mixed = tiles.unflatten(1, (4, 6)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    none = Edit().remove_positions()
    torch.testing.assert_close(answer(model, mixed, edit=none), answer(model, IMAGES, edit=none), atol=1e-4, rtol=0)
    assert not torch.allclose(answer(model, mixed), answer(model, IMAGES), atol=1e-3)
    # Shuffled positions on the image are the positions of some other order of its patches.
    shuffled = answer(model, IMAGES, edit=Edit().shuffle_positions(4))
    assert not torch.allclose(shuffled, answer(model, IMAGES), atol=1e-3)
    assert torch.equal(shuffled, answer(model, IMAGES, edit=Edit().shuffle_positions(4)))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(4))
    moved = torch.empty_like(tiles)
    moved[:, order] = pieces.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # patch i goes where its new position is
    moved = moved.unflatten(1, (4, 6)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    torch.testing.assert_close(shuffled, answer(model, moved), atol=1e-4, rtol=0)


def test_positions_can_be_replaced():
    model, other = small(), small()
    with torch.no_grad():
        other.positions.table.mul_(-2)
    table = traced(other, IMAGES, "position_embedding")["position_embedding"]
    assert torch.equal(answer(model, IMAGES, edit=Edit().replace_positions(table)), answer(other, IMAGES))


@pytest.mark.parametrize("name", ["vit_digits", "swinv2_cifar", "vit_relpos_digits", "twins_svt_cifar"])
def test_a_dropped_branch_adds_nothing(name):
    model = noisy(vitlab.create(name))
    images = torch.randn(2, model.config.channels, *model.config.image_size)
    seen = traced(model, images, "after_attention", "tokens", edit=Edit().drop_mlp(1).drop_attention(1))
    if name != "twins_svt_cifar":
        assert torch.equal(seen["after_attention", 1], seen["tokens", 0])
    assert torch.equal(seen["tokens", 1], seen["after_attention", 1])


def test_attention_weights_can_be_changed():
    model = small(registers=2)
    zero = Edit().zero("attention", layer=1, heads=[3])
    torch.testing.assert_close(
        answer(model, IMAGES, edit=zero), answer(model, IMAGES, edit=Edit().drop_heads([(1, 3)]))
    )
    even = traced(model, IMAGES, "attention", "heads", "values", edit=Edit().uniform_attention(layer=1, tokens=[0, 2]))
    mean = even["values", 1].mean(2).flatten(1)
    torch.testing.assert_close(even["heads", 1][:, 0], mean)
    torch.testing.assert_close(even["heads", 1][:, 2], mean)
    torch.testing.assert_close(even["attention", 1][:, :, 2], torch.full((2, 4, 27), 1 / 27))
    plain = traced(model, IMAGES, "attention")
    torch.testing.assert_close(even["attention", 1][:, :, 1], plain["attention", 1][:, :, 1])
    hot = traced(model, IMAGES, "attention", edit=Edit().temperature(1e6, layer=0, heads=[1]))["attention", 0]
    torch.testing.assert_close(hot[:, 1], torch.full((2, 27, 27), 1 / 27), atol=1e-5, rtol=0)
    torch.testing.assert_close(hot[:, [0, 2, 3]], plain["attention", 0][:, [0, 2, 3]])


def test_a_temperature_divides_position_biases_but_no_masks():
    model = noisy(vitlab.create("swin_cifar", image_size=(24, 40)))
    images = torch.randn(2, 3, 24, 40)
    block, at = model.blocks[1], model.places(24, 40)[1]
    seen = traced(model, images, "queries", "keys", "attention", edit=Edit().temperature(3.0))
    q, k, weights = (seen[kind, 1] for kind in ("queries", "keys", "attention"))  # (B, h, windows, n, ...)
    scores = (q @ k.mT * block.attention.scale + block.attention.bias(at)[0, :, None]) / 3
    apart = at.mask(images.device)[:, 0]  # (windows, n, n): those that only a shift made neighbours
    assert (apart < 0).any()
    torch.testing.assert_close(weights, (scores + apart).softmax(-1))


def test_mean_add_and_scale():
    model = small(registers=2)
    plain = traced(model, IMAGES, "heads", "fc1", "tokens")
    mean = traced(model, IMAGES, "heads", edit=Edit().mean("heads", layer=1, heads=[2]))["heads", 1]
    columns = slice(24, 36)
    torch.testing.assert_close(mean[:, 5, columns], plain["heads", 1][:, 3:, columns].mean(1))  # patches only
    torch.testing.assert_close(mean[:, :, :24], plain["heads", 1][:, :, :24])
    given = torch.randn(48)
    seen = traced(model, IMAGES, "tokens", edit=Edit().mean("tokens", given, layer=0, tokens=[3]))
    assert torch.equal(seen["tokens", 0][:, 3], given.expand(2, -1))
    steered = traced(model, IMAGES, "tokens", edit=Edit().add("tokens", given, layer=1).scale("tokens", 0.5, layer=1))
    torch.testing.assert_close(steered["tokens", 1], (plain["tokens", 1] + given) / 2)
    halved = traced(model, IMAGES, "fc1", edit=Edit().scale("fc1_pre", 0.0, layer=2))
    assert torch.equal(halved["fc1", 2], torch.zeros(2, 27, 192))  # GELU(0) = 0


def test_the_step_before_the_activation():
    model, block = small(), None
    seen = traced(model, IMAGES, "norm2", "fc1_pre", "fc1")
    for layer, block in enumerate(model.blocks):
        torch.testing.assert_close(seen["fc1_pre", layer], block.mlp.fc1(seen["norm2", layer]).detach())
        torch.testing.assert_close(seen["fc1", layer], torch.nn.functional.gelu(seen["fc1_pre", layer]))


def test_an_edit_keeps_the_fused_kernel_unless_weights_are_edited(monkeypatch):
    model = small()
    calls: list[bool] = []
    whole = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: (calls.append(True), whole(*a, **k))[1]
    )
    edit = Edit().temperature(2).without_sqrt_d().hide_keys([4]).drop_heads([(0, 1)]).mask_patches([3]).drop_mlp(2)
    answer(model, IMAGES, edit=edit.shuffle_positions())
    assert len(calls) == 3
    answer(model, IMAGES, edit=Edit().zero("attention", layer=1))
    assert len(calls) == 3 + 2


def test_gradients_go_through_an_edited_pass():
    model = small()
    trace = Trace("attention", layers=[0], gradients=True)
    model(IMAGES, trace=trace, edit=Edit().temperature(2.0).drop_heads([(1, 0)]))[:, 3].sum().backward()
    slope = trace.gradient("attention", 0)
    assert slope.shape == (2, 4, 25, 25) and float(slope.abs().sum()) > 0


# ---------------------------------------------------------------- with a reducer


def test_with_a_reducer():
    model = small()
    reducer = reducer_of("tome:r=4")
    heads = Edit().drop_heads([(2, 1)])
    attention = model.blocks[2].attention
    dropped = answer(model, IMAGES, reducer=reducer, edit=heads)
    with torch.no_grad():
        attention.proj.weight[:, 12:24] = 0
    torch.testing.assert_close(dropped, answer(model, IMAGES, reducer=reducer), atol=1e-5, rtol=0)
    first = Edit().zero("after_attention", layer=0, tokens=[5])  # before tokens are merged
    assert not torch.equal(answer(model, IMAGES, reducer=reducer, edit=first), answer(model, IMAGES, reducer=reducer))
    answer(
        model, IMAGES, reducer=reducer, edit=Edit().zero("tokens", layer=2, tokens=[0])
    )  # the class token stays first
    for edit in (Edit().zero("tokens", layer=1, tokens=[5]), Edit().hide_patches([2])):
        with pytest.raises(ValueError, match="no longer says which patch it is"):
            answer(model, IMAGES, reducer=reducer, edit=edit)
    with torch.no_grad():  # ToMe's log sizes are no scores, so a temperature leaves them
        hot = Trace("attention", "queries", "keys", "sizes")
        model(IMAGES, reducer=reducer, edit=Edit().temperature(2.0), trace=hot)
    q, k, sizes = hot["queries", 1], hot["keys", 1], hot["sizes", 0]
    wanted = (q @ k.mT / math.sqrt(12) / 2 + sizes.log()[:, None, None]).softmax(-1)
    torch.testing.assert_close(hot["attention", 1], wanted)


# ---------------------------------------------------------------- two towers and MAE


def test_a_text_tower_and_a_decoder_can_be_edited():
    clip = noisy(vitlab.create("clip_digits"))
    ids = clip.text.blank_ids(2)
    ids[1, :4] = torch.tensor([5, 6, 7, clip.config.text.end_id])
    with torch.no_grad():
        plain = clip.encode_text(ids)
        changed = clip.encode_text(ids, edit=Edit().drop_heads([(0, 1)]))
        assert not torch.equal(plain, changed)
        with pytest.raises(ValueError, match="nothing left to look at"):
            clip.encode_text(ids, edit=Edit().hide_keys([0]))  # the first token sees only itself
        images = torch.randn(2, 1, 8, 8)
        logits = clip(images, ids, edit=Edit().mask_patches(range(16))).logits_per_image
        torch.testing.assert_close(logits[0], logits[1])  # nothing is seen of either image
    mae = noisy(vitlab.create("mae_digits"))
    noise = torch.rand(2, 16)
    with torch.no_grad():
        a = mae(images, noise)
        b = mae(images, noise, decoder_edit=Edit().zero("pixels", tokens=[3]))
    assert torch.equal(b.prediction[:, 3], torch.zeros(2, 4)) and torch.equal(a.prediction[:, 4:], b.prediction[:, 4:])


# ---------------------------------------------------------------- JSON


PAGE = dict(
    **dict(mask_patches=[3, 4], drop_heads=[[0, 1], [-1, 2]], drop_mlp=[1], drop_attention=[0], hide_patches=[9]),
    **dict(temperature=2.0, scale_by_sqrt_d=False, positions="shuffled", seed=7),
)


def test_json_round_trip():
    edit = Edit.from_json(PAGE)
    assert edit.to_json() == PAGE
    vector = torch.randn(48)
    edit = edit.add("tokens", vector, layer=-1, tokens=[0]).drop_heads([(1, 1)]).temperature(0.5, layer=2, heads=[0])
    edit = edit.scale("heads", 0.25, heads=[2, 3]).uniform_attention(layer=1)
    again = Edit.from_json(json.loads(json.dumps(edit.to_json())))
    assert again.to_json() == edit.to_json() and len(again.changes) == len(edit.changes)
    model = small()
    assert torch.equal(answer(model, IMAGES, edit=again), answer(model, IMAGES, edit=edit))
    assert not Edit.from_json({"mask_patches": [], "temperature": 1, "positions": "kept", "drop_heads": []})
    assert not Edit() and (Edit() + edit).changes == edit.changes


def test_an_edit_does_not_change():
    first = Edit().temperature(2.0)
    second = first.drop_mlp(1)
    assert len(first.changes) == 1 and len(second.changes) == 2
    with pytest.raises(AttributeError):
        first.changes = ()
    model = small()
    assert torch.equal(answer(model, IMAGES, edit=Edit()), answer(model, IMAGES))


# ---------------------------------------------------------------- refused in words


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Edit().zero(""), "zero needs a step"),
        (lambda: Edit().temperature(0), "must be a finite number above 0"),
        (lambda: Edit().temperature(math.inf), "must be a finite number above 0"),
        (lambda: Edit().scale("tokens", math.nan), "must be a finite number"),
        (lambda: Edit().replace("tokens", torch.tensor([math.nan])), "not finite"),
        (lambda: Edit().replace("tokens", "x"), "must be a tensor or a number, found a str"),
        (lambda: Edit().zero("tokens", tokens=3), r"e.g. tokens=\[3\]"),
        (lambda: Edit().zero("tokens", tokens=[]), "at least one number"),
        (lambda: Edit().zero("heads", heads=[-1]), "each from 0 on"),
        (lambda: Edit().zero("tokens", layer=1.5), "layer=1.5 must be a whole number"),
        (lambda: Edit().drop_heads([3]), "pairs of layer and head"),
        (lambda: Change("explode"), "unknown action 'explode'"),
        (lambda: Change("hide_keys"), "needs the tokens to hide"),
        (lambda: Edit.from_json([1]), "must be a dictionary"),
        (lambda: Edit.from_json({"mask": [1]}), "unknown edit 'mask'"),
        (lambda: Edit.from_json({"mask_patches": 3}), "mask_patches=3 must be a list"),
        (lambda: Edit.from_json({"scale_by_sqrt_d": 0}), "must be true or false"),
        (lambda: Edit.from_json({"positions": "mixed"}), '"kept", "removed" or "shuffled"'),
        (lambda: Edit.from_json({"temperature": True}), "must be a finite number"),
        (lambda: Edit.from_json({"seed": "x"}), "must be a whole number"),
        (lambda: Edit.from_json({"changes": [{"kind": "tokens"}]}), "a dictionary of action"),
    ],
)
def test_what_makes_no_edit_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (Edit().zero("token"), r"Did you mean 'tokens'\? It can be edited at: patch_embed, prefix"),
        (Edit().zero("class_attention"), "cannot be edited at 'class_attention'"),
        (Edit().zero("tokens", layer=3), "this model has layers 0 to 2"),
        (Edit().zero("pool", layer=1), "leave out layer=1"),
        (Edit().zero("tokens", tokens=[25]), "there are tokens 0 to 24"),
        (Edit().mask_patches([24]), "there are tokens 0 to 23"),
        (Edit().zero("heads", heads=[4]), "there are heads 0 to 3"),
        (Edit().zero("fc1", heads=[0]), "is not divided into heads"),
        (Edit().zero("pool", tokens=[0]), "holds no tokens"),
        (Edit().mean("attention"), "use uniform_attention"),
        (Edit().mean("pool"), "has no patches to take the mean of"),
        (Edit().replace("tokens", torch.ones(3, 3)), r"\(3, 3\), which does not expand to \(2, 25, 48\)"),
        (Edit().hide_keys(range(25)), "nothing left to look at"),
    ],
)
def test_what_a_model_cannot_change_is_refused(edit, words):
    with pytest.raises(ValueError, match=words):
        answer(small(), IMAGES, edit=edit)


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("swin_cifar", Edit().zero("queries", tokens=[1]), "stands in windows"),
        ("swin_cifar", Edit().hide_keys([1]), "use mask_patches"),
        ("swin_cifar", Edit().shuffle_positions(), "can be removed only"),
        ("swin_cifar", Edit().mean("keys"), "use the mean of 'heads'"),
        ("swin_cifar", Edit().zero("merge", layer=1), "layer 1 has no 'merge'"),
        ("swinv2_cifar", Edit().without_sqrt_d(), "by cosines"),
        ("twins_pcpvt_cifar", Edit().shuffle_positions(), "can be removed only"),
        ("pvt_v2_cifar", Edit().remove_positions(), "adds no positions of its own"),
        ("resnet_cifar", Edit().temperature(2), "has no attention"),
        ("resnet_cifar", Edit().zero("block", tokens=[1]), "holds no tokens"),
    ],
)
def test_what_a_family_cannot_change_is_refused(name, edit, words):
    model = vitlab.create(name).eval()
    with pytest.raises(ValueError, match=words):
        answer(model, torch.randn(1, 3, 32, 32), edit=edit)


def test_fused_only_attention_refuses_changed_weights():
    with pytest.raises(ValueError, match="keeps no weights to change"):
        answer(small(attention="fused"), IMAGES, edit=Edit().uniform_attention())
