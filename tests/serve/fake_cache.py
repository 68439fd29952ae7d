"""A paged prefix cache without tensors: a page's content is a hash of what it was computed from."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glm5sdk.core.errors import CapacityError, ContractError
from glm5sdk.serve.transfer import Part, Prefix, pack, unpack

PAGE = 4
GEOMETRY = {"page_size": PAGE, "page_bytes": 32, "kind": "fake"}


def packed(export: Mapping[str, Any], pages: bytes, salt: str) -> bytes:
    """What travels of an export."""
    parts = {"pages": Part("uint8", (export["num_pages"], 32), pages)}
    prefix = Prefix(export["tokens"], export["rows"], export["weight_version"], export["geometry"], parts, salt)
    return b"".join(pack(prefix))


def unpacked(blob: bytes) -> dict[str, Any]:
    """Arguments of import_prefix."""
    got = unpack(blob)
    return {"tokens": list(got.token_ids), "rows": got.rows, "weight_version": got.weight_version,
            "geometry": got.geometry, "pages": bytes(got.parts["pages"].data), "cache_salt": got.salt}  # fmt: skip


def page_content(version: str, salt: str, tokens: Sequence[int]) -> bytes:
    """What a page holds that ends a prefix of these tokens."""
    return hashlib.sha256(repr((version, salt, list(tokens))).encode()).digest()


def next_token(version: str, salt: str, tokens: Sequence[int]) -> int:
    """What a model with these weights says, computed from nothing."""
    whole = len(tokens) // PAGE * PAGE
    pages = [page_content(version, salt, tokens[: end + PAGE]) for end in range(0, whole, PAGE)]
    return _said(version, pages, tokens[whole:])


def _said(version: str, pages: Sequence[bytes], rest: Sequence[int]) -> int:
    return hashlib.sha256(version.encode() + b"".join(pages) + repr(list(rest)).encode()).digest()[0]


class FakeCache:
    """The engine's commands on prefixes, with page accounting and leases that end by a clock."""

    def __init__(self, pages: int, clock: Callable[[], float], version: str = "w0") -> None:
        self.total, self.clock, self.version = pages, clock, version
        self.cache: dict[tuple[str, tuple[int, ...]], bytes] = {}
        self.leases: dict[str, tuple[float, list[bytes]]] = {}
        self._names = itertools.count()

    @property
    def free(self) -> int:
        """Pages that no lease pins; those of the cache count as free, as in EngineStats."""
        self._expire()
        return self.total - len({page for _, pages in self.leases.values() for page in pages})

    def generate(self, tokens: Sequence[int], salt: str = "") -> int:
        """The next token, by way of whatever the cache has; then the cache has the prompt."""
        tokens, pages = list(tokens), []
        for start in range(0, len(tokens) // PAGE * PAGE, PAGE):
            key = (salt, tuple(tokens[: start + PAGE]))
            content = self.cache.get(key) or page_content(self.version, salt, key[1])
            self._keep(key, content)
            pages.append(content)
        return _said(self.version, pages, tokens[len(tokens) // PAGE * PAGE :])

    def update(self, version: str) -> None:
        """New weights: what was cached means nothing now."""
        self.version = version
        self.cache.clear()

    def crash(self) -> None:
        """The process starts anew."""
        self.cache.clear()
        self.leases.clear()

    def command(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """What `EngineClient.control` does for these names."""
        self._expire()
        known = ("export_prefix", "read_lease", "import_prefix", "renew_lease", "release_lease")
        if name not in known:
            raise ContractError(f"fake: command is {name!r}, needs one of {', '.join(known)}")
        return getattr(self, name)(**arguments)

    def export_prefix(self, token_ids: Sequence[int], cache_salt: str = "", seconds: float = 30.0) -> dict[str, Any]:
        pages: list[bytes] = []
        while (len(pages) + 1) * PAGE <= len(token_ids):
            content = self.cache.get((cache_salt, tuple(token_ids[: (len(pages) + 1) * PAGE])))
            if content is None:
                break
            pages.append(content)
        rows, lease = len(pages) * PAGE, None
        if rows:
            lease = f"lease{id(self)}-{next(self._names)}"
            self.leases[lease] = (self.clock() + seconds, pages)
        return {"lease_id": lease, "rows": rows, "tokens": list(token_ids[:rows]), "num_pages": len(pages),
                "weight_version": self.version, "geometry": GEOMETRY}  # fmt: skip

    def read_lease(self, lease_id: str, first: int = 0, count: int | None = None) -> bytes:
        if lease_id not in self.leases:
            raise ContractError("fake: lease is gone, needs one that lives")
        pages = self.leases[lease_id][1]
        return b"".join(pages[first : None if count is None else first + count])

    def import_prefix(
        self, tokens: Sequence[int], rows: int, weight_version: str, geometry: Mapping[str, Any], pages: bytes,
        cache_salt: str = "",
    ) -> int:  # fmt: skip
        if weight_version != self.version or geometry != GEOMETRY or len(pages) != rows // PAGE * 32:
            raise ContractError("fake: the prefix is another engine's, needs one of this kind")
        for number in range(rows // PAGE):
            key = (cache_salt, tuple(tokens[: (number + 1) * PAGE]))
            self._keep(key, pages[number * 32 : (number + 1) * 32])
        return rows

    def renew_lease(self, lease_id: str, seconds: float = 30.0) -> bool:
        if lease_id in self.leases:
            self.leases[lease_id] = (self.clock() + seconds, self.leases[lease_id][1])
        return lease_id in self.leases

    def release_lease(self, lease_id: str) -> bool:
        return self.leases.pop(lease_id, None) is not None

    def _keep(self, key: tuple[str, tuple[int, ...]], content: bytes) -> None:
        self.cache.pop(key, None)
        self.cache[key] = content
        pinned = {page for _, pages in self.leases.values() for page in pages}
        while len({*self.cache.values(), *pinned}) > self.total:
            loose = next((k for k, page in self.cache.items() if page not in pinned and k != key), None)
            if loose is None:
                raise CapacityError("fake: every page is pinned")
            del self.cache[loose]

    def _expire(self) -> None:
        for lease in [name for name, (end, _) in self.leases.items() if end <= self.clock()]:
            del self.leases[lease]
