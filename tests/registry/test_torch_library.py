"""The registry seen by torch: opcheck, one graph, shapes that vary, gradients by the forward's choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from toy_ops import (
    Toy,
    installed,
    multiply_kernel,
    operands,
    row,
    toy_cast,
    toy_composed,
    toy_linear,
    toy_multiply,
    toy_paged,
    toy_write,
)

from glm5sdk.core.errors import ContractError
from glm5sdk.registry import Weight, use

calls: list[str] = []


def forward_kernel(*args: Any) -> None:
    calls.append("forward")
    multiply_kernel(*args)


def backward_kernel(
    grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, bias: Any, mode: str, scale: float, *outs: torch.Tensor
) -> None:
    calls.append("backward")
    for out, value in zip(outs, (scale * grad * y, scale * grad * x, grad.sum(0)), strict=True):
        out.copy_(value)


@pytest.fixture
def toy() -> Iterator[None]:
    calls.clear()
    rows = (row("toy.a", forward_kernel), row("toy.a", backward_kernel, "toy_multiply_bwd"))
    with installed(Toy(impls=rows)):
        yield
    torch._dynamo.reset()


def with_grad(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, y = operands(rows)
    return x.requires_grad_(), y.requires_grad_(), torch.randn(4, requires_grad=True)


@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(bias: bool) -> None:
    x, y, b = with_grad()
    flat = toy_multiply.contract.flatten(x, y, b if bias else None)
    torch.library.opcheck(toy_multiply.view.overload, flat)


def test_opcheck_of_the_gradient_and_of_other_kinds() -> None:
    x, y = operands()
    backward = toy_multiply.backward
    assert backward is not None
    torch.library.opcheck(backward.view.overload, backward.contract.flatten(x, x, y, None, "plain", 1.0))
    torch.library.opcheck(toy_composed.view.overload, (x, y))
    torch.library.opcheck(toy_write.view.overload, (torch.ones(2, 3), torch.zeros(4, 3), torch.tensor([0, 3])))
    torch.library.opcheck(toy_cast.view.overload, (x, torch.bfloat16))
    torch.library.opcheck(toy_linear.view.overload, toy_linear.contract.flatten(x.requires_grad_(), torch.randn(5, 4)))


def test_compiles_into_one_graph_with_any_number_of_rows(toy: None) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return toy_multiply(x, y, scale=2.0) + 1

    for rows in (3, 7, 65):
        x, y = operands(rows)
        assert torch.equal(f(x, y), 2.0 * x * y + 1)
    assert len(graphs) == 1
    assert any(node.target is toy_multiply.view.overload for node in graphs[0].graph.nodes)
    assert calls == ["forward"] * 3


def test_compiled_gradients_are_the_eager_ones(toy: None) -> None:
    def f(x: torch.Tensor, y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return toy_multiply(x, y, b).square().sum()

    x, y, b = with_grad()
    eager = torch.autograd.grad(f(x, y, b), (x, y, b))
    compiled = torch.autograd.grad(torch.compile(f, backend="aot_eager", fullgraph=True)(x, y, b), (x, y, b))
    for want, got in zip(eager, compiled, strict=True):
        assert torch.equal(want, got)


def test_writes_are_seen_by_the_compiler() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        toy_write(rows, cache, slots)
        return cache.sum()

    cache = torch.zeros(4, 3)
    assert f(torch.ones(2, 3), cache, torch.tensor([0, 2])) == 6
    assert cache[2].sum() == 3
    torch._dynamo.reset()


def test_gradients_against_autograd(toy: None) -> None:
    x, y, b = with_grad()
    upstream = torch.randn(3, 4)
    got = torch.autograd.grad(toy_multiply(x, y, b, scale=0.5), (x, y, b), upstream)
    want = torch.autograd.grad(0.5 * x * y + b, (x, y, b), upstream)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    assert calls == ["forward", "backward"]


def test_backward_runs_what_its_forward_chose(toy: None) -> None:
    x, y, _ = with_grad()
    with use("toy"):
        out = toy_multiply(x, y)
    with use("reference"):
        out.sum().backward()
    assert calls == ["forward", "backward"]
    calls.clear()
    with use("reference"):
        out = toy_multiply(x, y)
    with use("toy"):
        out.sum().backward()
    assert calls == []


def test_only_wanted_gradients_come_back() -> None:
    x, y = operands()
    out = toy_multiply(x.requires_grad_(), y)
    out.sum().backward()
    assert torch.equal(x.grad, y)
    assert y.grad is None
    with torch.no_grad():
        assert not toy_multiply(x, y).requires_grad


def test_a_second_derivative_is_refused_in_words() -> None:
    x, y, _ = with_grad()
    (first,) = torch.autograd.grad(toy_multiply(x, y).sum(), x, create_graph=True)
    assert torch.equal(first, y)
    with pytest.raises(
        ContractError, match="toy_multiply: a gradient of its gradient was asked for, needs one derivative"
    ):
        torch.autograd.grad(first.sum(), y)


def test_an_op_without_gradient_refuses_one_in_words(toy: None) -> None:
    x, y = operands()
    out = toy_composed(x.requires_grad_(), y)
    assert torch.equal(out, x * y)
    with pytest.raises(ContractError, match="toy_composed: a gradient was asked for, needs none"):
        out.sum().backward()
    assert not toy_composed(x.detach(), y).requires_grad


def test_a_tensor_without_memory_never_reaches_a_kernel(toy: None) -> None:
    with FakeTensorMode() as mode:
        x, y = (mode.from_tensor(t) for t in operands())
        z = toy_multiply(x, y)
        assert (z.shape, z.dtype, z.device) == ((3, 4), torch.float32, torch.device("cpu"))
    w = Weight("plain", "plain", (5, 4), (mode.from_tensor(torch.zeros(5, 4)),))
    with mode:
        assert toy_linear(x, w).shape == (3, 5)
    assert calls == []


def test_meta_tensors_give_shapes(toy: None) -> None:
    x, y = (t.to("meta") for t in operands())
    with FakeTensorMode():
        assert toy_multiply(torch.empty(3, 4, device="meta"), torch.empty(3, 4, device="meta")).shape == (3, 4)
    assert calls == []
    assert x.shape == y.shape


def test_the_fake_form_checks_the_contract() -> None:
    with FakeTensorMode() as mode, pytest.raises(ContractError, match="axis N of y is 5, needs 4"):
        toy_multiply(mode.from_tensor(torch.zeros(3, 4)), mode.from_tensor(torch.zeros(3, 5)))


def test_autocast_is_ignored() -> None:
    x, y = operands()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert toy_multiply(x, y).dtype == torch.float32
        assert toy_linear(x, torch.randn(5, 4)).dtype == torch.float32
        assert toy_multiply(x.requires_grad_(), y).dtype == torch.float32


def test_parameters_run_natively_and_train(toy: None) -> None:
    x, y = operands()
    parameter = torch.nn.Parameter(y)
    with torch.no_grad():
        toy_multiply(x, parameter)
    assert calls == ["forward"]
    toy_multiply(x, parameter).sum().backward()
    assert torch.equal(parameter.grad, x)


def test_gradients_of_a_plain_weight() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    toy_linear(x, w).sum().backward()
    torch.testing.assert_close(w.grad, x.detach().sum(0).expand(5, 4))
    torch.testing.assert_close(x.grad, w.detach().sum(0).expand(3, 4))


def test_outputs_without_rows() -> None:
    x, y, b = with_grad(0)
    toy_multiply(x, y, b).sum().backward()
    assert x.grad.shape == (0, 4)
    assert torch.equal(b.grad, torch.zeros(4))


def test_every_word_has_a_fake_form() -> None:
    shapes = {"q": (2, 3, 6), "kv_cache": (5, 6, 6), "index_cache": (5, 6, 7), "half": (2, 16), "iw": (2, 7)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(t) for name, t in tensors.items()}
        page = mode.from_tensor(torch.zeros(2, dtype=torch.int32))
        out, sums, picked = toy_paged(**fake, page=page, v_dim=4)
    assert (out.shape, sums.dtype, picked.dtype) == ((2, 3, 4), torch.float32, torch.int32)
