"""Muon: momentum whose matrices are replaced by the nearest orthogonal ones, block by block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Muon", "Partition", "orthogonalise"]

# Quintic whose iterates pull every singular value in (0, 1] near 1; steep at 0 rather than exact at 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315
# Root mean square of a typical AdamW update; scaled to it, one learning rate means the same for both.
_ADAM_RMS = 0.2


@dataclass(frozen=True)
class Partition:
    """How a parameter falls into matrices: `count` groups of rows, each cut into `sizes` rows.

    A plain matrix is one group of all its rows. Muon Split makes one group a head; experts are one group each.
    """

    count: int
    sizes: tuple[int, ...]

    def blocks(self, x: Tensor) -> list[Tensor]:
        """Views [count, size, columns] of a parameter-shaped tensor [..., columns], in which rows are contiguous."""
        grouped = x.view(self.count, sum(self.sizes), x.shape[-1])
        return list(grouped.split(self.sizes, dim=1))


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """Move each matrix's singular values into about [0.7, 1.2], singular vectors unchanged, by Newton-Schulz.

    Args:
        x: [n, r, c], r <= c for speed; a zero matrix stays zero.
        steps: iterations.

    Returns:
        [n, r, c], dtype of x.

    Source: Jordan and others 2024, Muon.
    """
    x = x / (x.square().sum((1, 2), keepdim=True).sqrt() + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised per block of each parameter's partition, decoupled weight decay.

    Blocks of equal shape, from whatever parameter, are orthogonalised in one batch. Parameters without a gradient keep
    value and momentum.

    Args:
        parameters: each with its partition.
        lr: learning rate; an update's root mean square is 0.2 lr.
        momentum: of the running mean of gradients.
        steps: Newton-Schulz iterations.
        weight_decay: fraction of the value lost per unit of lr.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, Partition]],
        lr: float,
        momentum: float = 0.95,
        steps: int = 5,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "steps": steps, "weight_decay": weight_decay}
        super().__init__([p for p, _ in parameters], defaults)
        self._partitions = [partition for _, partition in parameters]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update; `closure` is not supported and ignored."""
        group = self.param_groups[0]
        pairs = [(p, s) for p, s in zip(group["params"], self._partitions, strict=True) if p.grad is not None]
        if not pairs:
            return
        values, grads = [p for p, _ in pairs], [p.grad for p, _ in pairs]
        means = [self._momentum(p) for p in values]
        torch._foreach_lerp_(means, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, means, group["momentum"])
        if group["weight_decay"]:
            torch._foreach_mul_(values, 1 - group["lr"] * group["weight_decay"])
        shapes: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for (value, partition), update in zip(pairs, updates, strict=True):
            for target, block in zip(partition.blocks(value), partition.blocks(update), strict=True):
                if block.shape[1] > block.shape[2]:
                    target, block = target.transpose(1, 2), block.transpose(1, 2)
                shapes[block.shape[1], block.shape[2]].append((target, block))
        for (_, columns), blocks in shapes.items():
            result = orthogonalise(torch.cat([b for _, b in blocks]), group["steps"])
            pieces = result.split([b.shape[0] for _, b in blocks])
            rate = -group["lr"] * _ADAM_RMS * columns**0.5
            torch._foreach_add_([t for t, _ in blocks], list(pieces), alpha=rate)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        return state["momentum"]
