"""The CPU backend of glm5sdk: native kernels from baseline to AVX-512 and AMX, chosen from CPUID at run time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm5sdk.registry.device import Device
from glm5sdk.registry.impl import Impl

__all__ = ["BACKEND"]


class CpuBackend:
    """Found through the entry point `glm5sdk.backends`; see glm5sdk.registry.plugins.Backend."""

    name = "cpu"
    api_version = 1
    # Lowest first: `use("cpu.avx2")` is a cap. An op without a kernel at a level runs the best one below it.
    levels = ("baseline", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
    automatic = True

    def probe(self) -> Device | str:
        """The processor; there always is one, but the wheel may lack its compiled part."""
        if not any(path.suffix == ".so" for folder in _package_folders() for path in folder.glob("_C*")):
            return "its compiled module _C is not in the package; build it with pip install backends/cpu"
        return Device("cpu", _processor_name())

    def impls(self) -> list[Impl]:
        """Rows of glm5sdk_cpu.impls; loads the compiled module."""
        from glm5sdk_cpu.impls import implementations

        return implementations(self.levels)

    def threads(self, count: int | None = None) -> int:
        """Set the size of the thread pool when `count` is given; its size now."""
        from glm5sdk_cpu import _C

        if count is not None:
            _C.set_num_threads(count)
        return int(_C.get_num_threads())

    def peaks(self, seconds: float = 0.05, read_bytes: int = 1 << 29) -> dict[str, Any]:
        """What all threads together reach here, measured now; takes about a second.

        Args:
            seconds: for each instruction.
            read_bytes: of the buffer read; more than the last cache holds, or its speed is measured.

        Returns:
            "bandwidth": bytes a second read from memory; "flops": for each level this processor has, operations a
            second of its own instruction by activation dtype (f32, bf16, int8). A dtype that a level does not name
            is computed with the next lower level's instruction, in the end with f32's.
        """
        from glm5sdk_cpu import _C

        flops: dict[str, dict[str, float]] = {}
        for rank, level in enumerate(self.levels[: _C.cpu_level() + 1]):
            measured = {name: _C.probe_product(rank, n, seconds) for n, name in enumerate(("f32", "bf16", "int8"))}
            flops[level] = {name: rate for name, rate in measured.items() if rate > 0}
        return {"bandwidth": _C.probe_read(read_bytes, 5), "flops": flops}


def _package_folders() -> list[Path]:
    """Folders that make up this package: one when installed, the source and the build when editable."""
    from importlib.util import find_spec

    spec = find_spec("glm5sdk_cpu._C")
    found = [Path(spec.origin).parent] if spec is not None and spec.origin else []
    return [*found, *(Path(p) for p in __path__)]


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


BACKEND = CpuBackend()
