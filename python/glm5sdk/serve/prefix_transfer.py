"""Cached prefixes on their way between engines: pinned under a lease, read in parts, and taken in elsewhere.

Nothing here trusts the other side: what comes in is compared with this engine's own geometry and weights before a page
is taken, and a page that is lent comes back by itself when the borrower is silent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError
from glm5sdk.nn.cache import CachePools
from glm5sdk.serve.prefix_cache import RadixCache

if TYPE_CHECKING:
    from glm5sdk.serve.engine import Engine

__all__ = ["PrefixTransfer", "cache_geometry"]


def cache_geometry(pools: CachePools, lookahead: int) -> dict[str, Any]:
    """What two engines must agree on for a page of one to be a page of the other; JSON values."""
    made = pools.made_for
    return {
        "page_size": pools.page_size,
        "page_bytes": pools.page_bytes,
        "kv_format": pools.kv_format,
        "index_format": pools.index_format,
        "latent": made.latent,
        "rope": made.rope,
        "index_dim": made.index_dim,
        "index_layers": [bool(owns) for owns in made.index_layers],
        "dtype": str(made.dtype).removeprefix("torch."),
        "lookahead": lookahead,
    }


class PrefixTransfer:
    """The engine's side of moving prefixes. Called between steps, in the engine's thread.

    Args:
        engine: whose cache.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lent: dict[str, list[int]] = {}

    def export_prefix(self, token_ids: Sequence[int], cache_salt: str = "", seconds: float = 30.0) -> dict[str, Any]:
        """Pin what the prefix cache knows of these tokens.

        Args:
            token_ids: a prompt, or prompt and continuation.
            cache_salt: under which the prefix was cached.
            seconds: how long the lease lasts unless it is renewed.

        Returns:
            lease_id; rows: tokens whose rows are cached; tokens: their ids and as many more as a row looks ahead;
            num_pages: pages to read; weight_version; geometry. Without a cached row lease_id is None.

        Raises:
            ContractError: the engine keeps no prefixes.
        """
        cache = self._cache()
        match = cache.match(self._engine.namespace(cache_salt), list(token_ids))
        try:
            found = {
                "lease_id": None,
                "rows": match.length,
                "tokens": list(token_ids[: match.length + cache.lookahead]) if match.length else [],
                "num_pages": len(match.held),
                "weight_version": self._engine.weight_version,
                "geometry": cache_geometry(self._engine.pools, cache.lookahead),
            }
            if match.length:
                found["lease_id"] = self._engine.leases.grant(match.held, seconds)
                self._lent[found["lease_id"]] = match.held
        except BaseException:
            self._engine.pages.release(match.held)
            raise
        if not match.length:
            self._engine.pages.release(match.held)
        self._lent = {name: pages for name, pages in self._lent.items() if name in self._engine.leases}
        return found

    def read_lease(self, lease_id: str, first: int = 0, count: int | None = None) -> bytes:
        """Contents of leased pages, each page's rows of all pools together, `page_bytes` a page.

        Raises:
            ContractError: the lease has ended, or has no such pages.
        """
        self._engine.leases.expire()
        if lease_id not in self._engine.leases:
            raise ContractError("lease: it has ended, needs one that lasts; export again")
        pages = self._lent[lease_id]
        last = len(pages) if count is None else first + count
        if not 0 <= first <= last <= len(pages):
            raise ContractError(f"lease: pages are {first} to {last}, needs 0 to {len(pages)}")
        chosen = pages[first:last]
        parts = [_bytes(pool[chosen]) for pool in self._engine.pools.pools()]
        return torch.cat(parts, dim=1).numpy().tobytes() if chosen else b""

    def renew_lease(self, lease_id: str, seconds: float = 30.0) -> bool:
        """Let a lease last for so many seconds from now. False when it had ended."""
        return self._engine.leases.renew(lease_id, seconds)

    def release_lease(self, lease_id: str) -> bool:
        """End a lease. False when it had ended; that is no error, as messages may come twice."""
        self._lent.pop(lease_id, None)
        return self._engine.leases.release(lease_id)

    def import_prefix(
        self,
        tokens: Sequence[int],
        rows: int,
        weight_version: str,
        geometry: Mapping[str, Any],
        pages: bytes,
        cache_salt: str = "",
    ) -> int:
        """Take in pages that `read_lease` gave elsewhere; later requests with this prefix find it cached.

        Args:
            tokens: as `export_prefix` gave them.
            rows: likewise.
            weight_version: likewise.
            geometry: likewise.
            pages: contents of all pages.
            cache_salt: under which to cache.

        Returns:
            Rows that are cached now; 0 when there are no free pages to hold them.

        Raises:
            ContractError: geometry, weights or sizes are not this engine's; nothing was taken.
        """
        engine, cache = self._engine, self._cache()
        mine = cache_geometry(engine.pools, cache.lookahead)
        if dict(geometry) != mine:
            differing = sorted(k for k in {*geometry, *mine} if geometry.get(k) != mine.get(k))
            said = ", ".join(f"{k} {geometry.get(k)!r} (here {mine.get(k)!r})" for k in differing)
            raise ContractError(f"import: geometry differs in {said}, needs equal engines on both sides")
        if weight_version != engine.weight_version:
            raise ContractError(
                f"import: weight_version is {weight_version!r}, needs this engine's {engine.weight_version!r}"
            )
        size, page_bytes = engine.config.page_size, mine["page_bytes"]
        count = -(-rows // size)
        if rows < 1 or len(tokens) != rows + cache.lookahead or len(pages) != count * page_bytes:
            raise ContractError(
                f"import: {len(tokens)} tokens, {rows} rows and {len(pages)} bytes do not belong together, needs "
                f"{rows + cache.lookahead} tokens and {count * page_bytes} bytes"
            )
        vocab = engine.model.config.vocab_size
        if bad := [t for t in tokens if type(t) is not int or not 0 <= t < vocab]:
            raise ContractError(f"import: a token is {bad[0]!r}, needs 0 to {vocab - 1}")
        own = engine.scheduler.take_pages(count)
        if own is None:
            return 0
        table = torch.frombuffer(bytearray(pages), dtype=torch.uint8).view(count, page_bytes)
        begin = 0
        for pool in engine.pools.pools():
            width = pool[0].nbytes
            part = table[:, begin : begin + width].contiguous()
            pool[own] = part.view(pool.dtype).view(count, *pool.shape[1:]).to(pool.device)
            begin += width
        held = cache.insert(engine.namespace(cache_salt), list(tokens), own)
        engine.pages.release(held)
        return rows

    def _cache(self) -> RadixCache:
        cache = self._engine.scheduler.cache
        if cache is None:
            raise ContractError("engine: prefix caching is off, needs enable_prefix_caching=True to move prefixes")
        return cache


def _bytes(rows: Tensor) -> Tensor:
    """[n, ...] of any dtype -> u8 [n, bytes]."""
    return rows.contiguous().view(len(rows), -1).view(torch.uint8).cpu()
