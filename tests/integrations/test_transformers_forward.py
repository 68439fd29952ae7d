"""Accelerated transformers models give transformers' own logits, gradients and tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from glm_oracle import cache_of, ids_of, left_padded, make_model, with_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from glm5sdk.integrations.transformers import accelerate, restore

CLOSE = 1e-4
SHARED = {"num_hidden_layers": 6, "indexer_types": ["full", "full", "shared", "shared", "full", "shared"]}
SCHEDULES: dict[str, dict[str, Any]] = {"every layer selects": {}, "shared selections": SHARED}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_logits_past_index_topk(attn: str, schedule: str, use_cache: bool) -> None:
    model, ids = make_model(attn=attn, **SCHEDULES[schedule]), ids_of(3, 50)
    with torch.no_grad():
        want = model(ids, use_cache=use_cache).logits
        with accelerate(model):
            got = model(ids, use_cache=use_cache).logits
        again = model(ids, use_cache=use_cache).logits
    assert ids.shape[1] > model.config.index_topk
    assert not torch.equal(got, want), "nothing was accelerated"
    torch.testing.assert_close(got, want, rtol=0, atol=CLOSE)
    assert torch.equal(again, want)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_left_padding_chunks_and_single_tokens(attn: str) -> None:
    """A prompt in two chunks, then token by token, over a padded batch; pads themselves count for nothing."""
    model = make_model(attn=attn)
    ids, mask = left_padded([0, 5, 17], 40)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def logits() -> torch.Tensor:
        cache, parts = DynamicCache(config=model.config), []
        for begin, end in [(0, 9), (9, 30), *((i, i + 1) for i in range(30, 40))]:
            out = model(
                ids[:, begin:end], attention_mask=mask[:, :end], position_ids=positions[:, begin:end],
                **with_cache(cache), use_cache=True,
            )  # fmt: skip
            parts.append(out.logits)
        assert cache.get_seq_length() == 40
        return torch.cat(parts, dim=1)

    with torch.no_grad():
        want = logits()
        accelerate(model)
        torch.testing.assert_close(logits()[mask.bool()], want[mask.bool()], rtol=0, atol=CLOSE)


def test_right_padding() -> None:
    model, ids = make_model(), ids_of(2, 30)
    mask = torch.ones_like(ids)
    mask[1, 21:] = 0
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
        accelerate(model)
        got = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=0, atol=CLOSE)


def test_packed_sequences() -> None:
    """Several sequences in one row, told apart by position_ids; transformers supports that without a cache."""
    model, ids = make_model(), ids_of(2, 48)
    lengths = [20, 9, 19]
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    with torch.no_grad():
        want = model(ids, position_ids=positions, use_cache=False).logits
        accelerate(model)
        got = model(ids, position_ids=positions, use_cache=False).logits
        alone = model(ids[:1, 29:], use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=CLOSE)
    torch.testing.assert_close(got[:1, 29:], alone, rtol=0, atol=CLOSE)


def test_inputs_embeds_hidden_states_router_logits_and_labels() -> None:
    model, ids = make_model(), ids_of(2, 20)
    embeds = model.model.embed_tokens(ids).detach()
    arguments = dict(inputs_embeds=embeds, labels=ids, output_hidden_states=True, output_router_logits=True)
    with torch.no_grad():
        want = model(**arguments)
        accelerate(model)
        got = model(**arguments)
    torch.testing.assert_close(got.loss, want.loss, rtol=0, atol=1e-5)
    assert len(got.hidden_states) == len(want.hidden_states) == 5
    assert len(got.router_logits) == len(want.router_logits) == 3
    pairs = zip((*got.hidden_states, *got.router_logits), (*want.hidden_states, *want.router_logits), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("checkpointing", "use_cache"), [(False, True), (False, False), (True, False)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients(checkpointing: bool, use_cache: bool, schedule: str) -> None:
    plain = make_model(**SCHEDULES[schedule]).train()
    quick = copy.deepcopy(plain)
    accelerate(quick)
    ids, mask = left_padded([0, 6], 30)
    labels = ids.masked_fill(mask == 0, -100)
    for model in (plain, quick):
        if checkpointing:
            model.activation_checkpointing_enable()
        model(ids, attention_mask=mask, labels=labels, use_cache=use_cache).loss.backward()
    names = dict(plain.named_parameters())
    reached = 0
    for name, p in quick.named_parameters():
        want = names[name].grad
        if want is None:
            assert p.grad is None, name  # the indexer: a selection has no gradient
            continue
        reached += 1
        scale = float(want.abs().max())
        assert p.grad is not None, name
        torch.testing.assert_close(
            p.grad, want, rtol=0, atol=2e-5 * max(scale, 1e-2), msg=lambda m, n=name: f"{n}: {m}"
        )
    assert reached > 40


def test_a_cache_filled_while_training_goes_on_without_gradients() -> None:
    model = make_model()
    accelerate(model)
    ids, mask = left_padded([0, 4], 24)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
    first = model(ids[:, :20], attention_mask=mask[:, :20])
    assert first.logits.requires_grad
    with torch.no_grad():
        rest = model(ids[:, 20:], attention_mask=mask, **with_cache(cache_of(first))).logits
    torch.testing.assert_close(rest, whole[:, 20:], rtol=0, atol=1e-5)


def test_one_optimiser_step_reaches_the_accelerated_model() -> None:
    """Weights kept in derived form must not go stale."""
    model, ids = make_model(), ids_of(1, 20)
    accelerate(model)
    with torch.no_grad():
        before = model(ids).logits
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids, labels=ids).loss.backward()
    optimiser.step()
    with torch.no_grad():
        after = model(ids).logits
        restore(model)
        want = model(ids).logits
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(after, want, rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("dtype", "far"), [(torch.float64, 1e-5), (torch.float16, 5e-2)])
def test_the_other_dtypes(dtype: torch.dtype, far: float) -> None:
    """transformers keeps rope and router in float32 for a float64 model, hence no closer."""
    model, ids = make_model(seed=1, num_hidden_layers=2).to(dtype), ids_of(2, 12)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        want = model(ids).logits
        accelerate(model)
        got = model(ids).logits
    assert got.dtype == dtype
    assert 0 < float((got - want).abs().max()) < far


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_bfloat16_is_no_further_from_float64_than_transformers_is(experts: str) -> None:
    """One dense layer, all keys selected: nothing discrete can flip, so roundings alone are compared."""
    changes = dict(num_hidden_layers=1, first_k_dense_replace=1, index_topk=64)
    exact = make_model(**changes).double()
    model = make_model(**changes).bfloat16()
    exact.load_state_dict(model.state_dict())
    model.set_experts_implementation(experts)
    ids = ids_of(4, 40)
    with torch.no_grad():
        want = exact(ids).logits
        theirs = model(ids).logits.double()
        with accelerate(model):
            ours = model(ids).logits.double()
    assert model.config._experts_implementation == experts
    assert (ours - want).norm() <= 1.05 * (theirs - want).norm()


@st.composite
def geometries(draw: Any) -> dict[str, Any]:
    groups = draw(st.sampled_from([1, 2]))
    layers = draw(st.integers(1, 4))
    heads = draw(st.integers(1, 5))
    return dict(
        num_hidden_layers=layers, first_k_dense_replace=draw(st.integers(0, layers)), num_attention_heads=heads,
        num_key_value_heads=heads, hidden_size=draw(st.sampled_from([24, 40, 65])),
        kv_lora_rank=draw(st.integers(5, 33)), q_lora_rank=draw(st.integers(5, 33)),
        qk_rope_head_dim=2 * draw(st.integers(1, 6)), qk_nope_head_dim=draw(st.integers(1, 17)),
        v_head_dim=draw(st.integers(1, 17)), index_head_dim=draw(st.integers(16, 24)),
        index_topk=draw(st.integers(1, 40)), n_group=groups, topk_group=draw(st.integers(1, groups)),
        n_routed_experts=8, num_experts_per_tok=draw(st.integers(1, 4)), norm_topk_prob=draw(st.booleans()),
        n_shared_experts=draw(st.integers(1, 2)), intermediate_size=draw(st.integers(8, 70)),
        moe_intermediate_size=draw(st.integers(3, 40)),
    )  # fmt: skip


# Fixed examples: one in a hundred random ones has two keys or experts within a rounding of each other.
@settings(max_examples=25, deadline=None, derandomize=True)
@given(geometry=geometries(), pad=st.integers(0, 12), cut=st.integers(1, 29), seed=st.integers(0, 99))
def test_any_geometry(geometry: dict[str, Any], pad: int, cut: int, seed: int) -> None:
    model = make_model(seed=seed, **geometry)
    model.set_experts_implementation("eager")  # the grouped product refuses odd sizes
    ids, mask = left_padded([0, pad], 30, seed)
    real = mask.bool()

    def logits() -> torch.Tensor:
        first = model(ids[:, :cut], attention_mask=mask[:, :cut])
        second = model(ids[:, cut:], attention_mask=mask, **with_cache(cache_of(first)))
        return torch.cat([first.logits, second.logits], dim=1)

    with torch.no_grad():
        want = logits()
        accelerate(model)
        got = logits()
        whole = model(ids, attention_mask=mask, use_cache=False).logits
    scale = max(1.0, float(want[real].abs().max()))
    assert float((got[real] - want[real]).abs().max()) < CLOSE * scale
    assert float((whole[real] - want[real]).abs().max()) < CLOSE * scale
