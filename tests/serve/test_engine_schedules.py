"""Whatever the schedule, a request gets what `model.generate` gives it alone, and nothing is left behind."""

from __future__ import annotations

import pytest
from engine_cases import (
    CACHES,
    CONFIGS,
    PLAIN_PARAMS,
    PROMPTS,
    Results,
    alone,
    check_drained,
    make_engine,
    reference_logprobs,
    run,
    take_step,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5sdk.serve.params import SamplingParams

REQUESTS = st.lists(
    st.tuples(
        PROMPTS,
        PLAIN_PARAMS,
        st.integers(0, 12),  # step at which it comes
        st.sampled_from([None, None, None, 0, 1, 2, 5, 9]),  # steps after which it is aborted
        st.integers(-1, 1),  # priority
        st.sampled_from(["", "", "salt"]),
    ),
    min_size=1,
    max_size=6,
)


@given(REQUESTS, CONFIGS, st.integers(0, 12), st.sampled_from(["auto", "auto", *CACHES]))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_any_schedule_gives_what_each_request_gets_alone(requests, config, spare_pages, kv_cache_dtype):
    size, drafts = config["page_size"], config["speculative_tokens"]
    longest = max(-(-(len(prompt) + params.max_tokens + drafts) // size) for prompt, params, *_ in requests)
    engine = make_engine(num_pages=longest + spare_pages, kv_cache_dtype=kv_cache_dtype, **config)
    results: Results = {}
    step = 0
    while step < 13 or engine.has_work():
        for name, (prompt, params, start, life, priority, salt) in enumerate(requests):
            if step == start:
                engine.add(str(name), prompt, params, priority=priority, cache_salt=salt)
            if life is not None and step == start + life:
                free = engine.stats().pages_free
                was_alive = engine.abort(str(name))
                assert engine.stats().pages_free >= free
                assert not engine.abort(str(name)) or not was_alive
        take_step(engine, results)
        step += 1
        assert step < 3000, engine.stats()
    engine.close()
    check_drained(engine)
    stats = engine.stats()
    assert stats.generated_tokens == sum(len(result.token_ids) for result in results.values())
    assert stats.finished + stats.aborted == len(requests) and stats.rejected == 0
    assert stats.accepted_tokens <= stats.drafted_tokens and (drafts or not stats.drafted_tokens)
    for name, (prompt, params, _, life, *_) in enumerate(requests):
        for index in range(params.n):
            result = results[str(name), index]
            want = alone(prompt, params, kv_cache_dtype, index)
            assert result.seed == params.seed + index and result.error is None
            if result.finish_reason == "abort":
                assert life is not None and result.token_ids == want[: len(result.token_ids)]
            else:
                assert result.token_ids == want
                ended = want[-1] in params.stop_token_ids or (not params.ignore_eos and want[-1] in (1, 2))
                assert result.finish_reason == ("stop" if ended else "length")
                assert result.stop_reason == (want[-1] if want[-1] in params.stop_token_ids else None)
            if kv_cache_dtype == "auto":
                _check_logprobs(prompt, params, index, result)


def _check_logprobs(prompt, params, index, result):
    """Bit for bit the model's own."""
    want = reference_logprobs([*prompt, *result.token_ids]) if len(prompt) + len(result.token_ids) > 1 else []
    if params.logprobs is None:
        assert result.logprobs == []
    else:
        assert [p.token_id for p in result.logprobs] == result.token_ids
        assert [p.logprob for p in result.logprobs] == want[len(prompt) - 1 :]
        assert all(len(p.top) == params.logprobs for p in result.logprobs)
    if params.prompt_logprobs is None or index > 0:
        assert result.prompt_logprobs is None
    elif result.token_ids:
        assert result.prompt_logprobs[0] is None
        assert [p.token_id for p in result.prompt_logprobs[1:]] == prompt[1:]
        assert [p.logprob for p in result.prompt_logprobs[1:]] == want[: len(prompt) - 1]


CROWDED = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 2, 3]),
        "max_num_seqs": st.integers(3, 5),
        "max_num_batched_tokens": st.sampled_from([5, 9, 64]),
        "speculative_tokens": st.sampled_from([0, 1, 2]),
        "async_scheduling": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
    }
)
DISTURBANCES = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from(["flush", "drain", "pause", "resume", "abort"]), st.integers(0, 5)),
    max_size=4,
)


