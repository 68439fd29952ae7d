"""moe_gate: against transformers' router and a pure Python router; ties, groups, the bias that bfloat16 would merge."""

from __future__ import annotations

import math

import pytest
import torch
from op_oracle import check_backward, leaf, opcheck

import glm5sdk
from glm5sdk import ops
from glm5sdk.core.errors import ContractError


def plain_router(scores: list[float], bias: list[float], topk: int, n_group: int, topk_group: int) -> list[int]:
    """Sorted by (score + bias descending, id ascending), inside the best groups."""
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    choice = [-math.inf if math.isnan(c) else c for c in choice]
    size = len(choice) // n_group
    groups = range(n_group)
    if n_group > 1:
        total = [sum(sorted(choice[g * size : g * size + size], reverse=True)[:2]) for g in groups]
        groups = sorted(range(n_group), key=lambda g: (-total[g], g))[:topk_group]
    candidates = [e for g in groups for e in range(g * size, g * size + size)]
    return sorted(sorted(candidates, key=lambda e: (-choice[e], e))[:topk])


@pytest.mark.parametrize("n_group, topk_group", [(1, 1), (4, 2), (2, 1), (8, 8)])
@pytest.mark.parametrize("tied", [False, True])
def test_equals_plain_router(n_group: int, topk_group: int, tied: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(s, generator=generator).double() for s in ((40, 6), (16, 6)))
    bias = 0.1 * torch.randn(16, generator=generator).double()
    if tied:
        x, w, bias = x.round(), w.round(), torch.zeros(16).double()
    ids, weights = ops.moe_gate.reference(x, w, bias, 4, n_group, topk_group, scale=2.5)
    scores = (x @ w.T).sigmoid()
    for t in range(40):
        row = scores[t].tolist()
        want = plain_router(row, bias.tolist(), 4, n_group, topk_group)
        assert ids[t].tolist() == want
        total = sum(row[e] for e in want) + 1e-20
        assert weights[t].tolist() == pytest.approx([2.5 * row[e] / total for e in want], rel=1e-12)


