"""One pair through the whole suite: fixed geometries, then random examples, then what lies outside its envelope."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

from glm5sdk.core.errors import ContractError
from glm5sdk.registry import Impl, Op
from glm5sdk.testing.checks import PairChecks
from glm5sdk.testing.envelope import check_envelope
from glm5sdk.testing.failure import CheckFailed
from glm5sdk.testing.inputs import Example, geometries, random_examples
from glm5sdk.testing.tiers import TIERS, Tier

__all__ = ["Report", "check_pair", "find_impl"]

RANDOM_SHARE = 3  # of the examples at least a third are random


@dataclass
class Report:
    """What ran.

    Attributes:
        examples: how many.
        refused: examples outside the envelope.
        slowest: seconds of the slowest one, and which.
    """

    examples: int = 0
    refused: int = 0
    slowest: tuple[float, str] = (0.0, "")


def find_impl(op: Op[..., Any], name: str) -> Impl:
    """An op's implementation by name.

    Raises:
        ContractError: there is none; lists those there are.
    """
    found = {impl.name: impl for impl in op.implementations()}
    if name not in found:
        raise ContractError(f"{op.name}: implementation is {name!r}, needs one of: {', '.join(found)}")
    return found[name]


def check_pair(op: Op[..., Any], impl: str, tier: Tier = TIERS["test"], backend: str | None = None) -> Report:
    """Check one implementation of one op.

    Args:
        op: the op.
        impl: name of the implementation.
        tier: how much.
        backend: for `composed`: whose kernels it should be made of.

    Raises:
        CheckFailed: a promise is broken; names check, pair and example.
    """
    row = find_impl(op, impl)
    checks, report = PairChecks(op, row, backend), Report()

    def one(example: Example) -> None:
        _one(checks, example, tier, report)

    fixed = geometries(op, row, every_dtype=tier.every_variant)
    random = max(-(-tier.examples // RANDOM_SHARE), tier.examples - len(fixed))
    if tier.name == "smoke":
        fixed = _smallest(fixed, tier.examples - random)
    for example in fixed:
        one(example)
    _hypothesis(random_examples(op, row), one, random, tier)
    if not report.examples:
        raise CheckFailed("envelope", f"{op.name} {impl}: none of {report.refused} examples lies inside its envelope")
    check_envelope(checks)
    return report


def _smallest(examples: list[Example], count: int) -> list[Example]:
    """The examples with the least to compute."""
    return sorted(examples, key=lambda example: sum(size for _, size in example.axes))[:count]


def _one(checks: PairChecks, example: Example, tier: Tier, report: Report) -> None:
    start, busy = time.perf_counter(), time.process_time()
    try:
        if not checks.covers(example):
            report.refused += 1
            return
        checks.run(example)
    except CheckFailed as error:
        pair = f"{checks.op.name} {checks.impl.name}"
        raise CheckFailed(error.check, f"{pair}: {error.sentence} [example: {example}]") from error
    except Exception as error:
        error.add_note(f"{checks.op.name} {checks.impl.name} [example: {example}]")
        raise
    report.examples += 1
    # A busy machine is not the pair's fault, nor are its own threads.
    seconds = min(time.perf_counter() - start, time.process_time() - busy)
    if seconds > report.slowest[0]:
        report.slowest = (seconds, str(example))
    if tier.seconds is not None and seconds > tier.seconds:
        raise CheckFailed(
            "quick",
            f"{checks.op.name} {checks.impl.name}: {seconds:.1f} s, needs <= {tier.seconds:g} s [example: {example}]",
        )


def _hypothesis(strategy: Any, one: Callable[[Example], None], count: int, tier: Tier) -> None:
    # Shrinking reruns an example hundreds of times; sizes are small to begin with, so only the long tier pays for it.
    phases = (Phase.generate, Phase.shrink) if tier.every_variant else (Phase.generate,)

    @settings(
        max_examples=count,
        derandomize=tier.derandomize,
        deadline=None,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(example: Example) -> None:
        one(example)

    run()
