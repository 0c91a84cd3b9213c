"""Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from vitlab.serve.model_pool import ModelPool

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    content_type = CONTENT_TYPE_LATEST

    def __init__(self, pool: ModelPool):
        self.registry = registry = CollectorRegistry()
        gauge, histogram = partial(Gauge, registry=registry), partial(Histogram, registry=registry)
        answered = "Requests answered."  # Prometheus adds _total to the name
        self.requests = Counter("vitlab_requests", answered, ["path", "status"], registry=registry)
        about = "From a request's first line to its response."
        self.seconds = histogram("vitlab_request_seconds", about, ["path"], buckets=SECONDS)
        labels = ["model", "verb"]
        self.batch_sizes = histogram("vitlab_batch_pictures", "Images in a batch.", labels, buckets=SIZES)
        self.batch_seconds = histogram("vitlab_batch_seconds", "Time of a batch in the model.", labels, buckets=SECONDS)
        in_progress = gauge("vitlab_queue_requests", "Accepted and not answered.", ["model"])
        capacity = gauge("vitlab_queue_limit", "Requests that may be accepted.", ["model"])
        ready = gauge("vitlab_ready", "1 if the server accepts requests.")
        ready.set_function(lambda: float(pool.ready))
        for served in pool.models.values():
            in_progress.labels(served.name).set_function(lambda served=served: served.in_progress)
            capacity.labels(served.name).set(pool.settings.queue)
        ProcessCollector(registry=registry)

    def count_response(self, path: str, status: int, seconds: float) -> None:
        self.requests.labels(path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)

    def batch_observer(self, model: str) -> Callable[[Hashable, int, float], None]:
        """A callback for `Worker.on_batch`."""

        def observe(kind: Hashable, count: int, seconds: float) -> None:
            verb = "other" if kind is None else str(kind)
            self.batch_sizes.labels(model, verb).observe(count)
            self.batch_seconds.labels(model, verb).observe(seconds)

        return observe

    def page(self) -> bytes:
        return generate_latest(self.registry)
