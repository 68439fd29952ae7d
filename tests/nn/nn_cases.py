"""A small model with odd widths, PEFT folders for it, and steps over a shared cache."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from glm5sdk.models.glm5 import Glm5ForCausalLM, preset
from glm5sdk.nn.cache import LatentCache
from glm5sdk.nn.token_batch import TokenBatch

ODD: dict[str, Any] = dict(
    vocab_size=97, hidden_size=52, intermediate_size=75, moe_intermediate_size=21, num_hidden_layers=3,
    num_attention_heads=3, q_lora_rank=27, kv_lora_rank=37, qk_nope_head_dim=13, qk_rope_head_dim=6, v_head_dim=11,
    first_k_dense_replace=1, n_routed_experts=6, num_experts_per_tok=3, index_n_heads=16, index_head_dim=14,
    index_topk=8, max_position_embeddings=256, initializer_range=0.1,
)  # fmt: skip

ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def small_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Glm5ForCausalLM:
    """Random weights, norms away from one and router biases away from zero."""
    torch.manual_seed(seed)
    model = Glm5ForCausalLM(preset("tiny", **{**ODD, **changes}))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.2 * torch.randn_like(p))
        for name, b in model.named_buffers():
            if name.endswith("correction_bias"):
                b.add_(7 + 0.05 * torch.randn_like(b))
    return model.to(dtype).eval()


def tokens(length: int, seed: int, vocab: int = 97) -> Tensor:
    return torch.randint(6, vocab, (length,), generator=torch.Generator().manual_seed(seed))


def linear_targets(model: Glm5ForCausalLM) -> list[str]:
    """Every matrix that an adapter may add to, single experts apart."""
    endings = tuple(f"self_attn.{n}" for n in ATTENTION) + ("gate_proj", "up_proj", "down_proj")
    return [
        n for n, m in model.named_modules() if n.endswith(endings) and "experts." not in n.replace("shared_experts", "")
    ]


def expert_targets(layers: Sequence[int], experts: Sequence[int]) -> list[str]:
    parts = ("gate_proj", "up_proj", "down_proj")
    return [f"model.layers.{i}.mlp.experts.{e}.{p}" for i in layers for e in experts for p in parts]


def shape_of(model: Glm5ForCausalLM, target: str) -> tuple[int, int]:
    if ".mlp.experts." in target:
        c = model.config
        inner = (c.moe_intermediate_size, c.hidden_size)
        return inner[::-1] if target.endswith("down_proj") else inner
    return tuple(model.get_submodule(target).weight.shape)


def save_adapter(
    folder: Path, model: Glm5ForCausalLM, targets: Iterable[str], rank: int = 3, seed: int = 0, **settings: Any
) -> dict[str, tuple[Tensor, Tensor]]:
    """Write an adapter as PEFT does and return (A, B) of each target."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for target in targets:
        out, inner = shape_of(model, target)
        pairs[target] = (
            torch.randn(rank, inner, generator=generator) / inner**0.5,
            torch.randn(out, rank, generator=generator) * 0.2,
        )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{t}.lora_{s}.weight": w for t, p in pairs.items() for s, w in zip("AB", p, strict=True)
    }
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return pairs


@torch.no_grad()
def alone(model: Glm5ForCausalLM, ids: Tensor) -> Tensor:
    """Logits [S, V] of one sequence by itself, without a cache."""
    return model.logits(model.hidden_states(ids, model.context(TokenBatch.packed([len(ids)]))))


@torch.no_grad()
def step(model: Glm5ForCausalLM, cache: LatentCache, rows: Sequence[int], new: Sequence[Tensor]) -> list[Tensor]:
    """New tokens of some rows of a shared cache; logits of each."""
    lengths = [len(ids) for ids in new]
    batch = TokenBatch.paged([cache.lengths[r] for r in rows], lengths, cache.block_table[list(rows)], cache.page_size)
    hidden = model.hidden_states(torch.cat(list(new)), model.context(batch, cache))
    for r, length in zip(rows, lengths, strict=True):
        cache.lengths[r] += length
    return list(model.logits(hidden).split(lengths))
