"""vitlab.train: train by a recipe, on a data source or on a folder of images. The command `vitlab train` calls it.

result = vitlab.train("digits", {"run.epochs": 3})
model = vitlab.load(result.model)
vitlab.train("photos/", minutes=10)                        # picks what is not given, to end in time
vitlab.train(["photos/", "more/"])                         # several folders: classes of one name are one class
vitlab.train(resume="runs/photos")
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from vitlab.checkpoints import native
from vitlab.errors import UsageError
from vitlab.images.sources import SOURCES, sources_of
from vitlab.images.sources.table import read_bytes
from vitlab.models import registry
from vitlab.models.config import option_paths
from vitlab.tables import Table, Tabular
from vitlab.training import processes, run_lock
from vitlab.training.autopick import check, pick
from vitlab.training.job import suited_recipe
from vitlab.training.ladder import climb
from vitlab.training.ladder_plan import ladder_or_scratch, with_start
from vitlab.training.loop import Show, Silent, check_is_run, fit
from vitlab.training.objectives import DEFAULT
from vitlab.training.presets import find_recipe, join_sources, own_values, recipes
from vitlab.training.recipe import AUTO, Recipe, read_recipe, setting, with_settings, with_value
from vitlab.training.runs import read_run
from vitlab.training.state import check_place

CORRECTIONS = "cleaned.csv"  # in the run's folder


@dataclass(frozen=True)
class TrainedRun(Tabular):
    """A finished run."""

    folder: Path
    result: dict[str, Any]  # what result.json holds

    @property
    def model(self) -> Path:
        """The best checkpoint, for vitlab.load."""
        return self.folder / "best"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    def table(self) -> Table:
        run = read_run(self.folder)
        notes = [f"model: {self.model}", f"report: {self.report}"]
        return replace(run.table(), notes=notes)

    def to_dict(self) -> dict[str, Any]:
        """As `vitlab train --json` prints it."""
        return {"model": str(self.model), "report": str(self.report), **self.result}


def train(
    what: str | Path | Sequence[str | Path] | None = None,
    settings: Sequence[str] | Mapping[str, object] = (),
    *,
    resume: str | Path | None = None,
    rejoin: bool = False,
    changed: bool = False,
    minutes: float | None = None,
    show: Show | None = None,
    since: float | None = None,
) -> TrainedRun:
    """Train to the end. `what`: a recipe's name or file, a data source, a folder or table of images, or several;
    default: digits.

    `settings` change values of the recipe: {"optim.lr": 3e-4} or ["optim.lr=3e-4"]. `resume` continues a run that was
    stopped; `changed`: with another recipe than it began with. `rejoin` continues the run in run.dir, where there is
    one: the same command starts it and goes on. `minutes` picks all that is not given, so that the run ends so long
    after `since` (time.perf_counter(); default: now). SIGTERM and Ctrl-C save the run and raise Stopped.
    """
    if isinstance(settings, Mapping):
        texts = [setting(*pair) for pair in settings.items()]
    else:
        texts = [settings] if isinstance(settings, str) else list(settings)
    if what is not None and not isinstance(what, str | Path):
        what = join_sources([str(part) for part in what])
    what = None if what is None else str(what)
    show, since = show or Silent(), time.perf_counter() if since is None else since
    if what is not None and resume is not None:
        raise UsageError(f"{what} starts a new run, but resume={resume} continues one: leave one of the two out.")
    if changed and resume is None:
        raise UsageError("--changed is only valid with --resume: add --resume RUN, or leave it out.")
    source = _source(what, minutes, resume) if minutes is not None else None
    name, recipe, run = "", Recipe(), None
    if source is not None and minutes is not None:
        recipe = _planned(source, minutes, texts)
        name = run_name(recipe.data.source)
    elif resume is not None:
        run = Path(resume)
        if run_lock.is_first_process():  # other hosts need not have the folder
            check_is_run(run)
    else:
        name, recipe = find_recipe(what)
        recipe, notes = _for_model(recipe, with_settings(Recipe(model=recipe.model), texts).model.name)
        for note in notes:
            show.note(note)
        recipe = suited_recipe(ladder_or_scratch(with_settings(recipe, texts), texts))
        recipe = with_start(recipe, show.note)
        if recipe.run.ladder and Path(what or "").suffix == ".toml":
            texts = [*own_values(Path(what or "")), *texts]
    run = run or (Path(recipe.run.dir) if recipe.run.dir else None)
    if rejoin and resume is None:
        if run is None:
            raise UsageError("--rejoin looks for a run in run.dir: name it, e.g. run.dir=runs/mine.")
        begun = run / "recipe.toml"
        if processes.start(recipe.run.device).from_first(begun.is_file):
            return train(resume=run, show=show, since=since)
    corrections = None if recipe.data.apply is None else read_bytes(Path(recipe.data.apply).expanduser())
    with ExitStack() as locks:
        if run is None:  # the first process of torchrun chooses a name for all
            claim = partial(_claim, Path("runs") / name, locks, show.note)
            run = processes.start(recipe.run.device).from_first(claim)
        else:
            check_place(run)
            locks.enter_context(run_lock.hold(run, show.note))
        if resume is not None:
            recipe = _saved_recipe(run, texts)
        elif corrections is not None:
            recipe = with_value(recipe, "data.apply", _keep(corrections, run, processes.start(recipe.run.device)))
            texts = [*texts, setting("data.apply", recipe.data.apply)]
        if recipe.run.ladder:
            options: dict[str, Any] = dict(settings=texts, show=show, since=since)
            result = climb(recipe, run, resume=resume is not None, changed=changed, **options)
        elif source is not None and minutes is not None:
            learned = [] if recipe.objective.name == DEFAULT else [setting("objective.name", recipe.objective.name)]
            picked = pick(source, minutes, [*texts, *learned], since=since, show=show)
            reasons = [*picked.data.notes, *picked.reasons]
            for reason in picked.reasons:
                show.note(reason)
            result = fit(picked.recipe, run, show=show, data=picked.data, notes=reasons, since=since)
        else:
            result = fit(recipe, run, resume=resume is not None, changed=changed, show=show, since=since)
    return TrainedRun(run, result)


def _saved_recipe(run: Path, settings: list[str]) -> Recipe:
    """The recipe of a run, changed; the first process reads it for all, whose hosts need not have the folder."""
    file = run / "recipe.toml"
    device = read_recipe(file).run.device if file.is_file() else "auto"
    return processes.start(device).from_first(lambda: with_settings(read_recipe(file), settings))


def _keep(corrections: bytes, run: Path, who: processes.Processes) -> str:
    """The run's own copy of a table of corrections: editing the original does not change what a resumed run sees."""
    copy = run / CORRECTIONS
    who.only_first(lambda: native.write_whole(copy, lambda temporary: temporary.write_bytes(corrections)))
    return str(copy)


