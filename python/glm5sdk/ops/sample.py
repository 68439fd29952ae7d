"""Sampling by the Gumbel-max rule: a token is a function of (logits, settings, seed, position) and of nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError
from glm5sdk.ops._logsumexp import log_sum_exp
from glm5sdk.ops._math import accumulator
from glm5sdk.ops._philox import gumbel
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    elements = axes["B"] * axes["V"]
    return Cost(60 * elements, 4 * elements + 32 * axes["B"], 16 * axes["B"])


def make_inputs(axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool) -> dict[str, Any]:
    """Every filter on and off in turn, greedy rows among them; exact logits tie a lot."""
    b, v = axes["B"], axes["V"]

    def pick(values: Sequence[float]) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (b,), generator=generator)]

    logits = 2 * torch.randn(b, v, generator=generator)
    acc = accumulator(dtype)
    return {
        "logits": (logits.round() if exact else logits).to(acc),
        "temperature": pick([0.0, 0.5, 1.0, 2.0]).to(acc),
        "top_k": pick([0, -1, 1, 3, 50]).to(torch.int32),
        "top_p": pick([1.0, 0.9, 0.4, 0.0]).to(acc),
        "min_p": pick([0.0, 0.05, 1.0]).to(acc),
        "seed": torch.randint(-(2**62), 2**62, (b,), generator=generator),
        "position": torch.randint(0, 2**20, (b,), generator=generator),
    }


def compare(arguments: Mapping[str, Any], got: Sequence[Tensor], want64: Sequence[Tensor], tolerance: float) -> None:
    """A token may differ from float64's only where two scores, or a filter's edge, are closer than float32 sees."""
    ids, logprob, processed = (t.cpu() for t in got)
    a = {name: v.cpu() for name, v in arguments.items()}
    wide = {name: v.double() if v.is_floating_point() else v for name, v in a.items()}
    slack = max(tolerance, 1e-5)
    fits = torch.zeros_like(ids, dtype=torch.bool)
    for nudge in (0.0, slack, -slack):
        top_p = torch.where(wide["top_p"] < 1, wide["top_p"] * (1 + nudge), 1)
        score, kept_lse, scaled = scores(**{**wide, "top_p": top_p, "min_p": wide["min_p"] * (1 + nudge)})
        mine = score.gather(1, ids[:, None])[:, 0]
        value = torch.where(wide["temperature"] > 0, scaled.gather(1, ids[:, None])[:, 0] - kept_lse, 0)
        best = score.amax(1)
        near = (mine >= best - 8 * slack * best.abs().clamp(min=1)) & (mine > -torch.inf) | (mine == best)
        fits |= near & ((processed.double() - value).abs() <= 8 * slack * value.abs().clamp(min=1))
    assert bool(fits.all()), f"rows {(~fits).nonzero()[:, 0].tolist()} drew what no rounding explains"
    logits = wide["logits"]
    want = logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(1)
    torch.testing.assert_close(logprob.double(), want, rtol=slack, atol=slack)


def greedy_is_best(arguments: Mapping[str, Any], outs: Sequence[Tensor]) -> None:
    """Tokens exist, log-probabilities are not positive, and greedy rows take the first best logit."""
    ids, logprob, processed = outs
    logits, greedy = arguments["logits"], arguments["temperature"] <= 0
    assert bool(((ids >= 0) & (ids < logits.shape[1])).all()), "an id is no token"
    assert bool(((logprob <= 1e-4) & (processed <= 1e-4)).all()), "a log-probability is positive"
    assert torch.equal(ids[greedy], logits.argmax(1)[greedy]), "a greedy row did not take the first best logit"


def keep(ordered: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which ranks [B, V] survive, given scaled logits in descending order; rank 0 always does."""
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    kept = (top_k <= 0)[:, None] | (rank < top_k[:, None])
    first = ordered[:, :1]
    # Relative to the best token; the where gives 1, not NaN, when the best is infinite.
    weight = torch.where(ordered == first, 0, ordered - first).exp() * kept
    running = weight.cumsum(1)
    before = torch.nn.functional.pad(running, (1, 0))[:, :-1]
    kept &= (top_p >= 1)[:, None] | (before < top_p[:, None] * running[:, -1:])
    kept &= weight >= min_p[:, None]
    kept[:, 0] = True
    return kept


