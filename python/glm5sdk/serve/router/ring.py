"""A consistent-hash ring: where a key lives, and where it goes next."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from hashlib import blake2b

from glm5sdk.core.errors import ContractError

__all__ = ["Ring", "hash_key"]


def hash_key(key: str | bytes) -> int:
    """64 bits of BLAKE2b, the same in every process, so that several routers agree without talking."""
    data = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


class Ring:
    """Each node owns many points on a circle of hashes; a key belongs to the first point after its own hash.

    A node that joins takes about 1 / n of the keys, all from the others; one that leaves gives only its own away.
    """

    def __init__(self, nodes: tuple[str, ...] = (), points: int = 160) -> None:
        if points < 1:
            raise ContractError(f"ring: points is {points}, needs at least 1")
        self.points = points
        self._nodes: set[str] = set()
        self._hashes: list[int] = []
        self._owners: list[str] = []
        for node in nodes:
            self.add(node)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def add(self, node: str) -> None:
        """Put a node on the circle; one that is there already is refused."""
        if node in self._nodes:
            raise ContractError(f"ring: node {node!r} is on the ring, needs another name")
        self._nodes.add(node)
        self._arrange()

    def remove(self, node: str) -> None:
        """Take a node off the circle."""
        if node not in self._nodes:
            raise ContractError(f"ring: node {node!r} is not on the ring, needs one of {sorted(self._nodes)}")
        self._nodes.remove(node)
        self._arrange()

    def order(self, key: str | bytes) -> Iterator[str]:
        """Every node once, from the key's home on in the order in which the circle meets them."""
        seen: set[str] = set()
        start = bisect(self._hashes, hash_key(key))
        for i in range(len(self._owners)):
            node = self._owners[(start + i) % len(self._owners)]
            if node not in seen:
                seen.add(node)
                yield node
                if len(seen) == len(self._nodes):
                    return

    def _arrange(self) -> None:
        # Two nodes' points can share a hash; sorting by name as well makes the ring a function of the set of nodes.
        circle = sorted((hash_key(f"{node}-{i}"), node) for node in self._nodes for i in range(self.points))
        self._hashes = [point for point, _ in circle]
        self._owners = [node for _, node in circle]
