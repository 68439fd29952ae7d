"""RadixCache: pages of earlier requests, found again by the tokens that they begin with.

A tree of pages per namespace. Prefixes match token by token: full pages are shared, and of the page in which prompt and
cache part ways the engine copies the rows that match. References are the pool's: the tree is one holder of each of its
pages, every sequence another, and what the tree alone holds can be evicted, least recently released first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from glm5sdk.core.errors import ContractError
from glm5sdk.registry.contract_scalars import as_int
from glm5sdk.serve.pages import PagePool
from glm5sdk.serve.prefix_tree import Node, Root, Tokens, Valid, at_least, common, most, part

__all__ = ["Match", "RadixCache"]


@dataclass(frozen=True)
class Match:
    """What the cache knows of a prompt. The caller holds a reference on every page of it.

    Attributes:
        pages: full pages, in order, to be shared and never written.
        length: rows known: those of `pages` and `rows` more.
        source: the page whose first `rows` rows go on from there; the caller copies them into a page of its own and
            releases this one. None when `rows` is 0.
        rows: see `source`; fewer than a page has.
    """

    pages: list[int] = field(default_factory=list)
    length: int = 0
    source: int | None = None
    rows: int = 0

    @property
    def held(self) -> list[int]:
        """Every page the caller has to release one day."""
        return self.pages if self.source is None else [*self.pages, self.source]


class RadixCache:
    """Prefix cache over a pool of pages.

    Args:
        pool: whose pages these are; it can have one cache.
        page_size: rows a page.
        max_pages: pages the tree may hold at most; None is all of the pool.
        lookahead: tokens behind its own that a row depends on. A KV or index row depends on none; a row of the MTP
            layer depends on the next token, so a pool that shares pages with it needs 1: then the last token of a
            sequence has no row in the cache yet, and two sequences share rows up to the token before they part.
    """

    def __init__(self, pool: PagePool, page_size: int, max_pages: int | None = None, lookahead: int = 0) -> None:
        for name, value, low in (("page_size", page_size, 1), ("lookahead", lookahead, 0)):
            if as_int("prefix cache", name, value) < low:
                raise ContractError(f"prefix cache: {name} is {value}, needs at least {low}")
        if max_pages is not None and as_int("prefix cache", "max_pages", max_pages) < 0:
            raise ContractError(f"prefix cache: max_pages is {max_pages}, needs at least 0")
        self.pool, self.page_size, self.lookahead = pool, page_size, lookahead
        self.max_pages = pool.total if max_pages is None else min(max_pages, pool.total)
        self._roots: dict[str, Root] = {}
        self._nodes: dict[int, Node] = {}
        # A node enters when it stops being pinned, so children come before parents and the first is always a leaf.
        self._unpinned: OrderedDict[Node, None] = OrderedDict()
        pool.watch(self._holders_changed)

    @property
    def cached_pages(self) -> int:
        return len(self._nodes)

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` could free now."""
        return len(self._unpinned)

    def match(self, namespace: str, tokens: Sequence[int], pools: Sequence[str] = ()) -> Match:
        """The longest prefix of `tokens` whose rows are cached, retained for the caller.

        Args:
            namespace: sequences see each other only under equal ones (a salt, an adapter, a weight version).
            tokens: the prompt; leave out the last token if its hidden state has to be computed anyway.
            pools: a row counts when each of these holds it; none given: when it is in the tree.
        """
        node: Node | None = self._roots.get(namespace)
        if node is None:
            return Match()
        pages, start = [], 0
        while child := node.children.get(self._key(tokens, start, self.page_size)):
            if child.valid_rows(pools) < self.page_size:
                break
            pages.append(child.page)
            node, start = child, start + self.page_size
        source, rows = None, 0
        for child, same in node.nearest(self._key(tokens, start, self.page_size)):
            if same - self.lookahead <= rows:
                break
            found = min(same - self.lookahead, child.rows, child.valid_rows(pools))
            if found > rows:
                source, rows = child.page, found
        match = Match(pages, start + rows, source, rows)
        self.pool.retain(match.held)
        return match

    def insert(self, namespace: str, tokens: Sequence[int], pages: Sequence[int], valid: Valid = None) -> list[int]:
        """Remember a sequence, finished or not; its cached rows must never be written again.

        Args:
            namespace: as in `match`.
            tokens: of the sequence so far; the last page may be filled in part.
            pages: its pages, in order, each held by the caller. Pages past the last token stay as they are.
            valid: pool name -> rows that hold this sequence there, counted from the first; None: all, everywhere.

        Returns:
            The pages that the caller holds from now on in place of `pages`: where the tree had an equal full page,
            that one; the caller's own was released.

        Raises:
            ContractError: too few pages. RuntimeError: a page is free, or cached under other tokens. Nothing changed.
        """
        rows = max(len(tokens) - self.lookahead, 0)
        used = -(-rows // self.page_size)
        if len(pages) < used:
            raise ContractError(f"prefix cache: pages holds {len(pages)} pages, needs {used} for {rows} rows")
        root = self._roots.get(namespace) or Root(namespace)
        path = self._shared_path(root, tokens, rows)
        self._check_pages(pages[:used], [root, *path], tokens, rows)
        held = list(pages)
        for index, node in enumerate(path):
            held[index] = self._share(node, held[index], part(valid, index * self.page_size, self.page_size))
        parent: Node = path[-1] if path else root
        guard = [parent.page] if path else []
        self.pool.retain(guard)  # making room must not evict what the new pages will hang below
        for index in range(len(path), used):
            start = index * self.page_size
            count = min(rows - start, self.page_size)
            node = Node(parent, self._key(tokens, start, count), count, held[index], part(valid, start, count))
            if self._known(parent, node) or not self._add(parent, node):
                break
            parent = node
        if root.children:
            self._roots[namespace] = root
        self.pool.release(guard)
        return held

    def evict(self, count: int) -> int:
        """Free up to `count` pages that nobody uses, least recently released first.

        Returns:
            How many were freed; fewer than `count` when the others are in use.
        """
        freed = 0
        while freed < count and self._unpinned:
            self._remove(next(iter(self._unpinned)))
            freed += 1
        return freed

    def namespaces(self) -> list[str]:
        """Those that hold something."""
        return list(self._roots)

    def flush(self, namespace: str | None = None) -> None:
        """Forget a namespace, or all; pages that sequences use live on until those release them."""
        for name in list(self._roots) if namespace is None else [namespace] * (namespace in self._roots):
            nodes = list(self._roots.pop(name).walk())
            for node in reversed(nodes):
                self._remove(node)

    def check(self) -> None:
        """Compare tree, counters and pool; for tests and for finding faults.

        Raises:
            RuntimeError: they contradict each other.
        """
        nodes = [node for root in self._roots.values() for node in root.walk()]
        if {node.page: node for node in nodes} != self._nodes or len(nodes) != len(self._nodes):
            raise RuntimeError(f"prefix cache: the tree has {len(nodes)} nodes, needs one for each of {self._nodes}")
        if len(nodes) > self.max_pages:
            raise RuntimeError(f"prefix cache: the tree has {len(nodes)} pages, needs at most {self.max_pages}")
        for node in nodes:
            holders = self.pool.references(node.page)
            pinned = sum(child.pinned for child in node.children.values())
            if holders < 1 or node.busy != (holders > 1) or node.pinned_children != pinned:
                raise RuntimeError(f"prefix cache: page {node.page} has {holders} holders, needs what its node counts")
            if (node in self._unpinned) == node.pinned or (node.children and node.rows != self.page_size):
                raise RuntimeError(f"prefix cache: the node of page {node.page} contradicts itself")
            if node.order != sorted(node.children) or not 0 < node.rows == len(node.key) - self.lookahead:
                raise RuntimeError(f"prefix cache: page {node.page} holds {node.rows} rows, needs its key's")

    def _key(self, tokens: Sequence[int], start: int, rows: int) -> Tokens:
        return tuple(tokens[start : start + rows + self.lookahead])

    def _shared_path(self, root: Root, tokens: Sequence[int], rows: int) -> list[Node]:
        """Nodes of the full pages that the tree has already."""
        node: Node = root
        path: list[Node] = []
        for start in range(0, rows - self.page_size + 1, self.page_size):
            child = node.children.get(self._key(tokens, start, self.page_size))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _check_pages(self, pages: Sequence[int], places: Sequence[Node], tokens: Sequence[int], rows: int) -> None:
        """A page may be in the tree already only at its place, with more or fewer rows of the same tokens.

        Page i belongs below `places[i]`, as far as there is such a node yet.
        """
        if len(set(pages)) != len(pages):
            raise RuntimeError(f"prefix cache: pages is {list(pages)}, needs each page once")
        for index, page in enumerate(pages):
            if self.pool.references(page) < 1:
                raise RuntimeError(f"prefix cache: page {page} is free, needs a holder before it is cached")
            if (node := self._nodes.get(page)) is None:
                continue
            start = index * self.page_size
            key = self._key(tokens, start, min(rows - start, self.page_size))
            there = index < len(places) and places[index] is node.parent
            if not there or common(node.key, key) < min(len(node.key), len(key)):
                raise RuntimeError(f"prefix cache: page {page} is cached under other tokens, needs a page of its own")

    def _share(self, node: Node, page: int, valid: Valid) -> int:
        """Keep one of two equal full pages; the one the caller goes on with."""
        if node.page == page:
            node.valid = most(node.valid, valid)
        elif at_least(node.valid, valid, self.page_size):
            self.pool.retain([node.page])
            self.pool.release([page])
        elif at_least(valid, node.valid, self.page_size):
            if page in self._nodes:
                self._remove(self._nodes[page])
            old = node.page
            del self._nodes[old]
            node.page, node.valid, self._nodes[page] = page, valid, node
            self.pool.retain([page])
            self._set_busy(node)
            self.pool.release([old])
        else:
            return page
        return node.page

    def _known(self, parent: Node, new: Node) -> bool:
        """Whether the tree already has all that a node would add."""
        own = self._nodes.get(new.page)
        if own is not None and own.rows >= new.rows:
            own.valid = most(own.valid, new.valid)
            return True
        if (same := parent.children.get(new.key)) is not None:
            return at_least(same.valid, new.valid, new.rows) or not at_least(new.valid, same.valid, new.rows)
        after = parent.after(new.key)
        return after is not None and after.key[: len(new.key)] == new.key and at_least(after.valid, new.valid, new.rows)

    def _add(self, parent: Node, new: Node) -> bool:
        """Put a node below its parent in place of those it makes needless; False when there is no room for it."""
        if (own := self._nodes.get(new.page)) is not None:
            new.valid = most(own.valid, new.valid)
            self._remove(own)
        while (old := parent.before(new.key)) is not None:
            if old.key != new.key[: len(old.key)] or not at_least(new.valid, old.valid, old.rows):
                break
            self._remove(old)
        if len(self._nodes) >= self.max_pages and not self.evict(1):
            return False
        parent.attach(new)
        self._nodes[new.page] = new
        self.pool.retain([new.page])
        self._set_busy(new)
        return True

    def _remove(self, node: Node) -> None:
        """Take out a leaf and give up its page."""
        del self._nodes[node.page]
        if node.busy:
            node.busy = False
            self._pin_changed(node)
        del self._unpinned[node]
        if (parent := node.parent) is not None:
            parent.detach(node)
            if isinstance(parent, Root) and not parent.children:
                self._roots.pop(parent.name, None)
        self.pool.release([node.page])

    def _holders_changed(self, page: int) -> None:
        if (node := self._nodes.get(page)) is not None:
            self._set_busy(node)

    def _set_busy(self, node: Node) -> None:
        was = node.pinned
        node.busy = self.pool.references(node.page) > 1
        if node.pinned != was:
            self._pin_changed(node)

    def _pin_changed(self, node: Node) -> None:
        """A node became pinned or ceased to be; tell its ancestors as far as it changes them."""
        while (parent := node.parent) is not None:
            if node.pinned:
                self._unpinned.pop(node, None)
            else:
                self._unpinned[node] = None
            was = parent.pinned
            parent.pinned_children += 1 if node.pinned else -1
            if parent.pinned == was:
                return
            node = parent
