"""Generation: stops, padding, batches, sampling and bad arguments."""

from __future__ import annotations

import pytest
import torch
from oracle import random_ids

from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM, preset


@pytest.fixture(scope="module")
def model() -> Glm5ForCausalLM:
    torch.manual_seed(0)
    config = preset("tiny", num_hidden_layers=2, index_topk=8, vocab_size=64, initializer_range=0.15)
    return Glm5ForCausalLM(config.replace(eos_token_id=(1, 2), pad_token_id=0)).eval()


def test_prompt_first_then_new_tokens(model: Glm5ForCausalLM) -> None:
    ids = random_ids(2, 10, seed=1, vocab=64)
    out = model.generate(ids, max_new_tokens=5, ignore_eos=True)
    assert out.shape == (2, 15)
    assert torch.equal(out[:, :10], ids)


def test_greedy_is_argmax_of_the_logits(model: Glm5ForCausalLM) -> None:
    ids = random_ids(1, 12, seed=2, vocab=64)
    out = model.generate(ids, max_new_tokens=8, ignore_eos=True)
    with torch.no_grad():
        want = model(out[:, :-1])[0, 11:].argmax(-1)
    assert out[0, 12:].tolist() == want.tolist()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_does_not_know_its_batch(model: Glm5ForCausalLM, side: str, temperature: float) -> None:
    ids = random_ids(3, 14, seed=3, vocab=64)
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 5, 11)):
        columns = slice(0, pad) if side == "left" else slice(14 - pad, 14)
        mask[row, columns] = 0
    together = model.generate(ids, mask, max_new_tokens=9, temperature=temperature, ignore_eos=True, seed=7)
    for row in range(3):
        alone = ids[row][mask[row].bool()][None]
        got = model.generate(alone, max_new_tokens=9, temperature=temperature, ignore_eos=True, seed=7 + row)
        assert got[0, alone.shape[1] :].tolist() == together[row, 14:].tolist()


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_prefill_chunks_change_nothing(model: Glm5ForCausalLM, chunk: int) -> None:
    ids = random_ids(3, 17, seed=4, vocab=64)
    want = model.generate(ids, max_new_tokens=6, ignore_eos=True)
    got = model.generate(ids, max_new_tokens=6, ignore_eos=True, prefill_chunk=chunk, page_size=5)
    assert torch.equal(got, want)


def test_every_stop_token_ends_its_row(model: Glm5ForCausalLM) -> None:
    ids = random_ids(2, 9, seed=5, vocab=64)
    free = model.generate(ids, max_new_tokens=10, ignore_eos=True)
    stops = {int(free[0, 11]), int(free[1, 14])}
    seen: list[list[int]] = []
    out = model.generate(ids, max_new_tokens=10, stop_token_ids=stops, on_token=lambda step: seen.append(step.tolist()))
    for row in range(2):
        new = free[row, 9:].tolist()
        end = next(i for i, token in enumerate(new) if token in stops) + 1
        assert out[row, 9 : 9 + end].tolist() == new[:end]
        assert all(token == 0 for token in out[row, 9 + end :].tolist())
        assert [step[row] for step in seen][end:] == [-1] * (len(seen) - end)


def test_config_stops_apply_unless_ignored(model: Glm5ForCausalLM) -> None:
    ids = random_ids(1, 9, seed=6, vocab=64)
    free = model.generate(ids, max_new_tokens=6, ignore_eos=True)
    first = int(free[0, 9])
    stopping = Glm5ForCausalLM(model.config.replace(eos_token_id=(first,))).eval()
    stopping.load_state_dict(model.state_dict())
    assert stopping.generate(ids, max_new_tokens=6).shape == (1, 10)
    assert torch.equal(stopping.generate(ids, max_new_tokens=6, ignore_eos=True), free)


def test_seeds_decide_draws(model: Glm5ForCausalLM) -> None:
    ids = random_ids(1, 9, seed=7, vocab=64)
    draws = [
        model.generate(ids, max_new_tokens=12, temperature=1.5, ignore_eos=True, seed=s).tolist() for s in (1, 1, 2)
    ]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"min_p": 2.0}, "min_p is 2"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"attention_mask": torch.zeros(1, 4, dtype=torch.int64)}, "prompt is empty"),
    ],
)
def test_bad_arguments_are_named(model: Glm5ForCausalLM, arguments: dict, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        model.generate(random_ids(1, 4, seed=8, vocab=64), **arguments)
