"""The law of the output parser: however a text is cut, the events are the same; and no text is lost."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5sdk.text.output_events import ContentText, ToolCallArguments, ToolCallEnded, ToolCallStarted, joined
from glm5sdk.text.output_parser import OutputParser, parse_output
from glm5sdk.text.tool_calls import render_tool_call

many = settings(max_examples=300, deadline=None, derandomize=True)
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
FORMATS = ["glm45", "glm47", "glm53"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "n": {"type": "integer"},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "boolean"}]},
                    "list": {"type": ["array", "string"]},
                    "num": {"type": ["string", "number"]},
                },
            },
        },
    },
    {"name": "two words", "parameters": {"type": "object", "properties": {" odd ": {"type": "string"}}}},
]
# Near-tags, names, keys, values, white space: what decides in some state, or looks as if it did.
PARTS = [tag[:k] for tag in TAGS for k in (1, 3, len(tag) - 1)]
WORDS = ["get", "two words", "two", "s", "n", "maybe", "list", "num", " odd ", "x y", "a" * 300, "é", "🙂"]
SIGNS = [" ", "\n", "\n\n", " " * 70, "<", ">", '"', "\\", "\ud83d", "\ude00", "\x00", "]", "{", "}", "."]
JSON = ["true", "tr", "null", "nul", "[1, 2", "-1", "1e5", "5", "NaN", "True", '"q"']
ATOMS = [*TAGS, *PARTS, *WORDS, *SIGNS, *JSON]
CALLS = ["<tool_call>get", "<arg_key>s</arg_key>", "<arg_key>n</arg_key>", "<arg_key>maybe</arg_key><arg_value>",
         "<arg_key>list</arg_key><arg_value>", "<arg_key>num</arg_key><arg_value>", "<arg_key>?</arg_key><arg_value>",
         "</arg_value>", "</arg_value></tool_call>", "</tool_call>\n<tool_call>get</tool_call>"]  # fmt: skip
texts = st.lists(st.sampled_from([*ATOMS, *CALLS, *CALLS]), max_size=24).map("".join)
modes = st.tuples(st.sampled_from(FORMATS), st.sampled_from([None, [], TOOLS]), st.booleans())


def events(text: str, mode, sizes) -> list:
    format, tools, reasons = mode
    numbers = itertools.count()
    parser = OutputParser(format, tools, reasons, make_id=lambda: f"call_{next(numbers)}")
    got, at = [], 0
    for size in sizes:
        if at >= len(text):
            break
        got += parser.feed(text[at : at + size])
        at += size
    return joined([*got, *parser.feed(text[at:]), *parser.finish()])


@many
@given(text=texts, mode=modes, sizes=st.lists(st.integers(1, 8), max_size=60))
def test_any_chunking_gives_the_same_events(text, mode, sizes) -> None:
    whole = events(text, mode, [])
    assert events(text, mode, sizes) == whole
    assert events(text, mode, itertools.repeat(1)) == whole


@many
@given(text=texts, mode=modes, cut=st.integers(0, 300), sizes=st.lists(st.integers(1, 8), max_size=60))
def test_events_are_well_formed_and_arguments_are_json(text, mode, cut, sizes) -> None:
    open_call, count, arguments = None, 0, ""
    for event in events(text[:cut], mode, sizes):
        match event:
            case ToolCallStarted(index, name, _):
                assert open_call is None and index == count and name == name.strip() != ""
                open_call, count, arguments = index, count + 1, ""
            case ToolCallArguments(index, piece):
                assert index == open_call and piece
                arguments += piece
            case ToolCallEnded(index):
                assert index == open_call
                assert isinstance(json.loads(arguments, parse_constant=lambda word: pytest.fail(word)), dict)
                assert not any(0xD800 <= ord(character) < 0xE000 for character in arguments)
                open_call = None
            case _:
                assert event.text
    assert open_call is None


@many
@given(text=texts, mode=modes)
def test_no_text_is_lost(text, mode) -> None:
    """Every character that is no tag, no white space and in no call comes out again, in its order."""
    rest = "".join(event.text if hasattr(event, "text") else "" for event in events(text, mode, []))
    rest += "".join(event.name for event in events(text, mode, []) if isinstance(event, ToolCallStarted))
    for character in set(text) - set('<>/_ \n"\\') - set("".join(TAGS)):
        if not 0xD800 <= ord(character) < 0xE000 and character != "\x00":
            assert rest.count(character) >= text.count(character), character


@many
@given(text=texts, reasons=st.booleans())
def test_without_tools_calls_are_text(text, reasons) -> None:
    got = events(text, ("glm47", None, reasons), [])
    assert not any(isinstance(event, (ToolCallStarted, ToolCallArguments, ToolCallEnded)) for event in got)
    if not reasons and not text.lstrip().startswith(("<think>", "</think>")):
        assert got == ([ContentText(text)] if text else [])


plain = st.text(alphabet=st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=20)
values = st.fixed_dictionaries(
    {},
    optional={
        "s": plain
        | st.sampled_from(["<tool_call>get", "</tool_call>", "<arg_key>", "</arg_valu", " <think> ", "5", "null"]),
        "n": st.integers(-(10**30), 10**30),
        "maybe": st.none() | st.booleans() | st.just("nothing") | st.just("truest"),
        "list": st.lists(st.integers() | plain, max_size=3) | st.just("text"),
        "num": st.floats(allow_nan=False, allow_infinity=False) | st.just("1 2"),
    },
)


@many
@given(reasoning=plain, content=plain.filter(lambda text: text == text.strip()), calls=st.lists(values, max_size=3),
       format=st.sampled_from(FORMATS), sizes=st.lists(st.integers(1, 8), max_size=60))  # fmt: skip
def test_what_was_written_is_read(reasoning, content, calls, format, sizes) -> None:
    line = "\n" if format == "glm45" else ""
    text = f"{reasoning}{line}</think>{line}{content}"
    text += "".join(line + render_tool_call("get", arguments, format) for arguments in calls)
    if line and reasoning.startswith("\n"):
        reasoning = reasoning[1:]
    message = parse_output(text, format, TOOLS, True)
    assert (message.reasoning, message.content) == (reasoning, content)
    assert [(call.name, json.loads(call.arguments), call.complete) for call in message.tool_calls] == [
        ("get", arguments, True) for arguments in calls
    ]
    assert events(text, (format, TOOLS, True), sizes) == events(text, (format, TOOLS, True), [])


PARTS_TWICE_READ = [
    "<tool_call> ",
    "<tool_call>get</tool_call>",
    "<tool_call>get<arg_key>",
    "a<tool_call",
    "\n<arg_key>",
]


@pytest.mark.smoke
@pytest.mark.parametrize("part", PARTS_TWICE_READ)
@pytest.mark.parametrize("size", [97, 10**6])
def test_time_is_linear_in_the_text(part, size) -> None:
    def seconds(count: int) -> float:
        start = time.process_time()
        assert events(part * count, ("glm45", TOOLS, True), itertools.repeat(size))
        return time.process_time() - start

    # Eight times the text; quadratic would be 64 times the time, in every attempt and not in a busy moment only.
    assert any(seconds(6400) < 20 * seconds(800) for _ in range(5))
