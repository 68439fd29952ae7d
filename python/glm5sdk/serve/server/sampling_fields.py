"""Fields that chat and text completions share, under OpenAI's and vLLM's names, and the SamplingParams they make."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from glm5sdk.serve.params import SamplingParams, StructuredOutput
from glm5sdk.serve.server.errors import ApiError
from glm5sdk.serve.server.service import new_id
from glm5sdk.text.generation_config import GenerationConfig

__all__ = [
    "MAX_LOGPROBS",
    "SamplingFields",
    "StreamOptions",
    "checked_id",
    "checked_priority",
    "sampling_params",
    "structured_output",
]

MAX_LOGPROBS = 20


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """`response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's `structured_outputs`."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """How to continue, and how to send it."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    truncate_prompt_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logits_processors: list[Any] | None = None


def structured_output(fields: SamplingFields) -> StructuredOutput | None:
    """What the text must match, from any one of the names it may be asked for under.

    Raises:
        ApiError: 400 two were given, or one is incomplete.
    """
    asked: list[tuple[str, StructuredOutput]] = []
    form = fields.response_format
    if form is not None and form.type == "json_object":
        asked.append(("response_format", StructuredOutput("json_object")))
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema is None:
            raise ApiError(
                400, "response_format: json_schema.schema is missing, needs a JSON schema", param="response_format"
            )
        asked.append(("response_format", StructuredOutput("json_schema", form.json_schema.schema)))
    given = fields.structured_outputs or StructuredOutputs()
    if given.json_object:
        asked.append(("structured_outputs.json_object", StructuredOutput("json_object")))
    for name, kind, value in (
        ("structured_outputs.json", "json_schema", given.json),
        ("structured_outputs.regex", "regex", given.regex),
        ("structured_outputs.choice", "choice", given.choice),
        ("structured_outputs.grammar", "grammar", given.grammar),
        ("guided_json", "json_schema", fields.guided_json),
        ("guided_regex", "regex", fields.guided_regex),
        ("guided_choice", "choice", fields.guided_choice),
        ("guided_grammar", "grammar", fields.guided_grammar),
    ):
        if value is not None:
            if kind == "json_schema" and isinstance(value, str):
                value = _schema(name, value)
            asked.append((name, StructuredOutput(kind, value)))  # type: ignore[arg-type]
    if len(asked) > 1:
        names = " and ".join(name for name, _ in asked)
        raise ApiError(400, f"structured output: {names} were given, needs one of them", param=asked[1][0])
    return asked[0][1] if asked else None


def sampling_params(
    fields: SamplingFields,
    defaults: GenerationConfig,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutput | None,
    keep_special: bool = False,
) -> SamplingParams:
    """The engine's parameters.

    Args:
        fields: of the request.
        defaults: the checkpoint's, for what the request leaves open.
        max_tokens: as the protocol names and defaults it.
        logprobs: likewise.
        structured: what the text must match.
        keep_special: special tokens stay in the text whatever the request says.

    Raises:
        ContractError: a value is out of range.
        ApiError: 400 the request asks for what there is not.
    """
    refuse_unsupported(fields)

    def choose(value: Any, default: Any) -> Any:
        return default if value is None else value

    return SamplingParams(
        n=choose(fields.n, 1),
        temperature=choose(fields.temperature, defaults.temperature),
        top_p=choose(fields.top_p, defaults.top_p),
        top_k=choose(fields.top_k, defaults.top_k),
        min_p=choose(fields.min_p, defaults.min_p),
        seed=fields.seed,
        max_tokens=max_tokens,
        min_tokens=choose(fields.min_tokens, 0),
        stop=choose(fields.stop, ()) or (),
        stop_token_ids=choose(fields.stop_token_ids, ()),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        ignore_eos=bool(fields.ignore_eos),
        skip_special_tokens=not keep_special and choose(fields.skip_special_tokens, True),
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        presence_penalty=choose(fields.presence_penalty, 0.0),
        frequency_penalty=choose(fields.frequency_penalty, 0.0),
        repetition_penalty=choose(fields.repetition_penalty, 1.0),
        logit_bias=choose(fields.logit_bias, {}),
        structured=structured,
    )


def checked_id(fields: SamplingFields, prefix: str) -> str:
    """The answer's name: the one that the request wishes for, or a new one.

    Raises:
        ApiError: 400 the wish is too long.
    """
    if fields.request_id is None:
        return new_id(prefix)
    if not 0 < len(fields.request_id) <= 128:
        raise ApiError(
            400, f"request_id: length is {len(fields.request_id)}, needs 1 to 128 characters", param="request_id"
        )
    return prefix + fields.request_id


def checked_priority(fields: SamplingFields) -> int:
    """The place in the queue.

    Raises:
        ApiError: 400 it is no 32-bit number.
    """
    priority = fields.priority or 0
    if not -(2**31) <= priority < 2**31:
        raise ApiError(400, f"priority: is {priority}, needs -2**31 to 2**31 - 1", param="priority")
    return priority


def refuse_unsupported(fields: SamplingFields) -> None:
    """Say no to what would otherwise be ignored and change the answer.

    Raises:
        ApiError: 400.
    """
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise ApiError(
            400, f"best_of: is {fields.best_of}, needs to be absent or equal n; choose among n yourself",
            param="best_of", code="unsupported_parameter",
        )  # fmt: skip
    for name in ("bad_words", "allowed_token_ids", "logits_processors"):
        if getattr(fields, name):
            raise ApiError(
                400, f"{name}: is given, needs to be absent: use logit_bias or structured output", param=name,
                code="unsupported_parameter",
            )  # fmt: skip
    if fields.use_beam_search:
        raise ApiError(
            400, "use_beam_search: is true, needs false: there is no beam search", param="use_beam_search",
            code="unsupported_parameter",
        )  # fmt: skip
    if fields.truncate_prompt_tokens is not None:
        raise ApiError(
            400, "truncate_prompt_tokens: is given, needs to be absent: prompts are never cut",
            param="truncate_prompt_tokens", code="unsupported_parameter",
        )  # fmt: skip
    if fields.prompt_logprobs is not None and fields.stream:
        raise ApiError(
            400, "prompt_logprobs: is given with stream, needs an answer in one piece", param="prompt_logprobs"
        )
    for key in fields.logit_bias or {}:
        if not (key.isascii() and key.isdecimal()) or len(key) > 10:
            raise ApiError(400, f"logit_bias: key is {key[:40]!r}, needs a token id", param="logit_bias")


def _schema(name: str, text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ApiError(400, f"{name}: is no JSON ({error}), needs a JSON schema", param=name) from None
    if not isinstance(value, dict):
        raise ApiError(400, f"{name}: is a JSON {type(value).__name__}, needs a JSON schema as an object", param=name)
    return value
