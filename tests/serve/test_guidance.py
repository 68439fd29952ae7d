"""Structured output: whatever is drawn under the masks matches; what cannot be guided is refused in time."""

from __future__ import annotations

import json
import random
import re
import time

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from glm5sdk.core.errors import ContractError
from glm5sdk.serve import StructuredOutput
from glm5sdk.serve.guidance import Guide, compile_guide
from glm5sdk.text import Tokenizer

pytest.importorskip("llguidance")
TAGS = ["<|endoftext|>", "<|user|>", "[MASK]"]


def _tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    corpus = ['{"name": "Größe", "count": 12, "list": [1, 2.5, true, null]}', '{"a":{"b":[]},"c":"\\n"}'] * 20
    backend.train_from_iterator(corpus, trainer)
    backend.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in TAGS])
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>", '{"a"')])
    return Tokenizer(backend)


TOKENIZER = _tokenizer()
ROWS = TOKENIZER.vocab_size + 41
STOPS = tuple(TOKENIZER.token_id(tag) for tag in TAGS[:2])
SLIM = 400  # tokens a walk may take


def guide(kind: str, value=None, **options) -> Guide:
    return compile_guide(StructuredOutput(kind, value, **options), TOKENIZER, ROWS, STOPS)


def allowed(state: Guide) -> list[int]:
    mask = state.mask()
    assert mask.dtype == torch.bool and mask.shape == (ROWS,)
    return torch.nonzero(mask).flatten().tolist()


CLOSERS = [token for token in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(token)[:1] in (b'"', b"}", b"]")]


def walk(state: Guide, draw: random.Random) -> str | None:
    """Text drawn under the masks, in a hurry to end; None when it did not."""
    tokens: list[int] = []
    while len(tokens) < SLIM and not state.is_finished:
        choices = allowed(state)
        assert choices and (bool(set(choices) & set(STOPS)) == state.may_end)
        closing = [token for token in choices if token in STOPS] or [t for t in choices if t in CLOSERS]
        token = draw.choice(closing if closing and draw.random() < 0.4 else choices)
        assert state.accept(token)
        if token in STOPS:
            assert state.is_finished
            break
        tokens.append(token)
    return TOKENIZER.decode(tokens, skip_special_tokens=False) if state.is_finished else None


def valid(value, schema) -> bool:
    """A plain validator for the keywords that `schemas` draws."""
    if "anyOf" in schema:
        return any(valid(value, part) for part in schema["anyOf"])
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "number":
            return type(value) in (int, float)
        case "string":
            fits = isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 999)
            return fits and re.search(schema.get("pattern", ""), value) is not None
        case "array":
            fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return fits and all(valid(item, schema["items"]) for item in value)
        case _:
            known = schema["properties"]
            fits = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(known)
            return fits and all(valid(item, known[key]) for key, item in value.items())


leaves = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "number"}]),
    st.integers(-50, 50).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 20}),
    st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
              st.integers(0, 3), st.integers(0, 6)),
    st.sampled_from(["^a+b$", "^[0-9]{2,4}-x$", "^(yes|no)$"]).map(lambda p: {"type": "string", "pattern": p}),
    st.lists(st.sampled_from(["a", "Größe", '"', 1, True, None]), min_size=1, max_size=3).map(lambda e: {"enum": e}),
)  # fmt: skip


def _objects(inner):
    return st.dictionaries(st.sampled_from(["a", "b", "c d", "é"]), inner, max_size=3).flatmap(
        lambda known: st.sets(st.sampled_from(sorted(known) or ["a"]), max_size=3).map(
            lambda needed: {"type": "object", "properties": known, "required": sorted(needed & set(known)),
                            "additionalProperties": False}))  # fmt: skip


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        _objects(inner),
        st.builds(lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
                  inner, st.integers(0, 2), st.integers(0, 2)),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}),
    ),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True)
@given(schema=schemas, seed=st.integers(0, 999))
def test_what_is_drawn_under_the_masks_is_valid(schema, seed) -> None:
    text = walk(guide("json_schema", schema), random.Random(seed))
    if text is not None:
        assert valid(json.loads(text), schema), (text, schema)


@pytest.mark.smoke
def test_walks_of_a_schema_end() -> None:
    known = {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "s": {"enum": ["x"]}}
    schema = {"type": "object", "properties": known, "required": ["n", "s"], "additionalProperties": False}
    texts = [walk(guide("json_schema", schema), random.Random(seed)) for seed in range(20)]
    assert all(text is not None and valid(json.loads(text), schema) for text in texts)


