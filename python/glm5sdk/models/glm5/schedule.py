"""Which layers run their own indexer ("full") and which reuse an earlier layer's selection ("shared")."""

from __future__ import annotations

from collections.abc import Sequence

from glm5sdk.core.errors import ContractError

FULL = "full"
SHARED = "shared"

_LETTERS = {"F": FULL, "S": SHARED}


def indexer_types_from_rule(num_layers: int, freq: int, offset: int) -> tuple[str, ...]:
    """Layer i (from 0) is full when `max(i - offset + 1, 0)` is a multiple of `freq`, else shared.

    GLM-5.2 has freq 4 and offset 3: layers 0, 1, 2, 6, 10, ... are full. freq 1 makes every layer full (GLM-5, 5.1).
    """
    return tuple(FULL if max(i - offset + 1, 0) % freq == 0 else SHARED for i in range(num_layers))


def indexer_types_from_pattern(pattern: str | Sequence[str]) -> tuple[str, ...]:
    """Spells out a pattern such as `"FFSS"`, or a sequence of `"full"` / `"shared"` (or of the letters).

    Raises:
        ContractError: an entry is neither.
    """
    types = tuple(_LETTERS.get(entry, entry) for entry in pattern)
    for i, entry in enumerate(types):
        if entry not in (FULL, SHARED):
            raise ContractError(
                f"Glm5Config: index_topk_pattern entry {i} is {entry!r}, needs 'F' (full) or 'S' (shared)"
            )
    return types


def resolve_indexer_types(
    num_layers: int,
    indexer_types: Sequence[str] | None,
    pattern: str | Sequence[str] | None,
    freq: int,
    offset: int,
) -> tuple[str, ...]:
    """The schedule of the decoder layers: the explicit list wins, then the pattern, then the freq/offset rule.

    Args:
        num_layers: decoder layers, without the MTP layer (which always runs its own indexer).
        indexer_types: one `"full"` or `"shared"` per layer, or None.
        pattern: one letter F or S per layer, or None.
        freq: every freq-th layer is full, at least 1.
        offset: the first layers, up to this one, are full.

    Raises:
        ContractError: a wrong length or entry, freq < 1, or a first layer that has nothing to share.
    """
    if indexer_types is not None:
        name, types = "indexer_types", tuple(indexer_types)
        for i, entry in enumerate(types):
            if entry not in (FULL, SHARED):
                raise ContractError(f"Glm5Config: indexer_types entry {i} is {entry!r}, needs 'full' or 'shared'")
    elif pattern is not None:
        name, types = "index_topk_pattern", indexer_types_from_pattern(pattern)
    else:
        if freq < 1:
            raise ContractError(f"Glm5Config: index_topk_freq is {freq}, needs at least 1")
        name, types = "index_skip_topk_offset", indexer_types_from_rule(num_layers, freq, offset)
    if len(types) != num_layers:
        raise ContractError(
            f"Glm5Config: {name} has {len(types)} entries, needs {num_layers}, one per decoder layer; "
            f"set {name}=None to follow index_topk_freq and index_skip_topk_offset"
        )
    if types[0] != FULL:
        got = offset if name == "index_skip_topk_offset" else "'shared' in entry 0"
        raise ContractError(
            f"Glm5Config: {name} is {got}, needs a schedule whose first layer is full: "
            "it has no earlier selection to share"
        )
    return types


def indexer_sources(types: Sequence[str]) -> tuple[int, ...]:
    """For each layer, the layer whose selection it attends with: itself when full, else the last full one before it."""
    sources: list[int] = []
    for i, entry in enumerate(types):
        sources.append(i if entry == FULL else sources[-1])
    return tuple(sources)
