"""Processes that work together: the only place where process groups are made."""

from __future__ import annotations

from glm5sdk.parallel.mesh import Mesh, ProcessGroup, close_processes, join_processes, make_mesh

__all__ = ["Mesh", "ProcessGroup", "close_processes", "join_processes", "make_mesh"]
