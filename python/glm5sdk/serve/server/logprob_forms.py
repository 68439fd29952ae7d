"""Log-probabilities in the forms of chat, of text completions, and of vLLM's prompt_logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from glm5sdk.serve.outputs import TokenLogprob
from glm5sdk.serve.server.model_text import ModelText

__all__ = ["chat_logprobs", "completion_logprobs", "prompt_logprobs_form"]

_LEAST = -9999.0  # JSON knows no -Infinity; OpenAI writes this instead


def chat_logprobs(entries: Sequence[TokenLogprob], text: ModelText) -> dict[str, Any]:
    """`choices[].logprobs` of chat: one entry a token, with its bytes."""
    return {
        "content": [
            {
                **_entry(text, entry.token_id, entry.logprob),
                "top_logprobs": [_entry(text, token, value) for token, value in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    entries: Sequence[TokenLogprob | None], token_ids: Sequence[int], text: ModelText, offset: int
) -> dict[str, Any]:
    """`choices[].logprobs` of text completions: parallel lists.

    Args:
        entries: one a token; None for a prompt's first token, which nothing predicts.
        token_ids: the tokens.
        text: spells them.
        offset: characters before the first token.
    """
    offsets = []
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    for token in token_ids:
        offsets.append(offset)
        offset += len(characters.decode(text.tokenizer.token_bytes(token)))
    best: list[dict[str, float] | None] = []
    for entry in entries:
        best.append(None if entry is None else {})
        for token, value in [] if entry is None else _with_own(entry):
            best[-1].setdefault(_spelled(text, token), _number(value))  # type: ignore[union-attr]
    return {
        "tokens": [_spelled(text, token) for token in token_ids],
        "token_logprobs": [None if entry is None else _number(entry.logprob) for entry in entries],
        "top_logprobs": best,
        "text_offset": offsets,
    }


def _spelled(text: ModelText, token: int) -> str:
    """A token as a key: text, or its bytes where they are no text, so that two tokens do not look alike."""
    raw = text.tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs_form(entries: Sequence[TokenLogprob | None], text: ModelText) -> list[Any]:
    """vLLM's `prompt_logprobs`: token id -> log-probability, rank among the reported, spelling."""
    form: list[Any] = []
    for entry in entries:
        if entry is None:
            form.append(None)
            continue
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, start=1)}
        form.append(
            {
                str(token): {
                    "logprob": _number(value),
                    "rank": ranks.get(token),
                    "decoded_token": text.token_text(token),
                }
                for token, value in _with_own(entry)
            }
        )
    return form


def _with_own(entry: TokenLogprob) -> list[tuple[int, float]]:
    """The best tokens, best first, and the drawn one where it is not among them."""
    own = (entry.token_id, entry.logprob)
    return list(entry.top) if any(token == entry.token_id for token, _ in entry.top) else [*entry.top, own]


def _entry(text: ModelText, token: int, value: float) -> dict[str, Any]:
    raw = text.tokenizer.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _number(value), "bytes": list(raw)}


def _number(value: float) -> float:
    return max(value, _LEAST)
