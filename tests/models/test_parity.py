"""Logits, caches and greedy generation against transformers, on the reference and on every fast backend here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from oracle import random_ids, save_oracle

import glm5sdk
from glm5sdk.models.glm5 import Glm5ForCausalLM

ATOL = 1e-4
CASES = {
    "glm": {},
    "glm-32-index-heads": {"index_n_heads": 32, "seed": 1},
    "glm-shared-indexers": {"indexer_types": ["full", "shared", "full", "shared"], "seed": 2},
    "glm-pattern": {"index_topk_pattern": "FFSS", "seed": 3},
    "glm-freq": {"index_topk_freq": 2, "index_skip_topk_offset": 1, "seed": 4},
    "glm-groups": {"n_group": 4, "topk_group": 2, "seed": 5},
    "glm-tied": {"tie_word_embeddings": True, "seed": 6},
    "twin": {"twin": True, "seed": 7},
    "twin-groups": {"twin": True, "n_group": 2, "topk_group": 1, "seed": 8},
}
BACKENDS = ["reference", *[name for name, b in glm5sdk.backends().items() if not b.reason and b.automatic]]

pytestmark = pytest.mark.filterwarnings("ignore:checkpoint. .* holds no tensor of the MTP layer")


class Pair:
    """One checkpoint, loaded by both."""

    def __init__(self, path: Path, case: str) -> None:
        self.theirs = save_oracle(path, **CASES[case])
        self.ours = Glm5ForCausalLM.from_pretrained(path, dtype="float32", device="cpu", latent_norm_eps=1e-6)


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with glm5sdk.use(request.param):
        yield request.param


def theirs_logits(pair: Pair, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return pair.theirs(input_ids=ids, attention_mask=mask, use_cache=False).logits


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == torch.float32
    assert 0.3 < want.std() < 3, "the oracle's logits should be of scale about 1"
    assert (got - want).abs().max() <= ATOL


@torch.no_grad()
@pytest.mark.parametrize("length", [3, 8, 9, 61])  # far below, at, just above and far above index_topk = 8
def test_logits(pair: Pair, backend: str, length: int) -> None:
    ids = random_ids(2, length, seed=length)
    assert_close(pair.ours(ids), theirs_logits(pair, ids))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(pair: Pair, backend: str, side: str) -> None:
    ids = random_ids(3, 30, seed=11)
    mask = torch.ones_like(ids)
    for row, real in enumerate((30, 17, 5)):
        if side == "left":
            mask[row, : 30 - real] = 0
        else:
            mask[row, real:] = 0
    got = pair.ours(ids, attention_mask=mask)
    assert bool((got[mask == 0] == 0).all())
    for row in range(3):  # row by row without padding: transformers' own padded logits are no oracle for ties
        real = ids[row][mask[row].bool()][None]
        assert_close(got[row][mask[row].bool()], theirs_logits(pair, real)[0])


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_cached_chunks(pair: Pair, backend: str, chunk: int) -> None:
    ids = random_ids(2, 41, seed=chunk)
    cache = pair.ours.make_cache(batch_size=2, max_seq_len=41, page_size=16)
    first = pair.ours(ids[:, :19], cache=cache)
    rest = [pair.ours(ids[:, i : i + chunk], cache=cache) for i in range(19, 41, chunk)]
    assert_close(torch.cat([first, *rest], dim=1), theirs_logits(pair, ids))


@torch.no_grad()
def test_greedy_generation(pair: Pair, backend: str) -> None:
    ids = random_ids(1, 23, seed=5)
    want = pair.theirs.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    got = pair.ours.generate(ids, max_new_tokens=16, ignore_eos=True)
    assert got.tolist() == want.tolist()


@torch.no_grad()
def test_logprobs_equal_log_softmax(pair: Pair, backend: str) -> None:
    ids = random_ids(2, 25, seed=9)
    targets = ids.roll(-1, dims=1)
    targets[:, -1] = -100
    want = theirs_logits(pair, ids).log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    got = pair.ours.logprobs(ids, targets)
    assert bool((got[:, -1] == 0).all())
    assert (got[:, :-1] - want[:, :-1]).abs().max() <= ATOL
