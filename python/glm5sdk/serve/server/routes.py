"""The table of routes: what serves each, what it reads, what it may answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from glm5sdk.serve.server import admin, info_routes, kv_routes
from glm5sdk.serve.server.anthropic import count_tokens, messages
from glm5sdk.serve.server.anthropic_fields import CountTokensRequest, MessagesRequest
from glm5sdk.serve.server.chat_fields import ChatRequest
from glm5sdk.serve.server.completion_fields import CompletionRequest, DetokenizeRequest, TokenizeRequest
from glm5sdk.serve.server.openai_chat import chat_completions
from glm5sdk.serve.server.openai_completions import completions
from glm5sdk.serve.server.page import page
from glm5sdk.serve.server.responses import delete_response, get_response, list_input_items, responses
from glm5sdk.serve.server.responses_fields import ResponsesRequest
from glm5sdk.serve.server.service import Service

__all__ = ["ROUTES", "Route"]


@dataclass(frozen=True)
class Route:
    """One route.

    Attributes:
        method, path: of HTTP.
        handler: answers it.
        summary: one sentence for the OpenAPI document.
        body: the struct it reads; None for no body.
        media: media types of the answer.
    """

    method: str
    path: str
    handler: Callable[[Service, Request], Awaitable[Response]]
    summary: str
    body: Any = None
    media: tuple[str, ...] = ("application/json",)


STREAMS = ("application/json", "text/event-stream")

ROUTES = (
    Route("POST", "/v1/chat/completions", chat_completions, "Answer a conversation.", ChatRequest, STREAMS),
    Route("POST", "/v1/completions", completions, "Continue a text.", CompletionRequest, STREAMS),
    Route("POST", "/v1/responses", responses, "Answer an input.", ResponsesRequest, STREAMS),
    Route("GET", "/v1/responses/{response_id}", get_response, "A kept answer."),
    Route("DELETE", "/v1/responses/{response_id}", delete_response, "Forget a kept answer."),
    Route("GET", "/v1/responses/{response_id}/input_items", list_input_items, "What a kept answer answers."),
    Route("POST", "/v1/messages", messages, "Answer a conversation in Anthropic's protocol.", MessagesRequest, STREAMS),
    Route("POST", "/v1/messages/count_tokens", count_tokens, "Tokens of a prompt.", CountTokensRequest),
    Route("GET", "/v1/models", info_routes.models, "Names that requests may use."),
    Route("GET", "/v1/models/{name:path}", info_routes.model, "One of them."),
    Route("POST", "/tokenize", info_routes.tokenize, "Text or a conversation to token ids.", TokenizeRequest),
    Route("POST", "/detokenize", info_routes.detokenize, "Token ids to text.", DetokenizeRequest),
    Route("POST", "/abort", info_routes.abort, "End an answer that is being made.", info_routes.AbortRequest),
    Route("GET", "/", page, "A page to talk with the model.", media=("text/html",)),
    Route("GET", "/health", info_routes.health, "Whether new work is taken."),
    Route("GET", "/version", info_routes.version, "Version of the package and of the weights."),
    Route("GET", "/metrics", info_routes.metrics, "Numbers for Prometheus.", media=("text/plain",)),
    Route("POST", "/admin/pause", admin.pause, "Begin no more steps."),
    Route("POST", "/admin/resume", admin.resume, "Go on after a pause."),
    Route("POST", "/admin/load_adapter", admin.load_adapter, "Load an adapter.", admin.AdapterSource),
    Route("POST", "/admin/unload_adapter", admin.unload_adapter, "Forget an adapter.", admin.AdapterName),
    Route("POST", "/admin/update_weights", admin.update_weights, "Other weights for new requests.", admin.Arguments),
    Route("POST", "/admin/swap_experts", admin.swap_experts, "Other experts for new requests.", admin.Arguments),
    Route("POST", "/admin/control", admin.control, "Run one of the engine's commands.", admin.Command),
    Route("POST", "/admin/drain", admin.drain, "Refuse new work; wait for what runs.", admin.DrainRequest),
    Route("GET", "/admin/stats", admin.show_stats, "The engine's numbers and facts."),
    Route("POST", "/admin/kv/export", kv_routes.kv_export, "Pin a prompt's pages.", kv_routes.ExportRequest),
    Route("GET", "/admin/kv/pages/{lease_id}", kv_routes.kv_pages, "Those pages.", media=("application/octet-stream",)),
    Route("POST", "/admin/kv/import", kv_routes.kv_import, "Take pages in.", kv_routes.ImportRequest),
    Route("POST", "/admin/kv/renew", kv_routes.kv_renew, "Keep pages pinned.", kv_routes.LeaseRequest),
    Route("POST", "/admin/kv/release", kv_routes.kv_release, "Let pages go.", kv_routes.LeaseRequest),
)
