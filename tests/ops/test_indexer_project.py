"""indexer_project and indexer_preprocess: against transformers' indexer, fused equals composed, the write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_oracle import normal, rope_table
from op_oracle import check_backward, leaf, opcheck
from transformers import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

import glm5sdk
from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.registry import Op

N, Q, HI, DI, R, T = 10, 7, 3, 9, 4, 5


def arguments(dtype: torch.dtype = torch.float64, interleaved: bool = True) -> tuple[Any, ...]:
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = ((T, N), (T, Q), (HI * DI, Q), (DI, N), (DI,), (DI,), (HI, N))
    drawn = (normal(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes))
    return (*drawn, torch.tensor([3, 0, 4, 1, 1]), rope_table(5, R).to(acc), interleaved, 1e-6)


def composed(op: Op[..., Any], *args: Any) -> Any:
    with glm5sdk.use("reference"):
        return next(i for i in op.implementations() if i.kind == "composed").fn(*args)


def test_selection_equals_transformers() -> None:
    config = GlmMoeDsaConfig(
        hidden_size=48, q_lora_rank=24, index_n_heads=16, index_head_dim=32, qk_rope_head_dim=16, index_topk=6
    )
    torch.manual_seed(0)
    theirs = GlmMoeDsaIndexer(config, 0).double()
    with torch.no_grad():
        theirs.k_norm.bias.normal_()
    length = 40
    hidden, latent, table = normal(1, length, 48, seed=1), normal(1, length, 24, seed=2), rope_table(length, 16)
    cos, sin = (torch.cat([t, t], -1)[None] for t in table.chunk(2, -1))
    causal = torch.ones(1, length, length, dtype=torch.bool).tril()
    want = theirs(hidden, latent, (cos, sin), causal, torch.arange(length)[None])[0].sort(-1).values
    iq, ik, iw = ops.indexer_project.reference(
        hidden[0], latent[0], theirs.wq_b.weight, theirs.wk.weight, theirs.k_norm.weight, theirs.k_norm.bias,
        theirs.weights_proj.weight, torch.arange(length), table, True, theirs.k_norm.eps,
    )  # fmt: skip
    lengths = torch.arange(1, length + 1).int()
    got = ops.topk_indexer.reference(
        iq, iw, ik[None], torch.zeros(1, 1).int(), torch.zeros(length).int(), lengths, 6, length
    )
    assert torch.equal(got[6:, 0], want[6:])


def test_rope_turns_the_first_dims_alone() -> None:
    args = arguments()
    iq, ik, _ = ops.indexer_project.reference(*args)
    unturned = ops.indexer_project.reference(*args[:7], torch.zeros(T).long(), *args[8:])
    assert torch.equal(iq[..., R:], unturned[0][..., R:])
    assert torch.equal(ik[..., R:], unturned[1][..., R:])
    assert not torch.equal(iq[0, :, :R], unturned[0][0, :, :R])


def test_head_weights_keep_float32() -> None:
    args = arguments(torch.bfloat16)
    iw = ops.indexer_project.reference(*args)[2]
    want = args[0].double() @ args[6].double().T * (HI * DI) ** -0.5
    assert iw.dtype == torch.float32
    torch.testing.assert_close(iw.double(), want, rtol=1e-5, atol=1e-6)


def test_every_value_is_rounded_where_the_single_ops_round() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for interleaved in (True, False):
            args = arguments(dtype, interleaved)
            for got, want in zip(
                ops.indexer_project.reference(*args), composed(ops.indexer_project, *args), strict=True
            ):
                assert got.dtype == want.dtype
                assert torch.equal(got, want)


@pytest.mark.parametrize("format", ["plain", "fp8"])
def test_preprocess_writes_the_key(format: str) -> None:
    args, slots = arguments(torch.bfloat16), torch.tensor([5, -1, 0, 3, 4])
    cache = torch.zeros(2, 3, DI, dtype=torch.bfloat16) if format == "plain" else torch.zeros(2, 39).byte()
    caches = [cache.clone() for _ in range(3)]
    iq, ik, iw = ops.indexer_project.reference(*args)
    ops.cache_index_keys.reference(ik, caches[0], slots, format)
    head, tail = args[:9], args[9:]
    got = ops.indexer_preprocess.reference(*head, caches[1], slots, *tail, format)
    again = composed(ops.indexer_preprocess, *head, caches[2], slots, *tail, format)
    for outputs in (got, again):
        assert torch.equal(outputs[0], iq)
        assert torch.equal(outputs[1], iw)
    assert torch.equal(caches[1], caches[0])
    assert torch.equal(caches[2], caches[0])
    assert not torch.equal(caches[0], cache)


def test_refusals() -> None:
    args = arguments(torch.float32)
    with pytest.raises(ContractError, match="needs R <= Di"):
        ops.indexer_project(*args[:8], torch.ones(5, DI + 1), *args[9:])
    cache = torch.zeros(2, 3, DI)
    bad = torch.tensor([3, 0, 5, 1, 1])
    with pytest.raises(ContractError, match=r"positions\[2\] is 5"):
        ops.indexer_preprocess.reference(*args[:7], bad, args[8], cache, torch.arange(5))
    with pytest.raises(ContractError, match=r"slots\[0\] is 6"):
        ops.indexer_preprocess.reference(*args[:9], cache, torch.arange(5) + 6)
    assert (cache == 0).all()


def test_gradients() -> None:
    check_backward(ops.indexer_project, *arguments())
    shapes = ((2, N), (2, Q), (HI * DI, Q), (DI, N), (DI,), (DI,), (HI, N))
    drawn = [leaf(*s, seed=i) for i, s in enumerate(shapes)]
    opcheck(ops.indexer_project, *drawn, torch.tensor([1, 0]), rope_table(2, R).float(), True, 1e-6)
