"""The verbs of `vitlab explain` and their own options; `vitlab.explain.figures` draws."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vitlab.cli import complete
from vitlab.cli.explain.options import Options, parse_list, parse_numbers, parse_point, parse_query, verb
from vitlab.errors import UsageError
from vitlab.explain.methods import BY_CLASS, SHOWN

app = typer.Typer(
    help="Draw what a model sees, on the images themselves.\n\nThe numbers go beside each drawing as .npz.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Target = Annotated[
    str | None, typer.Option("--target", metavar="CLASS", help="Name or number. Default: each image's top class.")
]
Text = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="SENTENCE", help="Sentence to explain with a CLIP (repeatable)."),
]
Methods = Annotated[
    str | None, typer.Option("--methods", metavar=",".join(SHOWN), help="Methods, separated by commas.")
]


def run(options: Options, figure: str, **arguments: Any) -> None:
    """Imports torch on use, so that --help does not."""
    from vitlab.cli.explain import run

    run.run(options, figure, **arguments)


@verb(app)
def attention(
    options: Options,
    layers: Annotated[str | None, typer.Option(metavar="0,5,-1|all", help="Which layers; -1 is the last.")] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="0,3|mean|all", help="Which heads. Default: all, or mean where their number differs by layer."
        ),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(metavar="cls|mean|X,Y", help="Query: a token, or the patch under pixel X,Y of the image."),
    ] = None,
) -> None:
    """Where a token looks, layer by layer and head by head.

    One image: a grid of layers and heads. Several: a row for each, mean over heads.
    """
    run(
        options,
        "attention",
        layers=None if layers is None else parse_numbers(layers, "--layers", "all"),
        heads=None if heads is None else parse_numbers(heads, "--heads", "all", "mean"),
        query=parse_query(query),
    )


@verb(app)
def rollout(
    options: Options,
    discard: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of the lowest weights of each layer to drop, e.g. 0.9.")
    ] = 0.0,
) -> None:
    """Attention multiplied through all layers.

    Figure 6 of the ViT paper.
    """
    run(options, "rollout", discard=discard)


@verb(app)
def relevance(
    options: Options,
    method: Annotated[
        str,
        typer.Option(metavar="|".join(BY_CLASS), help="Method.", autocompletion=complete.one_of(*BY_CLASS)),
    ] = "relevance",
    target: Target = None,
    text: Text = None,
) -> None:
    """Which patches speak for a class, or for a sentence."""
    if text and target is not None:
        raise UsageError("--target names one of a model's classes; with --text the sentences are what is asked for.")
    run(options, "relevance", texts=text or [], method=method, target=target)


@verb(app)
def compare(
    options: Options,
    other: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="CHECKPOINT",
            help="A second model, on the same images.",
            autocompletion=complete.checkpoints,
        ),
    ] = None,
    methods: Methods = None,
    target: Target = None,
    text: Text = None,
) -> None:
    """Two checkpoints or methods side by side, and how they agree."""
    names = None if methods is None else parse_list(methods, "--methods")
    run(options, "compare", texts=text or [], second=other, methods=names, target=target)


@verb(app, needs_images=False)
def figure7(options: Options) -> None:
    """Figure 7 of the ViT paper: filters, positions, distances.

    Position similarity, attention distance and entropy, and the lengths of the tokens. Without images, only what the
    weights show.
    """
    run(options, "figure7")


@verb(app)
def features(
    options: Options,
    joint: Annotated[
        bool, typer.Option("--joint/--each", help="Same colours for all images, or separate ones.")
    ] = True,
    at: Annotated[
        str | None,
        typer.Option(metavar="X,Y", help="Also similarity to the patch under this pixel of the first image."),
    ] = None,
    mask: Annotated[bool, typer.Option("--mask", help="Also the foreground; colours of the foreground only.")] = False,
    neighbours: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Instead: the most similar images of this folder.")
    ] = None,
    k: Annotated[int, typer.Option("--top", "-k", help="How many neighbours.", min=1)] = 5,
    layer: Annotated[int, typer.Option(help="Tokens after this layer.")] = -1,
) -> None:
    """Compare patches: colours, similarity, neighbours.

    The colours are principal components; optionally of the foreground only, or the nearest images of a folder.
    """
    if neighbours is not None:
        run(options, "neighbours", folder=neighbours, k=k)
    else:
        point = None if at is None else parse_point(at, "--at")
        run(options, "features", joint=joint, at=point, mask=mask, layer=layer)


@verb(app, batch_size=32)
def faithfulness(
    options: Options,
    methods: Methods = None,
    kinds: Annotated[
        str, typer.Option(metavar="deletion,insertion,road", help="Which tests.")
    ] = "deletion,insertion,road",
    steps: Annotated[int, typer.Option(help="Steps of the curves.", min=1)] = 16,
    target: Target = None,
    text: Text = None,
) -> None:
    """How faithful each method is: a table, and curves.

    Measures the class probability while the patches with the highest scores are removed.
    """
    names = None if methods is None else parse_list(methods, "--methods")
    tests = parse_list(kinds, "--kinds")
    run(options, "faithfulness", texts=text or [], methods=names, kinds=tests, steps=steps, target=target)


@verb(app)
def reconstruct(
    options: Options,
    mask_ratio: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Share of the patches to hide. Default: the model's own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed hides other patches.")] = 0,
) -> None:
    """Reconstruct hidden patches with a masked autoencoder.

    Figure 2 of the MAE paper.
    """
    run(options, "reconstruct", encoder=False, mask_ratio=mask_ratio, seed=seed)


@verb(app)
def pruned(
    options: Options,
    reducer: Annotated[
        str, typer.Option(metavar="tome:r=8|evit:keep=0.7|random:keep=0.7", help="Token reducer.")
    ] = "tome:r=8",
) -> None:
    """Which patches a reducer kept, merged or dropped, by layer."""
    run(options, "pruned", reducer=reducer)
