"""The backend `cuda_sim`: glm5sdk's CUDA kernels on a simulator, for development. Never chosen automatically."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glm5sdk.registry.device import Device
from glm5sdk.registry.impl import Impl

__all__ = ["BACKEND", "scheduled"]


class CudaSimBackend:
    """Found through the entry point `glm5sdk.backends`; see glm5sdk.registry.plugins.Backend."""

    name = "cuda_sim"
    api_version = 1
    levels = ()
    automatic = False  # a simulator is asked for by name

    def probe(self) -> Device | str:
        """The simulator; it runs wherever its compiled part is."""
        if not any(path.suffix == ".so" for folder in _package_folders() for path in folder.glob("_C*")):
            return "its compiled module _C is not in the package; build it with pip install backends/sim"
        return Device("cpu", "CUDA simulator")

    def impls(self) -> list[Impl]:
        """Rows of glm5sdk_sim.impls; loads the compiled module."""
        from glm5sdk_sim.impls import implementations

        return implementations()

    def threads(self, count: int | None = None) -> int:
        """Set how many blocks run at once when `count` is given; the number now."""
        from glm5sdk_sim import _C

        if count is not None:
            _C.set_num_threads(count)
        return int(_C.get_num_threads())


@contextmanager
def scheduled(order: str = "fifo", copies: str = "late", seed: int = 0) -> Iterator[None]:
    """Run kernels under another schedule; a kernel without races gives the same bits under all of them.

    Args:
        order: which ready thread of a block runs next: `fifo`, `lifo` or `random`.
        copies: when asynchronous copies land: `late` (when they are waited for), `early` (at once) or `random`.
        seed: of random choices; odd seeds lay tensors against the guard page below them, even ones against that above.

    Raises:
        ContractError: a word the simulator does not know.
    """
    from glm5sdk_sim import _C

    before = _C.settings()
    _C.configure(f"order={order},copies={copies},seed={seed}")
    try:
        yield
    finally:
        _C.configure(before)


def _package_folders() -> list[Path]:
    """Folders that make up this package: one when installed, the source and the build when editable."""
    from importlib.util import find_spec

    spec = find_spec("glm5sdk_sim._C")
    found = [Path(spec.origin).parent] if spec is not None and spec.origin else []
    return [*found, *(Path(p) for p in __path__)]


BACKEND = CudaSimBackend()
