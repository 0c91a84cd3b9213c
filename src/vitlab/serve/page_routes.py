"""GET /: a page that shows a model at work. It is plain HTML, CSS and JavaScript in page/, loads nothing from other
hosts and computes nothing: its numbers come from `page_queries`, under /page/.

    POST /page/look?model=digits     multipart image -> {"look": ID, ...}; the server keeps the image for a while
    GET  /page/look/ID/attention?layer=3
    GET  /page/samples, /page/models, /page/exercises, /page/index, /page/runs, /page/runs/NAME?after=BYTE
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from PIL import Image
from torch import Tensor

from vitlab.learn.exercises import page_links
from vitlab.parsing import parse_json
from vitlab.serve import page_queries
from vitlab.serve.errors import RequestError
from vitlab.serve.executor import compute_async
from vitlab.serve.image_io import encode_png
from vitlab.serve.model_pool import ServedModel
from vitlab.serve.page_queries import NamedArrays, PageImage
from vitlab.serve.page_samples import page_samples
from vitlab.serve.request import InferenceJob, context_of, respond, until_disconnect

router = APIRouter(include_in_schema=False)

FILES = files("vitlab.serve") / "page"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PRELOAD = re.compile(rb"<!-- modulepreload[^>]*-->")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
STORIES = ("stories", "story_")  # modules that are loaded when a story is asked for
MAX_LOG_BYTES = 2_000_000  # in one response
MAX_OFFSET = 2**62  # beyond any log


@router.get("/")
async def index() -> Response:
    names = sorted(name for name in _files() if name.endswith(".js"))
    names = [name for name in names if not name.startswith(STORIES)]
    links = "\n".join(f'<link rel="modulepreload" href="page/files/{name}">' for name in names)
    return _response(PRELOAD.sub(links.encode(), _files()["index.html"]), "text/html")


@router.get("/page/files/{name}")
async def asset(name: str) -> Response:
    return _file(name)


@router.get("/page/models")
async def models(request: Request) -> Response:
    pool = context_of(request).pool
    info = lambda: [{**served.summary(), **page_queries.model_info(served)} for served in pool.models.values()]
    return JSONResponse(await compute_async(info))


@router.get("/page/exercises")
async def exercises() -> Response:
    """Which exercise of `vitlab learn` belongs to which steps and panels of the page."""
    return JSONResponse(page_links())


@router.get("/page/index")
async def search_index(request: Request) -> Response:
    """The index that POST /search searches, or null."""
    context = context_of(request)
    return JSONResponse(None if context.index is None else await context.run_blocking(context.index.summary))


@router.get("/page/samples")
async def samples(request: Request) -> Response:
    """Name, address and licence of each; the photo that the server was started with comes first."""
    photo = context_of(request).photo
    licences = {name: sample.licence for name, sample in page_samples().items()}
    listed = licences if photo is None else {photo.name: None} | licences
    return JSONResponse([{"name": n, "url": f"page/samples/{quote(n)}", "licence": c} for n, c in listed.items()])


@router.get("/page/samples/{name}")
async def sample(request: Request, name: str) -> Response:
    photo = context_of(request).photo
    if photo is not None and photo.name == name:
        return Response(photo.content, media_type=photo.media_type)
    if name not in page_samples():
        raise RequestError(404, f"there is no sample {name[:100]!r}.", "GET /page/samples lists them.")
    sample_file = page_samples()[name]
    return Response(sample_file.read(), media_type=sample_file.media_type)


@router.post("/page/look")
async def keep_image(request: Request, model: Annotated[str | None, Query(max_length=200)] = None) -> Response:
    """Keep an image for queries; its ID cannot be guessed."""

    async def answer(job: InferenceJob) -> dict[str, Any]:
        image = await job.image(one_size=True)
        number = secrets.token_urlsafe(12)
        kept = PageImage(job.served.name, image.tensor[None])
        job.context.page_images.put(number, kept)
        return {"look": number, "geometry": vars(image.geometry), "size": list(image.tensor.shape[-2:])}

    return await respond(request, None, model, answer)


@router.get("/page/look/{number}/view")
async def view(request: Request, number: str) -> Response:
    served, image = _find_image(request, number)
    pixels = await compute_async(page_queries.model_view, served, image)
    return Response(encode_png(Image.fromarray(pixels)), media_type="image/png")


@router.get("/page/look/{number}/{name}")
async def query(request: Request, number: str, name: str) -> Response:
    served, image = _find_image(request, number)
    supported = page_queries.supported_queries(served)
    if name not in supported:
        raise RequestError(404, f"{served.name} has no {name[:100]!r}.", f"It has: {', '.join(supported)}.")
    options = dict(request.query_params)
    job = InferenceJob(context_of(request), served)
    function = lambda image: page_queries.QUERIES[name](served, image, options)
    async with job.time_limit():
        with served.slot():
            content = await until_disconnect(request, job.run_alone(function, image))
    if isinstance(content, dict):
        return JSONResponse(content)
    return _named_response(content.arrays) if isinstance(content, NamedArrays) else _array_response(content)


@router.get("/page/runs")
async def runs(request: Request) -> Response:
    """Names of run folders, the last modified first."""
    context = context_of(request)
    logs = await context.run_blocking(lambda: _logs(Path(context.pool.settings.runs)))
    return JSONResponse(sorted(logs, key=lambda name: -logs[name][1]))


@router.get("/page/runs/{name}")
async def run(request: Request, name: str, after: Annotated[int, Query(ge=0, le=MAX_OFFSET)] = 0) -> Response:
    """New lines of a run's log since byte `after`; all lines where the log has become shorter than that."""
    context = context_of(request)
    content = await context.run_blocking(lambda: _read_log(Path(context.pool.settings.runs), name, after))
    # Escaped as ASCII: a log may contain file names that are not UTF-8, decoded to lone surrogates.
    return Response(json.dumps(content, allow_nan=False), media_type="application/json")


