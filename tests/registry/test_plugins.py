"""Backends that come from elsewhere: found late, compared first, and never able to take the process with them."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from toy_ops import Toy, installed, operands, row, toy_multiply

from glm5sdk.core.errors import UnavailableError
from glm5sdk.registry import API_VERSION, backends, plugins, use


class Exploding(Toy):
    """Loads native code badly."""

    def impls(self) -> Any:
        raise OSError("libtoy.so: cannot open shared object file")


class Untouchable(Toy):
    """Must not be asked for its rows."""

    def impls(self) -> Any:
        raise AssertionError("native code was loaded")


def refused(backend: Toy, reason: str) -> None:
    """A backend that cannot be used says why when asked for, and is passed over otherwise."""
    with installed(backend) as (loaded,):
        assert reason in loaded.reason
        assert loaded.impls == []
        assert torch.equal(toy_multiply(*operands()), operands()[0] * operands()[1])
        with pytest.raises(UnavailableError, match="backend toy cannot run here"):
            use("toy")


def test_another_api_version_is_refused_before_native_code_loads() -> None:
    refused(Untouchable(api_version=API_VERSION + 1), f"api_version is {API_VERSION + 1}, needs {API_VERSION}")


def test_a_probe_without_device_is_the_reason() -> None:
    refused(Untouchable(found="no driver: install version 999 or later"), "no driver: install version 999 or later")


def test_an_error_while_loading_is_the_reason() -> None:
    refused(Exploding(), "OSError: libtoy.so: cannot open shared object file")


def test_names_of_implementations_carry_the_backend() -> None:
    refused(Toy(impls=(row("other.a"),)), "implementation is named other.a, needs toy.*")


def test_built_in_names_are_taken() -> None:
    with installed(Toy("reference")) as (loaded,):
        assert "needs one that is not built in" in loaded.reason


def test_an_object_that_is_no_backend_is_a_reason_too() -> None:
    class Bare:
        name = "bare"

    loaded = plugins.register_backend(Bare())  # type: ignore[arg-type]
    try:
        assert "AttributeError" in loaded.reason
    finally:
        plugins.unregister_backend("bare")


def test_entry_points_are_read_at_the_first_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Entry:
        def __init__(self, name: str, backend: Any) -> None:
            self.name, self._backend = name, backend

        def load(self) -> Any:
            asked.append(self.name)
            if self._backend is None:
                raise ImportError("No module named 'glm5sdk_broken'")
            return self._backend

    found = [Entry("toy", Toy(impls=(row("toy.a"),))), Entry("broken", None)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: found if group == "glm5sdk.backends" else [])
    for state in ("_backends", "_by_op"):
        monkeypatch.setattr(plugins, state, {})
    monkeypatch.setattr(plugins, "_discovered", False)
    assert asked == []
    assert sorted(backends()) == ["broken", "toy"]
    assert asked == ["broken", "toy"]
    assert "ImportError: No module named 'glm5sdk_broken'" in backends()["broken"].reason
    assert [impl.name for impl in plugins.implementations("toy_multiply")] == ["toy.a"]
    assert asked == ["broken", "toy"]


def test_entry_points_have_the_documented_group() -> None:
    assert plugins.ENTRY_POINTS == "glm5sdk.backends"
    assert EntryPoint("cpu", "glm5sdk_cpu:BACKEND", plugins.ENTRY_POINTS).attr == "BACKEND"


def test_adding_and_removing_a_backend_reaches_running_programs() -> None:
    x, y = operands()
    before = toy_multiply.explain(x, y).chosen
    with installed(Toy(impls=(row("toy.a", priority=1000),))):
        assert toy_multiply.explain(x, y).chosen == "toy.a"
        toy_multiply(x, y)
    assert toy_multiply.explain(x, y).chosen == before
    assert torch.equal(toy_multiply(x, y), x * y)


def test_a_thread_hook_is_kept() -> None:
    with installed(Toy(threads=lambda count=None: 7)) as (loaded,):
        assert loaded.threads is not None
        assert loaded.threads() == 7
