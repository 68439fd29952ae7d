"""Sampling parameters against a plain loop that recomputes everything, and requests that may never reach a step."""

from __future__ import annotations

import math

import pytest
import torch
from engine_cases import (
    CONFIGS,
    PROMPTS,
    STOPS,
    VOCAB,
    alone,
    check_drained,
    make_engine,
    make_model,
    plainly,
    reference_logprobs,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fakes import make_tokenizer

from glm5sdk.core.errors import CapacityError, ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.serve.admission import DynamicBatching
from glm5sdk.serve.config import EngineConfig
from glm5sdk.serve.engine import Engine
from glm5sdk.serve.interface import OverloadedError
from glm5sdk.serve.params import SamplingParams

PROMPT = [3, 14, 15, 9, 26, 5]

CHANGING = st.builds(
    lambda most, least, **rest: SamplingParams(max_tokens=most, min_tokens=min(least, most), **rest),
    most=st.integers(1, 8),
    least=st.sampled_from([0, 2, 5]),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([-1, 0, 6]),
    seed=st.integers(0, 2),
    n=st.sampled_from([1, 2]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=2),
    stop_token_ids=st.sampled_from([(), (4, 5), (VOCAB + 7, 11)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 1]),
)


@given(st.lists(st.tuples(PROMPTS, CHANGING), min_size=1, max_size=3), CONFIGS)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_changed_logits_are_those_of_a_plain_loop(requests, config):
    engine = make_engine(num_pages=240, **config)
    results = run(engine, {str(i): request for i, request in enumerate(requests)})
    engine.close()
    for name, (prompt, params) in enumerate(requests):
        for index in range(params.n):
            tokens, reason = plainly(prompt, params, index)
            result = results[str(name), index]
            assert (result.token_ids, result.finish_reason) == (tokens, reason)
            if params.logprobs is not None:  # of the model, before any change
                want = reference_logprobs([*prompt, *tokens])[len(prompt) - 1 :]
                assert [p.logprob for p in result.logprobs] == want


def test_the_best_tokens_are_the_models_and_ties_go_to_the_lower_id():
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=0, logprobs=20, prompt_logprobs=20)
    result = run(make_engine(max_num_batched_tokens=2), {"a": (PROMPT, params)})["a", 0]
    tokens = [*PROMPT, *result.token_ids]
    with torch.no_grad():
        logits = make_model()(torch.tensor([tokens]))[0].double()
    want = logits.log_softmax(-1)
    for place, entry in enumerate([*result.prompt_logprobs[1:], *result.logprobs]):
        order = sorted(range(VOCAB), key=lambda token: (-logits[place, token].item(), token))[:20]
        assert [token for token, _ in entry.top] == order
        assert entry.token_id == tokens[place + 1]
        for token, value in [*entry.top, (entry.token_id, entry.logprob)]:
            assert math.isclose(value, want[place, token].item(), abs_tol=1e-4)


def test_a_reported_seed_draws_the_same_again():
    engine = make_engine()
    first = run(engine, {"a": (PROMPT, SamplingParams(max_tokens=8, n=2, ignore_eos=True))})
    assert engine.stats().finished == 1  # both sequences end in one step
    assert first["a", 1].seed == first["a", 0].seed + 1
    for index in range(2):
        params = SamplingParams(max_tokens=8, seed=first["a", index].seed, ignore_eos=True)
        assert run(engine, {"b": (PROMPT, params)})["b", 0].token_ids == first["a", index].token_ids
    second = run(engine, {"a": (PROMPT, SamplingParams(max_tokens=8))})
    assert second["a", 0].seed != first["a", 0].seed


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1 - 128])
def test_seeds_at_both_ends(seed):
    params = SamplingParams(max_tokens=3, seed=seed, n=2)
    results = run(make_engine(), {"a": (PROMPT, params)})
    assert [results["a", i].token_ids for i in range(2)] == [alone(PROMPT, params, index=i) for i in range(2)]


@pytest.mark.parametrize("drafts", [0, 1, 8])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_models_last_position_is_used(drafts, async_scheduling):
    """A context that is full ends the sequence; the last token is drawn from the last position."""
    model = make_model()
    longest = model.config.max_position_embeddings
    engine = Engine(model, None, EngineConfig(
        page_size=64, num_pages=17, max_num_batched_tokens=4096, speculative_tokens=drafts,
        async_scheduling=async_scheduling,
    ))  # fmt: skip
    prompt = [3 + i % 50 for i in range(longest - 6)]
    params = SamplingParams(max_tokens=None, seed=0, ignore_eos=True)
    result = run(engine, {"a": (prompt, params)})["a", 0]
    assert len(result.token_ids) == 6 and result.finish_reason == "length"
    assert result.token_ids == alone(prompt, SamplingParams(max_tokens=6, seed=0, ignore_eos=True))
    with pytest.raises(CapacityError, match=f"needs at most {longest - 1}"):
        engine.add("b", [*prompt, 3, 3, 3, 3, 3, 3], params)
    engine.close()
    check_drained(engine)


