"""PrefixIndex: which replica has seen how much of a prompt, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise

from glm5sdk.core.errors import ContractError

__all__ = ["PrefixIndex", "chunk_chain"]


def chunk_chain(prompt: bytes, chunk: int, longest: int, salt: bytes = b"") -> list[bytes]:
    """Names of the whole chunks of a prompt; each one's name also names all that stands before it.

    Args:
        prompt: the prompt's bytes.
        chunk: bytes a chunk.
        longest: chunks at most; what comes after does not count.
        salt: prompts under different salts share nothing.

    Returns:
        16 bytes a chunk: equal names mean equal prefixes.
    """
    cuts = range(0, min(len(prompt) // chunk, longest) * chunk + 1, chunk)
    chain, before = [], blake2b(salt, digest_size=16).digest()
    for start, end in pairwise(cuts):
        before = blake2b(prompt[start:end], digest_size=16, key=before).digest()
        chain.append(before)
    return chain


class PrefixIndex:
    """A trie of prompts whose nodes are known by the hash of their path; each node says which replicas have it.

    It follows what the replicas' prefix caches hold by what was sent to them. It may be wrong either way, and then a
    request costs time, never a wrong token: replicas look for themselves.
    """

    def __init__(self, capacity: int) -> None:
        """Keep at most `capacity` chunks, the least recently used go first."""
        if capacity < 1:
            raise ContractError(f"prefix index: capacity is {capacity}, needs at least 1")
        self.capacity = capacity
        # A chunk's holders are bits of one number: a set for each would be most of the memory.
        self._nodes: OrderedDict[bytes, int] = OrderedDict()
        self._bits: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def insert(self, chain: Sequence[bytes], replica: str) -> None:
        """The replica has been given this prompt."""
        bit = self._bit(replica)
        # Deepest first: a node is always younger than its children, so eviction takes leaves and leaves no orphan.
        for name in reversed(chain[: self.capacity]):
            self._nodes[name] = self._nodes.get(name, 0) | bit
            self._nodes.move_to_end(name)
        while len(self._nodes) > self.capacity:
            self._nodes.popitem(last=False)

    def matched(self, chain: Sequence[bytes]) -> dict[str, float]:
        """The fraction of the chain, from its start, that each replica has; replicas without any are left out."""
        found: dict[str, float] = {}
        alive, depth = -1, 0
        for name in chain:
            here = alive & self._nodes.get(name, 0)
            self._reached(found, alive & ~here, depth, len(chain))
            alive = here
            if not alive:
                return found
            depth += 1
        self._reached(found, alive, depth, len(chain))
        return found

    def forget(self, replica: str) -> None:
        """The replica has lost its cache (it is gone, has restarted, or has new weights)."""
        bit = self._bits.pop(replica, 0)
        for name in [name for name, holders in self._nodes.items() if holders & bit]:
            self._nodes[name] &= ~bit
            if not self._nodes[name]:
                del self._nodes[name]

    def _reached(self, found: dict[str, float], holders: int, depth: int, length: int) -> None:
        if holders and depth:
            found.update({replica: depth / length for replica, bit in self._bits.items() if holders & bit})

    def _bit(self, replica: str) -> int:
        if replica not in self._bits:
            taken = sum(self._bits.values())
            self._bits[replica] = ~taken & (taken + 1)  # the lowest that is free
        return self._bits[replica]
