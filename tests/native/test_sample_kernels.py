"""The sampler's kernel against a loop in plain Python: same random integers, same filters, same token."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import bits_equal, draw

from glm5sdk.core.errors import ContractError
from glm5sdk_cpu import _C

INF = math.inf
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0}
DTYPES = {"top_k": torch.int32, "seed": torch.int64, "position": torch.int64}


def sample(level, logits, **settings):
    """Settings are one value for all rows, or one per row."""
    b = logits.shape[0]
    columns = []
    for name, default in DEFAULTS.items():
        value = torch.as_tensor(settings.get(name, default), dtype=DTYPES.get(name, torch.float32))
        columns.append(value.expand(b).contiguous())
    ids, logprob, processed = torch.full((b,), -7), torch.full((b,), math.nan), torch.full((b,), math.nan)
    _C.sample(level, logits, *columns, ids, logprob, processed)
    return ids, logprob, processed


def philox(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [q >> 32 ^ c[1] ^ k[0], q & 0xFFFFFFFF, p >> 32 ^ c[3] ^ k[1], p & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def gumbel(seed, position, token):
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    word = philox((position & 0xFFFFFFFF, token // 4, 0, 0), key)[token % 4]
    half = torch.tensor(0.5)
    v = (torch.tensor(word, dtype=torch.float64).float() + half).double().item() * 2.0**-32
    return -math.log(-math.log1p(-min(v, 1 - 2.0**-24)))


def survivors(logits, temperature, top_k, top_p, min_p):
    """{token: scaled logit} after the filters, in double."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    scaled = {i: logits[i] / temperature for i in order}
    weight = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    ranked = order[:top_k] if top_k > 0 else order
    total, before, kept = math.fsum(weight[i] for i in ranked), 0.0, []
    for i in ranked:
        if kept and ((top_p < 1 and before >= top_p * total) or weight[i] < min_p):
            break
        kept.append(i)
        before += weight[i]
    return {i: scaled[i] for i in kept}


def test_philox_of_the_oracle_has_the_published_vectors():
    assert philox((0,) * 4, (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("v", [1, 5, 64, 131])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 5.0, "seed": -1, "position": 2**33 + 5},
        {"top_k": 1},
        {"top_k": 3, "temperature": 2.0},
        {"top_p": 0.6},
        {"top_p": 0.0},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5, "seed": 2**62 + 17, "position": 2**31},
    ],
)
def test_draws_what_the_loop_draws(level, v, settings):
    rows = 12
    logits = draw(rows, v, seed=v, scale=2.0)
    s = {**DEFAULTS, **settings}
    positions = s["position"] + torch.arange(rows)
    ids, logprob, processed = sample(level, logits, **{**s, "position": positions})
    for row, values in enumerate(logits.double().tolist()):
        kept = survivors(values, s["temperature"], s["top_k"], s["top_p"], s["min_p"])
        scores = {i: z + gumbel(s["seed"], int(positions[row]), i) for i, z in kept.items()}
        best = max(scores, key=lambda i: (scores[i], -i))
        got = int(ids[row])
        assert got == best or scores[got] > scores[best] - 1e-5
        lse = math.log(math.fsum(math.exp(x) for x in values))
        assert float(logprob[row]) == pytest.approx(values[got] - lse, abs=2e-6)
        kept_lse = math.log(math.fsum(math.exp(z) for z in kept.values()))
        assert float(processed[row]) == pytest.approx(kept[got] - kept_lse, abs=1e-5)


def test_noise_has_few_roundings(level):
    """Equal logits: the winner over two tokens tells which noise is larger; logits set the difference to probe it."""
    v = 16
    for position in range(40):
        g = [gumbel(99, position, i) for i in range(v)]
        order = sorted(range(v), key=lambda i: -g[i])
        first, second = order[:2]
        gap = g[first] - g[second]
        for factor, winner in ((1 - 1e-4, first), (1 + 1e-4, second)):
            logits = torch.full((1, v), -INF)
            logits[0, first], logits[0, second] = 0.0, gap * factor
            if gap * 1e-4 > 1e-6:
                assert sample(level, logits, seed=99, position=position)[0].item() == winner


def test_frequencies_are_the_probabilities(level):
    n, v = 20000, 6
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -6.0])
    ids = sample(level, logits.expand(n, v).contiguous(), seed=7, position=torch.arange(n))[0]
    p = logits.double().softmax(0)
    seen = torch.bincount(ids, minlength=v).double()
    chi2 = ((seen - n * p) ** 2 / (n * p)).sum().item()
    assert chi2 < 25.7, chi2  # 5 degrees of freedom: exceeded once in 10000 draws, and the draw is fixed


def test_large_rows_keep_what_a_sort_keeps(level):
    """top_k and top_p over thousands of tokens, flat and peaked, read off the processed log-probability."""
    v = 5000
    for scale in (0.01, 1.0, 30.0):
        logits = draw(2, v, seed=3, scale=scale)
        for settings in (
            {"top_k": 777},
            {"top_p": 0.9},
            {"top_p": 0.999},
            {"top_k": 2000, "top_p": 0.5},
            {"min_p": 0.3},
        ):
            ids, _, processed = sample(level, logits, **settings)
            s = {**DEFAULTS, **settings}
            for row, values in enumerate(logits.double().tolist()):
                kept = survivors(values, 1.0, s["top_k"], s["top_p"], s["min_p"])
                kept_lse = math.log(math.fsum(math.exp(z) for z in kept.values()))
                # One token more or less at the edge of top_p or min_p moves the sum by its own weight.
                edge = math.exp(min(kept.values()) - kept_lse)
                assert int(ids[row]) in kept
                assert float(processed[row]) == pytest.approx(
                    values[int(ids[row])] - kept_lse, abs=2 * edge + 1e-5 * (1 + scale)
                )


