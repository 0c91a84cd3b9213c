"""CLIP by itself: both losses by hand, equal captions, the scale's limit, two processes, saving with the tokenizer."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import distributed

import vitlab
from vitlab.errors import CheckpointError, UsageError
from vitlab.explain.gradients import gradients
from vitlab.explain.sizes import size_of
from vitlab.layers.collective import gather
from vitlab.models.clip import CLIP, CLIPConfig, clip_vit
from vitlab.models.config import option_paths
from vitlab.models.registry import FAMILIES, MODELS, build, build_config
from vitlab.models.two_towers import (
    ImageTextLogits,
    TextConfig,
    TwoTowersConfig,
    contrastive_loss,
    same_captions,
    sigmoid_loss,
)
from vitlab.text.tokenizer import Tokenizer

PARAMETERS = {  # counted by OpenAI's and open_clip's own code
    "clip_vit_base_patch32": 151_277_313,
    "clip_vit_base_patch16": 149_620_737,
    "clip_vit_large_patch14": 427_616_513,
    "clip_vit_large_patch14_336": 427_944_193,
    "clip_vit_huge_patch14": 986_109_441,
}
VOCAB, CONTEXT, END = 60, 9, 57


def make(**options) -> CLIP:
    image = clip_vit(image_size=(16, 24), patch_size=8, width=24, depth=2, heads=3)
    text = TextConfig(context=CONTEXT, vocab=VOCAB, width=20, depth=2, heads=4, end_id=END, pad_id=0)
    return CLIP(CLIPConfig(image, text, 12).with_options(**options)).eval()


def some_ids(n: int = 4, end: int = END) -> torch.Tensor:
    ids = torch.randint(1, VOCAB - 5, (n, CONTEXT))
    for row, length in zip(ids, (3, 5, CONTEXT - 1, 4), strict=False):
        row[length], row[length + 1 :] = end, 0
    return ids


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameter_counts_are_the_published_ones(name, count):
    entry, config = build_config(name)
    with torch.device("meta"):
        model = build(entry.family, config)
    assert sum(p.numel() for p in model.parameters()) == count


def test_names_from_elsewhere():
    for name in ("clip_ViT-L/14@336px", "clip-vit-large-patch14-336", "ViT-L-14-336-quickgelu"):
        assert build_config(name)[0].name == "clip_vit_large_patch14_336"
    assert build_config("ViT-H-14")[1].text.activation == "gelu"
    assert build_config("ViT-B/32")[0].family == "vit"  # the paper's ViT keeps its name
    with pytest.raises(ValueError, match="no model named"):  # in open_clip it has GELU, as released QuickGELU
        build_config("ViT-B-32")


# ---- the network


def test_features_have_length_one_and_logits_are_scaled_cosines():
    model, images, ids = make(), torch.randn(3, 3, 16, 24), some_ids()
    with torch.no_grad():
        x, y, out = model.encode_image(images), model.encode_text(ids), model(images, ids)
        raw = model.encode_image(images, normalise=False), model.encode_text(ids, normalise=False)
    assert isinstance(out, ImageTextLogits) and out.logits_per_image.shape == (3, 4)
    expected = torch.stack([F.cosine_similarity(image, raw[1], dim=-1) for image in raw[0]]) / 0.07
    torch.testing.assert_close(out.logits_per_image, expected)
    torch.testing.assert_close(out.logits_per_text, expected.T)
    for features in (x, y):
        torch.testing.assert_close(features.norm(dim=1), torch.ones(len(features)))


@pytest.mark.parametrize(
    "family", [name for name, (config, _) in FAMILIES.items() if issubclass(config, TwoTowersConfig)]
)
@torch.inference_mode()
def test_features_are_as_wide_as_the_common_space(family):
    """Real CLIPs have towers of 768 and a common space of 512: what stores features asks for the width first."""
    space = {"embed_dim": 24} if "embed_dim" in option_paths(FAMILIES[family][0]) else {}
    model = vitlab.create(f"{family}_digits", **space).eval()
    features = model.features(torch.randn(3, model.config.image.channels, 8, 8))
    assert features.shape == (3, model.feature_width) and model.feature_width == space.get("embed_dim", 64)


def test_no_token_sees_a_later_one_and_the_first_end_is_read():
    model, ids = make(), some_ids(3)
    changed = ids.clone()
    for row in changed:
        at = int((row == END).int().argmax())
        row[at + 1 :] = torch.randint(0, VOCAB, (CONTEXT - at - 1,))  # also further ends
    earlier = ids.clone()
    earlier[:, 0] += 1
    with torch.no_grad():
        assert torch.equal(model.encode_text(ids), model.encode_text(changed))
        assert (model.encode_text(ids) - model.encode_text(earlier)).abs().amax(dim=1).min() > 1e-4
        short = model.encode_text(ids[:2, :6])  # both end before
        torch.testing.assert_close(short, model.encode_text(ids[:2]))


def test_the_scale_starts_where_the_papers_start_it_and_is_limited():
    softmax, sigmoid = make(), make(loss="sigmoid")
    assert float(softmax.scale.detach()) == pytest.approx(1 / 0.07) and softmax.bias is None
    assert float(sigmoid.scale.detach()) == pytest.approx(10) and float(sigmoid.bias) == -10
    for model, limit in ((softmax, 100), (sigmoid, math.exp(6))):
        model.log_scale.data.fill_(6.0)
        assert float(model.scale.detach()) == pytest.approx(limit, rel=1e-6)
    softmax.clamp_scale()
    assert float(softmax.log_scale) == pytest.approx(math.log(100))
    softmax.scale.backward()
    assert softmax.log_scale.grad > 0  # at the limit it can still fall


def test_gradient_checkpointing_changes_nothing():
    plain, images, ids = make(), torch.randn(3, 3, 16, 24), some_ids(3)
    again = make(gradient_checkpointing=True)
    again.load_state_dict(plain.state_dict())
    for model in (plain, again):
        model.train()
        model.loss(model.encode_image(images), model.encode_text(ids)).backward()
    for (name, one), two in zip(plain.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, msg=name)


def test_both_towers_can_be_traced():
    model, images, ids = make(), torch.randn(2, 3, 16, 24), some_ids(2)
    seen, read = vitlab.Trace("attention"), vitlab.Trace("attention", "end")
    with torch.no_grad():
        assert torch.equal(model.encode_image(images, trace=seen), model.encode_image(images))
        assert torch.equal(model.encode_text(ids, trace=read), model.encode_text(ids))
    assert seen["attention", 1].shape == (2, 3, 7, 7)
    later = torch.ones(CONTEXT, CONTEXT).triu(1).bool()
    assert read["attention", 0][..., later].eq(0).all() and read["end"].shape == (2, 20)


# ---- losses


def vectors(n: int, generator: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(generator)
    return tuple(F.normalize(torch.randn(n, 6, generator=g, dtype=torch.float64), dim=1) for _ in range(2))  # type: ignore


def softmax_by_hand(x, y, scale, same) -> float:
    """Figure 3 with loops; `same` pairs are left out of a sum, unless they are the pair itself."""
    n, total = len(x), 0.0
    for a, b in ((x, y), (y, x)):
        for i in range(n):
            terms = [math.exp(scale * float(a[i] @ b[j])) for j in range(n) if j == i or not same[i][j]]
            total -= math.log(math.exp(scale * float(a[i] @ b[i])) / sum(terms))
    return total / (2 * n)


def sigmoid_by_hand(x, y, t, b, same) -> float:
    """Eq. 1 of SigLIP."""
    n, total = len(x), 0.0
    for i in range(n):
        for j in range(n):
            if i == j or not same[i][j]:
                z = 1 if i == j else -1
                total -= math.log(1 / (1 + math.exp(z * (-t * float(x[i] @ y[j]) - b))))
    return total / n


@pytest.mark.parametrize("groups", [[0, 1, 2, 3, 4], [0, 1, 0, 2, 1], [0, 0, 0, 0, 0]])
def test_losses_by_hand(groups):
    x, y = vectors(5)
    same = torch.tensor([[a == b for b in groups] for a in groups])
    assert float(contrastive_loss(x, y, 7.0, same)) == pytest.approx(softmax_by_hand(x, y, 7.0, same), rel=1e-12)
    found = float(sigmoid_loss(x, y, 7.0, -3.0, same))
    assert found == pytest.approx(sigmoid_by_hand(x, y, 7.0, -3.0, same), rel=1e-9)
    if len(set(groups)) == 5:
        assert float(contrastive_loss(x, y, 7.0)) == float(contrastive_loss(x, y, 7.0, same))
        assert float(sigmoid_loss(x, y, 7.0, -3.0)) == float(sigmoid_loss(x, y, 7.0, -3.0, same))


def test_equal_captions_do_not_push_each_other_away():
    """Images of equal captions have the gradient of a batch without the others of them."""
    x, y = vectors(4)
    y[2] = y[0]
    same = torch.eye(4, dtype=torch.bool)
    same[0, 2] = same[2, 0] = True
    x.requires_grad_()
    contrastive_loss(x, y, 5.0).backward()
    pushed = x.grad.clone()
    x.grad = None
    contrastive_loss(x, y, 5.0, same).backward()
    assert not torch.allclose(pushed, x.grad)
    logits = (5.0 * x @ y.T).detach()
    p = logits.masked_fill(same & ~torch.eye(4, dtype=torch.bool), -math.inf).softmax(dim=1)
    assert p[0, 2] == 0 and torch.isfinite(x.grad).all()
    only = contrastive_loss(*vectors(3, 1), 5.0, torch.ones(3, 3, dtype=torch.bool))
    assert float(only) == pytest.approx(0, abs=1e-12)  # where all are equal there is nothing to tell apart


def test_same_captions():
    ids = torch.tensor([[1, 2, 9], [1, 3, 9], [1, 2, 9], [4, 2, 9]])
    expected = torch.tensor([[bool((a == b).all()) for b in ids] for a in ids])
    assert torch.equal(same_captions(ids), expected)


# ---- many processes


def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(1, END, (n, CONTEXT), generator=g)
    ids[:, -1] = END
    ids[4] = ids[1]  # equal captions in different processes
    return torch.randn(n, 3, 16, 24, generator=g), ids


def whole_loss(model: CLIP, images: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    x, y = gather(model.encode_image(images)), gather(model.encode_text(ids))
    return model.loss(x, y, same_captions(gather(ids)))


def in_process(rank: int, target: str, loss: str, parts: list[slice]) -> None:
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = make(loss=loss).double()
    images, ids = batch(7)
    found = whole_loss(model, images[parts[rank]].double(), ids[parts[rank]])
    found.backward()
    slopes = {name: p.grad.clone() for name, p in model.named_parameters()}
    for slope in slopes.values():  # what DistributedDataParallel does
        distributed.all_reduce(slope)
        slope /= 2
    torch.save({"loss": found.detach(), **slopes}, f"{target}{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("cut", [3, 5])  # a process may have read fewer pictures
def test_two_processes_have_loss_and_gradients_of_the_whole_batch(loss, cut, tmp_path, in_two_processes):
    parts, target = [slice(0, cut), slice(cut, 7)], str(tmp_path / "found")
    assert in_two_processes(lambda rank: in_process(rank, target, loss, parts)) == [0, 0]
    torch.manual_seed(0)
    model = make(loss=loss).double()
    images, ids = batch(7)
    expected = whole_loss(model, images.double(), ids)
    expected.backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"found{rank}.pt")
        torch.testing.assert_close(found.pop("loss"), expected.detach())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
            torch.testing.assert_close(found[name], parameter.grad, msg=name)


# ---- options, files, errors


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a dog on a beach", "a cat in the house"] * 5, vocab=530, context=10)


def test_options_reach_the_tower_they_belong_to():
    c = MODELS["clip_nano"].config
    changed = c.with_options(activation="relu", eps=1e-4, registers=2, stem="conv", **{"text.width": 64})
    assert (changed.image.mlp.activation, changed.text.activation) == ("relu", "relu")
    assert (changed.image.norm.eps, changed.text.eps) == (1e-4, 1e-4)
    assert changed.image.tokens.registers == 2 and changed.image.stem.patch_bias
    assert (changed.text.width, changed.image.width) == (64, c.image.width)
    assert c.with_options(image={"width": 64, "positions": "sincos"}).image.positions.kind == "sincos"
    assert CLIPConfig.from_dict(changed.to_dict()) == changed
    for wrong, says in (
        ({"width": 64}, "'image.width' or 'text.width'"),
        ({"classes": 10}, "vitlab zeroshot"),
        ({"vocab": 50}, r"\*\*tokenizer\.options"),
        ({"text.heads": 3}, "not a multiple of text.heads 3: use 2"),
    ):
        with pytest.raises(ValueError, match=says):
            c.with_options(**wrong)


@pytest.mark.parametrize("name", ["clip_nano", "clip_nano_96", "clip_digits"])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_small_models_train_save_and_load_with_their_tokenizer(name, loss, tokenizer, tmp_path):
    model = vitlab.create(name, loss=loss, **tokenizer.options, **{"image.depth": 2})
    model.tokenizer = tokenizer
    texts = ["a dog", "a cat", "狗"]
    images = torch.randn(3, model.config.channels, *model.config.image_size)
    model.loss(model.encode_image(images), model.encode_text(model.tokenizer(texts))).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, key
    vitlab.save(model.eval(), tmp_path)
    again = vitlab.load(tmp_path)
    assert again.config == model.config and again.tokenizer.options == tokenizer.options
    with torch.no_grad():
        expected = model(images, tokenizer(texts))
        for ours, theirs in zip(again(images, again.tokenizer(texts)), expected, strict=True):
            assert torch.equal(ours, theirs)
        tower = vitlab.load(tmp_path, encoder=True, classes=5)
        assert tower.family == "vit" and tower(images).shape == (3, 5)
        assert torch.equal(tower.forward_features(images), model.encoder.forward_features(images))
    larger = vitlab.load(tmp_path, image_size=tuple(2 * n for n in model.config.image_size))
    assert larger.config.grid == tuple(2 * n for n in model.config.grid) and larger.tokenizer is not None


def test_a_folder_that_is_written_over_keeps_no_old_tokenizer(tokenizer, tmp_path):
    model = vitlab.create("clip_digits", **tokenizer.options)
    model.tokenizer = tokenizer
    vitlab.save(model, tmp_path)
    vitlab.save(vitlab.create("clip_digits"), tmp_path)
    assert vitlab.load(tmp_path).tokenizer is None


def test_a_tokenizer_of_another_model_is_refused(tokenizer, tmp_path):
    model = vitlab.create("clip_digits", **tokenizer.options)
    for wrong, says in (
        (Tokenizer.train(["a"], context=11), "context=11, the model 10"),
        (Tokenizer.train(["a dog"] * 5, context=10), "end_id="),
        (Tokenizer.from_json(tokenizer.to_json(), pad_id=0), "pad_id=0"),
    ):
        with pytest.raises(ValueError, match=says):
            model.tokenizer = wrong
    vitlab.save(model, tmp_path)
    Tokenizer.train(["a"], context=11).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"context=11.*do not belong together"):
        vitlab.load(tmp_path)


def test_bad_token_numbers_are_told():
    model = make()
    with pytest.raises(ValueError, match=r"\(texts, 9 at most\), found \(2, 10\)"):
        model.encode_text(torch.full((2, 10), END))
    with pytest.raises(ValueError, match="no end-of-text"):
        model.encode_text(torch.ones(2, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="token 60 is not among"):
        model.encode_text(torch.full((2, 9), 60))


def test_another_network_is_refused(tokenizer, tmp_path):
    vitlab.save(vitlab.create("clip_digits", **tokenizer.options), tmp_path)
    for options, says in (
        ({"text.heads": 2}, r"text\.heads=4"),
        ({"text.depth": 3}, "another network"),
        ({"loss": "sigmoid"}, "another network"),
        ({"image.heads": 2}, "heads=4"),
        ({"classes": 3}, "Fine-tune it"),
    ):
        with pytest.raises(UsageError, match=says):
            vitlab.load(tmp_path, **options)


def test_both_towers_export():
    model, images, ids = make(), torch.randn(3, 3, 16, 24), some_ids(3)
    with torch.no_grad():
        program = torch.export.export(model, (images, ids))
        ours, theirs = program.module()(images, ids), model(images, ids)
    torch.testing.assert_close(ours.logits_per_image, theirs.logits_per_image, atol=1e-5, rtol=1e-5)


# ---- size and steps


def by_formula(c: CLIPConfig) -> tuple[int, int]:
    """Parameters and MACs for one image and one text, written from the paper and not from the code."""
    v, t, E = c.image, c.text, c.embed_dim
    patches = v.grid[0] * v.grid[1]

    def blocks(D: int, hidden: int, depth: int, N: int) -> tuple[int, int]:
        weights = D * 3 * D + D * D + 2 * D * hidden
        return depth * (weights + 3 * D + D + hidden + D + 4 * D), depth * N * (weights + 2 * N * D)

    seen = blocks(v.width, v.mlp_hidden, v.depth, patches + 1)
    read = blocks(t.width, round(t.width * t.mlp_ratio), t.depth, t.context)
    pixels = v.channels * v.patch_size**2
    parameters = seen[0] + pixels * v.width + v.width * (patches + 2) + 4 * v.width + v.width * E
    parameters += read[0] + t.vocab * t.width + t.context * t.width + 2 * t.width + t.width * E + 1
    return parameters, seen[1] + patches * pixels * v.width + v.width * E + read[1] + t.width * E + E


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if entry.family == "clip"])
def test_every_name_has_the_size_of_the_paper(name):
    assert size_of(name) == by_formula(MODELS[name].config)


def test_inspect_shows_both_towers():
    found = vitlab.inspect("clip_digits", batch=2)
    parameters, macs = by_formula(MODELS["clip_digits"].config)
    assert (found.parameters, found.macs) == (parameters, 2 * macs + 2 * 64)  # 2 x 2 logits, not 2
    assert not found.unused
    names = [step.name for step in found.steps]
    assert names[0] == "patch_embed" and names[-1] == "logits" and found.steps[-1].shape == (2, 2)
    by_name = {step.name: step for step in found.steps}
    assert by_name["text.blocks.1.attention.qkv"].shape == (2, 16, 192)
    assert by_name["text.end"].shape == (2, 64) and by_name["text.projection"].shape == (2, 64)
    assert "gelu" in by_name["text.blocks.0.mlp.fc1"].meaning and all(step.meaning for step in found.steps)
    assert all(not slope.verdict for slope in gradients("clip_digits"))
