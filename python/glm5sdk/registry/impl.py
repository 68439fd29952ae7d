"""Implementations: what they can run, said as data, with reasons when they cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from glm5sdk.core.errors import ContractError
from glm5sdk.registry.weight import Layout

__all__ = ["CallInfo", "Impl", "Requires", "at_most", "multiple_of", "one_of"]

KINDS = ("native", "composed", "reference")


@dataclass(frozen=True)
class CallInfo:
    """What selection may know about a call: nothing batch-like, no strides, no values.

    Attributes:
        device: torch device type.
        dtype: short name of the activation dtype (`bf16`).
        axes: sizes of the axes that are not batch-like.
        options: string, bool and dtype arguments by name.
        weights: `kind/layout` of each weight argument.
    """

    device: str
    dtype: str
    axes: Mapping[str, int]
    options: Mapping[str, Any]
    weights: Mapping[str, str]


@dataclass(frozen=True)
class AxisTest:
    """A condition on one axis with the words to explain it."""

    accepts: Callable[[int], bool]
    words: str


def multiple_of(n: int) -> AxisTest:
    return AxisTest(lambda size: size % n == 0, f"a multiple of {n}")


def at_most(n: int) -> AxisTest:
    return AxisTest(lambda size: size <= n, f"at most {n}")


def one_of(*sizes: int) -> AxisTest:
    return AxisTest(lambda size: size in sizes, "one of " + ", ".join(map(str, sizes)))


@dataclass(frozen=True)
class Requires:
    """An implementation's envelope; empty fields accept everything.

    Attributes:
        device: device types it runs on.
        dtypes: activation dtypes.
        axes: tests by axis name.
        options: accepted values by option name.
        weights: accepted `kind/layout` tags of every weight argument.
        plain_apart: whether plain and quantised weights may not stand side by side in one call.
    """

    device: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    axes: Mapping[str, AxisTest] = field(default_factory=dict)
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    plain_apart: bool = False

    def reasons(self, call: CallInfo) -> list[str]:
        """Every reason why this call cannot run, as `<what> is <got>, needs <want>`; empty = it can."""
        found = []
        if self.device and call.device not in self.device:
            found.append(f"device is {call.device}, needs {' or '.join(self.device)}")
        if self.dtypes and call.dtype not in self.dtypes:
            found.append(f"dtype is {call.dtype}, needs {' or '.join(self.dtypes)}")
        for axis, test in self.axes.items():
            if axis in call.axes and not test.accepts(call.axes[axis]):
                found.append(f"axis {axis} is {call.axes[axis]}, needs {test.words}")
        for option, values in self.options.items():
            if option in call.options and call.options[option] not in values:
                found.append(f"{option} is {call.options[option]!r}, needs {' or '.join(map(repr, values))}")
        for name, tag in call.weights.items():
            if self.weights and tag not in self.weights:
                found.append(f"weight {name} is {tag}, needs {' or '.join(self.weights)}")
        if self.plain_apart and len({tag.startswith("plain/") for tag in call.weights.values()}) > 1:
            found.append(f"weights are {' and '.join(call.weights.values())}, needs all plain or all quantised")
        return found


@dataclass(frozen=True, eq=False)
class Impl:
    """One way to run one op.

    Attributes:
        op: the op's name.
        name: `<backend>.<variant>`; `reference` and `composed` stand alone.
        kind: `native` (`fn(*inputs, *outputs[, workspace])`, everything allocated by the registry), `composed` (calls
            other ops) or `reference` (plain torch); the last two return their outputs.
        fn: the function.
        requires: its envelope.
        priority: higher is preferred when nothing else decides.
        invariant: whether it claims that a row's bits do not depend on the batch; the conformance suite tests claims.
        workspace: bytes of scratch for given axes, by axis name; native only.
        layout: storage it wants for its weight argument, if not plain.
    """

    op: str
    name: str
    kind: str
    fn: Callable[..., Any]
    requires: Requires = Requires()
    priority: int = 0
    invariant: bool = False
    workspace: Callable[[Mapping[str, int]], int] | None = None
    layout: Layout | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ContractError(f"{self.op}: kind of {self.name} is {self.kind!r}, needs one of: {', '.join(KINDS)}")

    @property
    def backend(self) -> str:
        return self.name.partition(".")[0]

    @property
    def variant(self) -> str:
        return self.name.partition(".")[2]
