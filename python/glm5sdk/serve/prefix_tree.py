"""Nodes of the prefix cache: one page each, findable by the tokens whose rows it holds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Node", "Root", "Tokens", "Valid", "at_least", "common", "most", "part"]

Tokens = tuple[int, ...]
Valid = Mapping[str, int] | None
"""Rows, counted from the first, that each pool holds; None is all rows in every pool."""


class Node:
    """A page below its parent's; a root has no page.

    Attributes:
        key: tokens of its rows, and those that its last row looks ahead to.
        rows: how many rows it holds, at most a page's. Only full nodes have children.
        page: the page's id.
        valid: how many of the rows each pool holds.
        children: by key; `order` has the same keys sorted, so that the longest common prefix is a neighbour.
        busy: somebody beside the tree holds the page.
        pinned_children: children that are busy or above a busy one.
    """

    __slots__ = ("busy", "children", "key", "order", "page", "parent", "pinned_children", "rows", "valid")

    def __init__(self, parent: Node | None, key: Tokens, rows: int, page: int, valid: Valid) -> None:
        self.parent, self.key, self.rows, self.page, self.valid = parent, key, rows, page, valid
        self.children: dict[Tokens, Node] = {}
        self.order: list[Tokens] = []
        self.busy = False
        self.pinned_children = 0

    @property
    def pinned(self) -> bool:
        return self.busy or self.pinned_children > 0

    def valid_rows(self, pools: Sequence[str]) -> int:
        """Rows that every one of these pools holds."""
        return self.rows if self.valid is None else min((self.valid.get(p, 0) for p in pools), default=self.rows)

    def attach(self, child: Node) -> None:
        self.children[child.key] = child
        insort(self.order, child.key)

    def detach(self, child: Node) -> None:
        del self.children[child.key]
        del self.order[bisect_left(self.order, child.key)]
        child.parent = None

    def before(self, key: Tokens) -> Node | None:
        """The last child whose key sorts up to `key`."""
        index = bisect_right(self.order, key)
        return self.children[self.order[index - 1]] if index else None

    def after(self, key: Tokens) -> Node | None:
        """The first child whose key sorts from `key` on; the children that begin with `key` start there."""
        index = bisect_left(self.order, key)
        return self.children[self.order[index]] if index < len(self.order) else None

    def nearest(self, key: Tokens) -> Iterator[tuple[Node, int]]:
        """Children by falling length of the prefix that their keys share with `key`; (child, length)."""
        right = bisect_left(self.order, key)
        left = right - 1
        while left >= 0 or right < len(self.order):
            before = common(self.order[left], key) if left >= 0 else -1
            after = common(self.order[right], key) if right < len(self.order) else -1
            if after >= before:
                yield self.children[self.order[right]], after
                right += 1
            else:
                yield self.children[self.order[left]], before
                left -= 1

    def walk(self) -> Iterator[Node]:
        """Every node below this one, parents before children."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class Root(Node):
    """The top of a namespace's tree."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__(None, (), 0, -1, None)
        self.name = name


def common(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix."""
    short = min(len(a), len(b))
    if a[:short] == b[:short]:
        return short
    return next(i for i in range(short) if a[i] != b[i])


def part(valid: Valid, start: int, rows: int) -> Valid:
    """Of the validity of a sequence, that of its rows `start` to `start + rows`."""
    return None if valid is None else {pool: min(max(n - start, 0), rows) for pool, n in valid.items()}


def at_least(a: Valid, b: Valid, rows: int) -> bool:
    """Whether `a` covers of the first `rows` rows all that `b` does."""
    if a is None or b is None:
        return a is None
    return all(a.get(pool, 0) >= min(n, rows) for pool, n in b.items())


def most(a: Valid, b: Valid) -> Valid:
    """What is valid in a page of which both are true."""
    return None if a is None or b is None else {p: max(a.get(p, 0), b.get(p, 0)) for p in {**a, **b}}
