"""What tells that a weight has changed since something was derived from it."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5sdk.registry.weight import generation

__all__ = ["stamp"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCKS, _RUN = 128, 8  # samples: short runs, since each place costs a cache line


def stamp(weight: Tensor) -> tuple[object, ...]:
    """Different stamps mean different contents.

    `load_weight` and ordinary writes count themselves. Writes through `.data`, numpy or shared memory do not; on the
    CPU a thousand samples notice those that touch the whole weight, as an optimiser's do, at a cost that does not
    grow with it. Elsewhere reading would make the device wait. Whoever writes a few elements behind torch's back must
    go through `load_weight`.

    Args:
        weight: any tensor; only its memory is looked at.
    """
    version = None if weight.is_inference() else weight._version
    where = (weight.data_ptr() if not weight.is_meta else 0, weight.dtype, weight.device, tuple(weight.shape))
    return (*where, version, generation(weight), _contents(weight.detach()) if weight.is_cpu else None)


def _contents(weight: Tensor) -> int:
    """A hash of sampled words; through numpy, as a torch operator costs more than its work here."""
    words = weight.contiguous().view(-1).view(_WORDS[weight.element_size()])
    step = words.numel() // _BLOCKS
    if step > _RUN:
        words = words.as_strided((_BLOCKS, _RUN), (step, 1), words.storage_offset())
    return hash(words.numpy().tobytes())
