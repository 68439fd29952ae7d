"""Views: many versions of weights in one model, each row as if its version were the only one."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_cases import alone, expert_targets, linear_targets, save_adapter, small_model, step, tokens

import glm5sdk
from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.nn.adapters import load_adapter
from glm5sdk.nn.moe import ExpertPatch
from glm5sdk.nn.token_batch import TokenBatch
from glm5sdk.nn.weight_view import WeightView
from glm5sdk.registry.weight import load_weight

EXPERTS = "model.layers.2.mlp.experts"

pytestmark = pytest.mark.skipif(
    "cpu" not in glm5sdk.backends() or bool(glm5sdk.backends()["cpu"].reason), reason="needs the CPU backend"
)


def patch_of(model: Glm5ForCausalLM, ids: tuple[int, ...], seed: int, path: str = EXPERTS) -> ExpertPatch:
    experts = model.get_submodule(path)
    generator = torch.Generator().manual_seed(seed)

    def make(like: torch.Tensor) -> torch.Tensor:
        return (0.1 * torch.randn(len(ids), *like.shape[1:], generator=generator)).to(like.dtype)

    return ExpertPatch(ids, make(experts.gate_up_proj), make(experts.down_proj))


def with_patch(model: Glm5ForCausalLM, patch: ExpertPatch, path: str = EXPERTS) -> Glm5ForCausalLM:
    """A model of its own with the patch written into its weights."""
    other = copy.deepcopy(model)
    experts = other.get_submodule(path)
    for row, e in enumerate(patch.ids):
        load_weight(experts.gate_up_proj, patch.gate_up[row], e)
        load_weight(experts.down_proj, patch.down[row], e)
    return other


class World:
    """One model, views of it, and for each view a model that has those weights alone."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = small_model(0, dtype)
        other = small_model(1, dtype)
        base = WeightView.of(self.model, "base")
        whole = base.replaced("whole", {**dict(other.named_parameters()), **dict(other.named_buffers())})
        patch, second = patch_of(self.model, (1, 4), 2), patch_of(self.model, (0, 4), 3)
        patched = base.replaced("patched", patches={EXPERTS: patch})
        twice = patched.replaced("twice", patches={EXPERTS: second})
        targets = [t for t in linear_targets(self.model) if not t.endswith("kv_b_proj")]
        save_adapter(folder, self.model, [*targets, *expert_targets([1], [0, 5])])
        adapter = load_adapter(folder, self.model)
        beside = base.with_adapter("adapter", adapter)
        self.views = [base, whole, patched, twice, beside, whole.with_adapter("both", adapter)]
        adapted, both = copy.deepcopy(self.model), copy.deepcopy(other)
        WeightView.of(adapted, "x").with_adapter("y", adapter).install(adapted)
        WeightView.of(both, "x").with_adapter("y", adapter).install(both)
        once = with_patch(self.model, patch)
        self.alone = [copy.deepcopy(self.model), other, once, with_patch(once, second), adapted, both]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    with glm5sdk.use("cpu"):
        return World(tmp_path_factory.mktemp("adapter"), request.param)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_each_row_runs_as_if_its_weights_were_the_only_ones(world: World, data: st.DataObject) -> None:
    """Random views over random steps of requests that share pools: bits of each one's own model, alone, uncached."""
    count = data.draw(st.integers(1, 5), label="requests")
    chosen = [data.draw(st.integers(0, len(world.views) - 1), label="view") for _ in range(count)]
    ids = [tokens(14, seed=10 * count + r) for r in range(count)]
    cache = world.model.make_cache(count, 16, page_size=3)
    got: list[list[torch.Tensor]] = [[] for _ in range(count)]
    with glm5sdk.use("cpu"):
        while min(cache.lengths) < 14:
            active = [r for r in range(count) if cache.lengths[r] < 14 and data.draw(st.booleans())]
            groups: dict[int, list[int]] = {}
            for r in active:
                groups.setdefault(chosen[r], []).append(r)
            for view, rows in groups.items():
                most = [14 - cache.lengths[r] for r in rows]
                new = [ids[r][14 - m :][: data.draw(st.integers(1, m))] for r, m in zip(rows, most, strict=True)]
                with world.views[view].active(world.model):
                    for r, logits in zip(rows, step(world.model, cache, rows, new), strict=True):
                        got[r].append(logits)
            if not active:
                r = min(range(count), key=cache.lengths.__getitem__)
                with world.views[chosen[r]].active(world.model):
                    got[r] += step(world.model, cache, [r], [ids[r][cache.lengths[r] :][:1]])
        for r in range(count):
            assert torch.equal(torch.cat(got[r]), alone(world.alone[chosen[r]], ids[r])), world.views[chosen[r]].version


def test_views_differ(world: World) -> None:
    """Otherwise the test above would prove nothing."""
    answers = []
    for view in world.views:
        with glm5sdk.use("cpu"), view.active(world.model):
            answers.append(alone(world.model, tokens(14, seed=3)))
    assert all(not torch.equal(a, b) for i, a in enumerate(answers) for b in answers[:i])


@torch.no_grad()
def test_mtp_layer_follows_the_view(world: World) -> None:
    ids, batch = tokens(12, seed=5), TokenBatch.packed([11])

    def drafts(model: Glm5ForCausalLM) -> torch.Tensor:
        hidden = model.hidden_states(ids[:-1], model.context(batch))
        return model.mtp_hidden_states(ids[1:], hidden, model.context(batch)) @ model.mtp_head().T

    with glm5sdk.use("cpu"):
        for view, own in zip(world.views, world.alone, strict=True):
            with view.active(world.model):
                assert torch.equal(drafts(world.model), drafts(own)), view.version


