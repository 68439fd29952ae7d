"""An event loop that is busy while the engine's thread finishes a request loses none of its tokens."""

from __future__ import annotations

import asyncio
import time

import pytest
from engine_cases import alone, make_engine

from glm5sdk.serve.async_engine import AsyncEngine, _Reader
from glm5sdk.serve.outputs import Delta
from glm5sdk.serve.params import SamplingParams


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_is_over_before_the_loop_looks(n: int) -> None:
    engine = AsyncEngine(make_engine())
    params = SamplingParams(n=n, max_tokens=3, temperature=1.0, seed=5, ignore_eos=True)

    async def hold_up() -> None:
        """The whole answer lies there when the reader begins to look."""
        await asyncio.sleep(0)  # the reader asks
        while not engine.stats().finished:
            time.sleep(0.01)

    async def read() -> dict[int, list[int]]:
        got: dict[int, list[int]] = {i: [] for i in range(n)}
        async for delta in engine.generate([3, 4, 5], params, request_id="a"):
            got[delta.index] += delta.token_ids
        return got

    async def run() -> dict[int, list[int]]:
        got, _ = await asyncio.gather(read(), hold_up())
        return got

    try:
        got = asyncio.run(asyncio.wait_for(run(), 30))
    finally:
        engine.close()
    for index, tokens in got.items():
        one = SamplingParams(max_tokens=3, temperature=1.0, seed=5 + index, ignore_eos=True)
        assert tokens == alone([3, 4, 5], one)


def test_the_last_delta_is_read_even_when_it_was_put_before_the_first_arrived() -> None:
    async def run() -> list[int]:
        reader = _Reader(asyncio.get_running_loop(), 1)
        taking = asyncio.create_task(reader.take())
        await asyncio.sleep(0)
        assert reader.put([Delta("a", 0, [1])])
        reader._left.discard(0)  # as the engine's thread would in the midst of the next `put`
        got = [d.token_ids[0] for d in await taking]
        reader.put([Delta("a", 0, [2], finish_reason="stop")])
        while reader.open:
            got += [d.token_ids[0] for d in await reader.take()]
        return got

    assert asyncio.run(asyncio.wait_for(run(), 10)) == [1, 2]
