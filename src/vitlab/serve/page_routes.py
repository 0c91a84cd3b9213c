"""GET /: a page that shows a model at work. It is plain HTML, CSS and JavaScript in page/, loads nothing from elsewhere
and computes nothing itself: its numbers are those of `page_queries`, asked for under /page/.

    POST /page/look?model=digits     multipart image -> {"look": ID, ...}; the picture stays here for a while
    GET  /page/look/ID/attention?layer=3
    GET  /page/samples, /page/models, /page/index, /page/runs, /page/runs/NAME?after=BYTE
"""

from __future__ import annotations

import io
import json
import os
import secrets
import stat
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from PIL import Image
from torch import Tensor

from vitlab.images.samples import open_sample
from vitlab.parsing import parse_json
from vitlab.serve import page_queries
from vitlab.serve.errors import RefusedError
from vitlab.serve.executor import computed
from vitlab.serve.image_io import Upload
from vitlab.serve.model_pool import Remembered, Served
from vitlab.serve.page_queries import Look
from vitlab.serve.request import Case, Desk, answer, in_time, unless_gone

router = APIRouter(include_in_schema=False)

FILES = files("vitlab.serve") / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
KEPT = 64  # pictures that are looked at; the one that was asked for longest ago is forgotten
DIGITS = (0, 1, 2)  # of the test pictures: no two show the same
LINES = 2_000_000  # bytes of a log that one answer brings
MOST = 2**62  # where no log has a byte


@router.get("/")
async def index() -> Response:
    return _file("index.html")


@router.get("/page/files/{name}")
async def asset(name: str) -> Response:
    return _file(name)


@router.get("/page/models")
async def models(request: Request) -> Response:
    served = list(request.app.state.house.models.values())
    return JSONResponse(await computed(lambda: [{**one.about(), **page_queries.about(one.model)} for one in served]))


@router.get("/page/index")
async def indexed(request: Request) -> Response:
    """What POST /search searches; null: nothing."""
    desk: Desk = request.app.state.desk
    return JSONResponse(None if desk.shelf is None else await desk.read(desk.shelf.about))


@router.get("/page/samples")
async def samples() -> Response:
    return JSONResponse(list(_samples()))


@router.get("/page/samples/{name}")
async def sample(name: str) -> Response:
    if name not in _samples():
        raise RefusedError(404, f"there is no sample {name[:100]!r}.", "GET /page/samples lists them.")
    return Response(_samples()[name](), media_type="image/png")


@router.post("/page/look")
async def look(request: Request, model: Annotated[str | None, Query(max_length=200)] = None) -> Response:
    """Keep a picture to look at; its later questions name it by a number that cannot be guessed."""

    async def work(case: Case) -> dict[str, Any]:
        found = await case.picture()
        kept = Look(case.served.name, found.tensor[None])
        number = secrets.token_urlsafe(12)
        looks(request).put(number, kept)
        return {"look": number}

    return await answer(request, None, model, work)


@router.get("/page/look/{number}/view")
async def view(request: Request, number: str) -> Response:
    served, kept = _kept(request, number)
    picture = io.BytesIO()
    Image.fromarray(await computed(page_queries.view, served.model, kept)).save(picture, "PNG")
    return Response(picture.getvalue(), media_type="image/png")


@router.get("/page/look/{number}/{part}")
async def part(request: Request, number: str, part: str) -> Response:
    served, kept = _kept(request, number)
    if part not in page_queries.offers(served.model):
        there = ", ".join(page_queries.offers(served.model))
        raise RefusedError(404, f"{served.name} has no {part[:100]!r}.", f"It has: {there}.")
    options = dict(request.query_params)
    case = Case(request.app.state.desk, served, None)
    case.upload = Upload(b"")  # it came before
    work = lambda items: [page_queries.PARTS[part](served.model, item, options) for item in items]
    async with in_time(case):
        with served.place():
            found = await unless_gone(request, case.run(kept, work))
    return JSONResponse(found) if isinstance(found, dict) else _array(found)


@router.get("/page/runs")
async def runs(request: Request) -> Response:
    """Run folders, the one that was written last first."""
    folder = Path(request.app.state.house.settings.runs)
    logs = await request.app.state.desk.read(lambda: _logs(folder))
    return JSONResponse(sorted(logs, key=lambda name: -logs[name][1]))


