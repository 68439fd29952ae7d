"""RadixCache: what single calls promise, and random sequences against a list of everything inserted."""

from __future__ import annotations

import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.pages import PagePool
from glm5sdk.serve.prefix_cache import Match, RadixCache

LETTERS = st.lists(st.integers(0, 1), max_size=11)


def filled(pages: int = 16, page_size: int = 4, **options) -> tuple[PagePool, RadixCache]:
    pool = PagePool(pages)
    return pool, RadixCache(pool, page_size, **options)


def put(cache: RadixCache, tokens, namespace: str = "", valid=None, check: bool = True) -> list[int]:
    """Insert a sequence in pages of its own and finish it; returns what it held at the end."""
    pages = cache.pool.allocate(-(-len(tokens) // cache.page_size))
    assert pages is not None
    held = cache.insert(namespace, tokens, pages, valid)
    cache.pool.release(held)
    if check:
        cache.check()
        cache.pool.check()
    return held


def known(cache: RadixCache, tokens, namespace: str = "", pools=()) -> int:
    match = cache.match(namespace, tokens, pools)
    assert match.length == len(match.pages) * cache.page_size + match.rows
    assert (match.source is None) == (match.rows == 0) and match.rows < cache.page_size
    cache.pool.release(match.held)
    return match.length


def lcp(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_full_pages_are_shared_and_the_last_one_is_named_as_source():
    pool, cache = filled()
    held = put(cache, range(10))
    match = cache.match("", [0, 1, 2, 3, 4, 5, 6, 7, 8, 99])
    assert match == Match(held[:2], 9, held[2], 1)
    assert [pool.references(page) for page in held] == [2, 2, 2]
    assert cache.evict(9) == 0 and cache.evictable_pages == 0
    pool.release(match.held)
    assert cache.evictable_pages == cache.cached_pages == 3
    assert cache.match("other", range(10)) == Match() and cache.match("", []) == Match()


def test_equal_pages_are_kept_once():
    pool, cache = filled()
    first = put(cache, range(8))
    own = pool.allocate(3)
    held = cache.insert("", range(9), own)
    assert held == [*first, own[2]] and pool.references(first[0]) == 2 and pool.references(own[0]) == 0
    pool.release(held)
    assert cache.cached_pages == 3 and pool.free == 13


def test_a_growing_sequence_is_inserted_again_and_again():
    pool, cache = filled(page_size=3)
    pages: list[int] = []
    for length in range(1, 20):
        if length % 3 == 1:
            pages += pool.allocate(1)
        assert cache.insert("", range(length), pages) == pages
        cache.check()
        assert cache.cached_pages == len(pages) and known(cache, range(30)) == length
    pool.release(pages)
    assert cache.evict(3) == 3 and known(cache, range(30)) == 12


def test_continuations_that_part_inside_a_page_are_all_found():
    _, cache = filled()
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 9], [1, 2, 3, 8, 6, 6], [1, 7]):
        put(cache, tokens)
    assert [known(cache, t) for t in ([1, 2, 3, 4, 5, 0], [1, 2, 9, 9], [1, 2, 3, 8, 6], [1, 7, 7], [1, 2, 0])] == [
        5, 3, 5, 2, 2]  # fmt: skip
    put(cache, [1, 2])  # every row of it is in another page
    assert cache.cached_pages == 6


def test_the_least_recently_released_leaf_goes_first():
    _, cache = filled(page_size=2)
    for tokens in ([1, 1, 1, 1], [2, 2, 2, 2], [3, 3]):
        put(cache, tokens)
    known(cache, [1, 1, 1, 1])
    assert cache.evict(1) == 1 and known(cache, [2, 2, 2, 2]) == 2
    assert cache.evict(1) == 1 and known(cache, [3, 3]) == 0
    assert cache.evict(1) == 1 and known(cache, [1, 1, 1, 1]) == 2  # [2, 2] was used after it
    assert cache.evict(99) == 2 and cache.pool.free == cache.pool.total


def test_max_pages_makes_room_for_newer_pages_only():
    pool, cache = filled(page_size=2, max_pages=2)
    put(cache, [1, 1, 1, 1])
    put(cache, [2, 2, 2])
    assert (known(cache, [1, 1]), known(cache, [2, 2, 2])) == (0, 3)
    match = cache.match("", [2, 2, 2])
    put(cache, [3, 3])
    assert (known(cache, [3, 3]), cache.cached_pages) == (0, 2)
    put(cache, [2, 2, 2, 2])  # takes the place of the page with fewer rows
    assert (known(cache, [2, 2, 2, 2]), cache.cached_pages) == (4, 2)
    pool.release(match.held)
    _, nothing = filled(max_pages=0)
    put(nothing, range(8))
    assert nothing.cached_pages == 0 and nothing.pool.free == 16


def test_making_room_never_evicts_the_path_that_grows():
    pool, cache = filled(page_size=2, max_pages=1)
    put(cache, [1, 1], valid={"kv": 2, "mtp": 0})
    own = pool.allocate(2)
    held = cache.insert("", [1, 1, 3, 3], own, valid={"kv": 0, "mtp": 4})  # neither page holds all the other does
    cache.check()
    assert held == own and known(cache, [1, 1, 3, 3], pools=["kv"]) == 2
    pool.release(held)


def test_flush_forgets_and_leaves_pages_in_use_alone():
    pool, cache = filled()
    put(cache, range(9), "a")
    put(cache, range(9), "b")
    match = cache.match("a", range(9))
    cache.flush("a")
    cache.flush("never heard of")
    cache.check()
    assert (known(cache, range(9), "a"), known(cache, range(9), "b")) == (0, 9)
    assert [pool.references(page) for page in match.held] == [1, 1, 1]
    cache.flush()
    assert cache.cached_pages == cache.evictable_pages == 0 and pool.free == 13
    pool.release(match.held)
    assert pool.free == 16


def test_rows_that_look_ahead_are_shared_up_to_the_token_before_the_parting():
    _, cache = filled(lookahead=1)
    put(cache, [1, 2, 3, 4, 5, 6])
    assert [known(cache, t) for t in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9], [1, 2, 3, 4], [1, 9], [9])] == [
        5,
        3,
        3,
        0,
        0,
    ]
    put(cache, [1, 2, 3, 4, 9, 9])
    assert [known(cache, t) for t in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9])] == [5, 5]


