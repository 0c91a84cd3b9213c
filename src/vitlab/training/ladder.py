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
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from vitlab.checkpoints import native
from vitlab.checkpoints.load import load
from vitlab.errors import TrainingError
from vitlab.images.datasets import subset
from vitlab.images.randomness import torch_seed
from vitlab.images.sources.splits import few_labels, strata
from vitlab.models.base import Network
from vitlab.models.task import LabelTask
from vitlab.parsing import parse_toml
from vitlab.training import processes, run_lock, targets
from vitlab.training.autopick import inspect_data
from vitlab.training.batches import ImageSet, label_tensor
from vitlab.training.candidates import LEVELS, draft, given_keys
from vitlab.training.clock import Clock, Deadline, Late
from vitlab.training.evaluate import Scores, evaluate_classifier, knn_scores
from vitlab.training.features import FeatureSet, adding, dataset_features
from vitlab.training.finetune import build_classifier, fit_pixels, for_pixels
from vitlab.training.finish import ANSWERS, card_metrics, certainty, finish_rung, trained_card, write_result
from vitlab.training.job import MODEL, OBJECTIVE_FOR, open_once
from vitlab.training.labels import differing
from vitlab.training.ladder_plan import Planner, RungPlan, own_settings
from vitlab.training.ladder_state import RUNGS, LadderState
from vitlab.training.loop import Beginning, Show, Stopped, check_resume, fit_part
from vitlab.training.objectives import DEFAULT, objective_class
from vitlab.training.probe import Probe, fit_probe
from vitlab.training.recipe import AUTO, ModelRecipe, Recipe, from_tables, setting, to_toml, with_settings
from vitlab.training.report.html import duration
from vitlab.training.run_report import FinishedRun, HeldOut, write_run_report
from vitlab.training.rungs import Rung
from vitlab.training.runlog import RunLog, read_log
from vitlab.training.runs import RESULT, read_result
from vitlab.training.starting_points import BUNDLED, Need, Start, find_start
from vitlab.training.state import BEST, replace_folder, save_best
from vitlab.training.target_scores import TargetScores, best_thresholds, headline, task_scores
from vitlab.training.timelimit import report_deadline
from vitlab.training.uncertainty import LearningCurve, learning_curve
from vitlab.training.unreadable import check_skipped

