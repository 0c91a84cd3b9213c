"""POST /search: the images of an index that are nearest to a sentence or an image, as `vitlab search` finds them.

Images are requested by the number of their row: no request names a file.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from vitlab.errors import ImageError
from vitlab.images.read import read_image
from vitlab.inference import embed_text
from vitlab.serve.errors import RequestError
from vitlab.serve.image_io import encode_png
from vitlab.serve.inference_routes import ERRORS, IMAGE_SCHEMA, ModelResponse, check_lengths, form_schema
from vitlab.serve.request import InferenceJob, context_of, respond
from vitlab.serve.search_index import SearchIndex
from vitlab.serve.settings import FORMATS, MAX_TEXT_LENGTH, Settings

router = APIRouter()

THUMBNAIL = 256  # pixels of the longer side
NO_INDEX = (
    "Start it with one: vitlab serve --index INDEX. To make one: vitlab index FOLDER -o INDEX --model CHECKPOINT."
)
TEXT = {"type": "string", "maxLength": MAX_TEXT_LENGTH, "description": "A sentence; the index must be of a CLIP."}
FORM = form_schema(
    {
        "type": "object",
        "properties": {"image": IMAGE_SCHEMA, "text": TEXT},
        "oneOf": [{"required": ["image"]}, {"required": ["text"]}],
    }
)


class ScoredImage(BaseModel):
    number: int = Field(description="Its row in the index: GET /search/pictures/NUMBER shows the image.")
    name: str = Field(description="Its path relative to the indexed folder.")
    score: float = Field(description="Cosine similarity; 1 is the same direction.")


class SearchResponse(ModelResponse):
    pictures: int = Field(description="Number of images in the index.")
    hits: list[ScoredImage] = Field(description="The nearest first.")


@router.post("/search", response_model=SearchResponse, responses=ERRORS, openapi_extra=FORM)
async def search(
    request: Request, top: Annotated[int, Query(ge=1, le=100, description="Number of images.")] = 10
) -> Response:
    """Find the images of the server's index that are nearest to a sentence or an image."""
    index = _index(request)

    async def answer(job: InferenceJob) -> dict[str, Any]:
        vector = await _query_vector(job, index)
        hits, count = await job.context.run_blocking(lambda: index.search(vector, top))
        nearest = [{"number": hit.number, "name": name, "score": hit.score} for hit, name in hits]
        return {"pictures": count, "hits": nearest}

    return await respond(request, "embed", index.model, answer, ("text",), image_required=False)


@router.get("/search/pictures/{number}", response_class=Response, responses=ERRORS)
async def thumbnail(request: Request, number: Annotated[int, Path(ge=1, lt=2**63)]) -> Response:
    """A thumbnail of an image of the index, as PNG."""
    context, index = context_of(request), _index(request)
    job = InferenceJob(context, context.pool.models[index.model])
    async with job.time_limit():
        with job.served.slot():  # thumbnails count towards the model's queue
            content = await context.run_blocking(lambda: _thumbnail(index, number, context.pool.settings))
    return Response(content, media_type="image/png")


async def _query_vector(job: InferenceJob, index: SearchIndex) -> np.ndarray:
    texts = [text.strip() for text in job.fields("text")]
    if len(texts) + bool(job.upload.image) != 1 or (texts and not texts[0]):
        remedy = 'Send one: curl -F "text=a dog on a beach" URL, or curl -F image=@dog.jpg URL.'
        raise RequestError(422, "the form must have either a text or an image, one of them.", remedy)
    if not texts:
        image = await job.image()
        return (await job.run_verb(image.tensor)).numpy()
    check_lengths(texts, "text")
    if not index.reads_text:
        error = f"the index was made with {index.model}, a model that reads no text."
        remedy = "Search by image: curl -F image=@dog.jpg URL; or serve an index of a CLIP."
        raise RequestError(422, error, remedy)
    return await job.run_alone(lambda text: embed_text(job.served.model, text)[0], texts[0])


def _thumbnail(index: SearchIndex, number: int, settings: Settings) -> bytes:
    path = index.image_path(number)
    if path is None:
        raise RequestError(404, f"the index has no image {number}.", "POST /search returns the numbers of its hits.")
    try:
        image = read_image(path, name=f"image {number}", max_pixels=settings.max_pixels, formats=FORMATS)
    except ImageError as error:
        remedy = "Update the index: vitlab index FOLDER -o INDEX."
        raise RequestError(404, f"{error.why.rstrip('.')}: it cannot be shown.", remedy) from None
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    return encode_png(image)


def _index(request: Request) -> SearchIndex:
    index = context_of(request).index
    if index is None:
        raise RequestError(404, "this server has no index to search.", NO_INDEX)
    return index
