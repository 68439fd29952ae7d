"""WholeEvents: lets complete server-sent events through, so that a broken stream never ends in half of one."""

from __future__ import annotations

import re

__all__ = ["LARGEST_EVENT", "WholeEvents"]

LARGEST_EVENT = 16 * 2**20
# An event ends with an empty line; a line ends with CR, LF, or both.
_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n|\r\n\n")


class WholeEvents:
    """Bytes go in as they come; events come out as soon as they are whole, unchanged."""

    def __init__(self, largest: int = LARGEST_EVENT) -> None:
        self.largest = largest
        self._rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """The events that are whole now.

        Raises:
            ValueError: an event is larger than `largest` bytes.
        """
        looked = max(0, len(self._rest) - 3)  # an end may lie across the seam
        self._rest += data
        end = 0
        for match in _END.finditer(self._rest, looked):
            end = match.end()
        whole = bytes(self._rest[:end])
        del self._rest[:end]
        if len(self._rest) > self.largest:
            raise ValueError(f"router: an event of the stream is over {self.largest} bytes")
        return whole

    @property
    def rest(self) -> int:
        """Bytes of an event that is not whole yet."""
        return len(self._rest)
