"""Admission: the queue in front of the scheduler."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["AdmissionPolicy", "FirstCome"]


class AdmissionPolicy(Protocol):
    """Holds requests until they may start."""

    def offer(self, request: Any, now: float) -> None: ...

    def take(self, now: float, room: int, idle: bool) -> list[Any]: ...

    def next_deadline(self, now: float) -> float | None: ...

    def remove(self, request_id: str) -> None: ...

    def __len__(self) -> int: ...

    @property
    def waiting_tokens(self) -> int: ...


class FirstCome:
    """By priority, then by arrival."""

    def __init__(self) -> None:
        self._queue: list[Any] = []

    def offer(self, request: Any, now: float) -> None:
        self._queue.append(request)

    def take(self, now: float, room: int, idle: bool) -> list[Any]:
        self._queue.sort(key=lambda r: (r.priority, r.arrival))
        taken, self._queue = self._queue[:room], self._queue[room:]
        return taken

    def next_deadline(self, now: float) -> float | None:
        return None

    def remove(self, request_id: str) -> None:
        self._queue = [r for r in self._queue if r.request_id != request_id]

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        return sum(r.prompt_tokens for r in self._queue)
