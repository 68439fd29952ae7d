"""Requests that every serving program gets, and how its child process hands back what it did; plain Python."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.protocol import MARK, Unsupported, token_ids

PROMPTS = (96, 17, 384, 40, 224, 8, 512, 64, 130, 300, 24, 160, 448, 12, 70, 256)  # lengths, in turn
ANSWERS = (48, 120, 24, 64, 16, 96, 32, 80, 128, 20, 56, 40, 72, 104, 28, 88)


@dataclass(frozen=True)
class Request:
    """One prompt and how many tokens it wants, stop tokens or not."""

    prompt: list[int]
    new_tokens: int


def mixed(count: int, vocabulary: int, share: float = 1.0) -> list[Request]:
    """Prompts of 8 to 512 tokens with answers of 16 to 128; `share` shortens both."""
    return [
        Request(
            token_ids(max(2, int(PROMPTS[i % 16] * share)), vocabulary, i), max(2, int(ANSWERS[i % 16] * share))
        )
        for i in range(count)
    ]  # fmt: skip


def serve_requests(load: Callable[[argparse.Namespace], Any]) -> None:
    """A child's main: take the requests, give their tokens, then run them again at each word, against the clock.

    A runner has `run(requests) -> list of token lists` and `about() -> dict`; what it cannot do raises Unsupported.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--option", default="")
    options = parser.parse_args()
    requests = [Request(**values) for values in json.loads(sys.stdin.readline())]
    try:
        runner = load(options)
        _say({"tokens": runner.run(requests), "about": runner.about()})
    except Unsupported as error:
        _say({"why": str(error)})
        return
    for _ in sys.stdin:
        begin = time.perf_counter()
        runner.run(requests)
        _say({"seconds": time.perf_counter() - begin})


def _say(found: dict[str, Any]) -> None:
    print(MARK + json.dumps(found), flush=True)


def as_input(requests: list[Request]) -> str:
    """For a child's standard input: one line."""
    return json.dumps([asdict(r) for r in requests]) + "\n"


def same_tokens(mine: list[list[int]], theirs: list[list[int]]) -> int:
    """How many requests got the same tokens."""
    return sum(a == b for a, b in zip(mine, theirs, strict=True))


def agreeing_share(mine: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of tokens before the first difference, over all requests: after it two texts go their own ways."""
    agree = sum(
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in zip(mine, theirs, strict=True)
    )
    return agree / max(1, sum(map(len, mine)))
