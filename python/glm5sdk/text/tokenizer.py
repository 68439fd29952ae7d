"""A checkpoint's own tokenizer: text to ids, ids to text, and ids to text as they come."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path

import tokenizers
from tokenizers import decoders

from glm5sdk.core.errors import CheckpointError, ContractError

__all__ = ["GLM_STOP_TOKENS", "StreamDecoder", "Tokenizer"]

# A GLM turn has no end-of-message token: it ends by naming who speaks next, or with the end of the text.
GLM_STOP_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")


class Tokenizer:
    """Wraps the `tokenizers` library over one `tokenizer.json`. Safe to share between threads.

    Special tokens written out in a text are recognised as such, as chat templates need; none is added on its own
    unless asked for.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        # Some files were saved with a training run's cut and padding switched on; both would silently change a prompt.
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(token for token, entry in added.items() if entry.special)

    @classmethod
    def from_pretrained(cls, path: str | PathLike[str]) -> Tokenizer:
        """Load `tokenizer.json` from a checkpoint folder (or the file itself).

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{file}: file is missing, needs a checkpoint folder that holds tokenizer.json")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises the bare class for damaged files
            raise CheckpointError(f"{file}: content is damaged ({error}), needs a tokenizer.json") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows, added tokens included; a model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens marked special in the file."""
        return self._special

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of the tokens that were added to the vocabulary: special ones, and tags such as `<think>`."""
        return self._added

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of the GLM stop tokens that this tokenizer has."""
        ids = (self.token_id(token) for token in GLM_STOP_TOKENS)
        return tuple(token for token in ids if token is not None)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling, or None."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token: int) -> bytes:
        """What a token spells: a piece of UTF-8, which need not hold whole characters; nothing, if there is no token.

        Raises:
            ContractError: the id is negative or no integer, or the tokenizer is not byte-level.
        """
        self._must_be_byte_level()
        return _spelled(self._backend.id_to_token(_id(token)))

    @cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token: a text of so many times more bytes than N has more than N tokens.

        Raises:
            ContractError: the tokenizer is not byte-level.
        """
        self._must_be_byte_level()
        return max(len(_spelled(token)) for token in self._backend.get_vocab(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Text to ids, never cut and never padded.

        Args:
            text: any text; special tokens in it become their ids.
            add_special_tokens: also add what the file's post-processor adds (a chat template writes its own).

        Raises:
            ContractError: `text` is no string, or holds lone surrogates, which no UTF-8 spells.
        """
        if not isinstance(text, str):
            raise ContractError(f"tokenizer: text is {type(text).__name__}, needs str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ContractError(
                f"tokenizer: text has a lone surrogate at {error.start}, needs valid Unicode"
            ) from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to text; invalid UTF-8 becomes U+FFFD, ids without a token become nothing.

        Args:
            ids: token ids.
            skip_special_tokens: leave out tokens marked special.

        Raises:
            ContractError: an id is negative or no integer.
        """
        return self._backend.decode([_id(token) for token in ids], skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = True, hide: Iterable[int] = ()) -> StreamDecoder:
        """A decoder that takes ids as they come and gives the text that is certain.

        Args:
            skip_special_tokens: leave out tokens marked special.
            hide: more ids never to print, for example a generation config's stop ids. The GLM stop tokens are
                hidden in any case.

        Raises:
            ContractError: the tokenizer is not byte-level, so a piece of a token has no bytes of its own.
        """
        self._must_be_byte_level()
        hidden = {*hide, *self.stop_ids, *(self._special if skip_special_tokens else ())}
        return StreamDecoder(self._backend, frozenset(hidden))

    def _must_be_byte_level(self) -> None:
        if not isinstance(self._backend.decoder, decoders.ByteLevel):
            kind = type(self._backend.decoder).__name__
            raise ContractError(f"tokenizer: decoder is {kind}, needs ByteLevel to stream; decode whole texts instead")


class StreamDecoder:
    """Turns ids into text piece by piece; the pieces, joined, are the whole decode.

    A character whose bytes have not all arrived waits, so that no half of one is ever printed.
    """

    def __init__(self, backend: tokenizers.Tokenizer, hidden: frozenset[int]) -> None:
        self._backend = backend
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: int | Iterable[int]) -> str:
        """Take one id or several; return the text that they complete, which may be empty."""
        tokens = [ids] if isinstance(ids, int) else ids
        return self._utf8.decode(b"".join(map(self._bytes, tokens)))

    def finish(self) -> str:
        """Return what still waits (an unfinished character is U+FFFD) and start anew."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest

    def _bytes(self, token: int) -> bytes:
        return b"" if _id(token) in self._hidden else _spelled(self._backend.id_to_token(token))


def _spelled(text: str | None) -> bytes:
    if text is None:
        return b""
    try:
        return bytes(_BYTE_OF[character] for character in text)
    except KeyError:  # an added token is spelled in plain text
        return text.encode()


def _id(token: int) -> int:
    if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= token.__index__() < 2**32:
        raise ContractError(f"tokenizer: id is {token!r}, needs an integer from 0 to 2**32 - 1")
    return token.__index__()


def _byte_alphabet() -> dict[str, int]:
    """The byte each character of a byte-level vocabulary stands for (GPT-2's `bytes_to_unicode`, inverted).

    Printable bytes stand for themselves; the others take the code points from 256 on, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
