"""Admission: the queue in front of the scheduler, and when it lets requests through."""

from __future__ import annotations

import json
import math
import re
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from glm5sdk.core.errors import ContractError
from glm5sdk.registry.contract_scalars import as_bool, as_float, as_int
from glm5sdk.serve.interface import OverloadedError

__all__ = ["AdmissionPolicy", "DynamicBatching", "FirstCome", "QueuedRequest"]

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class QueuedRequest(Protocol):
    """What a queue knows of a request; several may have one id (the n continuations of a prompt)."""

    request_id: str
    priority: int
    arrival: float

    @property
    def prompt_tokens(self) -> int: ...


class AdmissionPolicy(Protocol):
    """Holds requests until they may start. Times are seconds of one clock."""

    def offer(self, request: Any, now: float) -> None:
        """Queue a request.

        Raises:
            OverloadedError: there is no room; the request was not queued.
        """
        ...

    def take(self, now: float, room: int, idle: bool) -> list[Any]:
        """Requests that start now, at most `room`; they leave the queue.

        Args:
            now: the time.
            room: sequences that may join the batch.
            idle: nothing runs.
        """
        ...

    def next_deadline(self, now: float) -> float | None:
        """When time alone will let something through; None when it takes a new request or room."""
        ...

    def remove(self, request_id: str) -> None:
        """Take out every request of that id; unknown ids are ignored."""
        ...

    def __len__(self) -> int: ...

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the whole queue."""
        ...


class _Queues:
    """One queue for each priority, in order of arrival."""

    def __init__(self) -> None:
        self.levels: dict[int, list[Any]] = {}
        self.tokens = 0
        self._ids: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._ids.total()

    def add(self, request: Any) -> None:
        insort(self.levels.setdefault(request.priority, []), request, key=lambda r: r.arrival)
        self.tokens += request.prompt_tokens
        self._ids[request.request_id] += 1

    def drop(self, requests: Sequence[Any]) -> None:
        gone = {id(r) for r in requests}
        for level in {r.priority for r in requests}:
            self.levels[level] = [r for r in self.levels[level] if id(r) not in gone]
            if not self.levels[level]:
                del self.levels[level]
        self.tokens -= sum(r.prompt_tokens for r in requests)
        self._ids -= Counter(r.request_id for r in requests)

    def named(self, request_id: str) -> list[Any]:
        if request_id not in self._ids:
            return []
        return [r for level in self.levels.values() for r in level if r.request_id == request_id]

    def first(self, count: int) -> list[Any]:
        found: list[Any] = []
        for priority in sorted(self.levels):
            found += self.levels[priority][: count - len(found)]
        return found

    def oldest(self) -> float:
        """Arrival of the one that has waited longest."""
        return min((level[0].arrival for level in self.levels.values()), default=math.inf)


class FirstCome:
    """Lets everything through as soon as there is room: by priority (lower first), then by arrival."""

    def __init__(self) -> None:
        self._queues = _Queues()

    def offer(self, request: Any, now: float) -> None:
        """Queue a request; there is always room."""
        self._queues.add(request)

    def take(self, now: float, room: int, idle: bool) -> list[Any]:
        """The first `room` requests."""
        taken = self._queues.first(max(room, 0))
        self._queues.drop(taken)
        return taken

    def next_deadline(self, now: float) -> float | None:
        """None: time changes nothing."""
        return None

    def remove(self, request_id: str) -> None:
        """Take out every request of that id."""
        self._queues.drop(self._queues.named(request_id))

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def waiting_tokens(self) -> int:
        return self._queues.tokens


class DynamicBatching:
    """Lets requests through in batches, by the rules of NVIDIA Triton's dynamic batcher.

    A batch of a preferred size goes at once, the largest that the queue can form and that there is room for. If it can
    form none, it waits until its oldest request has waited `max_queue_delay`, and then sends what there is, up to
    `max_batch_size`. What Triton calls an instance is here the room in the running batch: whether that batch is empty
    makes no difference, as nothing has to wait for its end.

    Args:
        max_batch_size: requests that start together at most.
        preferred_batch_size: sizes worth sending at once; none: only a full batch is.
        max_queue_delay: seconds a request may wait for others.
        max_queue_size: requests in the queue of one priority; more are refused. None is no limit.
        priority_levels: priorities go from 0, which goes first, to this less one; None: any number is one. Each has a
            queue of its own; a batch takes from the next only what the ones before leave room for.
        group_by_length: a batch smaller than its queue is filled up with the prompts whose lengths come nearest to
            those that must go: the oldest, and all that have waited too long.

    Raises:
        ContractError: a size or the delay is out of range.
    """

    def __init__(
        self,
        max_batch_size: int = 32,
        preferred_batch_size: int | Sequence[int] = (16,),
        max_queue_delay: float = 0.5,
        max_queue_size: int | None = None,
        priority_levels: int | None = None,
        group_by_length: bool = True,
    ) -> None:
        self.max_batch_size = _size("max_batch_size", max_batch_size)
        several = isinstance(preferred_batch_size, Sequence) and not isinstance(preferred_batch_size, (str, bytes))
        sizes: Any = preferred_batch_size if several else [preferred_batch_size]
        self.preferred = sorted({_size("preferred_batch_size", size, self.max_batch_size) for size in sizes})
        self.max_queue_delay = as_float("dynamic batching", "max_queue_delay", max_queue_delay)
        if not 0.0 <= self.max_queue_delay < math.inf:
            raise ContractError(f"dynamic batching: max_queue_delay is {max_queue_delay}, needs seconds from 0 on")
        self.max_queue_size = None if max_queue_size is None else _size("max_queue_size", max_queue_size)
        self.priority_levels = None if priority_levels is None else _size("priority_levels", priority_levels)
        self.group_by_length = as_bool("dynamic batching", "group_by_length", group_by_length)
        self._queues = _Queues()

    @classmethod
    def parse(cls, settings: str | Mapping[str, Any]) -> DynamicBatching:
        """Made from a JSON object, for example {"max_batch_size": 32, "preferred_batch_size": 16, "timeout": "500ms"}.

        Args:
            settings: the object or its text. Keys are the arguments' names, and "timeout" for max_queue_delay; both
                take a text with a unit: us, ms or s.

        Raises:
            ContractError: it is no such object, a key is unknown, or a value is out of range.
        """
        if isinstance(settings, str):
            try:
                settings = json.loads(settings)
            except ValueError as error:
                raise ContractError(f"dynamic batching: the settings are no JSON ({error}), need an object") from None
        if not isinstance(settings, Mapping):
            raise ContractError(f"dynamic batching: the settings are {settings!r}, need an object of names and values")
        known = ("max_batch_size", "preferred_batch_size", "timeout", "max_queue_delay", "max_queue_size",
                 "priority_levels", "group_by_length")  # fmt: skip
        if unknown := [key for key in settings if key not in known]:
            raise ContractError(f"dynamic batching: a setting is {unknown[0]!r}, needs one of: {', '.join(known)}")
        if "timeout" in settings and "max_queue_delay" in settings:
            raise ContractError("dynamic batching: timeout and max_queue_delay are both given, needs one of them")
        values = dict(settings)
        for key in ("timeout", "max_queue_delay"):
            if key in settings:
                values["max_queue_delay"] = _seconds(key, values.pop(key))
        return cls(**values)

    def offer(self, request: Any, now: float) -> None:
        """Queue a request.

        Raises:
            ContractError: there is no such priority. OverloadedError: its queue is full.
        """
        levels, most = self.priority_levels, self.max_queue_size
        if levels is not None and not 0 <= request.priority < levels:
            raise ContractError(f"dynamic batching: priority is {request.priority}, needs 0 to {levels - 1}")
        waiting = len(self._queues.levels.get(request.priority, ()))
        if most is not None and waiting >= most:
            raise OverloadedError(
                f"dynamic batching: {waiting} requests of priority {request.priority} wait, needs fewer than "
                f"max_queue_size {most}; try again later",
                max(self.max_queue_delay, 1.0),
            )
        self._queues.add(request)

    def take(self, now: float, room: int, idle: bool) -> list[Any]:
        """The next batch, empty while waiting for more is better."""
        size = self._size(now, room)
        taken = self._choose(size, now) if size > 0 else []
        self._queues.drop(taken)
        return taken

    def next_deadline(self, now: float) -> float | None:
        """When the oldest request will have waited long enough; None when it has already, or nothing waits."""
        due = self._queues.oldest() + self.max_queue_delay
        return due if now < due < math.inf else None

    def remove(self, request_id: str) -> None:
        """Take out every request of that id."""
        self._queues.drop(self._queues.named(request_id))

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def waiting_tokens(self) -> int:
        return self._queues.tokens

    def _size(self, now: float, room: int) -> int:
        possible = min(len(self._queues), room, self.max_batch_size)
        worth = [size for size in self.preferred or [self.max_batch_size] if size <= possible]
        # The sum, as in next_deadline: the difference of the two times may round to just below the delay.
        due = self._queues.oldest() + self.max_queue_delay <= now
        return max(worth, default=possible if due else 0)

    def _choose(self, size: int, now: float) -> list[Any]:
        if not self.group_by_length:
            return self._queues.first(size)
        chosen: list[Any] = []
        for priority in sorted(self._queues.levels):
            queue = self._queues.levels[priority]
            if (left := size - len(chosen)) < len(queue):
                return chosen + self._alike(queue, left, now)
            chosen += queue
        return chosen

    def _alike(self, queue: list[Any], count: int, now: float) -> list[Any]:
        """So many requests of a longer queue."""
        if not count:
            return []
        must = sum(request.arrival + self.max_queue_delay <= now for request in queue)
        must = min(max(must, 1), count)
        lengths = [request.prompt_tokens for request in queue[:must]]
        low, high = min(lengths), max(lengths)
        rest = sorted(queue[must:], key=lambda r: max(low - r.prompt_tokens, r.prompt_tokens - high, 0))
        chosen = {id(request) for request in [*queue[:must], *rest[: count - must]]}
        return [request for request in queue if id(request) in chosen]


def _size(name: str, value: Any, most: int | None = None) -> int:
    number = as_int("dynamic batching", name, value)
    if number < 1 or (most is not None and number > most):
        limit = "at least 1" if most is None else f"1 to max_batch_size {most}"
        raise ContractError(f"dynamic batching: {name} is {number}, needs {limit}")
    return int(number)


def _seconds(name: str, value: Any) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", value, re.ASCII) if isinstance(value, str) else None
    if found is None:
        raise ContractError(f'dynamic batching: {name} is {value!r}, needs a time with a unit, such as "500ms"')
    return float(found[1]) * _UNITS[found[2]]
