"""The verbs of `vitlab explain` and their options. What they do is in the modules beside this one, imported on use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli import complete
from vitlab.cli.options import BatchSize, Checkpoint, MaybePictures, Pictures

app = typer.Typer(
    help="Draw what a model sees, on the pictures themselves.\n\nThe numbers go beside each drawing as .npz.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Out = Annotated[
    Path | None,
    typer.Option(
        "-o", "--out", metavar="FILE", help="File to draw: .png, .svg, .pdf, or .html. Default: explain-VERB.png."
    ),
]
Html = Annotated[bool, typer.Option("--html", help="Also write one self-contained page to explore in a browser.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: top classes, files written, scores.")]
Size = Annotated[
    str | None,
    typer.Option("--image-size", metavar="HxW", help="Another input size than the model's own, for finer maps."),
]
Target = Annotated[
    str | None, typer.Option("--target", metavar="CLASS", help="Name or number. Default: each picture's top class.")
]
Text = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="SENTENCE", help="What a CLIP is asked for; again for another sentence."),
]
Methods = Annotated[str | None, typer.Option("--methods", metavar="A,B", help="Ways to rate patches, by name.")]


@app.command()
def attention(
    checkpoint: Checkpoint,
    images: Pictures,
    layers: Annotated[str | None, typer.Option(metavar="0,5,-1|all", help="Which layers; -1 is the last.")] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="0,3|mean|all", help="Which heads. Default: all, or mean where layers have unlike numbers."
        ),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(metavar="cls|mean|X,Y", help="Who looks: a token, or the patch under pixel X,Y of the picture."),
    ] = None,
    out: Out = None,
    html: Html = False,
    image_size: Size = None,
    batch_size: BatchSize = 8,
    json: Json = False,
) -> None:
    """Where a token looks, layer by layer and head by head.

    One picture: a grid of layers and heads. Several: a row for each, mean over heads.
    """
    from vitlab.cli.explain import maps
    from vitlab.cli.explain.job import Options

    maps.attention(
        Options("attention", checkpoint, images, out, html, image_size, batch_size, json), layers, heads, query
    )


@app.command()
def rollout(
    checkpoint: Checkpoint,
    images: Pictures,
    discard: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of the lowest weights of each layer to drop, e.g. 0.9.")
    ] = 0.0,
    out: Out = None,
    html: Html = False,
    image_size: Size = None,
    batch_size: BatchSize = 8,
    json: Json = False,
) -> None:
    """Attention multiplied through all layers.

    Figure 6 of the ViT paper.
    """
    from vitlab.cli.explain import maps
    from vitlab.cli.explain.job import Options

    maps.rollout(Options("rollout", checkpoint, images, out, html, image_size, batch_size, json), discard)


@app.command()
def relevance(
    checkpoint: Checkpoint,
    images: Pictures,
    method: Annotated[
        str,
        typer.Option(
            metavar="relevance|grad_cam|gradient_x_input",
            help="How it is measured.",
            autocompletion=complete.one_of("relevance", "grad_cam", "gradient_x_input"),
        ),
    ] = "relevance",
    target: Target = None,
    text: Text = None,
    out: Out = None,
    html: Html = False,
    image_size: Size = None,
    batch_size: BatchSize = 8,
    json: Json = False,
) -> None:
    """Which patches speak for a class, or for a sentence."""
    from vitlab.cli.explain import maps
    from vitlab.cli.explain.job import Options

    options = Options("relevance", checkpoint, images, out, html, image_size, batch_size, json, tuple(text or ()))
    maps.relevance(options, method, target)


@app.command()
def compare(
    checkpoint: Checkpoint,
    images: Pictures,
    other: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="CHECKPOINT",
            help="A second model, on the same pictures.",
            autocompletion=complete.checkpoints,
        ),
    ] = None,
    methods: Methods = None,
    target: Target = None,
    text: Text = None,
    out: Out = None,
    html: Html = False,
    image_size: Size = None,
    batch_size: BatchSize = 8,
    json: Json = False,
) -> None:
    """Two checkpoints or methods side by side, and how they agree.

    Methods are attention, rollout, relevance, grad_cam and gradient_x_input.
    """
    from vitlab.cli.explain import maps
    from vitlab.cli.explain.job import Options

    options = Options("compare", checkpoint, images, out, html, image_size, batch_size, json, tuple(text or ()))
    maps.compare(options, other, methods, target)


@app.command()
def figure7(
    checkpoint: Checkpoint,
    images: MaybePictures = None,
    out: Out = None,
    html: Html = False,
    image_size: Size = None,
    batch_size: BatchSize = 8,
    json: Json = False,
) -> None:
    """Figure 7 of the ViT paper: filters, positions, distances.

    Position similarity, attention distance and entropy, and the lengths of the tokens. Without pictures, only what the
    weights alone tell.
    """
    from vitlab.cli.explain import figures
    from vitlab.cli.explain.job import Options

    figures.figure7(Options("figure7", checkpoint, images or [], out, html, image_size, batch_size, json))


@app.command()
def features(
    checkpoint: Checkpoint,
    images: Pictures,
    joint: Annotated[bool, typer.Option("--joint/--each", help="Colours shared by all pictures, or not.")] = True,
    at: Annotated[
        str | None,
        typer.Option(metavar="X,Y", help="Also likeness to the patch under this pixel of the first picture."),
    ] = None,
    mask: Annotated[bool, typer.Option("--mask", help="Also the foreground; colours of it alone.")] = False,
    neighbours: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Instead: the most alike pictures of this folder.")
    ] = None,
    k: Annotated[int, typer.Option("--top", "-k", help="How many neighbours.", min=1)] = 5,
    layer: Annotated[int, typer.Option(help="Tokens after this layer.")] = -1,
    out: Out = None,
    html: Html = False,
    image_size: Size = None,
    batch_size: BatchSize = 8,
    json: Json = False,
) -> None:
    """What patches have in common: colours, likeness, neighbours.

    The colours are principal components; on request the foreground alone, or the nearest pictures of a folder.
    """
    from vitlab.cli.explain import figures
    from vitlab.cli.explain.job import Options

    options = Options("features", checkpoint, images, out, html, image_size, batch_size, json)
    if neighbours is not None:
        figures.neighbours(options, neighbours, k)
    else:
        figures.features(options, joint, at, mask, layer)


@app.command()
def faithfulness(
    checkpoint: Checkpoint,
    images: Pictures,
    methods: Methods = None,
    kinds: Annotated[
        str, typer.Option(metavar="deletion,insertion,road", help="Which tests.")
    ] = "deletion,insertion,road",
    steps: Annotated[int, typer.Option(help="Steps of the curves.", min=1)] = 16,
    target: Target = None,
    text: Text = None,
    out: Out = None,
    html: Html = False,
    image_size: Size = None,
    batch_size: BatchSize = 32,
    json: Json = False,
) -> None:
    """How true each method is: a table, and curves.

    What happens when the patches go that it calls important.
    """
    from vitlab.cli.explain import figures
    from vitlab.cli.explain.job import Options

    options = Options("faithfulness", checkpoint, images, out, html, image_size, batch_size, json, tuple(text or ()))
    figures.faithfulness(options, methods, kinds, steps, target)


@app.command()
def reconstruct(
    checkpoint: Checkpoint,
    images: Pictures,
    mask_ratio: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Share of the patches to hide. Default: the model's own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed hides other patches.")] = 0,
    out: Out = None,
    html: Html = False,
    image_size: Size = None,
    batch_size: BatchSize = 8,
    json: Json = False,
) -> None:
    """What a masked autoencoder paints on hidden patches.

    Figure 2 of the MAE paper.
    """
    from vitlab.cli.explain import reconstruct as verb
    from vitlab.cli.explain.job import Options

    options = Options("reconstruct", checkpoint, images, out, html, image_size, batch_size, json)
    verb.reconstruct(options, mask_ratio, seed)


@app.command()
def pruned(
    checkpoint: Checkpoint,
    images: Pictures,
    reducer: Annotated[
        str, typer.Option(metavar="tome:r=8|evit:keep=0.7|random:keep=0.7", help="What makes fewer tokens.")
    ] = "tome:r=2",
    out: Out = None,
    html: Html = False,
    image_size: Size = None,
    batch_size: BatchSize = 8,
    json: Json = False,
) -> None:
    """Which patches a reducer kept, merged or dropped, by layer."""
    from vitlab.cli.explain import figures
    from vitlab.cli.explain.job import Options

    figures.pruned(Options("pruned", checkpoint, images, out, html, image_size, batch_size, json), reducer)
