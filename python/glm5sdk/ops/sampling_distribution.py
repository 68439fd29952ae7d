"""The distribution that `sample` draws from, whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError
from glm5sdk.ops.sample import filtered
from glm5sdk.ops.sample import make_inputs as make_sample_inputs
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    elements = axes["B"] * axes["V"]
    return Cost(20 * elements, 4 * elements + 16 * axes["B"], 4 * elements)


def make_inputs(axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool) -> dict[str, Any]:
    """As for `sample`."""
    made = make_sample_inputs(axes, dtype, generator, exact)
    return {name: made[name] for name in ("logits", "temperature", "top_k", "top_p", "min_p")}


def compare(arguments: Mapping[str, Any], got: Sequence[Tensor], want64: Sequence[Tensor], tolerance: float) -> None:
    """Rows must be float64's, for the filters as they are or moved by less than float32 sees."""
    wide = {name: v.cpu().double() if v.is_floating_point() else v.cpu() for name, v in arguments.items()}
    slack = max(tolerance, 1e-5)
    fits = torch.zeros(len(wide["logits"]), dtype=torch.bool)
    for nudge in (0.0, slack, -slack):
        top_p = torch.where(wide["top_p"] < 1, wide["top_p"] * (1 + nudge), 1)
        want = distribution(**{**wide, "top_p": top_p, "min_p": wide["min_p"] * (1 + nudge)})
        fits |= ((got[0].cpu().double() - want).abs() <= slack).all(1)
    assert bool(fits.all()), f"rows {(~fits).nonzero()[:, 0].tolist()} are no distribution that rounding explains"


def sums_to_one(arguments: Mapping[str, Any], outs: Sequence[Tensor]) -> None:
    """Nothing is negative, each row sums to one, and a greedy row holds the first best token alone."""
    (probabilities,) = outs
    assert bool((probabilities >= 0).all()), "a probability is negative"
    assert bool(((probabilities.double().sum(1) - 1).abs() < 1e-4).all()), "a row does not sum to one"
    greedy = arguments["temperature"] <= 0
    best = arguments["logits"][greedy].argmax(1)
    assert bool((probabilities[greedy].gather(1, best[:, None]) == 1).all()), "a greedy row is not certain"


def distribution(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Softmax of the kept tokens' logits / temperature; a one-hot row where the temperature is 0."""
    scaled, kept, first = filtered(logits, temperature, top_k, top_p, min_p)
    best = torch.zeros_like(kept).scatter(1, first, True)
    # The best token is always kept, so no row is empty; alone in it when the row is greedy.
    kept = torch.where((temperature <= 0)[:, None], best, kept)
    return torch.where(kept, scaled, -torch.inf).softmax(1)


@op(
    inputs={
        "logits": "f32[B, V]",
        "temperature": "f32[B]",
        "top_k": "i32[B]",
        "top_p": "f32[B]",
        "min_p": "f32[B]",
    },
    outputs={"probabilities": "f32[B, V]"},
    rows="B",
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        compare=compare,
        properties=(sums_to_one,),
        geometries=({"B": 0, "V": 7}, {"B": 8, "V": 1}, {"B": 16, "V": 3}, {"B": 8, "V": 1025}, {"B": 2, "V": 154880}),
    ),
)
def sampling_distribution(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Probability of each token under the filters and the temperature with which `sample` draws.

    Speculative decoding by rejection compares two of these; `sample` itself never makes one.

    Args:
        logits: f32 [B, V], finite in at least one place a row.
        temperature: f32 [B]; <= 0 = greedy.
        top_k: i32 [B]; <= 0 = off.
        top_p: f32 [B]; >= 1 = off.
        min_p: f32 [B]; 0 = off.

    Returns:
        probabilities f32 [B, V]; each row sums to one. B = 0 is legal.

    Raises:
        ContractError: V is 0; shapes, dtypes or devices do not fit.
    """
    if logits.shape[1] == 0:
        raise ContractError("sampling_distribution: V is 0, needs at least one token")
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    return distribution(logits, temperature, top_k, top_p, min_p)
