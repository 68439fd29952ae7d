"""mla_project and mla_preprocess: against the unabsorbed form of transformers, fused equals composed, the write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_oracle import normal, rope_table
from op_oracle import check_backward, leaf, opcheck
from torch import Tensor
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRMSNorm, apply_rotary_pos_emb_interleave

import glm5sdk
from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.registry import Op

N, Q, H, DN, C, R, T = 10, 7, 3, 5, 6, 4, 9


def weights(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    shapes = ((Q, N), (Q,), (H * (DN + R), Q), (C + R, N), (C,), (H, C, DN))
    return tuple(normal(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes))


def arguments(dtype: torch.dtype = torch.float64, interleaved: bool = True) -> tuple[Any, ...]:
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    positions = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 0])
    return (
        normal(T, N, seed=10, dtype=dtype),
        *weights(dtype),
        positions,
        rope_table(10, R).to(acc),
        1e-5,
        interleaved,
    )


def composed(op: Op[..., Any], *args: Any) -> Any:
    with glm5sdk.use("reference"):
        return next(i for i in op.implementations() if i.kind == "composed").fn(*args)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    norm = GlmMoeDsaRMSNorm(len(weight), eps=1e-5)
    norm.weight.data = weight
    return norm(x.float()).double()  # it computes in float32 whatever it is given


def test_scores_equal_the_unabsorbed_attention_of_transformers() -> None:
    hidden, w_q_a, q_a_norm, w_q_b, w_kv_a, kv_a_norm, w_uk, positions, table, *_ = arguments()
    q, kv, q_latent = ops.mla_project.reference(*arguments())
    # GlmMoeDsaAttention: expand keys per head, rotate, concatenate, multiply.
    theirs_latent = rms(hidden @ w_q_a.T, q_a_norm)
    torch.testing.assert_close(q_latent, theirs_latent, rtol=1e-5, atol=1e-6)
    theirs_q = (theirs_latent @ w_q_b.T).view(T, H, DN + R)
    row = hidden @ w_kv_a.T
    k_nope = torch.einsum("sc,hcd->shd", rms(row[:, :C], kv_a_norm), w_uk)
    cos, sin = table[positions].chunk(2, -1)
    q_rot, k_rot = apply_rotary_pos_emb_interleave(
        theirs_q[..., DN:], row[:, None, C:], torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    )
    query = torch.cat([theirs_q[..., :DN], q_rot], -1)
    key = torch.cat([k_nope, k_rot.expand(-1, H, -1)], -1)
    want = torch.einsum("thd,shd->hts", query, key)
    torch.testing.assert_close(torch.einsum("thl,sl->hts", q, kv), want, rtol=1e-5, atol=1e-5)


def test_every_value_is_rounded_where_the_single_ops_round() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for interleaved in (True, False):
            args = arguments(dtype, interleaved)
            for got, want in zip(ops.mla_project.reference(*args), composed(ops.mla_project, *args), strict=True):
                assert got.dtype == dtype
                assert torch.equal(got, want)


@pytest.mark.parametrize("format", ["plain", "fp8_ds_mla"])
def test_preprocess_writes_the_row(format: str) -> None:
    args = arguments(torch.bfloat16)
    slots = torch.tensor([5, -1, 0, 11, 3, 7, 2, -1, 9])
    plain = format == "plain"
    cache = torch.zeros(4, 3, C + R if plain else C + 4 + 2 * R, dtype=torch.bfloat16 if plain else torch.uint8)
    caches = [cache.clone() for _ in range(3)]
    q, kv, q_latent = ops.mla_project.reference(*args)
    ops.concat_and_cache_mla.reference(kv, caches[0], slots, C, format)
    head, tail = args[:9], args[9:]
    got = ops.mla_preprocess.reference(*head, caches[1], slots, *tail, format)
    again = composed(ops.mla_preprocess, *head, caches[2], slots, *tail, format)
    for outputs in (got, again):
        assert torch.equal(outputs[0], q)
        assert torch.equal(outputs[1], q_latent)
    assert torch.equal(caches[1], caches[0])
    assert torch.equal(caches[2], caches[0])
    assert not torch.equal(caches[0], cache)


def test_refusals_write_nothing() -> None:
    args = arguments(torch.float32)
    cache = torch.zeros(4, 3, C + R)
    slots = torch.arange(T)
    positions = args[7].clone()
    positions[2] = 10
    calls = [
        ((*args[:7], positions, args[8]), slots, r"positions\[2\] is 10"),
        (args[:9], slots + 4, r"slots\[8\] is 12"),
    ]
    for head, where, words in calls:
        for run in (ops.mla_preprocess.reference, lambda *a: composed(ops.mla_preprocess, *a)):
            with pytest.raises(ContractError, match=words):
                run(*head, cache, where, 1e-5, True, "plain")
    assert (cache == 0).all()


def test_gradients() -> None:
    check_backward(ops.mla_project, *arguments())
    shapes = [(2, N), *(w.shape for w in weights())]
    opcheck(
        ops.mla_project, *(leaf(*s, seed=i) for i, s in enumerate(shapes)), torch.tensor([1, 0]),
        rope_table(2, R).float(), 1e-5, True,
    )  # fmt: skip