@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
def test_json_may_be_indented_but_not_endlessly(indent) -> None:
    value = {"a": [1, {"b": None}], "c": "x"}
    state = guide("json_object")
    tokens = [TOKENIZER.token_id(c) for c in json.dumps(value, indent=indent).replace(" ", "Ġ").replace("\n", "Ċ")
              .replace("\t", "ĉ")]  # fmt: skip
    assert state.accept_all(tokens) == len(tokens) and state.is_finished
    state = guide("json_object")
    assert state.accept_all([TOKENIZER.token_id(c) for c in "{" + "Ċ" * 100]) == 2


@pytest.mark.parametrize("kind, value, matches", [
    ("json_object", None, lambda text: isinstance(json.loads(text), dict)),
    ("regex", r"[a-c]{2,5}(é|🙂)\d*", lambda text: re.fullmatch(r"[a-c]{2,5}(é|🙂)\d*", text)),
    ("grammar", 'start: "<" (start | word)* ">"\nword: /[xy]{1,3}/', lambda text: text.count("<") == text.count(">")),
    ("choice", ["yes", "no", "y\"'\\\n\té", "<|user|>"], lambda text: text in ("yes", "no", "y\"'\\\n\té", "<|user|>")),
])  # fmt: skip
def test_other_kinds(kind, value, matches) -> None:
    ended = [text for seed in range(30) if (text := walk(guide(kind, value), random.Random(seed))) is not None]
    assert len(ended) > 5 and all(matches(text) for text in ended)
    if kind == "choice":
        assert len(set(ended)) > 2


def test_rows_without_a_token_and_tags_are_never_allowed() -> None:
    state = guide("regex", "(.|\n)*")
    tags = {TOKENIZER.token_id(tag) for tag in ("[MASK]", "<think>", "</think>", '{"a"')}
    got = set(allowed(state))
    assert got.isdisjoint(tags) and max(got) < TOKENIZER.vocab_size and set(STOPS) <= got
    assert not state.accept(TOKENIZER.token_id("[MASK]")) and not state.accept(ROWS - 1) and not state.accept(ROWS)
    assert not state.accept(-1)


def test_the_end_is_allowed_only_where_the_grammar_may_end() -> None:
    state = guide("regex", "ab?")
    (a,), (b,) = TOKENIZER.encode("a"), TOKENIZER.encode("b")
    assert allowed(state) == [a] and not state.accept(STOPS[0]) and not state.may_end
    assert state.accept(a) and set(allowed(state)) == {b, *STOPS} and state.may_end and not state.is_finished
    assert state.accept(b) and set(allowed(state)) == set(STOPS) and state.is_finished


def test_drafts_are_taken_up_to_the_first_wrong_one_and_taken_back() -> None:
    state = guide("json_schema", {"enum": ["abcd", "abef"]})
    before = allowed(state)
    draft = [TOKENIZER.token_id(letter) for letter in '"abx']
    assert state.accept_all(draft) == 3
    here = allowed(state)
    twin = state.fork()
    assert state.accept_all([TOKENIZER.token_id(letter) for letter in 'ef"']) == 3 and state.may_end
    assert state.accept(STOPS[1]) and state.is_finished
    state.rollback(4)
    assert allowed(state) == here == allowed(twin) and not state.is_finished
    assert twin.accept_all([TOKENIZER.token_id(letter) for letter in 'cd"']) == 3 and twin.may_end
    state.rollback(3)
    assert allowed(state) == before
    with pytest.raises(ContractError, match="rollback is 1 tokens, needs 0 to the 0"):
        state.rollback(1)


def test_the_grammar_begins_behind_the_reasoning() -> None:
    state = guide("choice", ["ab"], after_reasoning=True)
    (a,), (b,), end = TOKENIZER.encode("a"), TOKENIZER.encode("b"), TOKENIZER.token_id("</think>")
    free = set(allowed(state))
    assert free == set(range(TOKENIZER.vocab_size)) - {*STOPS, TOKENIZER.token_id("<think>")}
    assert not state.armed and not state.accept(STOPS[0]) and not state.accept(ROWS - 1)
    assert state.accept_all([b, b, end, a, a]) == 4
    assert state.armed and set(allowed(state)) == {b}
    state.rollback(2)
    assert not state.armed and set(allowed(state)) == free and not state.may_end and not state.is_finished
    assert state.accept_all([end, a, b, STOPS[0]]) == 4 and state.is_finished
    assert TOKENIZER.token_id("</think>") not in allowed(guide("choice", ["ab"]))


def test_copies_of_a_state_remember_their_reasoning() -> None:
    state = guide("choice", ["ab"], after_reasoning=True)
    state.accept_all([5, TOKENIZER.token_id("</think>"), TOKENIZER.token_id("a")])
    twin = state.fork()
    twin.rollback(3)
    assert not twin.armed and state.armed and state.may_end is False
    assert state.accept(TOKENIZER.token_id("b")) and state.is_finished


