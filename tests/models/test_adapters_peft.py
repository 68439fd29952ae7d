"""Adapters that PEFT itself made and saved for transformers' model give its logits here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import make_oracle, random_ids

from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.nn.adapters import load_adapter, merge
from glm5sdk.nn.weight_view import WeightView

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:checkpoint. .* holds no tensor of the MTP layer"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning"),
]
ATTENTION = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": ATTENTION, "use_rslora": True},
        {"target_modules": r".*\.(mlp|shared_experts)\.(gate|up|down)_proj"},
        {"target_modules": ["o_proj"], "target_parameters": EXPERTS},
        {"target_modules": ["q_a_proj", "o_proj"], "rank_pattern": {"o_proj": 5}, "alpha_pattern": {"layers.2.*": 1}},
        {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
    ],
    ids=["attention", "dense and shared", "fused experts", "patterns", "what PEFT makes of all names"],
)
@torch.no_grad()
def test_equals_peft(tmp_path: Path, targets: dict[str, Any]) -> None:
    theirs = make_oracle(seed=2)
    theirs.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(r=3, lora_alpha=6, **targets)).eval()
    generator = torch.Generator().manual_seed(0)
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            p.copy_(0.2 * torch.randn(p.shape, generator=generator))
    adapted.save_pretrained(tmp_path / "adapter")
    ids = random_ids(2, 30, seed=1)
    want = adapted(input_ids=ids, use_cache=False).logits
    ours = Glm5ForCausalLM.from_pretrained(tmp_path / "base", latent_norm_eps=1e-6)
    plain = ours(ids)
    adapter = load_adapter(tmp_path / "adapter", ours)
    with WeightView.of(ours, "base").with_adapter("adapter", adapter).active(ours):
        got = ours(ids)
    assert (plain - want).abs().max() > 0.1, "the adapter should matter"
    assert (got - want).abs().max() < 2e-4
    merge(ours, adapter)
    assert (ours(ids) - want).abs().max() < 2e-4
