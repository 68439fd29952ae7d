"""Reading a Hugging Face checkpoint: everything is checked against the config before the first tensor is read."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from glm5sdk.core.errors import CheckpointError
from glm5sdk.models.glm5.checkpoint_files import StoredTensor, find_tensors, some
from glm5sdk.models.glm5.checkpoint_forms import form_parts, refuse_activations, stored_kind, to_weight
from glm5sdk.models.glm5.checkpoint_fp8 import SIDECAR, dequantise_blocks
from glm5sdk.models.glm5.config import Glm5Config
from glm5sdk.models.glm5.tensors import Index, TensorSpec, expected_tensors, mtp_prefix, parameter_shapes
from glm5sdk.ops._weights import dequantize_weight
from glm5sdk.registry.weight import Weight

# Called with a parameter's name, where in it the tensor goes (None: all of it), and the tensor.
Write = Callable[[str, Index | None, Tensor], None]
# The same for checkpoints that are loaded as they are quantised.
WriteAny = Callable[[str, Index | None, Tensor | Weight], None]

_FLOATS = ("F32", "BF16", "F16", "F64")
_FP8 = "F8_E4M3"
_BAR_FROM = 1 << 30  # bytes from which a terminal gets a progress bar unasked
# Endings of other quantisation schemes' companions of a weight; skipping one would load nonsense.
_FOREIGN = ("scale", "scale_2", "scales", "zero_point", "zeros", "qweight", "qzeros", "g_idx", "_packed")


class CheckpointWarning(UserWarning):
    """A checkpoint loads, but not as its config or its tensors suggest."""


class Checkpoint:
    """A checkpoint whose every tensor is known to be present, of the right shape and of a readable dtype.

    Attributes:
        config: the model it holds. Differs from the config it was opened with when the MTP layer is not loaded.
        path: where it was opened.
        kinds: kind of each stored weight by name: plain, fp8, w8a8 or w4a8.
    """

    def __init__(self, path: Path, config: Glm5Config, stored: dict[str, StoredTensor], partial: bool = False) -> None:
        """Use `open_checkpoint`.

        Raises:
            CheckpointError: a tensor is missing, unexpected, misshapen or of an unknown kind.
        """
        self.path = path
        self.config = config
        self._specs = {spec.name: spec for spec in expected_tensors(config)}
        self._stored = stored
        found = {name: stored_kind(name, stored) for name in self._specs}
        self.kinds = {name: kind for name, kind in found.items() if kind is not None}
        _check_names(self._specs, self.kinds, stored, path, partial)
        for name, kind in self.kinds.items():
            _check_tensor(self._specs[name], kind, stored)
        rounded = [name for name in self.kinds if self._specs[name].keep_f32 and stored[name].dtype in ("BF16", "F16")]
        if rounded:
            warnings.warn(
                f"checkpoint: {some(rounded)} in {path} is stored as {stored[rounded[0]].dtype}, needs F32; "
                "the rounding is done and other experts may be chosen, so go back to the original if you can",
                CheckpointWarning,
                stacklevel=3,
            )

    @property
    def is_fp8(self) -> bool:
        """Whether any weight is FP8 with block scales; they are dequantised on loading."""
        return "fp8" in self.kinds.values()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that loading reads."""
        return sum(tensor.nbytes for tensor in self._stored.values())

    @cached_property
    def untied(self) -> frozenset[str]:
        """Stored MTP `embed_tokens` / `shared_head.head` that differ from the main model's: parameters of their own.

        Reads the tensors to compare. Equal copies, as DeepSeek-V3.2 stores, are not loaded at all.

        Raises:
            CheckpointError: word embeddings are tied in the config and lm_head.weight is another matrix.
        """
        read = _Reader(self._stored)
        different: set[str] = set()
        for spec in self._specs.values():
            if spec.duplicate_of is None or spec.name not in self.kinds:
                continue
            if read.equal(spec.name, spec.duplicate_of):
                continue
            if self.config.tie_word_embeddings and spec.name == "lm_head.weight":
                raise CheckpointError(
                    f"checkpoint: {spec.name} in {self._place(spec).file} differs from {spec.duplicate_of}, "
                    "needs an equal matrix while tie_word_embeddings is true; set it to false"
                )
            different.add(spec.parameter)
        return frozenset(different)

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each parameter that `load_into` fills, completely."""
        own = {name: self._specs[name].shape for name in sorted(self.untied)}
        return {**parameter_shapes(self.config), **own}

    def tensors(
        self, dtype: torch.dtype, only: Callable[[TensorSpec], bool] | None = None
    ) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Each tensor in file order, one at a time.

        Quantised weights come dequantised to `dtype`. Others come as stored, as views of the mapped file: nothing is
        read until it is copied, and slicing first reads only the slice. Do not keep or change them.

        Args:
            dtype: of dequantised weights.
            only: skips the tensors for which it says False (another rank's experts, say).
        """
        for spec, value in self.weights(only):
            yield spec, float_weight(value, dtype) if isinstance(value, Weight) else value
            del value  # before the next one is made

    def weights(self, only: Callable[[TensorSpec], bool] | None = None) -> Iterator[tuple[TensorSpec, Tensor | Weight]]:
        """As `tensors`, with quantised weights as they are stored."""
        read = _Reader(self._stored)
        for spec in self.specs(only):
            kind = self.kinds[spec.name]
            if kind == "plain":
                yield spec, read(spec.name)
                continue
            parts = {name: read(name) for name in form_parts(kind, spec.name, spec.shape)}
            yield spec, to_weight(kind, spec.name, spec.shape, parts)
            del parts

    def load_into(
        self,
        write: Write,
        dtype: torch.dtype,
        progress: bool | None = None,
        only: Callable[[TensorSpec], bool] | None = None,
    ) -> None:
        """Streams every tensor into parameters that already exist, so the model is never in memory twice.

        Args:
            write: copies one tensor into (a slice of) a parameter and casts it; see `parameter_writer`.
            dtype: the parameters' dtype, to which quantised weights are dequantised.
            progress: show a bar on stderr; None: for over 1 GiB on a terminal.
            only: as for `tensors`.

        Raises:
            CheckpointError: from `write`, or as `untied`; the latter before anything is written.
        """

        def write_float(name: str, index: Index | None, value: Tensor | Weight) -> None:
            write(name, index, float_weight(value, dtype) if isinstance(value, Weight) else value)

        self.load_weights_into(write_float, progress, only)

    def load_weights_into(
        self, write: WriteAny, progress: bool | None = None, only: Callable[[TensorSpec], bool] | None = None
    ) -> None:
        """As `load_into`, with quantised weights as they are stored."""
        _ = self.untied
        with _bar(self.nbytes, progress) as advance:
            for spec, value in self.weights(only):
                write(spec.parameter, spec.index, value)
                advance(sum(tensor.nbytes for tensor in self.stored_parts(spec)))
                del value  # before the next one is made

    def check_activations(self) -> None:
        """Stops where integer weights are meant for other activations than the ops give them.

        Raises:
            CheckpointError: the config says so.
        """
        if {"w8a8", "w4a8"} & set(self.kinds.values()):
            refuse_activations(self.config)

    def specs(self, only: Callable[[TensorSpec], bool] | None = None) -> list[TensorSpec]:
        """What the checkpoint holds and a model keeps, without reading it, in file order."""
        wanted = [self._specs[name] for name in self.kinds]
        wanted = [spec for spec in wanted if spec.required or spec.parameter in self.untied]
        wanted.sort(key=lambda spec: (self._place(spec).file, self._place(spec).offset))
        return [spec for spec in wanted if only is None or only(spec)]

    def every_spec(self) -> list[TensorSpec]:
        """What a checkpoint of this config may hold, here or not."""
        return list(self._specs.values())

    def stored_parts(self, spec: TensorSpec) -> list[StoredTensor]:
        """The file tensors of one weight: itself, or the parts of its quantised form."""
        kind = self.kinds[spec.name]
        names = [spec.name] if kind == "plain" else form_parts(kind, spec.name, spec.shape)
        return [self._stored[name] for name in names]

    def _place(self, spec: TensorSpec) -> StoredTensor:
        return self.stored_parts(spec)[0]


