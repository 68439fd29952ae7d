"""Switches of the engine, each with traffic that it is for: on and off in turns, on one loaded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from peers.protocol import token_ids
from peers.traffic import Request, mixed

from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.serve import LLM
from rig.open_loop import open_loop, timed_tokens


@dataclass
class Feature:
    """One switch.

    Attributes:
        name: as printed.
        on, off: settings of the two engines.
        traffic: round -> requests; the same requests for both.
        exact: whether both must give the same tokens.
        trained: needs a trained model: drafts of random weights are never accepted.
        note: of the engine that is on, after the runs.
    """

    name: str
    on: dict[str, Any]
    off: dict[str, Any]
    traffic: Callable[[int], list[Request]]
    exact: bool = True
    trained: bool = False
    note: Callable[[LLM], str] = field(default=lambda llm: "")


def features(vocabulary: int, count: int, share: float) -> Iterator[Feature]:
    """All of them.

    Args:
        vocabulary: of the model.
        count: requests at once.
        share: of the full lengths.
    """
    plain = mixed(count, vocabulary, share)
    prefix = token_ids(max(8, int(448 * share)), vocabulary, 999)

    def shared(turn: int) -> list[Request]:
        return [
            Request([*prefix, *token_ids(16, vocabulary, 1000 + turn * count + i)], max(2, int(32 * share)))
            for i in range(count)
        ]

    off = {"enable_prefix_caching": False}
    yield Feature(
        "prefix cache, shared prompt", {}, off, shared, note=lambda llm: f"{_cached(llm):.0%} of prompts cached"
    )
    yield Feature("prefix cache, nothing shared", {}, off, lambda turn: _fresh(plain, vocabulary, turn))
    small = {"max_num_batched_tokens": max(16, int(256 * share))} | off
    yield Feature("chunked prefill, 256 tokens a step", small, off | {"enable_chunked_prefill": False}, lambda _: plain)
    yield Feature("async scheduling", off, off | {"async_scheduling": False}, lambda _: plain)
    yield Feature("fp8 cache", off | {"kv_cache_dtype": "fp8"}, off, lambda _: plain, exact=False, note=_page_bytes)
    for batch in (1, count):
        yield Feature(
            f"speculation, 3 drafts, {batch} at once", off | {"speculative_tokens": 3}, off,
            lambda _, b=batch: plain[:b], trained=True, note=_accepted,
        )  # fmt: skip


def make_engine(model: Glm5ForCausalLM, settings: dict[str, Any]) -> LLM:
    """An engine of its own."""
    longest = min(1024, model.config.max_position_embeddings)
    return LLM(model, **{"max_model_len": longest, **settings})


def longest_pause(model: Glm5ForCausalLM, count: int, share: float) -> dict[str, float]:
    """Seconds that running answers wait at most when a long prompt comes among them, with and without chunks."""
    vocabulary = model.config.vocab_size
    running = [Request(token_ids(16, vocabulary, i), max(8, int(96 * share))) for i in range(count)]
    late = Request(token_ids(int(896 * max(share, 0.5)), vocabulary, 77), 2)
    found = {}
    for name, settings in {
        "read 128 tokens a step": {"max_num_batched_tokens": 128 + count},
        "read at once": {"enable_chunked_prefill": False},
    }.items():
        llm = make_engine(model, {"enable_prefix_caching": False, **settings})
        alone = timed_tokens(llm, running)[1]
        times = [0.0] * count + [alone / 2]
        found[name] = max(open_loop(llm, [*running, late], times).between)
        llm.shutdown()
    return found


def _fresh(requests: list[Request], vocabulary: int, turn: int) -> list[Request]:
    """The same lengths with other tokens, so that nothing of an earlier round is in a cache."""
    return [
        Request(token_ids(len(r.prompt), vocabulary, 5000 + turn * 1000 + i), r.new_tokens)
        for i, r in enumerate(requests)
    ]


def _cached(llm: LLM) -> float:
    stats = llm.engine.stats()
    return stats.cached_tokens / max(1, stats.prompt_tokens)


def _accepted(llm: LLM) -> str:
    stats = llm.engine.stats()
    return f"{stats.accepted_tokens / max(1, stats.drafted_tokens):.0%} of drafts accepted"


def _page_bytes(llm: LLM) -> str:
    pools = llm.engine.pools
    return f"{pools.page_bytes / pools.page_size:.0f} bytes a token"
