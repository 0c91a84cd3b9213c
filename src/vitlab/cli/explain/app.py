"""The verbs of `vitlab explain` and their own options. The modules beside this one do the work, imported on use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli import complete
from vitlab.cli.explain.options import Options, verb
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
    from vitlab.cli.explain import maps

    maps.attention(options, layers, heads, query)


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
    from vitlab.cli.explain import maps

    maps.rollout(options, discard)


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
    from vitlab.cli.explain import maps

    maps.relevance(options, method, target, text or [])


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
    from vitlab.cli.explain import maps

    maps.compare(options, other, methods, target, text or [])


@verb(app, needs_images=False)
def figure7(options: Options) -> None:
    """Figure 7 of the ViT paper: filters, positions, distances.

    Position similarity, attention distance and entropy, and the lengths of the tokens. Without images, only what the
    weights show.
    """
    from vitlab.cli.explain import figures

    figures.figure7(options)


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
    from vitlab.cli.explain import figures

    if neighbours is not None:
        figures.neighbours(options, neighbours, k)
    else:
        figures.features(options, joint, at, mask, layer)


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
    from vitlab.cli.explain import figures

    figures.faithfulness(options, methods, kinds, steps, target, text or [])


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
    from vitlab.cli.explain import figures

    figures.reconstruct(options, mask_ratio, seed)


@verb(app)
def pruned(
    options: Options,
    reducer: Annotated[
        str, typer.Option(metavar="tome:r=8|evit:keep=0.7|random:keep=0.7", help="Token reducer.")
    ] = "tome:r=8",
) -> None:
    """Which patches a reducer kept, merged or dropped, by layer."""
    from vitlab.cli.explain import figures

    figures.pruned(options, reducer)