def float_weight(weight: Weight, dtype: torch.dtype) -> Tensor:
    """A quantised matrix as numbers, one rounding to `dtype`."""
    # Blocks are read a row at a time: their float32 intermediate stays small.
    return dequantise_blocks(*weight.tensors, dtype) if weight.kind == "fp8" else dequantize_weight(weight, dtype)


def open_checkpoint(
    path: str | PathLike[str], config: Glm5Config | None = None, *, drop_mtp: bool = False, partial: bool = False
) -> Checkpoint:
    """Opens a checkpoint directory (one file or shards), or one .safetensors file, and checks it all.

    A checkpoint without any MTP tensor of a config that has the layer (transformers drops it when saving) opens with
    a `CheckpointWarning` and MTP switched off in `.config`; with some but not all of them it does not open.

    Args:
        path: local directory or file.
        config: the model to expect; None reads config.json beside the weights.
        drop_mtp: leave MTP tensors unread and switch MTP off in `.config`.
        partial: tensors may be missing; `.config` stays as it was given.

    Raises:
        CheckpointError: files or tensors are missing, unexpected, damaged or misshapen; the message names them.
        ContractError: the config is invalid.
    """
    root = Path(path)
    if config is None:
        config = Glm5Config.from_pretrained(root.parent if root.is_file() else root)
    stored = find_tensors(root)
    prefix = mtp_prefix(config)
    held = [name for name in stored if name.startswith(prefix)]
    if held and drop_mtp:
        stored = {name: tensor for name, tensor in stored.items() if not name.startswith(prefix)}
    elif held and not config.num_nextn_predict_layers:
        raise CheckpointError(
            f"checkpoint: {some(sorted(held))} in {root} belong to layer {config.num_hidden_layers}, needs "
            "num_nextn_predict_layers=1 to load it as the MTP layer, or drop_mtp=True to leave it; "
            f"or is num_hidden_layers ({config.num_hidden_layers}) too small?"
        )
    elif config.num_nextn_predict_layers and not held and not drop_mtp and not partial:
        warnings.warn(
            f"checkpoint: {root} holds no tensor of the MTP layer ({prefix}*) that its config announces; "
            "loaded without MTP, as after a save by transformers, which drops it",
            CheckpointWarning,
            stacklevel=2,
        )
    if config.num_nextn_predict_layers and (drop_mtp or not (held or partial)):
        config = config.replace(num_nextn_predict_layers=0)
    return Checkpoint(root, config, stored, partial)


