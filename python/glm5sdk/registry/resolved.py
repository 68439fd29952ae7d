"""Running a chosen implementation: the hot half of a call, and its form for loops that resolve once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from glm5sdk.registry.contract import Bound
from glm5sdk.registry.device import scratch, without_autocast
from glm5sdk.registry.impl import Impl
from glm5sdk.registry.weight import Weight

if TYPE_CHECKING:
    from glm5sdk.registry.spec import Op

__all__ = ["Resolved", "run"]


def run(impl: Impl, op: Op[..., Any], bound: Bound) -> Any:
    """Run a checked call; native kernels get outputs and workspace from the spec's own rule."""
    if impl.kind != "native":
        scope = without_autocast(bound.device) if bound.device is not None else None
        if scope is None:
            return impl.fn(*bound.args)
        with scope:
            return impl.fn(*bound.args)
    outs = op.contract.alloc(bound)
    call_native(impl, op, bound, outs)
    if not outs:
        return None
    return outs[0] if len(outs) == 1 else outs


def call_native(impl: Impl, op: Op[..., Any], bound: Bound, outs: tuple[Any, ...]) -> None:
    """The out-variant: inputs, outputs, then scratch if the kernel asks for some."""
    args = native_arguments(op, bound.args) if op.rewrites_arguments else bound.args
    size = workspace_size(impl, op, bound)
    if size is None:
        impl.fn(*args, *outs)
    else:
        impl.fn(*args, *outs, scratch(size, bound.device))


def workspace_size(impl: Impl, op: Op[..., Any], bound: Bound) -> int | None:
    """Bytes of scratch that a call needs, None when the kernel takes no workspace argument."""
    if impl.workspace is None:
        return None
    return impl.workspace(dict(zip(op.contract.axes, bound.axes, strict=True)))


def native_arguments(op: Op[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments as csrc/ knows them: a Weight is its tensors, a dtype is not said again where an output shows it."""
    for i in op.weight_positions:
        if type(args[i]) is Weight:
            break
    else:
        return tuple([args[i] for i in op.kernel_positions])
    flat: list[Any] = []
    for i in op.kernel_positions:
        value = args[i]
        if type(value) is Weight:
            flat += value.tensors
        else:
            flat.append(value)
    return tuple(flat)


class Resolved:
    """An op bound to one implementation: `resolved(*args)` for hot loops and graph capture.

    For a native implementation without workspace `kernel` is the binding itself: call `kernel(*inputs, *outputs)` with
    contiguous tensors and nothing stands in between. `check(*args)` validates when asked.
    """

    def __init__(self, op: Op[..., Any], impl: Impl) -> None:
        self.op, self.impl = op, impl
        self.kernel: Callable[..., Any] = impl.fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Validate and run with the resolved implementation; selection is not repeated."""
        return run(self.impl, self.op, self.op.contract.bind(*args, **kwargs))

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raise ContractError unless the arguments fit the op's contract."""
        self.op.contract.bind(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<resolved {self.op.name} -> {self.impl.name}>"
