"""The four ways glm5sdk says no; a message is `<who>: <what> is <got>, needs <want>` and, where one helps, a hint."""

from __future__ import annotations

__all__ = ["CapacityError", "CheckpointError", "ContractError", "Glm5Error", "UnavailableError"]


class Glm5Error(Exception):
    """Base of all errors that glm5sdk raises on purpose."""


class ContractError(Glm5Error, ValueError):
    """The caller's arguments break an op's, a config's or a file's contract. Nothing was computed or written."""


class UnavailableError(Glm5Error, RuntimeError):
    """What was asked for by name cannot run here; the message lists every reason."""


class CapacityError(Glm5Error, RuntimeError):
    """A fixed capacity (pages, rows, workspace) is too small; the message says the numbers."""


class CheckpointError(Glm5Error, ValueError):
    """A checkpoint file or tensor is missing, unexpected, misshapen or damaged; the message names tensor and file."""