def parameter_writer(get_param: Callable[[str], Tensor]) -> Write:
    """A `Write` that copies into `get_param(name)`, casting to its dtype, after comparing shapes."""

    def write(name: str, index: Index | None, tensor: Tensor) -> None:
        target = get_param(name).detach()
        if index is not None:
            target = target[index]
        if target.shape != tensor.shape:
            raise CheckpointError(
                f"checkpoint: parameter {name} is {list(target.shape)} at {index}, needs {list(tensor.shape)}"
            )
        target.copy_(tensor)

    return write


class _Reader:
    """Reads tensors as views of mapped files; keeps the files of one shard's neighbourhood open at a time."""

    def __init__(self, stored: dict[str, StoredTensor]) -> None:
        self._stored = stored
        self._open: dict[Path, Any] = {}

    def __call__(self, name: str) -> Tensor:
        file = self._stored[name].file
        if file not in self._open:
            if len(self._open) > 1:  # a weight's scales may lie in another shard, so two
                self._open.pop(next(iter(self._open)))
            self._open[file] = safe_open(str(file), framework="pt", device="cpu")
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor

    def equal(self, a: str, b: str) -> bool:
        if a not in self._stored or b not in self._stored:
            return False
        one, other = self(a), self(b)
        return one.dtype == other.dtype and one.dtype != torch.float8_e4m3fn and torch.equal(one, other)


