"""A small model and checkpoints of it for the quantisation tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5sdk.models.glm5 import Glm5Config, Glm5ForCausalLM
from glm5sdk.quant import quantise_model, scheme
from glm5sdk.quant.report import Report

SCHEMES = ("w8a8", "w4a8-experts", "fp8")


def small(**changes: Any) -> Glm5Config:
    """Every kind of layer; a hidden size with a partial group of 128, and one block of rows an expert."""
    values: dict[str, Any] = {
        **{"vocab_size": 96, "hidden_size": 160, "intermediate_size": 144, "moe_intermediate_size": 128},
        **{"num_hidden_layers": 3, "num_attention_heads": 2, "q_lora_rank": 40, "kv_lora_rank": 16},
        **{"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32, "first_k_dense_replace": 1},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 4, "index_head_dim": 16},
        **{"index_topk": 8, "index_topk_freq": 2, "index_skip_topk_offset": 2, "max_position_embeddings": 256},
        **{"rope_theta": 10000.0, "dtype": "float32"},
    }
    return Glm5Config(**{**values, **changes})


def random_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Glm5ForCausalLM:
    """Random weights, norms that are not one and router biases that are not zero."""
    torch.manual_seed(seed)
    model = Glm5ForCausalLM(small(**changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
            elif "down_proj" in name or "o_proj" in name:
                parameter *= 2
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer += 7 + 0.01 * torch.randn(buffer.shape)
    return model.to(dtype)


def tokens(rows: int = 3, length: int = 24, seed: int = 5) -> Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


def quantised(name: str, method: str = "rtn", **changes: Any) -> tuple[Glm5ForCausalLM, Report]:
    model = random_model(**changes)
    return model, quantise_model(model, scheme(name), tokens(), method)


def saved(path: Path, name: str, method: str = "rtn", **changes: Any) -> Glm5ForCausalLM:
    """A quantised model, saved at `path`."""
    model, _ = quantised(name, method, **changes)
    model.save_pretrained(path)
    return model