def _logs(folder: Path) -> dict[str, tuple[Path, float]]:
    """Path and modification time of each run's log by the run's name; bytes that are not UTF-8 are replaced."""
    logs = {}
    for path in folder.glob("*/log.jsonl"):
        try:
            status = path.stat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):  # opening a pipe would block
            logs[os.fsencode(path.parent.name).decode("utf-8", "replace")] = (path, status.st_mtime)
    return logs


def _read_log(folder: Path, name: str, after: int) -> dict[str, Any]:
    path, _ = _logs(folder).get(name, (None, 0))
    if path is None:
        raise RequestError(404, f"there is no run {name[:100]!r} here.", "GET /page/runs lists them.")
    try:
        with path.open("rb") as log:
            if after > os.fstat(log.fileno()).st_size:  # the run was started anew, and its log is shorter now
                after = 0
            log.seek(after)
            text = log.read(MAX_LOG_BYTES)
    except OSError as error:
        message = f"the log of {name[:100]!r} cannot be read: {error.strerror}."
        raise RequestError(404, message, "Give the server permission to read the file.") from None
    complete = text[: text.rfind(b"\n") + 1]  # the last line may be half written
    if not complete and len(text) == MAX_LOG_BYTES:
        complete = text  # not a line of a run: skip it
    lines = [line for line in map(_event, complete.splitlines()) if line is not None]
    return {"lines": lines, "after": after + len(complete), "ended": (path.parent / "result.json").is_file()}


def _event(line: bytes) -> dict[str, Any] | None:
    """One line of a log; None: damaged or empty."""
    try:
        event = parse_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _find_image(request: Request, number: str) -> tuple[ServedModel, PageImage]:
    context = context_of(request)
    image = context.page_images.get(number)
    if image is None:
        raise RequestError(404, "this image is no longer kept.", "Send it again.")
    return context.pool.models[image.model], image


def _file(name: str) -> Response:
    content = _files().get(name)
    if content is None:
        raise RequestError(404, f"there is no file {name[:100]!r}.", "GET / is the page.")
    return _response(content, MEDIA_TYPES[Path(name).suffix])


@cache
def _files() -> dict[str, bytes]:
    """Read once: a page asks for all of them at once."""
    return {entry.name: entry.read_bytes() for entry in FILES.iterdir() if Path(entry.name).suffix in MEDIA_TYPES}


def _response(content: bytes, media_type: str) -> Response:
    headers = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return Response(content, media_type=f"{media_type}; charset=utf-8", headers=headers)


def _array_response(values: Tensor | np.ndarray) -> Response:
    """Little-endian numbers in row-major order; dtype and shape are in the headers."""
    array = values.cpu().numpy() if isinstance(values, Tensor) else values
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    headers = {"X-Type": array.dtype.name, "X-Shape": ",".join(map(str, array.shape))}
    return Response(array.tobytes(), media_type="application/octet-stream", headers=headers)


def _named_response(arrays: dict[str, Tensor]) -> Response:
    """Little-endian float32, one array after another; a header has their names and shapes, in order."""
    body = b"".join(np.ascontiguousarray(value.cpu().numpy(), dtype="<f4").tobytes() for value in arrays.values())
    headers = {"X-Arrays": json.dumps({name: list(value.shape) for name, value in arrays.items()})}
    return Response(body, media_type="application/octet-stream", headers=headers)