@given(
    st.lists(st.tuples(PROMPTS, st.integers(4, 12), st.sampled_from([1, 1, 3])), min_size=3, max_size=6),
    CROWDED,
    st.integers(0, 8),
    DISTURBANCES,
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_crowded_pools_and_disturbances_change_nothing(requests, config, spare_pages, disturbances):
    """Shared prefixes, too few pages for all, and hands on every lever between the steps."""
    size, drafts = config["page_size"], config["speculative_tokens"]
    longest = max(-(-(len(prompt) + most + drafts) // size) for prompt, most, _ in requests)
    engine = make_engine(num_pages=longest + spare_pages, **config)
    levers = {"flush": engine.flush_cache, "drain": engine.drain, "pause": engine.pause, "resume": engine.resume}
    params = [SamplingParams(max_tokens=most, temperature=1.0, seed=1, n=n) for _, most, n in requests]
    results: Results = {}
    for name, (prompt, *_) in enumerate(requests):
        engine.add(str(name), prompt, params[name])
    aborted = set()
    for step in range(3000):
        for _, lever, number in [d for d in disturbances if d[0] == step]:
            if lever == "abort":
                aborted |= {str(number)} if engine.abort(str(number)) else set()
            else:
                levers[lever]()
        if step == 21:
            engine.resume()
        take_step(engine, results)
        if step > 21 and not engine.has_work():
            break
    engine.close()
    check_drained(engine)
    for name, (prompt, *_) in enumerate(requests):
        for index in range(params[name].n):
            want, result = alone(prompt, params[name], index=index), results[str(name), index]
            whole = result.finish_reason in ("stop", "length")
            assert whole or (result.finish_reason == "abort" and str(name) in aborted)
            assert result.token_ids == (want if whole else want[: len(result.token_ids)])


@pytest.mark.parametrize("drafts", [0, 2])
def test_tiny_pools_preempt_and_change_nothing(drafts):
    prompts = {str(i): [3 + i, 4, 5, 6, 7, 8, 9] for i in range(4)}
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=5, ignore_eos=True)
    engine = make_engine(num_pages=9, page_size=3, speculative_tokens=drafts, enable_prefix_caching=False)
    results = run(engine, {name: (prompt, params) for name, prompt in prompts.items()})
    assert engine.stats().preempted > 0
    assert {name: results[name, 0].token_ids for name in prompts} == {n: alone(p, params) for n, p in prompts.items()}


def test_a_prompt_that_fills_the_pool_starts_over_its_own_cached_pages():
    """The page it would copy rows from is one more than the pool has: it has to do without."""
    engine = make_engine(num_pages=2)
    prompt, params = [3, 4, 5, 6, 7, 8, 9], SamplingParams(max_tokens=1, seed=0, ignore_eos=True)
    for cached in (0, 4):
        result = run(engine, {"a": (prompt, params)}, steps=9)["a", 0]
        assert result.cached_tokens == cached and result.token_ids == alone(prompt, params)


def test_waiting_for_room_costs_no_cached_prefix():
    engine = make_engine(num_pages=6, page_size=2)
    one = SamplingParams(max_tokens=1, seed=0, ignore_eos=True)
    run(engine, {"a": ([3, 4, 5, 6], one)})
    engine.add("b", [9, 9, 9, 9, 9, 9], SamplingParams(max_tokens=2, seed=0, ignore_eos=True))
    take_step(engine, {})
    cached = engine.stats().pages_cached
    engine.add("c", [8] * 8, one)  # does not fit beside b
    results: Results = {}
    take_step(engine, results)
    assert cached == 2 and engine.scheduler.cache.evictable_pages >= 1
    while engine.has_work():
        take_step(engine, results)
    assert results["c", 0].token_ids == alone([8] * 8, one)


def _drafted(engine, prompt, params) -> tuple[int, int]:
    before = engine.stats()
    assert run(engine, {"a": (prompt, params)})["a", 0].token_ids == alone(prompt, params)
    after = engine.stats()
    return after.drafted_tokens - before.drafted_tokens, after.accepted_tokens - before.accepted_tokens


@given(st.lists(PROMPTS, min_size=2, max_size=5), st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 7, 64]))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_drafts_do_not_depend_on_where_the_prefix_came_from(prompts, page_size, drafts, chunk):
    """Rows of the MTP layer look ahead by a token: one that was written for another token would cost drafts."""
    params = SamplingParams(max_tokens=12, temperature=3.0, seed=1, ignore_eos=True)
    sizes = dict(page_size=page_size, speculative_tokens=drafts, num_pages=200, max_num_batched_tokens=chunk)
    warm = make_engine(**sizes)
    for prompt in prompts:
        assert _drafted(warm, prompt, params) == _drafted(make_engine(**sizes), prompt, params)
    assert warm.stats().drafted_tokens > 0