@pytest.mark.parametrize(
    "prompt, params, error",
    [
        ([], {}, "empty"),
        ([VOCAB], {}, "prompt token is 64"),
        ([-1], {}, "prompt token is -1"),
        ([1.0], {}, "prompt token is 1.0"),
        ([True], {}, "prompt token"),
        (["a"], {}, "prompt token"),
        ([2**70], {}, "prompt token"),
        ("abc", {}, "prompt_token_ids is str"),
        (None, {}, "prompt_token_ids"),
        (7, {}, "prompt_token_ids"),
        ([3], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([3], {"stop": "x"}, "tokenizer"),
        ([3] * 40, {"max_tokens": 500}, "num_pages"),
        ([3] * 300, {}, "num_pages"),
    ],
)
def test_what_can_never_run_is_refused_at_the_door(prompt, params, error):
    engine = make_engine(num_pages=64)
    with pytest.raises((ContractError, CapacityError), match=error):
        engine.add("a", prompt, SamplingParams(**params))
    assert not engine.has_work() and engine.stats().waiting == 0
    run(engine, {"a": ([3], SamplingParams(max_tokens=1))})


def test_names_are_unique_among_the_living():
    engine = make_engine()
    engine.add("a", PROMPT, SamplingParams())
    with pytest.raises(ContractError, match="request_id is 'a'"):
        engine.add("a", PROMPT, SamplingParams())
    with pytest.raises(ContractError, match="adapter is 'nobody'"):
        engine.add("b", PROMPT, SamplingParams(), adapter="nobody")
    assert engine.abort("a") and not engine.abort("a") and not engine.abort("b")
    assert [d.finish_reason for d in engine.step()] == ["abort"]
    check_drained(engine)
    run(engine, {"a": (PROMPT, SamplingParams())})


def test_a_full_queue_refuses_and_keeps_what_it_has():
    engine = make_engine(max_num_seqs=1, max_queued_requests=2)
    two = SamplingParams(max_tokens=2, n=2, seed=0)
    engine.add("a", PROMPT, two)
    with pytest.raises(OverloadedError, match="max_queued_requests would be 4") as caught:
        engine.add("b", PROMPT, two)
    assert caught.value.retry_after > 0
    assert engine.stats().rejected == 1 and engine.stats().waiting == 2
    assert {name for name, _ in run(engine, {})} == {"a"}


def test_a_queue_that_takes_one_of_two_continuations_takes_none():
    engine = Engine(make_model(), None, EngineConfig(page_size=4, num_pages=64, max_num_seqs=1),
                    admission=DynamicBatching(4, 4, 0.0, max_queue_size=3))  # fmt: skip
    two = SamplingParams(max_tokens=2, n=2, seed=0)
    engine.add("a", PROMPT, two)
    with pytest.raises(OverloadedError, match="max_queue_size 3"):
        engine.add("b", PROMPT, two)
    assert engine.stats().waiting == 2 and engine.stats().rejected == 1
    assert {name for name, _ in run(engine, {})} == {"a"}


def test_dynamic_batching_starts_requests_together():
    now = [0.0]
    engine = Engine(make_model(), None, EngineConfig(page_size=4, num_pages=64, async_scheduling=False),
                    admission=DynamicBatching(4, 2, 0.5), clock=lambda: now[0])  # fmt: skip
    one = SamplingParams(max_tokens=1, seed=0)
    engine.add("a", PROMPT, one)
    assert engine.step() == [] and engine.stats().running == 0
    engine.add("b", PROMPT, one)
    engine.add("c", PROMPT, one)
    assert [d.request_id for d in engine.step()] == ["a", "b"]
    now[0] = 0.49
    assert engine.step() == []
    now[0] = 0.5
    assert [d.request_id for d in engine.step()] == ["c"]
    check_drained(engine)


TEXT_VOCAB = 320


def _text_engine(**config) -> Engine:
    torch.manual_seed(1)
    changes = {"vocab_size": TEXT_VOCAB, "eos_token_id": STOPS}
    model = Glm5ForCausalLM(make_model().config.replace(**changes)).eval()
    return Engine(model, make_tokenizer(), EngineConfig(page_size=4, num_pages=99, **config))


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_stop_strings_end_where_a_search_in_the_whole_text_finds_them(drafts, async_scheduling):
    engine = _text_engine(speculative_tokens=drafts, async_scheduling=async_scheduling)
    tokenizer = engine.tokenizer
    free = SamplingParams(max_tokens=24, temperature=1.0, seed=4, ignore_eos=True)
    whole = _collect(engine, free)
    assert whole.text == tokenizer.decode(whole.tokens)
    readable = [i for i, c in enumerate(whole.text) if c != "\ufffd"]
    assert len(readable) > 4
    for at in readable[2:6]:
        stop = whole.text[at : at + 2] if at + 1 in readable else whole.text[at]
        for least in (0, 6):
            params = SamplingParams(
                max_tokens=24, temperature=1.0, seed=4, ignore_eos=True, stop=[stop], min_tokens=least
            )
            got = _collect(engine, params)
            count = next(n for n in range(least + 1, 25) if stop in tokenizer.decode(whole.tokens[:n]) or n == 24)
            assert got.tokens == whole.tokens[:count]
            if got.reason == "stop":
                assert got.stop_reason == stop and (least or got.text == whole.text[: whole.text.index(stop)])
    engine.close()
    check_drained(engine)


class _collect:
    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        engine.add("x", [40, 41, 42], params)
        self.text, self.tokens, self.reason, self.stop_reason = "", [], None, None
        while engine.has_work():
            for delta in engine.step():
                assert self.reason is None
                self.text += delta.text
                self.tokens += delta.token_ids
                self.reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        check_drained(engine)
