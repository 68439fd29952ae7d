"""Weights: which weights a new request gets, and how they change while others run."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5.updates import WeightUpdate, read_update
from glm5sdk.nn.adapters import Adapter, load_adapter
from glm5sdk.nn.weight_view import WeightView

if TYPE_CHECKING:
    from glm5sdk.models.glm5.model import Glm5ForCausalLM

__all__ = ["Weights"]


class Weights:
    """The current weights of an engine's model, with the adapters beside them.

    A request keeps the view that it was admitted with. Nobody counts references but Python: what an update replaced is
    freed when the last request that used it is gone.

    Args:
        model: whose weights.
        version: name of the weights that it has now.
    """

    def __init__(self, model: Glm5ForCausalLM, version: str) -> None:
        self._model = model
        self.base = WeightView.of(model, version)
        self._adapted: dict[str, WeightView] = {}

    @property
    def version(self) -> str:
        """Of the current weights, adapters aside."""
        return self.base.version

    @property
    def adapters(self) -> list[str]:
        """Names that requests may ask for."""
        return sorted(self._adapted)

    def view(self, adapter: str | None) -> WeightView:
        """What a new request gets.

        Raises:
            ContractError: there is no adapter of that name.
        """
        if adapter is None:
            return self.base
        if adapter not in self._adapted:
            known = ", ".join(self.adapters) or "none"
            raise ContractError(f"engine: adapter is {adapter!r}, needs a loaded one: {known}")
        return self._adapted[adapter]

    def read_update(self, path: str | PathLike[str], version: str | None = None) -> WeightUpdate:
        """New weights from a checkpoint, whole or partial, beside those in use. Any thread may call it.

        They go over the weights that are current when they are put in place, so of two partial updates that were read
        at the same time neither is lost.

        Raises:
            CheckpointError: it does not fit or is damaged; nothing has changed.
        """
        return read_update(path, self._model, self.base, version)

    def read_adapter(self, name: str, path: str | PathLike[str]) -> Adapter:
        """An adapter from a PEFT folder. Any thread may call it.

        Raises:
            CheckpointError: it does not fit or is damaged.
        """
        return load_adapter(path, self._model, name)

    def replace_base(self, view: WeightView) -> None:
        """Make a view the current weights, and the model's own. No forward pass may be running.

        Raises:
            ContractError: an adapter does not go together with it; nothing has changed.
        """
        adapted = {
            name: view.with_adapter(f"{view.version}+{name}", old.adapter) for name, old in self._adapted.items()
        }
        view.install(self._model)
        self.base, self._adapted = view, adapted

    def add_adapter(self, adapter: Adapter) -> None:
        """Let requests ask for it; one of the same name is replaced."""
        self._adapted[adapter.name] = self.base.with_adapter(f"{self.version}+{adapter.name}", adapter)

    def drop_adapter(self, name: str) -> None:
        """Requests may no longer ask for it; those that did keep it.

        Raises:
            ContractError: there is none of that name.
        """
        self.view(name)
        del self._adapted[name]
