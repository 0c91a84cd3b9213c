"""GET /models, /health, /ready, /metrics: what is here and how it is."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from vitlab.inference import class_labels
from vitlab.serve.errors import Problem, RefusedError, busy
from vitlab.serve.metrics import Metrics
from vitlab.serve.request import Desk

router = APIRouter()


class State(BaseModel):
    status: str


class About(BaseModel):
    name: str
    family: str
    verbs: list[str]
    image_size: list[int]
    classes: int
    parameters: int | None  # of an exported file it is not known


class Model(About):
    labels: list[str]
    limits: dict[str, float]


@router.get("/health")
async def health() -> State:
    """The process is alive."""
    return State(status="ok")


@router.get("/ready", responses={503: {"model": Problem}})
async def ready(request: Request) -> State:
    """Requests are welcome: the models are warm, and the server is not about to end."""
    house = _desk(request).house
    if not house.ready:
        broken = f"{', '.join(house.broken)} cannot run: the server's log says why." if house.broken else None
        ending = "the server is about to end." if house.draining else None
        raise busy(ending or broken or "the models are being warmed up.", 1)
    return State(status="ready")


@router.get("/models")
async def models(request: Request) -> list[About]:
    """All models; a request without ?model= goes to the first that can do what is asked."""
    return [About(**served.about()) for served in _desk(request).house.models.values()]


@router.get("/models/{name}", responses={404: {"model": Problem}})
async def model(request: Request, name: str) -> Model:
    """One model, with its labels and the server's limits."""
    house = _desk(request).house
    if name not in house.models:
        raise RefusedError(404, f"there is no model {name[:100]!r} here.", f"There are: {', '.join(house.models)}.")
    served, limits = house.models[name], house.settings
    names = ("max_batch", "max_wait", "queue", "timeout", "max_upload", "max_pixels", "max_labels")
    labels = class_labels(served.model) if "predict" in served.verbs else []
    return Model(**served.about(), labels=labels, limits={key: getattr(limits, key) for key in names})


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    found: Metrics = request.app.state.metrics
    return Response(found.page(), media_type=found.content_type)


def _desk(request: Request) -> Desk:
    return request.app.state.desk
