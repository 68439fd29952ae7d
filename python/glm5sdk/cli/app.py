"""The command tree: one module a command, imported when it runs, so that `glm5 --help` is quick."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

import glm5sdk
from glm5sdk.cli.options import Backends, Dtype, Model
from glm5sdk.cli.serve_command import serve
from glm5sdk.core.errors import ContractError, Glm5Error

__all__ = ["app", "run"]

app = typer.Typer(
    help="GLM-5 on any hardware: check the machine, run, chat with, train and convert models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
errors = Console(stderr=True)


def run() -> None:
    """Run the command line; an error made on purpose becomes one message and exit status 2."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  for as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal's encoding may lack what a model writes
    try:
        app()
    except BrokenPipeError:  # the reader has seen enough
        _drop_what_cannot_be_written()
        sys.exit(1)
    except OSError as error:
        errors.print(f"[bold red]error[/] {type(error).__name__}: ", end="")
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        _drop_what_cannot_be_written()
        sys.exit(1)
    except Glm5Error as error:
        errors.print(f"[bold red]error[/] {type(error).__name__}: ", end="")
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(130)


def _drop_what_cannot_be_written() -> None:
    """Python flushes its output once more at its end, and that failure would have an exit status of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _version(show: bool) -> None:
    if show:
        console.print(f"glm5sdk {glm5sdk.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def doctor() -> None:
    """What this machine offers: versions, backends and why one cannot run, threads, a self-test."""
    from glm5sdk.cli.doctor import report

    raise typer.Exit(0 if report(console) else 1)


@app.command()
def matrix(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/support.md.")] = False,
) -> None:
    """Which backend has an implementation of which op, and which one runs here."""
    from glm5sdk.cli.matrix import show, to_markdown

    if markdown:
        sys.stdout.write(to_markdown())
    else:
        show(console)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Tokens to write at most.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus of sampling, in (0, 1].")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among so many best tokens; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past stop tokens.")] = False,
    dtype: Dtype = "auto",
    backend: Backends = None,
) -> None:
    """Continue a text, streaming."""
    from glm5sdk.cli.write import Sampling, continue_text

    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, seed, ignore_eos)
    continue_text(console, errors, model, text, sampling, dtype, backend or [])


@app.command()
def chat(
    model: Model,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Tokens an answer may have.")] = 1024,
    temperature: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--temperature", "-t", help="0 is greedy; by default the checkpoint's."),
    ] = None,
    top_p: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Nucleus of sampling, in (0, 1]; by default the checkpoint's."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    thinking: Annotated[bool, typer.Option(help="Let the model think before it answers.")] = True,
    dtype: Dtype = "auto",
    backend: Backends = None,
) -> None:
    """Talk with a model in the terminal; an empty line or Ctrl-D ends."""
    from glm5sdk.cli.chat import converse

    converse(console, errors, model, system, max_new_tokens, temperature, top_p, seed, thinking, dtype, backend or [])


app.command()(serve)


@app.command()
def convert(
    source: Model,
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    dtype: Dtype = "auto",
    max_shard_gb: Annotated[float, typer.Option(help="Size at which a new file begins, in GB.")] = 5.0,
) -> None:
    """Rewrite a checkpoint: another dtype, other shards, FP8 blocks dequantised; tensor names stay Hugging Face's."""
    from glm5sdk.cli.convert import convert_checkpoint

    convert_checkpoint(console, source, target, dtype, max_shard_gb)


@app.command()
def quantize(
    model: Model,
    scheme: Annotated[str, typer.Option(help="w8a8, w4a8-experts or fp8.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New or empty folder to write.")],
    calibration: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Text file or folder (.txt, .md, .py); by default the Python standard library."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to calibrate on, and at most as many to measure on.")] = 8192,
    method: Annotated[
        str, typer.Option(help="rtn (nearest), search (clipping and smoothing) or gptq (errors fed forward as well).")
    ] = "gptq",
    dtype: Dtype = "auto",
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda.")] = "cpu",
    backend: Backends = None,
) -> None:
    """Quantise a checkpoint and report what it costs: output errors, bytes, KL and perplexity."""
    from glm5sdk.cli.quantize import quantize_checkpoint

    quantize_checkpoint(console, model, scheme, out, calibration, tokens, method, dtype, device, backend or [])


