"""Which implementation runs: `use(...)`, then GLM5SDK_BACKENDS, then priority; never across devices, with reasons."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

from glm5sdk.core.config import BACKENDS_VARIABLE, backends_from_environment, strict_from_environment
from glm5sdk.core.errors import ContractError, UnavailableError
from glm5sdk.core.log import get_logger, log_once
from glm5sdk.registry.impl import CallInfo, Impl
from glm5sdk.registry.plugins import BUILT_IN, LoadedBackend, backends

__all__ = ["Choice", "choose", "current_use", "strict", "use"]

_log = get_logger("select")
T = TypeVar("T")
_used: ContextVar[tuple[str, ...] | None] = ContextVar("glm5sdk_use", default=None)
_strict: ContextVar[bool | None] = ContextVar("glm5sdk_strict", default=None)
# What the scopes around this point replaced: kept by context, since one scope object may serve many threads at once.
_outer: ContextVar[tuple[Any, ...]] = ContextVar("glm5sdk_outer", default=())
_environment: tuple[str, ...] | None = None


class _Scope(Generic[T]):
    """A context manager that sets one context variable."""

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> None:
        _outer.set((*_outer.get(), self._variable.get()))
        self._variable.set(self._value)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        *rest, before = _outer.get()
        _outer.set(tuple(rest))
        self._variable.set(before)


def use(*names: str) -> _Scope[tuple[str, ...] | None]:
    """Choose backends for the ops called inside `with use(...):`, in order of preference.

    Args:
        names: `reference`, `composed`, a backend (`cpu`), a cap on its instruction level (`cpu.avx2`: each op runs its
            best variant not above it) or one exact variant (`cuda.sm90`).

    Raises:
        ContractError: no name, or a level that the backend does not know.
        UnavailableError: a backend that is not installed or cannot run here; says why.
    """
    if not names:
        raise ContractError("use: got no name, needs at least one, e.g. use('cpu') or use('reference')")
    for name in names:
        _check_name(name, "use")
    return _Scope(_used, names)


def strict(on: bool = True) -> _Scope[bool | None]:
    """Inside `with strict():` an op without a kernel in the chosen backend is an error instead of running composed."""
    return _Scope(_strict, on)


def restore(names: tuple[str, ...] | None) -> _Scope[tuple[str, ...] | None]:
    """Re-enter a selection that `current_use()` returned; backward passes run under their forward's."""
    return _Scope(_used, names)


def current_use() -> tuple[str, ...]:
    """The names in force: those of the innermost `use`, else GLM5SDK_BACKENDS, else none."""
    names = _used.get()
    return _from_environment() if names is None else names


def selection_key() -> tuple[str, ...] | None:
    """A cheap stand-in for `current_use` in cache keys (the environment is read once)."""
    return _used.get()


def is_strict() -> bool:
    value = _strict.get()
    return strict_from_environment() if value is None else value


def _from_environment() -> tuple[str, ...]:
    global _environment
    if _environment is None:
        names = backends_from_environment()
        for name in names:
            _check_name(name, BACKENDS_VARIABLE)
        _environment = names
    return _environment


def _check_name(name: str, who: str) -> None:
    backend, _, variant = name.partition(".")
    if backend in BUILT_IN and not variant:
        return
    loaded = backends().get(backend)
    if loaded is None:
        known = ", ".join([*backends(), *BUILT_IN])
        raise UnavailableError(
            f"{who}: backend is {name!r}, needs one of: {known}. Install its wheel, e.g. pip install glm5sdk-{backend}"
        )
    if loaded.reason:
        raise UnavailableError(f"{who}: backend {backend} cannot run here: {loaded.reason}")
    variants = {impl.variant for impl in loaded.impls} | set(loaded.levels)
    if variant and variant not in variants:
        raise ContractError(f"{who}: variant is {name!r}, needs one of: {', '.join(sorted(variants))}")


@dataclass(frozen=True)
class Choice:
    """The outcome for one call.

    Attributes:
        impl: what runs; None when nothing can.
        rows: every candidate with its reasons (empty = it could run), best first.
        why: one sentence.
    """

    impl: Impl | None
    rows: tuple[tuple[Impl, tuple[str, ...]], ...]
    why: str


def choose(op: str, call: CallInfo, candidates: Sequence[Impl], names: tuple[str, ...]) -> Choice:
    """Apply the order of authority to one call.

    Args:
        op: the op's name.
        call: what may be looked at.
        candidates: all implementations, best first, ending in composed (if any) and reference.
        names: `current_use()`.
    """
    loaded = backends()
    rows = [(impl, tuple(impl.requires.reasons(call))) for impl in candidates]
    if not names:
        for impl, reasons in rows:
            if not reasons and _may_run_unasked(impl, loaded):
                return Choice(impl, tuple(rows), "highest priority that can run")
        return Choice(None, tuple(rows), "no implementation can run this call")
    refused = False
    for name in names:
        named = [row for row in rows if _matches(row[0], name, loaded)]
        for impl, reasons in named:
            if not reasons:
                return Choice(impl, tuple(rows), f"asked for by name: {name}")
        refused = refused or bool(named)
    asked = ", ".join(names)
    if refused:
        # A decomposition stays within what was asked for: each of its ops is chosen by the same names.
        composed = next((impl for impl, reasons in rows if impl.kind == "composed" and not reasons), None)
        if composed is None or is_strict():
            return Choice(None, tuple(rows), f"{asked} was asked for by name and refuses this call")
        log_once(_log, logging.INFO, f"{op}: a kernel of {asked} refuses a call, which runs composed of other ops")
        return Choice(composed, tuple(rows), f"{asked} refuses this call in one kernel; runs composed of other ops")
    fallback = [row for row in rows if row[0].kind in BUILT_IN and not row[1]]
    if not fallback or (is_strict() and asked not in BUILT_IN):
        return Choice(None, tuple(rows), f"{asked} has no kernel for {op}" + (" (strict mode)" if is_strict() else ""))
    if asked not in BUILT_IN:
        log_once(_log, logging.INFO, f"{op}: {asked} has no kernel, runs {fallback[0][0].name}")
    return Choice(fallback[0][0], tuple(rows), f"{asked} has no kernel for {op}; runs {fallback[0][0].name}")


def _may_run_unasked(impl: Impl, loaded: dict[str, LoadedBackend]) -> bool:
    backend = loaded.get(impl.backend)
    return backend is None or backend.automatic


def _matches(impl: Impl, name: str, loaded: dict[str, LoadedBackend]) -> bool:
    backend, _, variant = name.partition(".")
    if impl.backend != backend:
        return False
    levels = loaded[backend].levels if backend in loaded else ()
    if variant in levels and impl.variant in levels:
        return levels.index(impl.variant) <= levels.index(variant)
    return not variant or impl.variant == variant


def refusal(op: str, choice: Choice) -> UnavailableError:
    """The error when nothing runs: every candidate with every reason."""
    lines = [f"  {impl.name}: {'; '.join(reasons) if reasons else 'not asked for'}" for impl, reasons in choice.rows]
    return UnavailableError("\n".join([f"{op}: {choice.why}", *lines]))


def is_strict_scope() -> bool | None:
    """The innermost `strict` setting, for cache keys."""
    return _strict.get()
