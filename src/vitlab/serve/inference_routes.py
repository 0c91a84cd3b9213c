"""POST /predict, /embed, /zeroshot, /explain: the library's functions on one image, as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from PIL import Image
from pydantic import BaseModel, Field
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.explain.clip_prompts import ask
from vitlab.explain.inputs import ImageBatch, token_model
from vitlab.explain.methods import METHODS, SHOWN
from vitlab.explain.relevance import class_numbers
from vitlab.explain.scale import DEFAULT, SCALES, limits
from vitlab.inference import Labels, embed_labels, ranked, zero_shot_probabilities
from vitlab.inference import answer as predicted
from vitlab.models.base import Network
from vitlab.models.task import NumberTask
from vitlab.models.two_towers import as_two_towers
from vitlab.serve.errors import ErrorResponse, RequestError
from vitlab.serve.executor import compute_async
from vitlab.serve.image_io import PreparedImage, encode_png
from vitlab.serve.model_pool import ServedModel
from vitlab.serve.request import InferenceJob, respond
from vitlab.serve.settings import MAX_TEXT_LENGTH, MAX_TEXTS
from vitlab.text.templates import LISTS

router = APIRouter()

TEMPLATES = rf"^({'|'.join(LISTS)}|[^{{}}|]*\{{\}}[^{{}}|]*(\|[^{{}}|]*\{{\}}[^{{}}|]*)*)$"
IMAGE_SCHEMA = {"type": "string", "format": "binary", "contentMediaType": "application/octet-stream"}

ModelName = Annotated[str | None, Query(max_length=200, description="From /models. Default: the first that can.")]
Top = Annotated[int, Query(ge=1, le=1000, description="Number of labels, the best first.")]


class Score(BaseModel):
    label: str
    probability: float


class ModelResponse(BaseModel):
    model: str
    batch: int = Field(description="Images in the batch.")
    milliseconds: dict[str, float] = Field(description="received, decoded, waited, ran, total")


class ScoresResponse(ModelResponse):
    scores: list[Score] = Field(description="The best first. Several labels: those above their thresholds.")


class PredictResponse(ScoresResponse):
    target: str | None = Field(None, description="Of a model that predicts a number: what it is.")
    value: float | None = Field(None, description="The number; scores is empty then.")


class EmbedResponse(ModelResponse):
    embedding: list[float] = Field(description="Of unit length, so that dot products are cosines.")


class ExplainResponse(ModelResponse):
    method: str
    label: str | None = Field(description="The class or text that the map explains, or the model's prediction.")
    probability: float | None
    grid: list[int] = Field(description="Rows and columns of patches.")
    map: list[list[float]] = Field(description="A value for each patch, row by row; higher is more important.")
    limits: list[float] = Field(description="The values to draw darkest and brightest, by `scale`.")
    size: list[int] = Field(description="Height and width of the image, upright.")
    box: list[float] = Field(description="Left, top, right, bottom of the model's input, in pixels of the image.")


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in {
        400: "The form or the image is damaged, or the Host is unknown.",
        401: "The token is missing or wrong.",
        403: "A page of another origin.",
        404: "There is no such model, index or image.",
        408: "The request came too slowly.",
        413: "Too many bytes or pixels.",
        415: "Not an image.",
        422: "An option is wrong, or the model does not support this.",
        503: "The queue is full: try again after Retry-After seconds.",
        504: "There was no answer in time.",
    }.items()
}


def form_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The request's body in the OpenAPI description; `InferenceJob.receive` reads it."""
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def _post(path: str, response: type[BaseModel], required: tuple[str, ...] = (), **fields: dict[str, Any]) -> Any:
    properties = {"image": IMAGE_SCHEMA, **fields}
    schema = {"type": "object", "required": ["image", *required], "properties": properties}
    return router.post(path, response_model=response, responses=ERRORS, openapi_extra=form_schema(schema))