@app.command()
def bench(
    paths: Annotated[
        list[Path], typer.Argument(metavar="MODEL | A.json B.json ...", help="A checkpoint folder; reports to compare.")
    ],
    compare: Annotated[bool, typer.Option("--compare", help="Print reports of the same work side by side.")] = False,
    prices: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="With --compare: TOML or JSON, hardware name -> price of an hour; adds cost per token."),
    ] = None,
    json: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="File to write the report to."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Requests at a time.")] = 1,
    prompt: Annotated[int, typer.Option(help="Prompt tokens of each request: the context decoding starts at.")] = 512,
    new: Annotated[int, typer.Option(help="Tokens to decode for each request.")] = 64,
    repeats: Annotated[int, typer.Option(help="Runs; medians are reported.")] = 3,
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Of torch and the native backends."),
    ] = None,
    device: Annotated[str, typer.Option(help="torch device type.")] = "cpu",
    hardware: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Name of this machine in the report, as the prices file has it; by default its device."),
    ] = None,
    dtype: Dtype = "auto",
    backend: Backends = None,
) -> None:
    """Measure a checkpoint's prefill and decoding on this machine, or compare machines: speed, latency, cost."""
    from glm5sdk.cli.bench import Measure, bench_model, compare_reports

    if compare:
        return compare_reports(console, paths, prices)
    if prices is not None:
        raise ContractError("bench: --prices was given without --compare, needs both")
    if len(paths) != 1:
        raise ContractError(f"bench: models is {len(paths)}, needs 1; --compare takes several reports")
    measure = Measure(batch, prompt, new, repeats, threads, device, dtype, hardware)
    return bench_model(console, paths[0], measure, backend or [], json)


@app.command()
def train(
    data: Annotated[list[Path], typer.Argument(help="Text files, or folders of them (.txt, .md, .py).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for checkpoints, the model and the plot.")],
    model: Annotated[str, typer.Option(help="Preset to train from nothing.")] = "tiny",
    start: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Checkpoint folder to start from instead of a preset."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    minutes: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Length of the whole recipe; 2 when neither this nor --steps is given."),
    ] = None,
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Length of the whole recipe in steps."),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="muon or adamw.")] = "muon",
    batch_size: Annotated[int, typer.Option(help="Sequences a step.")] = 8,
    seq_len: Annotated[int, typer.Option(help="Tokens a sequence.")] = 256,
    seed: Annotated[int, typer.Option(help="Of weights and data order.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between resumable checkpoints; 0: at the end.")] = 0,
    backend: Backends = None,
) -> None:
    """Train a small model by GLM-5's recipe: dense, then the indexer by KL, then sparse."""
    from glm5sdk.cli.train import train_model

    if minutes is not None and steps is not None:
        raise ContractError("train: both --minutes and --steps were given, needs one of them")
    train_model(
        console, data, out, model, start, resume, minutes, steps, optimizer, batch_size, seq_len, seed, save_every,
        backend or [],
    )  # fmt: skip


@app.command()
def route(
    replica: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--replica", "--decode", help="URL of a server, http://host:8000; may repeat."),
    ] = None,
    prefill: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="URL of a server that computes prompts for the others; may repeat; needs the admin key."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one and says which.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Opens the API; may repeat; by default GLM5SDK_API_KEY. Replicas should know it, too."),
    ] = None,
    admin_key: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Opens /admin here and on the replicas; by default GLM5SDK_ADMIN_KEY."),
    ] = None,
    beta: Annotated[float, typer.Option(help="What load costs against a matched prefix.")] = 0.25,
    bound: Annotated[float, typer.Option(help="Largest load of a replica, in fair shares.")] = 1.25,
    migrate: Annotated[
        bool, typer.Option("--migrate", help="Move a session's cache when it changes replicas.")
    ] = False,
    health_interval: Annotated[float, typer.Option(help="Seconds between checks of a replica.")] = 10.0,
    health_timeout: Annotated[float, typer.Option(help="Seconds that a check may take.")] = 5.0,
    max_in_flight: Annotated[int, typer.Option(help="Requests on one replica.")] = 1024,
    max_retries: Annotated[int, typer.Option(help="Other replicas that a request may try.")] = 3,
    max_body_bytes: Annotated[int, typer.Option(help="Largest body of a request.")] = 32 * 2**20,
    read_timeout: Annotated[float, typer.Option(help="Seconds between two pieces of an answer.")] = 600.0,
    drain_seconds: Annotated[int, typer.Option(help="Seconds that running requests may take after a signal.")] = 30,
    log_level: Annotated[str, typer.Option(help="critical, error, warning, info or debug.")] = "warning",
) -> None:
    """One door in front of many servers: sessions and prefixes stay together, loads stay even."""
    from glm5sdk.cli.route import keys_from, route_requests
    from glm5sdk.serve.router.choose import Affinity
    from glm5sdk.serve.router.health import HealthRules
    from glm5sdk.serve.router.settings import RouterSettings

    api_keys, admin = keys_from(api_key or (), admin_key)
    settings = RouterSettings(
        replicas=tuple(replica or ()), prefill=tuple(prefill or ()), api_keys=api_keys, admin_key=admin,
        affinity=Affinity(beta=beta, bound=bound), health=HealthRules(health_interval, health_timeout),
        max_in_flight=max_in_flight, max_retries=max_retries, max_body_bytes=max_body_bytes,
        read_timeout=read_timeout, migrate=migrate,
    )  # fmt: skip
    route_requests(console, settings, host, port, drain_seconds, log_level)
