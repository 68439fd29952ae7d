"""A replica whose words follow from the prompt alone; in this process, or run as a script to be killed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


def words(prompt: str, count: int) -> list[str]:
    """What any replica answers."""
    seed = hashlib.sha256(prompt.encode()).hexdigest()[:8]
    return [f"{seed}-{i} " for i in range(count)]


class FakeReplica:
    """Counts what happens to it; `mode` says how it behaves."""

    def __init__(self, model: str = "m") -> None:
        self.model = model
        self.mode: dict[str, Any] = {}
        self.seen: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.aborted = 0
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/stats", self.stats),
                Route("/v1/models", self.models),
                Route("/v1/responses/{name}", self.stored),
                Route("/abort", self.note, methods=["POST"]),
                Route("/admin/{command}", self.note, methods=["POST"]),
                *(
                    Route(f"/v1/{path}", self.answer, methods=["POST"])
                    for path in ("completions", "chat/completions", "messages", "responses")
                ),
            ]
        )

    async def health(self, request: Request) -> Response:
        return JSONResponse({}, self.mode.get("health", 200))

    async def stats(self, request: Request) -> Response:
        return JSONResponse({"running": self.running, "aborted": self.aborted, "seen": len(self.seen)})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def stored(self, request: Request) -> Response:
        return JSONResponse({"id": request.path_params["name"], "by": self.model})

    async def note(self, request: Request) -> Response:
        self.seen.append(request.url.path)
        return JSONResponse({"done": (await request.body()).decode()}, self.mode.get("admin", 200))

    async def answer(self, request: Request) -> Response:
        if status := self.mode.get("status"):
            return JSONResponse({"error": {"message": "not now"}}, status, {"retry-after": "2"})
        body = await request.json()
        prompt = json.dumps(body.get("messages") or body.get("prompt") or body.get("input"))
        self.seen.append(prompt)
        self.headers.append(dict(request.headers))
        count, delay = int(body.get("max_tokens", 4)), float(body.get("delay", 0))
        if body.get("stream"):
            return StreamingResponse(self._stream(prompt, count, delay), media_type="text/event-stream")
        with self._counted():
            for _ in range(count):
                if await request.is_disconnected():
                    raise asyncio.CancelledError
                await asyncio.sleep(delay)
        name = f"resp_{len(self.seen)}_{self.model}"
        return JSONResponse({"id": name, "text": "".join(words(prompt, count)), "by": self.model})

    async def _stream(self, prompt: str, count: int, delay: float) -> AsyncIterator[bytes]:
        with self._counted():
            for i, word in enumerate(words(prompt, count)):
                if self.mode.get("break_at") == i:  # half an event, then nothing
                    yield b'data: {"text": "ha'
                    await asyncio.sleep(0.05)
                    raise ConnectionResetError
                yield b"data: " + json.dumps({"text": word, "id": f"resp_s_{self.model}"}).encode() + b"\n\n"
                await asyncio.sleep(delay)
            yield b"data: [DONE]\n\n"

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.running += 1
        whole = False
        try:
            yield
            whole = True
        finally:
            self.running -= 1
            self.aborted += not whole


class _Quiet(uvicorn.Server):
    """Leaves the process's signals alone: several run in one test."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Serve on a free port in the running loop; gives the URL."""
    config = uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1, date_header=False)
    server = _Quiet(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
        if task.done():
            await task
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


async def main(model: str) -> None:
    async with serving(FakeReplica(model).app) as url:
        sys.stdout.write(url + "\n")
        sys.stdout.flush()
        await asyncio.sleep(120)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
