"""What stands in the place of a module's `forward`, and the parts of a module that must stay plain for that."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from glm5sdk.core.errors import ContractError

__all__ = ["Replaced", "plain_linear", "plain_norm"]


class Replaced:
    """A callable in a module's `forward` slot; copied with the module, so that copies of a model stay apart.

    Attributes:
        module: whose forward it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def install(self) -> None:
        """Shadow the class's forward in this one module."""
        self.module.__dict__["forward"] = self

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What the class computes."""
        return type(self.module).forward(self.module, *args, **kwargs)


def plain_linear(parent: nn.Module, name: str) -> Tensor:
    """The weight of a child that is a plain nn.Linear without bias; what is wrapped (LoRA) or hooked is refused.

    Raises:
        ContractError: it is not; computing with its weight alone would leave something out.
    """
    child = parent._modules[name]
    if type(child) is not nn.Linear:
        raise ContractError(
            f"accelerated model: {name} is {type(child).__name__}, needs a plain Linear; merge adapters first, or "
            "restore() the model"
        )
    if child.bias is not None:
        raise ContractError(f"accelerated model: {name} has a bias, needs none")
    _unhooked(name, child)
    return child.weight


def plain_norm(parent: nn.Module, name: str, kind: type[nn.Module]) -> nn.Module:
    """A child norm of exactly this class without hooks.

    Raises:
        ContractError: it is not one.
    """
    child = parent._modules[name]
    if type(child) is not kind:
        raise ContractError(f"accelerated model: {name} is {type(child).__name__}, needs {kind.__name__}")
    _unhooked(name, child)
    return child


def _unhooked(name: str, module: nn.Module) -> None:
    if module._forward_hooks or module._forward_pre_hooks or "_hf_hook" in module.__dict__:
        raise ContractError(
            f"accelerated model: {name} has forward hooks, needs none: its layer runs in one piece; restore() the model"
        )
