"""Intake: a request is checked once, at the door, and becomes sequences."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

from glm5sdk.core.errors import CapacityError, ContractError
from glm5sdk.nn.weight_view import WeightView
from glm5sdk.registry.contract_scalars import as_int
from glm5sdk.serve.config import EngineConfig
from glm5sdk.serve.detokenize import TextStream
from glm5sdk.serve.guidance import Guide, compile_guide
from glm5sdk.serve.params import SamplingParams
from glm5sdk.serve.sequence import Sequence
from glm5sdk.text.tokenizer import Tokenizer

__all__ = ["Intake"]


@dataclass(frozen=True)
class Intake:
    """Knows what a request must be like to run.

    Attributes:
        config: of the engine.
        vocab_size: rows of the embedding.
        max_model_len: tokens that prompt and continuation may have together.
        num_pages: of the cache.
        stop_ids: the model's own.
        tokenizer: for text and stop strings, or None.
    """

    config: EngineConfig
    vocab_size: int
    max_model_len: int
    num_pages: int
    stop_ids: frozenset[int]
    tokenizer: Tokenizer | None

    def check(self, prompt: Many[int], params: SamplingParams) -> list[int]:
        """The prompt's token ids.

        Raises:
            ContractError: a token, or a token that the parameters name, is none of the model's.
            CapacityError: prompt and continuation fit neither the model nor the cache.
        """
        if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Iterable):
            raise ContractError(f"engine: prompt_token_ids is {type(prompt).__name__}, needs token ids")
        tokens = [t if type(t) is int else _token(t) for t in prompt]
        if not tokens:
            raise ContractError("engine: the prompt is empty, needs at least one token")
        for what, ids in (("a prompt token", tokens), ("a token of logit_bias", list(params.logit_bias))):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                bad = next(t for t in ids if not 0 <= t < self.vocab_size)
                raise ContractError(f"engine: {what} is {bad}, needs 0 to {self.vocab_size - 1}")
        self._check_room(len(tokens), params)
        return tokens

    def guide(self, params: SamplingParams) -> Guide | None:
        """What keeps a request's text to its schema or grammar; None for free text. Any thread may call it.

        Raises:
            ContractError: the grammar is none that can be followed, or there is no tokenizer.
        """
        wanted = params.structured
        if wanted is None:
            return None
        if self.tokenizer is None:
            raise ContractError("engine: structured output is asked for and there is no tokenizer, needs one")
        stops = sorted(self.stop_ids | frozenset(params.stop_token_ids))
        return compile_guide(wanted, self.tokenizer, self.vocab_size, stops)

    def sequences(
        self,
        request_id: str,
        tokens: Many[int],
        params: SamplingParams,
        *,
        priority: int,
        namespace: str,
        now: float,
        guide: Guide | None,
        view: WeightView,
    ) -> list[Sequence]:
        """The n sequences of a checked request."""
        seed = secrets.randbits(62) if params.seed is None else params.seed
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stop_ids)
        limit = self.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(tokens) + params.max_tokens)
        sequences = [
            Sequence(
                request_id=request_id,
                index=index,
                tokens=list(tokens),
                # What is said about the prompt is said once.
                params=params if index == 0 else replace(params, prompt_logprobs=None),
                seed=seed + index,
                stop_ids=stops,
                limit=limit,
                namespace=namespace,
                text=TextStream(
                    self.tokenizer,
                    tuple(params.stop),
                    params.include_stop_str_in_output,
                    params.skip_special_tokens,
                    params.min_tokens,
                ),
                priority=priority,
                arrival=now,
                view=view,
                guide=guide if guide is None or index == 0 else guide.fork(),
            )
            for index in range(params.n)
        ]
        for follower in sequences[1:]:
            follower.leader = sequences[0]
        return sequences

    def _check_room(self, length: int, params: SamplingParams) -> None:
        if length >= self.max_model_len:
            raise CapacityError(
                f"engine: the prompt is {length} tokens long, needs at most {self.max_model_len - 1}: "
                f"max_model_len {self.max_model_len} less one token to generate"
            )
        longest = (
            self.max_model_len if params.max_tokens is None else min(self.max_model_len, length + params.max_tokens)
        )
        need = -(-(longest + self.config.speculative_tokens) // self.config.page_size)
        if need > self.num_pages:
            raise CapacityError(
                f"engine: prompt and max_tokens are {longest} tokens, which are {need} pages of the cache, "
                f"needs at most num_pages {self.num_pages}"
            )


def _token(value: Any) -> int:
    return as_int("engine", "a prompt token", value)
