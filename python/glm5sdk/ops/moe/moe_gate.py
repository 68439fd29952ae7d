"""The router: which experts a token goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError
from glm5sdk.ops._math import accumulate
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    t, n, e, a = axes["T"], axes["N"], axes["E"], axes["A"]
    return Cost(2 * t * n * e, size * t * n + 4 * (n * e + e), 8 * t * a)


def check(num_experts: int, topk: int, n_group: int, topk_group: int, score: str, temperature: float) -> None:
    """Raise ContractError unless the options fit each other."""
    if score not in ("sigmoid", "softmax"):
        raise ContractError(f"moe_gate: score is {score!r}, needs 'sigmoid' or 'softmax'")
    if not temperature > 0:
        raise ContractError(f"moe_gate: temperature is {temperature}, needs a number > 0")
    if n_group < 1 or num_experts % n_group or (n_group > 1 and num_experts // n_group < 2):
        raise ContractError(
            f"moe_gate: n_group is {n_group}, needs to divide {num_experts} experts into groups of at least 2: "
            "a group's score is the sum of its best two"
        )
    if not 1 <= topk_group <= n_group:
        raise ContractError(f"moe_gate: topk_group is {topk_group}, needs 1 <= topk_group <= {n_group} groups")
    if topk > topk_group * (num_experts // n_group):
        raise ContractError(
            f"moe_gate: topk is {topk}, needs at most {topk_group * (num_experts // n_group)}, "
            f"the experts of {topk_group} of {n_group} groups"
        )


def best(values: Tensor, k: int) -> Tensor:
    """Positions [T, k] of the largest values, ascending; ties go to the lower position, NaN counts -inf."""
    ordered = torch.where(values.isnan(), -torch.inf, values).sort(dim=1, descending=True, stable=True).indices
    return ordered[:, :k].sort(dim=1).values


def choose(choice: Tensor, topk: int, n_group: int, topk_group: int) -> Tensor:
    """Ids i64 [T, topk], ascending, of the best experts inside the best groups of choice scores [T, E]."""
    if n_group == 1:
        return best(choice, topk)
    size = choice.shape[1] // n_group
    finite = torch.where(choice.isnan(), -torch.inf, choice)
    groups = best(finite.unflatten(1, (n_group, size)).topk(2, dim=2).values.sum(2), topk_group)
    # Only experts of these groups compete, so no mask value can win against an expert whose score is -inf.
    candidates = (groups[:, :, None] * size + torch.arange(size, device=choice.device)).flatten(1)
    return candidates.gather(1, best(finite.gather(1, candidates), topk))


def make_inputs(axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool) -> dict[str, Any]:
    """A bias like GLM-5's: a large offset with a tiny spread, which float32 must keep."""
    bias = 7 + 0.05 * torch.randn(axes["E"], generator=generator)
    return {"bias": bias.round() if exact else bias, "topk": axes["A"]}


def ascending_and_normalised(arguments: Mapping[str, Any], outs: Sequence[Tensor]) -> None:
    """Ids are distinct experts in ascending order; renormalised weights sum to `scale`."""
    ids, weights = outs
    assert bool(((ids >= 0) & (ids < arguments["w"].shape[0])).all()), "an id is no expert"
    assert bool((ids[:, 1:] > ids[:, :-1]).all()), "ids do not ascend"
    assert bool((weights >= 0).all()), "a weight is negative"
    if arguments["renormalise"]:
        torch.testing.assert_close(weights.double().sum(1), torch.full_like(weights[:, 0].double(), arguments["scale"]))


def compare(arguments: Mapping[str, Any], got: Sequence[Tensor], want64: Sequence[Tensor], tolerance: float) -> None:
    """Ids where the choice is clear in float64; weights of the ids that were chosen, everywhere."""
    ids, weights = got
    a = dict(arguments)
    topk = a.pop("topk")
    scores, choice = scores_of(
        a["x"].double(), a["w"].double(), a.get("bias"), a.get("score", "sigmoid"), a.get("temperature", 1.0)
    )
    chosen = ids.long()
    if topk > 1:
        assert bool((chosen.diff(dim=1) > 0).all()), "ids do not ascend"
    n_group, topk_group = a.get("n_group", 1), a.get("topk_group", 1)
    slack = max(tolerance, 1e-6 * max(1.0, float(choice.abs().max()) if choice.numel() else 1.0))
    sure = clear(choice, topk, n_group, topk_group, 4 * slack)
    assert torch.equal(ids[sure], want64[0].to(ids.dtype)[sure]), "other experts than the float64 choice, without a tie"
    want = weigh(scores.gather(1, chosen), a.get("renormalise", True), a.get("scale", 1.0))
    torch.testing.assert_close(weights.double(), want, rtol=max(tolerance, 1e-5), atol=max(tolerance, 1e-6))


