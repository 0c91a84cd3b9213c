"""The ladder: from trained weights to a model of somebody's own images, no higher than validation says it pays.

    k-NN           no training at all: what the features are worth as they are
    linear probe   a classifier on the frozen features; seconds
    LoRA           low-rank adapters and the head learn, from the probe's head on
    whole network  every weight learns, from the probe's head on
    mirror images  a probe on the features of mirror images too, where there is no time to tune

The encoder runs over the images once; its features are kept (feature_cache). A rung is kept only if it beats the best
so far on the validation images by more than noise, so a tie goes to the simpler. Whenever the run ends, best/ holds
the best model so far.

    runs/<name>/{recipe.toml, ladder.json, log.jsonl, rungs/{probe, lora, ...}/, best/, result.json, report.html}
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from vitlab.checkpoints import native
from vitlab.checkpoints.load import load
from vitlab.errors import TrainingError, UsageError
from vitlab.images.datasets import Data, Dataset, subset
from vitlab.images.randomness import torch_seed
from vitlab.images.sources.splits import few_labels, strata
from vitlab.models.base import Network
from vitlab.models.task import LabelTask
from vitlab.parsing import parse_toml
from vitlab.training import processes, run_lock, targets
from vitlab.training.autopick import choose, inspect_data
from vitlab.training.batches import ImageSet, label_tensor
from vitlab.training.candidates import (
    LEVELS,
    draft,
    enough_passes,
    estimate,
    given_keys,
    level_for,
    longest,
    scheduled,
)
from vitlab.training.evaluate import Scores, evaluate_classifier, knn_scores
from vitlab.training.features import FeatureSet, adding, dataset_features, missing_share
from vitlab.training.finetune import build_classifier, fit_pixels, for_pixels
from vitlab.training.finish import ANSWERS, card_metrics, certainty, finish_rung, trained_card, write_result
from vitlab.training.job import MODEL, OBJECTIVE_FOR, open_once
from vitlab.training.labels import differing
from vitlab.training.loop import Beginning, Show, check_resume, fit_part
from vitlab.training.measure import SpeedMeter
from vitlab.training.objectives import DEFAULT, objective_class
from vitlab.training.probe import Probe, fit_probe
from vitlab.training.recipe import (
    AUTO,
    ModelRecipe,
    Recipe,
    from_tables,
    setting,
    single_run,
    to_toml,
    with_settings,
)
from vitlab.training.report.html import duration
from vitlab.training.run_report import FORWARD_PASSES, FinishedRun, HeldOut, write_run_report
from vitlab.training.runlog import RunLog, from_json, read_log, to_json
from vitlab.training.runs import RESULT, read_result
from vitlab.training.starting_points import BUNDLED, Need, Start, find_start
from vitlab.training.state import BEST, replace_folder, save_best
from vitlab.training.target_scores import TargetScores, best_thresholds, headline, task_scores
from vitlab.training.timelimit import wrap_up_seconds
from vitlab.training.uncertainty import LearningCurve, accuracy, beats, learning_curve
from vitlab.training.unreadable import check_skipped

PLAN, RUNGS = "ladder.json", "rungs"
SHARE = 0.92  # of the time left that is planned for; a run that gets slower still ends in time
FEATURES = 0.5  # of the time that running the encoder over the images may take
USED = 0.8  # of the time; a run that uses less says why
ENOUGH = 3  # passes of LoRA that leave the rest of the time to the whole network
TIMED = 8  # images that the encoder is timed with
RANK = 8
OWN = {"model.init_from", "model.name", "run.ladder", "run.dir", "run.minutes"}  # settings of the run as a whole


@dataclass
class Clock:
    """Seconds of a run; earlier parts of it took `before`."""

    since: float
    limit: float = math.inf
    before: float = 0.0

    @property
    def gone(self) -> float:
        return time.perf_counter() - self.since + self.before

    @property
    def left(self) -> float:
        return self.limit - self.gone


@dataclass
class LadderState:
    """ladder.json: all that a resumed run must not decide again."""

    settings: list[str]
    start: Start | None = None
    classes: list[str] | None = None
    share: float | None = None  # of the images that the time allows for; None: not decided yet
    plans: dict[str, str] = field(default_factory=dict)  # rung -> its recipe as TOML; empty: left out
    left_out: list[dict[str, Any]] = field(default_factory=list)  # rungs: name, title, why, for_time
    changes: list[str] = field(default_factory=list)  # settings that came with --resume --changed
    seconds: float = 0.0
    saved: float = 0.0  # when this was written, in seconds since 1970
    finished: bool = False

    def write(self, run: Path) -> None:
        self.saved = time.time()
        native.write_text(run / PLAN, to_json(asdict(self)))

    def seconds_until_killed(self, run: Path) -> float:
        """Seconds of a run that was killed, by its logs, if they go on after this was written."""
        logs = [run, *(run / RUNGS).glob("*")]
        times = [line["time"] for log in logs for line in read_log(log)[-1:] if "time" in line]
        return self.seconds + max(0.0, max(times, default=0.0) - self.saved)

    @classmethod
    def read(cls, run: Path) -> LadderState:
        try:
            values = from_json((run / PLAN).read_bytes())
            start = values.pop("start")
            return cls(**values, start=None if start is None else Start(**start))
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise TrainingError(
                f"{run / PLAN}: is missing or damaged ({error}). Start a new run: run.dir={run}-again"
            ) from None


@dataclass(frozen=True)
class Rung:
    """A model of the ladder and its answers to the validation images."""

    name: str
    title: str
    right: Tensor  # (n,) bool
    seconds: float
    checkpoint: Path | None = None  # k-NN has none: its classifier is the training set
    result: dict[str, Any] = field(default_factory=dict)  # of a training run
    scores: TargetScores | None = None  # where labels or a number are learned, which `right` says little of
    groups: np.ndarray | None = None  # data.group of the images in `right`, or in `scores`

    def beats(self, other: Rung) -> bool:
        if self.scores is not None and other.scores is not None:
            return targets.beats(self.scores, other.scores, self.groups)
        return beats(self.right, other.right, self.groups)

    @property
    def figure(self) -> str:
        if self.scores is None:
            return str(accuracy(self.right, self.groups))
        return headline({**self.scores.numbers(), **self.certainty})

    @cached_property
    def certainty(self) -> dict[str, Any]:
        """The 95 % interval of the figure, and the images behind it."""
        if self.scores is not None:
            return {"interval": list(targets.interval(self.scores, self.groups)), "images": int(self.scores.read.sum())}
        measured = accuracy(self.right, self.groups)
        return {"interval": [measured.low, measured.high], "images": measured.images}

    @property
    def numbers(self) -> dict[str, float]:
        """The figure that rungs are compared by, with its name."""
        return {"top1": self.accuracy} if self.scores is None else {self.scores.metric.lower(): self.scores.value}

    @property
    def accuracy(self) -> float:
        return float(self.right.float().mean())

    def to_dict(self, kept: bool) -> dict[str, Any]:
        """As result.json holds it."""
        figures = {f"val_{name}": value for name, value in self.numbers.items()}
        about = {"name": self.name, "title": self.title, **figures, **self.certainty}
        return {**about, "seconds": self.seconds, "kept": kept}


def climb(
    recipe: Recipe,
    run: Path,
    *,
    settings: Sequence[str] = (),
    show: Show,
    since: float,
    resume: bool = False,
    changed: bool = False,
) -> dict[str, Any]:
    """Climb as far as run.minutes allow and it pays; returns what result.json holds. `settings`: what the user set.

    `resume` and `changed` as in loop.fit.
    """
    if recipe.objective.name not in OBJECTIVE_FOR.values():
        raise TrainingError(
            f"run.ladder=true is for objective.name={', '.join(OBJECTIVE_FOR.values())}, not for "
            f"{recipe.objective.name}."
        )
    objective_class(recipe.objective.name).check(recipe)  # not when the first rung that trains is reached
    for name, value in (("model.reducer", recipe.model.reducer), ("augment.flip_at_test", recipe.augment.flip_at_test)):
        if value:  # probes would be compared, and test images scored, without it
            raise TrainingError(
                f"{setting(name, value)} is for a single run, not for the ladder: name the weights, "
                "model.init_from=CHECKPOINT run.ladder=false; or model.init_from=none."
            )
    if resume:
        recipe = check_resume(recipe, run, changed)
        state = LadderState.read(run)
        if state.finished and (run / RESULT).is_file():
            show.note(f"{run} is finished: nothing to resume.")
            return read_result(run)
        if changed:
            state.settings += settings
            state.changes += own_settings(settings)
    elif (run / "recipe.toml").exists():
        raise TrainingError(f"{run} holds a run already: --resume {run} continues it, run.dir=... makes another.")
    else:
        state = LadderState(list(settings))
    try:
        with run_lock.hold(run, show.note):
            return Ladder(recipe, run, state, show, since).climb()
    finally:
        processes.stop()


def ladder_or_scratch(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Who names a model and no weights wants that model from scratch; the ladder needs weights to start from."""
    given = given_keys(settings)
    if recipe.model.init_from == AUTO and "model.name" in given and "model.init_from" not in given:
        recipe = replace(recipe, model=replace(recipe.model, init_from=None))
    if recipe.model.init_from == AUTO and not recipe.run.ladder:
        raise UsageError("model.init_from=auto is part of run.ladder=true: name a checkpoint, or none.")
    return recipe if recipe.model.init_from else single_run(recipe)


