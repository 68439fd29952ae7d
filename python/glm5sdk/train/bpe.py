"""A byte-level BPE tokenizer with GLM's special tokens, trained from files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from glm5sdk.core.errors import ContractError

__all__ = ["END", "SPECIAL_TOKENS", "save_tokenizer", "train_tokenizer"]

END = "<|endoftext|>"
# GLM's names in GLM's order, at the end of the vocabulary as there.
SPECIAL_TOKENS = (
    END, "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>",
)  # fmt: skip
_BYTES = 256
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(files: Sequence[Path], vocab_size: int, max_bytes: int = 4_000_000) -> tokenizers.Tokenizer:
    """Learn merges from files, evenly thinned out to about `max_bytes`.

    Args:
        files: text, read as UTF-8; invalid bytes become U+FFFD.
        vocab_size: ids, the 256 bytes and `SPECIAL_TOKENS` included. A short text may give fewer.
        max_bytes: text to learn from; merges hardly change beyond a few megabytes.

    Raises:
        ContractError: the vocabulary has no room, or there is no text.
    """
    if vocab_size < _BYTES + len(SPECIAL_TOKENS):
        raise ContractError(
            f"tokenizer: vocab_size is {vocab_size}, needs at least {_BYTES + len(SPECIAL_TOKENS)}: "
            "every byte and the special tokens"
        )
    total = sum(f.stat().st_size for f in files)
    if total == 0:
        raise ContractError(f"tokenizer: text of {len(files)} files is 0 bytes, needs some")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_thinned(files, max(1, round(total / max_bytes))), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _thinned(files: Sequence[Path], step: int) -> Iterator[str]:
    for file in files[::step]:
        yield file.read_text("utf-8", errors="replace")


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: str | PathLike[str], max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, from which transformers and this SDK load it.

    Args:
        tokenizer: with `END` among its tokens.
        folder: made if needed.
        max_length: the model's max_position_embeddings.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    _replace(target / "tokenizer.json", tokenizer.to_str(pretty=True))
    _replace(target / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")


def _replace(file: Path, text: str) -> None:
    """Write beside and rename, so that a crash leaves the old file or the new one."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(text, "utf-8")
    os.replace(part, file)
