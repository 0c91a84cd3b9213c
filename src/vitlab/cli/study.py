"""vitlab study: each command is one function of vitlab.study, and its tables are printed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitlab.cli.console import print_json_text, print_plain, print_tables, say, say_notes
from vitlab.cli.options import (
    ROUNDS,
    BatchSize,
    Checkpoint,
    Commands,
    Data,
    Format,
    Json,
    Recipe,
    SourcePath,
    folder_option,
)
from vitlab.cli.progress import counting, following_downloads
from vitlab.cli.runs import check_format
from vitlab.cli.train import ProgressBar, StderrLines

if TYPE_CHECKING:
    from vitlab.study.study import Study
    from vitlab.training.loop import Show

app = Commands("Answer a question by many runs: one table, one plot.")


@app.add
def configs(
    what: Recipe,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=A,B", help="Values to compare; a single value is set for all.")
    ] = None,
    dir: Annotated[Path | None, folder_option("studies/<recipe>-<what varies>")] = None,
    format: Format = "table",
    json: Json = False,
) -> None:
    """Train all combinations of settings, and compare.

    run.seed=0,1,2 gives means and spreads. After an interruption the same command continues. A run that fails is
    reported; the others continue (exit code 1).
    """
    from vitlab.study.configs import study_configs
    from vitlab.training.presets import find_recipe

    is_setting = "=" in what and not Path(what).exists()  # vitlab study configs model.depth=4,6
    changes = [*([what] if is_setting else []), *(settings or [])]
    name, recipe = find_recipe(None if is_setting else what)
    _run(lambda command, show: study_configs(name, recipe, changes, dir, command=command, show=show), json, format)


@dataclass(frozen=True)
class LabelOptions:
    """Labels to learn from."""

    path: SourcePath = None
    per_class: Annotated[int | None, typer.Option("--per-class", min=1, help="Number of labels per class.")] = None
    fraction: Annotated[
        float | None, typer.Option("--fraction", min=0.0, max=1.0, help="Share of the labels. Default: 0.1.")
    ] = None


@dataclass(frozen=True)
class PretrainOptions:
    pretrain: Annotated[
        list[str] | None, typer.Option("--pretrain", metavar="KEY=VALUE", help="Change the pre-training recipes.")
    ] = None
    few: Annotated[
        list[str] | None, typer.Option("--few", metavar="KEY=VALUE", help="Change the recipes for the few labels.")
    ] = None
    pretrained: Annotated[
        list[str] | None,
        typer.Option("--pretrained", metavar="METHOD=CHECKPOINT", help="Evaluate this encoder; do not pre-train one."),
    ] = None


@app.add
def ssl(
    source: Data,
    labels: LabelOptions,
    recipes: PretrainOptions,
    methods: Annotated[str, typer.Option("--methods", metavar="A,B", help="Methods to compare.")] = "mae,dino",
    dir: Annotated[Path | None, folder_option("studies/ssl-<data>")] = None,
    json: Json = False,
) -> None:
    """Does learning without labels pay?

    Pre-train, evaluate, fine-tune on few labels, and train from scratch. Fine-tuned and from scratch are the same
    network with the same steps on the same images. --pretrained mae=bundled:mae evaluates an existing encoder. After an
    interruption the same command continues.
    """
    from vitlab.study.ssl import study_ssl
    from vitlab.training.recipe import DataRecipe

    data, names = DataRecipe(source, **vars(labels)), methods.split(",")
    _run(lambda cmd, show: study_ssl(data, names, **vars(recipes), folder=dir, command=cmd, show=show), json)


@dataclass(frozen=True)
class BatchTiming:
    """How the time of a batch is measured."""

    batch: BatchSize = 8
    rounds: Annotated[int, typer.Option("--rounds", min=2, help=ROUNDS)] = 15


@dataclass(frozen=True)
class ScalingTiming(BatchTiming):
    batch: BatchSize = 1


@app.add
def tokens(
    checkpoint: Checkpoint,
    source: Data,
    path: SourcePath = None,
    way: Annotated[
        list[str] | None,
        typer.Option(
            "--way",
            metavar="tome:r=8|evit:keep=0.7|random:keep=0.7",
            help="Reducers to compare instead of the default ones (repeatable).",
        ),
    ] = None,
    *,
    timing: BatchTiming,
    images: Annotated[
        int | None, typer.Option("--images", min=1, help="Number of images to evaluate on. Default: all.")
    ] = None,
    dir: Annotated[Path | None, folder_option("studies/tokens-<run>")] = None,
    json: Json = False,
) -> None:
    """How much faster with fewer tokens, and at what cost?

    Merging, pruning and dropping at random, measured here.
    """
    from vitlab.export.timing import TimingOptions
    from vitlab.study.tokens import study_tokens
    from vitlab.training.recipe import DataRecipe

    data, options = DataRecipe(source, path), TimingOptions(timing.batch, timing.rounds)
    _run(
        lambda command, _: study_tokens(
            checkpoint, data, ways=way, timing=options, images=images, folder=dir, command=command, watch=counting
        ),
        json,
        resumable=False,
    )


@app.add
def scaling(
    models: Annotated[
        str, typer.Option("--models", metavar="A,B:KEY=VALUE", help="Model names, each with its options after colons.")
    ] = "vit_tiny,vit_tiny:attention=explicit,swin_tiny,resnet18",
    sizes: Annotated[
        str | None, typer.Option("--sizes", metavar="96,128,...", help="Sides of square images. Default: 96 to 768.")
    ] = None,
    *,
    timing: ScalingTiming,
    dir: Annotated[Path | None, folder_option("studies/scaling")] = None,
    json: Json = False,
) -> None:
    """How do time and memory grow with the image?

    Measured, with the fitted exponent, beside the formula. After an interruption the same command continues.
    OMP_NUM_THREADS=1 measures one thread.
    """
    from vitlab.study.model_spec import parse_numbers
    from vitlab.study.scaling import study_scaling

    sides = None if sizes is None else parse_numbers("--sizes", sizes)
    options = vars(timing)
    _run(lambda command, show: study_scaling(models, sides, **options, folder=dir, command=command, show=show), json)


@app.add
def data_efficiency(
    source: Data,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="For all runs, as for train; for one model: resnet:optim.lr=0.05."),
    ] = None,
    models: Annotated[
        str,
        typer.Option(
            "--models", metavar="A,B:KEY=VALUE", help="vit, deit, swin, resnet, sized for the data; or names."
        ),
    ] = "vit,deit,swin,resnet",
    fractions: Annotated[
        str, typer.Option("--fractions", metavar="0.01,0.1,1", help="Shares of the training images.")
    ] = "0.01,0.1,1",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each: seeds 0, 1, ...")] = 1,
    path: SourcePath = None,
    dir: Annotated[Path | None, folder_option("studies/data-efficiency-<data>")] = None,
    json: Json = False,
) -> None:
    """How many images does each network need?

    Accuracy against the size of the training set, from scratch. Every run has the same number of steps: those of
    run.epochs over the largest share. A deit is taught by the resnet trained on the same images. After an interruption
    the same command continues.
    """
    from vitlab.study.data_efficiency import study_data_efficiency
    from vitlab.study.model_spec import parse_numbers
    from vitlab.training.recipe import DataRecipe

    data, shares = DataRecipe(source, path), parse_numbers("--fractions", fractions, float)
    _run(
        lambda command, show: study_data_efficiency(
            data, models, shares, seeds=seeds, settings=settings, folder=dir, command=command, show=show
        ),
        json,
    )


def _run(study: Callable[[str, Show], Study], json: bool, format: str = "table", resumable: bool = True) -> None:
    """Call study(command line, progress) and print its result."""
    from vitlab.training.loop import Stopped

    check_format(format)
    command = shlex.join(["vitlab", *sys.argv[1:]])
    on_screen = sys.stdout.isatty() and format == "table" and not json
    try:
        with following_downloads(), ProgressBar() if on_screen else StderrLines() as show:
            finished = study(command, show)
    except (Stopped, KeyboardInterrupt):
        if not resumable:
            raise
        say(f"vitlab: stopped, and saved. The same command continues: {command}")
        raise SystemExit(130) from None
    _print(finished, "json" if json else format)
    if failures := finished.failures():
        for line in failures:
            say(line)
        raise SystemExit(1)


def _print(study: Study, format: str) -> None:
    from vitlab.study.study import PLOT, as_table
    from vitlab.training.runlog import to_json
    from vitlab.training.runs import to_csv, to_markdown

    if format == "json":
        print_json_text(to_json(study.to_json()))
    elif format == "csv":
        print_plain(to_csv(study.rows), end="")
    elif format == "markdown":
        print_plain("\n".join(map(to_markdown, study.tables())), end="")
    else:
        print_tables(map(as_table, study.tables()))
    say_notes(study.notes)
    plot = study.folder / PLOT
    say(f"table: {study.folder / 'table.md'}" + (f"\nplot:  {plot}" if plot.is_file() else ""))
