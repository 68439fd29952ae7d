"""How much of the suite runs: a few seconds, every merge, or everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TIERS", "Tier", "chosen_variants"]


@dataclass(frozen=True)
class Tier:
    """One amount of testing.

    Attributes:
        name: of the tier.
        examples: examples a pair, fixed geometries first.
        every_variant: whether every instruction level runs, or only the lowest and the best.
        derandomize: whether the random examples are the same in every run.
        torch_view: whether opcheck, compile and autograd tests run.
        seconds: an example that takes longer is a failure; None = no limit.
    """

    name: str
    examples: int
    every_variant: bool
    derandomize: bool
    torch_view: bool
    seconds: float | None


_TEST = Tier("test", 20, False, True, True, 10.0)
_FULL = Tier("full", 100, True, True, True, None)
TIERS = {
    "smoke": Tier("smoke", 3, False, True, False, 10.0),
    "test": _TEST,
    "merge": _TEST,
    "full": _FULL,
    "sweep": Tier("sweep", 400, True, False, True, None),
}


def chosen_variants(variants: Sequence[str], levels: Sequence[str], tier: Tier) -> list[str]:
    """Which of one op's variants in one backend a tier runs.

    Args:
        variants: of the op, e.g. `["avx512", "baseline", "avx2"]`.
        levels: the backend's instruction levels, lowest first; empty when variants are not ordered.
        tier: the tier.
    """
    ordered = [level for level in levels if level in variants]
    others = [variant for variant in variants if variant not in levels]
    if not tier.every_variant and len(ordered) > 2:
        ordered = [ordered[0], *ordered[-2 if len(ordered) > 3 else -1 :]]
    return ordered + others