USED = 0.8  # of the time; a run that uses less says why
CURVE = 0.5  # of the time that the linear probe took: the learning curve's fits are fewer
RANK = 8


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
    views = [(f"augment.{name}", getattr(recipe.augment, name)) for name in ("flip_at_test", "shift_at_test")]
    for name, value in (("model.reducer", recipe.model.reducer), *views):
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
        settings = own_settings(self.state.settings)
        if recipe.objective.name != DEFAULT:  # recognised from the data, and part of every rung's recipe
            settings.append(f"objective.name={recipe.objective.name}")
        facts, read_seconds = inspect_data(self.data, recipe.data.source, self.who)
        self.planner = Planner(self.data, facts, read_seconds, self.clock, recipe, settings, self.who)
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
        self.planner = replace(self.planner, recipe=self.recipe)
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
        model, notes = build_classifier(source, self.data.classes, self.planner.facts.channels, self.data.kind)
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
            self._train("scratch", "a new network", self.planner.scratch)
        else:
            self._tune(model)
        if not any(rung.result for rung in self.rungs):
            self._mirrored_probe(model, train, val)
        curve = self._learning_curve(model, train, val, probe)
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
            self.state.share = self.who.from_first(lambda: self.planner.affordable_share(model))
            self._save_state()
        if self.state.share >= 1:
            return
        kept = []
        for dataset in (self.data.train, self.data.val):
            labels, seed, groups = strata(dataset.labels), self.recipe.run.seed, dataset.groups
            chosen = few_labels(labels, self.data.classes, seed, fraction=self.state.share, groups=groups)
            kept.append(subset(dataset, chosen))
        self.data = replace(self.data, train=kept[0], val=kept[1])
        facts = replace(self.planner.facts, train=len(kept[0]), val=len(kept[1]))
        self.planner = replace(self.planner, data=self.data, facts=facts)
        self.note(
            f"running the encoder over all images would take too long: {len(kept[0]):,} training images and "
            f"{len(kept[1]):,} validation images are used, which fit into the time. More minutes would use more."
        )

    def _features(
        self,
        model: Network,
        split: Literal["train", "val"],
        *,
        mirrored: bool = False,
        deadline: Deadline | None = None,
    ) -> FeatureSet:
        """Raises `Late` after the deadline; several processes run to the end, for they wait for each other."""
        count = self.show.count if deadline is None or self.who.world > 1 else deadline.checked(self.show.count)
        image_set = self.planner.image_set(model, split)
        what = f"features of {split}{', mirrored' if mirrored else ''}"
        progress = adding(count, what, len(image_set))
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
        scores, seconds = self._all_answers(votes, val), time.perf_counter() - began
        self._add(Rung("knn", "k-NN", scores, seconds, groups=self.data.val.groups))

    def _probe(self, model: Network, train: FeatureSet, val: FeatureSet) -> Probe:
        groups = _taken(self.data.train.groups, train.indices)
        return self._fit_probe("probe", "linear probe", model, (train.vectors, train.labels, groups), val)

    def _mirrored_probe(self, model: Network, train: FeatureSet, val: FeatureSet) -> None:
        """A probe that learns from mirror images too: one more pass over the training images."""
        name, title = "mirrored", "linear probe with mirror images"
        flips = draft(self.planner.facts, self.recipe.model, LEVELS[0], self.planner.settings).augment.flip
        if not flips or self._nothing_to_gain(name, title):  # of digits and letters they mean something else
            return
        if name not in self.state.plans:
            why = self.who.from_first(lambda: self.planner.why_not_mirrored(model))
            self.state.plans[name] = "" if why else name
            if why:
                self._leave_out(name, title, why)
            self._save_state()
        if not self.state.plans[name]:
            return
        keep = self.who.from_first(lambda: self.planner.reserve(model, 0.0))
        try:
            mirrored = self._features(model, "train", mirrored=True, deadline=self.clock.deadline(keep))
        except Late:
            self.state.plans[name] = ""
            self._leave_out(name, title, "for the machine has become too slow")
            self._save_state()
            return
        groups = train.indices if self.data.train.groups is None else self.data.train.groups[train.indices]
        vectors, labels = torch.cat([train.vectors, mirrored.vectors]), torch.cat([train.labels, mirrored.labels])
        self._fit_probe(name, title, model, (vectors, labels, np.tile(groups, 2)), val)

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
        scores: Scores | TargetScores = answers
        if self.data.kind != "class":
            self.who.wait()  # the first process has written it
            scores = task_scores(answers, native.read_task(native.read_card(checkpoint), len(self.data.classes)))
        return Rung(name, title, scores, seconds, checkpoint, groups=self.data.val.groups)

    # ------------------------------------------------------------------------------------------------------- tuning

    def _tune(self, network: Network) -> None:
        model = replace(self.recipe.model, init_from=str(self.run / RUNGS / "probe"))
        plan = self.planner.tuning
        if given_keys(self.planner.settings) & {"model.lora", "model.freeze"}:
            self._train("tuned", "as you set it", partial(plan, network, model))
            return
        lora = replace(model, lora=RANK)
        self._train("lora", f"LoRA of rank {RANK}", partial(plan, network, lora, more_follows=True))
        self._train("whole", "whole network", partial(plan, network, model))

    def _train(self, name: str, title: str, plan: Callable[[], RungPlan]) -> None:
        """A training run of its own, in its own folder; `plan` gives its recipe, or why there is none."""
        folder = self.run / RUNGS / name
        if self._nothing_to_gain(name, title):
            return
        if name not in self.state.plans:
            planned = plan()
            self.state.plans[name] = "" if planned.recipe is None else to_toml(planned.recipe)
            for note in planned.notes:
                self.note(note)
            if planned.recipe is None:
                self._leave_out(name, title, planned.why_not)
            self.why_early = planned.why_short or self.why_early
            self._save_state()
        if not (text := self.state.plans[name]):
            return
        recipe, began = from_tables(parse_toml(text)), time.perf_counter()
        changed = bool(self.state.changes) and not (folder / RESULT).is_file()
        if changed:
            recipe = with_settings(recipe, self.state.changes)
        epochs = recipe.run.epochs
        self.note(f"{title}: {epochs} {'pass' if epochs == 1 else 'passes'} over {self.planner.facts.train:,} images")
        resume = (folder / "recipe.toml").exists()
        begin = Beginning(resume, changed and resume, self.data, since=began)
        try:
            result = fit_part(recipe, folder, begin, show=self.show, finishing=finish_rung)
        except Stopped as stopped:  # the whole run is resumed, and not this rung alone
            raise Stopped(str(stopped).replace(f"--resume {folder}", f"--resume {self.run}")) from None
        stored, labels = load_file(folder / ANSWERS), label_tensor(self.data.val.labels)
        rung = self._rung(name, title, Scores(stored["logits"], labels, stored["read"], 0.0), 0.0, folder / BEST)
        seconds = max(time.perf_counter() - began, float(result["seconds"]))  # it may have run before a resume
        self._add(replace(rung, seconds=seconds, result=result))
        self._save_state()

    def _nothing_to_gain(self, name: str, title: str) -> bool:
        if self.best is None or not self.best.perfect:
            return False
        self.why_early = "every validation image is right"
        if name not in {rung["name"] for rung in self.state.left_out}:
            self._leave_out(name, title, f"for {self.why_early} already", for_time=False)
        return True

    def _leave_out(self, name: str, title: str, why: str, *, for_time: bool = True) -> None:
        self.state.left_out.append({"name": name, "title": title, "why": why, "for_time": for_time})
        self.note(f"{title}: left out, {why}.")

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

    def _learning_curve(self, model: Network, train: FeatureSet, val: FeatureSet, probe: Probe) -> LearningCurve | None:
        """By the linear probe, whatever the best model is: it takes a second. Of classes only."""
        if self.data.kind != "class":
            return None
        seconds = CURVE * next(rung.seconds for rung in self.rungs if rung.name == "probe")
        keep = self.planner.reserve(model, 0.0)
        if not self.who.from_first(lambda: seconds < self.clock.left - keep):
            self.note("there was no time for the learning curve.")
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
            **best.val_numbers,
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
            late = report_deadline(self.clock)
            write_run_report(FinishedRun(*parts, trained_by=taught, held_out=held_out, deadline=late))
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
