"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from glm5sdk.serve.outputs import CompletionOutput, Delta, RequestOutput, TokenLogprob
from glm5sdk.serve.server.completion_fields import CompletionRequest, prompts_of
from glm5sdk.serve.server.errors import ApiError, error_event
from glm5sdk.serve.server.generation import Job, PrimedDeltas, collect, deltas, headers_of, primed, usage_of
from glm5sdk.serve.server.json_body import read_json
from glm5sdk.serve.server.logprob_forms import completion_logprobs, prompt_logprobs_form
from glm5sdk.serve.server.sampling_fields import checked_id, checked_priority, sampling_params, structured_output
from glm5sdk.serve.server.service import Service
from glm5sdk.serve.server.sse import DONE, EventStream, event

__all__ = ["completions"]

DEFAULT_MAX_TOKENS = 16


async def completions(service: Service, request: Request) -> Response:
    """Continue one prompt or several, in one piece or as a stream."""
    body = read_json(request, CompletionRequest, service.settings)
    adapter = service.adapter_of(body.model)
    for name, hint in (("suffix", "a model that continues texts fills no gaps"), ("prompt_embeds", "send tokens")):
        if getattr(body, name):
            raise ApiError(400, f"{name}: is given, needs to be absent: {hint}", param=name,
                           code="unsupported_parameter")  # fmt: skip
    if body.echo and body.stream and body.logprobs is not None:
        raise ApiError(400, "echo: is given with stream and logprobs, needs an answer in one piece", param="echo")
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    # An engine step always draws: for max_tokens 0, which scores a prompt, one token is drawn and dropped.
    params = sampling_params(
        body, service.text.defaults, max_tokens=1 if asked == 0 else asked, logprobs=body.logprobs,
        structured=structured_output(body),
    )  # fmt: skip
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=body.logprobs)
    priority = checked_priority(body)
    service.admission.check()
    jobs = [
        Job(ids, params, priority, body.cache_salt or "", adapter, text)
        for text, ids in await prompts_of(body, service.text)
    ]
    answer = _Answer(service, body, jobs, asked == 0)
    if not body.stream:
        return await answer.whole()
    source = await primed(deltas(service, answer.id, jobs))
    return EventStream(
        answer.events(source),
        source,
        lambda error: event(error_event(error)) + DONE,
        headers_of(source.weight_version, answer.id),
        service.settings.request_timeout,
    )


class _Answer:
    def __init__(self, service: Service, body: CompletionRequest, jobs: list[Job], scores_only: bool) -> None:
        self.id = checked_id(body, "cmpl-")
        self.service = service
        self.body = body
        self.jobs = jobs
        self.scores_only = scores_only
        self.head: dict[str, Any] = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or service.model_name,
            "system_fingerprint": None,
        }

    def prompt_text(self, job: Job) -> str:
        if job.prompt is not None:
            return job.prompt
        return self.service.text.tokenizer.decode(job.prompt_token_ids, skip_special_tokens=False)

    async def whole(self) -> Response:
        outputs = await collect(self.service, self.id, self.jobs)
        if self.scores_only:
            for output in outputs:
                output.outputs = [
                    replace(one, text="", token_ids=[], logprobs=None, finish_reason="length", stop_reason=None)
                    for one in output.outputs
                ]
        made = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        version = outputs[0].outputs[0].weight_version
        answer = {
            **self.head,
            "choices": [
                self._choice(position, job, output, one)
                for position, (job, output) in enumerate(zip(self.jobs, outputs, strict=True))
                for one in output.outputs
            ],
            "usage": usage_of(
                sum(len(job.prompt_token_ids) for job in self.jobs), sum(o.cached_tokens for o in outputs), made
            ),
            "weight_version": version,
        }
        return Response(msgspec.json.encode(answer), 200, headers_of(version, self.id), "application/json")

    def _choice(self, position: int, job: Job, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        before = self.prompt_text(job) if self.body.echo else ""
        choice: dict[str, Any] = {
            "index": position * job.params.n + one.index,
            "text": before + one.text,
            "logprobs": None,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
            "weight_version": one.weight_version,
            "seed": one.seed,
        }
        if self.body.logprobs is not None:
            entries: list[TokenLogprob | None] = list(one.logprobs or [])
            ids = one.token_ids
            if self.body.echo:
                entries, ids = [*(output.prompt_logprobs or []), *entries], [*job.prompt_token_ids, *ids]
            choice["logprobs"] = completion_logprobs(entries, ids, self.service.text, 0)
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_form(output.prompt_logprobs, self.service.text)
        if self.body.return_token_ids:
            choice["token_ids"] = one.token_ids
            choice["prompt_token_ids"] = job.prompt_token_ids
        return choice

    async def events(self, source: PrimedDeltas) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options
        with_usage = bool(options and options.include_usage)
        each_usage = bool(options and options.continuous_usage_stats)
        prompt = sum(len(job.prompt_token_ids) for job in self.jobs)
        lengths: dict[int, int] = {}
        cached = dict.fromkeys(range(len(self.jobs)), 0)
        made, version = 0, ""
        async with aclosing(source):
            async for position, delta in source:
                job, version = self.jobs[position], delta.weight_version
                cached[position] = max(cached[position], delta.cached_tokens)
                made += 0 if self.scores_only else len(delta.token_ids)
                choice = self._step(position, job, delta, lengths)
                usage = usage_of(prompt, sum(cached.values()), made) if each_usage else None
                yield self._chunk([choice], version, with_usage, usage)
        if with_usage:
            yield self._chunk([], version, True, usage_of(prompt, sum(cached.values()), made))
        yield DONE

    def _step(self, position: int, job: Job, delta: Delta, lengths: dict[int, int]) -> dict[str, Any]:
        index = position * job.params.n + delta.index
        text = "" if self.scores_only else delta.text
        opening = index not in lengths
        if opening and self.body.echo:
            text = self.prompt_text(job) + text
        start = lengths.get(index, 0)
        lengths[index] = start + len(text)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if self.scores_only and delta.finish_reason else delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if delta.finish_reason:
            choice["seed"] = delta.seed
        if delta.logprobs and not self.scores_only:
            choice["logprobs"] = completion_logprobs(delta.logprobs, delta.token_ids, self.service.text, start)
        if self.body.return_token_ids:
            choice["token_ids"] = [] if self.scores_only else delta.token_ids
            if opening:
                choice["prompt_token_ids"] = job.prompt_token_ids
        return choice

    def _chunk(
        self, choices: list[dict[str, Any]], version: str, with_usage: bool, usage: dict[str, Any] | None
    ) -> bytes:
        chunk = {**self.head, "choices": choices, "weight_version": version}
        if with_usage or usage:
            chunk["usage"] = usage
        return event(chunk)
