"""What the server measures, for Prometheus; names follow vLLM's, with the prefix glm5_."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glm5sdk.serve.interface import EngineClient

__all__ = ["Metrics"]

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Metrics:
    """Counters and histograms of one server, with the engine's own numbers read at each scrape.

    Args:
        engine: whose `stats()` are shown.
    """

    def __init__(self, engine: EngineClient) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineNumbers(engine))
        own = self.registry
        self.first_token = Histogram(
            "glm5_time_to_first_token_seconds", "From arrival to the first token.", buckets=_FIRST, registry=own
        )
        self.inter_token = Histogram(
            "glm5_inter_token_latency_seconds",
            "Between tokens of a sequence; tokens that came together share the time.",
            buckets=_BETWEEN,
            registry=own,
        )
        self.queue = Histogram(
            "glm5_request_queue_time_seconds",
            "From arrival to the first step; up to the first token where the engine does not tell.",
            buckets=_FIRST,
            registry=own,
        )
        self.whole = Histogram(
            "glm5_e2e_request_latency_seconds", "From arrival to the last token.", buckets=_WHOLE, registry=own
        )
        self.prompt_tokens = Histogram(
            "glm5_request_prompt_tokens", "Prompt tokens of a request.", buckets=_TOKENS, registry=own
        )
        self.generation_tokens = Histogram(
            "glm5_request_generation_tokens", "Tokens made for a request.", buckets=_TOKENS, registry=own
        )
        self.finished = Counter(
            "glm5_request_success", "Sequences finished, by reason.", ["finished_reason"], registry=own
        )
        self.hung_up = Counter(
            "glm5_requests_cancelled", "Requests given up before their end by client, time-out or error.", registry=own
        )
        self.refused = Counter(
            "glm5_requests_refused", "Requests refused because too much waits already.", registry=own
        )
        self.http = Counter("glm5_http_requests", "Answers by route and status.", ["route", "status"], registry=own)

    def scrape(self) -> bytes:
        """All numbers in Prometheus' text form."""
        return generate_latest(self.registry)


class _EngineNumbers(Collector):
    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        now = self._engine.stats()
        used = now.pages_total - now.pages_free
        for name, value, text in (
            ("num_requests_running", now.running, "Requests in the batch."),
            ("num_requests_waiting", now.waiting, "Requests in the queue."),
            ("num_tokens_waiting", now.waiting_tokens, "Prompt tokens of the queue."),
            ("kv_cache_usage_perc", used / max(now.pages_total, 1), "Part of the cache pages in use, 1 is all."),
            ("kv_cache_pages", now.pages_total, "Cache pages."),
            ("kv_cache_pages_cached", now.pages_cached, "Free cache pages that hold prefixes."),
            ("prefix_cache_hit_rate", now.cached_tokens / max(now.prompt_tokens, 1), "Part of prompts from the cache."),
            (
                "spec_decode_acceptance_rate",
                now.accepted_tokens / max(now.drafted_tokens, 1),
                "Part of the drafted tokens that were right.",
            ),
            *((f"engine_{name}", value, "Of the engine's own.") for name, value in sorted(now.extra.items())),
        ):
            yield GaugeMetricFamily(f"glm5_{name}", text, value=float(value))
        for name, value, text in (
            ("prompt_tokens", now.prompt_tokens, "Prompt tokens taken in."),
            ("generation_tokens", now.generated_tokens, "Tokens made."),
            ("prefix_cache_queries", now.prompt_tokens, "Prompt tokens looked up in the prefix cache."),
            ("prefix_cache_hits", now.cached_tokens, "Prompt tokens found in the prefix cache."),
            ("spec_decode_num_draft_tokens", now.drafted_tokens, "Tokens drafted."),
            ("spec_decode_num_accepted_tokens", now.accepted_tokens, "Drafted tokens that were right."),
            ("num_preemptions", now.preempted, "Requests set back."),
            ("requests_aborted", now.aborted, "Requests ended before their end."),
            ("requests_rejected", now.rejected, "Requests that the engine refused."),
            ("requests_finished", now.finished, "Requests that reached their end."),
            ("engine_steps", now.steps, "Steps of the engine."),
        ):
            yield CounterMetricFamily(f"glm5_{name}", text, value=float(value))
        version = GaugeMetricFamily("glm5_weight_version_info", "Weights that new requests get.", labels=["version"])
        version.add_metric([now.weight_version], 1.0)
        yield version