def tuning_recipe(recipe: Recipe, data: Data, settings: Sequence[str]) -> Recipe:
    """How the ladder trains the whole network, or `recipe` itself where it does not climb: for a preview."""
    recipe = ladder_or_scratch(recipe, settings)
    if not recipe.run.ladder:
        return recipe
    who = processes.start(recipe.run.device)
    name = recipe.model.init_from
    if name == AUTO:
        name = find_start(Need(len(data.train) + len(data.val), None, who.device.type)).name
    model = replace(recipe.model, init_from=name)
    if name is None:
        return replace(recipe, model=model)
    facts = inspect_data(data, recipe.data.source, who)[0]
    tuning = draft(facts, model, level_for(enough_passes(facts, tuned=True)), own_settings(settings))
    return replace(tuning, objective=recipe.objective)


def own_settings(settings: Sequence[str]) -> list[str]:
    """What a user set of the training runs, without what concerns the ladder as a whole."""
    return [text for text in settings if text.partition("=")[0].strip() not in OWN]


class Ladder:
    def __init__(self, recipe: Recipe, run: Path, state: LadderState, show: Show, since: float):
        self.recipe, self.run, self.state, self.show = recipe, run, state, show
        limit = 60 * recipe.run.minutes or math.inf
        self.clock = Clock(since, limit, state.seconds_until_killed(run) if state.saved else 0.0)
        self.who = processes.start(recipe.run.device)
        self.data = open_once(recipe, self.who)
        if state.classes is None:
            state.classes = self.data.classes
        elif state.classes != self.data.classes:
            both = differing(state.classes, self.data.classes, "the run", "the data")
            raise TrainingError(
                f"{run} was begun on other classes than {self.data.name} has now: {both}. Put them back as they were, "
                "or start a new run."
            )
        self.facts, self.read_seconds = inspect_data(self.data, recipe.data.source, self.who)
        self.settings = own_settings(self.state.settings)
        if recipe.objective.name != DEFAULT:  # recognised from the data, and part of every rung's recipe
            self.settings.append(f"objective.name={recipe.objective.name}")
        self.balanced = recipe.data.balance != "none"
        self.rungs: list[Rung] = []
        self.best: Rung | None = None
        self._answers: dict[str, Scores] = {}  # of the probes, to the validation images
        self.skipped: dict[str, str] = {}  # images that cannot be read: name -> what is wrong
        self.log: RunLog | None = None
        self.why_early = "no further rung fits into what was left"

    def climb(self) -> dict[str, Any]:
        start = self.state.start or self.who.from_first(self._start)
        self.recipe = replace(self.recipe, model=replace(self.recipe.model, init_from=start.name))
        self.state.start = start
        if self.who.first:
            self.state.write(self.run)
            native.write_text(self.run / "recipe.toml", to_toml(self.recipe))
            self.log = RunLog(self.run)
            self.log.write("start", 0, steps=0)
        try:
            return self._climb(start)
        finally:
            if self.log is not None:
                self.log.close()
                self.state.seconds = self.clock.gone
                self.state.write(self.run)

    def _climb(self, start: Start) -> dict[str, Any]:
        for note in (*self.data.notes, str(start)):
            self.note(note)
        torch.manual_seed(torch_seed(self.recipe.run.seed, MODEL))  # of a new head
        source = ModelRecipe(init_from=BUNDLED) if start.name is None else self.recipe.model
        source = for_pixels(replace(self.recipe, model=source), self.data).model
        model, notes = build_classifier(source, self.data.classes, self.facts.channels, self.data.kind)
        objective_class(self.recipe.objective.name).set_task(model, self.data)
        for note in [*notes, *fit_pixels(model, self.data, source)]:
            self.note(note)
        if start.name and start.licence is None and model.card is not None and model.card.licence is not None:
            start = self.state.start = replace(start, licence=model.card.licence)
        model.to(self.who.device)
        self._fit_time(model)
        train, val = self._features(model, "train"), self._features(model, "val")
        self._check_readable(train)
        self._save_state()
        if self.data.kind == "class":
            self._knn(train, val)
        probe = self._probe(model, train, val)
        self._save_state()
        if start.name is None:
            self._train("scratch", "a new network", self._plan_scratch)
        else:
            self._tune()
        if not any(rung.result for rung in self.rungs):
            self._mirrored_probe(model, train, val)
        curve = self._learning_curve(train, val, probe)
        image_set, fair = ImageSet(self.data.train, model.require_preprocess()), probe.fair
        return self._finish(curve, HeldOut(image_set, train.indices[fair], probe.held_out[torch.from_numpy(fair)]))

    def note(self, text: str) -> None:
        self.show.note(text)
        if self.log is not None:
            self.log.write("note", 0, text=text)

    def _start(self) -> Start:
        name = self.recipe.model.init_from
        if name != AUTO:
            return Start(name, "you named it")
        images = len(self.data.train) + len(self.data.val)
        seconds = None if math.isinf(self.clock.limit) else self.clock.limit
        return find_start(Need(images, seconds, self.who.device.type))

    # ---------------------------------------------------------------------------------------------- frozen features

    def _fit_time(self, model: Network) -> None:
        """Leave out images where the encoder would take too long over all of them."""
        if self.state.share is None:
            self.state.share = self.who.from_first(lambda: self._affordable_share(model))
            self._save_state()
        if self.state.share >= 1:
            return
        kept = []
        for dataset in (self.data.train, self.data.val):
            labels, seed, groups = strata(dataset.labels), self.recipe.run.seed, dataset.groups
            chosen = few_labels(labels, self.data.classes, seed, fraction=self.state.share, groups=groups)
            kept.append(subset(dataset, chosen))
        self.data = replace(self.data, train=kept[0], val=kept[1])
        self.facts = replace(self.facts, train=len(kept[0]), val=len(kept[1]))
        self.note(
            f"running the encoder over all images would take too long: {len(kept[0]):,} training images and "
            f"{len(kept[1]):,} validation images are used, which fit into the time. More minutes would use more."
        )

    def _affordable_share(self, model: Network) -> float:
        """Of the images: as many as the encoder can see in its part of the time."""
        if math.isinf(self.clock.limit):
            return 1.0
        pre, per_image = model.require_preprocess(), self._encoder_seconds(model)
        images = sum(missing_share(model, ImageSet(part, pre)) * len(part) for part in (self.data.train, self.data.val))
        left = self.clock.left - self._reserve(sum(p.numel() for p in model.parameters()), per_image)
        return min(1.0, max(FEATURES * left / max(per_image * images, 1e-9), 1e-6))

    def _encoder_seconds(self, model: Network) -> float:
        """For one image, measured on a few."""
        train = self.data.train
        few = subset(train, np.linspace(0, len(train) - 1, min(len(train), TIMED)).astype(np.int64))
        return dataset_features(model, ImageSet(few, model.require_preprocess()), stored=False).seconds / len(few)

    def _features(self, model: Network, split: str, *, mirrored: bool = False) -> FeatureSet:
        dataset: Dataset = getattr(self.data, split)
        what = f"features of {split}{', mirrored' if mirrored else ''}"
        progress = adding(self.show.count, what, len(dataset))
        image_set = ImageSet(dataset, model.require_preprocess())
        features = dataset_features(model, image_set, mirrored=mirrored, processes=self.who, progress=progress)
        cached = len(features.indices) - features.computed
        from_cache = f", {cached:,} were stored before" if cached else ""
        self.note(f"{what}: {features.computed:,} images in {duration(features.seconds)}{from_cache}")
        self._note_skipped(features.skipped)
        return features

    def _check_readable(self, train: FeatureSet) -> None:
        """Refuse to learn one class alone, where the images of all others are damaged."""
        classes = train.labels.unique().tolist()
        if self.data.kind == "class" and len(classes) < 2:
            raise TrainingError(
                f"{self.data.name}: only training images of {self.data.classes[classes[0]]!r} can be read, and a "
                f"classifier needs two classes. {len(train.skipped)} images cannot be read, e.g. "
                f"{next(iter(train.skipped.values()), '')}"
            )

    def _note_skipped(self, skipped: dict[str, str]) -> None:
        """Report unreadable images once; too many stop the run."""
        for name in skipped.keys() - self.skipped.keys():
            self.note(f"skipped: {skipped[name]}")
        self.skipped |= skipped
        more = f"vitlab train --resume {self.run} data.max_unreadable=... --changed"
        check_skipped(self.skipped, self.recipe.data.max_unreadable, "data.max_unreadable", more)

    def _knn(self, train: FeatureSet, val: FeatureSet) -> None:
        began = time.perf_counter()
        bank = F.normalize(train.vectors, dim=1), train.labels
        votes = knn_scores(bank, F.normalize(val.vectors, dim=1), len(self.data.classes))
        right, seconds = votes.argmax(dim=1) == val.labels, time.perf_counter() - began
        self._add(Rung("knn", "k-NN", right, seconds, groups=_taken(self.data.val.groups, val.indices)))

    def _probe(self, model: Network, train: FeatureSet, val: FeatureSet) -> Probe:
        groups = _taken(self.data.train.groups, train.indices)
        return self._fit_probe("probe", "linear probe", model, (train.vectors, train.labels, groups), val)

    def _mirrored_probe(self, model: Network, train: FeatureSet, val: FeatureSet) -> None:
        """A probe that learns from mirror images too: one more pass over the training images."""
        name, title = "mirrored", "linear probe with mirror images"
        flips = draft(self.facts, self.recipe.model, LEVELS[0], self.settings).augment.flip
        if not flips or self._nothing_to_gain(name, title):  # of digits and letters they mean something else
            return
        if name not in self.state.plans:
            why = self.who.from_first(lambda: self._why_not_mirrored(model))
            self.state.plans[name] = "" if why else name
            if why:
                self._leave_out(name, title, why)
            self._save_state()
        if not self.state.plans[name]:
            return
        mirrored = self._features(model, "train", mirrored=True)
        groups = train.indices if self.data.train.groups is None else self.data.train.groups[train.indices]
        vectors, labels = torch.cat([train.vectors, mirrored.vectors]), torch.cat([train.labels, mirrored.labels])
        self._fit_probe(name, title, model, (vectors, labels, np.tile(groups, 2)), val)

    def _why_not_mirrored(self, model: Network) -> str:
        if math.isinf(self.clock.limit):
            return ""
        per_image, images = self._encoder_seconds(model), ImageSet(self.data.train, model.require_preprocess())
        seconds = per_image * len(images) * missing_share(model, images, mirrored=True)
        params = sum(p.numel() for p in model.parameters())
        left = max(0.0, SHARE * (self.clock.left - self._reserve(params, per_image)))
        return "" if seconds <= left else f"for it takes {duration(seconds)} and {duration(left)} are left"

    def _reserve(self, params: int, per_image: float) -> float:
        """Seconds for the test images, the report and its heat maps."""
        return wrap_up_seconds(params) + ((self.facts.test or 0) + FORWARD_PASSES) * per_image

    def _fit_probe(
        self, name: str, title: str, model: Network, images: tuple[Tensor, Tensor, np.ndarray | None], val: FeatureSet
    ) -> Probe:
        """A rung by a probe on these features, labels and groups, which becomes the model's classifier."""
        began, (vectors, labels, groups) = time.perf_counter(), images
        options = {"seed": self.recipe.run.seed, "groups": groups, "balanced": self.balanced}
        if self.data.kind == "class":
            probe = fit_probe(vectors, labels, len(self.data.classes), **options)
        else:
            probe = targets.fit_target_probe(vectors, labels, model.task, **options)
        head = model.linear_head
        if head is None:
            raise TrainingError(
                f"{self.recipe.model.init_from} has more than one linear layer behind its features, so run.ladder=true "
                "cannot use it: set run.ladder=false."
            )
        probe.install(head)
        folder = self.run / RUNGS / name
        logits = probe.logits(val.vectors)
        if isinstance(model.task, LabelTask):
            model.task = LabelTask(thresholds=best_thresholds(logits, val.labels))
        if self.who.first:
            replace_folder(folder, partial(native.save, model))
        self.who.wait()
        answers = self._answers[name] = self._all_answers(logits, val)
        title = f"{title} (strength {probe.strength:g})"
        self._add(self._rung(name, title, answers, time.perf_counter() - began, folder))
        return probe

    def _all_answers(self, logits: Tensor, val: FeatureSet) -> Scores:
        """Scores over all validation images; those that could not be read count as such."""
        labels, rows = label_tensor(self.data.val.labels), torch.from_numpy(val.indices)
        outputs, read = torch.zeros(len(labels), logits.shape[1]), torch.zeros(len(labels), dtype=torch.bool)
        outputs[rows], read[rows] = logits.float(), True
        return Scores(outputs, labels, read, 0.0, val.skipped)

    def _rung(self, name: str, title: str, answers: Scores, seconds: float, checkpoint: Path) -> Rung:
        """A rung by its outputs for the validation images."""
        if self.data.kind == "class":
            right, groups = (answers.predicted == answers.labels)[answers.read], self.data.val.groups
            return Rung(name, title, right, seconds, checkpoint, groups=_taken(groups, answers.read.numpy()))
        self.who.wait()  # the first process has written it
        scores = task_scores(answers, native.read_task(native.read_card(checkpoint), len(self.data.classes)))
        assert isinstance(scores, TargetScores)
        right = torch.full((int(answers.read.sum()),), targets.perfect(scores))
        return Rung(name, title, right, seconds, checkpoint, scores=scores, groups=self.data.val.groups)

    # ------------------------------------------------------------------------------------------------------- tuning

    def _tune(self) -> None:
        assert self.best is not None
        model = replace(self.recipe.model, init_from=str(self.run / RUNGS / "probe"))
        given = given_keys(self.settings)
        if given & {"model.lora", "model.freeze"}:
            self._train("tuned", "as you set it", partial(self._plan, model))
            return
        self._train("lora", f"LoRA of rank {RANK}", partial(self._plan, replace(model, lora=RANK), more_follows=True))
        self._train("whole", "whole network", partial(self._plan, model))

    def _train(self, name: str, title: str, plan: Callable[[], Recipe | str]) -> None:
        """A training run of its own, in its own folder; `plan` gives its recipe, or why there is none."""
        folder = self.run / RUNGS / name
        if self._nothing_to_gain(name, title):
            return
        if name not in self.state.plans:
            planned = plan()
            self.state.plans[name] = "" if isinstance(planned, str) else to_toml(planned)
            if isinstance(planned, str):
                self._leave_out(name, title, planned)
            self._save_state()
        if not (text := self.state.plans[name]):
            return
        recipe, began = from_tables(parse_toml(text)), time.perf_counter()
        changed = bool(self.state.changes) and not (folder / RESULT).is_file()
        if changed:
            recipe = with_settings(recipe, self.state.changes)
        epochs = recipe.run.epochs
        self.note(f"{title}: {epochs} {'pass' if epochs == 1 else 'passes'} over {self.facts.train:,} images")
        resume = (folder / "recipe.toml").exists()
        begin = Beginning(resume, changed and resume, self.data, since=began)
        result = fit_part(recipe, folder, begin, show=self.show, finishing=finish_rung)
        stored, labels = load_file(folder / ANSWERS), label_tensor(self.data.val.labels)
        rung = self._rung(name, title, Scores(stored["logits"], labels, stored["read"], 0.0), 0.0, folder / BEST)
        seconds = max(time.perf_counter() - began, float(result["seconds"]))  # it may have run before a resume
        self._add(replace(rung, seconds=seconds, result=result))
        self._save_state()

    def _nothing_to_gain(self, name: str, title: str) -> bool:
        if self.best is None or not bool(self.best.right.all()):
            return False
        self.why_early = "every validation image is right"
        if name not in {rung["name"] for rung in self.state.left_out}:
            self._leave_out(name, title, f"for {self.why_early} already", for_time=False)
        return True

    def _leave_out(self, name: str, title: str, why: str, *, for_time: bool = True) -> None:
        self.state.left_out.append({"name": name, "title": title, "why": why, "for_time": for_time})
        self.note(f"{title}: left out, {why}.")

    def _plan(self, model: ModelRecipe, more_follows: bool = False) -> Recipe | str:
        """The recipe of a tuning rung, as long as the time allows."""
        enough = enough_passes(self.facts, tuned=True)
        first = draft(self.facts, model, LEVELS[0], self.settings)
        since = self.clock.since - self.clock.before
        speed = SpeedMeter(self.data, self.read_seconds, since, self.recipe.model.init_from)(first)
        if math.isinf(self.clock.limit):
            epochs, seconds = enough, math.inf
        else:
            seconds = SHARE * (self.clock.left - self._reserve(speed.params, speed.evaluate))
            if more_follows:  # and can then still get somewhere
                half = longest(first, self.facts, speed, self.settings, seconds / 2.5, 4 * enough)
                seconds = seconds / 2.5 if half is not None and half.run.epochs >= ENOUGH else seconds
            planned = longest(first, self.facts, speed, self.settings, seconds, 4 * enough)
            epochs = 0 if planned is None else planned.run.epochs
            if epochs == 4 * enough:
                self.why_early = f"more than {epochs} passes over {self.facts.train:,} images would add little"
        if epochs < 1:
            cost = estimate(scheduled(first, 1, self.facts, speed, self.settings), self.facts, speed)
            one_pass, left = duration(cost.total), duration(max(seconds, 0))
            return f"for one pass, with evaluation and saving, takes {one_pass}, and {left} are left"
        recipe = scheduled(
            draft(self.facts, model, level_for(epochs), self.settings), epochs, self.facts, speed, self.settings
        )
        minutes = 0.0 if math.isinf(self.clock.limit) else max(seconds / SHARE, 1.0) / 60
        return replace(recipe, run=replace(recipe.run, minutes=minutes, ladder=False))

    def _plan_scratch(self) -> Recipe | str:
        """The recipe of a network that starts from nothing."""
        if math.isinf(self.clock.limit):
            recipe = self.recipe
        else:
            meter = SpeedMeter(self.data, self.read_seconds, time.perf_counter())
            try:
                recipe, reasons = choose(self.facts, self.clock.left / 60, self.settings, meter)
            except TrainingError as error:
                return str(error)
            for reason in reasons:
                self.note(reason)
        return single_run(recipe)

    # ------------------------------------------------------------------------------------------------- which is best

    def _add(self, rung: Rung) -> None:
        """A rung is the best so far if it beats the last best one by more than noise; k-NN is a yardstick only."""
        best = self.best
        kept = rung.checkpoint is not None and (best is None or rung.beats(best))
        against = "" if best is None or kept or rung.checkpoint is None else f", no better than {best.title}: not kept"
        self.note(f"{rung.title}: {rung.figure} on validation, {duration(rung.seconds)}{against}")
        self.rungs.append(rung)
        if kept and rung.checkpoint is not None:
            self.best = rung
            if self.who.first:
                checkpoint = rung.checkpoint
                replace_folder(self.run / BEST, lambda folder: shutil.copytree(checkpoint, folder, dirs_exist_ok=True))
        if self.log is not None:
            self.log.write("rung", len(self.rungs), name=rung.name, **rung.numbers, seconds=rung.seconds, kept=kept)

    def _learning_curve(self, train: FeatureSet, val: FeatureSet, probe: Probe) -> LearningCurve | None:
        """By the linear probe, whatever the best model is: it takes a second. Of classes only."""
        if self.data.kind != "class":
            return None
        classes = len(self.data.classes)

        def answers(indices: np.ndarray) -> Tensor:
            chosen = torch.from_numpy(indices)
            seen = train.vectors[chosen], train.labels[chosen]
            part = fit_probe(*seen, classes, strength=probe.strength, held_out=False, balanced=self.balanced)
            return part.logits(val.vectors).argmax(dim=1)

        images = train.labels.numpy(), self.data.classes, val.labels
        groups = _taken(self.data.val.groups, val.indices)
        of_train = _taken(self.data.train.groups, train.indices)
        return learning_curve(answers, *images, seed=self.recipe.run.seed, groups=groups, train_groups=of_train)

    # ----------------------------------------------------------------------------------------------------- the end

    def _finish(self, curve: LearningCurve | None, held_out: HeldOut) -> dict[str, Any]:
        best = self.best
        assert best is not None
        self.who.wait()
        model = load(self.run / BEST).to(self.who.device)
        split = "test" if self.data.test is not None else "val"
        image_set = ImageSet(self.data.test or self.data.val, model.require_preprocess())
        scores = task_scores(self._final_scores(best, model, image_set), model.task)
        figures = {**_figures(scores), **certainty(scores, image_set.data, self.data.train)}
        result: dict[str, Any] = {
            "split": split,
            "objective": self.recipe.objective.name,
            **figures,
            **_val(best),
            "rung": best.name,
            "rungs": [rung.to_dict(kept=rung is best) for rung in self.rungs],
            "left_out": self.state.left_out,
            "start": asdict(self.state.start) if self.state.start is not None else None,
            "learning_curve": None if curve is None else curve.to_dict(),
            "best_epoch": best.result.get("best_epoch", 0),
            "epochs": best.result.get("epochs", 0),
            "steps": best.result.get("steps", 0),
            "stopped_early": best.result.get("stopped_early", False),
            "seconds": self.clock.gone,
            "images_per_second": best.result.get("images_per_second", 0.0),
            "params": sum(p.numel() for p in model.parameters()),
            "seed": self.recipe.run.seed,
            "unreadable": len(self.skipped | scores.skipped),
        }
        if curve is not None:
            self.note(str(curve))
        if self.clock.gone < USED * self.clock.limit < math.inf:
            self.note(f"{duration(self.clock.left)} of {duration(self.clock.limit)} were not needed: {self.why_early}.")
        if self.who.first:
            weights = self.recipe.model.init_from or (None if best.name == "scratch" else BUNDLED)
            source = f"vitlab train, {self.data.name}" + ("" if weights is None else f", from {weights}")
            model.card = trained_card(model, source, card_metrics(split, result["judged_by"], scores))
            save_best(self.run, model)
            write_result(self.run, result, self.log, len(self.rungs))
            curves = [] if best.checkpoint is None or not best.result else read_log(best.checkpoint.parent)
            log = [*read_log(self.run), *curves]
            plan = self.state.plans.get(best.name) if best.result else None
            parts = (self.run, self.recipe, self.data, model, scores, image_set, result, log)
            taught = from_tables(parse_toml(plan)) if plan else None
            write_run_report(FinishedRun(*parts, trained_by=taught, held_out=held_out))
        self.state.finished = True
        self._save_state()
        self.show.note(f"{split} {headline(figures)}, by {best.title}")
        return result

    def _final_scores(self, best: Rung, model: Network, image_set: ImageSet) -> Scores:
        if self.data.test is not None:
            return evaluate_classifier(model, image_set, processes=self.who)
        if best.name in self._answers:
            return self._answers[best.name]
        stored = load_file(self.run / RUNGS / best.name / ANSWERS)
        return Scores(stored["logits"], image_set.labels, stored["read"], best.seconds)

    def _save_state(self) -> None:
        self.state.seconds = self.clock.gone
        if self.who.first:
            self.state.write(self.run)
        self.who.wait()


def _figures(scores: Scores | TargetScores) -> dict[str, Any]:
    """How good a model is, for result.json."""
    if isinstance(scores, TargetScores):
        return {"judged_by": scores.metric, **scores.numbers()}
    figures = {"top1": scores.top(1), "top5": scores.top(5), "loss": scores.loss(), "ece": scores.calibration_error()}
    return {"judged_by": "top-1", **figures}


def _taken(groups: np.ndarray | None, rows: np.ndarray) -> np.ndarray | None:
    return None if groups is None else groups[rows]


def _val(rung: Rung) -> dict[str, float]:
    """The figure of a rung on the validation images: val_top1, val_map or val_r2."""
    return {f"val_{name}": value for name, value in rung.numbers.items()}
