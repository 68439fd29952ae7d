"""Weights that change under way: each request is answered by the weights that it came to, bit for bit, and named so."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import glm5sdk
from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM, WeightUpdate, offload_experts, preset
from glm5sdk.nn.adapters import load_adapter
from glm5sdk.nn.weight_view import WeightView
from glm5sdk.serve.async_engine import AsyncEngine
from glm5sdk.serve.config import EngineConfig
from glm5sdk.serve.engine import Engine
from glm5sdk.serve.params import SamplingParams

pytestmark = pytest.mark.skipif(
    "cpu" not in glm5sdk.backends() or bool(glm5sdk.backends()["cpu"].reason), reason="needs the CPU backend"
)
FILE = "model.safetensors"
PROMPT = [5, 9, 9, 12, 7, 7, 7, 20, 33, 9, 12]


def make(seed: int) -> Glm5ForCausalLM:
    torch.manual_seed(seed)
    config = preset("tiny", num_hidden_layers=2, index_topk=8, vocab_size=64, hidden_size=64, intermediate_size=96,
                    moe_intermediate_size=32, initializer_range=0.15)  # fmt: skip
    return Glm5ForCausalLM(config.replace(eos_token_id=(1,), pad_token_id=0)).eval()


def save_experts(folder: Path, seed: int, chosen: tuple[str, ...]) -> Path:
    """A checkpoint of some experts of the model with that seed."""
    make(seed).save_pretrained(folder)
    tensors = {n: t for n, t in load_file(str(folder / FILE)).items() if any(c in n for c in chosen)}
    (folder / "config.json").unlink()
    save_file(tensors, str(folder / FILE))
    return folder


def save_adapter(folder: Path, seed: int) -> Path:
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors, model = {}, make(0)
    for layer in range(3):
        for name in ("q_a_proj", "kv_b_proj", "o_proj"):
            path = f"model.layers.{layer}.self_attn.{name}"
            out, inner = model.get_submodule(path).weight.shape
            tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(2, inner, generator=generator)
            tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(out, 2, generator=generator) * 0.2
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    return folder


class Lab:
    """Checkpoints and adapters on disk, and what each combination of them generates by itself."""

    def __init__(self, root: Path) -> None:
        self.updates = {"whole": root / "whole", "some": root / "some", "layer": root / "layer"}
        make(1).save_pretrained(self.updates["whole"])
        save_experts(self.updates["some"], 2, ("layers.1.mlp.experts.3.", "layers.1.mlp.experts.5."))
        save_experts(self.updates["layer"], 3, ("layers.1.mlp.experts.",))
        self.adapters = {"a": save_adapter(root / "a", 1), "b": save_adapter(root / "b", 2)}
        self._models: dict[tuple[tuple[str, ...], str | None], Glm5ForCausalLM] = {}
        self._root = root

    def model(self, updates: tuple[str, ...], adapter: str | None) -> Glm5ForCausalLM:
        """Made without load_update: the tensors of the updates are put together in one checkpoint and loaded."""
        key = updates, adapter
        if key not in self._models:
            folder = self._root / ("merged" + "-".join(updates))
            make(0).save_pretrained(folder)
            tensors = load_file(str(folder / FILE))
            for name in updates:
                tensors |= load_file(str(self.updates[name] / FILE))
            save_file(tensors, str(folder / FILE))
            model = Glm5ForCausalLM.from_pretrained(folder)
            if adapter is not None:
                read = load_adapter(self.adapters[adapter], model)
                WeightView.of(model, "x").with_adapter("y", read).install(model)
            self._models[key] = model
        return self._models[key]

    def answer(self, updates: tuple[str, ...], adapter: str | None, prompt: list[int], p: SamplingParams) -> list[int]:
        out = self.model(updates, adapter).generate(
            torch.tensor([prompt]), max_new_tokens=p.max_tokens, temperature=p.temperature, seed=p.seed or 0,
            ignore_eos=True,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


def engine_of(model: Glm5ForCausalLM, **changes: Any) -> Engine:
    return Engine(model, None, EngineConfig(**{"page_size": 4, "num_pages": 96, "weight_version": "zero", **changes}))


def finish(engine: Engine, got: dict[str, list[int]], versions: dict[str, set[str]]) -> None:
    for _ in range(500):
        if not engine.has_work():
            return
        take(engine, got, versions)
    raise AssertionError("still at work")


def take(engine: Engine, got: dict[str, list[int]], versions: dict[str, set[str]]) -> None:
    for delta in engine.step():
        assert delta.error is None
        got.setdefault(delta.request_id, []).extend(delta.token_ids)
        versions.setdefault(delta.request_id, set()).add(delta.weight_version)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_requests_keep_the_weights_they_came_to(lab: Lab, data: st.DataObject) -> None:
    """Random updates, swaps and adapters between random steps, with prefix sharing, drafts, chunks, few pages."""
    engine = engine_of(
        make(0),
        num_pages=data.draw(st.sampled_from([14, 96])),
        max_num_batched_tokens=data.draw(st.sampled_from([3, 64])),
        speculative_tokens=data.draw(st.sampled_from([0, 2])),
        async_scheduling=data.draw(st.booleans()),
    )
    updates: tuple[str, ...] = ()
    loaded: set[str] = set()
    want: dict[str, tuple[tuple[str, ...], str | None, list[int], SamplingParams]] = {}
    got: dict[str, list[int]] = {}
    versions: dict[str, set[str]] = {}
    for _ in range(data.draw(st.integers(3, 12))):
        what = data.draw(st.sampled_from(["request", "request", "request", "step", "step", "update", "load", "unload"]))
        if what == "request":
            adapter = data.draw(st.sampled_from([None, *sorted(loaded)]))
            prompt = PROMPT[: data.draw(st.integers(1, 11))]
            params = SamplingParams(
                max_tokens=data.draw(st.integers(1, 8)), temperature=data.draw(st.sampled_from([0.0, 1.0])),
                seed=data.draw(st.integers(0, 3)), ignore_eos=True,
            )  # fmt: skip
            name = f"r{len(want)}"
            engine.add(name, prompt, params, adapter=adapter)
            want[name] = updates, adapter, prompt, params
        elif what == "step":
            take(engine, got, versions)
        elif what == "update":
            name = data.draw(st.sampled_from(sorted(lab.updates)))
            command = (
                "update_weights" if name == "whole" else data.draw(st.sampled_from(["swap_experts", "update_weights"]))
            )
            said = engine.control.run(command, {"path": str(lab.updates[name]), "version": "+".join([*updates, name])})
            updates = (*updates, name)
            assert said["weight_version"] == engine.stats().weight_version == "+".join(updates)
        elif what == "load":
            name = data.draw(st.sampled_from(["a", "b"]))
            engine.control.run("load_adapter", {"name": name, "path": str(lab.adapters[name])})
            loaded.add(name)
        elif loaded:
            name = data.draw(st.sampled_from(sorted(loaded)))
            engine.control.run("unload_adapter", {"name": name})
            loaded.remove(name)
            with pytest.raises(ContractError, match="needs a loaded one"):
                engine.add("never", PROMPT, SamplingParams(), adapter=name)
    finish(engine, got, versions)
    engine.close()
    for name, (had, adapter, prompt, params) in want.items():
        assert got[name] == lab.answer(had, adapter, prompt, params), (had, adapter)
        version = "+".join(had) or "zero"
        assert versions[name] == {version if adapter is None else f"{version}+{adapter}"}


def test_answers_differ(lab: Lab) -> None:
    """Otherwise the test above would prove nothing."""
    params = SamplingParams(max_tokens=8, temperature=0.0)
    cases = [((), None), ((), "a"), ((), "b"), (("whole",), None), (("some",), None), (("layer",), None)]
    answers = [tuple(lab.answer(updates, adapter, PROMPT, params)) for updates, adapter in cases]
    assert len(set(answers)) == len(cases)


def test_experts_on_disk_in_an_engine(lab: Lab, tmp_path: Path) -> None:
    """Answers stay the same; a file that fails ends the requests of that step with its name, and no others."""
    make(0).save_pretrained(tmp_path)
    model = offload_experts(Glm5ForCausalLM.from_pretrained(tmp_path), tmp_path, 1)
    engine = engine_of(model)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    engine.add("one", PROMPT, params)
    got: dict[str, list[int]] = {}
    finish(engine, got, {})
    whole = (tmp_path / FILE).read_bytes()
    with (tmp_path / FILE).open("r+b") as stream:
        stream.truncate(5000)
    engine.add("two", PROMPT, params)
    errors = []
    while engine.has_work():
        errors += [delta.error for delta in engine.step() if delta.error]
    assert len(errors) == 1 and "CheckpointError" in errors[0] and FILE in errors[0]
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / FILE).write_bytes(whole)
    engine.control.run("update_weights", {"path": str(tmp_path / "again"), "version": "healed"})
    engine.add("three", PROMPT, params)
    finish(engine, got, {})
    assert got["one"] == got["three"] == lab.answer((), None, PROMPT, params)


def test_updates_that_meet_are_both_there(lab: Lab) -> None:
    """Two partial updates asked for at the same time: neither is lost, whatever the order."""
    both = AsyncEngine(engine_of(make(0)))
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)

    async def work() -> list[int]:
        names = ("some", "head")
        await asyncio.gather(*(both.control("update_weights", {"path": str(lab.updates[n])}) for n in names))
        tokens: list[int] = []
        async for delta in both.generate(PROMPT, params, request_id="x"):
            tokens += delta.token_ids
        return tokens

    together, read = threading.Barrier(2), both.engine.weights.read_update

    def read_together(*arguments: Any) -> WeightUpdate:
        update = read(*arguments)
        together.wait(20)
        return update

    both.engine.weights.read_update = read_together
    lab.updates["head"] = lab.updates["some"].parent / "head"
    lab.updates["head"].mkdir()
    save_file({"lm_head.weight": make(4).lm_head.weight.detach()}, str(lab.updates["head"] / FILE))
    try:
        assert asyncio.run(work()) == lab.answer(("some", "head"), None, PROMPT, params)
    finally:
        both.close()
        del lab.updates["head"]
