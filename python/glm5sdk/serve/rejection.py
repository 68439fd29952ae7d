"""Speculative decoding by rejection: other tokens than without drafts, the same distribution, and more drafts accepted.

A draft x drawn from q stands with probability min(1, p(x) / q(x)), where p is the target's distribution; the first that
falls is replaced by a draw from the positive part of p - q (Leviathan et al. 2023, arXiv 2211.17192). What decides is a
function of seed and position, so a request repeats itself; it does depend on its drafts, and so on preemption.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

__all__ = ["DRAFT_SEED", "accept_drafts"]

DRAFT_SEED = 0x5DEECE66D  # mixed into a request's seed for its drafts: their noise must not be the target's


def accept_drafts(drafts: list[int], p_KV: Tensor, q_KV: Tensor, seed: int, position: int) -> tuple[list[int], bool]:
    """Which tokens follow.

    Args:
        drafts: K tokens drawn from the rows of q.
        p_KV: f32 [K, V], the target's distributions at their places.
        q_KV: f32 [K, V], the drafter's.
        seed: of the request.
        position: absolute position of the first draft.

    Returns:
        The drafts that stand and, where one fell, the token in its place; whether all stood.
    """
    tokens: list[int] = []
    for k, draft in enumerate(drafts):
        p, q = p_KV[k].double(), q_KV[k].double()
        if _uniform(seed, position + k, b"accept") * float(q[draft]) < float(p[draft]):
            tokens.append(draft)
            continue
        rest = (p - q).clamp_(min=0)
        rest = rest if float(rest.sum()) > 0 else p  # p = q but for rounding: any draw from p will do
        edge = _uniform(seed, position + k, b"replace") * rest.sum()
        running = rest.cumsum(0)
        tokens.append(int(torch.searchsorted(running, edge, right=True).clamp(max=int(rest.nonzero()[-1]))))
        return tokens, False
    return tokens, True


def _uniform(seed: int, position: int, purpose: bytes) -> float:
    """In [0, 1), a function of its arguments."""
    key = (seed % 2**64).to_bytes(8, "little") + (position % 2**64).to_bytes(8, "little")
    digest = hashlib.blake2b(key, digest_size=8, person=purpose).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
