"""Images of requests and responses: multipart form -> bytes -> model input; image -> PNG."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass, field

from fastapi import Request
from PIL import Image
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect
from torch import Tensor

from vitlab.images.preprocess import Geometry, Preprocess
from vitlab.serve.errors import RequestError
from vitlab.serve.settings import FORMATS, Settings

IMAGE_NAME = "the image"  # in messages
MAX_FIELD_BYTES = 20_000  # of a text field
MAX_DRAWN_SIDE = 1600  # pixels of an image that is drawn on
HOW_TO_SEND = "Send the image as multipart form data: curl -F image=@cat.jpg URL."


@dataclass
class Upload:
    image: bytes  # empty: none was sent
    fields: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class PreparedImage:
    """An image as a model takes it."""

    tensor: Tensor  # (C, H, W), normalised
    geometry: Geometry
    original: Image.Image | None = None  # upright, at most MAX_DRAWN_SIDE; only if it is drawn on


async def read_upload(
    request: Request, field_names: Iterable[str], settings: Settings, *, image_required: bool = True
) -> Upload:
    """Read the form. `field_names`: text fields that it may have, each once or several times."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        error = f"the request's Content-Type is {content_type[:100]!r}, not multipart/form-data."
        raise RequestError(415, error, HOW_TO_SEND)
    max_fields = settings.max_labels + 10
    try:
        async with request.form(max_files=1, max_fields=max_fields, max_part_size=MAX_FIELD_BYTES) as form:
            images = form.getlist("image")
            files = [image for image in images if isinstance(image, UploadFile)]
            if len(images) > 1 or len(files) != max(len(images), int(image_required)):
                problem = f"it has {len(images)}" if len(images) != 1 else "it came as text, without a file name"
                raise RequestError(400, f"the form must have one file in the field image; {problem}.", HOW_TO_SEND)
            fields: dict[str, list[str]] = {}
            for name, value in form.multi_items():
                if isinstance(value, str):
                    (name + value).encode()  # raises on lone surrogates, which some charsets decode to
                    fields.setdefault(name, []).append(value)
            if unknown := [name for name in fields if name not in field_names]:
                remedy = f"It takes {', '.join(['image', *field_names])}; other options go behind the path: ?top=3."
                raise RequestError(422, f"the form has an unknown field {unknown[0][:100]!r}.", remedy)
            return Upload(await files[0].read() if files else b"", fields)
    except ClientDisconnect:
        raise RequestError(499, "the client has disconnected.", "") from None
    except UnicodeError:
        raise RequestError(400, "the form's text does not match the charset it declares.", HOW_TO_SEND) from None


def prepare(preprocess: Preprocess, image: bytes, settings: Settings, *, keep_original: bool = False) -> PreparedImage:
    """Preprocess an image as `vitlab.predict` does, within the server's limits. Runs on the decoder pool."""
    most = settings.max_pixels
    tensor, original = preprocess.prepare(image, name=IMAGE_NAME, max_pixels=most, formats=FORMATS)
    geometry = preprocess.geometry((original.height, original.width))
    if keep_original:
        original.thumbnail((MAX_DRAWN_SIDE, MAX_DRAWN_SIDE))  # queued at full size, images would fill the memory
    return PreparedImage(tensor, geometry, original if keep_original else None)


def encode_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