def clear(choice: Tensor, topk: int, n_group: int, topk_group: int, margin: float) -> Tensor:
    """Rows [T] whose choice no change of scores below `margin` can alter."""
    rows = torch.ones(choice.shape[0], dtype=torch.bool, device=choice.device)
    allowed = torch.ones_like(choice, dtype=torch.bool)
    if n_group > 1:
        size = choice.shape[1] // n_group
        sums = choice.unflatten(1, (n_group, size)).topk(2, dim=2).values.sum(2)
        ordered = sums.sort(dim=1, descending=True).values
        if topk_group < n_group:
            rows &= ordered[:, topk_group - 1] - ordered[:, topk_group] > 2 * margin
        groups = torch.zeros_like(sums, dtype=torch.bool).scatter(1, best(sums, topk_group), True)
        allowed = groups.repeat_interleave(size, 1)
    ordered = choice.masked_fill(~allowed, -torch.inf).sort(dim=1, descending=True).values
    if topk < choice.shape[1]:
        rows &= ordered[:, topk - 1] - ordered[:, topk] > margin
    return rows


def scores_of(x: Tensor, w: Tensor, bias: Tensor | None, score: str, temperature: float) -> tuple[Tensor, Tensor]:
    """Scores [T, E] and what experts are chosen by."""
    logits = accumulate(x) @ w.to(accumulate(x).dtype).T
    if temperature != 1.0:
        logits = logits / temperature
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    return scores, scores.detach() if bias is None else scores.detach() + bias.to(scores.dtype)


def weigh(chosen: Tensor, renormalise: bool, scale: float) -> Tensor:
    """Route weights [T, A] of the chosen scores; the sum runs in the order of ids."""
    if renormalise:
        total = torch.zeros_like(chosen[:, :1])
        for j in range(chosen.shape[1]):
            total = total + chosen[:, j : j + 1]
        chosen = chosen / (total + 1e-20)
    return chosen * scale


@op(
    inputs={"x": "a[T, N]", "w": "f32[E, N]", "bias": "f32[E]?", "topk": "= A"},
    outputs={"ids": "i32[T, A]", "weights": "f32[T, A]"},
    rows="T",
    grad=("x", "w"),
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        geometries=(
            {"T": 0, "N": 7, "E": 8, "A": 2},
            {"T": 1, "N": 1, "E": 4, "A": 1},
            {"T": 63, "N": 20, "E": 12, "A": 3},
            {"T": 64, "N": 65, "E": 16, "A": 4},
            {"T": 65, "N": 63, "E": 8, "A": 4},
            {"T": 4, "N": 6144, "E": 256, "A": 8},
        ),
        ranges={"E": (8, 8), "A": (1, 4)},
        options=(
            {},
            {"bias": None},
            {"scale": 2.5},
            {"n_group": 4, "topk_group": 2, "scale": 2.5},
            {"score": "softmax", "renormalise": False, "bias": None, "temperature": 0.5},
        ),
        exact_outputs=("ids",),
        properties=(ascending_and_normalised,),
        compare=compare,
    ),
)
def moe_gate(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    topk: int,
    n_group: int = 1,
    topk_group: int = 1,
    score: str = "sigmoid",
    renormalise: bool = True,
    scale: float = 1.0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose experts by score + bias, weigh them by score alone; everything in float32 whatever the model's dtype.

    score = sigmoid or softmax of (x w^T / temperature). With groups, experts compete inside the `topk_group` groups
    whose best two choice scores have the largest sum. The order is total: the higher choice score first, then the lower
    id; NaN counts -inf.

    Args:
        x: [T, N] activations, widened exactly.
        w: f32 [E, N].
        bias: f32 [E] or None. GLM-5's is a large offset with a spread of 1e-2: bfloat16 would merge most experts.
        topk: A, experts per token.
        n_group: groups of E / n_group neighbouring experts.
        topk_group: groups a token may use.
        score: "sigmoid" or "softmax".
        renormalise: divide by (sum over the chosen, in the order of ids, + 1e-20).
        scale: factor at the end; 2.5 for GLM-5.
        temperature: divides the logits.

    Returns:
        ids i32 [T, A], ascending in each row; weights f32 [T, A]. Gradients flow to x and w through the weights. Rows
        are independent; T = 0 is legal.

    Raises:
        ContractError: options that do not fit (see `check`), shapes, dtypes or devices.

    Source: DeepSeek-V3 report, arXiv 2412.19437, 2.1.2; names as in transformers' GlmMoeDsaTopkRouter.
    """
    check(w.shape[0], topk, n_group, topk_group, score, temperature)
    scores, choice = scores_of(x, w, bias, score, temperature)
    ids = choose(choice, topk, n_group, topk_group)
    return ids.to(torch.int32), weigh(scores.gather(1, ids), renormalise, scale)
