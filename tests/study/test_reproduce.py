"""Claims of the papers: the rule that decides, resuming, every experiment in miniature, and what the command says."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from typer.main import get_command

from vitlab.cli import complete
from vitlab.cli.main import app
from vitlab.errors import UsageError
from vitlab.explain.weights import position_similarity
from vitlab.factory import create
from vitlab.language import Language
from vitlab.models.plain import PlainTransformer
from vitlab.study.grid import GridCell
from vitlab.study.reproduce.bench import Workbench
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.claims import CLAIMS, find_claim, quadratic_attention
from vitlab.study.reproduce.claims.patch_order import shuffle_patches
from vitlab.study.reproduce.claims.position_similarity import correlation
from vitlab.study.reproduce.result import Result, arm_in_language, criteria, read_result, report, summary
from vitlab.study.reproduce.run import reproduce, stored_results
from vitlab.study.reproduce.verdict import ClaimOutcome, Criterion, difference, interval, value, verdict
from vitlab.study.runner import check_cells
from vitlab.training.loop import Silent, Stopped

LANGUAGES: tuple[Language, ...] = ("en", "zh")
TINY = ["run.epochs=1", "data.batch_size=16"]
WITHOUT_TRAINING = ("patch-order", "position-similarity", "attention-distance", "quadratic-attention", "registers")


def values(**arms: list[float]) -> dict[str, dict[str, float]]:
    return {arm: {str(seed): number for seed, number in enumerate(numbers)} for arm, numbers in arms.items()}


# ---- the rule


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=8))
def test_the_interval_is_that_of_a_paired_t_test(pairs):
    a, b = np.array(pairs).T
    if np.ptp(a - b) < 1e-6:
        return
    expected = stats.ttest_rel(a, b).confidence_interval(0.95)
    decided = difference("a", "b").decide(values(a=list(a), b=list(b)))
    assert (decided.low, decided.high) == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-9)
    assert decided.mean == pytest.approx(np.mean(a - b), abs=1e-12)


def test_the_interval_of_three_in_closed_form():
    """With 2 degrees of freedom the quantile of p is (2p - 1) sqrt(2 / (4p (1 - p)))."""
    p = 0.975
    quantile = (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - quantile / math.sqrt(3), 2 + quantile / math.sqrt(3)))
    assert interval([1.0]) == (-math.inf, math.inf)  # one seed has no spread


DECIDED = {  # a - b of three seeds, the range that the claim says, what follows
    "better, and each seed says so": ([0.04, 0.05, 0.06], 0.0, math.inf, ClaimOutcome.HOLDS),
    "worse": ([-0.04, -0.05, -0.06], 0.0, math.inf, ClaimOutcome.FAILS),
    "better on average, within the spread": ([0.09, 0.01, -0.02], 0.0, math.inf, ClaimOutcome.UNDECIDED),
    "alike": ([0.001, -0.002, 0.002], -0.02, 0.02, ClaimOutcome.HOLDS),
    "alike on average, within the spread": ([0.02, -0.02, 0.0], -0.02, 0.02, ClaimOutcome.UNDECIDED),
    "not alike": ([0.05, 0.052, 0.048], -0.02, 0.02, ClaimOutcome.FAILS),
    "one seed": ([0.5], 0.0, math.inf, ClaimOutcome.UNDECIDED),
    "equal in every seed is no gain": ([0.0, 0.0, 0.0], 0.0, math.inf, ClaimOutcome.FAILS),
}


@pytest.mark.parametrize(("differences", "low", "high", "outcome"), DECIDED.values(), ids=DECIDED)
def test_a_criterion(differences, low, high, outcome):
    measured = values(a=[0.8 + d for d in differences], b=[0.8] * len(differences))
    assert difference("a", "b", low, high).decide(measured).outcome is outcome


def test_arms_are_paired_by_seed():
    """Seeds that differ by far more than the arms: only the pairs show that a is better. Seed 3 has no partner."""
    a, b = {"0": 0.51, "1": 0.71, "2": 0.92, "3": 0.1}, {"2": 0.91, "0": 0.50, "1": 0.70}
    decided = difference("a", "b", low=0.0).decide({"a": a, "b": b})
    assert decided.outcome is ClaimOutcome.HOLDS and decided.n == 3
    assert decided.mean == pytest.approx(0.01)


def test_a_difference_of_differences():
    gap = Criterion("gap", {"a": 1, "b": -1, "c": -1, "d": 1}, low=0.0)
    measured = values(a=[5.0, 6.0, 7.0], b=[1.0, 2.0, 3.1], c=[4.0, 4.0, 4.0], d=[1.0, 1.0, 1.0])
    decided = gap.decide(measured)
    assert decided.mean == pytest.approx((1 + 1 + 0.9) / 3) and decided.outcome is ClaimOutcome.HOLDS


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ("HOLDS HOLDS", "HOLDS"),
        ("HOLDS UNDECIDED", "UNDECIDED"),
        ("UNDECIDED FAILS", "FAILS"),
        ("HOLDS FAILS", "FAILS"),
    ],
)
def test_a_verdict_needs_all_criteria(outcomes, expected):
    decided = difference("a", "b").decide(values(a=[1.0, 1.0], b=[0.0, 0.0]))
    assert (
        verdict([replace(decided, outcome=ClaimOutcome[name]) for name in outcomes.split()]) is ClaimOutcome[expected]
    )


# ---- running and resuming


def toy(log: list[str], stop_after: int | None = None) -> Claim:
    """Two arms, measured by a formula; stops as Ctrl-C does."""

    def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
        def measure(arm, seed):
            def compute(folder, show):
                if stop_after is not None and len(log) >= stop_after:
                    raise KeyboardInterrupt
                log.append(f"{arm}{seed}")
                return {arm: len(arm) + 0.1 * seed**2}

            return compute

        return [ClaimStep(f"{arm},seed={s}", str(s), measure(arm, s)) for s in range(seeds) for arm in ("one", "three")]

    return Claim(
        name="toy",
        title=Text("Three is longer", "三更长"),
        paper=Citation("P", "0000.00000", "Table 1"),
        says=Text("so", "如此"),
        here=Text("counted", "数一数"),
        arms=(Arm("one"), Arm("three")),
        rule=(difference("three", "one", low=0.0),),
        steps=steps,
        scale="number",
    )


def test_a_claim_that_was_interrupted_gives_the_same_table(tmp_path):
    straight = reproduce(toy([]), tmp_path / "straight")
    log: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        reproduce(toy(log, stop_after=3), tmp_path / "killed")
    resumed = reproduce(toy(log), tmp_path / "killed")
    assert resumed.values == straight.values
    assert list(resumed.values) == list(straight.values)
    assert log == ["one0", "three0", "one1", "three1", "one2", "three2"]  # each once
    assert criteria(resumed, "en") == criteria(straight, "en")
    reproduce(toy(log), tmp_path / "killed", seeds=4)
    assert log[6:] == ["one3", "three3"]  # more seeds run only what is new


def test_a_training_that_was_interrupted_ends_as_one_that_was_not(tmp_path):
    """Ctrl-C in the middle of the second training."""
    settings = [*TINY, "data.per_class=4", "model.depth=1", "run.save_every=1"]

    class Interrupting(Silent):
        def start(self, done, total):
            self.trainings = getattr(self, "trainings", 0) + 1

        def step(self, done, numbers):
            if self.trainings == 2 and done == 2:
                raise KeyboardInterrupt

    claim = CLAIMS["pooling"]
    straight = reproduce(claim, tmp_path / "straight", seeds=1, settings=settings)
    with pytest.raises((KeyboardInterrupt, Stopped)):
        reproduce(claim, tmp_path / "killed", seeds=1, settings=settings, show=Interrupting())
    killed = json.loads((tmp_path / "killed/pooling/result.json").read_text(encoding="utf-8"))
    assert list(killed["values"]) == ["class token"]  # what is done can be read
    resumed = reproduce(claim, tmp_path / "killed", seeds=1, settings=settings)
    assert resumed.values == straight.values and resumed.verdict == "undecided"
    run = tmp_path / "killed/pooling/runs/mean,seed=0/log.jsonl"
    assert sum(json.loads(line)["kind"] == "start" for line in run.read_text(encoding="utf-8").splitlines()) >= 1


# ---- the claims


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_runs_in_miniature(name, tmp_path, monkeypatch):
    monkeypatch.setattr(quadratic_attention, "NETWORKS", ("tiny",))
    monkeypatch.setattr(quadratic_attention, "SIZES", (112, 224))
    few = [] if name in ("data-hungry", "distillation") else ["data.per_class=3"]  # those take fractions
    smaller = [] if name in ("post-norm", "data-hungry", "distillation", "prompt-ensemble") else ["model.depth=1"]
    settings = [] if name in WITHOUT_TRAINING else [*TINY, *few, *smaller]
    claim = CLAIMS[name]
    result = reproduce(claim, tmp_path, seeds=1, settings=settings)
    assert set(result.values) == {arm.name for arm in claim.arms}
    assert all(math.isfinite(number) for units in result.values.values() for number in units.values())
    assert {arm for criterion in claim.rule for arm in criterion.weights} <= set(result.values)
    if claim.scale == "accuracy":
        assert all(0 <= number <= 1 for units in result.values.values() for number in units.values())
    with Image.open(tmp_path / name / "plot.png") as plot:
        assert min(plot.size) > 150 and len(set(plot.convert("L").tobytes())) > 20
    stored = json.loads((tmp_path / name / "result.json").read_text(encoding="utf-8"))
    assert read_result(stored).values == result.values and stored["verdict"] == result.verdict
    page = (tmp_path / name / "report.md").read_text(encoding="utf-8")
    assert claim.says.en in page and claim.paper.arxiv in page and f"**{result.verdict}**" in page


@pytest.mark.parametrize("settings", [(), ("data.source=cifar10",)], ids=["digits", "cifar10"])
def test_the_networks_of_every_training_can_be_built(settings, monkeypatch, tmp_path):
    """Recipes of all trainings, with digits in place of CIFAR-10's files."""
    recipes = {}

    def remember(arms, recipe, seeds, score=None):
        recipes.update({f"{arm}-{len(recipes)}": recipe(varied, 0) for arm, varied in arms.items()})
        return []

    for module in ("pooling", "positions", "mixup", "conv_stem", "post_norm", "data_hungry", "mae_mask_ratio"):
        monkeypatch.setattr(f"vitlab.study.reproduce.claims.{module}.grid", remember)
        CLAIMS[module.replace("_", "-")].steps(Workbench(settings), 1)
    assert len(recipes) == 2 + 3 + 3 + 4 + 4 + 4 + 4
    sources = {recipe.data.source for recipe in recipes.values()}
    assert sources == ({"cifar10"} if settings else {"digits"})
    if not settings:
        check_cells([GridCell(str(n), recipe, {}) for n, recipe in enumerate(recipes.values())], tmp_path)


