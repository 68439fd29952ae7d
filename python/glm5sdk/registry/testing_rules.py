"""What the conformance suite needs to know about an op beyond its shape rules; plain data, no test library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Property", "TestRules"]

Property = Callable[[Mapping[str, Any], tuple[Any, ...]], None]


@dataclass(frozen=True)
class TestRules:
    """Test data of one op.

    Attributes:
        make_inputs: `(axes, dtype, generator, exact) -> {argument: value}` for every tensor whose values are not free
            (indices, page tables, offsets) and for options; arguments it leaves out are drawn from a normal
            distribution in the rule's dtype and shape. `exact` asks for small integers, for which every order of
            summation gives the same bits.
        ranges: sizes to draw per axis, inclusive, default (1, 9); batch-like axes may start at 0.
        geometries: axes that always run, beside the random ones: odd sizes, tile boundaries, real head geometry.
        options: lists of option settings, each a dict of arguments; each example uses one.
        properties: functions of (arguments by name, outputs) that raise AssertionError.
        floor: absolute error that is always tolerated, by output dtype name.
        factor: k of `error <= k * error of the reference in the same dtype + floor`.
        exact_outputs: outputs (by name) that must equal the reference's on exact inputs.
        compare: replaces the comparison of outputs for ops whose right answer is not one tensor.
    """

    __test__ = False  # not a pytest class, whatever its name says

    make_inputs: Callable[..., dict[str, Any]] | None = None
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    geometries: Sequence[Mapping[str, int]] = ()
    options: Sequence[Mapping[str, Any]] = ({},)
    properties: Sequence[Property] = ()
    floor: Mapping[str, float] = field(default_factory=dict)
    factor: float = 4.0
    exact_outputs: Sequence[str] = ()
    compare: Callable[..., None] | None = None
