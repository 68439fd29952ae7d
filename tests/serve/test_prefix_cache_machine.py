"""Random sequences over one pool: pages are simulated row by row, so that every row a match hands out can be read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glm5sdk.serve.pages import PagePool
from glm5sdk.serve.prefix_cache import RadixCache

PAGES = 12
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
NAMES = st.sampled_from(["", "salt"])


@dataclass
class Sequence:
    name: str
    tokens: list[int]
    pages: list[int]
    inserted: int = 0


class CacheMachine(RuleBasedStateMachine):
    """A small engine: starts, decodes, inserts, ends, and makes room like a real one."""

    @initialize(page_size=st.integers(1, 4), lookahead=st.integers(0, 1), most=st.sampled_from([None, 0, 3, 6]))
    def start(self, page_size, lookahead, most):
        self.pool = PagePool(PAGES)
        self.cache = RadixCache(self.pool, page_size, most, lookahead)
        self.size, self.ahead = page_size, lookahead
        self.rows: dict[int, list] = {}  # page -> what each row was computed from
        self.claimed: dict[int, int] = {}  # page -> rows of it that were inserted
        self.alive: list[Sequence] = []

    def row(self, sequence: Sequence, index: int):
        """What a row is a function of; the last ones wait for tokens that are not there yet."""
        end = index + 1 + self.ahead
        return (sequence.name, tuple(sequence.tokens[:end])) if end <= len(sequence.tokens) else None

    def compute(self, sequence: Sequence, start: int) -> bool:
        """Write the rows from `start` on; False when the pool has no page left."""
        need = -(-len(sequence.tokens) // self.size) - len(sequence.pages)
        if need > self.pool.free:
            self.cache.evict(need - self.pool.free)
        pages = self.pool.allocate(need)
        if pages is None:
            return False
        for page in pages:
            self.rows[page], self.claimed[page] = [None] * self.size, 0
        sequence.pages += pages
        for index in range(start, len(sequence.tokens)):
            self.rows[sequence.pages[index // self.size]][index % self.size] = self.row(sequence, index)
        return True

    def in_tree(self) -> dict[int, int]:
        """Pages that somebody beside the sequences holds -> rows of them that may be handed out."""
        held = Counter(page for sequence in self.alive for page in sequence.pages)
        return {page: self.claimed[page] for page in range(PAGES) if self.pool.references(page) - held[page] == 1}

    @rule(name=NAMES, tokens=PROMPTS)
    def begin(self, name, tokens):
        sequence = Sequence(name, tokens, [])
        tree = self.in_tree()
        rows = {row for page, count in tree.items() for row in self.rows[page][:count]}
        expected = 0
        while (row := self.row(sequence, expected)) in rows and row is not None:
            expected += 1
        match = self.cache.match(name, tokens)
        assert match.length == expected
        for index in range(match.length):
            page = match.held[index // self.size]
            assert index % self.size < tree[page]
            assert self.rows[page][index % self.size] == self.row(sequence, index)
        sequence.pages = list(match.pages)
        if match.source is not None:
            copy = self.pool.allocate(1) or (self.cache.evict(1) and self.pool.allocate(1))
            if copy:
                self.rows[copy[0]] = self.rows[match.source][: match.rows] + [None] * (self.size - match.rows)
                self.claimed[copy[0]] = 0
                sequence.pages += copy
            self.pool.release([match.source])
        done = min(match.length, len(sequence.pages) * self.size)
        if self.compute(sequence, done):
            self.alive.append(sequence)
        else:
            self.pool.release(sequence.pages)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), tokens=PROMPTS)
    def go_on(self, data, tokens):
        sequence = data.draw(st.sampled_from(self.alive))
        old = len(sequence.tokens)
        sequence.tokens = sequence.tokens + tokens[:3]
        if not self.compute(sequence, max(old - self.ahead, sequence.inserted)):
            sequence.tokens = sequence.tokens[:old]

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), finished=st.booleans())
    def remember(self, data, finished):
        sequence = data.draw(st.sampled_from(self.alive))
        sequence.pages = self.cache.insert(sequence.name, sequence.tokens, sequence.pages)
        sequence.inserted = max(len(sequence.tokens) - self.ahead, 0)
        for index in range(sequence.inserted):
            page = sequence.pages[index // self.size]
            self.claimed[page] = max(self.claimed[page], index % self.size + 1)
            assert self.rows[page][index % self.size] == self.row(sequence, index)
        if finished:
            self.end(sequence)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def give_up(self, data):
        self.end(data.draw(st.sampled_from(self.alive)))

    def end(self, sequence: Sequence):
        self.alive = [other for other in self.alive if other is not sequence]
        self.pool.release(sequence.pages)

    @rule(count=st.integers(0, 4))
    def evict(self, count):
        possible, free = self.cache.evictable_pages, self.pool.free
        assert self.cache.evict(count) == min(count, possible) == self.pool.free - free

    @rule(name=st.sampled_from([None, "", "salt"]))
    def flush(self, name):
        self.cache.flush(name)
        assert name is not None or not self.in_tree()

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        self.cache.check()
        held = Counter(page for sequence in self.alive for page in sequence.pages)
        extra = [self.pool.references(page) - held[page] for page in range(PAGES)]
        assert set(extra) <= {0, 1} and sum(extra) == self.cache.cached_pages
        only_cached = sum(1 for page in range(PAGES) if extra[page] and not held[page])
        assert self.cache.evictable_pages <= only_cached
        assert self.pool.free + len(held) + only_cached == PAGES

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for sequence in list(self.alive):
            self.end(sequence)
        assert self.cache.evictable_pages == self.cache.cached_pages
        self.cache.evict(PAGES)
        assert self.pool.free == PAGES


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
