"""Once per op, under the backend's selection: what the op is to torch."""

from __future__ import annotations

import pytest

from glm5sdk.registry import get_op, use
from glm5sdk.testing.torch_checks import check_compile, check_gradients, check_opcheck


def chosen(backend: str) -> tuple[str, ...]:
    """A backend may take less than an op does; how much of it is the pairs' affair, not torch's."""
    return (backend, *(name for name in ("composed", "reference") if name != backend))


def test_opcheck(op_name: str, backend: str) -> None:
    with use(*chosen(backend)):
        check_opcheck(get_op(op_name))


def test_compiles_into_one_graph(op_name: str, backend: str) -> None:
    with use(*chosen(backend)):
        check_compile(get_op(op_name))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gradients(grad_op_name: str, backend: str, dtype: str) -> None:
    with use(*chosen(backend)):
        check_gradients(get_op(grad_op_name), dtype)
