"""Bit equality on the CPU backend: batch, chunks, pages, padding, threads, decode and training give one answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from oracle import random_ids

import glm5sdk
from glm5sdk.models.glm5 import Glm5Config, Glm5ForCausalLM, preset

# Odd widths on purpose: nothing here is a multiple of a vector.
ODD = dict(
    vocab_size=97, hidden_size=52, intermediate_size=75, moe_intermediate_size=21, num_hidden_layers=3,
    num_attention_heads=3, q_lora_rank=27, kv_lora_rank=37, qk_nope_head_dim=13, qk_rope_head_dim=6, v_head_dim=11,
    first_k_dense_replace=1, n_routed_experts=7, num_experts_per_tok=3, index_n_heads=16, index_head_dim=14,
    index_topk=8, max_position_embeddings=256,
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    "cpu" not in glm5sdk.backends() or bool(glm5sdk.backends()["cpu"].reason), reason="needs the CPU backend"
)


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with glm5sdk.use("cpu"):
        yield


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> Glm5ForCausalLM:
    torch.manual_seed(0)
    config: Glm5Config = preset("tiny", **ODD)
    model = Glm5ForCausalLM(config.replace(initializer_range=0.1))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.2 * torch.randn_like(p))
    return model.to(getattr(torch, request.param)).eval()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@torch.no_grad()
def test_alone_or_in_a_batch(model: Glm5ForCausalLM) -> None:
    ids = random_ids(5, 40, seed=1)
    whole = model(ids)
    for row in range(5):
        assert same_bits(model(ids[row : row + 1])[0], whole[row])
    order = [3, 0, 4, 2, 1]
    assert same_bits(model(ids[order]), whole[order])


@torch.no_grad()
@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("chunk", [1, 3, 8, 40])
def test_any_chunk_and_page_size(model: Glm5ForCausalLM, chunk: int, page_size: int) -> None:
    ids = random_ids(2, 40, seed=2)
    cache = model.make_cache(2, 40, page_size=page_size)
    got = torch.cat([model(ids[:, i : i + chunk], cache=cache) for i in range(0, 40, chunk)], dim=1)
    assert same_bits(got, model(ids))


@torch.no_grad()
def test_pages_in_any_order(model: Glm5ForCausalLM) -> None:
    ids = random_ids(2, 33, seed=3)
    cache = model.make_cache(2, 33, page_size=4)
    shuffled = torch.randperm(cache.block_table.numel(), generator=torch.Generator().manual_seed(0))
    cache.block_table = shuffled.to(torch.int32).view_as(cache.block_table)
    assert same_bits(model(ids, cache=cache), model(ids))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model: Glm5ForCausalLM, side: str) -> None:
    ids = random_ids(2, 24, seed=4)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    if side == "right":
        mask = mask.flip(1)
    got = model(ids, attention_mask=mask)
    assert same_bits(got[1][mask[1].bool()], model(ids[1][mask[1].bool()][None])[0])


@torch.no_grad()
def test_thread_count_changes_nothing(model: Glm5ForCausalLM) -> None:
    from glm5sdk_cpu import BACKEND

    ids = random_ids(3, 50, seed=5)
    before = BACKEND.threads()
    try:
        answers = []
        for count in (1, 2, 3, 7):
            BACKEND.threads(count)
            answers.append(model(ids))
    finally:
        BACKEND.threads(before)
    assert all(same_bits(answer, answers[0]) for answer in answers)


def test_training_forward_equals_inference(model: Glm5ForCausalLM) -> None:
    ids = random_ids(2, 30, seed=6)
    targets = ids.roll(-1, dims=1)
    trained = model.logprobs(ids, targets)
    assert trained.requires_grad
    with torch.no_grad():
        assert same_bits(trained.detach(), model.logprobs(ids, targets))
        logits = model(ids, cache=model.make_cache(2, 30, page_size=8))
        assert same_bits(model(ids), logits)
    with torch.enable_grad():
        assert same_bits(model(ids).detach(), logits)


@torch.no_grad()
def test_sampled_logprob_equals_trained_logprob(model: Glm5ForCausalLM) -> None:
    ids = random_ids(1, 20, seed=7)
    out = model.generate(ids, max_new_tokens=6, ignore_eos=True, temperature=1.0, seed=3)
    logits = model(out[:, :-1])[0, 19:]
    n = logits.shape[0]
    one = torch.ones(n)
    positions = torch.arange(20, 20 + n)
    drawn, logprob, _ = glm5sdk.ops.sample(
        logits, one, torch.zeros(n, dtype=torch.int32), one, torch.zeros(n), torch.full((n,), 3), positions
    )
    assert drawn.tolist() == out[0, 20:].tolist()
    targets = torch.full((1, 25), -100)
    targets[0, 19:] = out[0, 20:]
    assert same_bits(model.logprobs(out[:, :-1], targets)[0, 19:], logprob)


@torch.no_grad()
def test_runs_are_repeatable(model: Glm5ForCausalLM) -> None:
    ids = random_ids(2, 45, seed=8)
    first = model(ids)
    assert all(same_bits(model(ids), first) for _ in range(5))


@torch.no_grad()
@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"])
def test_every_level_is_invariant(model: Glm5ForCausalLM, level: str) -> None:
    variants = {impl.variant for impl in glm5sdk.backends()["cpu"].impls}
    if level not in variants:
        pytest.skip(f"this processor has no {level}")
    with glm5sdk.use(f"cpu.{level}"):
        ids = random_ids(3, 20, seed=9)
        whole = model(ids)
        cache = model.make_cache(3, 20, page_size=3)
        steps = torch.cat([model(ids[:, i : i + 7], cache=cache) for i in range(0, 20, 7)], dim=1)
        assert same_bits(steps, whole)
        assert same_bits(model(ids[1:2]), whole[1:2])
