"""Where steps run: in the caller's thread, or in one of their own while the host prepares the next step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Protocol

from glm5sdk.serve.step import Drawn, Step

__all__ = ["Executor", "InlineExecutor", "ThreadExecutor"]

Run = Callable[[Step], list[Drawn]]


class Executor(Protocol):
    """Runs steps one after the other, in the order of `submit`."""

    def submit(self, step: Step) -> Future[list[Drawn]]:
        """Begin a step, or queue it behind those before it."""
        ...

    def close(self) -> None:
        """Wait for what runs and end."""
        ...


class InlineExecutor:
    """Runs a step when it is submitted."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def submit(self, step: Step) -> Future[list[Drawn]]:
        done: Future[list[Drawn]] = Future()
        try:
            done.set_result(self._run(step))
        except BaseException as error:  # noqa: BLE001 - the future carries it to whoever waits
            done.set_exception(error)
        return done

    def close(self) -> None:
        pass


class ThreadExecutor:
    """Runs steps in one thread of its own, under the backend choice of the thread that made it."""

    def __init__(self, run: Run) -> None:
        self._run, self._context = run, copy_context()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="glm5-steps")

    def submit(self, step: Step) -> Future[list[Drawn]]:
        return self._pool.submit(self._context.run, self._run, step)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
