"""What the output parser makes of known texts, and of faults that other servers had."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from glm5sdk.core.errors import ContractError
from glm5sdk.text.output_events import ContentText, ReasoningText, ToolCallArguments, ToolCallEnded, ToolCallStarted
from glm5sdk.text.output_parser import OutputParser, new_call_id, parse_output

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "exact": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


def call(name: str, **arguments: str) -> str:
    inside = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
    return f"<tool_call>{name}{inside}</tool_call>"


def read(text: str, format: str = "glm47", tools=TOOLS, reasons: bool = False):
    message = parse_output(text, format, tools, reasons)
    return message.reasoning, message.content, [(c.name, json.loads(c.arguments)) for c in message.tool_calls]


@pytest.mark.smoke
def test_a_whole_output() -> None:
    text = "I think.</think>Well: " + call("get_weather", city="Köln", days=" 3 ", tags='["a", 1]', exact="true")
    arguments = {"city": "Köln", "days": 3, "tags": ["a", 1], "exact": True}
    assert read(text, reasons=True) == ("I think.", "Well: ", [("get_weather", arguments)])


def test_events_of_a_stream() -> None:
    parser = OutputParser("glm47", TOOLS, True, make_id=lambda: "call_1")
    opening = "_weather<arg_key>city</arg_key><arg_value>a"
    pieces = ["So", "</th", "ink>", "<tool_call>get", opening, '"b', "</arg_value></tool", "_call>"]
    got = [event for piece in pieces for event in parser.feed(piece)]
    assert got == [
        ReasoningText("So"),
        ToolCallStarted(0, "get_weather", "call_1"),
        ToolCallArguments(0, '{"city": "a'),
        ToolCallArguments(0, '\\"b'),
        ToolCallArguments(0, '"'),
        ToolCallArguments(0, "}"),
        ToolCallEnded(0, True),
    ]
    assert parser.finish() == [] == parser.finish()
    with pytest.raises(ContractError, match="is finished, needs a new parser"):
        parser.feed("more")


def test_a_long_string_streams_and_is_not_held_back() -> None:
    parser = OutputParser("glm47", TOOLS)
    parser.feed("<tool_call>get_weather<arg_key>city</arg_key><arg_value>")
    for word in ("It ", "was < a ", "dark\n", "night"):
        (event,) = parser.feed(word)
        assert json.loads(f'"{event.text}"') == word


def test_a_string_or_null_streams_once_it_can_be_no_null() -> None:
    parser = OutputParser("glm47", TOOLS)
    parser.feed("<tool_call>get_weather<arg_key>note</arg_key><arg_value>")
    assert parser.feed(" nu") == []
    assert parser.feed("t") == [ToolCallArguments(0, '" nut')]


def test_fault_58_deltas_of_many_tokens_keep_names_and_arguments() -> None:
    """Speculation hands over several tokens at once; names came out as `get`, arguments cut."""
    text = "".join(call("get_weather", city=f"city {k}", days=str(k)) for k in range(20))
    tokens = [text[i : i + 3] for i in range(0, len(text), 3)]
    draw = random.Random(58)
    for _ in range(50):
        parser, events, at = OutputParser("glm47", TOOLS), [], 0
        while at < len(tokens):
            size = draw.randint(1, 8)
            events += parser.feed("".join(tokens[at : at + size]))
            at += size
        events += parser.finish()
        assert [e.name for e in events if isinstance(e, ToolCallStarted)] == ["get_weather"] * 20
        for k in range(20):
            arguments = "".join(e.text for e in events if isinstance(e, ToolCallArguments) and e.index == k)
            assert json.loads(arguments) == {"city": f"city {k}", "days": k}


@pytest.mark.parametrize("format", ["glm45", "glm47", "glm53"])
@pytest.mark.parametrize("value", ["  two  ", "\n", "a\n", "\n\ta", "", " ", "\r\n", "    if x:\n        y\n"])
def test_fault_61_white_space_of_strings_is_kept(format, value) -> None:
    line = "\n" if format == "glm45" else ""
    text = f"<tool_call>get_weather{line}<arg_key>city</arg_key>{line}<arg_value>{value}</arg_value>{line}</tool_call>"
    assert read(text, format)[2] == [("get_weather", {"city": value})]


@pytest.mark.parametrize("name", ["get_weather\n", "\nget_weather", " get_weather \n"])
def test_fault_64_names_are_trimmed_so_that_their_schema_is_found(name) -> None:
    text = call(name, days="3", city="3", exact="false", note="null")
    wanted = {"days": 3, "city": "3", "exact": False, "note": None}
    assert read(text) == ("", "", [("get_weather", wanted)])


def test_fault_65_the_newest_model_always_starts_in_reasoning() -> None:
    text = "Hm.</think>Yes."
    assert read(text, "glm53", reasons=None)[:2] == ("Hm.", "Yes.")
    assert read("<think>" + text, "glm53", reasons=None)[:2] == ("Hm.", "Yes.")
    assert read("Hm", "glm53", reasons=None)[:2] == ("Hm", "")
    assert read("</think>Yes.", "glm53", reasons=None)[:2] == ("", "Yes.")
    assert read("Yes.", "glm47", reasons=None)[:2] == ("", "Yes.")
    assert read("</think>Yes.", "glm47", reasons=None)[:2] == ("", "Yes.")
    assert read("\n<think>Hm.</think>Yes.", "glm47", reasons=None)[:2] == ("Hm.", "Yes.")


@pytest.mark.parametrize(
    "text, reasoning, content, calls",
    [
        (call("now"), "", "", [("now", {})]),
        ("a\n" + call("now") + "\n" + call("now") + " \n", "", "a\n", [("now", {})] * 2),
        ("Use <tool_call> to call.", "", "Use <tool_call> to call.", []),
        ("<tool_call></tool_call>", "", "<tool_call></tool_call>", []),
        ('<tool_call>{"name": "f"}</tool_call>', "", '<tool_call>{"name": "f"}</tool_call>', []),
        ("a < b </think> c </arg_key>", "", "a < b </think> c </arg_key>", []),
        ("a<think>b</think>", "", "a<think>b</think>", []),
        ("a<tool_cal", "", "a<tool_cal", []),
        ("  ", "", "  ", []),
        (" \n<tool_call>x y", "", " \n<tool_call>x y", []),
        ("<tool_call>get_wea", "", "<tool_call>get_wea", []),
        ("<tool_call><tool_call>now</tool_call>", "", "<tool_call>", [("now", {})]),
        # missing closing tags
        ("<tool_call>now" + call("f", a="1"), "", "<tool_call>now", [("f", {"a": 1})]),
        (call("f", a="1").removesuffix("</tool_call>") + call("now"), "", "", [("f", {"a": 1}), ("now", {})]),
        ("<tool_call>f<arg_key>a<arg_value>1</arg_value></tool_call>", "", "", [("f", {"a": 1})]),
        # truncated
        ("<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_val", "", "", [("f", {"a": "x</arg_val"})]),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>[1, 2", "", "", [("f", {"a": "[1, 2"})]),
        ("<tool_call>f<arg_key>ab", "", "<arg_key>ab", [("f", {})]),
        ("<tool_call>f<arg_key>ab</arg_key> ", "", "<arg_key>ab</arg_key> ", [("f", {})]),
        # text where none belongs
        ("<tool_call>f<arg_key>a</arg_key></tool_call>", "", "<arg_key>a</arg_key>", [("f", {})]),
        (call("f", a="1", b="2").replace("</arg_key>", "</arg_key>:").replace("1</arg_value>", "1</arg_value>, "),
         "", ":, :", [("f", {"a": 1, "b": 2})]),
        (call("f", a="1") + "done", "", "done", [("f", {"a": 1})]),
        ("<tool_call>f<arg_key> a </arg_key><arg_value>1</arg_value></tool_call>", "", "", [("f", {"a": 1})]),
    ],
)  # fmt: skip
def test_odd_texts(text, reasoning, content, calls) -> None:
    assert read(text, tools=[]) == (reasoning, content, calls)


def test_calls_whose_end_never_came_are_marked() -> None:
    whole, cut = call("f", a="x"), "<tool_call>f<arg_key>a</arg_key><arg_value>x"
    assert [c.complete for c in parse_output(whole + cut, tools=[]).tool_calls] == [True, False]


def test_reasoning_ends_at_a_call() -> None:
    assert read("I call" + call("now") + "ok", reasons=True) == ("I call", "ok", [("now", {})])
    assert read("a <tool_call> b</think>c", reasons=True) == ("a <tool_call> b", "c", [])
    assert read("I call" + call("now") + "</think>", tools=None, reasons=True) == ("I call" + call("now"), "", [])


def test_the_older_format_has_tags_on_lines_of_their_own() -> None:
    text = "<think>\nHm.\n</think>\nWell.\n<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    text += "</tool_call>"
    assert read(text, "glm45") == ("Hm.", "Well.", [("get_weather", {"days": 3})])
    assert read("a\n<tool_call>b c\n", "glm45") == ("", "a\n<tool_call>b c\n", [])


def test_plain_output_has_no_tags() -> None:
    text = "<think>" + call("now")
    assert read(text, "plain", reasons=True) == ("", text, [])


def test_escapes_are_right_for_every_character() -> None:
    text = "".join(map(chr, [*range(0x300), 0x2028, 0xFFFD, 0xFFFF, 0x1F600, 0x10FFFF])).replace("<", "")
    arguments = parse_output(call("get_weather", city=text + "\ud800x"), tools=TOOLS).tool_calls[0].arguments
    assert json.loads(arguments) == {"city": text + "\ud800x"}
    arguments.encode()  # a lone surrogate is escaped


def test_ids_differ() -> None:
    assert len({new_call_id() for _ in range(100)}) == 100
    numbers = itertools.count()
    parser = OutputParser(tools=[], make_id=lambda: f"id{next(numbers)}")
    started = [e for e in parser.feed(call("a") + call("b")) if isinstance(e, ToolCallStarted)]
    assert started == [ToolCallStarted(0, "a", "id0"), ToolCallStarted(1, "b", "id1")]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ContractError, match="name is 'gpt', needs one of glm45"):
        OutputParser("gpt")
    with pytest.raises(ContractError, match="entry 1 is {}, needs a dict with a name"):
        OutputParser("glm47", [*TOOLS, {}])
    assert OutputParser("GLM-5.1").feed("x") == [ContentText("x")]
