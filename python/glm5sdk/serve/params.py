"""SamplingParams: how one request is to be continued, under the names that vLLM's users know."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from glm5sdk.core.errors import ContractError
from glm5sdk.registry.contract_scalars import as_bool, as_float, as_int

__all__ = ["MAX_LOGPROBS", "SamplingParams", "StructuredOutput"]

MAX_LOGPROBS = 20
MAX_SEQUENCES = 128
MAX_STOPS = 64
MAX_TOKEN_IDS = 1024  # stop tokens, and biases: a million of either would hold up everybody
COLDEST, HOTTEST = 1e-5, 1e5


@dataclass(frozen=True)
class StructuredOutput:
    """What the text must match.

    Attributes:
        kind: the grammar's form.
        value: a JSON schema (a dict), a regular expression, a Lark grammar, a list of choices; None for "json_object".
        after_reasoning: the text begins inside the reasoning, which is free; the match begins behind `</think>`.
    """

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice"]
    value: Any = None
    after_reasoning: bool = False


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Checked when made: a wrong value never reaches the engine.

    Attributes:
        n: independent continuations of the prompt; continuation i draws with seed + i.
        temperature: 0 is greedy, else 1e-5 to 1e5.
        top_p: nucleus in (0, 1]; 1 keeps all.
        top_k: sample among so many best tokens; 0 or -1 keeps all.
        min_p: smallest probability relative to the best, in [0, 1].
        seed: of the draws, 64 bits; None draws one, which the output reports.
        max_tokens: new tokens at most; None goes on to the model's longest length.
        min_tokens: stop tokens and stop strings do not count before so many tokens.
        stop: texts that end the continuation.
        stop_token_ids: tokens that end it, beside the model's own.
        include_stop_str_in_output: keep the stop text in the output.
        ignore_eos: the model's own stop tokens do not end it.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: also report so many best tokens beside each drawn one (0: the drawn one alone); None reports none.
        prompt_logprobs: the same for the tokens of the prompt.
        presence_penalty: taken from the logit of each token generated before, -2 to 2.
        frequency_penalty: the same times how often it was generated, -2 to 2.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen, prompt included; over 0.
        logit_bias: token id -> what is added to its logit, -100 to 100.
        structured: what the text must match.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        for name, low, high in (("n", 1, MAX_SEQUENCES), ("top_k", -1, 2**31 - 1), ("min_tokens", 0, 2**31 - 1)):
            object.__setattr__(self, name, _int_in(name, getattr(self, name), low, high))
        for name, low, high in (("seed", -(2**63), 2**63 - 1 - MAX_SEQUENCES), ("max_tokens", 1, 2**31 - 1),
                                ("logprobs", 0, MAX_LOGPROBS), ("prompt_logprobs", 0, MAX_LOGPROBS)):  # fmt: skip
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _int_in(name, getattr(self, name), low, high))
        temperature = as_float("sampling params", "temperature", self.temperature)
        if temperature != 0.0 and not COLDEST <= temperature <= HOTTEST:
            raise ContractError(
                f"sampling params: temperature is {temperature}, needs 0 (greedy) or {COLDEST} to {HOTTEST}"
            )
        for name, low, high in (("min_p", 0.0, 1.0), ("presence_penalty", -2.0, 2.0), ("frequency_penalty", -2.0, 2.0)):
            _float_in(name, getattr(self, name), low, high)
        if not 0.0 < as_float("sampling params", "top_p", self.top_p) <= 1.0:
            raise ContractError(f"sampling params: top_p is {self.top_p}, needs a number in (0, 1]")
        if not 0.0 < as_float("sampling params", "repetition_penalty", self.repetition_penalty) <= 100.0:
            raise ContractError(
                f"sampling params: repetition_penalty is {self.repetition_penalty}, needs a number in (0, 100]"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ContractError(
                f"sampling params: min_tokens is {self.min_tokens}, needs at most max_tokens {self.max_tokens}"
            )
        object.__setattr__(self, "stop", _stops(self.stop))
        ids = _several("stop_token_ids", self.stop_token_ids, "token ids in a list")
        _check_count("stop_token_ids", ids)
        object.__setattr__(self, "stop_token_ids", tuple(_int_in("stop_token_ids", i, 0, 2**31 - 1) for i in ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            object.__setattr__(self, name, as_bool("sampling params", name, getattr(self, name)))
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise ContractError(f"sampling params: structured is {self.structured!r:.200}, needs a StructuredOutput")


def _int_in(name: str, value: Any, low: int, high: int) -> int:
    number = as_int("sampling params", name, value)
    if not low <= number <= high:
        raise ContractError(f"sampling params: {name} is {number}, needs {low} to {high}")
    return number


def _float_in(name: str, value: Any, low: float, high: float) -> float:
    number = as_float("sampling params", name, value)
    if not low <= number <= high:
        raise ContractError(f"sampling params: {name} is {number}, needs {low} to {high}")
    return number


def _several(name: str, value: Any, want: str) -> Sequence[Any]:
    """A list; None is an empty one."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, (Sequence, Set)):
        raise ContractError(f"sampling params: {name} is {value!r:.200}, needs {want}")
    return list(value)


def _check_count(name: str, values: Any) -> None:
    if len(values) > MAX_TOKEN_IDS:
        raise ContractError(f"sampling params: {name} holds {len(values)} entries, needs at most {MAX_TOKEN_IDS}")


def _stops(stop: Any) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(_several("stop", stop, "a text or several in a list"))
    if bad := [t for t in texts if not isinstance(t, str) or not t]:
        raise ContractError(f"sampling params: stop holds {bad[0]!r}, needs texts that are not empty")
    if len(texts) > MAX_STOPS:
        raise ContractError(f"sampling params: stop holds {len(texts)} texts, needs at most {MAX_STOPS}")
    return texts


def _biases(biases: Any) -> dict[int, float]:
    """Keys may be the texts of ints: JSON knows no others."""
    if not isinstance(biases, Mapping | None):
        raise ContractError(f"sampling params: logit_bias is {biases!r:.200}, needs token ids with their biases")
    _check_count("logit_bias", biases or ())
    found: dict[int, float] = {}
    for key, bias in (biases or {}).items():
        token = int(key) if isinstance(key, str) and re.fullmatch("[0-9]{1,10}", key) else key
        found[_int_in("logit_bias", token, 0, 2**31 - 1)] = _float_in("logit_bias", bias, -100.0, 100.0)
    return found
