"""Small configs, and checkpoints of random tensors, for the checkpoint tests."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5sdk.models.glm5 import Checkpoint, Glm5Config, expected_tensors, save_checkpoint


def small(**changes: Any) -> Glm5Config:
    """A config of some 100,000 numbers with every kind of layer, a partial FP8 block and a schedule like GLM-5.2's."""
    values: dict[str, Any] = {
        **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "moe_intermediate_size": 24},
        **{"num_hidden_layers": 4, "num_attention_heads": 2, "q_lora_rank": 40, "kv_lora_rank": 16},
        **{"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32, "first_k_dense_replace": 1},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 16, "index_head_dim": 16},
        **{"index_topk": 8, "index_topk_freq": 2, "index_skip_topk_offset": 2, "max_position_embeddings": 256},
        **{"rope_theta": 10000.0, "dtype": "float32"},
    }
    return Glm5Config(**{**values, **changes})


def random_tensors(config: Glm5Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A value for each required tensor; the router biases are a large offset with a tiny spread, as in real models."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for spec in expected_tensors(config):
        if not spec.required:
            continue
        value = torch.randn(spec.shape, generator=generator)
        tensors[spec.name] = 7.0 + 1e-3 * value if spec.keep_f32 else value.to(dtype)
    return tensors


def saved(path: Path, config: Glm5Config, seed: int = 0, **options: Any) -> dict[str, Tensor]:
    """Saves random tensors as a checkpoint and returns them."""
    tensors = random_tensors(config, seed)
    save_checkpoint(path, config, tensors.items(), **options)
    return tensors


def empty_parameters(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Parameters to load into, filled with NaN so that an unwritten element shows; router biases stay float32."""
    return {
        name: torch.full(shape, math.nan, dtype=torch.float32 if name.endswith("correction_bias") else dtype)
        for name, shape in checkpoint.parameters().items()
    }


def write_file(path: Path, tensors: Iterable[tuple[str, str, list[int], bytes]]) -> None:
    """A safetensors file written by hand: (name, dtype, shape, bytes) each, end to end."""
    header: dict[str, Any] = {}
    data = b""
    for name, dtype, shape, content in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    write_raw(path, json.dumps(header).encode(), data)


def write_raw(path: Path, header: bytes, data: bytes) -> None:
    """A file with this header and this data, whether or not they make sense."""
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
