"""Serving: an engine for continuous batches, and the servers around it."""

from __future__ import annotations

from glm5sdk.serve.config import EngineConfig
from glm5sdk.serve.llm import LLM
from glm5sdk.serve.outputs import CompletionOutput, Delta, RequestOutput, TokenLogprob
from glm5sdk.serve.params import SamplingParams, StructuredOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "Delta",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "TokenLogprob",
]
