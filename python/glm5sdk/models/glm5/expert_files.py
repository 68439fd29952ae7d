"""Single experts read from a checkpoint's files at any later time, with what was checked then checked again."""

from __future__ import annotations

import os
import threading
import zlib
from pathlib import Path

import torch
from torch import Tensor

from glm5sdk.core.errors import CheckpointError
from glm5sdk.models.glm5.checkpoint import Checkpoint, float_weight
from glm5sdk.models.glm5.checkpoint_files import StoredTensor
from glm5sdk.models.glm5.checkpoint_forms import to_weight
from glm5sdk.models.glm5.tensors import TensorSpec
from glm5sdk.nn.quantised import empty_weight
from glm5sdk.ops._weights import part_index
from glm5sdk.registry.weight import Weight, WeightLike

__all__ = ["CheckpointExperts", "OpenFiles"]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8,
    "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


class OpenFiles:
    """A checkpoint's files, opened once: a file that is deleted or replaced later can still be read as it was.

    Bytes are read, not mapped: a mapped file that another process cuts short ends this one. The first read of a tensor
    notes its checksum, later ones have to give the same.

    Args:
        verify: compare checksums (about a second for each 2 GB).
    """

    def __init__(self, verify: bool = True) -> None:
        self._verify = verify
        self._open: dict[Path, tuple[int, int, tuple[int, int]]] = {}  # descriptor, start of data, (size, mtime)
        self._sums: dict[tuple[Path, str], int] = {}
        self._lock = threading.Lock()

    def add(self, file: Path) -> None:
        """Open a file, if that was not done.

        Raises:
            CheckpointError: it cannot be opened.
        """
        if file in self._open:
            return
        try:
            descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CheckpointError(f"checkpoint: {file} cannot be opened ({error}), needs to be readable") from error
        start = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
        self._open[file] = descriptor, start, _state(descriptor)

    def read(self, stored: StoredTensor) -> Tensor:
        """One tensor, freshly read.

        Raises:
            CheckpointError: the file was changed or cut since it was opened, or cannot be read; names tensor and file.
        """
        where = f"checkpoint: {stored.name} in {stored.file}"
        if stored.file not in self._open:
            raise CheckpointError(f"{where} is closed, needs the model that reads it alive")
        descriptor, start, state = self._open[stored.file]
        buffer = torch.empty(stored.nbytes, dtype=torch.uint8)
        memory, done = memoryview(buffer.numpy()), 0
        try:
            while done < stored.nbytes:
                got = os.preadv(descriptor, [memory[done:]], start + stored.offset + done)
                if not got:
                    raise CheckpointError(f"{where} ends after {done} bytes, needs {stored.nbytes}: the file was cut")
                done += got
            if _state(descriptor) != state:
                raise CheckpointError(f"{where} has changed since it was opened, needs files that stay as they are")
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read ({error}), needs a device that works") from error
        if self._verify:
            found = zlib.crc32(memory)
            with self._lock:
                known = self._sums.setdefault((stored.file, stored.name), found)
            if found != known:
                raise CheckpointError(f"{where} has checksum {found:08x}, needs {known:08x} as when it was first read")
        return buffer.view(_DTYPES[stored.dtype]).view(stored.shape)

    def close(self) -> None:
        """Close all files."""
        for descriptor, _, _ in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def __del__(self) -> None:
        self.close()


def _state(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


class CheckpointExperts:
    """The experts of one layer in a checkpoint; an `ExpertSource`.

    Args:
        checkpoint: that holds them all.
        layer: path of the layer's Experts.
        kinds: "gate_up_proj" and "down_proj" -> kind that slots keep; others are dequantised to the slot's dtype.
        files: shared by the layers.

    Raises:
        CheckpointError: the checkpoint lacks an expert, or a file cannot be opened.
    """

    def __init__(self, checkpoint: Checkpoint, layer: str, kinds: dict[str, str], files: OpenFiles) -> None:
        c = checkpoint.config
        self.experts = c.n_routed_experts
        self._shapes = {
            "gate_up_proj": (2 * c.moe_intermediate_size, c.hidden_size),
            "down_proj": (c.hidden_size, c.moe_intermediate_size),
        }
        self._kinds, self._files = kinds, files
        self._specs: list[list[tuple[TensorSpec, str, list[StoredTensor]]]] = [[] for _ in range(self.experts)]
        for spec in checkpoint.specs(lambda s: s.index is not None and s.parameter.rpartition(".")[0] == layer):
            assert spec.index is not None
            assert isinstance(spec.index[0], int)
            stored = checkpoint.stored_parts(spec)
            for part in stored:
                files.add(part.file)
            self._specs[spec.index[0]].append((spec, checkpoint.kinds[spec.name], stored))
        torn = [e for e, parts in enumerate(self._specs) if len(parts) != 3]
        if torn:
            raise CheckpointError(
                f"checkpoint: {checkpoint.path} lacks {layer}.{torn[0]}, needs all experts of a layer"
            )

    def empty(self, slots: int, dtype: torch.dtype, device: torch.device) -> tuple[WeightLike, WeightLike]:
        """See `ExpertSource`."""

        def make(name: str) -> WeightLike:
            shape = (slots, *self._shapes[name])
            if name in self._kinds:
                return empty_weight(self._kinds[name], shape, device)
            return torch.empty(shape, dtype=dtype, device=device)

        return make("gate_up_proj"), make("down_proj")

    def read(self, expert: int, slot: int, gate_up: WeightLike, down: WeightLike) -> int:
        """See `ExpertSource`."""
        done = 0
        for spec, kind, stored in self._specs[expert]:
            into = gate_up if spec.parameter.endswith("gate_up_proj") else down
            parts = {part.name: self._files.read(part) for part in stored}
            done += sum(part.nbytes for part in stored)
            value = parts[spec.name] if kind == "plain" else to_weight(kind, spec.name, spec.shape, parts)
            index = (slot, *(spec.index or ())[1:])
            if isinstance(into, Weight):
                assert isinstance(value, Weight)  # kinds were compared when the model was made
                for i, (target, tensor) in enumerate(zip(into.tensors, value.tensors, strict=True)):
                    target[part_index(into.kind, i, index)] = tensor
            else:
                into[index] = float_weight(value, into.dtype) if isinstance(value, Weight) else value
        return done
