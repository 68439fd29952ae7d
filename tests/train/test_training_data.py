"""Files to batches: what is held out, what a token stream holds, which windows come when."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_training import VOCABULARY, write_texts

from glm5sdk.core.errors import ContractError
from glm5sdk.train.bpe import END, SPECIAL_TOKENS, save_tokenizer, train_tokenizer
from glm5sdk.train.data import Windows, byte_lengths, find_texts, split_files, tokenise


def test_finds_files_once_and_sorted(tmp_path: Path) -> None:
    files = write_texts(tmp_path / "a", 3)
    (tmp_path / "a" / "other.bin").write_bytes(b"\0")
    assert find_texts([tmp_path, files[0]], (".txt",)) == files
    assert find_texts([tmp_path / "a" / "other.bin"], (".txt",)) == [tmp_path / "a" / "other.bin"]


def test_split_depends_on_names_alone(tmp_path: Path) -> None:
    files = write_texts(tmp_path, 20)
    train, held_out = split_files(files, 0.25)
    assert len(held_out) == 5
    assert sorted(train + held_out) == files
    assert split_files(files[::-1], 0.25) == (train, held_out)
    moved = write_texts(tmp_path / "elsewhere", 20)
    assert [f.name for f in split_files(moved, 0.25)[1]] == [f.name for f in held_out]
    assert [len(part) for part in split_files(files, 0.999)] == [1, 19]
    assert [len(part) for part in split_files(files, 0.001)] == [19, 1]


def test_stream_is_the_texts_and_their_ends(tmp_path: Path) -> None:
    files = write_texts(tmp_path, 4)
    tokenizer = train_tokenizer(files, VOCABULARY)
    end = tokenizer.token_to_id(END)
    # Naming the end token in a text must not end it.
    files[1].write_text(f"before {END} after", "utf-8")
    stream = tokenise(files, tokenizer, end)
    assert int((stream == end).sum()) == 4
    parts, start = [], 0
    for stop in (stream == end).nonzero()[:, 0].tolist():
        parts.append(tokenizer.decode(stream[start:stop].tolist(), skip_special_tokens=False))
        start = stop + 1
    assert parts == [f.read_text("utf-8") for f in files]
    assert tokenizer.encode(END).ids == [end]
    lengths = byte_lengths(tokenizer, VOCABULARY + 5)
    assert int(lengths[stream.long()].sum()) == sum(f.stat().st_size for f in files)
    assert lengths.shape == (VOCABULARY + 5,)
    assert int(lengths[end]) == 0


def test_windows_are_a_function_of_their_number() -> None:
    stream = torch.arange(1000, dtype=torch.int32)
    windows = Windows(stream, batch_size=3, seq_len=10, seed=7)
    forward = [windows.batch(i) for i in range(80)]
    again = Windows(stream, batch_size=3, seq_len=10, seed=7)
    for index in (79, 3, 40, 0):
        assert torch.equal(again.batch(index).ids, forward[index].ids)
    other = Windows(stream, batch_size=3, seq_len=10, seed=8)
    assert any(not torch.equal(other.batch(i).ids, forward[i].ids) for i in range(3))
    for batch in forward:
        assert batch.ids.shape == batch.targets.shape == (3, 10)
        assert torch.equal(batch.targets, batch.ids + 1)


def test_an_epoch_holds_each_window_once() -> None:
    windows = Windows(torch.arange(1000, dtype=torch.int32), batch_size=1, seq_len=10, seed=1)
    for epoch in range(3):
        starts = [int(windows.batch(epoch * windows.windows + i).ids[0, 0]) for i in range(windows.windows)]
        assert len(set(starts)) == windows.windows
        assert len({s % 10 for s in starts}) == 1
    assert windows.windows >= 98


def test_evaluation_windows_come_in_order() -> None:
    windows = Windows(torch.arange(41, dtype=torch.int32), batch_size=2, seq_len=10, seed=0, shuffle=False)
    assert windows.windows == 4
    assert windows.rows(range(4)).ids[:, 0].tolist() == [0, 10, 20, 30]
    assert windows.rows([3]).targets[0].tolist() == list(range(31, 41))


def test_tokenizer_round_trip_and_special_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from glm5sdk.text import Tokenizer

    tokenizer = train_tokenizer(write_texts(tmp_path, 4), VOCABULARY)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    assert size <= VOCABULARY
    assert [tokenizer.token_to_id(t) for t in SPECIAL_TOKENS] == list(range(size - len(SPECIAL_TOKENS), size))
    save_tokenizer(tokenizer, tmp_path / "saved", 64)
    ours, theirs = Tokenizer.from_pretrained(tmp_path / "saved"), AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in ("self.x = 1\n", "naïve 值 \U0001f600", "  \t\n\n ", ""):
        ids = ours.encode(text)
        assert ours.decode(ids) == text
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    assert theirs.eos_token == END
    assert ours.stop_ids[0] == tokenizer.token_to_id(END)


def test_training_a_tokenizer_twice_gives_the_same(tmp_path: Path) -> None:
    files = write_texts(tmp_path, 4)
    assert train_tokenizer(files, VOCABULARY).to_str() == train_tokenizer(files, VOCABULARY).to_str()


def test_hostile_data(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="does not exist"):
        find_texts([tmp_path / "nothing"], (".txt",))
    with pytest.raises(ContractError, match="holds no file"):
        find_texts([tmp_path], (".txt",))
    one = write_texts(tmp_path, 1)
    with pytest.raises(ContractError, match="number of files is 1"):
        split_files(one, 0.1)
    with pytest.raises(ContractError, match="vocab_size is 200, needs at least 265"):
        train_tokenizer(one, 200)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(ContractError, match="0 bytes"):
        train_tokenizer([empty], VOCABULARY)
    with pytest.raises(ContractError, match="stream is 10 tokens long, needs at least seq_len"):
        Windows(torch.zeros(10, dtype=torch.int32), 1, 10, 0)
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"na\xefve " * 100)
    assert len(tokenise([latin], train_tokenizer([latin], VOCABULARY), 0)) > 1
