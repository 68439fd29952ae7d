"""The command `glm5`."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    from glm5sdk.cli.app import run

    run()
