"""What goes into the matrices of one layer on calibration text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from glm5sdk import ops
from glm5sdk.nn.context import ForwardContext
from glm5sdk.nn.layers import Linear
from glm5sdk.nn.mla import LatentAttention
from glm5sdk.nn.moe import MLP, Experts

__all__ = ["Call", "Calls", "expert_rows", "inputs_of", "recorded"]

Call = tuple[tuple[Any, ...], Any]
Calls = dict[str, list[Call]]


@contextmanager
def recorded(layer: nn.Module) -> Iterator[Calls]:
    """Arguments and results of every attention, feed-forward, experts and linear call of a layer, by module name.

    A context among the arguments is copied as it is after the call, with the selection that a shared layer reuses.
    """
    calls: Calls = {}
    hooks = []
    for name, module in layer.named_modules():
        if isinstance(module, (LatentAttention, MLP, Experts, Linear)):
            hooks.append(module.register_forward_hook(_hook(calls.setdefault(name, []))))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _hook(calls: list[Call]) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    def hook(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        kept = tuple(replace(a, kl={}, trace=None) if isinstance(a, ForwardContext) else a for a in args)
        calls.append((kept, None if isinstance(module, Linear) else result))

    return hook


def inputs_of(layer: nn.Module, calls: Calls) -> dict[str, Tensor]:
    """Input rows [T, N] of each linear of a layer by module name; experts are not among them.

    Some projections run inside a fused op; their inputs are computed from its own, by the ops it is made of.
    """
    found: dict[str, Tensor] = {}
    for name, module in layer.named_modules():
        if isinstance(module, LatentAttention):
            hidden = torch.cat([args[0] for args, _ in calls[name]])
            latent = ops.rms_norm(
                ops.linear(hidden, module.q_a_proj.weight), module.q_a_layernorm.weight, module.q_a_layernorm.eps
            )
            found |= {f"{name}.q_a_proj": hidden, f"{name}.kv_a_proj_with_mqa": hidden, f"{name}.q_b_proj": latent}
            if module.indexer is not None:
                found |= {f"{name}.indexer.wk": hidden, f"{name}.indexer.wq_b": latent}
        elif isinstance(module, Linear) and calls.get(name):
            found[name] = torch.cat([args[0] for args, _ in calls[name]])
    return found


def expert_rows(calls: list[Call], expert: int) -> Tensor:
    """Tokens [n, N] that an expert got, from the recorded calls of its Experts module."""
    return torch.cat([x[(ids == expert).any(1)] for (x, ids, _), _ in calls])
