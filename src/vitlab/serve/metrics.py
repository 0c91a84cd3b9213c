"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Hashable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from vitlab.serve.model_pool import House

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    content_type = CONTENT_TYPE_LATEST

    def __init__(self, house: House):
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "vitlab_requests", "Requests answered.", ["path", "status"], registry=self.registry
        )  # Prometheus adds _total
        self.seconds = Histogram(
            "vitlab_request_seconds", "From a request's first line to its answer.", ["path"],
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.batches = Histogram(
            "vitlab_batch_pictures", "Pictures run together.", ["model", "verb"], buckets=SIZES, registry=self.registry
        )
        self.running = Histogram(
            "vitlab_batch_seconds", "Time of a batch in the model.", ["model", "verb"],
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        inside = Gauge("vitlab_queue_requests", "Accepted and not answered.", ["model"], registry=self.registry)
        room = Gauge("vitlab_queue_limit", "Requests that may be accepted.", ["model"], registry=self.registry)
        ready = Gauge("vitlab_ready", "1 if requests are welcome.", registry=self.registry)
        ready.set_function(lambda: float(house.ready))
        for served in house.models.values():
            inside.labels(served.name).set_function(lambda served=served: served.inside)
            room.labels(served.name).set(house.settings.queue)
        ProcessCollector(registry=self.registry)

    def answered(self, path: str, status: int, seconds: float) -> None:
        self.requests.labels(path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)

    def watching(self, model: str):
        """What a model's worker tells of each batch."""

        def ran(kind: Hashable, count: int, seconds: float) -> None:
            verb = "other" if kind is None else str(kind)
            self.batches.labels(model, verb).observe(count)
            self.running.labels(model, verb).observe(seconds)

        return ran

    def page(self) -> bytes:
        return generate_latest(self.registry)
