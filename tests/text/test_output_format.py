"""Which format a template speaks, where its prompts end, and that conversations extend their prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5sdk.core.errors import ContractError
from glm5sdk.text import ChatTemplate
from glm5sdk.text.output_format import FORMATS, detect_format, find_format, starts_in_reasoning
from glm5sdk.text.output_parser import parse_output
from glm5sdk.text.tool_calls import render_tool_call

# A template with what GLM-5's does: turns without newlines, reasoning only after the last user turn unless it is
# retained, raw strings in calls, one <|observation|> for a run of results.
GLM5 = """[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools

<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>

Write a call as <tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>
{%- endif -%}
{%- set last = namespace(user=-1) -%}
{%- for message in messages if message.role == 'user' -%}{%- set last.user = messages.index(message) -%}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}<|user|>{{ message.content }}
{%- elif message.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}<|observation|>{%- endif -%}
<tool_response>{{ message.content }}</tool_response>
{%- elif message.role == 'assistant' -%}<|assistant|>
{%- if clear_thinking is defined and not clear_thinking or loop.index0 > last.user -%}
<think>{{ message.reasoning_content or '' }}</think>
{%- else -%}</think>{%- endif -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>
{%- if value is string -%}{{ value }}{%- else -%}{{ value | tojson(ensure_ascii=False) }}{%- endif -%}</arg_value>
{%- endfor -%}</tool_call>
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking -%}</think>{%- else -%}<think>{%- endif -%}{%- endif -%}
"""
GLM45 = "{{ '<think>' }}{% if enable_thinking %}{% endif %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>"
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {
    "q": {"type": "string"}, "n": {"type": "number"}, "o": {"type": "object"}}}}}]  # fmt: skip


@pytest.fixture(scope="module")
def template() -> Iterator[ChatTemplate]:
    made = ChatTemplate(GLM5)
    yield made
    made.close()


@pytest.mark.parametrize(
    "source, wanted",
    [
        (GLM5, "glm47"),
        (GLM45, "glm45"),
        (r"{{ '<arg_key>' ~ k ~ '</arg_key>' }}" + r"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>", "glm45"),
        ("{{ reasoning_effort }}<|assistant|><think><arg_key>", "glm53"),
        ("{{ reasoning_effort }}{{ enable_thinking }}<|assistant|><think><arg_key>", "glm47"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "plain"),
    ],
)
def test_a_template_tells_the_format(source, wanted) -> None:
    assert detect_format(source) is FORMATS[wanted]
    assert detect_format(source, name="glm-4.6") is FORMATS["glm45"]


def test_without_a_template_the_model_type_tells() -> None:
    assert detect_format(None, model_type="glm_moe_dsa").name == "glm47"
    assert detect_format(None, model_type="glm5_next").name == "glm53"
    with pytest.raises(ContractError, match="chat template is missing and model_type is 'llama', needs a template"):
        detect_format(None, model_type="llama")
    with pytest.raises(ContractError, match="name is 'glm9', needs one of glm45, glm47"):
        find_format("glm9")


def test_a_prompt_tells_whether_reasoning_follows(template) -> None:
    messages = [{"role": "user", "content": "What does <think> mean?"}]
    thinking = template.render(messages, add_generation_prompt=True)
    assert starts_in_reasoning(thinking)
    assert starts_in_reasoning(thinking + "So far")  # a continued message
    assert not starts_in_reasoning(thinking + "So far</think>Well")
    assert not starts_in_reasoning(template.render(messages, add_generation_prompt=True, enable_thinking=False))
    assert not starts_in_reasoning("plain text")


plain = st.text(alphabet=st.characters(exclude_characters="<", exclude_categories=["Cs", "Cc"]), max_size=12)
words = plain.map(str.strip)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "q": plain,
        "n": st.integers() | st.sampled_from([0.5, -2.25]),
        "o": st.dictionaries(words, st.booleans(), max_size=2),
    },
)
turns = st.lists(st.tuples(plain, words, st.lists(arguments, max_size=2)), min_size=1, max_size=3)


def _next_messages(messages, output):
    """The conversation after an output, as a client sends it back."""
    parsed = parse_output(output, "glm47", TOOLS, True)
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
        for call in parsed.tool_calls
    ]
    answer = {"role": "assistant", "content": parsed.content, "reasoning_content": parsed.reasoning}
    if not calls:
        return [*messages, answer, {"role": "user", "content": "And then?"}]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in calls]
    return [*messages, {**answer, "tool_calls": calls}, *results]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(turns=turns)
def test_fault_70_each_prompt_extends_the_last_prompt_and_its_output(template, turns) -> None:
    """With retained reasoning no token of the conversation is rendered anew, so all of it can come from the cache."""
    messages = [{"role": "user", "content": "Hello."}]
    for reasoning, content, calls in turns:
        prompt = template.render(messages, tools=TOOLS, add_generation_prompt=True, clear_thinking=False)
        output = f"{reasoning}</think>{content}" + "".join(render_tool_call("look_up", call) for call in calls)
        messages = _next_messages(messages, output)
        following = template.render(messages, tools=TOOLS, add_generation_prompt=True, clear_thinking=False)
        assert following.startswith(prompt + output)


def test_fault_70_is_there_when_reasoning_is_cleared(template) -> None:
    messages = [{"role": "user", "content": "Hello."}]
    prompt = template.render(messages, add_generation_prompt=True)
    following = template.render(_next_messages(messages, "Hm.</think>Hi."), add_generation_prompt=True)
    assert not following.startswith(prompt + "Hm.</think>Hi.")


@pytest.mark.parametrize("name, arguments, message", [
    ("", {}, "name is ''"),
    ("a b", {}, "name is 'a b'"),
    ("a", "[1]", "needs a JSON object"),
    ("a", "{", "arguments are no JSON"),
    ("a", {"k": float("nan")}, "argument 'k' is no JSON"),
    ("a", {"k": "x</arg_value>"}, "argument 'k' holds </arg_value>"),
    ("a", {"k</arg_key>": 1}, "key holds </arg_key>"),
])  # fmt: skip
def test_calls_that_cannot_be_written_are_refused(name, arguments, message) -> None:
    with pytest.raises(ContractError, match=message):
        render_tool_call(name, arguments)
    with pytest.raises(ContractError, match="format is 'plain'"):
        render_tool_call("a", {}, "plain")


def test_a_call_as_it_is_written() -> None:
    wanted = "<tool_call>f<arg_key>a</arg_key><arg_value> x</arg_value>"
    wanted += "<arg_key>b</arg_key><arg_value>[1, null]</arg_value></tool_call>"
    assert render_tool_call("f", '{"a": " x", "b": [1, null]}') == wanted
    assert render_tool_call("f", {}, "glm45") == "<tool_call>f\n</tool_call>"
    wanted = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>é</arg_value>\n</tool_call>"
    assert render_tool_call("f", {"a": "é"}, "glm45") == wanted
