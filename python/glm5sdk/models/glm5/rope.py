"""Rotary frequencies and scales of a config, in plain double precision: default rope and YaRN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from glm5sdk.core.errors import ContractError

# Keys that may stand beside the YaRN settings without changing them.
_NOT_SCALING = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True)
class YarnScaling:
    """YaRN long-context scaling (arXiv 2309.00071), with the meaning transformers gives each field.

    Attributes:
        factor: context extension over `original_max_position_embeddings`, above 1.
        original_max_position_embeddings: tokens of context before the extension.
        beta_fast: rotations above which a pair keeps its frequency.
        beta_slow: rotations below which a pair is slowed by `factor`.
        mscale: with mscale_all_dim, sets the factor on cos and sin.
        mscale_all_dim: when set, also multiplies the softmax scale (see `softmax_factor`).
        attention_factor: factor on cos and sin given outright, or None to derive it.
        truncate: round the ramp's ends to whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"):
            value = getattr(self, name)
            if value is None and name not in ("factor", "beta_fast", "beta_slow"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ContractError(f"Glm5Config: yarn {name} is {value!r}, needs a finite number")
            object.__setattr__(self, name, float(value))
        if self.factor < 1.0:
            raise ContractError(f"Glm5Config: yarn factor is {self.factor}, needs at least 1")
        length = self.original_max_position_embeddings
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ContractError(
                f"Glm5Config: yarn original_max_position_embeddings is {length!r}, needs a positive integer"
            )
        if not self.beta_fast > self.beta_slow > 0:
            raise ContractError(
                f"Glm5Config: yarn beta_fast, beta_slow are {self.beta_fast}, {self.beta_slow}, needs fast > slow > 0"
            )

    @classmethod
    def from_dict(cls, rope: Mapping[str, object]) -> YarnScaling:
        """Reads rope_scaling / rope_parameters of type yarn; unknown keys are refused since they may change angles."""
        known = set(cls.__dataclass_fields__)
        values = {key: value for key, value in rope.items() if key in known and value is not None}
        unknown = sorted(set(rope) - known - _NOT_SCALING)
        missing = sorted({"factor", "original_max_position_embeddings"} - set(values))
        if unknown or missing:
            raise ContractError(
                f"Glm5Config: yarn rope parameters have unknown keys {unknown} and lack {missing}, needs keys among "
                f"{sorted(known)} with factor and original_max_position_embeddings"
            )
        return cls(**values)  # type: ignore[arg-type]  # each value is checked by __post_init__

    def to_dict(self) -> dict[str, object]:
        """The settings as Hugging Face writes them, without those that are None."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        if self.truncate:
            del values["truncate"]
        return {"rope_type": "yarn", **values}

    @property
    def cos_sin_factor(self) -> float:
        """The number that multiplies both cos and sin (1 for DeepSeek-V3.2, whose two mscales are equal)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """The number that multiplies the attention's softmax scale; 1 unless mscale_all_dim is set."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def inverse_frequencies(dim: int, theta: float, scaling: YarnScaling | None = None) -> tuple[float, ...]:
    """Angle per position of each of the dim/2 rotary pairs, in radians.

    Args:
        dim: rotary dims (qk_rope_head_dim), even.
        theta: the base; pair j turns by theta ** (-2j / dim) per position.
        scaling: YaRN settings; pairs that turn slowly over the original context are slowed further by `factor`.
    """
    plain = [theta ** (-2.0 * j / dim) for j in range(dim // 2)]
    if scaling is None:
        return tuple(plain)
    low = _pair_with_rotations(scaling.beta_fast, dim, theta, scaling.original_max_position_embeddings)
    high = _pair_with_rotations(scaling.beta_slow, dim, theta, scaling.original_max_position_embeddings)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, dim - 1.0)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    slowed = [min(max((j - low) / (high - low), 0.0), 1.0) for j in range(dim // 2)]
    return tuple(f * (1.0 - s) + f / scaling.factor * s for f, s in zip(plain, slowed, strict=True))


def _pair_with_rotations(rotations: float, dim: int, theta: float, length: int) -> float:
    """The (fractional) pair that makes this many turns over `length` positions."""
    return dim * math.log(length / (rotations * 2.0 * math.pi)) / (2.0 * math.log(theta))


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
