"""The text side of a served model: which template, which format, and calls that its grammar allows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from server_fakes import Bench, make_tokenizer

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.serve import StructuredOutput
from glm5sdk.serve.server.model_text import DEFAULT_TEMPLATE, ModelText
from glm5sdk.serve.server.tool_grammar import tool_grammar
from glm5sdk.text.tool_calls import render_tool_call

OWN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OLD = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<tool_call>x\n<arg_key>k</arg_key>\n<arg_value>"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F", 1]}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer()._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_p": 0.9, "top_k": 4}))
    return tmp_path


def closed(text: ModelText) -> ModelText:
    text.template.close()
    return text


def test_which_template(folder: Path, tmp_path: Path) -> None:
    assert closed(ModelText.from_pretrained(folder)).template.source == DEFAULT_TEMPLATE.read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": OWN}))
    own = closed(ModelText.from_pretrained(folder))
    assert own.template.source == OWN and own.format.name == "plain"
    (folder / "chat_template.jinja").write_text(OWN + "!")
    assert closed(ModelText.from_pretrained(folder)).template.source == OWN + "!"
    file = tmp_path / "other.jinja"
    shutil.copy(DEFAULT_TEMPLATE, file)
    assert closed(ModelText.from_pretrained(folder, chat_template=file)).format.name == "glm47"
    with pytest.raises(CheckpointError, match=r"missing\.jinja"):
        ModelText.from_pretrained(folder, chat_template=tmp_path / "missing.jinja")
    with pytest.raises(ContractError, match="output format"):
        ModelText.from_pretrained(folder, tool_format="gpt")


def test_the_checkpoints_sampling_values_are_the_defaults(folder: Path) -> None:
    bench = Bench("</think>x")
    bench.text.defaults, before = closed(ModelText.from_pretrained(folder)).defaults, bench.text.defaults
    try:
        bench.chat()
        bench.chat(temperature=0, top_k=0, top_p=1)
    finally:
        bench.text.defaults = before
    found = [(params.temperature, params.top_p, params.top_k) for _, params, _ in bench.engine.requests]
    assert found == [(0.7, 0.9, 4), (0, 1, 0)]


@pytest.mark.parametrize("form", ["glm47", "glm45"])
@pytest.mark.parametrize(
    "arguments",
    [{"city": "Köln <b>"}, {"city": "", "days": -3}, {"city": "a\nb", "unit": "F"}, {"city": "x", "unit": 1}],
)
def test_the_grammar_allows_what_the_format_writes(form: str, arguments: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    from glm5sdk.serve.guidance import compile_guide

    tokenizer = make_tokenizer()
    call = render_tool_call("weather", arguments, form)
    line = "\n" if form == "glm45" else ""
    structured = StructuredOutput("grammar", tool_grammar([TOOL], parallel=True, newlines=form == "glm45"))
    for text, fits in (
        (call, True), (f"{call}{line}{call}", True), (call.replace("weather", "climate"), False),
        (call.replace("city", "town"), False), (f" {call}", False), (f"{call} and so on", False),
    ):  # fmt: skip
        guide = compile_guide(structured, tokenizer, tokenizer.vocab_size, tokenizer.stop_ids)
        ids = tokenizer.encode(text)
        taken = guide.accept_all(ids)
        assert (taken == len(ids) and guide.may_end) == fits, (text, taken)


def test_models_without_calls_refuse_to_be_forced() -> None:
    bench = Bench("x", template=OWN)
    answer = bench.chat(tools=[TOOL], tool_choice="required")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice"
    assert bench.chat(tools=[TOOL]).status_code == 200
    old = Bench("x", template=OLD)
    assert old.text.format.name == "glm45"
    old.chat(tools=[TOOL], tool_choice="required")
    assert "</arg_key>\\n<arg_value>" in old.engine.requests[0][1].structured.value


@pytest.mark.parametrize("name", ["", "a b", "<tool_call>", 'a"b', "x" * 300])
def test_names_that_no_call_can_have_are_refused(name: str) -> None:
    tool = {"type": "function", "function": {"name": name}}
    answer = Bench().chat(tools=[tool])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
