"""A multipart request -> the bytes of its picture and its other fields; and those bytes -> what a model takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from PIL import Image
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect
from torch import Tensor

from vitlab.images.preprocess import Geometry
from vitlab.images.read import ImageError, read_image
from vitlab.serve.errors import RefusedError, of_picture
from vitlab.serve.settings import FORMATS, Settings

NAME = "the image"  # what messages call it
FIELD_BYTES = 20_000  # of a field that is no picture
DRAWN = 1600  # longer side of a picture that is drawn on
HOW = "Send the picture as multipart form data: curl -F image=@cat.jpg URL."


@dataclass
class Upload:
    image: bytes  # none: empty
    fields: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Prepared:
    """A picture as a model takes it."""

    tensor: Tensor  # (C, H, W)
    geometry: Geometry  # where the model's view lies in it
    picture: Image.Image | None = None  # upright, where it is needed; at most DRAWN long


async def read_upload(request: Request, known: Iterable[str], settings: Settings, *, needed: bool = True) -> Upload:
    """`known`: fields that may come beside the picture, each once or several times; `needed`: the picture is."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise RefusedError(415, f"the request's Content-Type is {kind[:100]!r}, not multipart/form-data.", HOW)
    limits: Any = dict(max_files=1, max_fields=settings.max_labels + 10, max_part_size=FIELD_BYTES)
    try:
        async with request.form(**limits) as form:
            images = form.getlist("image")
            given = [image for image in images if isinstance(image, UploadFile)]
            if len(images) > 1 or len(given) != max(len(images), int(needed)):
                found = f"it has {len(images)}" if len(images) != 1 else "it came as text, without a file name"
                raise RefusedError(400, f"the form must have one file in the field image; {found}.", HOW)
            fields: dict[str, list[str]] = {}
            for name, value in form.multi_items():
                if isinstance(value, str):
                    (name + value).encode()  # some charsets decode to lone surrogates, which are no text
                    fields.setdefault(name, []).append(value)
            if unknown := [name for name in fields if name not in known]:
                takes = ", ".join(["image", *known])
                remedy = f"It takes {takes}; other options go behind the path: ?top=3."
                raise RefusedError(422, f"the form has a field {unknown[0][:100]!r}.", remedy)
            return Upload(await given[0].read() if given else b"", fields)
    except ClientDisconnect:
        raise RefusedError(499, "the client has gone.", "") from None
    except UnicodeError:  # of a charset that the form names
        raise RefusedError(400, "the form's text is not in the charset that it names.", HOW) from None


def prepare(preprocess: Any, image: bytes, settings: Settings, *, keep: bool = False) -> Prepared:
    """What `vitlab.predict` does with a picture, within this server's limits. Runs in a thread."""
    try:
        picture = read_image(image, name=NAME, max_pixels=settings.max_pixels, formats=FORMATS)
        tensor = preprocess.normalize(preprocess.view(picture, name=NAME))
    except ImageError as error:
        raise of_picture(error) from None
    geometry = preprocess.geometry((picture.height, picture.width))
    if keep:
        picture.thumbnail((DRAWN, DRAWN))  # now: large ones would fill the memory while they wait
    return Prepared(tensor, geometry, picture if keep else None)
