"""Keeps the process that renders one chat template: starts it, asks it, ends it, and says why it died."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from glm5sdk.core.errors import CapacityError, CheckpointError, ContractError, UnavailableError
from glm5sdk.text import chat_worker

__all__ = ["TemplateLimits", "TemplateProcess"]


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may use.

    Attributes:
        source_chars: length of the template.
        output_chars: length of the rendered text.
        seconds: CPU time of one compilation or one rendering.
        memory_bytes: address space of the process that renders.
    """

    source_chars: int = 1 << 17
    output_chars: int = 1 << 24
    seconds: float = 5.0
    memory_bytes: int = 1 << 29


class TemplateProcess:
    """One template in a process of its own, which starts again by itself after a rendering killed it.

    A template comes with a checkpoint or from a client and may be hostile. One multiplication in it can ask for all
    memory or hours of time without ever returning to Python, so no check inside this process could bound it.
    """

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        if len(source) > limits.source_chars:
            raise CapacityError(
                f"chat template: source is {len(source)} characters, needs at most {limits.source_chars}"
            )
        self._source = source
        self._limits = limits
        self._lock = threading.Lock()
        self._owner = 0
        self._start()

    def render(self, variables: dict[str, Any]) -> str:
        """Render with JSON variables. Threads take turns.

        Raises:
            ContractError: a variable is no JSON value, or the template refuses the variables.
            CheckpointError: the template reaches for what the sandbox forbids.
            CapacityError: a limit was reached.
        """
        with self._lock:
            if self._owner != os.getpid() or self._process.poll() is not None:  # a fork may not share the link
                self._end()
                self._start()
            try:
                chat_worker.send(self._link, variables)
            except (TypeError, ValueError, RecursionError) as error:
                raise ContractError(f"chat template: variables are no JSON ({error}), needs JSON values") from error
            except OSError:
                raise self._died() from None
            return self._answer()

    def close(self) -> None:
        """End the process. Rendering again starts a new one."""
        self._end()

    def _start(self) -> None:
        if not sys.executable:
            raise UnavailableError("chat template: sys.executable is empty, needs the path of a Python interpreter")
        ours, theirs = socket.socketpair()
        # Nothing of this process is inherited: no environment but the time zone, no site hooks, one import path.
        # The worker's module is run by its path: imported by name it would bring glm5sdk, and torch, along.
        home, worker = str(Path(jinja2.__file__).parent.parent), chat_worker.__file__
        run = f"import sys, runpy; sys.path.append({home!r}); runpy.run_path({worker!r}, run_name='__main__')"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", run, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={name: os.environ[name] for name in ("TZ", "LD_LIBRARY_PATH") if name in os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        # A wall clock far behind the worker's own limit, for a worker that stands still.
        ours.settimeout(10 * self._limits.seconds + 30)
        self._link = ours
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self._process, ours, self._owner)
        limits = self._limits
        chat_worker.send(
            ours,
            {
                "source": self._source,
                "seconds": limits.seconds,
                "memory_bytes": limits.memory_bytes,
                "output_chars": limits.output_chars,
            },
        )
        self._answer()

    def _answer(self) -> str:
        try:
            # JSON spells a character in at most 12 bytes.
            answer = chat_worker.receive(self._link, most_bytes=12 * self._limits.output_chars + 65536)
        except (EOFError, OSError, ValueError):
            raise self._died() from None
        if "text" in answer:
            return str(answer["text"])
        kind, message = answer["error"], f"chat template: {answer['message']}"
        if kind == "output":
            raise CapacityError(message)
        if kind == "memory":
            self._end()  # what is left of its memory serves no other rendering
            raise CapacityError(f"{message}, needs less than {self._limits.memory_bytes} bytes")
        if kind in ("syntax", "unsafe"):
            raise CheckpointError(message)
        raise ContractError(message)

    def _died(self) -> CapacityError:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            code = -signal.SIGPROF  # it stands still: the wall clock ran out
        self._end()
        if code == -signal.SIGPROF:
            return CapacityError(f"chat template: time is over {self._limits.seconds} s, needs less")
        return CapacityError(
            f"chat template: the process that renders it ended with code {code}, needs less than "
            f"{self._limits.memory_bytes} bytes of memory and no deep recursion"
        )


def _end(process: subprocess.Popen[bytes], link: socket.socket, owner: int) -> None:
    link.close()
    if owner == os.getpid():  # a forked child leaves its parent's process alone
        process.kill()
        process.wait()
