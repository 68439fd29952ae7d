"""generate and caches of transformers over an accelerated model: the same tokens, whatever is done to the cache."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from glm_oracle import cache_of, ids_of, left_padded, make_model, with_cache
from transformers import DynamicCache, GlmMoeDsaForCausalLM

from glm5sdk.integrations.transformers import accelerate, restore
from glm5sdk.integrations.transformers.cache import RowLayer

CLOSE = 1e-4
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "returns several": {"num_beams": 4, "num_return_sequences": 2},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_tokens(strategy: str) -> None:
    model = make_model(seed=3)
    pads = [0] if strategy == "prompt lookup" else [0, 3, 11]
    ids, mask = left_padded(pads, 24)
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0} | STRATEGIES[strategy]

    def tokens() -> torch.Tensor:
        torch.manual_seed(5)
        return model.generate(ids, attention_mask=mask, **options)

    want = tokens()
    with accelerate(model):
        assert torch.equal(tokens(), want)


def test_a_row_does_not_depend_on_its_batch() -> None:
    """transformers promises a tolerance; our rows are the same bits alone and padded into a batch."""
    model = make_model(seed=2)
    accelerate(model)
    ids, mask = left_padded([0, 9], 30)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        both = model(ids, attention_mask=mask, position_ids=positions).logits
        alone = model(ids[1:, 9:]).logits
    assert torch.equal(both[1, 9:], alone[0])


def test_crop_and_go_on() -> None:
    model, ids = make_model(), ids_of(2, 40)
    accelerate(model)
    with torch.no_grad():
        whole = model(ids).logits
        cache = cache_of(model(torch.cat([ids[:, :30], ids_of(2, 6, 9)], dim=1)))
        cache.crop(-6)
        assert cache.get_seq_length() == 30
        rest = model(ids[:, 30:], **with_cache(cache)).logits
    assert torch.equal(rest, whole[:, 30:])


@pytest.mark.parametrize("change", ["repeat", "select", "reorder", "copy", "reset"])
def test_a_changed_cache_goes_on(change: str) -> None:
    model, ids = make_model(), ids_of(2, 24)
    accelerate(model)
    with torch.no_grad():
        cache = cache_of(model(ids[:, :20]))
        rows = {"repeat": [0, 0, 1, 1], "select": [1], "reorder": [1, 0], "copy": [0, 1], "reset": [0, 1]}[change]
        begin = 20
        if change == "repeat":
            cache.batch_repeat_interleave(2)
        elif change == "select":
            cache.batch_select_indices(torch.tensor([1]))
        elif change == "reorder":
            cache.reorder_cache(torch.tensor([1, 0]))
        elif change == "copy":
            spoilt, cache = cache, copy.deepcopy(cache)
            model(ids_of(2, 4, 8), **with_cache(spoilt))
        else:
            cache.reset()
            begin = 0
        got = model(ids[rows][:, begin:], **with_cache(cache)).logits
        want = model(ids[rows]).logits[:, begin:]
    assert torch.equal(got, want)


def test_goes_on_with_a_cache_that_transformers_filled() -> None:
    """A prompt read before accelerate: its rotated numbers are put side by side."""
    model, ids = make_model(), ids_of(2, 40)
    with torch.no_grad():
        want = model(ids).logits[:, 30:]
        cache = cache_of(model(ids[:, :30]))
        accelerate(model)
        got = model(ids[:, 30:], **with_cache(cache)).logits
    assert all(type(layer) is RowLayer for layer in cache.layers)
    torch.testing.assert_close(got, want, rtol=0, atol=CLOSE)


def test_the_past_is_copied_rarely() -> None:
    """Growth by half: 300 single tokens must not mean 300 buffers."""
    model, cache = make_model(num_hidden_layers=1), DynamicCache(config=make_model(num_hidden_layers=1).config)
    accelerate(model)
    places = set()
    with torch.no_grad():
        for token in ids_of(1, 300)[0]:
            model(token.view(1, 1), **with_cache(cache))
            places.add(cache.layers[0]._kv.shape[1])
    assert cache.get_seq_length() == 300
    assert len(places) <= 6


def test_state_dict_and_saved_checkpoint_stay_transformers(tmp_path: Path) -> None:
    model, ids = make_model(), ids_of(1, 30)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        want = model(ids).logits
    accelerate(model)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    assert "glm5sdk" not in (tmp_path / "config.json").read_text()
    with torch.no_grad():
        torch.testing.assert_close(GlmMoeDsaForCausalLM.from_pretrained(tmp_path)(ids).logits, want)


def test_copies_and_casts_follow_their_own_weights() -> None:
    model, ids = make_model(), ids_of(1, 30)
    accelerate(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        first = model(ids).logits
        for p in other.parameters():
            p.mul_(0.5)
        assert torch.equal(model(ids).logits, first)
        halved = other(ids).logits
        restore(other)
        torch.testing.assert_close(halved, other(ids).logits, rtol=0, atol=CLOSE)
        model.load_state_dict({n: v.clone() for n, v in other.state_dict().items()}, assign=True)
        torch.testing.assert_close(model(ids).logits, halved, rtol=0, atol=1e-6)
        model.bfloat16()
        assert model(ids).logits.dtype == torch.bfloat16


def test_restore_is_exact_and_idempotent() -> None:
    model, ids = make_model(), ids_of(1, 20)
    with torch.no_grad():
        want = model(ids).logits
        handle = accelerate(model)
        handle.restore()
        restore(model)
        assert torch.equal(model(ids).logits, want)
    assert not [m for m in model.modules() if "forward" in m.__dict__]
    for _ in itertools.repeat(None, 2):  # and may be done again
        with accelerate(model):
            pass