@router.get("/page/runs/{name}")
async def run(request: Request, name: str, after: Annotated[int, Query(ge=0, le=MOST)] = 0) -> Response:
    """What the log of a run has gained since byte `after`."""
    folder = Path(request.app.state.house.settings.runs)
    gained = await request.app.state.desk.read(lambda: _read_log(folder, name, after))
    # Escaped as ASCII: a note may name a file whose name is not UTF-8, which is a lone surrogate.
    return Response(json.dumps(gained, allow_nan=False), media_type="application/json")


def _logs(folder: Path) -> dict[str, tuple[Path, float]]:
    """Path and modification time of each run's log by the run's name; bytes that are not UTF-8 are replaced."""
    logs = {}
    for path in folder.glob("*/log.jsonl"):
        try:
            status = path.stat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):  # to open a pipe would block
            logs[os.fsencode(path.parent.name).decode("utf-8", "replace")] = (path, status.st_mtime)
    return logs


def _read_log(folder: Path, name: str, after: int) -> dict[str, Any]:
    path, _ = _logs(folder).get(name, (None, 0))
    if path is None:
        raise RefusedError(404, f"there is no run {name[:100]!r} here.", "GET /page/runs lists them.")
    try:
        with path.open("rb") as log:
            log.seek(min(after, os.fstat(log.fileno()).st_size))  # beyond the largest file that a disk allows it fails
            text = log.read(LINES)
    except OSError as error:
        why = f"the log of {name[:100]!r} cannot be read: {error.strerror}."
        raise RefusedError(404, why, "Let the server read the file.") from None
    full = text[: text.rfind(b"\n") + 1]  # a line may be half written
    if not full and len(text) == LINES:
        full = text  # no line of ours is that long: go past it
    lines = [line for line in map(_event, full.splitlines()) if line is not None]
    return {"lines": lines, "after": after + len(full), "ended": (path.parent / "result.json").is_file()}


def _event(line: bytes) -> dict[str, Any] | None:
    """A line of a log; None: damaged, or empty."""
    try:
        event = parse_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def looks(request: Request) -> Remembered:
    """The pictures of this server, made when the first one comes."""
    state = request.app.state
    if not hasattr(state, "looks"):
        state.looks = Remembered(KEPT)
    return state.looks


def _kept(request: Request, number: str) -> tuple[Served, Look]:
    found: Look | None = looks(request).get(number)
    if found is None:
        raise RefusedError(404, "this picture is not here any more.", "Send it again.")
    return request.app.state.house.models[found.model], found


def _file(name: str) -> Response:
    kind = KINDS.get(Path(name).suffix)
    there = {entry.name for entry in FILES.iterdir()}
    if kind is None or name not in there:
        raise RefusedError(404, f"there is no file {name[:100]!r}.", "GET / is the page.")
    headers = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return Response((FILES / name).read_bytes(), media_type=f"{kind}; charset=utf-8", headers=headers)


def _array(values: Tensor | np.ndarray) -> Response:
    """Little-endian numbers, row by row; their type and shape are in the headers."""
    array = values.cpu().numpy() if isinstance(values, Tensor) else values
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    headers = {"X-Type": array.dtype.name, "X-Shape": ",".join(map(str, array.shape))}
    return Response(array.tobytes(), media_type="application/octet-stream", headers=headers)


@lru_cache(maxsize=1)
def _samples() -> dict[str, Callable[[], bytes]]:
    """Pictures that are on every machine: two photos and some digits, of scikit-learn. Each is encoded once."""
    from sklearn.datasets import load_sample_image

    def photo(name: str) -> Callable[[], bytes]:
        return cache(lambda: _png(Image.fromarray(load_sample_image(name))))

    def digit(number: int) -> Callable[[], bytes]:
        return cache(lambda: _png(open_sample(f"digits#{number}").picture.resize((64, 64), Image.Resampling.NEAREST)))

    found = {"flower": photo("flower.jpg"), "china": photo("china.jpg")}
    return found | {f"digit {open_sample(f'digits#{number}').label}": digit(number) for number in DIGITS}


def _png(picture: Image.Image) -> bytes:
    written = io.BytesIO()
    picture.save(written, "PNG")
    return written.getvalue()
