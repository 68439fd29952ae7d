"""What tells that a weight has changed since something was derived from it."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5sdk.registry.weight import generation

__all__ = ["stamp"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLES = 4096


def stamp(weight: Tensor) -> tuple[object, ...]:
    """Equal stamps mean equal contents, however the weight was written in between.

    `load_weight` and ordinary writes count themselves. Writes through `.data`, numpy or shared memory do not, so on the
    CPU the bits are summed too: one pass over the weight, a tenth of deriving anything from it. Elsewhere that would
    make the device wait; there, unannounced writes must go through `load_weight`.

    Args:
        weight: any tensor; only its memory is looked at.
    """
    version = None if weight.is_inference() else weight._version
    where = (weight.data_ptr() if not weight.is_meta else 0, weight.dtype, weight.device, tuple(weight.shape))
    return (*where, version, generation(weight), _contents(weight.detach()) if weight.is_cpu else None)


def _contents(weight: Tensor) -> tuple[int, int]:
    """The sum of all words, and a sum that also depends on where the sampled ones lie."""
    flat = weight.contiguous().view(-1)
    width = flat.element_size()
    wide = flat.numel() * width % 8 == 0 and flat.data_ptr() % 8 == 0
    words = flat.view(torch.int64 if wide else _WORDS[width])
    sample = words[:: max(1, len(words) // _SAMPLES)].to(torch.int64)
    place = torch.arange(1, len(sample) + 1, device=sample.device)
    return int(words.sum(dtype=torch.int64)), int((sample * place).sum())
