"""HTTP heads within bounds: uvicorn's fast parser keeps whatever a client sends before its headers end, for ever."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["HEAD_SECONDS", "MAX_HEAD_BYTES", "http_protocol"]

MAX_HEAD_BYTES = 512 << 10  # more than one read of a socket brings: the rest of a body before counts in it, too
HEAD_SECONDS = 60.0
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 23\r\nconnection: close\r\n\r\nThe head is too large.\n"
)


def http_protocol() -> Any:
    """What uvicorn's `http` is to be.

    Returns:
        Its httptools protocol with a limit of bytes and of time for a request's head; "h11", which has a limit of
        bytes of its own, where httptools is not installed.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class BoundedHeads(HttpToolsProtocol):
        """Closes connections whose request line and headers are too long, or take too long."""

        _head_bytes = 0
        _in_head = True
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._begin_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_head()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._in_head and not self.transport.is_closing():
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._end_head()
                    self.transport.write(_REFUSAL)
                    self.transport.close()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._begin_head()

        def on_headers_complete(self) -> None:
            self._end_head()
            super().on_headers_complete()

        def _begin_head(self) -> None:
            self._end_head()
            self._in_head = True
            self._timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

        def _end_head(self) -> None:
            self._in_head, self._head_bytes = False, 0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            self.transport.close()

    return BoundedHeads
