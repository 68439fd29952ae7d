"""Templates render as transformers renders them, and errors are clear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from glm5sdk.core.errors import CapacityError, CheckpointError, ContractError
from glm5sdk.text import ChatTemplate, TemplateLimits

# The shape of GLM-5's template: tools in a system turn, no newlines after roles, old reasoning dropped.
GLM = """[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools

<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>{%- endif -%}
{%- macro visible(content) -%}
    {%- if content is string -%}{{ content }}{%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}{%- if item.type == 'text' -%}{{ item.text }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{ content }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>{{ visible(m.content) }}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' -%}
{%- if loop.index0 > ns.last_user and reasoning -%}<think>{{ reasoning.strip() }}{%- endif -%}</think>
{{- visible(m.content or '').strip() }}
{%- for call in m.tool_calls or [] -%}
{%- set call = call.function or call -%}<tool_call>{{ call.name }}
{%- for k, v in call.arguments.items() -%}<arg_key>{{ k }}</arg_key><arg_value>
{{- v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{%- endfor -%}</tool_call>{%- endfor -%}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|observation|>{%- endif -%}
<tool_response>{{ m.content }}</tool_response>
{%- elif m.role == 'system' -%}<|system|>{{ visible(m.content) }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{{- '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}{%- endif -%}
"""
LOOPS = """
{% for m in messages %}
  {% if m.role == 'system' %}{% continue %}{% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{{ loop.index }}/{{ loop.length }} {{ m.content | trim }}
{% endfor %}
done {{ bos_token is defined }} {{ eos_token }}
"""
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}\n{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m['content'] | upper }}{% endif %}\n{% endfor %}{{ strftime_now('%Y') }}"
)
JSON = (
    "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ {'a': 1.5, 'b': [none, true, '<é>']} | tojson }}"
    "{{ documents }}{{ dict(x=1) }}{{ messages[0].missing is defined }}{{ extra | default('none') }}"
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. <é>"},
    {"role": "user", "content": [{"type": "text", "text": "Wie spät?  "}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": " a clock ",
        "tool_calls": [
            {"type": "function", "function": {"name": "now", "arguments": {"zone": "CET", "n": 2, "x": ["ü"]}}}
        ],
    },
    {"role": "tool", "content": "12:00"},
    {"role": "tool", "content": "13:00"},
    {"role": "assistant", "content": "\nNoon. ", "reasoning": "read it"},
]
TOOLS = [
    {"type": "function", "function": {"name": "now", "description": "Uhrzeit für <Zone>", "parameters": {"zone": {}}}}
]


@pytest.fixture(scope="module")
def oracle(checkpoint: Path):
    return transformers.AutoTokenizer.from_pretrained(checkpoint)


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["bare", "tools"])
@pytest.mark.parametrize("extra", [{}, {"enable_thinking": False, "extra": "ß"}], ids=["plain", "extra"])
@pytest.mark.parametrize("source", [GLM, LOOPS, GENERATION, JSON], ids=["glm", "loops", "generation", "json"])
def test_renders_as_transformers_does(oracle, checkpoint: Path, source: str, extra: dict, tools, prompt: bool) -> None:
    tokens = json.loads((checkpoint / "tokenizer_config.json").read_text())
    template = ChatTemplate(source, special_tokens={k: tokens[k] for k in ("eos_token", "pad_token")})
    for count in range(1, len(MESSAGES) + 1):
        want = oracle.apply_chat_template(
            MESSAGES[:count],
            tools=tools,
            chat_template=source,
            add_generation_prompt=prompt,
            tokenize=False,
            **extra,
        )
        got = template.render(MESSAGES[:count], tools=tools, add_generation_prompt=prompt, **extra)
        assert got == want
    template.close()


@pytest.mark.smoke
def test_a_turn_of_glm() -> None:
    template = ChatTemplate(GLM)
    text = template.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert text == "[gMASK]<sop><|user|>hi<|assistant|><think>"
    text = template.render(MESSAGES[1:3])
    assert text == (
        "[gMASK]<sop><|user|>Wie spät?  <|assistant|><think>a clock</think><tool_call>now<arg_key>zone</arg_key>"
        '<arg_value>CET</arg_value><arg_key>n</arg_key><arg_value>2</arg_value><arg_key>x</arg_key><arg_value>["ü"]'
        "</arg_value></tool_call>"
    )


def test_null_content_is_not_printed() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}|{% endfor %}")
    assert template.render([{"role": "assistant", "content": None}, {"role": "user", "content": ""}]) == "||"


def test_messages_are_left_as_they_were() -> None:
    messages = [{"role": "assistant", "content": "x", "reasoning": "y"}]
    ChatTemplate("{{ messages[0].reasoning_content }}").render(messages)
    assert messages == [{"role": "assistant", "content": "x", "reasoning": "y"}]


def _config(folder: Path, content: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def test_the_template_file_wins_over_the_config(tmp_path: Path) -> None:
    _config(tmp_path, {"chat_template": "config {{ eos_token }}", "eos_token": {"content": "<e>", "special": True}})
    assert ChatTemplate.from_pretrained(tmp_path).render([]) == "config <e>"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert ChatTemplate.from_pretrained(tmp_path).render([]) == "file <e>"


def test_named_templates(tmp_path: Path) -> None:
    _config(tmp_path, {"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    found = {
        name: ChatTemplate.from_pretrained(tmp_path, name=name).render([]) for name in ("default", "tool_use", "rag")
    }
    assert found == {"default": "d", "tool_use": "t", "rag": "r"}
    with pytest.raises(CheckpointError, match="chat templates are default, rag, tool_use, needs 'x'"):
        ChatTemplate.from_pretrained(tmp_path, name="x")


def test_errors_of_a_checkpoint_name_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"chat templates are none, needs 'default' in chat_template\.jinja"):
        ChatTemplate.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template has entry 3, needs"):
        ChatTemplate.from_pretrained(_config(tmp_path, {"chat_template": [3]}))
    _config(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_text("one\n{% for x in %}")
    with pytest.raises(CheckpointError, match=rf"{tmp_path.name}: chat template: .*line 2"):
        ChatTemplate.from_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="file is unreadable"):
        ChatTemplate.from_pretrained(tmp_path)


def test_errors_of_a_conversation() -> None:
    template = ChatTemplate(
        "{% if messages|length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}ok{{ x }}"
    )
    with pytest.raises(ContractError, match=r"^chat template: roles must alternate$"):
        template.render([{}, {}])
    with pytest.raises(ContractError, match="messages is str, needs a list of dicts"):
        template.render("hi")
    with pytest.raises(ContractError, match=r"messages\[1\] is int, needs a dict"):
        template.render([{}, 3])
    with pytest.raises(ContractError, match="variables are no JSON"):
        template.render([{}], x=object())
    with pytest.raises(ContractError, match="undefined"):
        ChatTemplate("{{ nothing.at.all }}").render([])
    assert template.render([{}], x=1) == "ok1"


def test_a_long_source_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(CapacityError, match="source is 11 characters, needs at most 10"):
        ChatTemplate("x" * 11, limits=TemplateLimits(source_chars=10))