def test_an_error_inside_leaves_the_model_as_it_was(world: World) -> None:
    model, before = world.model, dict(world.model.named_parameters())
    want = alone(model, tokens(9, seed=1))
    for view in world.views:
        with pytest.raises(RuntimeError, match="inside"), view.active(model):
            raise RuntimeError("inside")
        assert all(p is before[name] for name, p in model.named_parameters())
        assert torch.equal(alone(model, tokens(9, seed=1)), want)


def test_wrong_use_is_refused(world: World) -> None:
    model, (base, whole, *_) = world.model, world.views
    with base.active(model):
        with pytest.raises(ContractError, match="is active already"), whole.active(model):
            pass
        with pytest.raises(ContractError, match="outside of it"):
            WeightView.of(model, "x")
        with pytest.raises(ContractError, match="cannot be installed"):
            whole.install(model)
    with pytest.raises(ContractError, match="another model"), base.active(copy.deepcopy(model)):
        pass
    weight = model.lm_head.weight.detach()
    for name, value, said in (
        ("lm_head.wait", weight, "lm_head.wait is no parameter"),
        ("lm_head.weight", weight[:-1], r"needs torch.\w+ \[97, 52\]"),
        ("lm_head.weight", weight.double(), "is torch.float64"),
    ):
        with pytest.raises(ContractError, match=said):
            base.replaced("x", {name: value})
    good = patch_of(model, (1, 4), 0)
    for path, patch, said in (
        ("model.layers.0.mlp", good, "needs the path of a layer's experts"),
        (EXPERTS, ExpertPatch((4, 1), good.gate_up, good.down), "ascending"),
        (EXPERTS, ExpertPatch((1, 6), good.gate_up, good.down), "ids below 6"),
        (EXPERTS, ExpertPatch((1, 2, 3), good.gate_up, good.down), "gate_up_proj is"),
        (EXPERTS, ExpertPatch((1, 4), good.gate_up, good.down[:, 1:]), "down_proj is"),
    ):
        with pytest.raises(ContractError, match=said):
            base.replaced("x", patches={path: patch})


def test_a_patch_and_an_expert_adapter_of_one_layer_are_refused(world: World) -> None:
    adapter = world.views[4].adapter
    path = next(iter(adapter.experts))
    patched = world.views[0].replaced("p", patches={path: patch_of(world.model, (2,), 0, path)})
    with pytest.raises(ContractError, match="has a patch of some experts and an adapter"):
        patched.with_adapter("x", adapter)


def test_weights_are_freed_with_the_last_view() -> None:
    """A request that holds the view keeps its weights; nothing else does, and a patch costs its own bytes alone."""
    model = small_model()
    base = WeightView.of(model, "base")
    assert base.nbytes_beside(base) == 0
    patch = patch_of(model, (1, 4), 2)
    view = base.replaced("patched", patches={EXPERTS: patch})
    assert view.nbytes_beside(base) == patch.gate_up.nbytes + patch.down.nbytes
    fused = weakref.ref(patch.gate_up)
    other = small_model(1)
    whole = base.replaced("whole", dict(other.named_parameters()))
    assert whole.nbytes_beside(base) == sum(p.nbytes for p in other.parameters())
    matrix = weakref.ref(other.lm_head.weight)
    del patch, other
    with whole.active(model):
        alone(model, tokens(9, seed=1))
    derived = view.with_adapter("derived", None)
    del view, whole
    gc.collect()
    assert matrix() is None
    assert fused() is not None
    del derived
    gc.collect()
    assert fused() is None


def test_installing_frees_the_old_weights() -> None:
    model = small_model()
    base = WeightView.of(model, "base")
    want = alone(model, tokens(9, seed=1))
    old = weakref.ref(model.lm_head.weight)
    other = small_model(1)
    base.replaced("new", dict(other.named_parameters()) | dict(other.named_buffers())).install(model)
    assert torch.equal(alone(model, tokens(9, seed=1)), alone(other, tokens(9, seed=1)))
    with base.active(model):  # an older request still runs on the old weights
        assert torch.equal(alone(model, tokens(9, seed=1)), want)
    del base
    gc.collect()
    assert old() is None


@pytest.mark.usefixtures("world")
def test_absorbed_weights_belong_to_their_view() -> None:
    """Two matrices that a sampled stamp cannot tell apart by address or contents still give two answers."""
    model = small_model()
    base = WeightView.of(model, "base")
    name = "model.layers.1.self_attn.kv_b_proj"
    changed = model.get_submodule(name).weight.detach().clone()
    changed.view(-1)[1] += 1.0
    view = base.replaced("other", {f"{name}.weight": changed})
    own = copy.deepcopy(model)
    load_weight(own.get_submodule(name).weight, changed)
    ids = tokens(9, seed=1)
    want = alone(model, ids), alone(own, ids)
    assert not torch.equal(*want)
    attention = model.model.layers[1].self_attn
    for _ in range(2):
        with view.active(model):
            assert torch.equal(alone(model, ids), want[1])
            kept = attention._absorbed
        assert torch.equal(alone(model, ids), want[0])
    with view.active(model):
        assert attention._absorbed is kept, "switching back and forth derives nothing anew"
    kept = attention._absorbed
    with base.replaced("same kv_b", {"lm_head.weight": model.lm_head.weight.detach() * 2}).active(model):
        alone(model, ids)
        assert attention._absorbed is kept, "views that share the matrix share what is derived from it"


def test_tied_embeddings_change_together() -> None:
    model, other = small_model(tie_word_embeddings=True), small_model(1, tie_word_embeddings=True)
    view = WeightView.of(model, "base").replaced("new", dict(other.named_parameters()) | dict(other.named_buffers()))
    with view.active(model):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(alone(model, tokens(9, seed=1)), alone(other, tokens(9, seed=1)))
