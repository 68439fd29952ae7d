"""Child process: llama.cpp serves the requests: prompts in batches of 2048 tokens, then all answers step by step.

That is the loop of its server without HTTP: a sequence that is done leaves the batch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peers.protocol import CHUNK, Unsupported, Workload
from peers.run_llama import Runner as Llama
from peers.traffic import Request, serve_requests


class Runner:
    """The model of run_llama.py in bf16, which is what its GGUF file holds."""

    def __init__(self, options: argparse.Namespace) -> None:
        if options.dtype != "bfloat16":
            raise Unsupported("its file is written in bf16 here")
        self.llama = Llama(options)
        self.llama._load(False)

    def about(self) -> dict[str, Any]:
        return self.llama.about()

    def run(self, requests: list[Request]) -> list[list[int]]:
        room = max(len(r.prompt) + r.new_tokens for r in requests)
        with self.llama._context(Workload("decode", room, batch=len(requests)), 1) as context:
            out: list[list[int]] = [[] for _ in requests]
            todo = [(t, p, r) for r, request in enumerate(requests) for p, t in enumerate(request.prompt)]
            for begin in range(0, len(todo), CHUNK):
                step = todo[begin : begin + CHUNK]
                lasts = {i: r for i, (_, p, r) in enumerate(step) if p + 1 == len(requests[r].prompt)}
                self.llama._step(context, step, set(lasts))
                self._draw(context, lasts, out)
            while alive := [r for r, request in enumerate(requests) if len(out[r]) < request.new_tokens]:
                step = [(out[r][-1], len(requests[r].prompt) + len(out[r]) - 1, r) for r in alive]
                self.llama._step(context, step, set(range(len(step))))
                self._draw(context, dict(enumerate(alive)), out)
            return out

    def _draw(self, context: Any, rows: dict[int, int], out: list[list[int]]) -> None:
        for row, request in rows.items():
            out[request].append(int(self.llama._logits(context, row).argmax()))


if __name__ == "__main__":
    serve_requests(Runner)
