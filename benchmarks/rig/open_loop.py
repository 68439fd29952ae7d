"""Requests that come at their own times, and what they wait for."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from peers.traffic import Request

from glm5sdk.serve import LLM, SamplingParams


def tokens_of(llm: LLM, requests: list[Request]) -> list[list[int]]:
    """Greedy answers of full length."""
    params = [SamplingParams(temperature=0, max_tokens=r.new_tokens, ignore_eos=True) for r in requests]
    return [out.outputs[0].token_ids for out in llm.generate([r.prompt for r in requests], params)]


@dataclass
class Latency:
    """Seconds, by request and token: to the first token, and between two."""

    first: list[float]
    between: list[float]
    seconds: float
    tokens: int


def timed_tokens(llm: LLM, requests: list[Request]) -> tuple[list[list[int]], float]:
    """Their answers, and seconds for all together."""
    begin = time.perf_counter()
    tokens = tokens_of(llm, requests)
    return tokens, time.perf_counter() - begin


def poisson(count: int, rate: float) -> list[float]:
    """Arrival times in seconds, `rate` a second on average; always the same ones."""
    draw, at, times = random.Random(0), 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        times.append(at)
    return times


def open_loop(llm: LLM, requests: list[Request], arrivals: list[float]) -> Latency:
    """Requests come at their times whether or not earlier ones are done.

    Args:
        llm: an idle engine.
        requests: in order of arrival.
        arrivals: seconds, ascending.
    """
    engine, found = llm.engine, Latency([], [], 0.0, 0)
    last: dict[str, float] = {}
    waiting = list(enumerate(requests))
    begin = time.perf_counter()
    while waiting or engine.has_work():
        now = time.perf_counter() - begin
        while waiting and arrivals[waiting[0][0]] <= now:
            number, request = waiting.pop(0)
            params = SamplingParams(temperature=0, max_tokens=request.new_tokens, ignore_eos=True)
            engine.add(f"open-{number}", request.prompt, params)
        if not engine.has_work():
            time.sleep(max(0.0, arrivals[waiting[0][0]] - (time.perf_counter() - begin)))
            continue
        deltas = engine.step()
        now = time.perf_counter() - begin
        for delta in deltas:
            before = last.get(delta.request_id)
            if before is None:
                found.first.append(now - arrivals[int(delta.request_id.removeprefix("open-"))])
            elif delta.token_ids:  # several tokens in one delta share its time
                found.between += [(now - before) / len(delta.token_ids)] * len(delta.token_ids)
            last[delta.request_id] = now
            found.tokens += len(delta.token_ids)
        if not deltas:
            engine.wait()
    found.seconds = time.perf_counter() - begin
    return found


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of them do not exceed; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