def _planned(source: str, minutes: float, settings: list[str]) -> Recipe:
    """The recipe of a run that is planned for so many minutes: from trained weights, up the ladder, where there are
    some; somebody's own images start from the best that can be had.
    """
    check(minutes, settings)
    recipe = with_value(with_value(Recipe(), "data.source", source), "run.ladder", True)
    if source not in SOURCES:
        recipe = with_value(recipe, "model.init_from", AUTO)
    recipe = suited_recipe(ladder_or_scratch(with_settings(recipe, settings), settings))
    return with_value(recipe, "run.minutes", float(minutes))


def _for_model(recipe: Recipe, name: str) -> tuple[Recipe, list[str]]:
    """The recipe for another model: options that its own model has and the other one lacks are left out."""
    if not name or name == recipe.model.name:
        return recipe, []
    valid = option_paths(type(registry.find(name)[0].config))
    options = {option: value for option, value in recipe.model.options.items() if option in valid}
    left_out = [f"{option}={value}" for option, value in recipe.model.options.items() if option not in valid]
    if not left_out:
        return recipe, []
    note = f"{name} has no {', '.join(left_out)}, which the recipe sets for {recipe.model.name}: left out."
    return replace(recipe, model=replace(recipe.model, options=options)), [note]


def _source(what: str | None, minutes: float, resume: str | Path | None) -> str:
    """The data that `minutes` plans a run for; a recipe is refused, because it has made the choice itself."""
    if resume is not None:
        raise UsageError(f"--minutes {minutes:g} plans a new run, but --resume goes on with the plan of {resume}.")
    source = what or "digits"
    is_recipe = source in recipes() and source not in SOURCES and not Path(source).is_dir()
    if is_recipe or Path(source).suffix == ".toml":
        data = find_recipe(source)[1].data.source
        data = data if data != Recipe().data.source else "FOLDER"
        raise UsageError(
            f"{source} is a recipe, which fixes the model and the schedule that --minutes would pick. Leave --minutes "
            f"out, or name the data: vitlab train {data} --minutes {minutes:g}"
        )
    return source


def run_name(source: str) -> str:
    """The name of a run on this source: photos for images/photos, train-0..9 for train-{0..9}.tar."""
    paths = [Path(part) for part in sources_of(source)]
    name = "-".join(path.resolve().stem if path.exists() else path.stem for path in paths)
    return re.sub(r"[^\w.-]+", "", name) or "run"


def _claim(folder: Path, locks: ExitStack, note: Callable[[str], object]) -> Path:
    """runs/name, or runs/name-2, ... where that is taken; locked, so that no other process takes it."""
    number, free = 1, folder
    while True:
        with suppress(FileExistsError, run_lock.RunLockedError):
            locks.enter_context(run_lock.hold(free, note, new=True))
            return free
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
