"""PEFT's folders: adapter_config.json and adapter_model.safetensors, read strictly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from glm5sdk.core.errors import CheckpointError

__all__ = ["AdapterSettings", "read_pairs", "read_settings"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"^(?:base_model\.model\.)?(?P<path>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight$")
# Settings that change what the tensors mean, with the only value that is read here.
_PLAIN = {
    "use_dora": False, "use_qalora": False, "use_bdlora": False, "lora_bias": False, "fan_in_fan_out": False,
    "bias": "none", "modules_to_save": [], "trainable_token_indices": [], "layer_replication": [],
    "alora_invocation_tokens": [],
}  # fmt: skip


@dataclass(frozen=True)
class AdapterSettings:
    """What adapter_config.json says.

    Attributes:
        file: it.
        rank, alpha: r and lora_alpha.
        rslora: the scale is alpha / sqrt(r) and not alpha / r.
        ranks, alphas: other values by the end of a path, as regular expressions.
    """

    file: Path
    rank: int
    alpha: float
    rslora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    def of(self, path: str) -> tuple[int, float]:
        """(rank, scale) of the matrix at `path`."""
        rank = next((r for key, r in self.ranks.items() if _fits(key, path)), self.rank)
        alpha = next((a for key, a in self.alphas.items() if _fits(key, path)), self.alpha)
        return rank, alpha / math.sqrt(rank) if self.rslora else alpha / rank


def read_settings(folder: Path) -> AdapterSettings:
    """Settings of an adapter.

    Raises:
        CheckpointError: the file is missing or damaged, or a setting is not supported.
    """
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"adapter: {file} cannot be read ({error}), needs PEFT's JSON") from error
    if not isinstance(config, dict) or str(config.get("peft_type", "")).upper() != "LORA":
        got = config.get("peft_type") if isinstance(config, dict) else config
        raise CheckpointError(f"adapter: peft_type in {file} is {got!r}, needs 'LORA'")
    for key, plain in _PLAIN.items():
        if (value := config.get(key)) and value != plain:
            raise CheckpointError(f"adapter: {key} in {file} is {value!r}, needs {plain!r}")
    ranks, alphas = (_pattern(config, key, file) for key in ("rank_pattern", "alpha_pattern"))
    rank, alpha = _rank(config.get("r"), "r", file), _alpha(config.get("lora_alpha"), "lora_alpha", file)
    return AdapterSettings(
        file, rank, alpha, bool(config.get("use_rslora")),
        {key: _rank(value, f"rank_pattern {key!r}", file) for key, value in ranks.items()},
        {key: _alpha(value, f"alpha_pattern {key!r}", file) for key, value in alphas.items()},
    )  # fmt: skip


def read_pairs(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Side ("A", "B") -> tensor, by the path that they belong to.

    Raises:
        CheckpointError: the file is missing or damaged, or a tensor is unknown or without its partner.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / WEIGHTS
    try:
        tensors: dict[str, Any] = load_file(str(file))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"adapter: {file} cannot be read ({error}), needs a safetensors file") from error
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.match(key)
        if match is None:
            raise CheckpointError(f"adapter: {key} in {file} is unknown, needs `<matrix>.lora_A.weight` or lora_B")
        sides = pairs.setdefault(match["path"], {})
        if match["side"] in sides:
            raise CheckpointError(f"adapter: {key} in {file} is there under two names, needs one")
        sides[match["side"]] = tensor
    if not pairs:
        raise CheckpointError(f"adapter: {file} holds no tensors, needs pairs of lora_A and lora_B")
    for path, sides in pairs.items():
        if len(sides) != 2:
            only = next(iter(sides))
            raise CheckpointError(f"adapter: {path} in {file} has only lora_{only}, needs lora_A and lora_B")
    return pairs


def _fits(key: str, path: str) -> bool:
    return re.match(rf"(.*\.)?({key})$", path) is not None


def _pattern(config: Mapping[str, Any], key: str, file: Path) -> Mapping[str, Any]:
    table = config.get(key) or {}
    try:
        if not isinstance(table, dict):
            raise TypeError("no table")
        for pattern in table:
            re.compile(pattern)
    except (TypeError, re.error) as error:
        raise CheckpointError(
            f"adapter: {key} in {file} is {table!r} ({error}), needs regular expressions with numbers"
        ) from error
    return table


def _rank(value: Any, name: str, file: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"adapter: {name} in {file} is {value!r}, needs a whole number from 1")
    return value


def _alpha(value: Any, name: str, file: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise CheckpointError(f"adapter: {name} in {file} is {value!r}, needs a number")
    return float(value)
