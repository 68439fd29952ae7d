"""RouterMetrics: what the router counts, for Prometheus; a registry of its own."""

from __future__ import annotations

from glm5sdk.core.errors import UnavailableError
from glm5sdk.serve.router.replicas import Fleet

__all__ = ["RouterMetrics"]

SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
FRACTIONS = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


class RouterMetrics:
    """Counters are kept as things happen; gauges are read from the fleet when someone asks."""

    def __init__(self, *fleets: Fleet) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        except ImportError as error:
            raise UnavailableError('router: prometheus-client is missing; pip install "glm5sdk[serve]"') from error
        self._fleets = fleets
        self.registry = registry = CollectorRegistry()

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"glm5_router_{name}", words, labels, registry=registry)

        def gauge(name: str, words: str) -> Gauge:
            return Gauge(f"glm5_router_{name}", words, ("replica",), registry=registry)

        self.requests = counter("requests", "Answers of a replica, by status.", "replica", "status")
        self.refused = counter("refused", "Answers of the router itself, by status.", "status")
        self.retries = counter("retries", "Requests tried on another replica, by what the first did.", "reason")
        self.no_budget = counter("retries_denied", "Retries that the budget did not pay for.")
        self.ejections = counter("ejections", "Times a replica was taken out for its health.", "replica")
        self.readmissions = counter("readmissions", "Times a replica came back, its first time too.", "replica")
        self.broken = counter("broken_streams", "Streams that ended in an error event of the router.", "replica")
        self.aborted = counter("client_aborts", "Requests whose client went away.")
        self.hits = counter("affinity_hits", "Requests sent to a replica that has seen their prefix.", "replica")
        self.handoffs = counter("handoffs", "Prefixes moved between replicas.", "kind", "outcome")
        self.handoff_bytes = counter("handoff_bytes", "Bytes of prefixes moved.", "kind")
        self.matched = Histogram(
            "glm5_router_matched_fraction", "Of the prompt, at the replica chosen.", (),
            registry=registry, buckets=FRACTIONS,
        )  # fmt: skip
        self.first = Histogram(
            "glm5_router_first_byte_seconds", "Until the answer's head.", ("replica",),
            registry=registry, buckets=SECONDS,
        )  # fmt: skip
        self.whole = Histogram(
            "glm5_router_request_seconds", "Until the answer's end.", ("replica",), registry=registry, buckets=SECONDS
        )
        self._up = gauge("replica_up", "1 while it gets requests or would, but for draining.")
        self._draining = gauge("replica_draining", "1 while it gets no new requests.")
        self._in_flight = gauge("in_flight", "Requests of this router that run there.")

    def render(self) -> bytes:
        """The page of /metrics."""
        from prometheus_client import generate_latest

        for gauge in (self._up, self._draining, self._in_flight):
            gauge.clear()
        for replica in (replica for fleet in self._fleets for replica in fleet):
            self._up.labels(replica.url).set(replica.health.up)
            self._draining.labels(replica.url).set(replica.draining)
            self._in_flight.labels(replica.url).set(replica.in_flight)
        return generate_latest(self.registry)
