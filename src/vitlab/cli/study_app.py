"""The studies and their options: each command is one function of vitlab.study, imported on use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.options import Checkpoint, Data, Format, Json, Recipe, SourcePath, TimedBatch

app = typer.Typer(
    help="Answer a question by many runs: one table, one plot.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def configs(
    what: Recipe,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=A,B", help="Values to compare; one value is simply set.")
    ] = None,
    dir: Annotated[
        Path | None,
        typer.Option(
            "--dir", "-o", metavar="FOLDER", help="Where all is kept. Default: studies/<recipe>-<what varies>."
        ),
    ] = None,
    format: Format = "table",
    json: Json = False,
) -> None:
    """Train all combinations of settings, and compare.

    run.seed=0,1,2 gives means and spreads. The same command again goes on where it was stopped. A run that fails is
    reported; the others go on (exit code 1).
    """
    from vitlab.cli.study import run
    from vitlab.study.configs import study_configs
    from vitlab.training.presets import find_recipe

    # vitlab study configs model.depth=4,6
    is_setting = what is not None and "=" in what and not Path(what).exists()
    changes = [*([what] if is_setting else []), *(settings or [])]
    name, recipe = find_recipe(None if is_setting else what)
    run(lambda command, show: study_configs(name, recipe, changes, dir, command=command, show=show), json, format)


@app.command()
def ssl(
    source: Data,
    methods: Annotated[str, typer.Option("--methods", metavar="A,B", help="What to compare.")] = "mae,dino",
    path: SourcePath = None,
    per_class: Annotated[int | None, typer.Option("--per-class", min=1, help="Labels of each class.")] = None,
    fraction: Annotated[
        float | None, typer.Option("--fraction", min=0.0, max=1.0, help="Share of the labels. Default: 0.1.")
    ] = None,
    pretrain: Annotated[
        list[str] | None, typer.Option("--pretrain", metavar="KEY=VALUE", help="Change the pre-training recipes.")
    ] = None,
    few: Annotated[
        list[str] | None, typer.Option("--few", metavar="KEY=VALUE", help="Change what learns from the few labels.")
    ] = None,
    pretrained: Annotated[
        list[str] | None,
        typer.Option("--pretrained", metavar="METHOD=CHECKPOINT", help="Judge this encoder; do not pre-train one."),
    ] = None,
    dir: Annotated[
        Path | None,
        typer.Option("--dir", "-o", metavar="FOLDER", help="Where all is kept. Default: studies/ssl-<data>."),
    ] = None,
    json: Json = False,
) -> None:
    """Does learning without labels pay?

    Pre-train, judge, fine-tune on few labels, and learn from scratch. Fine-tuned and from scratch are the same network
    with the same steps on the same pictures. --pretrained mae=bundled:mae judges an encoder that is there. The same
    command again goes on where it was stopped.
    """
    from vitlab.cli.study import run
    from vitlab.study.ssl import study_ssl
    from vitlab.training.recipe import DataRecipe

    data = DataRecipe(source, path, per_class=per_class, fraction=fraction)
    run(
        lambda command, show: study_ssl(
            *(data, methods.split(",")),
            pretrain=pretrain,
            few=few,
            pretrained=pretrained,
            folder=dir,
            command=command,
            show=show,
        ),
        json,
    )


@app.command()
def tokens(
    checkpoint: Checkpoint,
    source: Data,
    path: SourcePath = None,
    way: Annotated[
        list[str] | None,
        typer.Option("--way", metavar="tome:r=8|evit:keep=0.7|random:keep=0.7", help="Compare these, not the usual."),
    ] = None,
    batch: TimedBatch = 8,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Times that each way is timed, in turns.")] = 15,
    images: Annotated[
        int | None, typer.Option("--images", min=1, help="Judge on so many pictures, not on all.")
    ] = None,
    dir: Annotated[
        Path | None,
        typer.Option("--dir", "-o", metavar="FOLDER", help="Where all is kept. Default: studies/tokens-<run>."),
    ] = None,
    json: Json = False,
) -> None:
    """How much faster with fewer tokens, and at what cost?

    Merging, pruning and dropping at random, measured here.
    """
    from vitlab.cli.progress import counting
    from vitlab.cli.study import run
    from vitlab.export.timing import TimingOptions
    from vitlab.study.tokens import study_tokens
    from vitlab.training.recipe import DataRecipe

    data, timing = DataRecipe(source, path), TimingOptions(batch, rounds)
    run(
        lambda command, _: study_tokens(
            checkpoint, data, ways=way, timing=timing, images=images, folder=dir, command=command, watch=counting
        ),
        json,
        resumable=False,
    )


@app.command()
def scaling(
    models: Annotated[
        str, typer.Option("--models", metavar="A,B:KEY=VALUE", help="Names, with options of the model behind colons.")
    ] = "vit_tiny,vit_tiny:attention=explicit,swin_tiny,resnet18",
    sizes: Annotated[
        str | None, typer.Option("--sizes", metavar="96,128,...", help="Sides of square images. Default: 96 to 768.")
    ] = None,
    batch: TimedBatch = 1,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Times that each way is timed, in turns.")] = 15,
    dir: Annotated[
        Path | None, typer.Option("--dir", "-o", metavar="FOLDER", help="Where all is kept. Default: studies/scaling.")
    ] = None,
    json: Json = False,
) -> None:
    """How do time and memory grow with the image?

    Measured, with the fitted exponent, beside the formula. The same command again goes on where it was stopped.
    OMP_NUM_THREADS=1 measures one thread.
    """
    from vitlab.cli.study import run
    from vitlab.study.model_spec import parse_numbers
    from vitlab.study.scaling import study_scaling

    sides = None if sizes is None else parse_numbers("--sizes", sizes)
    run(
        lambda command, show: study_scaling(
            models, sides, batch=batch, rounds=rounds, folder=dir, command=command, show=show
        ),
        json,
    )


@app.command("data-efficiency")
def data_efficiency(
    source: Data,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Of all runs, as for train; of one model: resnet:optim.lr=0.05."),
    ] = None,
    models: Annotated[
        str,
        typer.Option("--models", metavar="A,B:KEY=VALUE", help="vit, deit, swin, resnet, fitting the data; or names."),
    ] = "vit,deit,swin,resnet",
    fractions: Annotated[
        str, typer.Option("--fractions", metavar="0.01,0.1,1", help="Shares of the training pictures.")
    ] = "0.01,0.1,1",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each: seeds 0, 1, ...")] = 1,
    path: SourcePath = None,
    dir: Annotated[
        Path | None,
        typer.Option(
            "--dir", "-o", metavar="FOLDER", help="Where all is kept. Default: studies/data-efficiency-<data>."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """How many pictures does each network need?

    Accuracy against the size of the training set, from scratch. Every run has the same number of steps: those of
    run.epochs over the largest share. A deit is taught by the resnet that learned from the same pictures. The same
    command again goes on where it was stopped.
    """
    from vitlab.cli.study import run
    from vitlab.study.data_efficiency import study_data_efficiency
    from vitlab.study.model_spec import parse_numbers
    from vitlab.training.recipe import DataRecipe

    data, shares = DataRecipe(source, path), parse_numbers("--fractions", fractions, float)
    run(
        lambda command, show: study_data_efficiency(
            data, models, shares, seeds=seeds, settings=settings, folder=dir, command=command, show=show
        ),
        json,
    )