def router_of_transformers(experts: int, topk: int, n_group: int, topk_group: int) -> torch.nn.Module:
    from transformers.models.glm_moe_dsa.configuration_glm_moe_dsa import GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaTopkRouter

    config = GlmMoeDsaConfig(
        hidden_size=32, n_routed_experts=experts, num_experts_per_tok=topk, n_group=n_group, topk_group=topk_group,
        norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    return GlmMoeDsaTopkRouter(config)


@pytest.mark.parametrize("n_group, topk_group", [(1, 1), (8, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers_with_a_large_bias(n_group: int, topk_group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    router = router_of_transformers(256, 8, n_group, topk_group)
    with torch.no_grad():
        router.weight.copy_(0.05 * torch.randn(256, 32))
        router.e_score_correction_bias.copy_(7 + 0.03 * torch.randn(256))
    x = torch.randn(200, 32).to(dtype)
    with torch.no_grad():
        _, want_weights, want_ids = router(x)
    want_ids, order = want_ids.sort(1)
    ids, weights = ops.moe_gate.reference(
        x, router.weight.detach(), router.e_score_correction_bias, 8, n_group, topk_group, scale=2.5
    )
    assert torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(weights, want_weights.gather(1, order), rtol=1e-6, atol=1e-7)
    assert weights.dtype == torch.float32
    # A bias rounded to bfloat16 is another router: this is what the float32 word of the contract protects.
    merged = router.e_score_correction_bias.bfloat16().float()
    other, _ = ops.moe_gate.reference(x, router.weight.detach(), merged, 8, n_group, topk_group)
    assert (other != ids).any(1).float().mean() > 0.5
    with pytest.raises(ContractError, match="bias"):
        ops.moe_gate(x, router.weight.detach(), merged.bfloat16(), 8)


def test_softmax_without_renormalising_and_temperature() -> None:
    x, w = torch.randn(5, 6).double(), torch.randn(8, 6).double()
    ids, weights = ops.moe_gate.reference(x, w, None, 2, score="softmax", renormalise=False, scale=3.0, temperature=0.5)
    scores = ((x @ w.T) / 0.5).softmax(-1)
    want = scores.topk(2, 1).indices.sort(1).values
    assert torch.equal(ids.long(), want)
    torch.testing.assert_close(weights, 3 * scores.gather(1, want))


def test_ties_nan_and_groups_of_minus_infinity() -> None:
    x = torch.ones(1, 1)
    even = torch.zeros(8, 1)
    assert ops.moe_gate.reference(x, even, None, 3)[0].tolist() == [[0, 1, 2]]
    bias = torch.tensor([0, torch.nan, 1, 0, -torch.inf, 0, 5, 0.0])
    assert ops.moe_gate.reference(x, even, bias, 3)[0].tolist() == [[0, 2, 6]]
    # Group 1 (ids 4..7) wins by its best two; its expert of score -inf still goes before any expert outside.
    bias = torch.tensor([1.0, 1, 1, 1, 9, -torch.inf, -torch.inf, 0])
    assert ops.moe_gate.reference(x, even, bias, 4, 2, 1)[0].tolist() == [[4, 5, 6, 7]]


def test_weights_are_summed_in_id_order() -> None:
    x, w = torch.randn(9, 4), torch.randn(8, 4)
    ids, weights = ops.moe_gate.reference(x, w, None, 5)
    scores = (x @ w.T).sigmoid().gather(1, ids.long())
    total = torch.zeros(9)
    for j in range(5):
        total = total + scores[:, j]
    assert torch.equal(weights, scores / (total + 1e-20)[:, None])


def test_no_rows() -> None:
    ids, weights = ops.moe_gate(torch.ones(0, 4), torch.ones(8, 4), None, 2)
    assert ids.shape == weights.shape == (0, 2)
    assert ids.dtype == torch.int32


def test_backward_and_opcheck() -> None:
    x, w, bias = torch.randn(6, 5).double(), torch.randn(8, 5).double(), torch.randn(8).double()
    check_backward(ops.moe_gate, x, w, bias, 3, 2, 1, "sigmoid", True, 2.5, 1.0)
    check_backward(ops.moe_gate, x, w, None, 3, 1, 1, "softmax", False, 1.0, 0.7)
    opcheck(ops.moe_gate, leaf(6, 5), leaf(8, 5, seed=1), bias.float(), 3)


def test_traces_with_gradients() -> None:
    x, w = leaf(6, 5), leaf(8, 5, seed=1)
    with glm5sdk.use("reference"):
        traced = torch.compile(lambda x, w: ops.moe_gate(x, w, None, 3)[1].square().sum(), backend="aot_eager")
        got = torch.autograd.grad(traced(x, w), (x, w))
    want = torch.autograd.grad(ops.moe_gate.reference(x, w, None, 3)[1].square().sum(), (x, w))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"topk": 9}, "topk is 9, needs at most 8"),
        ({"topk": 3, "n_group": 4, "topk_group": 1}, "topk is 3, needs at most 2"),
        ({"topk": 1, "n_group": 8}, "n_group is 8"),
        ({"topk": 1, "n_group": 3}, "n_group is 3"),
        ({"topk": 1, "n_group": 2, "topk_group": 3}, "topk_group is 3"),
        ({"topk": 1, "score": "relu"}, "score is 'relu'"),
        ({"topk": 1, "temperature": 0.0}, "temperature is 0"),
    ],
)
def test_options_that_do_not_fit(options: dict, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        ops.moe_gate(torch.ones(2, 4), torch.ones(8, 4), None, **options)


def test_compare_excuses_only_ties() -> None:
    x, w = torch.randn(9, 4), torch.randn(8, 4)
    arguments = {"x": x, "w": w, "bias": torch.full((8,), 7.0), "topk": 2, "n_group": 4, "topk_group": 2}
    got = ops.moe_gate.reference(**arguments)
    want = ops.moe_gate.reference(x.double(), w.double(), torch.full((8,), 7.0).double(), 2, 4, 2)
    compare = ops.moe_gate.tests.compare
    compare(arguments, got, want, 1e-6)
    wrong = got[0].clone()
    wrong[0] = torch.tensor([e for e in range(8) if e not in wrong[0].tolist()][:2])
    with pytest.raises(AssertionError):
        compare(arguments, (wrong, got[1]), want, 1e-6)
    with pytest.raises(AssertionError):
        compare(arguments, (got[0], got[1] * 1.01), want, 1e-6)
