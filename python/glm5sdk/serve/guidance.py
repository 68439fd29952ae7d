"""Guide: which tokens may come next, so that a request's text matches a schema, a pattern or a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from glm5sdk.core.errors import ContractError, UnavailableError
from glm5sdk.serve.params import StructuredOutput
from glm5sdk.text.output_format import TAGS
from glm5sdk.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Guide", "compile_guide"]

MAX_SOURCE = 1 << 16  # characters; the slowest grammars found of that length compile in a second
MAX_CHOICES = 4096
# The grammar library's own limits, a mask's cost above all; its work is lazy, so that they also hold at each token.
_LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# White space as JSON is commonly written: a space, or a new line with its indent. A weak model that may write any
# amount of it does so for ever. Unknown keywords are errors, whatever the schema itself asks for.
_JSON = {"whitespace_flexible": True, "whitespace_pattern": r"(?: |\n {0,24}|\n\t{0,8})", "lenient": False}

_Made = dict[tuple[int, tuple[int, ...], bool], tuple["LLTokenizer", torch.Tensor]]
_vocabularies: WeakKeyDictionary[Tokenizer, _Made] = WeakKeyDictionary()


class Guide:
    """The state of one sequence: what was written, and what may follow. Made by `compile_guide`.

    Not safe to share between threads; `fork` makes a state of one's own.
    """

    def __init__(self, matcher: LLMatcher, free: torch.Tensor, stop_ids: frozenset[int], opener: int | None) -> None:
        self._matcher = matcher
        self._free = free  # bool [vocab_size]: what the reasoning may hold
        self._stop_ids = stop_ids
        self._opener = opener  # the token behind which the grammar begins; None, if it begins at once
        self._armed = opener is None
        self._before = 0  # tokens that came before the grammar began, the opener among them
        self._inside = 0  # tokens that the matcher took
        self._ended = False  # whether a stop token came then; the matcher is not told

    def mask(self) -> torch.Tensor:
        """What may come next.

        Returns:
            bool [vocab_size], on the CPU: True where the token is allowed. Stop tokens are where the text may end.

        Raises:
            ContractError: the grammar's state has outgrown its limits; the sequence cannot go on.
        """
        if not self._armed:
            return self._free.clone()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = torch.zeros_like(self._free)
        known = np.unpackbits(bits, bitorder="little")[: len(allowed)]
        allowed[: len(known)] = torch.from_numpy(known).view(torch.bool)
        if not allowed.any():
            raise ContractError("structured output: no token can follow, needs a grammar that the tokenizer can spell")
        return allowed

    def accept(self, token: int) -> bool:
        """Take the next token.

        Returns:
            Whether it is allowed; if not, nothing has changed. Nor is it when the grammar's state outgrows its limits
            here; `mask` then says so.
        """
        return self.accept_all((token,)) == 1

    def accept_all(self, tokens: Sequence[int]) -> int:
        """Take tokens up to the first that is not allowed, for example drafted ones.

        Returns:
            How many were taken.
        """
        for taken, token in enumerate(tokens):
            if not self._take(token):
                return taken
        return len(tokens)

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens that were accepted.

        Raises:
            ContractError: there were fewer.
        """
        taken = self._before + self._inside + self._ended
        if not 0 <= count <= taken:
            raise ContractError(f"guide: rollback is {count} tokens, needs 0 to the {taken} that were accepted")
        if count and self._ended:
            self._ended = False
            count -= 1
        inside = min(count, self._inside)
        if inside:
            self._matcher.rollback(inside)
            self._check()
        self._inside -= inside
        if count > inside:
            self._before -= count - inside
            self._armed = False  # the last of those before is the opener

    def fork(self) -> Guide:
        """A state of its own that begins where this one is."""
        twin = Guide(self._matcher.deep_copy(), self._free, self._stop_ids, self._opener)
        twin._armed, twin._before, twin._inside, twin._ended = self._armed, self._before, self._inside, self._ended
        return twin

    @property
    def armed(self) -> bool:
        """Whether the grammar has begun; False while the sequence still reasons."""
        return self._armed

    @property
    def may_end(self) -> bool:
        """Whether the text so far is complete: stop tokens are allowed."""
        return self._armed and bool(self._matcher.is_accepting())

    @property
    def is_finished(self) -> bool:
        """Whether a stop token was accepted, or nothing but one could follow: the sequence is to end."""
        return self._ended or (self._armed and self.may_end and bool(self._matcher.is_stopped()))

    def _take(self, token: int) -> bool:
        if self._ended or not 0 <= token < len(self._free):
            return False
        if token in self._stop_ids:
            self._ended = self.may_end
            return self._ended
        if not self._armed:
            known = bool(self._free[token])
            self._before += known
            self._armed = token == self._opener
            return known
        taken = bool(self._matcher.try_consume_tokens([token]) == 1)
        self._inside += taken
        return taken

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ContractError(f"structured output: grammar is beyond its limits ({_reason(self._matcher)}), "
                                "needs a simpler one")  # fmt: skip