def test_ties_follow_the_ids(level):
    logits = torch.zeros(64, 40)
    position = torch.arange(64)
    assert (sample(level, logits, temperature=0.0)[0] == 0).all()
    ids, _, processed = sample(level, logits, top_k=3, position=position)
    assert set(ids.tolist()) == {0, 1, 2}
    assert processed.tolist() == pytest.approx([-math.log(3)] * 64)
    assert set(sample(level, logits, top_p=0.05, position=position)[0].tolist()) == {0, 1}  # 2 of 40 hold 0.05
    assert set(sample(level, -logits, top_k=2, position=position)[0].tolist()) == {0, 1}  # -0 equals 0
    mixed = torch.tensor([[0.0, -0.0] * 20]).expand(64, 40).contiguous()
    assert set(sample(level, mixed, top_k=2, position=position)[0].tolist()) == {0, 1}


def test_greedy_is_the_best_logit(level):
    logits = draw(5, 70, seed=1)
    logits[3, 60] = logits[3, 61] = 9.0
    ids, logprob, processed = sample(level, logits, temperature=0.0, top_k=1, top_p=0.1)
    assert ids.tolist() == logits.argmax(1).tolist()
    assert ids[3] == 60
    assert (processed == 0).all()
    torch.testing.assert_close(logprob, logits.log_softmax(1).amax(1))


def test_what_is_not_finite(level):
    nan = math.nan
    logits = torch.tensor([[nan, 1.0, -INF, nan], [-INF, -INF, -INF, -INF], [nan, nan, nan, nan], [0.0, INF, 1.0, 2.0]])
    for settings in ({}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5, "top_p": 0.3}):
        ids, logprob, _ = sample(level, logits, **settings)
        assert ids.tolist() == [1, 0, 0, 1]
        assert logprob[0] == 0
        assert logprob[1:].isnan().all()
    # Filters that would keep nothing keep the best.
    assert sample(level, logits[:1], min_p=2.0)[0].tolist() == [1]


def test_logprob_is_minus_the_loss_of_training(level):
    """A hidden width of 1 and a hidden state of 1 make the head's column the logits of every row."""
    head = draw(2500, 1, seed=2, scale=3.0)
    ids, logprob, _ = sample(level, head.T.expand(4, 2500).contiguous(), position=torch.arange(4))
    loss, lse = torch.empty(4), torch.empty(4)
    _C.linear_cross_entropy(level, torch.ones(4, 1), head, ids, loss, lse)
    assert bits_equal(-loss, logprob)


def test_rows_do_not_know_their_batch(native, level):
    b, v = 40, 1500
    logits = draw(b, v, seed=1, scale=2.0)
    generator = torch.Generator().manual_seed(2)
    settings = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 2.0])[torch.randint(4, (b,), generator=generator)],
        "top_k": torch.tensor([0, 5, 300])[torch.randint(3, (b,), generator=generator)],
        "top_p": torch.tensor([1.0, 0.9, 0.4])[torch.randint(3, (b,), generator=generator)],
        "min_p": torch.tensor([0.0, 0.1])[torch.randint(2, (b,), generator=generator)],
        "seed": torch.randint(-(2**62), 2**62, (b,), generator=generator),
        "position": torch.randint(0, 2**20, (b,), generator=generator),
    }
    native.set_num_threads(1)
    want = sample(level, logits, **settings)
    native.set_num_threads(3)
    order = torch.randperm(b, generator=generator)
    for rows in (slice(0, b), slice(7, 8), slice(20, 40), order):
        got = sample(level, logits[rows], **{name: value[rows] for name, value in settings.items()})
        assert all(bits_equal(a, c[rows]) for a, c in zip(got, want, strict=True))


def test_levels_draw_the_same_tokens(native):
    logits = draw(50, 333, seed=4)
    position = torch.arange(50)
    levels = [
        sample(level, logits, top_p=0.95, seed=5, position=position)[0]
        for level in range(min(3, native.cpu_level() + 1))
    ]
    assert all(torch.equal(ids, levels[0]) for ids in levels)


def test_edges(level):
    assert sample(level, torch.empty(0, 5))[0].shape == (0,)
    ids, logprob, processed = sample(level, torch.tensor([[3.0]]))
    assert (ids.item(), logprob.item(), processed.item()) == (0, 0.0, 0.0)
    with pytest.raises(ContractError, match="V is 0, needs at least one token"):
        sample(level, torch.empty(2, 0))


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_a_setting_that_is_nan_is_refused(level, name):
    with pytest.raises(ContractError, match=rf"sample: {name}\[1\] is nan, needs a number"):
        sample(level, torch.zeros(2, 3), **{name: torch.tensor([0.5, math.nan])})
