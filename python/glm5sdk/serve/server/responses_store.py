"""Answers kept for `previous_response_id`: in memory, bounded by count and bytes, the oldest go first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

__all__ = ["ResponseStore", "Stored"]


@dataclass(frozen=True)
class Stored:
    """One answer.

    Attributes:
        response: the object that clients get.
        messages: the whole conversation up to and with it, in the templates' form.
        input_items: what came with its request.
        size: bytes that it adds.
    """

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    input_items: list[dict[str, Any]]
    size: int


class ResponseStore:
    """Keeps answers by id.

    Args:
        most: answers.
        most_bytes: of them all; an answer that alone is larger is not kept.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def get(self, name: str) -> Stored | None:
        """An answer by its id, if it is still kept."""
        stored = self._kept.get(name)
        if stored is not None:
            self._kept.move_to_end(name)
        return stored

    def put(self, response: dict[str, Any], messages: list[dict[str, Any]], input_items: list[dict[str, Any]]) -> None:
        """Keep an answer; its conversation counts in full, since the turns before it may be forgotten first."""
        size = len(msgspec.json.encode([response, messages, input_items]))
        if size > self._most_bytes or not self._most:
            return
        name = response["id"]
        self.remove(name)
        self._kept[name] = Stored(response, messages, input_items, size)
        self._bytes += size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            _, gone = self._kept.popitem(last=False)
            self._bytes -= gone.size

    def remove(self, name: str) -> bool:
        """Forget an answer; False when it was not there."""
        gone = self._kept.pop(name, None)
        if gone is not None:
            self._bytes -= gone.size
        return gone is not None
