"""PagePool against a plain dict of counts, and its refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.pages import PagePool


def test_allocation_is_all_or_nothing():
    pool = PagePool(3)
    assert pool.total == pool.free == 3
    assert pool.allocate(4) is None and pool.free == 3
    assert pool.allocate(0) == []
    pages = pool.allocate(3)
    assert sorted(pages) == [0, 1, 2] and pool.free == 0
    assert pool.allocate(1) is None
    pool.release(pages)
    pool.check()
    assert pool.free == 3


@pytest.mark.parametrize("count", [0, -1])
def test_a_pool_needs_pages(count):
    with pytest.raises(ContractError, match="num_pages"):
        PagePool(count)
    with pytest.raises(ContractError, match="count"):
        PagePool(1).allocate(-1)


def test_double_release_is_refused_and_changes_nothing():
    pool = PagePool(4)
    first, second = pool.allocate(2)
    pool.retain([second])
    for pages in ([first, first], [second, second, second], [first, second, 3], [first, 4], [first, -1]):
        with pytest.raises(RuntimeError, match="page pool: page"):
            pool.release(pages)
        pool.check()
        assert (pool.references(first), pool.references(second), pool.free) == (1, 2, 2)
    with pytest.raises(RuntimeError, match="retained while it is free"):
        pool.retain([first, 3])
    assert pool.references(first) == 1
    pool.release([second, first, second])
    assert pool.free == 4


def test_the_watcher_hears_of_pages_that_become_shared_or_alone():
    pool, heard = PagePool(3), []
    pool.watch(lambda page: heard.append((page, pool.references(page))))
    page, other = pool.allocate(2)
    pool.retain([page])
    pool.retain([page])
    assert heard == [(page, 2)]
    pool.release([page])
    pool.release([other, page])
    assert heard == [(page, 2), (page, 1)]
    with pytest.raises(RuntimeError, match="watcher"):
        pool.watch(print)


@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 6)), max_size=60))
def test_counts_follow_a_plain_dict(steps):
    pool, counts = PagePool(5), dict.fromkeys(range(5), 0)
    for step, number in steps:
        if step == "allocate":
            free = [page for page, count in counts.items() if not count]
            pages = pool.allocate(number)
            assert (pages is None) == (number > len(free))
            assert set(pages or ()) <= set(free) and len(set(pages or ())) == len(pages or ())
            counts.update(dict.fromkeys(pages or (), 1))
        elif counts.get(number):
            getattr(pool, step)([number])
            counts[number] += 1 if step == "retain" else -1
        else:
            with pytest.raises(RuntimeError):
                getattr(pool, step)([number])
        pool.check()
        assert {page: pool.references(page) for page in counts} == counts
        assert pool.free == sum(not count for count in counts.values())
