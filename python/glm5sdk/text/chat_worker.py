"""Renders one untrusted chat template in a process of its own, with bounded time, memory, output and no files.

Runs as a script (`python chat_worker.py FD`) and knows nothing of glm5sdk. Frames in both directions are eight bytes of
length and that much JSON. First comes `{"source", "seconds", "memory_bytes", "output_chars"}`, then one set of template
variables per render; each answer is `{"text"}` or `{"error": kind, "message"}`.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

__all__ = ["environment", "receive", "restrict", "send"]

_LENGTH = 8
# Touches what Python and jinja2 load on first use (codecs, time zone, error reports) while files can still be opened.
_WARM_UP = r"{{ 'é\n' | pprint }}{{ 'é' | urlencode }}{{ strftime_now('%c %Z') }}{{ [1, 2] | random }}{{ 1 + 'a' }}"


class OutputLimitError(Exception):
    """The template writes more than it may."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training masks; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class's own form

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that takes no name with a leading underscore."""

    def __init__(*args: Any, **names: Any) -> None:  # `self` stays free as a name in a template
        for name in dict(*args[1:], **names):
            _check_name(name)
        jinja2.utils.Namespace.__init__(*args, **names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} begins with an underscore")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _make_dict(*args: Any, **items: Any) -> dict[Any, Any]:
    return dict(*args, **items)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a model must not see.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that Hugging Face renders chat templates in: the same names, filters and white space."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_make_dict, namespace=_Namespace
    )
    return made


def restrict(memory_bytes: int) -> None:
    """From here on: bounded memory, no file grows, and nothing new can be opened, be it file, socket or program."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def _limited(seconds: float, output_chars: int, pieces: Callable[[], Any]) -> dict[str, str]:
    """The joined pieces, or the kind of failure. Time over is no failure here: the process dies of SIGPROF."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # CPU time, so that a busy machine does not change the verdict
    try:
        text, length = [], 0
        for piece in pieces():
            length += len(piece)
            if length > output_chars:
                raise OutputLimitError
            text.append(piece)
        return {"text": "".join(text)}
    except OutputLimitError:
        return {"error": "output", "message": f"output is over {output_chars} characters"}
    except MemoryError:
        return {"error": "memory", "message": "memory is used up"}
    except jinja2.exceptions.SecurityError as error:
        return {"error": "unsafe", "message": str(error)}
    except jinja2.exceptions.TemplateSyntaxError as error:
        return {"error": "syntax", "message": f"{error.message} (line {error.lineno})"}
    except jinja2.exceptions.TemplateError as error:
        return {"error": "template", "message": str(error)}
    except Exception as error:  # noqa: BLE001 - a template can make any Python error; all of them are its own
        return {"error": "failed", "message": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def send(link: socket.socket, value: Any) -> None:
    """Write one frame."""
    data = json.dumps(value).encode()
    link.sendall(len(data).to_bytes(_LENGTH, "big"))
    link.sendall(data)


def receive(link: socket.socket, most_bytes: int | None = None) -> Any:
    """Read one frame.

    Raises:
        EOFError: the other side is gone, or announces more than `most_bytes`.
        ValueError: the frame is no JSON.
    """
    length = int.from_bytes(_exactly(link, _LENGTH), "big")
    if most_bytes is not None and length > most_bytes:
        raise EOFError(f"frame is {length} bytes, needs at most {most_bytes}")
    return json.loads(_exactly(link, length))


def _exactly(link: socket.socket, length: int) -> bytes:
    chunks = []
    while length:
        chunk = link.recv(min(length, 1 << 20))
        if not chunk:
            raise EOFError("the other side is gone")
        chunks.append(chunk)
        length -= len(chunk)
    return b"".join(chunks)


def main() -> None:
    """Serve one template until the other side closes the link."""
    link = socket.socket(fileno=int(sys.argv[1]))
    settings = receive(link)
    jinja = environment()
    _limited(1.0, 1000, lambda: jinja.from_string(_WARM_UP).generate())
    restrict(settings["memory_bytes"])
    limits = (settings["seconds"], settings["output_chars"])
    compiled: list[jinja2.Template] = []

    def compile_source() -> list[str]:
        compiled.append(jinja.from_string(settings["source"]))
        return []

    try:
        answer = _limited(*limits, compile_source)
        send(link, {**answer, "error": "syntax"} if answer.get("error") == "failed" else answer)
        while compiled:
            send(link, _limited(*limits, partial(compiled[0].generate, receive(link))))
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main()
