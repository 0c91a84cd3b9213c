"""POST /predict, /embed, /zeroshot, /explain: the library's own functions on one picture, as JSON."""

from __future__ import annotations

import io
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from PIL import Image
from pydantic import BaseModel, Field
from torch import Tensor

from vitlab.explain.inputs import Batch
from vitlab.explain.methods import METHODS
from vitlab.explain.relevance import class_numbers
from vitlab.explain.sentences import ask
from vitlab.inference import Labels, among, class_labels, embed_labels, ranked
from vitlab.serve.asking import Case, answer
from vitlab.serve.computing import computed
from vitlab.serve.errors import Problem, RefusedError
from vitlab.serve.house import Served
from vitlab.serve.uploads import Prepared
from vitlab.text.templates import LISTS

router = APIRouter()

WAYS = tuple(name for name in METHODS if name != "random")
BY_CLASS = ("relevance", "grad_cam", "gradient_x_input")
LONGEST = 300  # characters of a label or sentence
SENTENCES = 10
WRITTEN = rf"^({'|'.join(LISTS)}|[^{{}}|]*\{{\}}[^{{}}|]*(\|[^{{}}|]*\{{\}}[^{{}}|]*)*)$"
IMAGE = {"type": "string", "format": "binary", "contentMediaType": "application/octet-stream"}

Model = Annotated[str | None, Query(max_length=200, description="A name from /models. Default: the first that can.")]
Top = Annotated[int, Query(ge=1, le=1000, description="How many labels, the best first.")]


class Score(BaseModel):
    label: str
    probability: float


class Answer(BaseModel):
    model: str
    batch: int = Field(description="Pictures that were run together.")
    milliseconds: dict[str, float] = Field(description="received, decoded, waited, ran, total")


class Scores(Answer):
    scores: list[Score]


class Vector(Answer):
    embedding: list[float] = Field(description="Of length 1, so that products are cosines.")


class Map(Answer):
    method: str
    label: str | None = Field(description="What the map speaks for, or what the model takes the picture for.")
    probability: float | None
    grid: list[int] = Field(description="Rows and columns of patches.")
    map: list[list[float]] = Field(description="A value for each patch, row by row; higher is more important.")
    size: list[int] = Field(description="Height and width of the picture, upright.")
    box: list[float] = Field(description="Left, top, right, bottom of what the model saw, in the picture's pixels.")


def _form(needed: tuple[str, ...], more: dict[str, Any]) -> dict[str, Any]:
    """The request's body, for the documentation; `receive` reads it as a stream, within limits."""
    schema = {"type": "object", "required": ["image", *needed], "properties": {"image": IMAGE, **more}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text}
    for status, text in {
        400: "The form or the picture is damaged, or the Host is not ours.",
        401: "The token is missing or wrong.",
        403: "A page of another origin.",
        404: "There is no such model, index or picture.",
        408: "The request came too slowly.",
        413: "Too many bytes or pixels.",
        415: "Not a picture.",
        422: "An option is wrong, or the model cannot do this.",
        503: "The queue is full: ask again after Retry-After seconds.",
        504: "There was no answer in time.",
    }.items()
}


def _post(path: str, returns: type[BaseModel], needed: tuple[str, ...] = (), **fields: dict[str, Any]) -> Any:
    return router.post(path, response_model=returns, responses=PROBLEMS, openapi_extra=_form(needed, fields))


@_post("/predict", Scores)
async def predict(request: Request, model: Model = None, top: Top = 5) -> Response:
    """Say what is in a picture."""

    async def work(case: Case) -> dict[str, Any]:
        found = await case.picture()
        chances: Tensor = _finite(await case.run(found.tensor))  # (classes,)
        return _scores(chances, class_labels(case.served.model), top)

    return await answer(request, "predict", model, work)


@_post("/embed", Vector)
async def embed(request: Request, model: Model = None) -> Response:
    """A vector that is near those of similar pictures."""

    async def work(case: Case) -> dict[str, Any]:
        found = await case.picture()
        return {"embedding": _finite(await case.run(found.tensor)).tolist()}

    return await answer(request, "embed", model, work)


@_post(
    "/zeroshot",
    Scores,
    needed=("labels",),
    labels={
        "type": "array",
        "items": {"type": "string", "maxLength": LONGEST},
        "minItems": 1,
        "description": "What may be in the picture: cat,dog in one field, or a field for each.",
    },
    templates={
        "type": "string",
        "pattern": WRITTEN,
        "description": f'One of {", ".join(LISTS)}, or "a photo of a {{}}|one {{}}".',
    },
)
async def zeroshot(request: Request, model: Model = None, top: Top = 5) -> Response:
    """Say which of your words fits a picture, with a CLIP."""

    async def work(case: Case) -> dict[str, Any]:
        labels, templates = _labels(case), _templates(case)
        found = await case.picture()
        features: Tensor = _finite(await case.run(found.tensor))  # (E,)
        rows = [await _label(case, label, templates) for label in labels]
        words = Labels(labels, torch.stack(rows))
        chances = (await computed(among, case.served.model, features[None], words))[0]  # (K,)
        return _scores(chances, labels, top)

    return await answer(request, "zeroshot", model, work, ("labels", "templates"))


