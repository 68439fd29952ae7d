"""Read what `ptxas -v` says of one source: a line per kernel, and an error where one spills or uses local memory."""

from __future__ import annotations

import re
import subprocess
import sys

KERNEL = re.compile(r"Compiling entry function '([^']+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")


def short_names(mangled: list[str]) -> list[str]:
    """Kernel names without arguments, mangled where no c++filt is at hand."""
    try:
        result = subprocess.run(["c++filt", *mangled], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return mangled
    return [re.sub(r"glm5::(?:cuda|dev)::|void |\(.*", "", line) for line in result.stdout.splitlines()]


def kernels(text: str) -> list[tuple[str, int, tuple[int, int, int]]]:
    """(mangled name, registers, (stack, spill stores, spill loads)) of every kernel.

    Args:
        text: the compiler's messages.

    Raises:
        ValueError: a kernel without its numbers.
    """
    found = []
    for part in re.split(r"(?=Compiling entry function)", text)[1:]:
        name, stack, used = KERNEL.search(part), STACK.search(part), USED.search(part)
        if name is None or stack is None or used is None:
            raise ValueError(f"ptxas: a kernel's report is {part!r}, needs name, stack and registers")
        sizes = (int(stack[1]), int(stack[2]), int(stack[3]))
        found.append((name[1], int(used[1]), sizes))
    return found


def main() -> int:
    """Report one source; 1 when a kernel is not clean or there is none."""
    source, arch = sys.argv[1:3]
    found = kernels(sys.stdin.read())
    for name, (_, registers, (stack, stores, loads)) in zip(short_names([k[0] for k in found]), found, strict=True):
        state = "" if stack + stores + loads == 0 else f"  SPILLS: stack {stack}, stores {stores}, loads {loads}"
        print(f"sm_{arch:5} {registers:4} registers  {name}{state}")
    if not found:
        print(f"{source}: ptxas names no kernel for sm_{arch}, needs at least one", file=sys.stderr)
    return int(not found or any(sum(k[2]) for k in found))


if __name__ == "__main__":
    sys.exit(main())
