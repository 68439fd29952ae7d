"""What the training tests share: a model of a few thousand parameters, text files, random batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from glm5sdk.models.glm5 import Glm5Config, Glm5ForCausalLM
from glm5sdk.train.data import Batch

VOCABULARY = 288


def small_config(**changes: Any) -> Glm5Config:
    """One dense and one mixture layer and the MTP layer, float32."""
    values = dict(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8,
        first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, index_n_heads=4, index_head_dim=8,
        index_topk=6, rope_theta=1000.0, max_position_embeddings=64, dtype="float32",
    )  # fmt: skip
    return Glm5Config(**(values | changes))


def small_model(seed: int = 0, **changes: Any) -> Glm5ForCausalLM:
    torch.manual_seed(seed)
    return Glm5ForCausalLM(small_config(**changes))


class RandomBatches:
    """Random tokens; batch number i depends on i alone, or all are the same."""

    def __init__(self, rows: int = 2, length: int = 16, same: bool = False) -> None:
        self.rows, self.length, self.same = rows, length, same

    def batch(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(0 if self.same else index)
        ids = torch.randint(0, VOCABULARY, (self.rows, self.length + 1), generator=generator)
        return Batch(ids[:, :-1], ids[:, 1:])


def write_texts(folder: Path, count: int = 8, words: int = 120, seed: int = 0) -> list[Path]:
    """Files of words from a small vocabulary, some beyond ASCII."""
    rng = random.Random(seed)
    vocabulary = ["alpha", "beta", "return", "naïve", "self", "import", "值", "x = 1\n", "    ", "(a, b)"]
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number in range(count):
        file = folder / f"text{number}.txt"
        file.write_text(" ".join(rng.choice(vocabulary) for _ in range(words)) + "\n", "utf-8")
        files.append(file)
    return sorted(files)
