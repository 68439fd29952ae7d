"""EngineConfig: what an engine is told once, when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from glm5sdk.core.errors import ContractError
from glm5sdk.registry.contract_scalars import as_int

__all__ = ["CacheFormats", "EngineConfig"]


class CacheFormats(NamedTuple):
    """Formats of the two caches, as ops name them."""

    kv: str
    index: str


_FORMATS = {
    "auto": CacheFormats("plain", "plain"),
    "fp8": CacheFormats("fp8_ds_mla", "fp8"),
    "fp8_ds_mla": CacheFormats("fp8_ds_mla", "plain"),
}


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and switches of an engine. None of them changes a token of any output.

    The exception says what it is: `kv_cache_dtype`, because rows rounded to fp8 are other rows.

    Attributes:
        max_num_seqs: sequences in one step at most.
        max_num_batched_tokens: tokens in one step at most; longer prompts are read in chunks.
        max_model_len: tokens that prompt and continuation may have together; None is the model's own limit.
        page_size: tokens a page of the cache.
        num_pages: pages of the cache; None takes what max_num_seqs sequences of max_model_len need, up to
            cache_bytes.
        cache_bytes: memory for the cache when num_pages is None.
        kv_cache_dtype: "auto" (the activation dtype), "fp8" (latent rows and index keys) or "fp8_ds_mla" (latent rows
            alone).
        enable_prefix_caching: keep finished prefixes and share them with later requests.
        enable_chunked_prefill: read a prompt in several steps; without it a prompt is one step, however long.
        async_scheduling: prepare step n + 1 while step n runs.
        speculative_tokens: drafts a step from the MTP layer; 0 is none.
        speculative_method: "exact" (a draft is accepted iff it equals the target's own draw: the tokens are the same
            as without) or "rejection" (the classic rule: the same distribution, other tokens).
        share_draft_indices: later draft steps reuse the first one's selected keys; None follows the model's config.
        weight_version: name of the weights that the model has at the start; None takes the checkpoint's fingerprint, or
            "default" for a model that was given loaded.
        max_queued_requests, max_queued_tokens: what may wait; more is refused. None is no limit.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    page_size: int = 64
    num_pages: int | None = None
    cache_bytes: int = 4 << 30
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    speculative_tokens: int = 0
    speculative_method: str = "exact"
    share_draft_indices: bool | None = None
    weight_version: str | None = None
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "cache_bytes"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_model_len", "num_pages"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("max_queued_requests", "max_queued_tokens"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 0)
        _at_least("speculative_tokens", self.speculative_tokens, 0)
        if self.speculative_tokens > 16:
            raise ContractError(f"engine: speculative_tokens is {self.speculative_tokens}, needs at most 16")
        for name, known in (("kv_cache_dtype", tuple(_FORMATS)), ("speculative_method", ("exact", "rejection"))):
            if getattr(self, name) not in known:
                raise ContractError(f"engine: {name} is {getattr(self, name)!r}, needs one of: {', '.join(known)}")

    @property
    def formats(self) -> CacheFormats:
        """Formats of the caches."""
        return _FORMATS[self.kv_cache_dtype]


def _at_least(name: str, value: Any, low: int) -> None:
    if as_int("engine", name, value) < low:
        raise ContractError(f"engine: {name} is {value}, needs at least {low}")
