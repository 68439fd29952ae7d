"""The model's public face against misuse, and against weights that change behind its back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from glm5sdk.core.errors import CapacityError, ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.models.glm5.presets import preset
from glm5sdk.nn.token_batch import TokenBatch
from glm5sdk.registry.weight import load_weight

NAN, INF = float("nan"), float("inf")


def fresh(seed: int = 0, **changes: Any) -> Glm5ForCausalLM:
    torch.manual_seed(seed)
    return Glm5ForCausalLM(preset("tiny", **changes)).eval()


@pytest.fixture(scope="module")
def model() -> Glm5ForCausalLM:
    return fresh()


IDS = torch.randint(0, 2048, (2, 7), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Glm5ForCausalLM) -> Tensor:
    return model(IDS)


# Weights that change behind the model's back.


def by_data(w: Tensor, value: Tensor) -> None:
    w.data.copy_(value)


def by_swapped_rows(w: Tensor, value: Tensor) -> None:
    w.data.copy_(w.data.flip(0))


def by_numpy(w: Tensor, value: Tensor) -> None:
    w.detach().numpy()[:] = value.numpy()


def by_copy(w: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        w.copy_(value)


def by_new_storage(w: Tensor, value: Tensor) -> None:
    w.data = value.clone()


@pytest.mark.parametrize("write", [by_data, by_swapped_rows, by_numpy, by_copy, by_new_storage, load_weight])
def test_absorbed_weights_follow_whole_writes(write: Callable[[Tensor, Tensor], None]) -> None:
    model = fresh()
    logits(model)
    for layer in model.model.layers.values() if hasattr(model.model.layers, "values") else model.model.layers:
        w = layer.self_attn.kv_b_proj.weight
        write(w, torch.randn(w.shape, generator=torch.Generator().manual_seed(2)))
    again = fresh()
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(model), logits(again))


@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_state_replaces_what_was_derived(assign: bool) -> None:
    model, other = fresh(), fresh(1)
    logits(model)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert torch.equal(logits(model), logits(other))


@pytest.mark.parametrize("through_data", [False, True])
def test_a_step_of_an_optimiser_replaces_what_was_derived(through_data: bool) -> None:
    model = fresh()
    logits(model)
    model(IDS).logsumexp(-1).sum().backward()
    for p in model.parameters():
        if p.grad is None:
            continue
        with torch.no_grad():
            target = p.data if through_data else p
            target.add_(p.grad, alpha=-0.1)
    again = fresh()
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(model), logits(again))


# Copies, modes and dtypes.


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_compute_the_same(model: Glm5ForCausalLM, twin: Callable[[Any], Any]) -> None:
    want = logits(model)
    assert torch.equal(logits(twin(model)), want)


def test_modes_change_no_bit(model: Glm5ForCausalLM) -> None:
    want = logits(model)
    with torch.inference_mode():
        assert torch.equal(model(IDS), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logits(model), want)
        assert torch.equal(model(IDS).detach(), want)
    assert torch.equal(model.train()(IDS).detach(), want)
    model.eval()


def test_what_inference_mode_made_works_outside_of_it() -> None:
    with torch.inference_mode():
        model = fresh()
        cache = model.make_cache(2, 16)
        model(IDS, cache=cache)
    with torch.no_grad():
        model(IDS[:, :2], cache=cache)
    assert cache.lengths == [9, 9]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(model: Glm5ForCausalLM, dtype: torch.dtype) -> None:
    other = copy.deepcopy(model).to(dtype)
    torch.testing.assert_close(logits(other).float(), logits(model), rtol=0.05, atol=0.05)


def test_checkpointed_layers_have_the_same_gradients(model: Glm5ForCausalLM) -> None:
    def gradients(run: Callable[..., Any]) -> tuple[Tensor, ...]:
        context = model.context(TokenBatch.packed([7, 7]))
        hidden = model.model.embed_tokens(IDS.flatten()).detach().requires_grad_()
        layer = next(iter(model.model.layers.values() if hasattr(model.model.layers, "values") else model.model.layers))
        out = run(layer.self_attn, hidden, context)
        return torch.autograd.grad(out.square().sum(), [hidden, *layer.self_attn.parameters()], allow_unused=True)

    plain = gradients(lambda f, *a: f(*a))
    saved = gradients(lambda f, *a: checkpoint(f, *a, use_reentrant=False))
    for a, b in zip(plain, saved, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("trains", [False, True])
def test_a_layer_compiles_into_one_graph(trains: bool) -> None:
    model = fresh(num_hidden_layers=2, num_nextn_predict_layers=0)
    layer = list(model.model.layers.values() if hasattr(model.model.layers, "values") else model.model.layers)[1]
    context = model.context(TokenBatch.packed([7, 7]))
    hidden = model.model.embed_tokens(IDS.flatten()).detach()
    torch._dynamo.reset()
    with torch.set_grad_enabled(trains):
        want = layer(hidden, None, context)
        got = torch.compile(layer, backend="aot_eager", fullgraph=True)(hidden, None, context)
    torch._dynamo.reset()
    assert all(map(torch.equal, got, want))


# Misuse.


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32])
def test_masks_of_any_dtype(model: Glm5ForCausalLM, dtype: torch.dtype) -> None:
    mask = torch.ones(2, 7, dtype=dtype)
    mask[1, :3] = 0
    with torch.no_grad():
        got = model(IDS, mask)
        assert torch.equal(got[0], logits(model)[0])
        assert torch.equal(got[1, 3:], model(IDS[1:, 3:])[0])
        assert not got[1, :3].any()


@pytest.mark.parametrize("ids", [IDS[:, :0], IDS[:0]])
def test_nothing_in_nothing_out(model: Glm5ForCausalLM, ids: Tensor) -> None:
    assert model(ids).shape == (*ids.shape, 2048)
    assert model.logprobs(ids, ids).shape == ids.shape


def test_rows_of_padding_alone(model: Glm5ForCausalLM) -> None:
    with torch.no_grad():
        got = model(IDS, torch.tensor([[1] * 7, [0] * 7]))
    assert torch.equal(got[0], logits(model)[0])
    assert not got[1].any()


@pytest.mark.parametrize(
    "arguments",
    [
        (IDS[0],), (IDS.float(),), (IDS.numpy(),), ([[1]],), (IDS + 10**6,), (IDS - 10**6,),
        (IDS, torch.full((2, 7), NAN)),
        (IDS, [[1] * 7] * 2), (IDS, torch.zeros(2, 1, 7, 7)), (IDS, torch.ones(3, 7)), (IDS, torch.ones(2, 6)),
        (IDS, torch.tensor([[1, 0, 1, 1, 1, 1, 1]] * 2)), (IDS, None, []), (torch.zeros(1, 1025, dtype=torch.int64),),
    ],
)  # fmt: skip
def test_misuse_of_forward(model: Glm5ForCausalLM, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((ContractError, CapacityError), match="need"):
        model(*arguments)


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 3}, {"kv_lora_rank": 32}, {"index_head_dim": 64}, {"dtype": torch.bfloat16}]
)
def test_the_cache_of_another_model(model: Glm5ForCausalLM, changes: dict[str, Any]) -> None:
    dtype = changes.pop("dtype", torch.float32)
    cache = fresh(**changes).to(dtype).make_cache(2, 16)
    before = [pool.clone() for pool in cache.kv]
    with pytest.raises(ContractError, match="need"), torch.no_grad():
        model(IDS, cache=cache)
    assert cache.lengths == [0, 0]
    assert all(map(torch.equal, cache.kv, before))


def test_a_full_cache_stays_as_it_is(model: Glm5ForCausalLM) -> None:
    cache = model.make_cache(2, 8)
    with torch.no_grad():
        model(IDS, cache=cache)
        before = [pool.clone() for pool in cache.kv]
        with pytest.raises(CapacityError, match="max_seq_len 8"):
            model(IDS[:, :2], cache=cache)
        with pytest.raises(ContractError, match="batch_size 2"):
            model(IDS[:1, :1], cache=cache)
    assert cache.lengths == [7, 7]
    assert all(map(torch.equal, cache.kv, before))


@pytest.mark.parametrize("sizes", [(0, 8), (2, 0), (-1, 3), (2.5, 3), ("2", 8), (True, 8), (2, 8, -1), (2, 8, 0)])
def test_impossible_caches(model: Glm5ForCausalLM, sizes: tuple[Any, ...]) -> None:
    with pytest.raises(ContractError, match="need"):
        model.make_cache(*sizes)


def test_caches_that_fit_nowhere(model: Glm5ForCausalLM) -> None:
    for sizes in ((2**40, 2**20), (2, 8, 2**40), (2**20, 2047, 64)):
        with pytest.raises(CapacityError, match="need"):
            model.make_cache(*sizes)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 10**9}, {"max_new_tokens": 1020}, {"max_new_tokens": 0}, {"max_new_tokens": -1},
        {"max_new_tokens": 2.5}, {"max_new_tokens": "3"}, {"max_new_tokens": True}, {"temperature": INF},
        {"temperature": NAN}, {"temperature": -1}, {"temperature": "1"}, {"temperature": None}, {"temperature": 1e-45},
        {"temperature": 1e308}, {"top_k": 10**10}, {"top_k": 1.5}, {"top_p": 0}, {"top_p": NAN}, {"min_p": 2},
        {"seed": 2**63}, {"seed": 2**63 - 1}, {"seed": 1.5}, {"seed": None}, {"stop_token_ids": 3},
        {"stop_token_ids": "3"}, {"stop_token_ids": ["a"]}, {"stop_token_ids": [-5]}, {"stop_token_ids": [2**70]},
        {"page_size": 0}, {"page_size": 2**40}, {"prefill_chunk": 0}, {"kv_format": "fp8"}, {"kv_format": ""},
        {"index_format": "fp8_ds_mla"}, {"on_token": 3}, {"attention_mask": torch.zeros(2, 7)},
        {"attention_mask": torch.ones(3, 7)}, {"attention_mask": [[1] * 7] * 2},
    ],
    ids=str,
)  # fmt: skip
def test_misuse_of_generate(model: Glm5ForCausalLM, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the model ran before the arguments were checked")

    monkeypatch.setattr(model.model, "forward", never)
    with pytest.raises((ContractError, CapacityError), match="need"):
        model.generate(IDS, **{"max_new_tokens": 2, **options})


def test_the_last_token_needs_no_position(model: Glm5ForCausalLM) -> None:
    ids = torch.zeros(1, 1020, dtype=torch.int64)
    assert model.generate(ids, max_new_tokens=5, ignore_eos=True).shape == (1, 1025)
    with pytest.raises(CapacityError, match="max_position_embeddings"):
        model.generate(ids, max_new_tokens=6)
