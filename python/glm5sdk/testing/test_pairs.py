"""One test per (op, implementation): every promise of the op's declaration, on inputs drawn once an example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from glm5sdk.registry import get_op
from glm5sdk.testing.pair import check_pair
from glm5sdk.testing.plugin import PAIR, SLOWEST
from glm5sdk.testing.tiers import Tier


def test_pair(pair: tuple[str, str], tier: Tier, backend: str, record_property: Callable[[str, Any], None]) -> None:
    op, impl = pair
    record_property(PAIR, f"{op} {impl}")
    report = check_pair(get_op(op), impl, tier, backend)
    record_property(SLOWEST, report.slowest)
