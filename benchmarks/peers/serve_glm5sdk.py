"""Child process: glm5sdk's engine serves the requests, all at once."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rig.machine import set_threads

import glm5sdk
from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.serve import LLM, SamplingParams
from peers.traffic import Request, serve_requests


class Runner:
    """An engine without prefix cache: repeats must do the work again."""

    def __init__(self, options: argparse.Namespace) -> None:
        set_threads(options.threads)
        torch.set_grad_enabled(False)
        # 1e-6: transformers' latent norms, so that tokens can be compared.
        model = Glm5ForCausalLM.from_pretrained(options.checkpoint, options.dtype, latent_norm_eps=1e-6)
        self.llm = LLM(model, enable_prefix_caching=False, max_model_len=1024)

    def about(self) -> dict[str, Any]:
        return {"version": glm5sdk.__version__}

    def run(self, requests: list[Request]) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=r.new_tokens, ignore_eos=True) for r in requests]
        return [out.outputs[0].token_ids for out in self.llm.generate([r.prompt for r in requests], params)]


if __name__ == "__main__":
    serve_requests(Runner)