def _deep(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE = [
    ("json_schema", _deep(300), "recursion"),
    ("json_schema", {"enum": ["x" * 70_000]}, "70014 characters, needs at most 65536"),
    ("json_schema", {"$ref": "#"}, "NoExtension"),
    ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "NoExtension"),
    ("json_schema", {"$ref": "http://localhost/schema.json"}, "does not fetch"),
    ("json_schema", {"not": {"type": "string"}}, "Unimplemented keys"),
    ("json_schema", {"not": {"type": "string"}, "x-guidance": {"lenient": True}}, "Unimplemented keys"),
    ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ("json_schema", {"type": "integer", "multipleOf": 999999937}, "fuel exhausted"),
    ("json_schema", {"type": "colour"}, "Invalid type"),
    ("json_schema", {"type": "string", "x": float("nan")}, "no JSON"),
    ("json_schema", {"allOf": [{"type": "string"}, {"type": "null"}]}, "Unsatisfiable"),
    ("json_schema", [1], "json_schema is list, needs a dict"),
    ("json_schema", "[", "not usable"),
    ("regex", "(a", "unclosed group"),
    ("regex", "", "needs a text"),
    ("regex", "(" * 30_000 + ")" * 30_000, "not usable"),
    ("regex", "\ud800", "not usable"),
    ("grammar", "start: a\na: a", "NoExtension"),
    ("grammar", "nonsense", "not usable"),
    ("grammar", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000, "too deeply nested"),
    ("grammar", 5, "value is 5, needs a text"),
    ("choice", [], "needs a list of texts"),
    ("choice", ["a", ""], "needs a list of texts"),
    ("choice", ["a"] * 5000, "holds 5000 texts, needs at most 4096"),
    ("xml", "a", "kind is 'xml', needs one of json_schema"),
]


@pytest.mark.parametrize(
    "kind, value, reason", HOSTILE, ids=lambda value: repr(value)[:24] if isinstance(value, str) else ""
)
def test_what_cannot_be_guided_is_refused_with_the_reason(kind, value, reason) -> None:
    start = time.process_time()
    with pytest.raises(ContractError, match=re.escape(reason)):
        guide(kind, value)
    assert time.process_time() - start < 5


def test_a_schema_too_deep_to_be_written_is_refused() -> None:
    with pytest.raises(ContractError, match="is no JSON"):
        guide("json_schema", _deep(100_000))


@pytest.mark.parametrize("kind, value", [
    ("regex", "(?:(?:a{50}){50}){50}"),
    ("regex", "(.*a.{60}|.*b.{60}|(a|b|c){1,400}(a|b){1,300})"),
    ("regex", "|".join(map(str, range(9000)))),
    ("grammar", 'start: a\na: a a | "x" | a a a | ""'),
    ("grammar", 'start: a{1,1000}\na: b{1,1000}\nb: "x"{1,1000}'),
    ("grammar", 'start: "a"' + ' | "a"' * 10_000),
    ("json_schema", {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1500)}}),
])  # fmt: skip
def test_grammars_made_to_be_slow_are_bounded(kind, value) -> None:
    """Each either works at some pace, or says that it is beyond its limits."""
    start, draw, refused = time.process_time(), random.Random(0), ""
    try:
        state = guide(kind, value)
        for steps in range(20):
            assert time.process_time() - start < 5 + steps
            choices = [token for token in allowed(state) if token not in STOPS]
            if not choices or state.is_finished:
                break
            if not state.accept(draw.choice(choices)):
                state.mask()  # says why
                pytest.fail("an allowed token was refused without a reason")
    except ContractError as error:
        refused = str(error)
    assert not refused or "beyond its limits" in refused or "not usable" in refused
    assert time.process_time() - start < 30


def test_what_the_tokenizer_lacks_is_said() -> None:
    structured = StructuredOutput("json_object")
    with pytest.raises(ContractError, match="stop ids are .*, needs at least one"):
        compile_guide(structured, TOKENIZER, ROWS, ())
    with pytest.raises(ContractError, match="needs at least one, all tokens below"):
        compile_guide(structured, TOKENIZER, ROWS, (ROWS - 1,))
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "<|user|>": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    with pytest.raises(ContractError, match="no token </think>"):
        compile_guide(StructuredOutput("json_object", None, True), Tokenizer(backend), 2, (1,))
    backend.decoder = decoders.Fuse()
    with pytest.raises(ContractError, match="needs ByteLevel"):
        compile_guide(structured, Tokenizer(backend), 2, (1,))
