"""`glm5 serve`: a checkpoint behind an API server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from glm5sdk.cli.choose import chosen
from glm5sdk.core.errors import UnavailableError
from glm5sdk.serve.async_engine import AsyncEngine
from glm5sdk.serve.config import EngineConfig
from glm5sdk.serve.load import ExpertSpread, load_engine
from glm5sdk.serve.ready import expert_group
from glm5sdk.serve.router.listen import check_free
from glm5sdk.serve.server import ServerSettings, create_app

__all__ = ["ServeOptions", "keys_of", "serve_checkpoint"]


@dataclass(frozen=True)
class ServeOptions:
    """What `glm5 serve` was asked for; `settings` and `engine` are fields of ServerSettings and EngineConfig."""

    host: str
    port: int
    dtype: str
    device: str
    chat_template: Path | None
    tool_format: str | None
    access_log: bool
    expert_slots: int | None
    settings: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


def keys_of(given: Sequence[str], variable: str = "GLM5SDK_API_KEY") -> tuple[str, ...]:
    """Keys of the command line, or else those of the environment, separated by commas."""
    return tuple(given) or tuple(key.strip() for key in os.environ.get(variable, "").split(",") if key.strip())


def serve_checkpoint(errors: Console, path: Path, options: ServeOptions, backends: Sequence[str]) -> None:
    """Load a checkpoint and serve it until a signal comes.

    Raises:
        OSError: the port is taken; nothing was loaded.
    """
    settings = ServerSettings(**options.settings)
    config = EngineConfig(**options.engine)
    try:
        from glm5sdk.serve.server.model_text import ModelText
        from glm5sdk.serve.server.run import serve
    except ImportError as error:
        raise UnavailableError(
            f'serve: package {error.name} is missing, needs the extra: pip install "glm5sdk[serve]"'
        ) from error
    check_free(options.host, options.port)
    text = ModelText.from_pretrained(path, chat_template=options.chat_template, tool_format=options.tool_format)
    if not settings.api_keys and options.host not in ("127.0.0.1", "localhost", "::1"):
        errors.print(f"[yellow]no API key is set: everyone who reaches {options.host} may use this server[/]")
    group = expert_group()
    spread = ExpertSpread(*group) if group is not None else None
    with chosen(backends):
        loaded = load_engine(
            path, config, dtype=options.dtype, device=options.device, tokenizer=text.tokenizer, spread=spread,
            expert_slots=options.expert_slots,
        )  # fmt: skip
        engine = AsyncEngine(loaded)
    try:
        app = create_app(engine, settings, text)
        serve(app, host=options.host, port=options.port, access_log=options.access_log)
    finally:
        engine.close()
        text.template.close()
