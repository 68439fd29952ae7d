"""The plain layers: linear, norms and embedding, each one op around its parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glm5sdk import ops
from glm5sdk.nn.low_rank import LowRank

__all__ = ["Embedding", "LayerNorm", "Linear", "RMSNorm"]


class Linear(nn.Module):
    """y = x W^T with W [out, in]; no bias, as everywhere in GLM-5.

    Attributes:
        adapter: a low-rank addition, set by a `WeightView` while it is active.
    """

    adapter: LowRank | None = None

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x_TN: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        y = ops.linear(x_TN, self.weight, None, out_dtype)
        return y if self.adapter is None else self.adapter(x_TN, y, out_dtype)


class RMSNorm(nn.Module):
    """RMSNorm, alone or fused with the residual add before it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_TN: Tensor) -> Tensor:
        return ops.rms_norm(x_TN, self.weight, self.eps)

    def add(self, x_TN: Tensor, residual_TN: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of the new residual stream, the new residual stream); no residual yet means x begins it."""
        if residual_TN is None:
            return self(x_TN), x_TN
        return ops.fused_add_rms_norm(x_TN, residual_TN, self.weight, self.eps)


class LayerNorm(nn.Module):
    """LayerNorm with bias: the indexer's k_norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps


class Embedding(nn.Module):
    """Rows of a table by token id; a gather, so no bits are decided here."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size))

    def forward(self, ids_T: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids_T, self.weight)
