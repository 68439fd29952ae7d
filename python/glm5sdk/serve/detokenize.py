"""TextStream: one sequence's tokens to text as they come, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.stop_strings import StopStrings, stop_strings
from glm5sdk.text.tokenizer import Tokenizer

__all__ = ["Pushed", "TextStream"]


class Pushed(NamedTuple):
    """What a push gave.

    Attributes:
        text: new text that nothing can take back.
        hit: the stop string that ended the sequence, or None.
        tokens_used: how many of the pushed tokens belong to the sequence: all, or those up to the one in which the stop
            string ended. Drafted tokens behind it are to be dropped.
    """

    text: str
    hit: str | None
    tokens_used: int


class TextStream:
    """Text of one sequence. However its tokens are cut into pushes, the texts joined, the hit and the token it ended in
    are the same.

    The stop string that ends first wins; of several that end together, the longest. It may end anywhere inside a token;
    what that token says after it is dropped. Only whole characters come out, and nothing that could still become part
    of a stop string, unless the stop string is to be kept.

    Args:
        tokenizer: byte-level; None gives no text at all.
        stop: texts that end the sequence; none is empty.
        include_stop: keep the stop string in the text.
        skip_special: leave special tokens out of the text. GLM's stop tokens are never in it.
        min_tokens: a stop string that ends in one of so many first tokens is text like any other.

    Raises:
        ContractError: there are stop strings and no tokenizer, one is empty, or the tokenizer is not byte-level.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        if stop and tokenizer is None:
            raise ContractError(
                "text stream: stop holds strings and tokenizer is None, needs a tokenizer; or stop at token ids"
            )
        if not all(stop):
            raise ContractError("text stream: stop holds '', needs texts that are not empty")
        self._decoder = tokenizer.stream(skip_special_tokens=skip_special) if tokenizer else None
        self._stops = stop_strings(tuple(stop)) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._state = 0
        self._held = ""
        self._tokens = 0
        self.hit: str | None = None

    def push(self, token_ids: Sequence[int]) -> Pushed:
        """Take new tokens; the token that stopped the sequence is better not among them.

        Returns:
            New text, the stop string if one ended, and how many of `token_ids` were taken; after a hit none is.

        Raises:
            ContractError: an id is negative or no integer.
        """
        if self.hit is not None:
            return Pushed("", self.hit, 0)
        if self._decoder is None:
            self._tokens += len(token_ids)
            return Pushed("", None, len(token_ids))
        if self._stops is None:
            self._tokens += len(token_ids)
            return Pushed(self._decoder.push(token_ids), None, len(token_ids))
        parts: list[str] = []
        for used, token in enumerate(token_ids, start=1):
            self._tokens += 1
            parts.append(self._until_stop(self._stops, self._decoder.push(token)))
            if self.hit is not None:
                return Pushed("".join(parts), self.hit, used)
        return Pushed("".join(parts), None, len(token_ids))

    def finish(self) -> str:
        """The text that was still held back; an unfinished character is U+FFFD. Nothing after a hit."""
        if self.hit is not None or self._decoder is None:
            return ""
        rest, self._held = self._held + self._decoder.finish(), ""
        return rest

    def _until_stop(self, stops: StopStrings, piece: str) -> str:
        """What one token's text sets free."""
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            self._state = stops.step(self._state, character)
            hit = stops.ended[self._state]
            if hit and self._tokens > self._min_tokens:
                self.hit, self._held = hit, ""
                return text[:end] if self._include_stop else text[: end - len(hit)]
        held = 0 if self._include_stop else stops.held[self._state]
        free, self._held = text[: len(text) - held], text[len(text) - held :]
        return free
