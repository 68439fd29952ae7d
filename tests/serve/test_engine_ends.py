"""Aborts, failures, drained steps and closing: everybody hears of the end, and every page comes back."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from engine_cases import CACHES, Results, alone, check_drained, make_engine, make_model, run, take_step
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5sdk.core.errors import ContractError, UnavailableError
from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.serve import LLM
from glm5sdk.serve.async_engine import AsyncEngine
from glm5sdk.serve.params import SamplingParams

PROMPT = [3, 4, 5, 6, 7, 8, 9]
LONG = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)


def finish(engine, results: Results) -> Results:
    for _ in range(2000):
        if not engine.has_work():
            check_drained(engine)
            return results
        take_step(engine, results)
    raise AssertionError(engine.stats())


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("drafts", [0, 2])
def test_an_abort_frees_its_pages_before_it_returns(async_scheduling, drafts):
    engine = make_engine(async_scheduling=async_scheduling, speculative_tokens=drafts, max_num_batched_tokens=4)
    stays = replace(LONG, max_tokens=80)
    engine.add("stays", [10, 11, 12], stays)
    results: Results = {}
    for life in range(9):
        name = f"goes{life}"
        engine.add(name, [*PROMPT, 20 + life], replace(LONG, n=3))
        for _ in range(life):
            take_step(engine, results)
        held = {page for s in engine.scheduler.running if s.request_id == "stays" for page in s.pages}
        assert engine.abort(name)
        stats = engine.stats()
        assert (stats.running, stats.waiting) == (1 if held else 0, 0 if held else 1)
        assert stats.pages_free >= stats.pages_total - len(held) - life  # what stays may have grown since
    finish(engine, results)
    assert results["stays", 0].token_ids == alone([10, 11, 12], stays)
    assert {r.finish_reason for (name, _), r in results.items() if name != "stays"} == {"abort"}
    engine.close()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_preempted_sequence_tells_its_prompt_logprobs_once(cached, async_scheduling):
    engine = make_engine(num_pages=9, page_size=3, enable_prefix_caching=cached, async_scheduling=async_scheduling)
    params = SamplingParams(max_tokens=16, seed=0, ignore_eos=True, prompt_logprobs=0)
    results = run(engine, {str(i): ([3 + i, *PROMPT[1:]], params) for i in range(4)})
    assert engine.stats().preempted > 0
    assert [len(result.prompt_logprobs) for result in results.values()] == [7, 7, 7, 7]


def test_what_a_drained_step_ended_is_told_even_when_it_is_aborted_then():
    engine = make_engine(async_scheduling=True)
    params = SamplingParams(max_tokens=2, seed=0, ignore_eos=True)
    results: Results = {}
    engine.add("a", PROMPT, params)
    take_step(engine, results)
    engine.drain()
    engine.abort("a")
    finish(engine, results)
    assert results["a", 0].finish_reason == "length" and results["a", 0].token_ids == alone(PROMPT, params)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 14)), min_size=1, max_size=6),
    st.integers(0, 12),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_failed_step_ends_its_own_requests_and_no_others(requests, failing, async_scheduling, early):
    """Those that go on, or come later, get the right tokens: nothing that the failed step left is ever read."""
    engine = make_engine(async_scheduling=async_scheduling, num_pages=40, max_num_batched_tokens=9)
    calls = [0]
    model = engine.model

    def hidden_states(ids, context):
        calls[0] += 1
        if calls[0] - 1 == failing and early:
            raise RuntimeError("out of order")
        hidden = Glm5ForCausalLM.hidden_states(model, ids, context)
        if calls[0] - 1 == failing:
            hidden.zero_()
            raise RuntimeError("out of order")
        return hidden

    model.hidden_states = hidden_states
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=0, ignore_eos=True, logprobs=0)
    results: Results = {}
    try:
        for step in range(15):
            for name, (kind, start) in enumerate(requests):
                if step == start:
                    engine.add(str(name), [*PROMPT, 20 + kind // 3], params)
            take_step(engine, results)
        finish(engine, results)
    finally:
        del model.hidden_states
    again = run(engine, {"again": ([*PROMPT, 20], params)})
    engine.close()
    assert again["again", 0].token_ids == alone([*PROMPT, 20], params)
    for name, (kind, _) in enumerate(requests):
        result = results[str(name), 0]
        want = alone([*PROMPT, 20 + kind // 3], params)
        if result.finish_reason == "error":
            assert result.error == "RuntimeError: out of order"
            assert result.token_ids == want[: len(result.token_ids)]
        else:
            assert result.token_ids == want


def test_closing_ends_what_runs():
    engine = make_engine(async_scheduling=True)
    engine.add("a", PROMPT, LONG)
    take_step(engine, {})
    engine.close()
    assert engine.pages.free + engine.stats().pages_cached == engine.pages.total
    check_drained(engine)


def test_readers_of_an_event_loop_get_their_own_tokens_and_may_leave():
    engine = make_engine(async_scheduling=True, speculative_tokens=1)
    client = AsyncEngine(engine)

    async def read(name, prompt, leave_after=None):
        tokens, reason = [], None
        stream = client.generate(prompt, LONG, request_id=name)
        async for delta in stream:
            tokens += delta.token_ids
            reason = delta.finish_reason
            if leave_after is not None and len(tokens) >= leave_after:
                await stream.aclose()
                break
        return tokens, reason

    async def cancelled(name, prompt, after):
        task = asyncio.create_task(read(name, prompt))
        await asyncio.sleep(after)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def everything():
        prompts = [[*PROMPT, 20 + i] for i in range(6)]
        whole = [read(f"whole{i}", prompt) for i, prompt in enumerate(prompts)]
        left = [read(f"left{i}", prompt, i) for i, prompt in enumerate(prompts)]
        gone = [cancelled(f"gone{i}", prompt, i / 100) for i, prompt in enumerate(prompts)]
        found = await asyncio.gather(*whole, *left, *gone)
        for (tokens, reason), prompt in zip(found[:6], prompts, strict=True):
            assert (tokens, reason) == (alone(prompt, LONG), "length")
        with pytest.raises(ContractError, match="empty"):
            await anext(client.generate([], LONG, request_id="none"))
        for _ in range(500):
            if client.stats().running + client.stats().waiting == 0:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(client.stats())

    asyncio.run(everything())
    client.close()
    check_drained(engine)
    with pytest.raises(UnavailableError, match="closed"):
        asyncio.run(read("late", PROMPT))


def test_closing_lets_no_reader_wait():
    client = AsyncEngine(make_engine())

    async def read():
        stream = client.generate(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True), request_id="a")
        first = await anext(stream)
        threading.Thread(target=client.close).start()
        return [first, *[delta async for delta in stream]]

    deltas = asyncio.run(asyncio.wait_for(read(), 30))
    assert deltas[-1].finish_reason in ("error", "abort")


@pytest.mark.parametrize("kv_cache_dtype", list(CACHES))
def test_llm_returns_outputs_in_order(kv_cache_dtype):
    llm = LLM(make_model(), page_size=4, num_pages=64, kv_cache_dtype=kv_cache_dtype, max_num_seqs=3)
    prompts = [[*PROMPT, 20 + i] for i in range(7)]
    params = [SamplingParams(max_tokens=3 + i, temperature=0.7, seed=i, n=1 + i % 2) for i in range(7)]
    outputs = llm.generate(prompts, params)
    for prompt, setting, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_token_ids == prompt and [o.index for o in output.outputs] == list(range(setting.n))
        assert [o.token_ids for o in output.outputs] == [
            alone(prompt, setting, kv_cache_dtype, i) for i in range(setting.n)
        ]
    assert llm.generate(prompts[0], params[0])[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert llm.generate([]) == []
    with pytest.raises(ContractError, match="one a prompt: 2"):
        llm.generate(prompts[:2], params[:1])
    with pytest.raises(ContractError, match="prompt token"):
        llm.generate([*prompts, [99]], SamplingParams(max_tokens=1))
    with pytest.raises(ContractError, match="tokenizer"):
        llm.generate("text")
    with pytest.raises(ContractError, match="unheard_of"):
        LLM(make_model(), unheard_of=1)
    assert len(llm.generate(prompts[1], SamplingParams(max_tokens=1))) == 1
    llm.shutdown()
    check_drained(llm.engine)


def test_a_request_that_only_starts_beside_the_failure_goes_on(monkeypatch):
    """The step behind the failed one was made before anybody knew, and waits for a token that was never drawn."""
    engine = make_engine(async_scheduling=True, max_num_batched_tokens=len(PROMPT))
    failures = [RuntimeError("out of order")]

    def hidden_states(ids, context):
        if failures:
            raise failures.pop()
        return Glm5ForCausalLM.hidden_states(engine.model, ids, context)

    monkeypatch.setattr(engine.model, "hidden_states", hidden_states, raising=False)
    results: Results = {}
    engine.add("first", PROMPT, LONG)
    engine.add("second", [10, 11, 12], LONG)
    finish(engine, results)
    engine.close()
    assert (results["first", 0].finish_reason, results["first", 0].error) == ("error", "RuntimeError: out of order")
    assert results["second", 0].token_ids == alone([10, 11, 12], LONG)
