"""Text to ids and back, whole and as a stream."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.text import GenerationConfig, Tokenizer

STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
TEXTS = ["", "plain", "Größe 你好 🙂👩‍👩‍👧!", "\n\n  x\t", "a\u0000b\ufffdc", "<think>no</think>", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 é"]
shared = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


@pytest.mark.smoke
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_recognised_and_none_is_added(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("[gMASK]<sop><|user|>hi<|assistant|>")
    names = ["[gMASK]", "<sop>", "<|user|>"]
    assert ids[:3] == [tokenizer.token_id(name) for name in names]
    assert ids[-1] == tokenizer.token_id("<|assistant|>")
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.special_ids >= {tokenizer.token_id(name) for name in [*names, *STOPS, "<|assistant|>"]}
    assert tokenizer.token_id("<think>") not in tokenizer.special_ids
    assert tokenizer.vocab_size == tokenizer.token_id("two words é") + 1  # the token added last


@shared
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_stream_of_any_text_equals_the_text(tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.stream(skip_special_tokens=False)
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert stream.finish() == ""
    assert "".join(pieces) == text


@shared
@given(data=st.data())
def test_stream_of_any_ids_equals_the_whole_decode(tokenizer: Tokenizer, oracle, data: st.DataObject) -> None:
    # Random ids cut characters at every byte and hold invalid UTF-8; some have no token at all.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    stream = tokenizer.stream()
    pieces = [stream.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(pieces) + stream.finish() == oracle.decode(ids, skip_special_tokens=True)


def _byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One id per byte of a text: the pre-tokenizer spells bytes as symbols, each of which is in the vocabulary."""
    pieces = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    ids = [tokenizer.token_id(symbol) for piece, _ in pieces for symbol in piece]
    assert len(ids) == len(text.encode())
    return ids


@pytest.mark.smoke
def test_a_character_is_never_printed_in_parts(tokenizer: Tokenizer) -> None:
    text = "🙂é👩‍👧 ok"
    ids = _byte_ids(tokenizer, text)
    rng = random.Random(5)
    for _ in range(50):
        stream, rest, printed = tokenizer.stream(), ids, ""
        while rest:
            count = rng.randint(1, 5)
            printed += stream.push(rest[:count])
            rest = rest[count:]
            assert text.startswith(printed)
        assert printed == text
        assert stream.finish() == ""


def test_an_unfinished_character_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = _byte_ids(tokenizer, "🙂")
    stream = tokenizer.stream()
    assert stream.push(ids[:3]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(ids) == "🙂"  # usable again


@pytest.mark.smoke
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("stop", STOPS)
def test_stop_tokens_are_never_streamed(tokenizer: Tokenizer, stop: str, skip: bool) -> None:
    stream = tokenizer.stream(skip_special_tokens=skip)
    text = stream.push(tokenizer.encode(f"yes<think>hm</think>{stop}")) + stream.finish()
    assert text == "yes<think>hm</think>"


def test_stop_tokens_are_hidden_even_if_not_marked_special(checkpoint: Path, tmp_path: Path) -> None:
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    for entry in content["added_tokens"]:
        entry["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    stream = tokenizer.stream()
    assert stream.push(tokenizer.encode("a<|user|>b<|system|>")) == "ab<|system|>"


def test_more_ids_can_be_hidden(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream(hide=tokenizer.encode("</think>"))
    assert stream.push(tokenizer.encode("a</think>b")) == "ab"


def test_stop_ids_agree_with_the_generation_config(tokenizer: Tokenizer, checkpoint: Path) -> None:
    assert set(tokenizer.stop_ids) == set(GenerationConfig.from_pretrained(checkpoint).stop_ids)


def test_cut_and_padding_stored_in_the_file_are_ignored(checkpoint: Path, tmp_path: Path, oracle) -> None:
    stored = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    stored.enable_truncation(4)
    stored.enable_padding(length=64)
    stored.save(str(tmp_path / "tokenizer.json"))
    text = "The quick brown fox jumps over the lazy dog."
    assert Tokenizer.from_pretrained(tmp_path).encode(text) == oracle.encode(text).ids


def test_a_tokenizer_that_is_not_byte_level_refuses_to_stream(tmp_path: Path) -> None:
    word = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    word.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ContractError, match="decoder is WordPiece, needs ByteLevel"):
        Tokenizer(word).stream()


def test_errors_say_what_is_wrong(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: file is missing"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: content is damaged"):
        Tokenizer.from_pretrained(tmp_path)
    with pytest.raises(ContractError, match="text is bytes, needs str"):
        tokenizer.encode(b"x")
    with pytest.raises(ContractError, match="lone surrogate at 1"):
        tokenizer.encode("a\ud800")
    for bad in (-1, 1.5, True, 2**32):
        with pytest.raises(ContractError, match="needs an integer"):
            tokenizer.decode([bad])
        with pytest.raises(ContractError, match="needs an integer"):
            tokenizer.stream().push([bad])


def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer, checkpoint: Path) -> None:
    for text in TEXTS:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""  # a row without a token
    with pytest.raises(ContractError, match="id is -1"):
        tokenizer.token_bytes(-1)
    backend = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    backend.decoder = tokenizers.decoders.Fuse()
    with pytest.raises(ContractError, match="needs ByteLevel"):
        Tokenizer(backend).token_bytes(0)


def test_added_tokens_are_special_ones_and_tags(tokenizer: Tokenizer) -> None:
    tag = tokenizer.token_id("<think>")
    assert tokenizer.special_ids < tokenizer.added_ids and tag in tokenizer.added_ids - tokenizer.special_ids
    assert tokenizer.encode("a")[0] not in tokenizer.added_ids
