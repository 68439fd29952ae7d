"""ForwardContext: what travels through the layers of one forward pass beside the hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from glm5sdk.nn.cache import CachePools
from glm5sdk.nn.token_batch import TokenBatch

__all__ = ["ForwardContext", "Selection"]

# "indexer" (the learned selection), "dense" (every visible key) or a function (layer, batch, K) -> indices [T, 1, K].
Selection = str | Callable[[int, TokenBatch, int], Tensor]


@dataclass
class ForwardContext:
    """One forward pass.

    Attributes:
        batch: the tokens.
        cos_sin: rotary table, f32 [Pmax, R].
        cache: pools to write and read; None computes from this step's own rows, with gradients.
        selection: who chooses the keys.
        collect_kl: ask every layer with an indexer for its distance to the attention it stands for.
        indices: selection of the last full layer, reused by shared ones.
        kl: losses [T] by layer, when collected.
        trace: receives (name, tensor) of each layer's selection and routing when set, and without a cache of the rows
            that one would hold; for tests, replay and caches of another make.
    """

    batch: TokenBatch
    cos_sin: Tensor
    cache: CachePools | None = None
    selection: Selection = "indexer"
    collect_kl: bool = False
    indices: Tensor | None = None
    kl: dict[int, Tensor] = field(default_factory=dict)
    trace: Callable[[str, Any], None] | None = None
