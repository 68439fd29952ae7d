"""sample: Philox's published vectors, a pure Python sampler, frequencies, and what a draw may depend on."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from op_oracle import opcheck

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.ops._philox import gumbel, philox4x32

MASK = 0xFFFFFFFF
VECTORS = [  # counter, key, result: Random123's kat_vectors
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & MASK, (p0 >> 32) ^ c[3] ^ k[1], p0 & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def words(values: list[int]) -> tuple:
    return tuple(torch.tensor([v]) for v in values)


@pytest.mark.parametrize("counter, key, want", VECTORS)
def test_philox_known_answers(counter: list[int], key: list[int], want: list[int]) -> None:
    assert plain_philox(counter, key) == want
    assert [int(w) for w in philox4x32(words(counter), words(key))] == want


def f32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def plain_gumbel(seed: int, position: int, token: int) -> float:
    key = [seed & MASK, seed >> 32 & MASK]
    word = plain_philox([position & MASK, token // 4, 0, 0], key)[token % 4]
    v = min(f32(f32(word) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -math.log(-math.log1p(-v))


@pytest.mark.parametrize("seed, position", [(0, 0), (-1, 5), (2**63 - 1, 2**33 + 7), (-(2**63), 202751)])
def test_gumbel_noise_is_a_function_of_seed_position_and_token(seed: int, position: int) -> None:
    got = gumbel(torch.tensor([3, seed]), torch.tensor([1, position]), 11, torch.float64)[1]
    assert got.tolist() == pytest.approx([plain_gumbel(seed, position, t) for t in range(11)], rel=1e-12)


def plain_sample(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, noise: list[float]):
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature <= 0:
        return order[0], 0.0
    z = [v / temperature for v in logits]
    kept = order[:top_k] if top_k > 0 else order
    if top_p < 1:
        p = [math.exp(z[i] - z[order[0]]) for i in kept]
        total, before, inside = sum(p), 0.0, []
        for i, q in zip(kept, p, strict=True):
            if before < top_p * total:
                inside.append(i)
            before += q
        kept = inside or kept[:1]
    if min_p > 0:
        kept = [i for i in kept if math.exp(z[i] - z[order[0]]) >= min_p] or kept[:1]
    best = max(kept, key=lambda i: (z[i] + noise[i], -i))
    high = max(z[i] for i in kept)
    return best, z[best] - high - math.log(sum(math.exp(z[i] - high) for i in kept))


def settings(rows: int, **changes: list) -> dict[str, torch.Tensor]:
    values = {
        "temperature": [1.0],
        "top_k": [0],
        "top_p": [1.0],
        "min_p": [0.0],
        "seed": [0],
        "position": [0],
        **changes,
    }
    kinds = {"top_k": torch.int32, "seed": torch.int64, "position": torch.int64}
    return {k: torch.tensor(v * (rows // len(v)), dtype=kinds.get(k, torch.float32)) for k, v in values.items()}


def test_equals_plain_sampler_in_float64() -> None:
    generator = torch.Generator().manual_seed(5)
    for exact in (False, True):
        a = ops.sample.tests.make_inputs({"B": 300, "V": 23}, torch.float64, generator, exact)
        ids, logprob, processed = ops.sample.reference(**a)
        for b in range(300):
            row = a["logits"][b].tolist()
            noise = [plain_gumbel(int(a["seed"][b]), int(a["position"][b]), t) for t in range(23)]
            options = [a[k][b].item() for k in ("temperature", "top_k", "top_p", "min_p")]
            token, value = plain_sample(row, *options, noise)
            assert int(ids[b]) == token, (b, options)
            assert float(processed[b]) == pytest.approx(value, rel=1e-9, abs=1e-12)
            want = row[token] - math.log(sum(map(math.exp, row)))
            assert float(logprob[b]) == pytest.approx(want, rel=1e-9)


def test_frequencies_follow_the_distribution() -> None:
    n = 40000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]).expand(n, 5).contiguous()
    a = settings(n, temperature=[2.0]) | {"position": torch.arange(n)}
    counts = ops.sample.reference(logits, **a)[0].bincount(minlength=5)
    expected = n * (logits[0] / 2).softmax(0)
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert chi < 18.5  # 4 degrees of freedom: exceeded once in a thousand seeds


def test_rare_tokens_are_drawn_as_often_as_they_should_be() -> None:
    # Noise of 24-bit uniforms could not order these: each rare token has a probability of 2^-26.
    noise = gumbel(torch.arange(64), torch.zeros(64).long(), 2**15, torch.float32)
    assert noise.unique().numel() > 0.99 * 2**21 * (1 - 2**-4)
    assert float(noise.max()) > math.log(2**21) - 3
    assert bool(noise.isfinite().all())


def test_draw_is_the_same_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    a = ops.sample.tests.make_inputs({"B": 20, "V": 3000}, torch.float32, generator, False)
    ids = ops.sample.reference(**a)[0]
    order = torch.randperm(20, generator=generator)
    assert torch.equal(ops.sample.reference(**{k: v[order] for k, v in a.items()})[0], ids[order])
    one = [int(ops.sample.reference(**{k: v[i : i + 1] for k, v in a.items()})[0]) for i in range(20)]
    assert one == ids.tolist()


def test_logprob_is_minus_the_loss_bit_for_bit() -> None:
    hidden, head = torch.randn(33, 16), torch.randn(2500, 16)
    logits = ops.linear.reference(hidden, head, None, torch.float32)
    ids, logprob, processed = ops.sample.reference(logits, **settings(33, temperature=[1.0]))
    loss, _ = ops.linear_cross_entropy.reference(hidden, head, ids)
    assert torch.equal(logprob, -loss)
    assert torch.equal(processed, logprob)  # no filter, temperature 1


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3, 3, 3, 0]])
    assert ops.sample.reference(logits, **settings(1, temperature=[0.0]))[0].item() == 1
    # Of three equal bests, top_k = 2 keeps the two lower ids.
    a = settings(400, top_k=[2]) | {"position": torch.arange(400)}
    drawn = ops.sample.reference(logits.expand(400, 5).contiguous(), **a)[0]
    assert sorted(drawn.unique().tolist()) == [1, 2]


def test_each_filter_alone() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    n = 500
    logits = p.log().expand(n, 4).contiguous()

    def support(**changes: list) -> list[int]:
        a = settings(n, **changes) | {"position": torch.arange(n)}
        return ops.sample.reference(logits, **a)[0].unique().tolist()

    assert support() == [0, 1, 2, 3]
    assert support(top_k=[3]) == [0, 1, 2]
    assert support(top_p=[0.79]) == [0, 1]
    assert support(top_p=[0.81]) == [0, 1, 2]
    assert support(top_p=[0.0]) == [0]
    assert support(min_p=[0.2]) == [0, 1, 2]
    assert support(min_p=[1.0]) == [0]
    # top_p counts what top_k left: 0.5 of 0.8 is 0.625, so 0.62 keeps one token and 0.63 two.
    assert support(top_k=[2], top_p=[0.62]) == [0]
    assert support(top_k=[2], top_p=[0.63]) == [0, 1]


def test_infinite_and_nan_logits() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[-inf, 1, -inf, 1], [nan, 0, nan, -1], [0, inf, 0, 0], [-inf] * 4])
    for temperature in (0.0, 0.7):
        ids, logprob, _ = ops.sample.reference(logits, **settings(4, temperature=[temperature], seed=[9]))
        assert ids[0] in (1, 3)
        assert ids[1] in (1, 3)
        assert ids[2:].tolist() == [1, 0]
        assert float(logprob[0]) == pytest.approx(-math.log(2))
    with pytest.raises(ContractError, match="V is 0"):
        ops.sample(torch.ones(2, 0), **settings(2))
    assert ops.sample(torch.ones(0, 5), **settings(0))[0].shape == (0,)


def test_compare_knows_ties_from_mistakes() -> None:
    generator = torch.Generator().manual_seed(2)
    a = ops.sample.tests.make_inputs({"B": 64, "V": 50}, torch.float32, generator, False)
    got = ops.sample.reference(**a)
    want = ops.sample.reference(**{k: v.double() if v.is_floating_point() else v for k, v in a.items()})
    compare = ops.sample.tests.compare
    compare(a, got, want, 1e-6)
    with pytest.raises(AssertionError):
        compare(a, ((got[0] + 1) % 50, *got[1:]), want, 1e-6)
    with pytest.raises(AssertionError):
        compare(a, (got[0], got[1] + 0.01, got[2]), want, 1e-6)
    with pytest.raises(AssertionError):
        compare(a, (got[0], got[1], got[2] - 0.01), want, 1e-6)


def test_opcheck() -> None:
    opcheck(ops.sample, torch.randn(4, 9), *settings(4).values())
