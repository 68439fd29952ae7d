"""PagePool: which pages of the cache are free, and how many holders each of the others has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glm5sdk.core.errors import ContractError
from glm5sdk.registry.contract_scalars import as_int

__all__ = ["PagePool"]


class PagePool:
    """Reference counts of a fixed number of pages; holds numbers, no tensors.

    One page id stands for that page in every pool of the engine: the latent KV of all layers, the MTP layer included,
    and their index keys. They are handed out, shared and given back together, so that no row can outlive its partner.

    Args:
        num_pages: how many there are; at least 1.
    """

    def __init__(self, num_pages: int) -> None:
        if as_int("page pool", "num_pages", num_pages) < 1:
            raise ContractError(f"page pool: num_pages is {num_pages}, needs at least 1")
        self._holders = [0] * int(num_pages)
        self._free = list(range(int(num_pages) - 1, -1, -1))
        self._watcher: Callable[[int], None] | None = None

    @property
    def total(self) -> int:
        return len(self._holders)

    @property
    def free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        """How many holders a page has; 0 when it is free."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages, one reference each; None, and nothing taken, when fewer are free."""
        if count < 0:
            raise ContractError(f"page pool: count is {count}, needs at least 0")
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """Add one holder to each page.

        Raises:
            RuntimeError: a page is free or there is no such page; nothing was changed.
        """
        for page in pages:
            self._must_be_held(page, "retained")
        for page in pages:
            self._holders[page] += 1
            if self._holders[page] == 2 and self._watcher:
                self._watcher(page)

    def release(self, pages: Sequence[int]) -> None:
        """Take one holder from each page; a page without holders is free.

        Raises:
            RuntimeError: a page is released more often than it is held; nothing was changed.
        """
        for done, page in enumerate(pages):
            try:
                self._must_be_held(page, "released")
            except RuntimeError:
                for undone in reversed(pages[:done]):
                    if self._holders[undone] == 0:
                        self._free.pop()
                    self._holders[undone] += 1
                raise
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
        if self._watcher:
            for page in pages:
                if self._holders[page] == 1:
                    self._watcher(page)

    def watch(self, watcher: Callable[[int], None]) -> None:
        """Have `watcher(page)` called whenever a page's holders went from one to two, or came back to one.

        Raises:
            RuntimeError: the pool has a watcher already; two caches in one pool would evict each other's pages.
        """
        if self._watcher is not None:
            raise RuntimeError("page pool: it has a watcher, needs none before it gets one")
        self._watcher = watcher

    def check(self) -> None:
        """Compare counts and free list.

        Raises:
            RuntimeError: they contradict each other.
        """
        unheld = {page for page, holders in enumerate(self._holders) if holders == 0}
        if len(self._free) != len(unheld) or set(self._free) != unheld or min(self._holders) < 0:
            raise RuntimeError(
                f"page pool: the free list holds {sorted(self._free)}, needs the pages without holders {sorted(unheld)}"
            )

    def _must_be_held(self, page: int, verb: str) -> None:
        if not 0 <= page < len(self._holders):
            raise RuntimeError(f"page pool: page to be {verb} is {page}, needs 0 to {len(self._holders) - 1}")
        if self._holders[page] < 1:
            raise RuntimeError(f"page pool: page {page} is {verb} while it is free, needs a holder")