def _check_names(
    specs: dict[str, TensorSpec], kinds: dict[str, str], stored: dict[str, StoredTensor], path: Path, partial: bool
) -> None:
    known = set(kinds)
    for name, kind in kinds.items():
        if kind != "plain" and len(specs[name].shape) == 2:
            known.update(form_parts(kind, name, specs[name].shape))
        elif name + SIDECAR in stored:
            known.add(name + SIDECAR)  # refused with the tensor that it belongs to
    strangers = []
    for name, tensor in stored.items():
        if name in known:
            continue
        if name.endswith(_FOREIGN):
            raise CheckpointError(
                f"checkpoint: {name} in {tensor.file} is a scale of an unknown kind, needs `<weight>{SIDECAR}` per "
                "128 by 128 block, or `<weight>_scale` of symmetric int8 channels or int4 groups of 128; this "
                "quantisation scheme cannot be read"
            )
        strangers.append(name)
    missing = [] if partial else [name for name, spec in specs.items() if spec.required and name not in kinds]
    faults = [
        f"{kind} {len(names)} ({some(sorted(names))})"
        for kind, names in (("lacks", missing), ("has an unexpected", strangers))
        if names
    ]
    if faults:
        file = stored[strangers[0]].file if strangers else path
        raise CheckpointError(
            f"checkpoint: {file} {' and '.join(faults)} tensors, needs exactly the {len(specs)} of its config"
        )


def _check_tensor(spec: TensorSpec, kind: str, stored: dict[str, StoredTensor]) -> None:
    if kind == "plain":
        tensor, sidecar = stored[spec.name], stored.get(spec.name + SIDECAR)
        where = f"checkpoint: {spec.name} in {tensor.file}"
        if tensor.shape != spec.shape:
            raise CheckpointError(f"{where} is {list(tensor.shape)}, needs {list(spec.shape)}")
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(f"{where} is {tensor.dtype}, needs {', '.join(_FLOATS)}, or {_FP8} with scales")
        if sidecar is not None:
            raise CheckpointError(f"{where} is {tensor.dtype} and has scales in {sidecar.name}, needs {_FP8} for them")
        return
    if spec.keep_f32 or len(spec.shape) != 2:
        raise CheckpointError(f"checkpoint: {spec.name} is quantised ({kind}), needs F32: only matrices are quantised")
    for name, (dtypes, shape) in form_parts(kind, spec.name, spec.shape).items():
        part = stored.get(name)
        if part is None:
            first = next(stored[n] for n in (spec.name, spec.name + "_packed") if n in stored)
            where = f"checkpoint: {first.name} in {first.file} is {first.dtype}"
            raise CheckpointError(f"{where} without scales, needs {name}")
        if part.dtype not in dtypes or part.shape != shape:
            raise CheckpointError(
                f"checkpoint: {name} in {part.file} is {part.dtype} {list(part.shape)}, needs {' or '.join(dtypes)} "
                f"{list(shape)} for a weight of {list(spec.shape)}"
            )


def _bar(nbytes: int, progress: bool | None) -> AbstractContextManager[Callable[[int], None]]:
    """A context that gives a function to call with the bytes done."""
    if progress is None:
        progress = nbytes >= _BAR_FROM and sys.stderr.isatty()
    if not progress:
        return nullcontext(lambda done: None)
    return _RichBar(nbytes)


class _RichBar(AbstractContextManager[Callable[[int], None]]):
    def __init__(self, nbytes: int) -> None:
        # Imported here: a bar is rare and the import is not free.
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("loading", total=nbytes)

    def __enter__(self) -> Callable[[int], None]:
        self._progress.start()
        return lambda done: self._progress.advance(self._task, done)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
