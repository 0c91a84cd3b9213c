"""POST /search: the pictures of an index that are nearest to a sentence or a picture, as `vitlab search` finds them.

What they look like is asked for by the number of their row: no request names a file.
"""

from __future__ import annotations

import asyncio
import io
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from vitlab.images.read import ImageError, read_image
from vitlab.inference import embed_text
from vitlab.serve.errors import RefusedError
from vitlab.serve.inference_routes import IMAGE, LONGEST, PROBLEMS, Answer
from vitlab.serve.request import Case, Desk, answer
from vitlab.serve.search_index import Shelf
from vitlab.serve.settings import FORMATS, Settings

router = APIRouter()

SIDE = 256  # pixels of a small picture, at most
NO_INDEX = (
    "Start it with one: vitlab serve --index INDEX. To make one: vitlab index FOLDER -o INDEX --model CHECKPOINT."
)
TEXT = {"type": "string", "maxLength": LONGEST, "description": "A sentence; the model of the index is a CLIP."}
FORM = {
    "type": "object",
    "properties": {"image": IMAGE, "text": TEXT},
    "oneOf": [{"required": ["image"]}, {"required": ["text"]}],
}
BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}}


class Near(BaseModel):
    number: int = Field(description="Of its row in the index: GET /search/pictures/NUMBER shows it.")
    name: str = Field(description="Below the folder that was indexed.")
    score: float = Field(description="The cosine of the two vectors: 1 for the same direction.")


class Found(Answer):
    pictures: int = Field(description="How many the index holds.")
    hits: list[Near] = Field(description="The nearest first.")


@router.post("/search", response_model=Found, responses=PROBLEMS, openapi_extra=BODY)
async def search(
    request: Request, top: Annotated[int, Query(ge=1, le=100, description="How many pictures.")] = 10
) -> Response:
    """Find the pictures of the server's index that are nearest to a sentence, or to a picture."""
    shelf = _shelf(request)

    async def work(case: Case) -> dict[str, Any]:
        vector = await _vector(case, shelf)
        hits, count = await case.desk.read(lambda: shelf.search(vector, top))
        near = [{"number": hit.number, "name": name, "score": hit.score} for hit, name in hits]
        return {"pictures": count, "hits": near}

    return await answer(request, "embed", shelf.model, work, ("text",), needed=False)


@router.get("/search/pictures/{number}", response_class=Response, responses=PROBLEMS)
async def picture(request: Request, number: Annotated[int, Path(ge=1, lt=2**63)]) -> Response:
    """A picture of the index, small, as PNG."""
    desk: Desk = request.app.state.desk
    shelf, house = _shelf(request), desk.house
    with house.models[shelf.model].place():  # who asks for many waits like anybody else
        try:
            async with asyncio.timeout(house.settings.timeout):
                content = await desk.read(lambda: _small(shelf, number, house.settings))
        except TimeoutError:
            limit = f"{house.settings.timeout:g} s"
            raise RefusedError(504, f"there was no answer within {limit}.", "Ask again later.") from None
    return Response(content, media_type="image/png")


async def _vector(case: Case, shelf: Shelf) -> Any:
    texts = [text.strip() for text in case.fields("text")]
    assert case.upload is not None
    if len(texts) + bool(case.upload.image) != 1 or (texts and not texts[0]):
        remedy = 'Ask in words or with a picture: curl -F "text=a dog on a beach" URL, or curl -F image=@dog.jpg URL.'
        raise RefusedError(422, "the form must have either a text or an image, one of them.", remedy)
    if not texts:
        found = await case.picture()
        return (await case.run(found.tensor)).numpy()
    if len(texts[0]) > LONGEST:
        raise RefusedError(422, f"a text is longer than {LONGEST} characters.", "Shorten it.")
    if not shelf.words:
        why = f"the index was made with {shelf.model}, a model that knows pictures and no words."
        raise RefusedError(422, why, "Ask with a picture: curl -F image=@dog.jpg URL; or serve an index of a CLIP.")
    return await case.run(texts[0], lambda items: [embed_text(case.served.model, items[0])[0]])


def _small(shelf: Shelf, number: int, settings: Settings) -> bytes:
    path = shelf.picture(number)
    if path is None:
        raise RefusedError(
            404, f"the index has no picture {number}.", "POST /search tells the numbers of what it finds."
        )
    try:
        found = read_image(path, name=f"picture {number}", max_pixels=settings.max_pixels, formats=FORMATS)
    except ImageError as error:
        remedy = "Bring the index up to date: vitlab index FOLDER -o INDEX."
        raise RefusedError(404, f"{error.why.rstrip('.')}: it cannot be shown.", remedy) from None
    found.thumbnail((SIDE, SIDE))
    written = io.BytesIO()
    found.save(written, "PNG")
    return written.getvalue()


def _shelf(request: Request) -> Shelf:
    shelf: Shelf | None = request.app.state.desk.shelf
    if shelf is None:
        raise RefusedError(404, "this server has no index to search.", NO_INDEX)
    return shelf
