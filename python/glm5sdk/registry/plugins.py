"""Backends: found by entry point at the first dispatch, kept with their reasons when they cannot load."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol

from glm5sdk.core.errors import ContractError
from glm5sdk.core.log import get_logger
from glm5sdk.registry.device import Device
from glm5sdk.registry.impl import Impl

__all__ = ["API_VERSION", "ENTRY_POINTS", "Backend", "LoadedBackend", "backends", "implementations", "register_backend"]

API_VERSION = 1
ENTRY_POINTS = "glm5sdk.backends"
BUILT_IN = ("composed", "reference")
_log = get_logger("plugins")


class Backend(Protocol):
    """What a plugin exposes under the entry point.

    Attributes:
        name: the first part of its implementations' names.
        api_version: the API_VERSION it was written for; compared before any native code loads.
        levels: instruction levels, lowest first, when `use("<name>.<level>")` is a cap; empty otherwise.
        automatic: whether it may be chosen without being asked for (simulators may not).

    A backend with a thread pool may also have `threads(count=None) -> int`: set the pool's size when a count is given,
    return it. The conformance suite uses it to show that results do not depend on it. One whose ceilings can be
    measured may have `peaks(seconds, read_bytes) -> {"bandwidth": bytes/s, "flops": {level: {dtype: operations/s}}}`:
    glm5sdk.perf places its implementations under them.
    """

    name: str
    api_version: int
    levels: tuple[str, ...]
    automatic: bool

    def probe(self) -> Device | str:
        """The device it found, or the reason why there is none. Imports no native code."""

    def impls(self) -> list[Impl]:
        """Its rows; native code loads here."""


@dataclass
class LoadedBackend:
    """A backend as this process sees it; `reason` is set when it cannot be used."""

    name: str
    levels: tuple[str, ...] = ()
    automatic: bool = True
    device: Device | None = None
    reason: str = ""
    impls: list[Impl] = field(default_factory=list)
    threads: Callable[..., int] | None = None
    peaks: Callable[..., dict[str, Any]] | None = None


_lock = threading.RLock()
_backends: dict[str, LoadedBackend] = {}
_by_op: dict[str, list[Impl]] = {}
_discovered = False
_epoch = 0


def epoch() -> int:
    """Grows whenever implementations are added, so that cached selections can tell they are stale."""
    return _epoch


def backends() -> dict[str, LoadedBackend]:
    """All plugin backends by name, discovered on the first call, unusable ones with their reason."""
    _discover()
    return _backends


def implementations(op: str) -> list[Impl]:
    """Every plugin implementation of one op, best first."""
    _discover()
    return _by_op.get(op, [])


def register_backend(backend: Backend) -> LoadedBackend:
    """Load one backend now; what an entry point does, for backends defined in a program or a test."""
    with _lock:
        loaded = _load(backend.name, lambda: backend)
        _add(loaded)
        return loaded


def unregister_backend(name: str) -> None:
    """Forget a backend that `register_backend` added."""
    with _lock:
        _backends.pop(name, None)
        _rebuild()


def _discover() -> None:
    global _discovered
    if _discovered:
        return
    with _lock:
        if _discovered:
            return
        for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda e: e.name):
            if entry.name not in _backends:
                _add(_load(entry.name, entry.load))
        _discovered = True


def _load(name: str, get: object) -> LoadedBackend:
    """Bring one backend up as far as it goes; a failure becomes its reason, never an exception."""
    loaded = LoadedBackend(name)
    try:
        backend: Backend = get()  # type: ignore[operator]
        if backend.name in BUILT_IN:
            raise ContractError(f"backend: name is {backend.name!r}, needs one that is not built in")
        if backend.api_version != API_VERSION:
            loaded.reason = f"api_version is {backend.api_version}, needs {API_VERSION}; install matching versions"
            return loaded
        loaded.levels, loaded.automatic = tuple(backend.levels), backend.automatic
        found = backend.probe()
        if isinstance(found, str):
            loaded.reason = found
            return loaded
        if not isinstance(found, Device):
            raise ContractError(f"backend {backend.name}: probe() gave {found!r}, needs a Device or the reason why not")
        loaded.device = found
        impls = list(backend.impls())
        for i, impl in enumerate(impls):
            if not isinstance(impl, Impl):
                raise ContractError(f"backend {backend.name}: impls()[{i}] is {impl!r}, needs an Impl")
            if any(impl.op == other.op and impl.name == other.name for other in impls[:i]):
                raise ContractError(f"backend {backend.name}: {impl.name} of {impl.op} stands twice, needs one row")
            if impl.backend != backend.name:
                raise ContractError(
                    f"backend {backend.name}: implementation is named {impl.name}, needs {backend.name}.*"
                )
        loaded.impls = impls
        loaded.threads = getattr(backend, "threads", None)
        loaded.peaks = getattr(backend, "peaks", None)
    except Exception as error:  # noqa: BLE001  a broken plugin must not take the process with it
        loaded.reason = f"{type(error).__name__}: {error}"
        _log.log(logging.INFO, "backend %s cannot load: %s", name, loaded.reason)
    return loaded


def _add(loaded: LoadedBackend) -> None:
    _backends[loaded.name] = loaded
    _rebuild()


def _rebuild() -> None:
    global _epoch
    _by_op.clear()
    for backend in _backends.values():
        for impl in backend.impls:
            _by_op.setdefault(impl.op, []).append(impl)
    for impls in _by_op.values():
        impls.sort(key=lambda impl: -impl.priority)
    _epoch += 1
