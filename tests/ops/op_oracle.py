"""What the tests of reference ops share: gradients against autograd, and torch's own check of an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import glm5sdk
from glm5sdk.registry import Op


def check_backward(op: Op[..., Any], *args: Any, seed: int = 0) -> None:
    """`<name>_bwd` on float64 arguments equals float64 autograd of the reference, for every differentiable argument."""
    names = list(op.signature.parameters)
    given = list(zip(names, args, strict=True))
    leaves = [a.detach().requires_grad_() if n in op.grad and a is not None else a for n, a in given]
    outs = op.reference(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    generator = torch.Generator().manual_seed(seed)
    floats = [o for o in outs if o.is_floating_point()]
    grads = [torch.randn(o.shape, generator=generator, dtype=o.dtype) for o in floats]
    wanted = [a for n, a in zip(names, leaves, strict=True) if n in op.grad and a is not None]
    want = torch.autograd.grad(floats, wanted, grads, allow_unused=True, materialize_grads=True)
    assert op.backward is not None
    got = op.backward.reference(*grads, *args)
    got = got if isinstance(got, tuple) else (got,)
    present = [g for g, n in zip(got, op.grad, strict=True) if args[names.index(n)] is not None]
    for g, w in zip(present, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-10)


def opcheck(op: Op[..., Any], *args: Any) -> None:
    """torch.library's own check: schema, fake form, gradient registration, tracing with dynamic shapes.

    Its tracing check adds outputs up in place and so cannot take an op whose first output is an integer; its schema
    check compares values, which torch has no float8 kernels for.
    """
    checks = ["test_autograd_registration", "test_faketensor"]
    if torch.float8_e4m3fn not in [a if isinstance(a, torch.dtype) else getattr(a, "dtype", None) for a in args]:
        checks.append("test_schema")
    if "test_schema" in checks and next(iter(op.outputs.values())).word not in ("i32", "i64"):
        checks.append("test_aot_dispatch_dynamic")
    with glm5sdk.use("reference"):
        torch.library.opcheck(op.view.overload, op.contract.flatten(*args), test_utils=checks)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A normal tensor that requires a gradient."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()
