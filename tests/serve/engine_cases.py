"""A model of a few milliseconds a step, plain-loop oracles, and a driver for random schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from hypothesis import strategies as st

from glm5sdk import ops
from glm5sdk.models.glm5 import Glm5ForCausalLM, preset
from glm5sdk.serve.config import EngineConfig
from glm5sdk.serve.engine import Engine
from glm5sdk.serve.outputs import Delta, TokenLogprob
from glm5sdk.serve.params import SamplingParams

VOCAB = 64
STOPS = (1, 2)
CACHES = {
    "auto": {},
    "fp8_ds_mla": {"kv_format": "fp8_ds_mla"},
    "fp8": {"kv_format": "fp8_ds_mla", "index_format": "fp8"},
}


@cache
def make_model() -> Glm5ForCausalLM:
    """Two layers, an MTP layer, a selection of 8 keys: prompts are longer than that."""
    torch.manual_seed(0)
    config = preset("tiny", num_hidden_layers=2, index_topk=8, vocab_size=VOCAB, hidden_size=64, intermediate_size=96,
                    moe_intermediate_size=32, initializer_range=0.15)  # fmt: skip
    return Glm5ForCausalLM(config.replace(eos_token_id=STOPS, pad_token_id=0)).eval()


def make_engine(**settings) -> Engine:
    settings = {"page_size": 4, "num_pages": 64, "async_scheduling": False} | settings
    return Engine(make_model(), None, EngineConfig(**settings))


@dataclass
class Result:
    """Deltas of one sequence, put together; they may not go on after a finish_reason."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    seed: int | None = None
    error: str | None = None

    def add(self, delta: Delta) -> None:
        assert self.finish_reason is None, "a delta after the last one"
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.cached_tokens, self.seed, self.error = delta.cached_tokens, delta.seed, delta.error


Results = dict[tuple[str, int], Result]


def take_step(engine: Engine, results: Results) -> None:
    for delta in engine.step():
        results.setdefault((delta.request_id, delta.index), Result()).add(delta)


def run(engine: Engine, requests: dict[str, tuple[Sequence[int], SamplingParams]], steps: int = 2000) -> Results:
    """Everything at once, to the end; then nothing may be left behind."""
    results: Results = {}
    for name, (prompt, params) in requests.items():
        engine.add(name, prompt, params)
    for _ in range(steps):
        if not engine.has_work():
            check_drained(engine)
            return results
        take_step(engine, results)
    raise AssertionError(f"still at work after {steps} steps: {engine.stats()}")


def check_drained(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (0, 0, 0)
    assert stats.pages_free == stats.pages_total
    engine.pages.check()
    if engine.scheduler.cache is not None:
        engine.scheduler.cache.check()
        assert engine.scheduler.cache.cached_pages == stats.pages_cached == stats.pages_total - engine.pages.free


def alone(prompt: Sequence[int], params: SamplingParams, kv_cache_dtype: str = "auto", index: int = 0) -> list[int]:
    """`model.generate` for one prompt, without what pads its end."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(STOPS))
    return list(_alone(tuple(prompt), params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p,
                       params.seed + index, tuple(sorted(stops)), kv_cache_dtype))  # fmt: skip


@cache
def _alone(prompt, max_tokens, temperature, top_k, top_p, min_p, seed, stops, kv_cache_dtype) -> tuple[int, ...]:
    out = make_model().generate(
        torch.tensor([prompt]), max_new_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, seed=seed, stop_token_ids=stops, **CACHES[kv_cache_dtype],
    )[0, len(prompt) :].tolist()  # fmt: skip
    end = next((i + 1 for i, token in enumerate(out) if token in stops), len(out))
    return tuple(out[:end])


@torch.no_grad()
def plainly(prompt: Sequence[int], params: SamplingParams, index: int = 0) -> tuple[list[int], str]:
    """One token after the other, no cache, every change of the logits spelled out; tokens and finish reason."""
    model, tokens, made = make_model(), list(prompt), []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(STOPS))
    while True:
        logits = model(torch.tensor([tokens]))[0, -1]
        for token in range(VOCAB):
            value = logits[token]
            if params.repetition_penalty != 1.0 and token in tokens:
                value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
            if token in made:
                value = value - (params.frequency_penalty * made.count(token) + params.presence_penalty)
            value = value + params.logit_bias.get(token, 0.0)
            if token in stops and len(made) < params.min_tokens:
                value = -torch.inf
            logits[token] = value
        token = _draw(logits, params, index, len(tokens))
        tokens.append(token)
        made.append(token)
        if token in stops:
            return made, "stop"
        if len(made) == params.max_tokens:
            return made, "length"


def _draw(logits: torch.Tensor, params: SamplingParams, index: int, position: int) -> int:
    settings = (
        (params.temperature, torch.float32),
        (max(params.top_k, 0), torch.int32),
        (params.top_p, torch.float32),
        (params.min_p, torch.float32),
        (params.seed + index, torch.int64),
        (position, torch.int64),
    )
    return int(ops.sample(logits[None], *(torch.tensor([value], dtype=dtype) for value, dtype in settings))[0])


@torch.no_grad()
def reference_logprobs(tokens: Sequence[int]) -> list[float]:
    """`model.logprobs` of each token after the first."""
    ids = torch.tensor([tokens])
    return make_model().logprobs(ids[:, :-1], ids[:, 1:])[0].tolist()


# Few different tokens and few beginnings: prompts share prefixes, inside pages too.
PROMPTS = st.builds(
    lambda head, tail: [3 + t for t in head * [7] + [head] * 3 + tail],
    st.integers(0, 9), st.lists(st.integers(0, 2), min_size=0, max_size=12),
)  # fmt: skip

PLAIN_PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 3),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (9,), (20, 30, 40)]),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    logprobs=st.sampled_from([None, None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, None, 1]),
)

CONFIGS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([1, 3, 8, 64]),
        "page_size": st.sampled_from([1, 2, 3, 4, 16]),
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
        "speculative_tokens": st.sampled_from([0, 0, 1, 3]),
        "async_scheduling": st.booleans(),
        "share_draft_indices": st.booleans(),
    }
)
