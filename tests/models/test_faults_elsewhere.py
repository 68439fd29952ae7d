"""Faults that users of other runtimes met with this architecture; each is to be impossible here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import make_oracle, random_ids, save_oracle

from glm5sdk import ops
from glm5sdk.core.errors import CapacityError, ContractError
from glm5sdk.models.glm5 import Glm5Config, Glm5ForCausalLM, preset
from glm5sdk.nn.token_batch import TokenBatch

pytestmark = pytest.mark.filterwarnings("ignore:checkpoint. .* holds no tensor of the MTP layer")


def small(**changes: object) -> Glm5ForCausalLM:
    torch.manual_seed(0)
    model = Glm5ForCausalLM(preset("tiny", num_hidden_layers=3, index_topk=8, initializer_range=0.15, **changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p))
    return model


def trace(model: Glm5ForCausalLM, ids: torch.Tensor, kind: str) -> list[torch.Tensor]:
    seen = []
    context = model.context(
        TokenBatch.packed([ids.shape[1]] * ids.shape[0]),
        trace=lambda n, t: seen.append(t) if n.endswith(kind) else None,
    )
    with torch.no_grad():
        model.hidden_states(ids.reshape(-1), context)
    return seen


def test_indexer_rope_style_is_obeyed() -> None:
    """Half-split rope in the indexer is invisible while everything is selected and wrong as soon as it is not."""
    model = small()
    other = Glm5ForCausalLM(model.config.replace(indexer_rope_interleave=False)).eval()
    other.load_state_dict(model.state_dict())
    ids = random_ids(1, 60, seed=1)
    with torch.no_grad():
        assert torch.equal(model(ids[:, :8]), other(ids[:, :8]))
        assert not torch.equal(model(ids), other(ids))
    first, second = trace(model, ids, "indices")[0], trace(other, ids, "indices")[0]
    assert torch.equal(first[:8], second[:8]) and not torch.equal(first, second)


def test_no_key_is_forced_into_the_selection() -> None:
    """No attention sinks: with scores that favour late keys, position 0 is not selected."""
    chosen = trace(small(), random_ids(1, 120, seed=2), "indices")[0][100:, 0]
    assert bool((chosen != 0).all(dim=-1).any())


def test_indexer_reads_the_normed_query_latent(tmp_path: Path) -> None:
    """A q_a_layernorm far from 1 must change the selection as it changes transformers'."""
    theirs = make_oracle(seed=4)
    with torch.no_grad():
        theirs.model.layers[0].self_attn.q_a_layernorm.weight.copy_(torch.linspace(0.05, 4.0, 24))
    theirs.save_pretrained(tmp_path)
    ours = Glm5ForCausalLM.from_pretrained(tmp_path, latent_norm_eps=1e-6)
    seen = []
    theirs.model.layers[0].self_attn.indexer.register_forward_hook(lambda m, i, out: seen.append(out))
    ids = random_ids(1, 40, seed=3)
    with torch.no_grad():
        theirs(input_ids=ids, use_cache=False)
    want = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    got = trace(ours, ids, "indices")[0][:, 0]
    for t in range(8, 40):
        assert set(got[t].tolist()) == set(want.reshape(40, -1)[t].tolist()), t


def test_latent_norm_eps_switch(tmp_path: Path) -> None:
    """Small activations make the two published values of eps differ; each setting must give its own."""
    theirs = make_oracle(seed=5)
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.self_attn.q_a_proj.weight.mul_(1e-3)
            layer.self_attn.kv_a_proj_with_mqa.weight.mul_(1e-3)
    theirs.save_pretrained(tmp_path)
    ids = random_ids(1, 20, seed=4)
    with torch.no_grad():
        want = theirs(input_ids=ids, use_cache=False).logits
        same = Glm5ForCausalLM.from_pretrained(tmp_path, latent_norm_eps=1e-6)(ids)
        other = Glm5ForCausalLM.from_pretrained(tmp_path, latent_norm_eps=1e-5)(ids)
    assert (same - want).abs().max() < 1e-4
    assert (other - want).abs().max() > 1e-2


