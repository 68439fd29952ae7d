"""The API server: OpenAI's and Anthropic's protocols in front of an engine. Needs the extra `[serve]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glm5sdk.core.errors import UnavailableError
from glm5sdk.serve.server.settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from glm5sdk.serve.interface import EngineClient
    from glm5sdk.serve.server.model_text import ModelText

__all__ = ["ServerSettings", "create_app"]


def create_app(engine: EngineClient, settings: ServerSettings, text: ModelText) -> FastAPI:
    """The ASGI application; see `glm5sdk.serve.server.app.create_app`.

    Raises:
        UnavailableError: a package of the extra is missing.
    """
    try:
        from glm5sdk.serve.server.app import create_app as create
    except ImportError as error:
        raise UnavailableError(
            f'server: package {error.name} is missing, needs the extra: pip install "glm5sdk[serve]"'
        ) from error
    return create(engine, settings, text)