@_post(
    "/explain",
    Map,
    text={
        "type": "array",
        "items": {"type": "string", "maxLength": LONGEST},
        "maxItems": SENTENCES,
        "description": "What a CLIP is asked for; a field for each.",
    },
)
async def explain(
    request: Request,
    model: Model = None,
    method: Annotated[
        Literal[WAYS] | None,  # type: ignore[valid-type]
        Query(description="Default: relevance where the model knows classes or a text is given, else attention."),
    ] = None,
    target: Annotated[
        str | None, Query(max_length=LONGEST, description="A class or text, by name or number. Default: the top one.")
    ] = None,
    format: Annotated[Literal["json", "png"], Query(description="png: the map laid on the picture.")] = "json",
) -> Response:
    """Which patches matter: for a class, for a text (CLIP), or by attention alone."""

    async def work(case: Case) -> dict[str, Any] | Response:
        texts = _texts(case)
        found = await case.picture(keep=format == "png")
        look = lambda items: [_look(case.served, items[0], method, target, texts, format == "png")]
        try:
            told, drawn = await case.run(found, look)
        except ValueError as error:  # what this model cannot be asked, in the library's words
            raise RefusedError(422, str(error), "GET /models says what each model can do.") from None
        return told if drawn is None else Response(drawn, media_type="image/png")

    return await answer(request, "explain", model, work, ("text",))


def _look(
    served: Served, found: Prepared, method: str | None, target: str | None, texts: list[str], draw: bool
) -> tuple[dict[str, Any], bytes | None]:
    """In the model's thread."""
    model = ask(served.model, texts) if texts else served.to_explain
    method = method or ("relevance" if model.config.classes else "attention")
    like = next(model.parameters())
    pictures = None if found.picture is None else [found.picture]
    batch = Batch(found.tensor[None].to(like.device, like.dtype), pictures, [found.geometry])
    with torch.no_grad():
        logits = model(batch.images).float() if model.config.classes else None  # (1, classes)
    label = probability = None
    if logits is not None:
        number = int(class_numbers(model, logits, target)[0])
        label, probability = model.label_of(number), float(logits.softmax(-1)[0, number])
    elif target is not None:
        raise ValueError("this model has no classes, so target has no meaning.")
    heat = _finite(METHODS[method](model, batch, target if method in BY_CLASS else None)[0])  # (rows, columns)
    H, W = found.geometry.original
    h, w = batch.images.shape[-2:]
    answer = {"method": method, "label": label, "probability": probability, "grid": list(heat.shape)}
    answer |= {"map": heat.tolist(), "size": [H, W], "box": list(found.geometry.to_original((0, 0, w, h)))}
    return answer, _draw(model, batch, heat, method) if draw else None


def _draw(model: Any, batch: Batch, heat: Tensor, method: str) -> bytes:
    try:
        from vitlab.explain.draw.view import overlay, views

        pixels: np.ndarray = overlay(heat.numpy(), views(model, batch)[0], signed=method == "gradient_x_input")
    except ImportError:
        raise ValueError("drawing needs matplotlib, which this server does not have; ask for format=json.") from None
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


async def _label(case: Case, label: str, templates: str) -> Tensor:
    """(E,): one label at a time, so that others get their turn between them; known ones are remembered."""
    known = case.served.labels
    if (row := known.get((label, templates))) is None:
        work = lambda items: [embed_labels(case.served.model, [items[0]], templates).weights[0]]
        row = await case.run(label, work)
        known.put((label, templates), row)
    return row


def _labels(case: Case) -> list[str]:
    given = case.fields("labels")
    names = [name.strip() for name in (given[0].split(",") if len(given) == 1 else given)]
    names = [name for name in names if name]
    if not names:
        raise RefusedError(422, "the form has no labels.", "Name what may be in the picture: -F labels=cat,dog.")
    if len(names) > case.settings.max_labels:
        raise RefusedError(422, f"{len(names)} labels are more than {case.settings.max_labels}.", "Send fewer labels.")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise RefusedError(422, f"the label {twice[0][:LONGEST]!r} is given twice.", "Name each label once.")
    _check_lengths(names, "label")
    return names


def _templates(case: Case) -> str:
    given = case.fields("templates") or ["train"]
    text = given[0]
    parts = [part.strip() for part in text.split("|") if part.strip()]
    written = bool(parts) and len(parts) <= 100 and all(part.count("{}") == 1 for part in parts)
    if len(given) > 1 or (text not in LISTS and not written):  # a file's name stays a name: nothing is opened
        remedy = f'Send one field: {", ".join(LISTS)}, or "a photo of a {{}}", several joined by |.'
        raise RefusedError(422, f"templates {text[:100]!r} is no list, and no sentences with one {{}} each.", remedy)
    return text


def _texts(case: Case) -> list[str]:
    texts = [text.strip() for text in case.fields("text")]
    if not all(texts) or len(texts) > SENTENCES:
        raise RefusedError(422, f"{len(texts)} texts were given.", f"Send 1 to {SENTENCES} of them, none empty.")
    _check_lengths(texts, "text")
    return texts


def _check_lengths(texts: list[str], what: str) -> None:
    if any(len(text) > LONGEST for text in texts):
        raise RefusedError(422, f"a {what} is longer than {LONGEST} characters.", "Shorten it.")


def _scores(chances: Tensor, labels: list[str], top: int) -> dict[str, Any]:
    return {"scores": [{"label": label, "probability": p} for label, p in ranked(chances, labels, top)]}


def _finite(values: Tensor) -> Tensor:
    if not torch.isfinite(values).all():
        raise RuntimeError("the model's numbers for a picture are not finite: its weights are damaged.")
    return values
