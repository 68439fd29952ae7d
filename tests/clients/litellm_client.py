"""Runs under the clients' python: litellm asks by every route that it has to a server like ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import litellm


def main(asked: Path, told: Path) -> None:
    """Ask the same question by several routes and write what each said."""
    job = json.loads(asked.read_text())
    messages = [{"role": "user", "content": job["question"]}]
    at_v1 = {"api_base": f"{job['server']}/v1", "api_key": "secret", "num_retries": 0, "temperature": 0}
    at_v1 |= {"messages": messages, "max_tokens": job["max_tokens"]}
    plain = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    said = {}
    for provider in ("openai", "hosted_vllm"):
        whole = litellm.completion(model=f"{provider}/checkpoint", **at_v1, **plain)
        said[provider] = whole.choices[0].message.content
        said[f"{provider} tokens"] = whole.usage.completion_tokens
        options = {"stream": True, "stream_options": {"include_usage": True}}
        pieces = list(litellm.completion(model=f"{provider}/checkpoint", **at_v1, **plain, **options))
        said[f"{provider} stream"] = "".join(c.choices[0].delta.content or "" for c in pieces if c.choices)
        said[f"{provider} stream tokens"] = pieces[-1].usage.completion_tokens
    text = {name: value for name, value in at_v1.items() if name != "messages"}
    said["text"] = litellm.text_completion(
        model="text-completion-openai/checkpoint", prompt=job["question"], **text
    ).choices[0].text  # fmt: skip

    tool = {"type": "function", "function": job["tool"]}
    choice = {"type": "function", "function": {"name": job["tool"]["name"]}}
    forced = at_v1 | {"max_tokens": 120}
    called = litellm.completion(model="openai/checkpoint", tools=[tool], tool_choice=choice, **forced, **plain)
    (call,) = called.choices[0].message.tool_calls
    said["tool"] = [call.function.name, call.function.arguments, called.choices[0].finish_reason]
    pieces = list(
        litellm.completion(
            model="hosted_vllm/checkpoint", tools=[tool], tool_choice=choice, stream=True, **forced, **plain
        )
    )
    call = litellm.stream_chunk_builder(pieces, messages=messages).choices[0].message.tool_calls[0]
    said["tool stream"] = [call.function.name, call.function.arguments]

    claude = {
        "model": "anthropic/checkpoint", "api_base": job["server"], "api_key": "secret", "num_retries": 0,
        "messages": messages, "max_tokens": job["max_tokens"], "temperature": 0,
    }  # fmt: skip
    said["anthropic"] = litellm.completion(**claude).choices[0].message.content
    said["anthropic stream"] = "".join(
        c.choices[0].delta.content or "" for c in litellm.completion(stream=True, **claude)
    )
    called = litellm.completion(tools=[tool], tool_choice=choice, **(claude | {"max_tokens": 120}))
    (call,) = called.choices[0].message.tool_calls
    said["anthropic tool"] = [call.function.name, call.function.arguments, called.choices[0].finish_reason]

    try:
        litellm.completion(model="openai/nobody", **at_v1)
    except litellm.NotFoundError as error:
        said["unknown model"] = str(error)
    try:
        litellm.completion(model="openai/checkpoint", **(at_v1 | {"api_key": "wrong"}))
    except litellm.AuthenticationError as error:
        said["wrong key"] = str(error)
    told.write_text(json.dumps(said))


main(Path(sys.argv[1]), Path(sys.argv[2]))
