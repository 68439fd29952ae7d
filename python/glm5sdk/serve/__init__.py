"""Serving: an engine for continuous batches, and the servers around it; imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

# public name -> module of this package that defines it
_HOME = {
    "LLM": "llm",
    "CompletionOutput": "outputs",
    "Delta": "outputs",
    "EngineConfig": "config",
    "RequestOutput": "outputs",
    "SamplingParams": "params",
    "StructuredOutput": "params",
    "TokenLogprob": "outputs",
}


def __getattr__(name: str) -> object:
    """Resolves a public name by importing its module: a router needs none of torch, which the engine brings along."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
