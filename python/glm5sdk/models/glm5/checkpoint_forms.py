"""How a quantised matrix lies in a checkpoint: the tensors beside its name, and the Weight that they make.

Tensors of a matrix [O, N]:

    fp8 (DeepSeek): weight e4m3; weight_scale_inv f32 [ceil(O/128), ceil(N/128)]
    w8a8 (compressed-tensors, int-quantized): weight int8; weight_scale f32 [O, 1]
    w4a8 (compressed-tensors, pack-quantized): weight_packed int32 [O, ceil(N/8)]; weight_scale f32 [O, ceil(N/128)];
        weight_shape int64 [2]

Packed values are v + 8, eight to a word, the first in the lowest four bits, zeros after the last.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.core.errors import CheckpointError
from glm5sdk.models.glm5.checkpoint_files import StoredTensor
from glm5sdk.models.glm5.checkpoint_fp8 import BLOCK, SIDECAR, scale_shape
from glm5sdk.models.glm5.config import Glm5Config
from glm5sdk.registry.weight import Weight

__all__ = [
    "SUFFIXES", "form_parts", "is_quantisable", "quantization_config", "refuse_activations", "stored_kind",
    "to_tensors", "to_weight",
]  # fmt: skip

SCALE, PACKED, SHAPE = "_scale", "_packed", "_shape"
SUFFIXES = (SIDECAR, SCALE, PACKED, SHAPE)  # what a quantised weight's tensors append to its name
_WORD = 8  # int4 values in an int32
_SCALES = ("F32", "BF16", "F16")
_EXPERT = re.compile(r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj$")
# Matrices that stay float: embeddings and heads, the router, the indexer's head weights, the MTP layer's joint
# projection, and kv_b_proj, whose key half is absorbed transposed, so that a channel's scale would lie along the sum.
_FLOAT = (
    "embed_tokens.weight", "head.weight", "mlp.gate.weight", "weights_proj.weight", "eh_proj.weight",
    "kv_b_proj.weight",
)  # fmt: skip

# Stored dtypes and shape of one tensor of a form.
Part = tuple[tuple[str, ...], tuple[int, ...]]


def is_quantisable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a checkpoint's tensor may be quantised in a model: every matrix but those of the list above."""
    return len(shape) == 2 and not name.endswith(_FLOAT)


