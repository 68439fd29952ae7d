"""`glm5 serve --dp N`: the same command once a replica, and a router in front."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from glm5sdk.serve.router.front import serve_processes
from glm5sdk.serve.router.launch import Launcher, LocalLauncher
from glm5sdk.serve.router.ray_replicas import ADDRESS, RayLauncher
from glm5sdk.serve.router.settings import RouterSettings

__all__ = ["replica_command", "serve_replicas"]

OF_THE_FRONT = ("--dp", "--ep", "--host", "--port", "--api-key", "--admin-key")


def replica_command(arguments: Sequence[str], host: str = "127.0.0.1") -> list[str]:
    """The command line of one replica.

    Args:
        arguments: of the command that was typed, from `serve` on. What concerns the front alone is left out, and keys,
            which everybody on the machine could read there; replicas have them from the environment.
        host: where replicas listen.
    """
    kept: list[str] = []
    rest = iter(arguments)
    for word in rest:
        if word in OF_THE_FRONT:
            next(rest, None)
        elif word != "--cluster" and not word.startswith(tuple(f"{name}=" for name in OF_THE_FRONT)):
            kept.append(word)
    return [sys.executable, "-m", "glm5sdk.cli", *kept, "--host", host, "--port", "0"]


def serve_replicas(
    console: Console, settings: Mapping[str, Any], arguments: Sequence[str], dp: int, ep: int, cluster: bool,
    device: str, host: str, port: int,
) -> None:  # fmt: skip
    """Serve until a signal.

    Args:
        console: where to say what serves.
        settings: fields of ServerSettings.
        arguments: of the command line, from `serve` on.
        dp: replicas.
        ep: replicas over which experts are spread.
        cluster: replicas are actors of a Ray cluster, on any of its machines.
        device: of each replica; one on "cuda" asks the cluster for a GPU.
        host: address to listen at.
        port: 0 takes a free one.

    Raises:
        As `serve_processes`.
    """
    router = RouterSettings(
        api_keys=settings["api_keys"], admin_key=settings["admin_key"], max_body_bytes=settings["max_body_bytes"],
        read_timeout=settings["request_timeout"],
    )  # fmt: skip
    keys = {"GLM5SDK_API_KEY": ",".join(settings["api_keys"]), "GLM5SDK_ADMIN_KEY": settings["admin_key"] or ""}
    launcher: Launcher
    if cluster:
        launcher = RayLauncher(replica_command(arguments, ADDRESS), keys, gpus=float(device.startswith("cuda")))
    else:
        launcher = LocalLauncher(replica_command(arguments), {**os.environ, **keys})
    serve_processes(
        launcher, router, replicas=dp, spread=ep, host=host, port=port,
        drain_seconds=settings["drain_seconds"],
        say=lambda words: console.print(f"glm5 serve: {words}", markup=False, highlight=False, soft_wrap=True),
    )  # fmt: skip
