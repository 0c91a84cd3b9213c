"""DINO against slow loops from Algorithm 1 and eq. 3 of the paper, torch's weight normalisation, and two processes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import distributed, nn

import vitlab
from vitlab.errors import UsageError
from vitlab.models import dino
from vitlab.models.dino import DINO, DINOConfig, NormalisedLinear, Projection

K = 23
SMALL = DINOConfig(
    image_size=(16, 24),
    patch_size=4,
    width=32,
    depth=2,
    heads=4,
    projection=Projection(out_dim=K, hidden=40, bottleneck=12, norm_last_layer=False),
)


def make(config: DINOConfig = SMALL, **options) -> DINO:
    """In float64, with a teacher and a centre that are no longer as they began."""
    model = DINO(config.with_options(**options)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        model.centre.normal_(0, 0.05)
    return model


def some_views(batch: int = 3, locals_: int = 3) -> list[torch.Tensor]:
    """Two global ones of 16 x 24, local ones of 8 x 12."""
    sizes = [(16, 24)] * 2 + [(8, 12)] * locals_
    return [torch.randn(batch, 3, *size, dtype=torch.float64) for size in sizes]


def head_by_hand(head: dino.DINOHead, x: np.ndarray) -> np.ndarray:
    """Section 3.1 and appendix C: layers with GELU between, l2 norm, rows of the last layer of length g."""
    state = {key: value.detach().numpy() for key, value in head.state_dict().items()}
    erf = np.vectorize(math.erf)
    for number in range(len(head.mlp)):
        if number:
            x = 0.5 * x * (1 + erf(x / math.sqrt(2)))
        x = x @ state[f"mlp.{number}.weight"].T + state[f"mlp.{number}.bias"]
    x = x / np.sqrt((x**2).sum(1, keepdims=True))
    out = np.empty((len(x), K))
    for k, row in enumerate(state["last.weight"]):
        g = state["last.lengths"][k] if "last.lengths" in state else 1.0
        out[:, k] = g * x @ (row / np.sqrt((row**2).sum()))
    return out


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def loss_by_hand(model: DINO, views: list[torch.Tensor], tau_t: float) -> tuple[float, np.ndarray]:
    """Eq. 3 by loops: every global view of the teacher, every other view of the student, every picture."""
    with torch.no_grad():
        student = [head_by_hand(model.student_head, model.student(view).numpy()) for view in views]
        teacher = [head_by_hand(model.teacher_head, model.teacher(view).numpy()) for view in views[:2]]
    centre, tau_s = model.centre.numpy(), model.config.student_temperature
    terms = []
    for i, t in enumerate(teacher):
        for j, s in enumerate(student):
            if i == j:
                continue
            for b in range(len(t)):
                p = softmax((t[b] - centre) / tau_t)
                q = softmax(s[b] / tau_s)
                terms.append(-sum(p[k] * math.log(q[k]) for k in range(K)))
    return float(np.mean(terms)), np.concatenate(teacher).mean(axis=0)


@pytest.mark.parametrize("norm_last_layer", [True, False])
@pytest.mark.parametrize("locals_", [0, 3])
def test_loss_and_centre_equal_the_slow_loop(locals_, norm_last_layer):
    model, views = make(norm_last_layer=norm_last_layer), some_views(locals_=locals_)
    out = model(views, 0.05)
    loss, mean = loss_by_hand(model, views, 0.05)
    assert out.loss.item() == pytest.approx(loss, rel=1e-10)
    torch.testing.assert_close(out.teacher_mean, torch.from_numpy(mean), rtol=1e-10, atol=1e-12)
    before = model.centre.numpy().copy()
    model.update_centre(out.teacher_mean)
    np.testing.assert_allclose(model.centre.numpy(), 0.9 * before + 0.1 * mean, rtol=1e-10, atol=1e-12)


def test_two_views_are_algorithm_1():
    """loss = H(t1, s2) / 2 + H(t2, s1) / 2."""
    model, views = make(), some_views(locals_=0)
    g = lambda network, head, x: head(network(x))
    with torch.no_grad():
        s1, s2 = (g(model.student, model.student_head, x) for x in views)
        t1, t2 = (g(model.teacher, model.teacher_head, x) for x in views)

    def H(t, s):
        return -(((t - model.centre) / 0.04).softmax(1) * (s / 0.1).softmax(1).log()).sum(1).mean()

    torch.testing.assert_close(model(views, 0.04).loss, H(t1, s2) / 2 + H(t2, s1) / 2)


def test_weight_normalisation_is_torchs():
    ours = NormalisedLinear(12, K, lengths=True)
    theirs = nn.utils.parametrizations.weight_norm(nn.Linear(12, K, bias=False))
    with torch.no_grad():
        ours.lengths.uniform_(0.5, 2)
        theirs.parametrizations.weight.original0.copy_(ours.lengths[:, None])
        theirs.parametrizations.weight.original1.copy_(ours.weight)
    x = torch.randn(5, 12)
    torch.testing.assert_close(ours(x), theirs(x))
    fixed = NormalisedLinear(12, K, lengths=False)
    assert list(fixed.state_dict()) == ["weight"]
    assert fixed(nn.functional.normalize(x, dim=1)).abs().max() <= 1  # cosines


def test_the_teacher_gets_no_gradient_and_the_student_that_of_the_plain_sum():
    model, views = make(), some_views()
    model(views, 0.05).loss.backward()
    frozen = [p for name, p in model.named_parameters() if name.startswith("teacher")]
    assert frozen and all(p.grad is None and not p.requires_grad for p in frozen)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    assert all(g.abs().max() > 0 for g in found.values()) and "student.class_token" in found

    with torch.no_grad():
        targets = [((model.teacher_head(model.teacher(x)) - model.centre) / 0.05).softmax(1) for x in views[:2]]
    answers = [model.student_head(model.student(x)) for x in views]
    terms = [
        nn.functional.cross_entropy(answers[j] / 0.1, targets[i]) for i in range(2) for j in range(len(views)) if i != j
    ]
    model.zero_grad()
    torch.stack(terms).mean().backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, found[name], msg=name)


def test_the_teacher_sees_the_global_views_only_and_the_student_all():
    model, views = make(), some_views()
    first = model(views, 0.05)
    changed = model([*views[:4], views[4] + 1], 0.05)
    assert torch.equal(first.teacher_mean, changed.teacher_mean) and first.loss != changed.loss
    assert not torch.equal(model([views[0] + 1, *views[1:]], 0.05).teacher_mean, first.teacher_mean)
    for view in views:
        view.requires_grad_(True)
    model(views, 0.05).loss.backward()
    assert all(view.grad.abs().max() > 0 for view in views)


def test_a_forward_pass_changes_nothing():
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model(some_views(), 0.05)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_as_many_passes_as_sizes(monkeypatch):
    model, views = make(), some_views()
    calls = []
    forward = model.student.forward
    monkeypatch.setattr(model.student, "forward", lambda x: calls.append(len(x)) or forward(x))
    mixed = [views[0], views[1], views[2], torch.randn(3, 3, 16, 24).double(), views[3]]
    expected, _ = loss_by_hand(model, mixed, 0.05)
    calls.clear()
    assert model(mixed, 0.05).loss.item() == pytest.approx(expected, rel=1e-10)  # each view has its own answer
    assert calls == [9, 6]


def test_moving_average_by_hand():
    model = make()
    student, teacher = (
        {k.removeprefix(f"{who}"): v.clone() for k, v in model.state_dict().items() if k.startswith(who)}
        for who in ("student", "teacher")
    )
    assert student.keys() == teacher.keys()
    model.update_teacher(0.97)
    for key, value in model.state_dict().items():
        if key.startswith("teacher"):
            name = key.removeprefix("teacher")
            torch.testing.assert_close(value, 0.97 * teacher[name] + 0.03 * student[name])
        elif key.startswith("student"):
            assert torch.equal(value, student[key.removeprefix("student")])
    kept = model.teacher.class_token.clone()
    model.update_teacher(1.0)
    assert torch.equal(model.teacher.class_token, kept)


def test_a_new_teacher_is_a_copy_and_stays_whole_in_training():
    model = DINO(SMALL.with_options(stochastic_depth=0.5)).train()
    for one, other in ((model.student, model.teacher), (model.student_head, model.teacher_head)):
        for key, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[key])
            assert value.data_ptr() != other.state_dict()[key].data_ptr()
    x = torch.randn(32, 3, 16, 24)
    assert model.student.training and not model.teacher.training
    assert torch.equal(model.teacher(x), model.teacher(x)) and not torch.equal(model.student(x), model.student(x))


def test_without_centring_the_centre_stays_out():
    model, views = make(centring=False), some_views()
    out = model(views, 0.05)
    before = model.centre.clone()
    model.update_centre(out.teacher_mean)
    assert torch.equal(model.centre, before)
    model.centre.zero_()  # now the loop may subtract it
    assert out.loss.item() == pytest.approx(loss_by_hand(model, views, 0.05)[0], rel=1e-10)


def centre_in_process(rank: int, target: str, means: torch.Tensor, counts: list[int]) -> None:
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = make()
    model.update_centre(means[rank], counts[rank])
    torch.save(model.centre, f"{target}{rank}.pt")
    distributed.destroy_process_group()


def test_two_processes_have_the_centre_of_the_whole_batch(tmp_path, in_two_processes):
    torch.manual_seed(0)
    expected = make()
    answers = torch.randn(14, K, dtype=torch.float64)
    parts = answers[:9], answers[9:]  # a process may have read fewer pictures
    means = torch.stack([part.mean(dim=0) for part in parts])
    target = str(tmp_path / "centre")
    assert in_two_processes(lambda rank: centre_in_process(rank, target, means, [9, 5])) == [0, 0]
    expected.update_centre(answers.mean(dim=0))
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"centre{rank}.pt"), expected.centre)


def sinkhorn_by_hand(logits: torch.Tensor, rounds: int) -> torch.Tensor:
    q = np.exp(logits.numpy())
    for _ in range(rounds):
        for k in range(q.shape[1]):
            q[:, k] /= sum(q[b, k] for b in range(len(q)))
        for b in range(len(q)):
            q[b] /= sum(q[b, k] for k in range(q.shape[1]))
    return torch.from_numpy(q)


def test_sinkhorn_equals_the_slow_loop_and_gives_outputs_equal_shares():
    logits = torch.randn(40, K, dtype=torch.float64) * 3 + torch.linspace(0, 4, K)
    torch.testing.assert_close(dino.sinkhorn(logits, 3).exp(), sinkhorn_by_hand(logits, 3))
    shares = dino.sinkhorn(logits, 200).exp().sum(dim=0)
    torch.testing.assert_close(shares, torch.full_like(shares, 40 / K))
    assert logits.softmax(dim=1).sum(dim=0).max() > 2 * 40 / K  # which they had not


def test_sinkhorn_stands_in_place_of_the_centre():
    model, views = make(sinkhorn=3), some_views(batch=5)
    loss = model(views, 0.05).loss
    model.centre.normal_()
    assert torch.equal(model(views, 0.05).loss, loss)
    seen = model.teacher_head(model.teacher(torch.cat(views[:2])))
    teacher = sinkhorn_by_hand(seen.detach() / 0.05, 3).unflatten(0, (2, -1))
    features = [model.student_head(model.student(view)) for view in views]
    log_student = (torch.stack(features) / model.config.student_temperature).log_softmax(dim=-1)
    pairs = [-(teacher[t] * log_student[v]).sum(dim=-1).mean() for t in range(2) for v in range(len(views)) if v != t]
    torch.testing.assert_close(loss, torch.stack(pairs).mean())


def balanced_in_process(rank: int, target: str, logits: torch.Tensor) -> None:
    distributed.init_process_group("gloo")
    torch.save(dino.sinkhorn(logits, 3), f"{target}{rank}.pt")
    distributed.destroy_process_group()


def test_sinkhorn_of_two_processes_is_that_of_the_whole_batch(tmp_path, in_two_processes):
    logits = torch.randn(14, K, dtype=torch.float64) * 3
    parts = logits[:9], logits[9:]
    target = str(tmp_path / "part")
    assert in_two_processes(lambda rank: balanced_in_process(rank, target, parts[rank])) == [0, 0]
    found = torch.cat([torch.load(tmp_path / f"part{rank}.pt") for rank in range(2)])
    torch.testing.assert_close(found, dino.sinkhorn(logits, 3))


# ---- schedules


def test_schedules_at_start_middle_and_end():
    assert dino.teacher_momentum(0, 100) == 0.996
    assert dino.teacher_momentum(50, 100) == pytest.approx(0.998)
    assert dino.teacher_momentum(100, 100) == 1.0
    assert dino.teacher_momentum(25, 100, 0.9) == pytest.approx(1 - 0.1 * (1 + math.cos(math.pi / 4)) / 2)
    assert [dino.weight_decay(step, 10) for step in (0, 5, 10)] == pytest.approx([0.04, 0.22, 0.4])
    assert [dino.teacher_temperature(step, 20) for step in (0, 5, 20, 900)] == pytest.approx([0.04, 0.0475, 0.07, 0.07])
    assert dino.teacher_temperature(0, 0, 0.02, 0.05) == 0.05  # no warm-up
    assert [dino.last_layer_frozen(step, 7) for step in (0, 6, 7)] == [True, True, False]
    assert dino.last_layer_frozen(13, 7, epochs=2) and not dino.last_layer_frozen(0, 7, epochs=0)


def test_the_last_layer_can_be_left_out():
    model = make()
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in model.last_layer} == {"student_head.last.weight", "student_head.last.lengths"}


# ---- what a doctor reads


def test_numbers_of_health():
    model, views = make(), some_views(batch=4)
    out = model(views, 0.05)
    with torch.no_grad():
        features = torch.cat([model.teacher(x) for x in views[:2]]).numpy()
        answers = torch.cat([model.teacher_head(model.teacher(x)) for x in views[:2]])
        p = ((answers - model.centre) / 0.05).softmax(1).numpy()
    entropy = float(-(p * np.log(p)).sum(1).mean())
    n = {key: float(value) for key, value in out.numbers.items()}
    assert n["teacher_entropy"] == pytest.approx(entropy) and n["kl"] == pytest.approx(out.loss.item() - entropy)
    assert n["max_probability"] == pytest.approx(p.max(1).mean())
    assert n["used_outputs"] == len(set(p.argmax(1)))
    assert n["centre_norm"] == pytest.approx(float(np.linalg.norm(model.centre.numpy())))
    values = np.linalg.svd(features, compute_uv=False)
    q = values / values.sum()
    assert n["rank"] == pytest.approx(math.exp(-(q * np.log(q)).sum()))
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    assert n["teacher_std"] == pytest.approx(unit.std(axis=0).mean() * math.sqrt(32))
    assert not any(value.requires_grad for value in out.numbers.values())
    assert model(views, 0.05, watched=False).numbers == {}


def test_numbers_of_the_two_collapses():
    same = torch.randn(1, 8).expand(6, 8)
    assert float(dino.spread(same)) == pytest.approx(0, abs=1e-6)
    assert float(dino.effective_rank(same)) == pytest.approx(1)
    assert float(dino.effective_rank(torch.eye(8))) == pytest.approx(8)
    assert float(dino.spread(torch.randn(4000, 64))) == pytest.approx(1, abs=0.02)
    assert math.isnan(dino.effective_rank(torch.full((4, 8), math.nan)))  # and raises nothing
    uniform = torch.full((2, 3, K), -math.log(K))
    found = dino.watch(uniform.exp(), uniform, torch.tensor(math.log(K)), same, same, torch.zeros(K))
    assert float(found["teacher_entropy"]) == pytest.approx(math.log(K))
    assert float(found["kl"]) == pytest.approx(0, abs=1e-5)
    one = torch.full((2, 3, K), -1e4)
    one[..., 5] = 0
    found = dino.watch(one.exp(), one, torch.tensor(0.0), same, same, torch.zeros(K))
    assert float(found["teacher_entropy"]) == 0 and float(found["max_probability"]) == 1
    assert float(found["used_outputs"]) == 1


# ---- names, files, errors


@pytest.mark.parametrize(("name", "width", "heads", "patch"), [("small", 384, 6, 16), ("base", 768, 12, 8)])
def test_the_encoder_is_as_large_as_transformers_vit(name, width, heads, patch):
    from transformers import ViTConfig, ViTModel

    with torch.device("meta"):
        ours = DINO(vitlab.models.registry.build_config(f"dino_{name}_patch{patch}")[1])
        theirs = ViTModel(
            ViTConfig(hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width, patch_size=patch),
            add_pooling_layer=False,
        )
    assert sum(p.numel() for p in ours.encoder.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert ours.config.projection.out_dim == 65536 and ours.config.projection.norm_last_layer == (name == "base")
    learned = sum(p.numel() for p in ours.student_head.parameters())
    mlp = width * 2048 + 2048 + 2048 * 2048 + 2048 + 2048 * 256 + 256
    assert learned == mlp + 256 * 65536 + (65536 if name == "small" else 0)


def test_names():
    assert vitlab.create("dino_small", depth=1).card.name == "dino_small_patch16"
    assert vitlab.create("dino_vitb8", depth=1).config.width == 768
    cifar, like = vitlab.create("dino_cifar"), vitlab.create("vit_cifar", classes=0)
    shapes = [{key: value.shape for key, value in m.state_dict().items()} for m in (cifar.encoder, like)]
    assert shapes[0] == shapes[1]
    digits = vitlab.create("dino_digits", stem="conv")
    assert digits.config.channels == 1 and digits.preprocess.size == (8, 8)
    assert digits.encoder.preprocess is digits.preprocess
    out = digits([torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8), torch.randn(2, 1, 4, 4)], 0.04)
    assert out.loss.isfinite()


def test_saved_and_loaded(tmp_path):
    model = vitlab.create("dino_digits", depth=2)
    with torch.no_grad():
        model.centre.normal_()
        model.update_teacher(0.5)
    vitlab.save(model, tmp_path / "dino")
    again = vitlab.load(tmp_path / "dino")
    assert again.config == model.config and again.preprocess == model.preprocess and again.card == model.card
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    flags = [{name: p.requires_grad for name, p in m.named_parameters()} for m in (model, again)]
    assert flags[0] == flags[1] and not flags[0]["teacher.class_token"] and flags[0]["student.class_token"]
    wider = vitlab.load(tmp_path / "dino", image_size=(8, 16))
    assert wider.student.positions.table.shape == wider.teacher.positions.table.shape == (1, 1 + 32, 64)
    assert wider.encoder(torch.randn(2, 1, 8, 16)).shape == (2, 64)
    for option, words in ((dict(classes=10), "Fine-tune it"), (dict(out_dim=7), "another network")):
        with pytest.raises(UsageError, match=words):
            vitlab.load(tmp_path / "dino", **option)
    vitlab.save(model.encoder, tmp_path / "encoder")  # a ViT of its own
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(vitlab.load(tmp_path / "encoder", encoder=True)(x), model.encoder(x))


def test_what_needs_a_classifier_says_so(tmp_path):
    model = vitlab.create("dino_digits")
    with pytest.raises(ValueError, match=r"knows no classes. Fine-tune it first: vitlab train"):
        vitlab.predict(model, "digits.png")
    with pytest.raises(ValueError, match=r"explain model\.encoder"):
        vitlab.explain.rollout(model, torch.randn(1, 1, 8, 8))
    assert vitlab.inspect("dino_digits").parameters == sum(p.numel() for p in model.encoder.parameters())
    assert vitlab.inspect(model).name == "DINO, its encoder"


@pytest.mark.parametrize(
    ("views", "temperature", "words"),
    [
        (torch.zeros(2, 3, 16, 24), 0.04, r"For features: model\.encoder"),
        ([torch.zeros(2, 3, 16, 24)], 0.04, "two global views at least, found 1"),
        ([torch.zeros(2, 3, 16, 24), torch.zeros(2, 3, 8, 12)], 0.04, "first two be of one size; found 2x3x16x24"),
        ([torch.zeros(2, 3, 16, 24)] * 2 + [torch.zeros(1, 3, 8, 8)], 0.04, "same images"),
        ([torch.zeros(2, 3, 16, 24)] * 2 + [torch.zeros(2, 3, 6, 8)], 0.04, "height"),
        ([torch.zeros(2, 3, 16, 24)] * 2, 0.0, "teacher_temperature=0.0 must be above 0"),
    ],
)
def test_bad_views(views, temperature, words):
    with pytest.raises(ValueError, match=words):
        DINO(SMALL)(views, temperature)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(student_temperature=0.0), "student_temperature"),
        (dict(centre_momentum=1.0), "centre_momentum"),
        (dict(sinkhorn=-1), "sinkhorn=-1 must be 0"),
        (dict(out_dim=1), "out_dim must be at least 2"),
        (dict(heads=5), "width 32 is not a multiple of heads 5"),
        (dict(classes=10), "no option 'classes'"),
        (dict(positions="rotary"), "learned | sincos"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words):
        SMALL.with_options(**options)
