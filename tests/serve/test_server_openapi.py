"""The OpenAPI document: every route with its body, every reference resolved."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("fastapi")

from server_fakes import Bench

from glm5sdk.serve.server.routes import ROUTES


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(entry) for entry in value.values()))
    return set().union(*(references(entry) for entry in value)) if isinstance(value, list) else set()


def test_the_document_is_whole() -> None:
    document = Bench().get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    assert {name.rsplit("/", 1)[1] for name in references(document)} <= schemas.keys()
    for route in ROUTES:
        operation = document["paths"][re.sub(r":\w+}", "}", route.path)][route.method.lower()]
        assert ("requestBody" in operation) == (route.body is not None)
        assert {"200", "400", "401", "404", "429", "500", "503"} <= operation["responses"].keys()
    chat = schemas["ChatRequest"]
    assert chat["required"] == ["messages"] and "chat_template_kwargs" in chat["properties"]
    refused = document["paths"]["/v1/messages"]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    assert refused == {"$ref": "#/components/schemas/AnthropicError"}
    assert schemas["AnthropicError"]["required"] == ["type", "error"] and schemas["Error"]["required"] == ["error"]
