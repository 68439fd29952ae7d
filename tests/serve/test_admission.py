"""The queues in front of the scheduler, on a clock of their own and against a slow simulation."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.admission import DynamicBatching, FirstCome
from glm5sdk.serve.interface import OverloadedError


@dataclass(eq=False)
class Request:
    request_id: str
    prompt_tokens: int = 1
    priority: int = 0
    arrival: float = 0.0


def offered(policy, *requests):
    for request in requests:
        policy.offer(request, request.arrival)
    return policy


def names(requests) -> str:
    return "".join(request.request_id for request in requests)


def test_first_come_goes_by_priority_then_arrival():
    queue = offered(FirstCome(), *(Request(n, 3, p, t) for n, p, t in [("a", 1, 0), ("b", 0, 2), ("c", 0, 1)]))
    assert len(queue) == 3 and queue.waiting_tokens == 9 and queue.next_deadline(0.0) is None
    assert names(queue.take(3.0, 2, idle=True)) == "cb"
    assert queue.take(3.0, 0, idle=True) == [] == queue.take(3.0, -1, idle=True)
    queue.remove("nobody")
    queue.remove("a")
    assert len(queue) == queue.waiting_tokens == 0 and queue.take(9.0, 9, idle=True) == []


def test_a_preferred_size_goes_at_once_and_what_is_left_waits():
    queue = DynamicBatching(8, (2, 4), max_queue_delay=0.5)
    offered(queue, Request("a", arrival=0.0))
    assert queue.take(0.0, 8, idle=True) == [] and queue.next_deadline(0.0) == 0.5
    offered(queue, *(Request(n, arrival=0.1) for n in "bcdefg"))
    assert names(queue.take(0.1, 8, idle=True)) == "abcd"
    assert names(queue.take(0.1, 3, idle=False)) == "ef"
    assert queue.take(0.1, 8, idle=True) == [] and queue.next_deadline(0.1) == 0.6
    assert queue.take(0.5999, 8, idle=True) == []
    assert names(queue.take(0.6, 8, idle=True)) == "g" and queue.next_deadline(0.6) is None


def test_a_late_request_takes_what_there_is_along():
    queue = offered(DynamicBatching(4, 4, max_queue_delay=0.5), Request("a"), Request("b", arrival=0.49))
    assert names(queue.take(0.5, 4, idle=True)) == "ab"
    offered(queue, *(Request(n) for n in "abc"))
    assert names(queue.take(0.5, 2, idle=True)) == "ab" and names(queue.take(0.5, 2, idle=False)) == "c"
    offered(queue, Request("z"))
    assert queue.take(0.5, 0, idle=False) == [] and queue.next_deadline(0.5) is None


def test_without_preferred_sizes_only_a_full_batch_goes_at_once():
    queue = offered(DynamicBatching(3, (), max_queue_delay=1.0), Request("a"), Request("b"))
    assert queue.take(0.9, 9, idle=True) == []
    assert names(offered(queue, Request("c"), Request("d")).take(0.9, 9, idle=True)) == "abc"
    assert names(offered(DynamicBatching(3, (), 0.0), Request("a")).take(0.0, 9, idle=True)) == "a"


def test_a_full_queue_refuses_and_other_priorities_have_their_own():
    queue = offered(DynamicBatching(max_queue_size=2, max_queue_delay=3.0), Request("a"), Request("b"))
    with pytest.raises(OverloadedError, match="2 requests of priority 0 wait") as caught:
        queue.offer(Request("c"), 0.0)
    assert caught.value.retry_after == 3.0 and len(queue) == 2
    offered(queue, Request("c", priority=1))
    queue.remove("a")
    offered(queue, Request("d"))
    assert names(queue.take(3.0, 9, idle=True)) == "bdc"
    with pytest.raises(ContractError, match="priority is 2, needs 0 to 1"):
        DynamicBatching(priority_levels=2).offer(Request("x", priority=2), 0.0)


def test_prompts_of_similar_length_go_together_but_the_oldest_goes():
    lengths = {"a": 90, "b": 5, "c": 100, "k": 7, "e": 85}
    queue = DynamicBatching(8, 3, max_queue_delay=1.0)
    offered(queue, *(Request(n, size, arrival=i / 10) for i, (n, size) in enumerate(lengths.items())))
    assert names(queue.take(0.4, 8, idle=True)) == "ace"
    assert names(queue.take(1.1, 8, idle=True)) == "bk"
    offered(queue, *(Request(n, size, arrival=i / 10) for i, (n, size) in enumerate(lengths.items())))
    assert names(queue.take(1.1, 8, idle=True)) == "abk"  # b is late as well
    offered(queue, Request("f", 1, priority=-1))
    assert names(queue.take(1.1, 8, idle=True)) == "fce"


def test_the_continuations_of_a_prompt_are_removed_together():
    queue = offered(DynamicBatching(), *(Request("a", 4) for _ in range(3)), Request("b", 2))
    queue.remove("a")
    assert len(queue) == 1 and queue.waiting_tokens == 2


def test_the_founding_form():
    queue = DynamicBatching.parse('{"max_batch_size": 32, "preferred_batch_size": 16, "timeout": "500ms"}')
    assert (queue.max_batch_size, queue.preferred, queue.max_queue_delay) == (32, [16], 0.5)
    queue = DynamicBatching.parse({"preferred_batch_size": [8, 4, 8], "max_queue_delay": "1.5 s", "max_queue_size": 9,
                                   "group_by_length": False})  # fmt: skip
    assert (queue.preferred, queue.max_queue_delay, queue.max_queue_size) == ([4, 8], 1.5, 9)
    assert DynamicBatching.parse({"timeout": "250us"}).max_queue_delay == 250e-6


@pytest.mark.parametrize(
    "settings, words",
    [
        ("{", "no JSON"),
        ("[1]", "an object"),
        ('{"max_batch": 3}', "'max_batch', needs one of"),
        ('{"timeout": "500"}', "timeout is '500', needs a time with a unit"),
        ('{"timeout": 500}', "needs a time with a unit"),
        ('{"timeout": "-1ms"}', "needs a time with a unit"),
        ({"timeout": "9" * 400 + "s"}, "needs seconds"),
        ('{"timeout": "1s", "max_queue_delay": "1s"}', "both given"),
        ('{"max_batch_size": 0}', "max_batch_size is 0, needs at least 1"),
        ('{"max_batch_size": "32"}', "max_batch_size"),
        ('{"max_batch_size": true}', "max_batch_size"),
        ('{"max_batch_size": 8}', "preferred_batch_size is 16, needs 1 to max_batch_size 8"),
        ('{"preferred_batch_size": "16"}', "preferred_batch_size"),
        ('{"preferred_batch_size": [4, 1.5]}', "preferred_batch_size"),
        ('{"max_queue_size": 0}', "max_queue_size is 0"),
        ('{"priority_levels": 0}', "priority_levels is 0"),
        ('{"group_by_length": 1}', "group_by_length"),
        (7, "an object"),
    ],
)
def test_wrong_settings_say_what_is_wrong(settings, words):
    with pytest.raises(ContractError, match=words.replace("'", ".")):
        DynamicBatching.parse(settings)


@pytest.mark.parametrize("delay", [-1.0, float("nan"), float("inf"), "1s", None])
def test_a_delay_is_seconds(delay):
    with pytest.raises(ContractError, match="max_queue_delay"):
        DynamicBatching(max_queue_delay=delay)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.integers(0, 2), st.integers(1, 9)),
        st.tuples(st.just("take"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("tick"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 30), st.just(0)),
    ),
    max_size=50,
)


@given(EVENTS, st.integers(1, 8), st.sets(st.integers(1, 8), max_size=3), st.integers(0, 6), st.booleans(),
       st.sampled_from([None, 1, 4]))  # fmt: skip
def test_dynamic_batching_follows_its_rules(events, most, preferred, delay, grouped, limit):
    preferred = {min(size, most) for size in preferred}
    queue = DynamicBatching(most, sorted(preferred), delay, limit, group_by_length=grouped)
    waiting: list[Request] = []
    now = made = 0
    for event, number, length in events:
        if event == "tick":
            now += number
        elif event == "offer":
            request = Request(f"r{made}", length, number, now)
            made += 1
            if limit is not None and sum(r.priority == number for r in waiting) >= limit:
                with pytest.raises(OverloadedError):
                    queue.offer(request, now)
            else:
                queue.offer(request, now)
                waiting.append(request)
        elif event == "remove":
            queue.remove(f"r{number}")
            waiting = [r for r in waiting if r.request_id != f"r{number}"]
        else:
            _check_batch(queue.take(now, number, idle=False), waiting, now, number, most, preferred, delay, grouped)
            waiting = [r for r in waiting if r.request_id in {w.request_id for w in _left(queue)}]
        assert len(queue) == len(waiting) and queue.waiting_tokens == sum(r.prompt_tokens for r in waiting)
        due = min((r.arrival + delay for r in waiting), default=now)
        assert queue.next_deadline(now) == (due if due > now else None)


def _left(queue) -> list[Request]:
    return [r for level in queue._queues.levels.values() for r in level]


def _check_batch(batch, waiting, now, room, most, preferred, delay, grouped):
    """The rules, word by word."""
    possible = min(len(waiting), room, most)
    size = 0
    for wanted in range(1, possible + 1):
        if wanted in (preferred or {most}):
            size = wanted
    if size == 0 and any(now - r.arrival >= delay for r in waiting):
        size = possible
    assert len(batch) == size and len({id(r) for r in batch}) == size and all(r in waiting for r in batch)
    ordered = sorted(waiting, key=lambda r: (r.priority, r.arrival))  # stable: equal ones as they were offered
    assert [r for r in ordered if r in batch] == batch
    if not grouped:
        assert batch == ordered[:size]
    assert sorted(r.priority for r in batch) == [r.priority for r in ordered[:size]]
    if not batch:
        return
    last = [r for r in ordered if r.priority == batch[-1].priority]
    mine = [r for r in last if r in batch]
    must = [r for r in last if now - r.arrival >= delay] or last[:1]
    assert mine[: len(must)] == must[: len(mine)]
    lengths = [r.prompt_tokens for r in must]
    far = [min(abs(r.prompt_tokens - x) for x in range(min(lengths), max(lengths) + 1)) for r in last]
    taken = [d for r, d in zip(last, far, strict=True) if r in mine and r not in must]
    left = [d for r, d in zip(last, far, strict=True) if r not in mine and r not in must]
    if grouped and taken and left:
        assert max(taken) <= min(left)
