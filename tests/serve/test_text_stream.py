"""Streaming text with stop strings, against a loop over all prefixes of the whole text."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.detokenize import TextStream
from glm5sdk.text import Tokenizer

few = settings(max_examples=300, deadline=None, derandomize=True)
WORDS = ["a", "b", "ab", "ba", "aab", "bab", "é", " 🙂", "\n\n", "abab"]


def _tokenizer() -> Tokenizer:
    """Every byte is a token; so are some words and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|user|>", special=True), AddedToken("[MASK]", special=True)])
    backend.add_tokens([AddedToken(word, normalized=False) for word in WORDS if len(word) > 1])
    return Tokenizer(backend)


TOKENIZER = _tokenizer()


def _plain_loop(ids, stops, include, min_tokens):
    """(text, hit, tokens used): after each token, after each character, does any stop string end here?"""
    stream, text = TOKENIZER.stream(), ""
    for used, token in enumerate(ids, start=1):
        for character in stream.push(token):
            text += character
            ended = [stop for stop in stops if text.endswith(stop)]
            if ended and used > min_tokens:
                hit = max(ended, key=len)
                return (text if include else text[: -len(hit)]), hit, used
    return text + stream.finish(), None, len(ids)


def _cut(draw_cut, ids):
    pieces, at = [], 0
    while at < len(ids):
        size = draw_cut()
        pieces.append(ids[at : at + size])
        at += size
    return pieces


words = st.lists(st.sampled_from(WORDS), max_size=12)
stops_of = st.lists(st.text(alphabet="abé🙂\n\ufffd", min_size=1, max_size=5), max_size=4).map(tuple)


@few
@given(words=words, noise=st.lists(st.integers(0, 257), max_size=4), stops=stops_of, include=st.booleans(),
       min_tokens=st.integers(0, 6), data=st.data())  # fmt: skip
def test_any_chunking_equals_the_plain_loop(words, noise, stops, include, min_tokens, data) -> None:
    ids = [token for word in words for token in TOKENIZER.encode(word)]
    for token in noise:
        ids.insert(data.draw(st.integers(0, len(ids))), token)
    text, hit, used = _plain_loop(ids, stops, include, min_tokens)
    stream = TextStream(TOKENIZER, stops, include, True, min_tokens)
    got, taken, found = "", 0, None
    for piece in _cut(lambda: data.draw(st.integers(1, 8)), ids):
        pushed = stream.push(piece)
        assert text.startswith(got + pushed.text)
        got += pushed.text
        taken += pushed.tokens_used
        found = pushed.hit
        if found is not None:
            assert got == text and stream.push([0]) == ("", found, 0)
            break
        assert pushed.tokens_used == len(piece)
    assert (got + stream.finish(), found, taken) == (text, hit, used)


@few
@given(words=words, stops=stops_of)
def test_only_what_may_become_a_stop_string_is_held_back(words, stops) -> None:
    stream, plain, known, shown = TextStream(TOKENIZER, stops), TOKENIZER.stream(), "", ""
    for token in [token for word in words for token in TOKENIZER.encode(word)]:
        known += plain.push(token)
        pushed = stream.push([token])
        shown += pushed.text
        if pushed.hit is not None:
            return
        held = known[len(shown) :]
        assert known.startswith(shown) and (not held or any(stop.startswith(held) for stop in stops))


@pytest.mark.smoke
def test_a_stop_string_inside_a_draft_names_its_token() -> None:
    ids = [token for word in ("abab", "aab", "\n\n", "ba") for token in TOKENIZER.encode(word)]
    assert len(ids) == 4
    assert TextStream(TOKENIZER, ("b\n",)).push(ids) == ("ababaa", "b\n", 3)
    assert TextStream(TOKENIZER, ("b\n",), include_stop=True).push(ids) == ("ababaab\n", "b\n", 3)
    assert TextStream(TOKENIZER, ("b\n",), min_tokens=3).push(ids) == ("ababaab\n\nba", None, 4)


def test_the_earliest_end_wins_and_then_the_longest() -> None:
    ids = TOKENIZER.encode("a b c")
    assert TextStream(TOKENIZER, ("c", "b c", "a b")).push(ids) == ("", "a b", 3)
    assert TextStream(TOKENIZER, ("c", "b c", "x")).push(ids) == ("a ", "b c", 5)


def test_special_tokens_show_only_when_asked_for() -> None:
    ids = [*TOKENIZER.encode("a"), TOKENIZER.token_id("[MASK]"), *TOKENIZER.encode("b")]
    assert TextStream(TOKENIZER).push(ids).text == "ab"
    assert TextStream(TOKENIZER, skip_special=False).push(ids).text == "a[MASK]b"
    assert TextStream(TOKENIZER, ("[MA",), skip_special=False).push(ids) == ("a", "[MA", 2)


def test_without_a_tokenizer_there_is_no_text_and_no_stop_string() -> None:
    stream = TextStream(None)
    assert stream.push([1, 2, 3]) == ("", None, 3)
    assert stream.finish() == ""
    with pytest.raises(ContractError, match="needs a tokenizer"):
        TextStream(None, ("a",))
    with pytest.raises(ContractError, match="not empty"):
        TextStream(TOKENIZER, ("",))


def test_a_long_repetitive_stop_string_costs_linear_time() -> None:
    stop = "a" * 20_000 + "b"
    stream = TextStream(TOKENIZER, (stop,))
    ids = TOKENIZER.encode("a") * 40_000
    assert stream.push(ids).text == "a" * 20_000
    assert stream.push(TOKENIZER.encode("b")) == ("", stop, 1)
