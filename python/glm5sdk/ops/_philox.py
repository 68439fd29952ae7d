"""Philox4x32-10, the counter-based generator behind sampling: the same draw for the same (seed, position, token)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DRAW", "gumbel", "philox4x32"]

DRAW = 0  # purpose: the sampler's own draw; other uses of the generator take other numbers
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds of Philox4x32; the vectors published with Random123 hold:

    counter 0, key 0 -> 6627e8d5 e169c58d bc57ac4c 9b00dbd8; all ones -> 408f276d 41c83b0e a20bc7c6 6d5451fd.

    Args:
        counter: four i64 tensors of 32-bit words, broadcastable.
        key: two of the same.

    Returns:
        Four i64 tensors of 32-bit words.

    Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # 64-bit products wrap around; masks after the shift make both halves right whatever the sign.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) & _MASK ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) & _MASK ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel(seed: Tensor, position: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise g = -log(-log1p(-v)) for each (row, token).

    v = min((word + 0.5) * 2^-32, 1 - 2^-24), made in float32 from word token % 4 of Philox at key = the seed's low and
    high words, counter = (position mod 2^32, token / 4, DRAW, 0). Small v, the likely winners, keep full precision:
    tokens down to a probability of 1e-9 are drawn as often as they should be.

    Args:
        seed: i64 [B].
        position: i64 [B], absolute position of the token to draw.
        vocabulary: V.
        dtype: float32, or float64 to take the logarithms there.

    Returns:
        [B, V].
    """
    blocks = torch.arange(-(-vocabulary // 4), device=seed.device)[None, :]
    zero = torch.zeros_like(blocks)
    key = (seed[:, None] & _MASK, seed[:, None] >> 32 & _MASK)
    words = philox4x32((position[:, None] & _MASK, blocks, zero + DRAW, zero), key)
    bits = torch.stack(torch.broadcast_tensors(*words), -1).flatten(1)[:, :vocabulary]
    v = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).to(dtype)
    return -(-torch.log1p(-v)).log()
