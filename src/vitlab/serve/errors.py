"""What a request is refused with: {"error": what was found, "remedy": what to do}. Never more than that."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from vitlab.images.read import ImageError, NotAPictureError, TooLargeError
from vitlab.printable import one_line
from vitlab.search import SearchError
from vitlab.serve.settings import KINDS

logger = logging.getLogger("vitlab.serve")


class Problem(BaseModel):
    """Every answer that is no success."""

    error: str
    remedy: str


class RefusedError(Exception):
    """A request that gets an answer, but not the one it wanted."""

    def __init__(self, status: int, error: str, remedy: str, headers: Mapping[str, str] | None = None):
        super().__init__(error)
        self.status, self.error, self.remedy, self.headers = status, error, remedy, dict(headers or {})


def busy(error: str, seconds: float) -> RefusedError:
    wait = max(1, math.ceil(seconds))
    return RefusedError(503, error, f"Ask again in {wait} s.", {"Retry-After": str(wait)})


def of_picture(error: ImageError) -> RefusedError:
    """What is wrong with a picture that was sent."""
    if isinstance(error, TooLargeError):
        return RefusedError(413, error.why, "Shrink or cut the picture first.")
    if isinstance(error, NotAPictureError):
        return RefusedError(415, error.why, f"Send a {KINDS} file; its contents count, not its name.")
    return RefusedError(400, error.why, "Send the whole file again.")


def response(refusal: RefusedError) -> JSONResponse:
    return JSONResponse({"error": refusal.error, "remedy": refusal.remedy}, refusal.status, refusal.headers)


def handle_errors(app: FastAPI) -> None:
    """Whatever goes wrong inside becomes JSON in our voice; a fault of ours goes to the log, and not to the client."""

    async def refused(request: Request, error: Any) -> JSONResponse:
        return response(error)

    async def invalid(request: Request, error: Any) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first.get("loc", ())[1:])
        found = repr(first.get("input"))
        text = f"{where}={found if len(found) < 100 else found[:100] + '...'}: {first.get('msg', 'is wrong')}."
        return response(RefusedError(422, text, "GET /docs lists what each request takes."))

    async def by_framework(request: Request, error: Any) -> JSONResponse:
        known = {
            404: (f"there is no {request.url.path[:200]} here.", "GET /docs lists what there is."),
            405: (f"{request.url.path} does not take {request.method}.", "GET /docs lists what each path takes."),
        }
        text, remedy = known.get(error.status_code, (str(error.detail), "GET /docs shows how to ask."))
        return response(RefusedError(error.status_code, text, remedy, error.headers))

    async def no_index(request: Request, error: Exception) -> JSONResponse:
        logger.error(
            "%s %s: %s", request.method, request.url.path, one_line(str(error))
        )  # it names files of the server
        return response(RefusedError(503, "the index of this server cannot be searched now.", "Its log says why."))

    async def broken(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return response(RefusedError(500, "the server failed at this request.", "Its log says why: look there."))

    app.add_exception_handler(RefusedError, refused)
    app.add_exception_handler(SearchError, no_index)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, by_framework)
    app.add_exception_handler(Exception, broken)
