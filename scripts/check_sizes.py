"""Refuse files over their size budget: a file that has grown holds two ideas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HARD = {".py": 500, ".cpp": 700, ".h": 700, ".cu": 700, ".cuh": 700}


def source_files(root: Path = ROOT) -> list[Path]:
    """Files of the tree that git tracks or would track, so that build products do not count."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted({root / name for name in names if name and (root / name).is_file()})


def oversized(root: Path = ROOT) -> list[str]:
    """One line `path: lines is N, needs at most M` for every file over its hard budget."""
    found = []
    for path in source_files(root):
        limit = HARD.get(path.suffix)
        if limit is None:
            continue
        lines = len(path.read_bytes().splitlines())
        if lines > limit:
            found.append(f"{path.relative_to(root)}: lines is {lines}, needs at most {limit}; split it by idea")
    return found


if __name__ == "__main__":
    messages = oversized()
    print("\n".join(messages), file=sys.stderr, end="\n" if messages else "")
    sys.exit(bool(messages))
