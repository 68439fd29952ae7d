"""Engines whose experts are spread over processes: tokens of one process, idle processes, and an end that all reach."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from engine_cases import Results, alone, check_drained, make_model, take_step

from glm5sdk.core.errors import ContractError
from glm5sdk.parallel import close_processes
from glm5sdk.serve.config import EngineConfig
from glm5sdk.serve.load import ExpertSpread, load_engine
from glm5sdk.serve.params import SamplingParams

PROMPTS = [[3 + (i * 7 + j) % 40 for j in range(5 + 4 * i)] for i in range(6)]


def params(index: int) -> SamplingParams:
    return SamplingParams(max_tokens=8 + index, temperature=0.9, seed=index, ignore_eos=True)


def one_process(rank: int, size: int, folder: str, meeting: str, drafts: int) -> None:
    torch.set_num_threads(1)
    spread = ExpertSpread(rank, size, meeting, timeout_s=60.0)
    config = EngineConfig(page_size=4, num_pages=40, max_num_seqs=3, speculative_tokens=drafts)
    engine = load_engine(folder, config, spread=spread)
    with pytest.raises(ContractError, match="spread over processes"):
        engine.control.run("update_weights", {"path": folder})
    mine = [i for i in range(len(PROMPTS)) if i % 3 == rank]  # the last process may have none, or one: it idles
    for index in mine:
        engine.add(str(index), PROMPTS[index], params(index))
    results: Results = {}
    while any(engine.knows(str(index)) for index in mine):
        take_step(engine, results)
    engine.close()  # not before the others are done, too
    check_drained(engine)
    close_processes()
    assert {i: results[str(i), 0].token_ids for i in mine} == {i: alone(PROMPTS[i], params(i)) for i in mine}


@pytest.mark.parametrize("size, drafts", [(2, 0), (2, 2), (4, 2)])
def test_spread_experts_give_the_tokens_of_one_process(size: int, drafts: int, tmp_path: Path) -> None:
    assert make_model().config.n_routed_experts % size == 0
    make_model().save_pretrained(tmp_path / "model")
    with tempfile.NamedTemporaryFile() as file:
        meeting = f"file://{file.name}.meet"
    mp.spawn(one_process, (size, str(tmp_path / "model"), meeting, drafts), nprocs=size)
