"""The pytest plugin behind `pytest --pyargs glm5sdk.testing`: its options, what ran, and the verdict on what did not.

It stays silent, and adds no option, unless the command line names this package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, cast

import pytest

from glm5sdk.testing.tiers import TIERS

__all__ = ["selected_backend"]

PACKAGE = "glm5sdk.testing"
PAIR, SLOWEST = "glm5sdk_pair", "glm5sdk_slowest"
SHOWN = 10
FOR_WORKERS = "_GLM5SDK_CONFORMANCE"  # set here, read here: pytest-xdist's workers parse the options, but see no argv


def _asked_for(args: Sequence[str]) -> bool:
    return any(PACKAGE in arg or "glm5sdk/testing" in arg for arg in args)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite."""
    if not _asked_for(sys.argv) and FOR_WORKERS not in os.environ:
        return
    os.environ[FOR_WORKERS] = "1"
    group = parser.getgroup("glm5sdk", "glm5sdk conformance suite")
    group.addoption("--backend", default="reference", help="backend to test: cpu, reference, or a plugin's name")
    group.addoption(
        "--tier", default="test", help="smoke, test (= merge), full or sweep: how many examples and variants"
    )
    group.addoption("--op", action="append", default=[], help="test only this op; may be given several times")
    group.addoption("--pairs", default=None, help="file of required pairs, instead of the one that ships")


def pytest_configure(config: pytest.Config) -> None:
    """Collect results where they all arrive: in the only process, or in the one that hands out work."""
    if not hasattr(config.option, "tier"):
        return
    if config.option.tier not in TIERS:
        raise pytest.UsageError(f"--tier is {config.option.tier!r}, needs one of: {', '.join(TIERS)}")
    selected_backend(config)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Verdict(config), "glm5sdk-verdict")


def selected_backend(config: pytest.Config) -> str:
    """The backend under test.

    Raises:
        pytest.UsageError: the plugin's options are not there, or the backend cannot run.
    """
    if not hasattr(config.option, "tier"):
        raise pytest.UsageError(f"{PACKAGE}: name the package on the command line, e.g. pytest --pyargs {PACKAGE}")
    from glm5sdk.core.errors import Glm5Error
    from glm5sdk.registry import use

    name: str = config.getoption("backend")
    try:
        use(name)
    except Glm5Error as error:
        raise pytest.UsageError(str(error)) from error
    return name


class _Verdict:
    """Remembers which pairs passed and how long their slowest example took."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.ran: set[str] = set()
        self.slowest: list[tuple[float, str]] = []
        self.missing: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        properties = dict(report.user_properties)
        if PAIR in properties and not report.skipped:
            self.ran.add(str(properties[PAIR]))
        if SLOWEST in properties:
            seconds, example = cast("tuple[float, str]", properties[SLOWEST])
            self.slowest.append((float(seconds), f"{properties[PAIR]} [{example}]"))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._is_partial(session) or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return
        from glm5sdk.testing.pairs import required_pairs

        option = self.config.option
        wanted = required_pairs(option.backend, option.tier, option.pairs)
        self.missing = sorted(p for p in wanted if p not in self.ran and (not option.op or p.split()[0] in option.op))
        if self.missing:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _is_partial(self, session: pytest.Session) -> bool:
        """Somebody chose single tests; what they left out is no omission."""
        option = self.config.option
        chosen = any("::" in str(arg) for arg in self.config.args)
        return bool(option.collectonly or option.keyword or option.markexpr or chosen or session.shouldstop)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        if self.slowest:
            terminalreporter.section("slowest example of a pair", sep="-")
            for seconds, pair in sorted(self.slowest, reverse=True)[:SHOWN]:
                write(f"{seconds:6.2f} s  {pair}")
        if self.missing:
            terminalreporter.section("required pairs that did not run", sep="-", red=True)
            for pair in self.missing:
                write(pair, red=True)