def form_parts(kind: str, name: str, shape: tuple[int, ...]) -> dict[str, Part]:
    """Names of the tensors that hold a quantised matrix, with what they must be.

    Args:
        kind: fp8, w8a8 or w4a8.
        name: of the float weight.
        shape: [O, N].
    """
    out, inner = shape
    if kind == "fp8":
        return {name: (("F8_E4M3",), shape), name + SIDECAR: (("F32",), scale_shape(shape))}
    if kind == "w8a8":
        return {name: (("I8",), shape), name + SCALE: (_SCALES, (out, 1))}
    return {
        name + PACKED: (("I32",), (out, -(-inner // _WORD))),
        name + SCALE: (_SCALES, (out, -(-inner // BLOCK))),
        name + SHAPE: (("I64", "I32"), (2,)),
    }


def stored_kind(name: str, stored: Mapping[str, StoredTensor]) -> str | None:
    """The kind in which a checkpoint holds the weight `name`: plain, fp8, w8a8, w4a8, or None for not at all."""
    if name in stored:
        return {"F8_E4M3": "fp8", "I8": "w8a8"}.get(stored[name].dtype, "plain")
    return "w4a8" if name + PACKED in stored else None


def to_tensors(name: str, weight: Weight) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors of a quantised matrix, scales after values.

    Raises:
        CheckpointError: the weight is in a backend's own layout.
    """
    if weight.layout != "plain":
        raise CheckpointError(f"checkpoint: {name} has layout {weight.layout!r}, needs plain (op.unprepare)")
    values, scale = weight.tensors
    if weight.kind == "fp8":
        yield from ((name, values), (name + SIDECAR, scale))
    elif weight.kind == "w8a8":
        yield from ((name, values), (name + SCALE, scale[:, None]))
    else:
        yield name + PACKED, _pack(values, weight.shape[1])
        yield name + SCALE, scale
        yield name + SHAPE, torch.tensor(weight.shape, dtype=torch.int64)


def to_weight(kind: str, name: str, shape: tuple[int, ...], read: Mapping[str, Tensor]) -> Weight:
    """Inverse of `to_tensors`, exact.

    Args:
        kind: of the weight.
        name: of the float weight.
        shape: [O, N].
        read: the tensors of its form, by name.

    Raises:
        CheckpointError: a stored weight_shape is another one.
    """
    if kind == "fp8":
        return Weight(kind, "plain", shape, (read[name], read[name + SIDECAR]))
    scale = read[name + SCALE].to(torch.float32)
    if kind == "w8a8":
        return Weight(kind, "plain", shape, (read[name], scale[:, 0]))
    said = tuple(read[name + SHAPE].tolist())
    if said != shape:
        raise CheckpointError(f"checkpoint: {name}{SHAPE} is {list(said)}, needs {list(shape)}")
    return Weight(kind, "plain", shape, (_unpack(read[name + PACKED], shape[1]), scale))


def _pack(values: Tensor, n: int) -> Tensor:
    """u8 [O, ceil(n/2)] of two's complement pairs -> int32 [O, ceil(n/8)] of offset values."""
    words = torch.zeros(values.shape[0], 4 * -(-n // _WORD), dtype=torch.uint8, device=values.device)
    words[:, : values.shape[1]] = values ^ 0x88
    if n % 2:
        words[:, n // 2] &= 0x0F
    return _little(words).view(torch.int32)


def _unpack(words: Tensor, n: int) -> Tensor:
    """Inverse of `_pack`."""
    pairs = _little(words.contiguous().view(torch.uint8))[:, : -(-n // 2)] ^ 0x88
    if n % 2:
        pairs[:, -1] &= 0x0F
    return pairs.contiguous()


def _little(words: Tensor) -> Tensor:
    """Bytes [O, 4 W] in the order in which a little-endian machine keeps its words."""
    return words if sys.byteorder == "little" else words.view(-1, 4).flip(1).view(words.shape)


def quantization_config(kinds: Mapping[str, str]) -> dict[str, Any] | None:
    """The `quantization_config` of config.json for matrices of these kinds; None when all are plain.

    Args:
        kinds: kind of each stored matrix by name.

    Raises:
        CheckpointError: fp8 blocks beside integers; no convention describes both.
    """
    plain = [name.removesuffix(".weight") for name, kind in kinds.items() if kind == "plain"]
    found = set(kinds.values()) - {"plain"}
    if not found:
        return None
    if found == {"fp8"}:
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": plain,
        }  # fmt: skip
    if "fp8" in found:
        raise CheckpointError(f"checkpoint: weights are {', '.join(sorted(found))}, needs fp8 alone or integers alone")
    groups = []
    if "w4a8" in found:
        names = [name.removesuffix(".weight") for name, kind in kinds.items() if kind == "w4a8"]
        experts = [name for name in kinds if _EXPERT.match(name.removesuffix(".weight"))]
        is_experts = len(experts) == len(names) and all(kinds[name] == "w4a8" for name in experts)
        groups.append(_group([f"re:{_EXPERT.pattern}"] if is_experts else names, 4, "group", "pack-quantized"))
    if "w8a8" in found:
        groups.append(_group(["Linear"], 8, "channel", "int-quantized"))
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": groups[0]["format"] if len(groups) == 1 else "mixed-precision",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": [name for name in plain if not name.endswith("embed_tokens")],
    }


def _group(targets: list[str], bits: int, strategy: str, format: str) -> dict[str, Any]:
    """One group: symmetric integers, activations int8 with a scale per token, made as they come."""
    size = {"group_size": BLOCK} if strategy == "group" else {}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False, **size}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {"targets": targets, "weights": weights, "input_activations": inputs, "format": format}


def refuse_activations(config: Glm5Config) -> None:
    """Stops where integer weights are meant for other activations than int8 by token, which is how ops read them.

    Raises:
        CheckpointError: a group of `quantization_config` says so.
    """
    table = config.extra.get("quantization_config")
    groups = table.get("config_groups") if isinstance(table, Mapping) else None
    for name, group in (groups if isinstance(groups, Mapping) else {}).items():
        inputs = group.get("input_activations") if isinstance(group, Mapping) else None
        said = inputs if isinstance(inputs, Mapping) else {}
        want = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
        wrong = {key: said.get(key) for key, value in want.items() if said.get(key) != value}
        if wrong or said.get("symmetric") is False:
            raise CheckpointError(
                f"checkpoint: input_activations of quantization_config group {name!r} is {inputs!r}, needs symmetric "
                "int8 by token, dynamic; load with quantised=False to dequantise the weights instead"
            )