def test_mistakes_are_refused_before_anything_changes():
    pool, cache = filled()
    held = cache.insert("", range(6), pool.allocate(2))
    own = pool.allocate(2)
    free = next(page for page in range(16) if not pool.references(page))
    before = [pool.references(page) for page in range(16)]
    with pytest.raises(ContractError, match="needs 2 for 5 rows"):
        cache.insert("", range(5), own[:1])
    for tokens, pages, words in (
        (range(8), [own[0], free], "is free"),
        (range(8), [own[0], own[0]], "each page once"),
        ([9] * 8, [own[0], held[1]], "other tokens"),
        (range(8), [held[1], own[0]], "other tokens"),
        ([0, 1, 2, 3, 9], held, "other tokens"),
    ):
        with pytest.raises(RuntimeError, match=words):
            cache.insert("", tokens, pages)
        cache.check()
        assert [pool.references(page) for page in range(16)] == before
    with pytest.raises(RuntimeError, match="other tokens"):
        cache.insert("elsewhere", range(6), held)
    for options in ({"page_size": 0}, {"max_pages": -1}, {"lookahead": -1}):
        with pytest.raises(ContractError, match=next(iter(options))):
            filled(**options)


def test_long_prompts_and_crowded_pages_are_no_matter():
    pool, cache = filled(30_000, 1)
    start = time.process_time()
    put(cache, [0] * (length := 5 * sys.getrecursionlimit()), check=False)
    assert known(cache, [0] * length) == length
    for token in range(5_000):
        put(cache, [0, 0, token + 1], check=False)
    assert known(cache, [0, 0, 777]) == 3
    cache.check()
    cache.flush()
    assert pool.free == pool.total
    assert time.process_time() - start < 20  # quadratic would be minutes


@given(st.lists(st.tuples(st.sampled_from("ab"), LETTERS), max_size=8), LETTERS, st.integers(1, 4), st.integers(0, 1))
def test_a_match_is_the_longest_common_prefix_of_all_that_was_inserted(inserted, prompt, page_size, lookahead):
    _, cache = filled(64, page_size, lookahead=lookahead)
    for namespace, tokens in inserted:
        put(cache, tokens, namespace)
    for namespace in "ab":
        best = max((lcp(tokens, prompt) for name, tokens in inserted if name == namespace), default=0)
        assert known(cache, prompt, namespace) == max(best - lookahead, 0)


@given(st.lists(st.tuples(LETTERS, st.integers(0, 11)), max_size=8), LETTERS, st.integers(1, 4))
def test_a_hit_is_the_minimum_over_the_pools(inserted, prompt, page_size):
    _, cache = filled(64, page_size)
    for tokens, drafted in inserted:
        put(cache, tokens, valid={"kv": len(tokens), "mtp": min(drafted, len(tokens))})
    common = [(lcp(tokens, prompt), drafted) for tokens, drafted in inserted]
    for pools, best in (
        ((), max((n for n, _ in common), default=0)),
        (("kv",), max((n for n, _ in common), default=0)),
        (("kv", "mtp"), max((min(pair) for pair in common), default=0)),
        (("kv", "other"), 0),
    ):
        assert known(cache, prompt, pools=pools) == best
