"""Administrative commands of an engine, by name: what server, router and trainer may ask for between steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from os import PathLike
from types import NoneType
from typing import TYPE_CHECKING, Any

from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from glm5sdk.serve.engine import Engine

__all__ = ["Control"]

Finish = Callable[[], Any]
_TEXT, _COUNT, _NUMBER = "a text", "an int, at least 0", "a number"
# Arguments come from anybody's JSON.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "path": ((str, PathLike), _TEXT),
    "name": ((str,), _TEXT),
    "version": ((str, NoneType), _TEXT),
    "cache_salt": ((str,), _TEXT),
    "lease_id": ((str,), _TEXT),
    "weight_version": ((str,), _TEXT),
    "seconds": ((int, float), _NUMBER),
    "first": ((int,), _COUNT),
    "count": ((int, NoneType), _COUNT),
    "rows": ((int,), _COUNT),
    "token_ids": ((list, tuple), "token ids in a list"),
    "tokens": ((list, tuple), "token ids in a list"),
    "geometry": ((Mapping,), "what export_prefix gave"),
    "pages": ((bytes, bytearray, memoryview), "bytes"),
}


class Control:
    """Commands in two halves: what may take long and changes nothing runs first, in any thread; what changes the engine
    runs between two steps, in the engine's thread.

    Args:
        engine: that is controlled.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        transfer = engine.transfer
        self._at_once: dict[str, Callable[..., Any]] = {
            "pause": engine.pause,
            "resume": engine.resume,
            "flush_cache": engine.flush_cache,
            "unload_adapter": self._unload_adapter,
            "list_weights": self._list_weights,
            "export_prefix": transfer.export_prefix,
            "read_lease": transfer.read_lease,
            "renew_lease": transfer.renew_lease,
            "release_lease": transfer.release_lease,
            "import_prefix": transfer.import_prefix,
        }
        self._prepared: dict[str, Callable[..., Finish]] = {
            "update_weights": self._update_weights,
            "swap_experts": self._swap_experts,
            "load_adapter": self._load_adapter,
        }

    def prepare(self, command: str, arguments: Mapping[str, Any]) -> Finish:
        """The first half; what it returns is the second, for `finish`.

        Raises:
            ContractError: there is no such command, or its arguments do not fit; nothing was done.
            CheckpointError: what is to be loaded is damaged or does not fit; nothing was done.
        """
        known = {**self._at_once, **self._prepared}
        if command not in known:
            raise ContractError(f"engine: command is {command!r}, needs one of: {', '.join(known)}")
        try:
            inspect.signature(known[command]).bind(**arguments)
        except TypeError as error:
            raise ContractError(f"engine: arguments of {command} do not fit: {error}") from None
        for name, value in arguments.items():
            kinds, want = _KINDS.get(name, ((object,), ""))
            wrong = isinstance(value, bool) or not isinstance(value, kinds)
            if wrong or (want is _COUNT and value is not None and value < 0):
                raise ContractError(f"engine: {name} of {command} is {value!r:.80}, needs {want}")
            if name in ("token_ids", "tokens") and any(type(token) is not int for token in value):
                raise ContractError(f"engine: {name} of {command} holds what is no int, needs {want}")
        if command in self._prepared:
            try:
                return self._prepared[command](**arguments)
            except OSError as error:  # a device, a name that is too long, a folder that may not be read
                path = str(arguments.get("path"))[:200]
                raise ContractError(f"engine: {path} cannot be read ({error.strerror}), needs a checkpoint") from error
        return lambda: self._at_once[command](**arguments)

    def finish(self, second_half: Finish) -> Any:
        """Run the second half when no step is in flight."""
        self._engine.drain()
        return second_half()

    def run(self, command: str, arguments: Mapping[str, Any]) -> Any:
        """Both halves, one after the other."""
        return self.finish(self.prepare(command, arguments))

    def _update_weights(self, path: str, version: str | None = None) -> Finish:
        """New weights from a checkpoint, whole or partial; requests alive keep theirs."""
        self._alone("update_weights")
        update = self._engine.weights.read_update(path, version)
        return lambda: {"weight_version": self._engine.set_weights(update.on(self._engine.weights.base))}

    def _swap_experts(self, path: str, version: str | None = None) -> Finish:
        """As update_weights, from a checkpoint that holds experts and nothing else."""
        others = [
            s.name for s in open_checkpoint(path, self._engine.model.config, partial=True).specs() if s.index is None
        ]
        if others:
            raise ContractError(f"engine: {path} holds {others[0]}, needs experts alone to swap; or use update_weights")
        return self._update_weights(path, version)

    def _load_adapter(self, name: str, path: str) -> Finish:
        """A LoRA adapter in PEFT's format, which requests may then name."""
        self._alone("load_adapter")
        adapter = self._engine.weights.read_adapter(name, path)

        def finish() -> dict[str, Any]:
            self._engine.weights.add_adapter(adapter)
            self._engine.flush_namespace(name)
            return self._list_weights()

        return finish

    def _unload_adapter(self, name: str) -> dict[str, Any]:
        self._engine.weights.drop_adapter(name)
        self._engine.flush_namespace(name)
        return self._list_weights()

    def _list_weights(self) -> dict[str, Any]:
        return {"weight_version": self._engine.weight_version, "adapters": self._engine.weights.adapters}

    def _alone(self, command: str) -> None:
        if self._engine.lockstep is not None:
            raise ContractError(
                f"engine: {command} came while experts are spread over processes, needs all experts in one process; "
                "start the group again with the new weights"
            )
