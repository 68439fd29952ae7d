"""A tiny GLM-5 writes the same tokens on the simulated kernels as on the reference."""

from __future__ import annotations

import torch

from glm5sdk.models.glm5 import Glm5ForCausalLM, preset
from glm5sdk.registry import use
from glm5sdk_sim import _C


def test_greedy_tokens_are_the_references() -> None:
    torch.manual_seed(0)
    config = preset("tiny", num_hidden_layers=2, index_topk=8, vocab_size=64, initializer_range=0.15)
    model = Glm5ForCausalLM(config).eval()
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    before = _C.launch_counts()[0]
    with use("cuda_sim"):
        got = model.generate(ids, max_new_tokens=6, ignore_eos=True)
    launched = _C.launch_counts()[0] - before
    with use("reference"):
        want = model.generate(ids, max_new_tokens=6, ignore_eos=True)
    assert launched > 6 * 2 * 3, "the model used no kernels of the simulator"
    assert torch.equal(got, want)
