"""Bad values are refused before a launch; a kernel that meets them all the same stays inside its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from sim_cases import ATTENTION, SELECTION, inputs, run

from glm5sdk.core.errors import ContractError, UnavailableError
from glm5sdk.registry import CATALOGUE, backends, use
from glm5sdk_sim import _C, scheduled


@contextmanager
def _unchecked() -> Iterator[None]:
    _C.check_values(False)
    try:
        yield
    finally:
        _C.check_values(True)


def _attention(**given: torch.Tensor) -> dict:
    return inputs("sparse_flash_attention", ATTENTION, "bf16", seed=4, **given)


HUGE = 2**31 - 1


@pytest.mark.parametrize("value", [-5, 160, HUGE, -HUGE])
def test_bad_positions_count_as_absent(value: int) -> None:
    good = _attention()
    good["request_ids"] = torch.tensor([0, 1, 0], dtype=torch.int32)
    good["indices"] = torch.arange(140, dtype=torch.int32).repeat(3, 1, 1)
    bad = {**good, "indices": good["indices"].clone()}
    bad["indices"][1, 0, 139] = value
    with pytest.raises(ContractError, match="indices"):
        run("sparse_flash_attention", bad)
    less = {**good, "indices": good["indices"].clone()}
    less["indices"][1, 0, 139] = -1
    for seed in (0, 1):
        with _unchecked(), scheduled(seed=seed):
            got = run("sparse_flash_attention", bad)
        assert all(torch.equal(a, b) for a, b in zip(got, run("sparse_flash_attention", less), strict=True))


@pytest.mark.parametrize("name", ["block_table", "request_ids"])
@pytest.mark.parametrize("value", [-7, "first past the end", HUGE])
def test_bad_pages_and_requests_stay_inside(name: str, value: int | str) -> None:
    if isinstance(value, str):
        value = ATTENTION["P" if name == "block_table" else "B"]
    for op, values in (
        ("sparse_flash_attention", _attention()),
        ("topk_indexer_with_scores", inputs("topk_indexer_with_scores", SELECTION, "bf16", seed=4)),
    ):
        if op == "sparse_flash_attention":
            values["indices"] = torch.arange(140, dtype=torch.int32).repeat(3, 1, 1)
        else:
            values["kv_lens"] = torch.full((3,), 160, dtype=torch.int32)
        values["request_ids"] = torch.zeros(3, dtype=torch.int32)
        values[name] = torch.full_like(values[name], value)
        with pytest.raises(ContractError, match=name):
            run(op, values)
        for seed in (0, 1):
            with _unchecked(), scheduled(seed=seed):
                got = run(op, values)
            if op == "sparse_flash_attention":
                assert bool((got[0] == 0).all()) and bool(got[1].isneginf().all())
            else:
                assert bool((got[0] == -1).all()) and bool(got[1].isneginf().all())


def test_the_simulator_is_never_chosen_unasked() -> None:
    assert not backends()["cuda_sim"].automatic
    x, weight = torch.randn(2, 8), torch.ones(8)
    op = CATALOGUE["rms_norm"]
    assert op.explain(x, weight).choice.impl.backend != "cuda_sim"
    with use("cuda_sim"):
        assert op.explain(x, weight).choice.impl.name == "cuda_sim.portable"
        with pytest.raises(UnavailableError, match="dtype is f16"):
            op(x.half(), weight.half())


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ContractError, match='order is "backwards"'), scheduled("backwards"):
        pass
    with pytest.raises(ContractError, match="needs order="):
        _C.configure("speed=3")
    assert _C.settings() == "order=fifo,copies=late,seed=0"
