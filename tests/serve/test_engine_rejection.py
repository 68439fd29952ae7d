"""The classic rejection rule: other tokens than without drafts, from the same distribution."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from engine_cases import make_engine, make_model, run

from glm5sdk.serve.params import SamplingParams

PROMPT = [3, 14, 15, 9, 26, 5]
DRAWS = 2500
KEPT = 3  # best tokens that a draw chooses among


@torch.no_grad()
def exact(tokens: list[int], temperature: float) -> dict[int, float]:
    """Probability of each next token that top_k keeps."""
    logits = make_model()(torch.tensor([tokens]))[0, -1].double() / temperature
    best = logits.topk(KEPT)
    return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))


def test_drawn_sequences_have_the_models_distribution():
    """Four tokens each: the first without a draft, then two drafts and what follows them."""
    temperature = 2.0
    engine = make_engine(speculative_tokens=2, speculative_method="rejection", num_pages=256, page_size=8)
    params = SamplingParams(max_tokens=4, temperature=temperature, top_k=KEPT, ignore_eos=True)
    requests = {str(i): (PROMPT, replace(params, seed=1000 * i)) for i in range(DRAWS)}
    found = Counter(tuple(result.token_ids) for result in run(engine, requests, steps=5000).values())
    stats = engine.stats()
    assert 200 < stats.accepted_tokens < stats.drafted_tokens - 200  # both branches of the rule
    expected = {(): float(DRAWS)}
    for _ in range(params.max_tokens):
        expected = {
            (*tokens, token): count * p
            for tokens, count in expected.items()
            for token, p in exact([*PROMPT, *tokens], temperature).items()
        }
    assert set(found) <= set(expected), "a token that top_k leaves out"
    statistic = sum((found[tokens] - count) ** 2 / count for tokens, count in expected.items())
    # 80 degrees of freedom: one in ten thousand choices of seeds would be above 136.
    assert len(expected) == 81 and statistic < 136


def test_the_same_seed_draws_the_same_again():
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    first, second = (
        run(make_engine(speculative_tokens=2, speculative_method="rejection"), {"a": (PROMPT, params)})["a", 0]
        for _ in range(2)
    )
    assert first.token_ids == second.token_ids
