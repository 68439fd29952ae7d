"""The multi-token-prediction layer: tied head, its place in checkpoints, and what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import random_ids

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM, preset
from glm5sdk.nn.token_batch import TokenBatch


@pytest.fixture
def model() -> Glm5ForCausalLM:
    torch.manual_seed(0)
    return Glm5ForCausalLM(preset("tiny", num_hidden_layers=2, index_topk=8, initializer_range=0.1)).eval()


def draft(model: Glm5ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    batch = TokenBatch.packed([ids.shape[0] - 1])
    hidden = model.hidden_states(ids[:-1], model.context(batch))
    return model.mtp_hidden_states(ids[1:], hidden, model.context(batch))


@torch.no_grad()
def test_equals_its_formula_spelled_out(model: Glm5ForCausalLM) -> None:
    """embedding first, hidden second; a plain decoder layer; one residual, one final norm."""
    ids = random_ids(1, 21, seed=1)[0]
    batch = TokenBatch.packed([20])
    hidden = model.hidden_states(ids[:-1], model.context(batch))
    mtp = model.model.mtp
    embedded = model.model.embed_tokens.weight[ids[1:]].clone()
    embedded[0] = 0
    joined = torch.cat([ops.rms_norm(embedded, mtp.enorm.weight), ops.rms_norm(hidden, mtp.hnorm.weight)], dim=-1)
    x = joined @ mtp.eh_proj.weight.T
    context = model.context(batch)
    x = x + mtp.self_attn(ops.rms_norm(x, mtp.input_layernorm.weight), context)
    x = x + mtp.mlp(ops.rms_norm(x, mtp.post_attention_layernorm.weight), context)
    want = ops.rms_norm(x, mtp.shared_head.norm.weight)
    assert (draft(model, ids) - want).abs().max() < 1e-4


@torch.no_grad()
def test_round_trip_keeps_every_key(model: Glm5ForCausalLM, tmp_path: Path) -> None:
    from safetensors import safe_open

    model.save_pretrained(tmp_path / "a")
    loaded = Glm5ForCausalLM.from_pretrained(tmp_path / "a")
    ids = random_ids(1, 17, seed=2)[0]
    assert torch.equal(draft(loaded, ids), draft(model, ids))
    loaded.save_pretrained(tmp_path / "b")
    first, second = (safe_open(str(tmp_path / d / "model.safetensors"), "pt") for d in "ab")
    assert sorted(first.keys()) == sorted(second.keys())
    assert any(key.startswith("model.layers.2.eh_proj") for key in first.keys())
    assert not any("shared_head.head" in key for key in first.keys()), "an untouched head is tied, not stored"
    for key in first.keys():
        assert torch.equal(first.get_tensor(key), second.get_tensor(key)), key


@torch.no_grad()
def test_stored_head_and_embedding_are_used(model: Glm5ForCausalLM, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(str(file))
    tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"] * 2
    tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, str(file), metadata={"format": "pt"})
    loaded = Glm5ForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.mtp_head(), tensors["lm_head.weight"] * 2)
    assert loaded.model.mtp.embed_tokens is None, "an equal copy is shared, not loaded"
    loaded.save_pretrained(tmp_path / "again")
    assert "model.layers.2.shared_head.head.weight" in load_file(str(tmp_path / "again" / "model.safetensors"))


def test_absent_head_is_tied(model: Glm5ForCausalLM) -> None:
    assert model.mtp_head() is model.lm_head.weight


def test_model_without_mtp_says_so() -> None:
    model = Glm5ForCausalLM(preset("tiny", num_hidden_layers=2, num_nextn_predict_layers=0))
    batch = TokenBatch.packed([2])
    with pytest.raises(ContractError, match="num_nextn_predict_layers"):
        model.mtp_hidden_states(torch.tensor([1, 2]), torch.zeros(2, 192), model.context(batch))
