"""litellm, by OpenAI's, vLLM's and Anthropic's routes, says what the engine says in a program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from glm5sdk.serve import LLM, SamplingParams
from glm5sdk.serve.server.model_text import DEFAULT_TEMPLATE, has_template
from glm5sdk.text.chat import ChatTemplate

pytestmark = pytest.mark.full

QUESTION = "def main("
UNITS = {"type": "object", "properties": {"unit": {"enum": ["celsius", "kelvin"]}}, "required": ["unit"]}
TOOL = {
    "name": "temperature",
    "description": "here and now",
    "parameters": {**UNITS, "additionalProperties": False},
}


def test_litellm_routes(server: str, checkpoint: Path, run_client: Callable[[str, dict[str, Any]], Any]) -> None:
    template = ChatTemplate(DEFAULT_TEMPLATE.read_text(encoding="utf-8"))
    if has_template(checkpoint):
        template = ChatTemplate.from_pretrained(checkpoint)
    prompt = template.render([{"role": "user", "content": QUESTION}], add_generation_prompt=True, enable_thinking=False)
    llm = LLM(checkpoint)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    answer, text = (output.outputs[0] for output in llm.generate([prompt, QUESTION], params))
    llm.shutdown()

    said = run_client("litellm_client.py", {"server": server, "question": QUESTION, "max_tokens": 24, "tool": TOOL})
    for provider in ("openai", "hosted_vllm"):
        assert said[provider] == said[f"{provider} stream"] == answer.text
        assert said[f"{provider} tokens"] == said[f"{provider} stream tokens"] == len(answer.token_ids)
    assert said["anthropic"] == said["anthropic stream"] == answer.text
    assert said["text"] == text.text
    for route in ("tool", "tool stream", "anthropic tool"):
        name, values, *reason = said[route]
        assert name == TOOL["name"] and json.loads(values)["unit"] in ("celsius", "kelvin")
        assert reason in ([], ["tool_calls"])
    assert "nobody" in said["unknown model"] and "key" in said["wrong key"]