def test_router_bias_survives_bfloat16(tmp_path: Path) -> None:
    """A bias of 7 with a tiny spread: casting, saving and loading the model must not change any expert choice."""
    model = small(n_routed_experts=32, num_experts_per_tok=4)
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    with torch.no_grad():
        for gate in gates:
            gate.e_score_correction_bias.copy_(7.0 + 0.002 * torch.randn(32))
            gate.weight.mul_(0.01)
    x = torch.randn(64, model.config.hidden_size).to(torch.bfloat16)
    want = [gate(x)[0] for gate in gates]
    rounded = [ops.moe_gate(x, g.weight, g.e_score_correction_bias.bfloat16().float(), 4)[0] for g in gates]
    assert all(not torch.equal(a, b) for a, b in zip(want, rounded, strict=True)), "the spread should be below bf16"
    cast = model.to(torch.bfloat16)
    assert all(gate.e_score_correction_bias.dtype == torch.float32 for gate in gates)
    assert all(torch.equal(gate(x)[0], w) for gate, w in zip(gates, want, strict=True))
    cast.save_pretrained(tmp_path)
    loaded = Glm5ForCausalLM.from_pretrained(tmp_path, dtype="bfloat16")
    again = [layer.mlp.gate for layer in loaded.model.layers if hasattr(layer.mlp, "gate")]
    assert all(torch.equal(gate(x)[0], w) for gate, w in zip(again, want, strict=True))


@torch.no_grad()
def test_cached_decoding_past_topk() -> None:
    """The causal limit is each token's own; a mask from the cache's new length breaks once the context passes K."""
    model = small()
    ids = random_ids(2, 30, seed=6)
    cache = model.make_cache(2, 30, page_size=4)
    got = torch.cat([model(ids[:, i : i + 1], cache=cache) for i in range(30)], dim=1)
    assert (got - model(ids)).abs().max() < 1e-4


@torch.no_grad()
def test_cache_moves_all_its_pools() -> None:
    """Crop, reorder, repeat and moving devices act on latent rows and index keys together."""
    model = small()
    ids = random_ids(3, 40, seed=7)
    cache = model.make_cache(3, 64, page_size=8)
    model(ids, cache=cache)
    cache.crop(25)
    cache.select([2, 0, 2])
    cache.to("cpu")
    assert cache.lengths == [25, 25, 25]
    picked = ids[[2, 0, 2]]
    got = model(picked[:, 25:], cache=cache)
    assert (got - model(picked)[:, 25:]).abs().max() < 1e-4


@torch.no_grad()
def test_fp8_caches_stay_close() -> None:
    """Byte caches change logits by their rounding, not by garbage."""
    model = small(kv_lora_rank=128)
    model.selection = "dense"  # so that no near tie of the selection adds to the rounding
    ids = random_ids(2, 40, seed=8)
    plain = model(ids, cache=model.make_cache(2, 40))
    fp8 = model(ids, cache=model.make_cache(2, 40, kv_format="fp8_ds_mla"))
    error = (fp8 - plain).abs().mean() / plain.std()
    assert 0 < error < 0.2  # garbage would be about 1


def test_first_shared_layer_and_short_patterns_are_refused() -> None:
    for changes in ({"index_skip_topk_offset": 0, "index_topk_freq": 4}, {"index_topk_pattern": "FS"}):
        with pytest.raises(ContractError):
            preset("tiny", **changes)


def test_schedules_load_strictly(tmp_path: Path) -> None:
    """Shared layers own no indexer tensors, and a plain GLM-5 schedule owns one on every layer."""
    save_oracle(tmp_path, indexer_types=["full", "shared", "full", "shared"])
    ours = Glm5ForCausalLM.from_pretrained(tmp_path)
    assert [layer.self_attn.indexer is not None for layer in ours.model.layers] == [True, False, True, False]
    assert all(Glm5Config().has_indexer(layer) for layer in range(79))


def test_holes_and_bad_ids_are_refused() -> None:
    model = small()
    ids = random_ids(2, 6, seed=9)
    hole = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1]])
    with pytest.raises(ContractError, match="row 1 .* hole"):
        model(ids, attention_mask=hole)
    with pytest.raises(ContractError, match="hole"):
        model(ids, attention_mask=torch.tensor([[0, 1, 0, 1, 1, 0]] * 2))
    with pytest.raises(ContractError, match="token id is 99999"):
        model(torch.full((1, 3), 99999))
    with pytest.raises(ContractError, match="input_ids"):
        model(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ContractError, match="0 and 1|other values"):
        model(ids, attention_mask=torch.full((2, 6), 2))


@torch.no_grad()
def test_a_full_cache_is_refused_before_anything_is_written() -> None:
    model = small()
    ids = random_ids(1, 12, seed=10)
    cache = model.make_cache(1, 10, page_size=4)
    model(ids[:, :9], cache=cache)
    before = [pool.clone() for pool in cache.kv]
    with pytest.raises(CapacityError, match="max_seq_len 10"):
        model(ids[:, 9:], cache=cache)
    assert cache.lengths == [9] and all(torch.equal(a, b) for a, b in zip(before, cache.kv, strict=True))
    with pytest.raises(ContractError, match="batch_size"):
        model(random_ids(2, 1, seed=1), cache=cache)
