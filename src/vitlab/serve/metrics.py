"""Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from vitlab.serve.model_pool import ModelPool

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    content_type = CONTENT_TYPE_LATEST

    def __init__(self, pool: ModelPool):
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "vitlab_requests", "Requests answered.", ["path", "status"], registry=registry
        )  # Prometheus adds _total
        self.seconds = Histogram(
            "vitlab_request_seconds", "From a request's first line to its response.", ["path"],
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.batch_sizes = Histogram(
            "vitlab_batch_pictures", "Images in a batch.", ["model", "verb"], buckets=SIZES, registry=registry
        )
        self.batch_seconds = Histogram(
            "vitlab_batch_seconds", "Time of a batch in the model.", ["model", "verb"],
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        in_progress = Gauge("vitlab_queue_requests", "Accepted and not answered.", ["model"], registry=registry)
        capacity = Gauge("vitlab_queue_limit", "Requests that may be accepted.", ["model"], registry=registry)
        ready = Gauge("vitlab_ready", "1 if the server accepts requests.", registry=registry)
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
