"""A paged prefix cache without tensors: a page's content is a hash of what it was computed from."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glm5sdk.core.errors import CapacityError, ContractError
from glm5sdk.serve.transfer import Part, Prefix, pack, unpack

PAGE = 4
GEOMETRY: dict[str, int | str] = {"page_size": PAGE, "kind": "fake"}


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
        if name == "export_prefix":
            return self._export(arguments["token_ids"], arguments.get("salt", ""), arguments.get("ttl", 30.0))
        if name == "import_prefix":
            prefix = unpack(arguments["blob"])
            prefix.check(self.version, GEOMETRY, {"pages": ("uint8", (len(prefix.token_ids) // PAGE, 32))})
            data = bytes(prefix.parts["pages"].data)
            for number in range(len(prefix.token_ids) // PAGE):
                key = (prefix.salt, tuple(prefix.token_ids[: (number + 1) * PAGE]))
                self._keep(key, data[number * 32 : (number + 1) * 32])
            return len(prefix.token_ids)
        if name == "release_lease":
            return self.leases.pop(arguments["lease_id"], None) is not None
        if name == "renew_lease":
            if arguments["lease_id"] not in self.leases:
                raise ContractError("fake: lease is gone, needs one that lives")
            _, pages = self.leases[arguments["lease_id"]]
            self.leases[arguments["lease_id"]] = (self.clock() + arguments["ttl"], pages)
            return True
        raise ContractError(f"fake: command is {name!r}, needs one of the cache's")

    def _export(self, tokens: Sequence[int], salt: str, ttl: float) -> dict[str, Any]:
        pages: list[bytes] = []
        while (len(pages) + 1) * PAGE <= len(tokens):
            content = self.cache.get((salt, tuple(tokens[: (len(pages) + 1) * PAGE])))
            if content is None:
                break
            pages.append(content)
        count = len(pages) * PAGE
        if not count:
            return {"tokens": 0, "blob": b"", "weight_version": self.version, "lease_id": ""}
        lease = f"lease{id(self)}-{next(self._names)}"
        self.leases[lease] = (self.clock() + ttl, pages)
        parts = {"pages": Part("uint8", (len(pages), 32), b"".join(pages))}
        blob = b"".join(pack(Prefix(list(tokens[:count]), self.version, GEOMETRY, parts, salt)))
        return {"tokens": count, "blob": blob, "weight_version": self.version, "lease_id": lease}

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
