"""`glm5 generate`: a text and its continuation, token by token."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from glm5sdk.cli.choose import chosen
from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.text.generation_config import GenerationConfig
from glm5sdk.text.tokenizer import Tokenizer

__all__ = ["Sampling", "Writer", "continue_text"]


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one continuation; see Glm5ForCausalLM.generate."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = False


class Writer:
    """A loaded model with its tokenizer, writing to standard output as tokens come.

    Raises:
        CheckpointError: a file of the checkpoint is missing or damaged.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.tokenizer = Tokenizer.from_pretrained(path)
        self.generation = GenerationConfig.from_pretrained(path)
        self.model = Glm5ForCausalLM.from_pretrained(path, dtype=dtype)
        self.stops = sorted({*self.generation.stop_ids, *self.tokenizer.stop_ids})

    def write(self, ids: Sequence[int], sampling: Sampling, before: str = "") -> tuple[list[int], float]:
        """Stream `before` and the continuation of `ids`; its tokens (the stop token included) and seconds."""
        if not ids:
            raise ContractError("generate: the prompt is empty, needs at least one token")
        decoder = self.tokenizer.stream(hide=self.stops)
        new: list[int] = []

        def show(step: torch.Tensor) -> None:
            if not new:
                sys.stdout.write(before)  # not earlier: an argument may be refused
            new.append(int(step[0]))
            sys.stdout.write(decoder.push(new[-1]))
            sys.stdout.flush()

        begin = time.perf_counter()
        self.model.generate(
            torch.tensor([list(ids)]), max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature,
            top_p=sampling.top_p, top_k=sampling.top_k, seed=sampling.seed, ignore_eos=sampling.ignore_eos,
            stop_token_ids=self.stops, on_token=show,
        )  # fmt: skip
        sys.stdout.write(decoder.finish() + "\n")
        sys.stdout.flush()
        return new, time.perf_counter() - begin


def continue_text(
    console: Console, errors: Console, path: Path, text: str, sampling: Sampling, dtype: str, backends: Sequence[str]
) -> None:
    """Print `text` and what the model makes of it; a line of figures goes to standard error."""
    with chosen(backends):
        writer = Writer(path, dtype)
        ids = writer.tokenizer.encode(text)
        new, seconds = writer.write(ids, sampling, before=text)
    errors.print(
        f"[dim]{len(ids)} prompt tokens, {len(new)} new, {len(new) / seconds:.1f} tokens/s[/]", highlight=False
    )
