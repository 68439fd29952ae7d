"""Types that a tool's schema allows, and what text becomes under them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5sdk.text.argument_json import ArgumentWriter
from glm5sdk.text.argument_types import ANY_TYPE, ToolSchemas, json_type

STRING, NUMBER = {"string"}, {"number", "integer"}


def types(schema, **root):
    parameters = {"type": "object", "properties": {"x": schema}, **root}
    return ToolSchemas([{"name": "f", "parameters": parameters}]).types("f", "x")


@pytest.mark.parametrize(
    "schema, wanted",
    [
        ({"type": "string"}, STRING),
        ({"type": "number"}, NUMBER),
        ({"type": ["string", "null"]}, STRING | {"null"}),
        ({"type": "string", "nullable": True}, STRING | {"null"}),
        ({"type": "string", "default": None}, STRING | {"null"}),
        ({"type": "string", "default": ""}, STRING),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, STRING | {"integer"}),
        ({"oneOf": [{"const": 1.5}, {"enum": ["a", None]}]}, {"number", "string", "null"}),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, STRING),
        ({"enum": ["1", "2"]}, STRING),
        ({"enum": [True, 1]}, {"boolean", "integer", "number"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({}, ANY_TYPE),
        (True, ANY_TYPE),
        ({"type": "colour"}, ANY_TYPE),
        ({"type": 5, "enum": [], "anyOf": [], "allOf": None}, ANY_TYPE),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, ANY_TYPE),  # allows nothing: as good as nothing said
        ({"$ref": "#/$defs/a~1b"}, STRING),
        ({"$ref": "#/$defs/nowhere"}, ANY_TYPE),
        ({"$ref": "#/$defs/loop"}, ANY_TYPE),
        ({"$ref": "https://example.org/schema"}, ANY_TYPE),
    ],
)
def test_types_of_a_schema(schema, wanted) -> None:
    definitions = {"a/b": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    assert types(schema, **{"$defs": definitions}) == wanted


def test_where_arguments_are_looked_for() -> None:
    tools = ToolSchemas(
        [
            {"type": "function", "function": {"name": "a", "parameters": {"$ref": "#/$defs/p", "$defs": {"p": {
                "allOf": [{"properties": {"x": {"type": "string"}}}], "additionalProperties": {"type": "null"}}}}}},
            {"name": "b", "input_schema": {"properties": {"x": {"type": "null"}}}},
            {"name": "c"},
        ]
    )  # fmt: skip
    assert tools.names == ("a", "b", "c")
    assert tools.types("a", "x") == STRING and tools.types("a", "y") == {"null"}
    assert tools.types("b", "x") == {"null"} and tools.types("b", "y") == ANY_TYPE
    assert tools.types("c", "x") == ANY_TYPE == tools.types("nobody", "x")
    assert tools.has("a", "x") and not tools.has("a", "y") and not tools.has("c", "x")


def test_hostile_schemas_end() -> None:
    double = {"anyOf": [{"$ref": "#/$defs/d"}, {"$ref": "#/$defs/d"}]}
    assert types(double, **{"$defs": {"d": double}}) == ANY_TYPE
    deep: dict = {"type": "string"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}
    assert types(deep) == ANY_TYPE


@pytest.mark.parametrize(
    "allowed, text, wanted",
    [
        (STRING, "5", "5"),
        (STRING, '"q"', '"q"'),
        ({"integer"}, " 5\n", 5),
        ({"integer"}, "five", "five"),
        ({"integer"}, "", ""),
        ({"boolean"}, "True", True),
        ({"null"}, "None", None),
        ({"object"}, "None", "None"),
        ({"boolean", "string"}, "True", "True"),
        ({"null", "string"}, "null", None),
        ({"null", "string"}, "nullify", "nullify"),
        ({"null", "string"}, "5", "5"),
        ({"integer", "string"}, "1.5", "1.5"),
        ({"integer", "string"}, "1.0", 1.0),
        ({"number", "integer", "string"}, "-1e-3", -1e-3),
        ({"number", "integer", "string"}, "2024-05-01", "2024-05-01"),
        (ANY_TYPE, "[1, {}]", [1, {}]),
        (ANY_TYPE, "[1, {}", "[1, {}"),
        (ANY_TYPE, '"q"', '"q"'),
        (ANY_TYPE, "NaN", "NaN"),
        ({"number"}, "-Infinity", "-Infinity"),
        ({"array"}, "[" * 100_000, "[" * 100_000),
        (ANY_TYPE, "1" * 10_000 + "x", "1" * 10_000 + "x"),
    ],
)
def test_text_under_types(allowed, text, wanted) -> None:
    writer = ArgumentWriter(frozenset(allowed))
    value = json.loads(writer.push(text) + writer.finish())
    assert value == wanted and type(value) is type(wanted)


def test_numbers_of_any_length_pass_unchanged() -> None:
    writer = ArgumentWriter(frozenset({"integer"}))
    digits = "9" * 10_000  # more than Python converts
    assert writer.push(digits) + writer.finish() == digits


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(value=json_values, allowed=st.sets(st.sampled_from(sorted(ANY_TYPE)), min_size=1), data=st.data())
def test_a_value_of_an_allowed_type_comes_back(value, allowed, data) -> None:
    allowed = frozenset(allowed | {"integer"} if "number" in allowed else allowed)
    if not json_type(value) & allowed or (isinstance(value, str) and allowed != STRING):
        return
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    writer, got, at = ArgumentWriter(allowed), "", 0
    while at < len(text):
        size = data.draw(st.integers(1, 8))
        got += writer.push(text[at : at + size])
        at += size
    back = json.loads(got + writer.finish())
    assert back == value and type(back) is type(value)
