"""Cache formats: one shape rule each. Everything that allocates, checks or indexes a cache asks here."""

from __future__ import annotations

from collections.abc import Callable

from glm5sdk.core.errors import ContractError

__all__ = [
    "BYTE_FORMATS",
    "INDEX_FORMATS",
    "KV_FORMATS",
    "cache_shape",
    "is_byte_format",
    "kv_row_bytes",
    "page_size_of",
]

KV_FORMATS = ("plain", "fp8_ds_mla")
INDEX_FORMATS = ("plain", "fp8")
FP8_GROUP = 128  # latent values that share one f32 scale
BYTE_FORMATS = ("fp8_ds_mla", "fp8")


def is_byte_format(format: str) -> bool:
    """Whether the cache is stored as uint8 rather than in the activation dtype."""
    return format in BYTE_FORMATS


def kv_row_bytes(latent: int, rope: int) -> int:
    """Bytes of one `fp8_ds_mla` row: e4m3 latent, one f32 scale per 128 of them, bf16 rope part (656 for 512 + 64)."""
    return latent + 4 * -(-latent // FP8_GROUP) + 2 * rope


_SHAPES: dict[tuple[str, str], Callable[..., tuple[int, ...]]] = {
    ("kv_cache", "plain"): lambda pages, size, latent, rope: (pages, size, latent + rope),
    ("kv_cache", "fp8_ds_mla"): lambda pages, size, latent, rope: (pages, size, kv_row_bytes(latent, rope)),
    ("index_cache", "plain"): lambda pages, size, dim: (pages, size, dim),
    ("index_cache", "fp8"): lambda pages, size, dim: (pages, size * (dim + 4)),
}


def cache_shape(word: str, format: str, pages: int, page_size: int, *row: int) -> tuple[int, ...]:
    """Shape of a cache.

    Args:
        word: `kv_cache` (row = latent C, rope R) or `index_cache` (row = index head dim Di).
        format: `plain` or the byte format of that cache.
        pages: pages in the pool, P.
        page_size: tokens a page, S.
        row: the sizes of one row's parts.

    Raises:
        ContractError: no such format.
    """
    rule = _SHAPES.get((word, format))
    if rule is None:
        known = ", ".join(f for w, f in _SHAPES if w == word)
        raise ContractError(f"{word}: format is {format!r}, needs one of: {known}")
    return rule(pages, page_size, *row)


def page_size_of(word: str, format: str, shape: tuple[int, ...], *row: int) -> int:
    """Tokens a page, read off a cache's shape (0 when the shape cannot be that format's)."""
    if (word, format) == ("index_cache", "fp8"):
        return shape[1] // (row[0] + 4) if len(shape) == 2 else 0
    return shape[1] if len(shape) == 3 else 0
