"""Which JSON types a tool's schema allows for an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glm5sdk.core.errors import ContractError

__all__ = ["ANY_TYPE", "ToolSchemas", "json_type"]

ANY_TYPE = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_MAX_VISITS = 200  # a schema may refer to itself, or double at every level; below what recursion can do


class ToolSchemas:
    """Argument types of the tools of one request.

    Args:
        tools: as OpenAI's API has them (`{"type": "function", "function": {"name", "parameters"}}`), or the inner dicts
            alone; Anthropic's `input_schema` is read, too.

    Raises:
        ContractError: a tool is no dict, or has no name.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters: dict[str, Any] = {}
        for index, tool in enumerate(tools):
            inner = tool.get("function", tool) if isinstance(tool, Mapping) else tool
            if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
                raise ContractError(f"tools: entry {index} is {tool!r:.80}, needs a dict with a name")
            self._parameters[inner["name"]] = inner.get("parameters", inner.get("input_schema"))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tools."""
        return tuple(self._parameters)

    def has(self, tool: str, key: str) -> bool:
        """Whether the tool's schema speaks of the argument by name."""
        return bool(_Reader(self._parameters.get(tool)).properties(self._parameters.get(tool), key, named=True))

    def types(self, tool: str, key: str) -> frozenset[str]:
        """The types that an argument may have; all, where the schema does not say."""
        root = self._parameters.get(tool)
        reader = _Reader(root)
        found = [reader.types(schema) for schema in reader.properties(root, key)]
        return frozenset().union(*found) if found else ANY_TYPE


def json_type(value: Any) -> frozenset[str]:
    """The schema types that a JSON value has: 1 and 1.0 are integers and numbers."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    names = ((float, "number"), (str, "string"), (Mapping, "object"), (list, "array"))
    return frozenset({next((name for kind, name in names if isinstance(value, kind)), "null")})


class _Reader:
    """Walks one schema with a limit on its steps; behind the limit everything is allowed."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._visits = 0

    def properties(self, schema: Any, key: str, *, named: bool = False) -> list[Any]:
        """All schemas that the parameters' schema has for one of them; with `named` only those that name it."""
        if not isinstance(schema, Mapping) or not self._visit():
            return []
        found = []
        listed = schema.get("properties")
        if isinstance(listed, Mapping) and key in listed:
            found.append(listed[key])
        for branch in self._branches(schema):
            found += self.properties(branch, key, named=named)
        if not found and not named and isinstance(schema.get("additionalProperties"), Mapping):
            found.append(schema["additionalProperties"])
        return found

    def types(self, schema: Any) -> frozenset[str]:
        if not isinstance(schema, Mapping) or not self._visit():
            return ANY_TYPE
        allowed = _named_types(schema.get("type"))
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            allowed &= frozenset().union(*map(json_type, schema["enum"]))
        if "const" in schema:
            allowed &= json_type(schema["const"])
        if "$ref" in schema:
            allowed &= self.types(self._target(schema["$ref"]))
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list) and schema[word]:
                allowed &= frozenset().union(*map(self.types, schema[word]))
        if isinstance(parts := schema.get("allOf"), list):
            for part in parts:
                allowed &= self.types(part)
        if allowed == ANY_TYPE:  # not what the words mean by the letter, but what their author means
            allowed = frozenset({"object"}) if "properties" in schema else allowed
            allowed = frozenset({"array"}) if "items" in schema else allowed
        if schema.get("nullable") is True or schema.get("default", 0) is None:
            allowed |= {"null"}
        return allowed or ANY_TYPE

    def _branches(self, schema: Mapping[str, Any]) -> list[Any]:
        parts = [part for word in ("allOf", "anyOf", "oneOf") if isinstance(schema.get(word), list)
                 for part in schema[word]]  # fmt: skip
        return parts + ([self._target(schema["$ref"])] if "$ref" in schema else [])

    def _target(self, ref: Any) -> Any:
        """What a reference into the same schema points to; None for any other."""
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        target = self._root
        for step in ref[1:].strip("/").split("/") if ref not in ("#", "#/") else ():
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or step not in target:
                return None
            target = target[step]
        return target

    def _visit(self) -> bool:
        self._visits += 1
        return self._visits <= _MAX_VISITS


def _named_types(named: Any) -> frozenset[str]:
    names = named if isinstance(named, list) else [named]
    known = frozenset(name for name in names if isinstance(name, str))
    if not known or not known <= ANY_TYPE:  # no type, or a word that JSON Schema does not have
        return ANY_TYPE
    return known | {"integer"} if "number" in known else known
