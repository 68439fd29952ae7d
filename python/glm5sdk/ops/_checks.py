"""Value checks that references make before they compute or write anything."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError

__all__ = ["check_range", "check_selection", "check_slots"]


def check_range(op: str, name: str, values: Tensor, low: int, high: int, what: str = "") -> None:
    """Raise unless `low <= value < high` for every value.

    Args:
        op: the op's name.
        name: the argument's name.
        values: integers of any shape.
        low: smallest legal value.
        high: one past the largest.
        what: what `high` stands for, e.g. `pages in the pool`.

    Raises:
        ContractError: a value is outside; the first one is named with its place.
    """
    values = values.long()  # a bound past 32 bits would wrap when compared with narrower integers
    bad = (values < low) | (values >= high)
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        hint = f" ({what})" if what else ""
        raise ContractError(f"{op}: {name}{place} is {int(values[tuple(place)])}, needs {low} <= value < {high}{hint}")


def check_slots(op: str, slots: Tensor, pool: int) -> None:
    """Raise unless every slot is -1 or a place in the pool, and none is written twice.

    Args:
        op: the op's name.
        slots: [T] i64 physical rows.
        pool: places in the pool, P * S.

    Raises:
        ContractError: a slot is outside, or two rows name the same one, so that chance would pick the winner.
    """
    check_range(op, "slots", slots, -1, pool, "places in the pool")
    values, counts = torch.unique(slots[slots >= 0], return_counts=True)
    if bool((counts > 1).any()):
        slot = int(values[counts > 1][0])
        raise ContractError(f"{op}: slot {slot} is named {int(counts.max())} times, needs distinct slots or -1")


def check_selection(op: str, indices: Tensor, live: Tensor, limit: Tensor) -> None:
    """Raise unless every live selection is strictly ascending, then -1, and inside its request.

    Args:
        op: the op's name.
        indices: [T, G, K] i32 logical positions.
        live: [T] bool, rows that are not padding.
        limit: [T] one past the largest position each row may name.

    Raises:
        ContractError: the first offending row is named.
    """
    here = indices[live].long()
    if here.numel() == 0:
        return
    rows = live.nonzero()[:, 0]
    beyond = (here < -1) | (here >= limit[live].long()[:, None, None])
    left, right = here[..., :-1], here[..., 1:]
    disorder = (right != -1) & ((left == -1) | (right <= left))
    if bool(beyond.any()):
        t, g, k = beyond.nonzero()[0].tolist()
        raise ContractError(
            f"{op}: indices[{int(rows[t])}, {g}, {k}] is {int(here[t, g, k])}, "
            f"needs -1 or 0 <= position < {int(limit[rows[t]])}"
        )
    if bool(disorder.any()):
        t, g, k = disorder.nonzero()[0].tolist()
        pair = torch.stack([left[t, g, k], right[t, g, k]]).tolist()
        raise ContractError(
            f"{op}: indices[{int(rows[t])}, {g}, {k}:{k + 2}] are {pair}, needs strictly ascending positions, then -1"
        )
