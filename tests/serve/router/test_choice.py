"""Ring, prefix index and choice: balance, little movement, and a bound that holds."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
import uhashring
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.router.choose import Affinity, Chooser, share_of
from glm5sdk.serve.router.prefixes import PrefixIndex, chunk_chain
from glm5sdk.serve.router.replicas import Fleet, replica_url
from glm5sdk.serve.router.request import read_request
from glm5sdk.serve.router.ring import Ring, hash_key

steady = settings(derandomize=True, deadline=None)  # other work on the machine is no failure

KEYS = [f"key {i}" for i in range(4000)]
NODES = [f"http://replica-{i}:80" for i in range(8)]
names = st.sets(st.sampled_from(NODES), min_size=1)


def home(ring: Ring, key: str) -> str:
    return next(ring.order(key))


@steady
@given(names)
def test_ring_agrees_with_uhashring(nodes: set[str]) -> None:
    theirs = uhashring.HashRing(sorted(nodes), hash_fn=hash_key, vnodes=160)
    ours = Ring(tuple(nodes))
    assert [home(ours, k) for k in KEYS[:300]] == [theirs.get_node(k) for k in KEYS[:300]]


@steady
@given(names)
def test_ring_is_balanced(nodes: set[str]) -> None:
    ring = Ring(tuple(nodes))
    counts = Counter(home(ring, k) for k in KEYS)
    mean = len(KEYS) / len(nodes)
    assert set(counts) == nodes
    assert 0.6 * mean < min(counts.values()) and max(counts.values()) < 1.5 * mean


@steady
@given(names, st.sampled_from(NODES))
def test_ring_moves_only_what_it_must(nodes: set[str], other: str) -> None:
    ring = Ring(tuple(nodes - {other}))
    before = {k: list(ring.order(k)) for k in KEYS[:500]}
    ring.add(other)
    after = {k: list(ring.order(k)) for k in KEYS[:500]}
    for key in before:
        assert [n for n in after[key] if n != other] == before[key]
    ring.remove(other)
    assert {k: list(ring.order(k)) for k in KEYS[:500]} == before


def test_ring_refuses() -> None:
    ring = Ring(("a",))
    assert list(Ring().order("x")) == []
    for call in (lambda: ring.add("a"), lambda: ring.remove("b"), lambda: Ring(points=0)):
        with pytest.raises(ContractError):
            call()


texts = st.text("ab", max_size=40).map(str.encode)


@steady
@given(st.lists(st.tuples(texts, st.sampled_from("xyz")), max_size=20), texts, st.integers(1, 5))
def test_index_agrees_with_a_plain_comparison(sent: list[tuple[bytes, str]], prompt: bytes, chunk: int) -> None:
    index = PrefixIndex(100_000)
    for text, replica in sent:
        index.insert(chunk_chain(text, chunk, 100), replica)
    whole = len(prompt) // chunk
    best: dict[str, int] = {}
    for text, replica in sent:
        same = 0
        while same < min(whole, len(text) // chunk) and text[: (same + 1) * chunk] == prompt[: (same + 1) * chunk]:
            same += 1
        best[replica] = max(best.get(replica, 0), same)
    assert index.matched(chunk_chain(prompt, chunk, 100)) == {r: n / whole for r, n in best.items() if n}


@steady
@given(st.lists(st.tuples(texts, st.sampled_from("xyz")), max_size=30), st.integers(1, 20))
def test_index_stays_bounded_and_whole(sent: list[tuple[bytes, str]], capacity: int) -> None:
    index = PrefixIndex(capacity)
    for text, replica in sent:
        chain = chunk_chain(text, 2, 100)
        index.insert(chain, replica)
        assert len(index) <= capacity
        kept = min(len(chain), capacity)
        if kept:  # the newest is all there: eviction took others
            assert index.matched(chain)[replica] == kept / len(chain)
        for other, _ in sent:  # leaves go before their parents
            there = [name in index for name in chunk_chain(other, 2, 100)]
            assert there == sorted(there, reverse=True)
    for replica in "xyz":
        index.forget(replica)
    assert len(index) == 0


def test_salts_share_nothing() -> None:
    assert not set(chunk_chain(b"a" * 64, 8, 9, b"1")) & set(chunk_chain(b"a" * 64, 8, 9, b"2"))
    assert len(chunk_chain(b"a" * 64, 8, 3)) == 3


def fleet_of(count: int) -> Fleet:
    fleet = Fleet(tuple(NODES[:count]), clock=lambda: 0.0)
    for replica in fleet:
        replica.health.passed()
    return fleet


@steady
@given(st.integers(1, 8), st.integers(0, 2**32), st.floats(1.0, 2.0), st.integers(1, 5), st.floats(0, 2))
def test_bound_is_never_exceeded(count: int, seed: int, bound: float, floor: int, beta: float) -> None:
    """Requests come, with shared prompts and sessions that all want the same place, and end in any order."""
    rng = random.Random(seed)
    chooser = Chooser(fleet_of(count), Affinity(beta=beta, bound=bound, floor=floor, chunk=4))
    running: list[str] = []
    for _ in range(150):
        if running and rng.random() < 0.3:
            chooser.fleet.need(running.pop(rng.randrange(len(running)))).in_flight -= 1
            continue
        body = b'{"prompt": "%s", "user": "%d"}' % (b"hot " * rng.randrange(1, 5), rng.randrange(3))
        request = read_request("/v1/completions", {}, body)
        choice = chooser.choose(request)
        taken = choice.replicas[0]
        share = share_of(chooser.affinity, len(running), count)
        assert taken.in_flight + 1 <= share
        assert {r.url for r in choice.replicas} == set(NODES[:count])
        taken.in_flight += 1
        running.append(taken.url)
        chooser.sent(choice, taken)
        chooser.accepted(request, choice, taken)


def test_affinity_against_load() -> None:
    chooser = Chooser(fleet_of(4), Affinity(beta=0.25, chunk=8))
    request = read_request("/v1/completions", {}, b'{"prompt": "%s"}' % (b"p" * 800))
    other = read_request("/v1/completions", {}, b'{"prompt": "%s"}' % (b"p" * 400 + b"q" * 400))
    first = chooser.choose(request)
    warm = first.replicas[-1]  # not the ring's choice
    chooser.sent(first, warm)
    assert chooser.choose(request).replicas[0] is warm
    assert chooser.choose(other).replicas[0] is warm
    assert chooser.choose(other).matched == {warm.url: pytest.approx(0.5)}
    warm.in_flight = 3  # mean 0.75, counted as 1: half a prompt is not worth three requests
    assert chooser.choose(request).replicas[0] is warm
    assert chooser.choose(other).replicas[0] is not warm
    chooser.lost(warm.url)
    assert chooser.choose(request).matched == {}


def test_a_session_keeps_its_owner_until_it_is_gone() -> None:
    chooser = Chooser(fleet_of(4))
    request = read_request("/v1/completions", {"x-session-id": "s"}, b'{"prompt": "a"}')
    choice = chooser.choose(request)
    other = choice.replicas[2]
    chooser.accepted(request, choice, other)
    assert chooser.choose(request).replicas[0] is other
    chooser.accepted(request, choice, choice.replicas[1])  # a late decision on old knowledge changes nothing
    assert chooser.choose(request).replicas[0] is other
    other.draining = True
    assert other not in chooser.choose(request).replicas
    other.draining = False
    other.busy_until = 1.0
    assert chooser.choose(request).replicas[-1] is other


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({"x-session-id": "h"}, b'{"user": "u"}', "header:h"),
        ({}, b'{"user": "u", "session_id": "s"}', "session_id:s"),
        ({}, b'{"prompt_cache_key": "k", "user": "u"}', "prompt_cache_key:k"),
        ({}, b'{"metadata": {"user_id": "m"}}', "user_id:m"),
        ({}, b'{"user": 3, "metadata": 4}', None),
        ({}, b"[1]", None),
        ({}, b"\xff", None),
        ({}, b"[" * 100_000, None),
        ({}, b'{"user": "\\ud800"}', None),
    ],
)
def test_sessions_are_read(headers: dict[str, str], body: bytes, session: str | None) -> None:
    assert read_request("/v1/completions", headers, body).session == session


def test_a_conversation_that_grows_keeps_its_prefix() -> None:
    turns = [f'{{"role": "user", "content": "turn {i}"}}' for i in range(4)]
    prompts = []
    for count in range(1, 5):
        raw = f'{{"messages": [{",".join(turns[:count])}], "tools": [{{"b": 1, "a": 2}}], "model": "m"}}'
        prompts.append(read_request("/v1/chat/completions", {}, raw.encode()).prompt)
    for short, long in pairwise(prompts):
        assert long.startswith(short)
    ids = [read_request("/v1/completions", {}, f'{{"prompt": {list(range(n))}}}'.encode()).prompt for n in (5, 9)]
    assert ids[1].startswith(ids[0])


@pytest.mark.parametrize("url", ["ftp://a", "a:80", "http://", "http://u@h", "http://h?q", "http://h:99999", ""])
def test_urls_are_judged(url: str) -> None:
    with pytest.raises(ContractError):
        replica_url(url)