@_post("/predict", PredictResponse)
async def predict(request: Request, model: ModelName = None, top: Top = 5) -> Response:
    """Classify an image; or its labels, or a number, if that is what the model has learned."""

    async def answer(job: InferenceJob) -> dict[str, Any]:
        image = await job.image()
        probabilities = _finite(await job.run_verb(image.tensor))  # (classes,)
        prediction = predicted(job.served.model, "", probabilities, top)
        scores = [{"label": label, "probability": p} for label, p in prediction.scores]
        number = {} if prediction.value is None else {"target": prediction.quantity, "value": prediction.value}
        return {"scores": scores, **number}

    return await respond(request, "predict", model, answer)


@_post("/embed", EmbedResponse)
async def embed(request: Request, model: ModelName = None) -> Response:
    """Embed an image: similar images have similar embeddings."""

    async def answer(job: InferenceJob) -> dict[str, Any]:
        image = await job.image()
        return {"embedding": _finite(await job.run_verb(image.tensor)).tolist()}

    return await respond(request, "embed", model, answer)


@_post(
    "/zeroshot",
    ScoresResponse,
    required=("labels",),
    labels={
        "type": "array",
        "items": {"type": "string", "maxLength": MAX_TEXT_LENGTH},
        "minItems": 1,
        "description": "The classes to choose from: cat,dog in one field, or a field for each.",
    },
    templates={
        "type": "string",
        "pattern": TEMPLATES,
        "description": f'One of {", ".join(LISTS)}, or "a photo of a {{}}|one {{}}".',
    },
)
async def zeroshot(request: Request, model: ModelName = None, top: Top = 5) -> Response:
    """Classify an image by labels of your own, with a CLIP or SigLIP."""

    async def answer(job: InferenceJob) -> dict[str, Any]:
        names, templates = _labels(job), _templates(job)
        image = await job.image()
        features = _finite(await job.run_verb(image.tensor))  # (E,)
        labels = Labels(names, torch.stack([await _embed_label(job, name, templates) for name in names]))
        clip = as_two_towers(job.served.model)
        probabilities = (await compute_async(zero_shot_probabilities, clip, features[None], labels))[0]  # (K,)
        return _scores(probabilities, names, top)

    return await respond(request, "zeroshot", model, answer, ("labels", "templates"))


@_post(
    "/explain",
    ExplainResponse,
    text={
        "type": "array",
        "items": {"type": "string", "maxLength": MAX_TEXT_LENGTH},
        "maxItems": MAX_TEXTS,
        "description": "Sentences that a CLIP compares the image with; a field for each.",
    },
)
async def explain(
    request: Request,
    model: ModelName = None,
    method: Annotated[
        Literal[SHOWN] | None,  # type: ignore[valid-type]
        Query(description="Default: relevance where the model has classes or a text is given, else attention."),
    ] = None,
    target: Annotated[
        str | None,
        Query(max_length=MAX_TEXT_LENGTH, description="A class or text, by name or number. Default: the top one."),
    ] = None,
    format: Annotated[Literal["json", "png"], Query(description="png: the map drawn over the image.")] = "json",
    scale: Annotated[
        Literal[tuple(SCALES)],  # type: ignore[valid-type]
        Query(description="What the colours of the png span; `limits` of the JSON."),
    ] = DEFAULT,
) -> Response:
    """Rate the patches: for a class, for a text (CLIP), or by attention alone."""

    async def answer(job: InferenceJob) -> dict[str, Any] | Response:
        texts = _texts(job)
        image = await job.image(keep_original=format == "png", one_size=True)
        content = await job.run_alone(lambda image: _explain(job.served, image, method, target, texts, scale), image)
        return Response(content, media_type="image/png") if isinstance(content, bytes) else content

    return await respond(request, "explain", model, answer, ("text",))