@pytest.mark.parametrize("temperature", [1e-5, 1e5])
@pytest.mark.parametrize("drafts", [0, 2])
def test_the_coldest_and_the_hottest_draw(temperature, drafts):
    prompts = [[3, 4, 5, 6 + i] for i in range(3)]
    params = SamplingParams(max_tokens=10, temperature=temperature, seed=11, ignore_eos=True)
    results = run(make_engine(speculative_tokens=drafts), {str(i): (p, params) for i, p in enumerate(prompts)})
    assert [results[str(i), 0].token_ids for i in range(3)] == [alone(p, params) for p in prompts]


def test_lower_priorities_go_first_and_yield_last():
    engine = make_engine(max_num_seqs=1)
    params = SamplingParams(max_tokens=2, seed=0, ignore_eos=True)
    for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", -1)]:
        engine.add(name, [3, 4, 5], params, priority=priority)
    ended = []
    while engine.has_work():
        ended += [delta.request_id for delta in engine.step() if delta.finish_reason]
    assert ended == ["d", "a", "c", "b"]
    engine = make_engine(num_pages=6, page_size=3, enable_prefix_caching=False)
    long = SamplingParams(max_tokens=11, seed=0, ignore_eos=True)
    for name, priority in [("low", 1), ("high", 0)]:
        engine.add(name, [3, 4, 5, 6], long, priority=priority)
    ended = []
    while engine.has_work():
        ended += [delta.request_id for delta in engine.step() if delta.finish_reason]
    assert ended == ["high", "low"] and engine.stats().preempted > 0


def test_a_prefix_hit_is_counted_and_changes_no_bit():
    engine = make_engine()
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=3, seed=0)
    prompt = [*range(3, 20)]
    cold, warm = (run(engine, {"a": (prompt, params)})["a", 0] for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 16)
    assert cold.token_ids == warm.token_ids and cold.logprobs == warm.logprobs
    answered = run(engine, {"b": ([*prompt, *cold.token_ids, 4], params)})["b", 0]
    assert answered.cached_tokens == 22
    assert answered.token_ids == alone([*prompt, *cold.token_ids, 4], params)
    engine.add("c", prompt, params, cache_salt="other")
    results: Results = {}
    while engine.has_work():
        take_step(engine, results)
    assert results["c", 0].cached_tokens == 0 and results["c", 0].token_ids == cold.token_ids


def test_sequences_of_one_request_read_its_prompt_once():
    prompt = list(range(3, 35))
    params = SamplingParams(n=8, max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
    engine = make_engine(page_size=4, max_num_batched_tokens=16)
    results = run(engine, {"a": (prompt, params)})
    # All but the last page of the prompt: its last token is computed for each.
    assert [results["a", i].cached_tokens for i in range(8)] == [0] + [28] * 7
    assert [results["a", i].token_ids for i in range(8)] == [alone(prompt, params, index=i) for i in range(8)]
