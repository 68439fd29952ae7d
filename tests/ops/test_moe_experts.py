"""moe_experts: against a loop over tokens, transformers' experts, its own composition, and float64 autograd."""

from __future__ import annotations

import math

import pytest
import torch
from op_oracle import check_backward, leaf, opcheck

import glm5sdk
from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.ops._weights import dequantize_weight, quantize_weight


def case(t: int, a: int, n: int, i: int, e: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    ids = torch.rand(t, e, generator=generator).argsort(1)[:, :a].sort(1).values.int()
    ids[torch.rand(t, a, generator=generator) < 0.15] = -1
    weights = draw(t, a).abs().to(torch.float64 if dtype == torch.float64 else torch.float32)
    return draw(t, n).to(dtype), ids, weights, draw(e, 2 * i, n).to(dtype), draw(e, n, i).to(dtype)


@pytest.mark.parametrize("limit", [None, 0.7])
def test_equals_a_loop_over_tokens(limit: float | None) -> None:
    x, ids, weights, gate_up, down = case(11, 3, 6, 5, 7, torch.float64)
    y = ops.moe_experts.reference(x, ids, weights, gate_up, down, limit)
    for t in range(11):
        want = [0.0] * 6
        for a in range(3):
            e = int(ids[t, a])
            if e < 0:
                continue
            h = [math.fsum(float(gate_up[e, r, n]) * float(x[t, n]) for n in range(6)) for r in range(10)]
            gate, up = h[:5], h[5:]
            if limit is not None:
                gate, up = [min(v, limit) for v in gate], [max(-limit, min(limit, v)) for v in up]
            act = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            for n in range(6):
                want[n] += float(weights[t, a]) * math.fsum(float(down[e, n, k]) * act[k] for k in range(5))
        assert y[t].tolist() == pytest.approx(want, rel=1e-10, abs=1e-12)


def test_sum_runs_in_ascending_expert_id_and_rounds_where_numerics_say() -> None:
    x, ids, weights, gate_up, down = case(9, 4, 20, 12, 6, torch.bfloat16)
    y = ops.moe_experts.reference(x, ids, weights, gate_up, down)
    rows = torch.zeros(6, 9, 20)
    for e in range(6):
        h = (x.float() @ gate_up[e].float().T).bfloat16()
        act = (h[:, :12].float() * h[:, :12].float().sigmoid()).bfloat16() * h[:, 12:]
        rows[e] = (act.float() @ down[e].float().T).bfloat16().float()
    want = torch.zeros(9, 20)
    for t in range(9):
        for a in ids[t].argsort().tolist():
            if ids[t, a] >= 0:
                want[t] += weights[t, a] * rows[int(ids[t, a]), t]
    # Products of other heights may sum in another order before they round, so a few values move by one step.
    assert (y != want.bfloat16()).float().mean() < 0.05
    torch.testing.assert_close(y.float(), want, rtol=2**-7, atol=0.02)


def test_slot_order_does_not_matter() -> None:
    x, ids, weights, gate_up, down = case(13, 4, 8, 4, 6)
    flipped = ops.moe_experts.reference(x, ids.flip(1), weights.flip(1), gate_up, down)
    assert torch.equal(flipped, ops.moe_experts.reference(x, ids, weights, gate_up, down))


def test_equals_transformers() -> None:
    from transformers.models.glm_moe_dsa.configuration_glm_moe_dsa import GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaExperts

    x, _, weights, gate_up, down = case(30, 3, 16, 12, 8)
    ids = torch.rand(30, 8, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :3].sort(1).values.int()
    config = GlmMoeDsaConfig(hidden_size=16, moe_intermediate_size=12, n_routed_experts=8, num_experts_per_tok=3)
    config._experts_implementation = "eager"
    module = GlmMoeDsaExperts(config)
    with torch.no_grad():
        module.gate_up_proj.copy_(gate_up)
        module.down_proj.copy_(down)
        want = module(x, ids.long(), weights)
    torch.testing.assert_close(ops.moe_experts.reference(x, ids, weights, gate_up, down), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [None, 0.7])
def test_composition_of_smaller_ops_is_the_same(dtype: torch.dtype, limit: float | None) -> None:
    args = case(21, 3, 12, 8, 9, dtype)
    with glm5sdk.use("reference"):
        want = ops.moe_experts(*args, limit)
        composed = next(i for i in ops.moe_experts.implementations() if i.name == "composed").fn(*args, limit)
    # Not bit for bit: torch's sigmoid has other last bits in the tail of a tensor, and the tensors differ in height.
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-5}
    torch.testing.assert_close(composed, want, **close)


def test_quantised_experts() -> None:
    x, ids, weights, gate_up, down = case(9, 2, 130, 140, 3)
    gate_up, down = gate_up * 0.1, down * 0.1
    for kind, close in [("w8a8", 0.03), ("w4a8", 0.03), ("fp8", 0.08)]:
        quantised = [quantize_weight(w, kind) for w in (gate_up, down)]
        want = ops.moe_experts.reference(x, ids, weights, *(dequantize_weight(w) for w in quantised))
        with glm5sdk.use("reference"):
            got = ops.moe_experts(x, ids, weights, *quantised)
        assert float((got - want).norm() / want.norm()) < close


def test_no_tokens_no_experts_no_rows() -> None:
    x, ids, weights, gate_up, down = case(4, 2, 6, 5, 3)
    with glm5sdk.use("reference"):
        assert ops.moe_experts(x[:0], ids[:0], weights[:0], gate_up, down).shape == (0, 6)
        assert not ops.moe_experts(x, torch.full_like(ids, -1), weights, gate_up, down).any()
        with pytest.raises(ContractError, match="expert id is 3, needs -1 or 0 <= id < 3"):
            ops.moe_experts(x, torch.full_like(ids, 3), weights, gate_up, down)


@pytest.mark.parametrize("limit", [None, 0.7])
def test_backward(limit: float | None) -> None:
    check_backward(ops.moe_experts, *case(11, 3, 6, 5, 7, torch.float64), limit)
    empty = case(0, 3, 6, 5, 7)
    dx, dweights, d_gate_up, d_down = ops.moe_experts.backward.reference(torch.ones(0, 6), *empty, limit)
    assert [tuple(d.shape) for d in (dx, dweights)] == [(0, 6), (0, 3)]
    assert not d_gate_up.any()
    assert not d_down.any()


def test_opcheck() -> None:
    _, ids, weights, _, _ = case(5, 2, 4, 3, 3)
    opcheck(ops.moe_experts, leaf(5, 4), ids, weights.requires_grad_(), leaf(3, 6, 4, seed=1), leaf(3, 4, 3, seed=2))
