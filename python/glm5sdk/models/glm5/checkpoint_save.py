"""Writing a checkpoint that transformers, vLLM and this SDK read: streamed, sharded, and in place all at once."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from glm5sdk.core.errors import CheckpointError
from glm5sdk.models.glm5.checkpoint_files import INDEX, SINGLE, some
from glm5sdk.models.glm5.checkpoint_forms import SUFFIXES, form_parts, quantization_config, to_tensors
from glm5sdk.models.glm5.config import Glm5Config
from glm5sdk.models.glm5.tensors import EMBEDDING, Index, TensorSpec, expected_tensors
from glm5sdk.ops._weights import part_index
from glm5sdk.registry.weight import Weight

_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_RESERVED = ("config.json", INDEX)
_DTYPES = {
    **{"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64},
    "F32": torch.float32,
}


def checkpoint_tensors(
    config: Glm5Config,
    get_param: Callable[[str], Tensor | Weight],
    dtype: torch.dtype | None = None,
    untied: Collection[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's view of a model: Hugging Face names, and experts as slices of the fused parameters.

    Args:
        config: the model.
        get_param: gives a parameter (or the router bias buffer) by name, plain, or a quantised weight, which becomes
            the tensors of its form.
        dtype: casts to it, one tensor at a time, except router biases and quantised weights; None leaves dtypes as they
            are.
        untied: MTP parameters of the model's own, by name (see `Checkpoint.untied`).
    """
    for spec in expected_tensors(config):
        if not spec.required and spec.parameter not in untied:
            continue
        value = get_param(spec.parameter)
        if isinstance(value, Weight):
            yield from to_tensors(spec.name, _part(value, spec.index, spec.shape))
            continue
        tensor = value.detach() if spec.index is None else value.detach()[spec.index]
        yield spec.name, tensor if dtype is None or spec.keep_f32 else tensor.to(dtype)


def _part(weight: Weight, index: Index | None, shape: tuple[int, ...]) -> Weight:
    """One matrix of a fused weight, as views."""
    if index is None:
        return weight
    tensors = tuple(t[part_index(weight.kind, i, index)] for i, t in enumerate(weight.tensors))
    return Weight(weight.kind, "plain", shape, tensors)


def save_checkpoint(
    path: str | PathLike[str],
    config: Glm5Config,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = 5_000_000_000,
    extra_files: Mapping[str, bytes | PathLike[str]] | None = None,
) -> None:
    """Writes weights, index and config.json; holds one shard of tensors at a time.

    All files are first written and synced in a hidden directory inside `path`, then renamed, index and config.json
    last. A failure before the renames leaves an older checkpoint there as it was; shards of an older save are removed
    after the new index stands. config.json gets the dtype of the embeddings, and `quantization_config` exactly when
    quantised weights are among the tensors, in one of the forms of checkpoint_forms.py.

    Args:
        path: directory, made if needed.
        config: the model; decides which names and shapes are accepted.
        tensors: Hugging Face names with tensors, in any order, possibly made on the fly (see `checkpoint_tensors`).
        max_shard_bytes: a shard is closed before it would grow beyond this; a larger tensor has its own.
        extra_files: further files by name, as bytes or as a path to copy (tokenizer, generation config).

    Raises:
        CheckpointError: a name, shape or dtype the config does not have, a name twice, or one that never came; or path
            is no folder that can be written to.
    """
    extra = dict(extra_files or {})
    for name in extra:
        if Path(name).name != name or name in _RESERVED or _SHARD.fullmatch(name):
            raise CheckpointError(f"save_checkpoint: extra file is {name!r}, needs a name that is not a checkpoint's")
    target = Path(path)
    made = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".saving-", dir=target))
    except OSError as error:
        raise CheckpointError(f"save_checkpoint: {target} is no place to write ({error}), needs a folder") from error
    try:
        _save(target, staging, config, tensors, max_shard_bytes, extra)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if made and not any(target.iterdir()):
            target.rmdir()


