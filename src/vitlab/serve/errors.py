"""Error responses: {"error": what is wrong, "remedy": what to do}, and nothing else."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from vitlab.errors import ImageError, SearchError, TokenizerError, UsageError, VitlabError
from vitlab.images.read import NotAnImageError, TooLargeError
from vitlab.printable import one_line
from vitlab.serve.settings import FORMAT_NAMES

logger = logging.getLogger("vitlab.serve")


class ErrorResponse(BaseModel):
    """The body of every error response."""

    error: str
    remedy: str


class RequestError(Exception):
    """A request that cannot be fulfilled, with the status of its response."""

    def __init__(self, status: int, error: str, remedy: str, headers: Mapping[str, str] | None = None):
        super().__init__(error)
        self.status, self.error, self.remedy, self.headers = status, error, remedy, dict(headers or {})


def busy_error(error: str, seconds: float) -> RequestError:
    wait = max(1, math.ceil(seconds))
    return RequestError(503, error, f"Try again in {wait} s.", {"Retry-After": str(wait)})


def image_error(error: ImageError) -> RequestError:
    if isinstance(error, TooLargeError):
        return RequestError(413, error.why, "Shrink or crop the image first.")
    if isinstance(error, NotAnImageError):
        return RequestError(415, error.why, f"Send a {FORMAT_NAMES} file; its contents count, not its name.")
    return RequestError(400, error.why, "Send the complete file again.")


def error_response(error: RequestError) -> JSONResponse:
    return JSONResponse({"error": error.error, "remedy": error.remedy}, error.status, error.headers)


def handle_errors(app: FastAPI) -> None:
    """Turn every exception into an error response. Bugs go to the log; the client sees no details of them."""

    @app.exception_handler(RequestError)
    async def on_request_error(request: Request, error: RequestError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid_option(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        option = ".".join(str(part) for part in first.get("loc", ())[1:])
        value = repr(first.get("input"))
        text = f"{option}={value if len(value) < 100 else value[:100] + '...'}: {first.get('msg', 'is wrong')}."
        return error_response(RequestError(422, text, "GET /docs lists the options of each request."))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        path = request.url.path
        messages = {
            404: (f"there is no {path[:200]} here.", "GET /docs lists all paths."),
            405: (f"{path} does not take {request.method}.", "GET /docs lists the methods of each path."),
        }
        text, remedy = messages.get(error.status_code, (str(error.detail), "GET /docs lists all requests."))
        return error_response(RequestError(error.status_code, text, remedy, error.headers))

    @app.exception_handler(ImageError)
    async def on_image_error(request: Request, error: ImageError) -> JSONResponse:
        return error_response(image_error(error))

    @app.exception_handler(UsageError)
    @app.exception_handler(TokenizerError)
    async def on_unsupported(request: Request, error: VitlabError) -> JSONResponse:
        return error_response(RequestError(422, str(error), "GET /models lists what each model can do."))

    @app.exception_handler(SearchError)
    async def on_search_error(request: Request, error: SearchError) -> JSONResponse:
        # Only to the log: the message names files of the server.
        logger.error("%s %s: %s", request.method, request.url.path, one_line(str(error)))
        message = "the index of this server cannot be searched now."
        return error_response(RequestError(503, message, "The server's log says why."))

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(RequestError(500, "the server failed at this request.", "The server's log says why."))