def test_fractions_have_equal_steps():
    bench = Workbench()
    some, every = bench.network("vit", 15, 0, fraction=0.1), bench.network("vit", 15, 0)
    assert some.run.epochs == 10 * every.run.epochs
    assert some.optim.warmup_epochs / some.run.epochs == pytest.approx(every.optim.warmup_epochs / every.run.epochs)


def test_a_path_is_that_of_cifar10():
    recipe = Workbench(("data.path=cifar-10-binary.tar.gz", "optim.lr=0.01")).network("vit", 20, 1)
    assert (recipe.data.source, recipe.data.path) == ("cifar10", "cifar-10-binary.tar.gz")
    assert (recipe.model.name, recipe.optim.lr, recipe.run.seed) == ("vit_cifar", 0.01, 1)


def test_patches_are_shuffled():
    """Against a loop that copies one patch after the other."""
    images, order = torch.randn(2, 3, 4, 6), torch.randperm(6)
    expected = torch.empty_like(images)
    for place, source in enumerate(order.tolist()):
        y, x, v, u = 2 * (place // 3), 2 * (place % 3), 2 * (source // 3), 2 * (source % 3)
        expected[:, :, y : y + 2, x : x + 2] = images[:, :, v : v + 2, u : u + 2]
    assert torch.equal(shuffle_patches(images, 2, order), expected)


def test_the_correlation_of_similarity_with_distance():
    """As scipy has it, over a loop of pairs; sin-cos positions are less alike the farther apart they are."""
    model = create("vit_digits", positions="sincos")
    assert isinstance(model, PlainTransformer)
    similarity = position_similarity(model)
    pairs = [((a, b), (c, d)) for a in range(4) for b in range(4) for c in range(4) for d in range(4)]
    pairs = [(p, q) for p, q in pairs if p < q]
    near = [float(similarity[p[0], p[1], q[0], q[1]]) for p, q in pairs]
    far = [math.dist(p, q) for p, q in pairs]
    assert correlation(model) == pytest.approx(stats.spearmanr(near, far)[0], abs=1e-9)
    assert correlation(model) < -0.5


# ---- what is written


def test_every_text_is_in_both_languages():
    for claim in CLAIMS.values():
        for text in (claim.title, claim.says, claim.here):
            assert re.search(r"[\u4e00-\u9fff]", text.zh) and not re.search(r"[\u4e00-\u9fff]", text.en)
            assert re.findall(r"\d+\.\d+", text.en) == pytest.approx(re.findall(r"\d+\.\d+", text.zh)) or sorted(
                re.findall(r"\d+\.\d+", text.en)
            ) == sorted(re.findall(r"\d+\.\d+", text.zh))  # the same numbers
        assert re.fullmatch(r"\d{4}\.\d{5}", claim.paper.arxiv) and claim.minutes <= 4


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_table_and_the_report(language):
    claim = CLAIMS["pooling"]
    measured = values(**{"class token": [0.90, 0.91, 0.92], "mean": [0.89, 0.905, 0.91]})
    result = Result(claim, measured, 125.0, (), "vitlab reproduce pooling", "0")
    table, page = summary([result, Result(CLAIMS["tome"])], language), report(result, language, "plot.png")
    holds, missing = {"en": ("holds", "not run"), "zh": ("成立", "未运行")}[language]
    assert f"**{holds}**" in table and f"**{missing}**" in table and f"**{holds}**" in page
    low, high = (100 * bound for bound in interval([0.01, 0.005, 0.01]))
    for text in (table, page):
        assert f"{low:+.1f} .. {high:+.1f}" in text and "2.1 min" in text and "vitlab reproduce pooling" in text
    assert "91.0 %" in page and "![pooling](plot.png)" in page
    assert ("verdict" in table) == (language == "en")


# ---- the command


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_list_before_and_after(command, here):
    listed = command("reproduce").stdout
    assert all(name in listed for name in CLAIMS) and listed.count("not run") == len(CLAIMS)
    ran = command("reproduce", "patch-order")
    assert "bag of patches: holds" in ran.stdout and "reproduce/patch-order/report.md" in ran.stderr
    again = command("reproduce", "--list", "--json")
    stored = {entry["claim"]: entry for entry in json.loads(again.stdout)}
    assert stored["patch-order"]["verdict"] == "holds" and stored["patch-order"]["n"] == 3
    assert stored["tome"]["verdict"] == "not run"
    assert "3 of 3 steps are finished already" in command("reproduce", "patch-order", "--json").stderr
    rows = command("reproduce", "patch-order", "--format", "csv").stdout.splitlines()
    assert rows[0] == "claim,arm,unit,value" and len(rows) == 1 + 3 * 3
    assert "**holds**" in command("reproduce", "--format", "markdown").stdout
    assert [r.verdict for r in stored_results() if r.values] == ["holds"]


def test_the_command_in_chinese(command, here, monkeypatch):
    monkeypatch.setenv("VITLAB_LANG", "zh")
    ran = command("reproduce", "patch-order", "--seeds", "2")
    assert "没有位置，图像就只是一袋图块：" in ran.stdout and "第 1 步（共 2 步）" in ran.stderr
    page = (here / "reproduce/patch-order/report.md").read_text(encoding="utf-8")
    assert "结论：" in page and "verdict" not in page


REFUSED = {
    "a wrong name": (["poolin"], "there is no claim 'poolin'. Did you mean 'pooling'? Claims: pooling, "),
    "a setting without a claim": (["run.epochs=3"], "name a claim before it, or all"),
    "what is varied": (["positions", "model.positions=none"], "model.positions is what this claim varies"),
    "the seed": (["positions", "run.seed=3"], "run.seed is decided by the claim: use --seeds"),
    "an unknown setting": (["positions", "run.epoch=3"], "there is no 'run.epoch' in a recipe."),
    "other data": (["positions", "data.source=mnist"], "claims run on digits or cifar10"),
    "a format": (["--format", "xml"], "--format 'xml' is not known"),
}


@pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(command, here, args, message):
    assert message in command("reproduce", *args, code=2).stderr
    assert not list(here.iterdir())  # before anything is made


def test_a_folder_of_other_settings_is_refused(tmp_path):
    reproduce(CLAIMS["patch-order"], tmp_path, seeds=1)
    with pytest.raises(UsageError, match=r"made with other settings \(none; now run\.epochs=2\)"):
        reproduce(CLAIMS["patch-order"], tmp_path, seeds=1, settings=["run.epochs=2"])


def test_names_are_completed():
    assert complete.claims("") == [*sorted(CLAIMS), "all"]
    assert all(find_claim(name).name == name for name in CLAIMS)
    assert "reproduce" in get_command(app).commands  # type: ignore[attr-defined]


def test_value_is_one_arm():
    assert value("a", high=1.0).decide(values(a=[0.5, 0.6])).mean == pytest.approx(0.55)


def test_arms_and_criteria_have_chinese_names():
    """Of every claim; what stays in Latin letters is a name that Chinese texts use too."""
    kept = "ViT Swin ResNet ToMe Mixup CutMix AdamW SGD token stem softmax QK post pre norm"
    for claim in CLAIMS.values():
        for label in [*(arm.name for arm in claim.arms), *(criterion.label for criterion in claim.rule)]:
            assert arm_in_language(label, "en") == label
            words = set(re.findall("[A-Za-z]{2,}", arm_in_language(label, "zh"))) - set(kept.split())
            assert not words, (claim.name, label)
