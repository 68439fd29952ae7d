"""The sentences of broken contracts; compiled contracts call these, so that each is written once."""

from __future__ import annotations

from builtins import type as type_of
from typing import Any

from glm5sdk.core.errors import ContractError


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def type(op: str, argument: str, got: Any, want: str) -> ContractError:
    shown = repr(got) if isinstance(got, (int, float, str)) else type_of(got).__name__
    return ContractError(f"{op}: {argument} is {shown}, needs {want}")


def rank(op: str, argument: str, shape: Any, rule: str) -> ContractError:
    return ContractError(f"{op}: {argument} is {tuple(shape)}, needs {rule}")


def axis(op: str, name: str, earlier: int, argument: str, got: int) -> ContractError:
    return ContractError(f"{op}: axis {name} of {argument} is {got}, needs {earlier} as in the arguments before it")


def dim(op: str, argument: str, rule: str, got: int, want: int | None = None) -> ContractError:
    needs = f"{want} = {rule}" if want is not None else f"a size of the form {rule}"
    return ContractError(f"{op}: a dimension of {argument} is {got}, needs {needs}")


def cache(op: str, argument: str, shape: Any, want: tuple[int, ...], format: str) -> ContractError:
    return ContractError(f"{op}: {argument} is {tuple(shape)}, needs {want} in format {format!r}")


def activation(op: str, argument: str, got: Any) -> ContractError:
    return ContractError(f"{op}: {argument} is {_name(got)}, needs float32, bfloat16, float16 or float64")


def dtype(op: str, argument: str, got: Any, want: Any) -> ContractError:
    return ContractError(f"{op}: {argument} is {_name(got)}, needs {_name(want)}")


def device(op: str, argument: str, got: Any, want: Any) -> ContractError:
    return ContractError(f"{op}: {argument} is on {got}, needs {want} like the arguments before it")


def strides(op: str, argument: str, got: Any) -> ContractError:
    return ContractError(
        f"{op}: {argument} has strides {tuple(got.stride())}, needs to be contiguous because it is written in place"
    )


def layout(op: str, argument: str, got: Any) -> ContractError:
    return ContractError(f"{op}: {argument} has layout {_name(got.layout)}, needs a dense tensor")


def is_contiguous(op: str, argument: str, got: Any) -> bool:
    """Of a tensor that is written in place: also refuses what is no plain memory."""
    if got.is_neg():
        raise ContractError(f"{op}: {argument} is lazily negated, needs plain memory because it is written in place")
    try:
        return bool(got.is_contiguous())
    except RuntimeError:
        raise layout(op, argument, got) from None


def overlap(op: str, mutated: str, argument: str) -> ContractError:
    return ContractError(
        f"{op}: {argument} shares memory with {mutated}, needs memory of its own because {mutated} is written in place"
    )


def check_overlap(op: str, mutated: str, begin: int, end: int, argument: str, tensors: tuple[Any, ...]) -> None:
    """Raise when a weight's tensors would be read while, or after, their memory is written. All are contiguous."""
    for t in tensors:
        at = t.data_ptr()
        if at < end and begin < at + t.nbytes:
            raise overlap(op, mutated, argument)


def condition(op: str, text: str, sizes: dict[str, Any]) -> ContractError:
    shown = ", ".join(f"{name} is {value!r}" for name, value in sizes.items())
    return ContractError(f"{op}: {shown}, needs {text}")


def no_gradient(op: str) -> ContractError:
    forward = op.removesuffix("_bwd")
    if forward != op:
        return ContractError(f"{forward}: a gradient of its gradient was asked for, needs one derivative at most")
    return ContractError(f"{op}: a gradient was asked for, needs none: it has no gradient; detach what it returns")


def inference_only(op: str, mutates: tuple[str, ...]) -> ContractError:
    return ContractError(
        f"{op}: an input requires grad, needs none: {', '.join(mutates)} is written in place, which has no gradient. "
        "Use the functional op for training, or call under torch.no_grad()"
    )
