"""Schemes by name: which kind of weight each part of a model gets."""

from __future__ import annotations

from dataclasses import dataclass

from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5.model import Glm5ForCausalLM

__all__ = ["SCHEMES", "Scheme", "check_model", "scheme"]

_GROUP = 128


@dataclass(frozen=True)
class Scheme:
    """Kinds of the weights of a quantised model; what stays float is said by checkpoint_forms.is_quantisable.

    Attributes:
        name: as the command line spells it.
        linear: kind of attention, indexer, dense and shared feed-forward matrices.
        experts: kind of the routed experts.
    """

    name: str
    linear: str
    experts: str


SCHEMES = {
    s.name: s
    for s in (Scheme("w8a8", "w8a8", "w8a8"), Scheme("w4a8-experts", "w8a8", "w4a8"), Scheme("fp8", "fp8", "fp8"))
}


def scheme(name: str) -> Scheme:
    """The scheme called `name`.

    Raises:
        ContractError: there is none.
    """
    if name not in SCHEMES:
        raise ContractError(f"quantize: scheme is {name!r}, needs one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


def check_model(model: Glm5ForCausalLM, scheme: Scheme) -> None:
    """Stops before any work when the scheme does not fit the model.

    Raises:
        ContractError: the model is quantised already, too narrow for a group of 128, or its experts would share FP8
            blocks.
    """
    if model.weight_kinds:
        raise ContractError(
            f"quantize: the model is {', '.join(sorted(model.weight_kinds))} already, needs float weights; go back to "
            "the checkpoint it was made from"
        )
    c = model.config
    if not any(c.is_moe(layer) for layer in range(c.num_layers)):
        return
    if scheme.experts == "w4a8":
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(c, name) < _GROUP:
                raise ContractError(
                    f"quantize: {name} is {getattr(c, name)}, needs at least {_GROUP}, one group of {scheme.name}"
                )
    if scheme.experts == "fp8" and c.moe_intermediate_size % _GROUP:
        raise ContractError(
            f"quantize: moe_intermediate_size is {c.moe_intermediate_size}, needs a multiple of {_GROUP} for fp8: gate "
            "and up rows of an expert would share a block"
        )