def filtered(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled logits [B, V]; which tokens survive the filters [B, V]; the first best token of each row [B, 1]."""
    scaled = logits / torch.where(temperature <= 0, 1, temperature)[:, None]
    order = logits.sort(dim=1, descending=True, stable=True).indices
    kept = keep(scaled.gather(1, order), top_k, top_p, min_p)
    return scaled, torch.zeros_like(kept).scatter(1, order, kept), order[:, :1]


def scores(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What the drawn token maximises [B, V], -inf where filtered; log-sum-exp of the kept [B]; scaled logits [B, V]."""
    scaled, kept, _ = filtered(logits, temperature, top_k, top_p, min_p)
    survivors = torch.where(kept, scaled, -torch.inf)
    noise = gumbel(seed, position, logits.shape[1], logits.dtype)
    return torch.where((temperature <= 0)[:, None], logits, survivors + noise), log_sum_exp(survivors), scaled


@op(
    inputs={
        "logits": "f32[B, V]",
        "temperature": "f32[B]",
        "top_k": "i32[B]",
        "top_p": "f32[B]",
        "min_p": "f32[B]",
        "seed": "i64[B]",
        "position": "i64[B]",
    },
    outputs={"ids": "i64[B]", "logprob": "f32[B]", "logprob_processed": "f32[B]"},
    rows="B",
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        compare=compare,
        properties=(greedy_is_best,),
        geometries=(
            {"B": 0, "V": 7},
            {"B": 8, "V": 1},
            {"B": 16, "V": 3},
            {"B": 63, "V": 1023},
            {"B": 8, "V": 1024},
            {"B": 8, "V": 1025},
            {"B": 3, "V": 154880},
        ),
    ),
)
def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row: the kept token that maximises logit / temperature + g, ties to the lower id.

    g is Gumbel noise that depends on (seed, position, token) alone (ops/_philox.py). So the draw is the same in any
    batch, after preemption, and when a draft is checked: a draft token is accepted iff it equals this draw.

    Filters, in this order, on tokens sorted by (logit descending, id ascending), at least one token is kept:
    temperature divides; top_k keeps the first k; top_p keeps a token while the tokens before it hold less than top_p of
    what top_k kept; min_p keeps tokens with at least min_p times the best one's probability. NaN logits count -inf.

    Args:
        logits: f32 [B, V].
        temperature: f32 [B]; <= 0 = greedy: the best logit, filters and noise do not matter.
        top_k: i32 [B]; <= 0 = off.
        top_p: f32 [B]; >= 1 = off.
        min_p: f32 [B]; 0 = off.
        seed: i64 [B], the request's.
        position: i64 [B], absolute position of the token drawn, taken modulo 2^32.

    Returns:
        ids i64 [B]; logprob f32 [B]: of the token at temperature 1, unfiltered, bit for bit minus the loss that
        `linear_cross_entropy` gives for these logits; logprob_processed f32 [B]: under the filtered, tempered
        distribution it was drawn from (0 when greedy). A row without a finite logit gives id 0 and NaN. B = 0 is legal.

    Raises:
        ContractError: V is 0; a temperature, top_p or min_p is NaN; shapes, dtypes or devices do not fit.
    """
    if logits.shape[1] == 0:
        raise ContractError("sample: V is 0, needs at least one token to draw")
    for name, values in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        if bool(values.isnan().any()):
            raise ContractError(f"sample: {name}[{int(values.isnan().nonzero()[0])}] is nan, needs a number")
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    score, kept_lse, scaled = scores(logits, temperature, top_k, top_p, min_p, seed, position)
    ids = score.argmax(1)
    logprob, processed = (v.gather(1, ids[:, None])[:, 0] for v in (logits, scaled))
    return ids, logprob - log_sum_exp(logits), torch.where(temperature > 0, processed - kept_lse, 0)