def _save(
    target: Path,
    staging: Path,
    config: Glm5Config,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int,
    extra: dict[str, bytes | PathLike[str]],
) -> None:
    check = _Check(config)
    shards: list[list[str]] = []
    for shard in _shards(check(tensors), max_shard_bytes):
        file = staging / f"shard-{len(shards)}"
        save_file(shard, file, metadata={"format": "pt"})
        _sync(file)
        shards.append(list(shard))
        shard.clear()  # a generator's tensors are freed before it makes the next
    check.finish()
    for name, content in extra.items():
        data = content if isinstance(content, bytes) else Path(content).read_bytes()
        _write(staging / f"extra-{name}", data)
    _write_json(staging / "config.json", check.config_json())

    names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    if len(shards) > 1:
        weight_map = {name: file for file, held in zip(names, shards, strict=True) for name in held}
        index = {"metadata": {"total_size": check.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(staging / INDEX, index)
    _commit(target, staging, names, list(extra))


def _commit(target: Path, staging: Path, shards: list[str], extra: list[str]) -> None:
    """Renames the staged files into place. A crash in the midst leaves no index, never a mix of two checkpoints."""
    for name in extra:
        os.replace(staging / f"extra-{name}", target / name)
    (target / INDEX).unlink(missing_ok=True)
    if shards != [SINGLE]:
        (target / SINGLE).unlink(missing_ok=True)
    _sync(target)
    for i, name in enumerate(shards):
        os.replace(staging / f"shard-{i}", target / name)
    _sync(target)
    if shards != [SINGLE]:
        os.replace(staging / INDEX, target / INDEX)
    os.replace(staging / "config.json", target / "config.json")
    _sync(target)
    for file in target.iterdir():
        if _SHARD.fullmatch(file.name) and file.name not in shards:
            file.unlink()


class _Check:
    """Passes a stream of named tensors through, refusing what the config does not have, and remembers what came."""

    def __init__(self, config: Glm5Config) -> None:
        self._config = config
        self._specs = {spec.name: spec for spec in expected_tensors(config)}
        self._dtypes: dict[str, torch.dtype] = {}
        self.nbytes = 0

    def __call__(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name in self._dtypes:
                raise CheckpointError(f"save_checkpoint: {name} came twice, needs each tensor once")
            suffix = next((s for s in SUFFIXES if name.endswith(s)), "")
            spec = self._specs.get(name.removesuffix(suffix))
            if spec is None:
                raise CheckpointError(f"save_checkpoint: {name} is unexpected, needs a tensor name of this config")
            _check(spec, name, tensor)
            self._dtypes[name] = tensor.dtype
            self.nbytes += tensor.numel() * tensor.element_size()
            yield name, tensor

    def finish(self) -> None:
        """Raises for what never came, and for quantised weights and scales that came without each other."""
        kinds = {name: self._kind(name) for name in self._specs}
        missing = [name for name, spec in self._specs.items() if spec.required and kinds[name] is None]
        if missing:
            raise CheckpointError(
                f"save_checkpoint: {len(missing)} tensors never came ({some(missing)}), needs them all"
            )
        for name, kind in kinds.items():
            came = {suffix for suffix in ("", *SUFFIXES) if name + suffix in self._dtypes}
            want = {""} if kind == "plain" else set()
            if kind not in (None, "plain"):
                want = {part.removeprefix(name) for part in form_parts(kind, name, self._specs[name].shape)}
            if came != want:
                raise CheckpointError(
                    f"save_checkpoint: {name} is {self._dtypes.get(name)}, needs {' and '.join(sorted(came ^ want))} "
                    "beside it if and only if quantised"
                )

    def _kind(self, name: str) -> str | None:
        if name in self._dtypes:
            return {torch.float8_e4m3fn: "fp8", torch.int8: "w8a8"}.get(self._dtypes[name], "plain")
        return "w4a8" if any(name + suffix in self._dtypes for suffix in SUFFIXES) else None

    def config_json(self) -> dict[str, Any]:
        """The config with the dtype and quantisation that the saved tensors really have."""
        values = self._config.to_dict()
        values.pop("quantization_config", None)
        values["dtype"] = str(self._dtypes[EMBEDDING]).removeprefix("torch.")
        matrices = {name: self._kind(name) for name, spec in self._specs.items() if len(spec.shape) == 2}
        table = quantization_config({name: kind for name, kind in matrices.items() if kind is not None})
        if table is not None:
            values["quantization_config"] = table
        return values


def _check(spec: TensorSpec, name: str, tensor: Tensor) -> None:
    """Shape and dtype, by the name's ending; `finish` sees whether a weight's tensors belong together."""
    floats: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    allowed: list[tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = []
    if name == spec.name:
        allowed.append((spec.shape, floats[::3] if spec.keep_f32 else floats))
    if len(spec.shape) == 2:
        for kind in ("fp8", "w8a8", "w4a8"):
            stored, shape = form_parts(kind, spec.name, spec.shape).get(name, ((), ()))
            if stored:  # writing is stricter than reading: one dtype each
                allowed.append((shape, (_DTYPES[stored[0]],)))
    if not allowed:
        raise CheckpointError(f"save_checkpoint: {name} is unexpected, needs a tensor name of this config")
    if tuple(tensor.shape) not in [shape for shape, _ in allowed]:
        want = " or ".join(str(list(shape)) for shape in dict.fromkeys(shape for shape, _ in allowed))
        raise CheckpointError(f"save_checkpoint: {name} is {list(tensor.shape)}, needs {want}")
    accepted = [dtype for shape, dtypes in allowed if shape == tuple(tensor.shape) for dtype in dtypes]
    if tensor.dtype not in accepted:
        hint = "; casting the model to a shorter dtype must leave it alone" if spec.keep_f32 else ""
        raise CheckpointError(
            f"save_checkpoint: {name} is {tensor.dtype}, needs {' or '.join(map(str, accepted))}{hint}"
        )


def _shards(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    begins: set[int] = set()
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if shard and size + nbytes > max_bytes:
            yield shard
            shard, size, begins = {}, 0, set()
        tensor = tensor.detach().cpu().contiguous()
        if nbytes and tensor.data_ptr() in begins:
            tensor = tensor.clone()  # one tensor under two names: the format has no links
        begins.add(tensor.data_ptr())
        shard[name] = tensor
        size += nbytes
        del tensor
    yield shard


def _shard_name(i: int, count: int) -> str:
    return f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def _write_json(file: Path, values: dict[str, Any]) -> None:
    _write(file, (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode())


def _write(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    _sync(file)


def _sync(path: Path) -> None:
    """Makes a file, or a directory's list of names, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
