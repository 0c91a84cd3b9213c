"""GET /models, /health, /ready, /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from vitlab.models.base import class_labels
from vitlab.serve.errors import ErrorResponse, busy_error
from vitlab.serve.metrics import Metrics
from vitlab.serve.request import context_of

router = APIRouter()


class StatusResponse(BaseModel):
    status: str


class ModelSummary(BaseModel):
    name: str
    family: str
    verbs: list[str]
    image_size: list[int]
    classes: int
    parameters: int | None  # unknown of an exported file


class ModelDetails(ModelSummary):
    labels: list[str]
    limits: dict[str, float]


@router.get("/health")
async def health() -> StatusResponse:
    """The process is alive."""
    return StatusResponse(status="ok")


@router.get("/ready", responses={503: {"model": ErrorResponse}})
async def ready(request: Request) -> StatusResponse:
    """The server accepts requests: the models are warm, and it is not shutting down."""
    pool = context_of(request).pool
    if pool.draining:
        raise busy_error("the server is shutting down.", 1)
    if pool.broken:
        raise busy_error(f"{', '.join(pool.broken)} cannot run: the server's log says why.", 1)
    if not pool.warm:
        raise busy_error("the models are being warmed up.", 1)
    return StatusResponse(status="ready")


@router.get("/models")
async def models(request: Request) -> list[ModelSummary]:
    """All models. A request without ?model= goes to the first that supports it."""
    return [ModelSummary(**served.summary()) for served in context_of(request).pool.models.values()]


@router.get("/models/{name}", responses={404: {"model": ErrorResponse}})
async def model(request: Request, name: str) -> ModelDetails:
    """One model, with its labels and the server's limits."""
    pool = context_of(request).pool
    served, settings = pool.find(name, None), pool.settings
    names = ("max_batch", "max_wait", "queue", "timeout", "max_upload", "max_pixels", "max_labels")
    labels = class_labels(served.model) if "predict" in served.verbs else []
    return ModelDetails(**served.summary(), labels=labels, limits={key: getattr(settings, key) for key in names})


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    registry: Metrics = request.app.state.metrics
    return Response(registry.page(), media_type=registry.content_type)
