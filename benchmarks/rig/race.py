"""Programs that serve the same requests: a child process each, all alive at once, taking turns."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from peers.protocol import parse_line
from peers.traffic import Request, agreeing_share, as_input, same_tokens

HERE = Path(__file__).resolve().parents[1]
ALIKE = 0.3  # of all tokens before the first difference, for a program without float32: random weights have near ties
WRONG = "its tokens are not glm5sdk's"


@dataclass
class Program:
    """One that serves.

    Attributes:
        name: as printed.
        script: the child's, in peers/.
        python: interpreter that has it.
        option: passed on to the child.
        rate: useful new tokens a second, by dtype.
        why: why there is none, by dtype.
        same: requests with glm5sdk's own tokens, by dtype.
        about: versions.
    """

    name: str
    script: str
    python: str
    option: str = ""
    rate: dict[str, float] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


class Child:
    """A program's process; `ask` gives its next word, or {"why": ...} when there is none."""

    def __init__(self, program: Program, folder: Path, threads: int, dtype: str, limit: int) -> None:
        self.limit = limit
        command = [
            program.python, str(HERE / "peers" / program.script), "--checkpoint", str(folder),
            "--threads", str(threads), "--dtype", dtype, "--option", program.option,
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self.errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment
            )
        except OSError:
            self.errors.close()
            raise

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and read the answer; one that takes more than `limit` seconds is killed."""
        watch = threading.Timer(self.limit, self.process.kill)
        watch.start()
        try:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(line)
            self.process.stdin.flush()
            for said in self.process.stdout:
                if (found := parse_line(said)) is not None:
                    return found
        except BrokenPipeError:
            pass
        finally:
            late = not watch.is_alive()
            watch.cancel()
        return {"why": f"took more than {self.limit} s" if late else self._last_words()}

    def close(self) -> None:
        """End it and wait."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # a line that it never read
                    stream.close()

    def _last_words(self) -> str:
        self.process.wait()
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        return lines[-1][:160].removeprefix("absent: ") if lines else f"ended with {self.process.returncode}"


def race(programs: list[Program], folder: Path, threads: int, dtype: str, requests: list[Request], repeats: int,
         limit: int) -> None:  # fmt: skip
    """Fill in rates and reasons for one dtype; the first program is glm5sdk.

    Tokens first: in float32 all must be glm5sdk's; in another dtype a program's float32 must have been right, or, if it
    has none, its texts begin alike.
    """
    useful = sum(r.new_tokens for r in requests)
    children: dict[str, Child] = {}
    times: dict[str, list[float]] = {}
    mine: list[list[int]] = []
    try:
        for program in programs:
            if program.why.get("float32", "").startswith(WRONG):
                program.why[dtype] = "not timed: " + program.why["float32"]
                continue
            try:
                child = children[program.name] = Child(program, folder, threads, dtype, limit)
            except OSError as error:
                program.why[dtype] = f"absent: {error.strerror}"
                continue
            found = child.ask(as_input(requests))
            if "why" not in found:
                program.about, mine = found["about"], mine or found["tokens"]
                same, share = same_tokens(mine, found["tokens"]), agreeing_share(mine, found["tokens"])
                program.same[dtype] = f"{same} of {len(requests)}"
                if same < len(requests) if dtype == "float32" else "float32" not in program.rate and share < ALIKE:
                    found = {"why": f"{WRONG}: {same} of {len(requests)} requests, {share:.0%} of tokens"}
            if "why" in found:
                program.why[dtype] = found["why"]
                children.pop(program.name).close()
        for _ in range(repeats):
            for name, child in list(children.items()):
                times.setdefault(name, []).append(child.ask("go\n").get("seconds", float("inf")))
    finally:
        for child in children.values():
            child.close()
    for program in programs:
        if program.name in times:
            program.rate[dtype] = useful / statistics.median(times[program.name])
