"""Text files to batches: files are split by name, tokens by order, and every batch is a function of its number."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Protocol

import tokenizers
import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError

__all__ = [
    "IGNORED", "Batch", "Batches", "Windows", "byte_lengths", "find_texts", "split_files", "standard_library",
    "tokenise",
]  # fmt: skip

IGNORED = -100
_FILES_AT_ONCE = 256
_FOREIGN = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Batch:
    """Sequences and what follows each of their tokens.

    Attributes:
        ids: i64 [B, S].
        targets: i64 [B, S], the next token of each position; -100 where nothing is to be learnt.
    """

    ids: Tensor
    targets: Tensor


class Batches(Protocol):
    """Training data: batch number `index` is the same whenever it is asked for, so a position is one integer."""

    def batch(self, index: int) -> Batch: ...


def find_texts(paths: Iterable[str | PathLike[str]], suffixes: Sequence[str]) -> list[Path]:
    """The files themselves, and files under the folders whose names end in one of `suffixes`; sorted, each once.

    Raises:
        ContractError: a path does not exist, or nothing was found.
    """
    given = [Path(p) for p in paths]
    found: set[Path] = set()
    for path in given:
        if path.is_dir():
            found.update(f for f in path.rglob("*") if f.suffix in suffixes and f.is_file())
        elif path.is_file():
            found.add(path)
        else:
            raise ContractError(f"data: {path} does not exist, needs a text file or a folder")
    if not found:
        names = ", ".join(str(p) for p in given)
        raise ContractError(f"data: {names} holds no file, needs some that end in {' or '.join(suffixes)}")
    return sorted(found)


def standard_library() -> list[Path]:
    """Python sources that come with the interpreter: a text that is at hand without a network.

    Installed packages and test suites are left out: they would make the text another one on every machine.
    """
    root = Path(sysconfig.get_path("stdlib"))
    return [f for f in find_texts([root], (".py",)) if not _FOREIGN.intersection(f.relative_to(root).parts)]


def split_files(files: Sequence[Path], held_out: float) -> tuple[list[Path], list[Path]]:
    """(train, held-out): files with the smallest hashes of their names are held out, at least one on each side.

    A name is the path below the folder that all files share. The split depends on names alone, neither on order nor on
    a seed nor on where the folder lies, so every run is measured on the same text.

    Raises:
        ContractError: fewer than two files.
    """
    if len(files) < 2:
        raise ContractError(f"data: number of files is {len(files)}, needs at least 2: one to train on, one held out")
    count = min(max(round(held_out * len(files)), 1), len(files) - 1)
    shared = os.path.commonpath([f.absolute().parent for f in files])
    names = {f: f.absolute().relative_to(shared).as_posix() for f in files}
    ranked = sorted(files, key=lambda f: hashlib.sha256(names[f].encode(errors="surrogateescape")).digest())
    return sorted(ranked[count:]), sorted(ranked[:count])


def tokenise(files: Sequence[Path], tokenizer: tokenizers.Tokenizer, end_id: int) -> Tensor:
    """All files in order as one stream, `end_id` after each. Special tokens spelled out in a text stay text.

    Args:
        files: read as UTF-8; invalid bytes become U+FFFD.
        tokenizer: the library's object.
        end_id: id of the token that ends a text.

    Returns:
        i32 [n].
    """
    was = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True  # the library's word for "encode them as ordinary text"
    ids: list[int] = []
    try:
        for start in range(0, len(files), _FILES_AT_ONCE):
            texts = [f.read_text("utf-8", errors="replace") for f in files[start : start + _FILES_AT_ONCE]]
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                ids += encoding.ids
                ids.append(end_id)
    finally:
        tokenizer.encode_special_tokens = was
    return torch.tensor(ids, dtype=torch.int32)


def byte_lengths(tokenizer: tokenizers.Tokenizer, rows: int) -> Tensor:
    """UTF-8 bytes that each token of a byte-level vocabulary stands for; special tokens and unused rows have none.

    Returns:
        i64 [rows].
    """
    special = tokenizer.get_added_tokens_decoder()
    lengths = torch.zeros(rows, dtype=torch.int64)
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        if index < rows and index not in special:
            lengths[index] = len(token)  # one character of the byte alphabet is one byte
    return lengths


class Windows:
    """Batches of windows of a token stream: each epoch shifts the windows and shuffles them, by seed.

    Args:
        stream: i32 [n] token ids.
        batch_size: B.
        seq_len: S.
        seed: of shift and order.
        shuffle: False gives the windows in order, from the first token on.

    Raises:
        ContractError: the stream is shorter than one window and the token after it.
    """

    def __init__(self, stream: Tensor, batch_size: int, seq_len: int, seed: int, shuffle: bool = True) -> None:
        if len(stream) < seq_len + 1:
            raise ContractError(
                f"data: stream is {len(stream)} tokens long, needs at least seq_len + 1 = {seq_len + 1}; "
                "give more text or a smaller seq_len"
            )
        self._stream, self._batch, self._length = stream, batch_size, seq_len
        self._seed, self._shuffle = seed, shuffle
        slack = min(seq_len - 1, len(stream) - seq_len - 1) if shuffle else 0
        self._slack = slack
        self.windows = (len(stream) - 1 - slack) // seq_len
        self._epoch, self._starts = -1, torch.empty(0, dtype=torch.int64)

    def batch(self, index: int) -> Batch:
        """Batch number `index`, i64 [B, S] and [B, S]; windows repeat only after all have been seen."""
        return self.rows(range(index * self._batch, (index + 1) * self._batch))

    def rows(self, windows: Sequence[int], device: torch.device | str = "cpu") -> Batch:
        """The windows with these numbers as one batch."""
        starts = [self._start(window) for window in windows]
        rows = torch.stack([self._stream[s : s + self._length + 1] for s in starts]).to(device, torch.int64)
        return Batch(rows[:, :-1], rows[:, 1:])

    def _start(self, window: int) -> int:
        epoch, place = divmod(window, self.windows)
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self._epoch_starts(epoch)
        return int(self._starts[place])

    def _epoch_starts(self, epoch: int) -> Tensor:
        starts = torch.arange(self.windows) * self._length
        if not self._shuffle:
            return starts
        digest = hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        shift = torch.randint(0, self._slack + 1, (), generator=generator)
        return starts[torch.randperm(self.windows, generator=generator)] + shift