def _explain(
    served: ServedModel, image: PreparedImage, method: str | None, target: str | None, texts: list[str], scale: str
) -> dict[str, Any] | bytes:
    """The explanation as JSON; drawn as PNG if the image's original was kept."""
    model = token_model(ask(served.model, texts) if texts else served.encoder)
    method = method or ("relevance" if model.config.classes else "attention")
    like = next(model.parameters())
    originals = None if image.original is None else [image.original]
    batch = ImageBatch(image.tensor[None].to(like.device, like.dtype), originals, [image.geometry])
    with torch.no_grad():
        logits = model(batch.images).float() if model.config.classes else None  # (1, classes)
    label = probability = None
    if logits is not None:
        number = int(class_numbers(model, logits, target)[0])
        label, probability = model.label_of(number), None
        if not isinstance(model.task, NumberTask):
            probability = float(model.task.scores(logits)[0, number])
    elif target is not None:
        raise UsageError("this model has no classes, so target has no meaning.")
    heat = _finite(METHODS[method](model, batch, target)[0])  # (rows, columns)
    if originals is not None:
        return _draw(model, batch, heat, method, scale)
    h, w = batch.images.shape[-2:]
    return {
        "method": method,
        "label": label,
        "probability": probability,
        "grid": list(heat.shape),
        "map": heat.tolist(),
        "limits": list(limits(heat.numpy(), scale, METHODS[method].signed)),
        "size": list(image.geometry.original),
        "box": list(image.geometry.to_original((0, 0, w, h))),
    }


def _draw(model: Network, batch: ImageBatch, heat: Tensor, method: str, scale: str) -> bytes:
    try:
        from vitlab.explain.draw import overlay, views

        signed = METHODS[method].signed
        pixels: np.ndarray = overlay(heat.numpy(), views(model, batch)[0], signed=signed, scale=scale)
    except ImportError:
        raise UsageError("drawing needs matplotlib, which this server does not have; ask for format=json.") from None
    return encode_png(Image.fromarray(pixels))


async def _embed_label(job: InferenceJob, label: str, templates: str) -> Tensor:
    """(E,). One label per job, so that other requests run in between; cached."""
    served = job.served
    embedding = served.label_cache.get((label, templates))
    if embedding is None:
        function = lambda label: embed_labels(served.model, [label], templates).weights[0]
        embedding = await job.run_alone(function, label)
        served.label_cache.put((label, templates), embedding)
    return embedding


def _labels(job: InferenceJob) -> list[str]:
    fields, limit = job.fields("labels"), job.settings.max_labels
    names = [name.strip() for name in (fields[0].split(",") if len(fields) == 1 else fields)]
    names = [name for name in names if name]
    if not names:
        raise RequestError(422, "the form has no labels.", "Send the classes to choose from: -F labels=cat,dog.")
    if len(names) > limit:
        raise RequestError(422, f"{len(names)} labels are more than {limit}.", "Send fewer labels.")
    if duplicates := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        error = f"the label {duplicates[0][:MAX_TEXT_LENGTH]!r} is given twice."
        raise RequestError(422, error, "Send each label once.")
    check_lengths(names, "label")
    return names


def _templates(job: InferenceJob) -> str:
    fields = job.fields("templates") or ["train"]
    text = fields[0]
    sentences = [part.strip() for part in text.split("|") if part.strip()]
    valid = 1 <= len(sentences) <= 100 and all(sentence.count("{}") == 1 for sentence in sentences)
    if len(fields) > 1 or (text not in LISTS and not valid):  # a file name is not a list here: nothing is opened
        remedy = f'Send one field: {", ".join(LISTS)}, or "a photo of a {{}}", several joined by |.'
        raise RequestError(422, f"templates {text[:100]!r} is no list, and no sentences with one {{}} each.", remedy)
    return text


def _texts(job: InferenceJob) -> list[str]:
    texts = [text.strip() for text in job.fields("text")]
    if not all(texts) or len(texts) > MAX_TEXTS:
        raise RequestError(422, f"{len(texts)} texts were given.", f"Send 1 to {MAX_TEXTS} of them, none empty.")
    check_lengths(texts, "text")
    return texts


def check_lengths(texts: list[str], name: str) -> None:
    if any(len(text) > MAX_TEXT_LENGTH for text in texts):
        raise RequestError(422, f"a {name} is longer than {MAX_TEXT_LENGTH} characters.", "Shorten it.")


def _scores(probabilities: Tensor, labels: list[str], top: int) -> dict[str, Any]:
    return {"scores": [{"label": label, "probability": p} for label, p in ranked(probabilities, labels, top)]}


def _finite(values: Tensor) -> Tensor:
    if not torch.isfinite(values).all():
        raise RuntimeError("the model's output is not finite: its weights are damaged.")
    return values
