"""Where the tensors of a safetensors checkpoint lie, read from headers alone and checked against the files' sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5sdk.core.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Bytes per element of every dtype name of the safetensors format that occupies whole bytes.
DTYPE_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2},
    **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1},
}
_MAX_HEADER = 100_000_000  # the format's own limit, in bytes
_LFS = b"version "  # how a git-lfs pointer begins


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: its dtype as the format names it, its shape, and its first byte after the header."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def find_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint directory (one file, or shards with an index) or of one .safetensors file.

    Raises:
        CheckpointError: no or ambiguous files, a damaged file, an index that does not agree with the files.
    """
    if path.is_file():
        return read_header(path)
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint: {path} does not exist, needs a local directory or .safetensors file; "
            "this SDK downloads nothing, so fetch a hub model first"
        )
    single, index = path / SINGLE, path / INDEX
    if single.exists() and index.exists():
        raise CheckpointError(
            f"checkpoint: {path} has both {SINGLE} and {INDEX}, needs one of them; remove the one that is stale"
        )
    if single.exists():
        return read_header(single)
    if not index.exists():
        raise CheckpointError(f"checkpoint: {path} has no weights, needs {SINGLE} or {INDEX} with its shards")
    return _read_shards(path, _read_index(index))


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file.

    Raises:
        CheckpointError: the header is damaged, or its tensors do not fill the file exactly.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == _LFS:
            raise CheckpointError(f"checkpoint: {file} is a git-lfs pointer, needs the data; run `git lfs pull`")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(
                f"checkpoint: {file} is {size} bytes with a header of {length}, needs a whole safetensors file; "
                "it is truncated or of another format"
            )
        text = stream.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_refuse_twins)
        if not isinstance(header, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint: {file} has a corrupt header ({error}), needs JSON") from error
    header.pop("__metadata__", None)
    tensors = {name: _stored(name, entry, file) for name, entry in header.items()}
    _check_layout(tensors.values(), file, size - 8 - length)
    return tensors


def _refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key occurs twice")
    return values


def _stored(name: str, entry: Any, file: Path) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = [*shape, begin, end]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
            raise TypeError("not a list of sizes")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint: {name} in {file} has a corrupt header entry {entry!r}, needs dtype, shape and data_offsets"
        ) from error
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"checkpoint: {name} in {file} has dtype {dtype!r}, needs one of {', '.join(DTYPE_BYTES)}"
        )
    want = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != want:
        raise CheckpointError(
            f"checkpoint: {name} in {file} is {end - begin} bytes, needs {want} for {dtype} {list(shape)}"
        )
    return StoredTensor(name, file, dtype, shape, begin, want)


def _check_layout(tensors: Iterable[StoredTensor], file: Path, available: int) -> None:
    """Tensors must lie end to end and fill the file: a gap or an overlap means a damaged header."""
    position = 0
    # An empty tensor shares its offset with the next one, so it has to come first.
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != position:
            raise CheckpointError(
                f"checkpoint: {tensor.name} in {file} begins at byte {tensor.offset}, needs {position}; "
                "the header is corrupt"
            )
        position += tensor.nbytes
    if position != available:
        state = "truncated" if position > available else "corrupt"
        raise CheckpointError(f"checkpoint: {file} is {state}: it has {available} bytes of data, needs {position}")


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("weight_map is empty or no table")
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint: {index} is corrupt ({error}), needs JSON with a weight_map") from error
    for name, shard in weight_map.items():
        # A shard beside the index, never a path that leads elsewhere.
        if not isinstance(shard, str) or Path(shard).name != shard or len(shard.encode(errors="replace")) > 255:
            raise CheckpointError(f"checkpoint: {index} maps {name} to {shard!r}, needs a file name beside the index")
    return weight_map


def _read_shards(path: Path, weight_map: dict[str, str]) -> dict[str, StoredTensor]:
    absent = sorted({shard for shard in weight_map.values() if not (path / shard).is_file()})
    if absent:
        raise CheckpointError(f"checkpoint: {path} lacks {some(absent)}, needs every shard that {INDEX} names")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        stored = read_header(path / shard)
        strangers = sorted(name for name in stored if weight_map.get(name) != shard)
        if strangers:
            raise CheckpointError(
                f"checkpoint: {path / shard} holds {some(strangers)}, which {INDEX} does not map to it, "
                "needs an index that agrees with the files"
            )
        tensors.update(stored)
    lost = sorted(set(weight_map) - set(tensors))
    if lost:
        raise CheckpointError(
            f"checkpoint: {path / weight_map[lost[0]]} does not hold {some(lost)}, needs what {INDEX} maps to it"
        )
    return tensors


def some(names: list[str], limit: int = 6) -> str:
    """A few names for a message, and how many there are in all."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
