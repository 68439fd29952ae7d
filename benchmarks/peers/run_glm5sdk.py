"""Child process: glm5sdk runs the workloads."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rig.machine import set_threads

import glm5sdk
from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.nn.cache import LatentCache
from glm5sdk.nn.indexer import Indexer
from glm5sdk.quant import quantise_model, scheme
from glm5sdk.registry import get_op
from peers.protocol import CHUNK, PeakMemory, Unsupported, Workload, median_seconds, serve, token_ids


class Runner:
    """A loaded model; `--option` may name a backend or cap, such as cpu.avx512_bf16."""

    def __init__(self, options: argparse.Namespace) -> None:
        set_threads(options.threads)
        torch.set_grad_enabled(False)
        self.path = options.checkpoint
        self.model: Glm5ForCausalLM | None = None
        self.int8 = False
        if options.option:
            glm5sdk.use(options.option).__enter__()  # for as long as the process

    def about(self) -> dict[str, Any]:
        return {"version": glm5sdk.__version__, "torch": torch.__version__}

    def run(self, w: Workload) -> Any:
        if w.kind == "memory":
            return self._memory(w)
        self._load(w.int8)
        assert self.model is not None
        model = self.model
        if w.kind == "logits":
            return model(self._ids(w), cache=model.make_cache(1, w.context))[0, -1].tolist()
        if w.kind == "prefill":
            return w.context / median_seconds(lambda: self._prefill(w), w.repeats)
        if w.kind == "indexer":
            return self._indexer(w)
        return self._decode(w)

    def _indexer(self, w: Workload) -> list[float]:
        """Seconds of a step, and those within the indexer: its projections, its cache rows and the selection."""
        spent = 0.0

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                nonlocal spent
                begin = time.perf_counter()
                result = function(*arguments)
                spent += time.perf_counter() - begin
                return result

            return run

        if not w.random_fill:
            raise Unsupported("a prompt's own indexer would be counted; fill the cache with random rows")
        self._load(w.int8)
        before = Indexer.forward, Indexer.select
        Indexer.forward, Indexer.select = timed(Indexer.forward), timed(Indexer.select)  # type: ignore[method-assign]
        try:
            step = self._decode(w)
        finally:
            Indexer.forward, Indexer.select = before  # type: ignore[method-assign]
        return [step, spent / ((w.repeats + 1) * w.steps)]

    def _load(self, int8: bool) -> None:
        if self.model is None:
            # 1e-6: transformers' latent norms, so that logits can be compared.
            self.model = Glm5ForCausalLM.from_pretrained(self.path, "bfloat16", latent_norm_eps=1e-6)
        if int8 and not self.int8:
            self._quantise(self.model)
            self.int8 = True

    def _quantise(self, model: Glm5ForCausalLM) -> None:
        """To int8 weights and activations by rounding to nearest: speed does not depend on how they were chosen."""
        quantise_model(model, scheme("w8a8"), self._ids(Workload("logits", 16)), "rtn")
        layer = model.model.layers[-1]
        x = torch.zeros(1, model.config.hidden_size, dtype=model.dtype)
        chosen = get_op("linear").explain(x, layer.self_attn.q_a_proj.weight).chosen
        if chosen == "reference":
            raise Unsupported("no kernel takes int8 weights yet: they would run on the reference")

    def _ids(self, w: Workload) -> Tensor:
        assert self.model is not None
        return torch.tensor([token_ids(w.context, self.model.config.vocab_size, b) for b in range(w.batch)])

    def _prefill(self, w: Workload, room: int = 0) -> LatentCache:
        assert self.model is not None
        cache = self.model.make_cache(w.batch, w.context + room)
        ids = self._ids(w)
        each = max(1, CHUNK // w.batch)
        for begin in range(0, w.context, each):
            chunk = ids[:, begin : begin + each]
            step = [chunk.shape[1]] * w.batch
            hidden = self.model.hidden_states(chunk.reshape(-1), self.model.context(cache.batch(step), cache))
            cache.advance(step)
        self.model.logits(hidden[-1:])
        return cache

    def _decode(self, w: Workload) -> float:
        assert self.model is not None
        model = self.model
        if w.random_fill:
            cache = model.make_cache(w.batch, w.context + w.steps)
            for pool in [*cache.kv, *(p for p in cache.index if p is not None)]:
                pool.normal_(generator=torch.Generator().manual_seed(0))
            cache.advance([w.context] * w.batch)
        else:
            cache = self._prefill(w, w.steps)
        first = self._ids(w)[:, :1]

        def steps() -> None:
            cache.crop(w.context)
            ids = first
            for _ in range(w.steps):
                ids = model(ids, cache=cache)[:, -1].argmax(-1, keepdim=True)

        return median_seconds(steps, w.repeats) / w.steps

    def _memory(self, w: Workload) -> int:
        if self.model is not None:
            raise Unsupported("memory needs a process of its own")
        peak = PeakMemory()
        self._load(False)
        assert self.model is not None
        peak.restart()
        weights = sum(t.nbytes for t in self.model.state_dict().values())
        self._prefill(w)
        return peak.above() - weights


if __name__ == "__main__":
    serve(Runner)
