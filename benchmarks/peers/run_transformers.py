"""Child process: transformers' GlmMoeDsaForCausalLM runs the workloads."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peers.protocol import CHUNK, PeakMemory, Unsupported, Workload, median_seconds, refuse, serve, token_ids

try:
    import transformers
    from transformers import DynamicCache, GlmMoeDsaForCausalLM
except ImportError as error:
    refuse(f"transformers with GlmMoeDsaForCausalLM is not installed ({error})")


class Runner:
    """A loaded model; `--option` may name an implementation of its experts, such as eager.

    Caches are handed over by place, the fourth: their keyword is not the same in all versions.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        torch.set_grad_enabled(False)
        self.path, self.experts = options.checkpoint, options.option
        self.model: Any = None

    def about(self) -> dict[str, Any]:
        return {"version": transformers.__version__, "torch": torch.__version__}

    def run(self, w: Workload) -> Any:
        if w.int8:
            raise Unsupported("no int8 weights for this model on a CPU")
        if w.random_fill:
            raise Unsupported("its cache cannot be filled without running the prompt")
        if w.kind == "indexer":
            raise Unsupported("its indexer is not timed by itself")
        if w.kind == "memory":
            return self._memory(w)
        self._load()
        if w.kind == "logits":
            return self._prefill(w)[0].tolist()
        if w.kind == "prefill":
            return w.context / median_seconds(lambda: self._prefill(w), w.repeats)
        return self._decode(w)

    def _load(self) -> None:
        if self.model is None:
            extra = {"experts_implementation": self.experts} if self.experts else {}
            self.model = GlmMoeDsaForCausalLM.from_pretrained(self.path, dtype=torch.bfloat16, **extra).eval()

    def _ids(self, w: Workload) -> Tensor:
        return torch.tensor([token_ids(w.context, self.model.config.vocab_size, b) for b in range(w.batch)])

    def _prefill(self, w: Workload, cache: Any = None) -> Tensor:
        """Logits of the last position, [B, V]; in the same chunks as everybody."""
        ids, each = self._ids(w), max(1, CHUNK // w.batch)
        cache = DynamicCache(config=self.model.config) if cache is None else cache
        for begin in range(0, w.context, each):
            chunk = ids[:, begin : begin + each]
            out = self.model(chunk, None, None, cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].float()

    def _decode(self, w: Workload) -> float:
        """Nothing can be forgotten by this cache's indexer, so each sample goes on where the last one ended."""
        cache = DynamicCache(config=self.model.config)
        ids = self._prefill(w, cache).argmax(-1, keepdim=True)

        def steps() -> None:
            nonlocal ids
            for _ in range(w.steps):
                out = self.model(ids, None, None, cache, use_cache=True)
                ids = out.logits[:, -1].argmax(-1, keepdim=True)

        return median_seconds(steps, w.repeats) / w.steps

    def _memory(self, w: Workload) -> int:
        if self.model is not None:
            raise Unsupported("memory needs a process of its own")
        peak = PeakMemory()
        self._load()
        peak.restart()
        weights = sum(t.nbytes for t in self.model.state_dict().values())
        self._prefill(w)
        return peak.above() - weights


if __name__ == "__main__":
    serve(Runner)
