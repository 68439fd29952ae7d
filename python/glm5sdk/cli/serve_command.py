"""The options of `glm5 serve`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from glm5sdk.cli.options import Backends, Dtype, Model

__all__ = ["serve"]


def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Name that requests use, by default the folder's; may repeat."),
    ] = None,
    api_key: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Key that requests must bring; may repeat. Else GLM5SDK_API_KEY, with commas."),
    ] = None,
    admin_key: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Key of /admin, closed without one. Else GLM5SDK_ADMIN_KEY."),
    ] = None,
    allow_origin: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Web origin that browsers may call from; may repeat."),
    ] = None,
    chat_template: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="File that replaces the checkpoint's chat template."),
    ] = None,
    tool_format: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="How tool calls are written: glm45, glm47, glm53, plain; by default as the template."),
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Of a request.")] = 32 << 20,
    request_timeout: Annotated[float, typer.Option(help="Seconds a request may take.")] = 3600.0,
    max_queued_requests: Annotated[int, typer.Option(help="Sequences that may wait; more get status 429.")] = 1024,
    max_queued_tokens: Annotated[int, typer.Option(help="Prompt tokens that may wait; more get 429.")] = 4 << 20,
    drain_seconds: Annotated[float, typer.Option(help="How long what runs may go on after SIGTERM.")] = 30.0,
    max_model_len: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Tokens of prompt and answer together; by default the model's."),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences in a step at most.")] = 32,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens in a step at most.")] = 2048,
    num_pages: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Pages of the cache; by default what the batch needs, up to 4 GiB."),
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, fp8 or fp8_ds_mla.")] = "auto",
    speculative_tokens: Annotated[int, typer.Option(help="Drafts a step from the MTP layer; 0: none.")] = 0,
    speculative_method: Annotated[str, typer.Option(help="exact (the same tokens) or rejection.")] = "exact",
    expert_slots: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Experts a layer keeps in memory, the others stay on disk; by default all."),
    ] = None,
    weight_version: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Name of the weights at the start, in every answer; by default made from their contents."),
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Share what prompts have in common.")] = True,
    dp: Annotated[int, typer.Option(help="Replicas of the model, a process each, behind one port.", min=1)] = 1,
    ep: Annotated[int, typer.Option(help="Replicas over which the experts are spread; divides --dp.", min=1)] = 1,
    cluster: Annotated[bool, typer.Option("--cluster", help="Replicas on the machines of a Ray cluster.")] = False,
    access_log: Annotated[bool, typer.Option("--access-log", help="A line for every request.")] = False,
    dtype: Dtype = "auto",
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda.")] = "cpu",
    backend: Backends = None,
) -> None:
    """Serve a checkpoint: OpenAI's and Anthropic's protocols, metrics, and a chat page at /."""
    from glm5sdk.cli.serve import ServeOptions, keys_of, serve_checkpoint

    settings = {
        "model_names": tuple(served_model_name or [model.resolve().name]),
        "root": str(model),
        "api_keys": keys_of(api_key or []),
        "admin_key": admin_key or os.environ.get("GLM5SDK_ADMIN_KEY") or None,
        "allow_origins": tuple(allow_origin or []),
        "max_body_bytes": max_body_bytes,
        "request_timeout": request_timeout,
        "max_queued_requests": max_queued_requests,
        "max_queued_tokens": max_queued_tokens,
        "drain_seconds": drain_seconds,
    }
    engine = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "num_pages": num_pages,
        "kv_cache_dtype": kv_cache_dtype,
        "speculative_tokens": speculative_tokens,
        "speculative_method": speculative_method,
        "weight_version": weight_version,
        "enable_prefix_caching": prefix_caching,
    }
    if dp > 1 or ep > 1 or cluster:
        from glm5sdk.cli.serve_many import serve_replicas

        return serve_replicas(Console(), settings, sys.argv[1:], dp, ep, cluster, device, host, port)
    options = ServeOptions(
        host, port, dtype, device, chat_template, tool_format, access_log, expert_slots, settings, engine
    )
    return serve_checkpoint(Console(stderr=True), model, options, backend or [])
