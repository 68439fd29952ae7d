"""The table of rotary cosines and sines, grown as positions come."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5sdk.core.errors import CapacityError

__all__ = ["RopeTable"]


class RopeTable:
    """cos_sin [Pmax, R] f32: row p holds R/2 cosines, then R/2 sines of p * frequency.

    Angles are float32 products as in every published GLM-5 runtime; a row does not depend on the table's length, so
    growing it changes nothing.

    Args:
        frequencies: R/2 radians per position.
        factor: multiplies cosines and sines (1 without YaRN).
        limit: max_position_embeddings.
    """

    def __init__(self, frequencies: tuple[float, ...], factor: float, limit: int) -> None:
        self._frequencies, self._factor, self._limit = frequencies, factor, limit
        self._table = torch.empty(0, 2 * len(frequencies))

    def __call__(self, length: int, device: torch.device) -> Tensor:
        """A table with at least `length` rows on `device`.

        Raises:
            CapacityError: `length` is beyond max_position_embeddings.
        """
        if length > self._limit:
            raise CapacityError(
                f"rope: sequence length is {length}, needs at most max_position_embeddings {self._limit}"
            )
        if self._table.shape[0] < length or self._table.device != device:
            rows = min(self._limit, max(256, 1 << (length - 1).bit_length(), self._table.shape[0]))
            positions = torch.arange(rows, dtype=torch.float32, device=device)
            angles = torch.outer(positions, torch.tensor(self._frequencies, dtype=torch.float32, device=device))
            self._table = torch.cat([angles.cos(), angles.sin()], dim=-1) * self._factor
        return self._table
