"""Facts about this machine that a figure is worthless without."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import glm5sdk

COLD_FLOOR, COLD_CEILING = 256 << 20, 640 << 20


def facts() -> dict[str, Any]:
    """Processor, caches, threads and versions; JSON-ready."""
    device = glm5sdk.backends()["cpu"].device if "cpu" in glm5sdk.backends() else None
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return {
        "processor": device.name if device is not None else platform.processor(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "last_level_cache_bytes": last_level_cache(),
        "load_average": round(load, 2),
        "torch": torch.__version__,
        "glm5sdk": glm5sdk.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def last_level_cache() -> int:
    """Bytes of the largest cache of processor 0, 0 when the system does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG") or 0) * factor)
    return max(sizes)


def cold_bytes() -> int:
    """How much a rotation of inputs should touch before it comes round: twice the last cache, within reason."""
    return min(max(2 * last_level_cache(), COLD_FLOOR), COLD_CEILING)


def set_threads(count: int | None) -> int:
    """Give torch and every native backend the same number of threads; by default one for each usable processor."""
    if count is None:
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(count)
    for backend in glm5sdk.backends().values():
        if backend.threads is not None:
            backend.threads(count)
    return count