def compile_guide(
    structured: StructuredOutput,
    tokenizer: Tokenizer,
    vocab_size: int,
    stop_ids: Sequence[int],
) -> Guide:
    """The guide of one request. Takes up to a second for the largest grammars, and lets other threads run meanwhile.

    Args:
        structured: what the text must match; whether it begins at once or behind `</think>`, before which all is
            allowed but to stop, and other tags.
        tokenizer: byte-level.
        vocab_size: rows of the model's embedding. Rows without a token are never allowed. Nor are special tokens and
            tags: a schema's text is spelled in ordinary tokens. Only in a Lark grammar, which may describe a tool call,
            a tag's token spells its text.
        stop_ids: tokens that end a sequence.

    Raises:
        ContractError: the value has the wrong type, is too large, is no valid or no supported schema, pattern or
            grammar, matches nothing, or needs more than its share of time; `</think>` is no token; a stop id is none.
        UnavailableError: llguidance is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise UnavailableError(
            'structured output: llguidance is missing, needs pip install "glm5sdk[serve]"'
        ) from error
    grammar = _grammar(structured, llguidance)
    opener = tokenizer.token_id("</think>") if structured.after_reasoning else None
    if structured.after_reasoning and (opener is None or opener >= vocab_size):
        raise ContractError(
            "structured output: the tokenizer has no token </think>, needs one to begin after reasoning"
        )
    tokens, known = _vocabulary(tokenizer, vocab_size, tuple(stop_ids), structured.kind == "grammar", llguidance)
    limits = llguidance.LLParserLimits(**_LIMITS)
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # that nothing matches shows here
    if matcher.is_error():
        raise ContractError(
            f"structured output: {structured.kind} is not usable ({_reason(matcher)}), needs one that is valid, "
            "supported and matches some text"
        )
    return Guide(matcher, known, frozenset(stop_ids), opener)


def _grammar(structured: StructuredOutput, llguidance: Any) -> str:
    kind, value = structured.kind, structured.value
    make: Callable[[Any], str] | None = _MAKERS.get(kind)
    if make is None:
        raise ContractError(f"structured output: kind is {kind!r}, needs one of {', '.join(_MAKERS)}")
    source = make(value)
    if len(source) > MAX_SOURCE:
        raise ContractError(f"structured output: {kind} is {len(source)} characters, needs at most {MAX_SOURCE}")
    try:
        source.encode()
        if kind in ("json_schema", "json_object"):
            return llguidance.LLMatcher.grammar_from_json_schema(source, overrides=_JSON)
        if kind == "regex":
            return llguidance.LLMatcher.grammar_from_regex(source)
        return llguidance.LLMatcher.grammar_from_lark(source)
    except ValueError as error:
        raise ContractError(f"structured output: {kind} is not usable ({error!s:.200}), needs a valid one") from error


def _schema(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise ContractError(f"structured output: json_schema is {type(value).__name__}, needs a dict")
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ContractError(f"structured output: json_schema is no JSON ({error}), needs JSON values") from error


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ContractError(f"structured output: value is {value!r:.80}, needs a text that is not empty")
    return value


def _choice(value: Any) -> str:
    choices = list(value) if isinstance(value, (list, tuple)) else []
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ContractError(f"structured output: choice is {value!r:.80}, needs a list of texts, none empty")
    if len(choices) > MAX_CHOICES:
        raise ContractError(f"structured output: choice holds {len(choices)} texts, needs at most {MAX_CHOICES}")
    words = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    return f"start: ANY\nANY: {words}"  # a terminal, by its capitals: so many rules would be too many parser states


_MAKERS: dict[str, Callable[[Any], str]] = {
    "json_schema": _schema,
    "json_object": lambda value: '{"type": "object"}',
    "regex": _text,
    "grammar": _text,
    "choice": _choice,
}


class _Vocabulary:
    """A tokenizer as llguidance reads one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, tags_are_text: bool) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        never = set(tokenizer.added_ids)
        if tags_are_text:
            never = set(tokenizer.special_ids) - {tokenizer.token_id(tag) for tag in TAGS}
        self.special_token_ids = sorted(token for token in never if token < vocab_size)
        self.eos_token_id = 0
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text.decode() if isinstance(text, bytes) else text)


def _vocabulary(
    tokenizer: Tokenizer, vocab_size: int, stop_ids: tuple[int, ...], tags_are_text: bool, llguidance: Any
) -> tuple[LLTokenizer, torch.Tensor]:
    """llguidance's tokenizer, and what reasoning may hold; made once, a large vocabulary takes time."""
    made = _vocabularies.setdefault(tokenizer, {})
    key = (vocab_size, stop_ids, tags_are_text)
    if key not in made:
        vocabulary = _Vocabulary(tokenizer, vocab_size, tags_are_text)
        if not stop_ids or not all(0 <= token < vocab_size and vocabulary.tokens[token] for token in stop_ids):
            raise ContractError(
                f"structured output: stop ids are {stop_ids}, needs at least one, all tokens below {vocab_size}"
            )
        vocabulary.eos_token_id = stop_ids[0]
        known = torch.tensor([bool(spelled) for spelled in vocabulary.tokens])
        known[list(stop_ids)] = False
        # A call that begins inside the reasoning would end it, and go past the grammar.
        tags = [tokenizer.token_id(tag) for tag in TAGS if tag != "</think>"]
        known[[token for token in tags if token is not None and token < vocab_size]] = False
        wrapped = llguidance.TokenizerWrapper(vocabulary)
        made[key] = llguidance.LLTokenizer(wrapped, eos_token=list(stop_ids)), known
    return made[key]


def _reason(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:200] or "unknown"
