"""Child process: transformers serves the requests; `--option` says how.

`padded`: one batch, padded on the left, until the longest answer is done. `single`: one after the other. `continuous`:
its own continuous batching. `accelerated`: as `padded`, after glm5sdk's accelerate.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peers.protocol import Unsupported, refuse
from peers.traffic import Request, serve_requests

try:
    import transformers
    from transformers import GenerationConfig, GlmMoeDsaForCausalLM
except ImportError as error:
    refuse(f"transformers with GlmMoeDsaForCausalLM is not installed ({error})")


class Runner:
    """A loaded model."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        torch.set_grad_enabled(False)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.how, _, experts = options.option.partition(":")
        dtype = getattr(torch, options.dtype)
        self.model: Any = GlmMoeDsaForCausalLM.from_pretrained(options.checkpoint, dtype=dtype).eval()
        if experts:
            self.model.set_experts_implementation(experts)
        self.model.generation_config.eos_token_id = None  # every answer has its full length
        if self.how == "accelerated":
            from rig.machine import set_threads

            from glm5sdk.integrations.transformers import accelerate

            set_threads(options.threads)
            accelerate(self.model)

    def about(self) -> dict[str, Any]:
        return {"version": transformers.__version__, "experts": self.model.config._experts_implementation}

    def run(self, requests: list[Request]) -> list[list[int]]:
        if self.how == "single":
            return [self._batch([r])[0] for r in requests]
        return self._continuous(requests) if self.how == "continuous" else self._batch(requests)

    def _batch(self, requests: list[Request]) -> list[list[int]]:
        longest = max(len(r.prompt) for r in requests)
        pads = [longest - len(r.prompt) for r in requests]
        ids = torch.tensor([[0] * pad + r.prompt for pad, r in zip(pads, requests, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * len(r.prompt) for pad, r in zip(pads, requests, strict=True)])
        most = max(r.new_tokens for r in requests)
        out = self.model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0)
        return [row[longest : longest + r.new_tokens] for row, r in zip(out.tolist(), requests, strict=True)]

    def _continuous(self, requests: list[Request]) -> list[list[int]]:
        most = max(r.new_tokens for r in requests)
        config = GenerationConfig(max_new_tokens=most, do_sample=False, eos_token_id=-1, pad_token_id=0)
        try:
            out = self.model.generate_batch([r.prompt for r in requests], generation_config=config)
        except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
            raise Unsupported(f"its continuous batching does not take this model: {error}") from error
        rows = [out[name].generated_tokens for name in out]
        return [row[: r.new_tokens] for row, r in zip(rows, requests, strict=True)]


if __name__ == "__main__":
    serve_requests(Runner)
