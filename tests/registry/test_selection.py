"""Who decides: use, then the environment, then priority; caps, refusals with every reason, and who inherits what."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from toy_ops import ONLY_F32, Toy, installed, multiply_kernel, operands, row, toy_composed, toy_multiply

from glm5sdk.core import log
from glm5sdk.core.errors import ContractError, UnavailableError
from glm5sdk.registry import Requires, at_most, current_use, multiple_of, one_of, select, strict, use
from glm5sdk.registry.impl import CallInfo

pytestmark = pytest.mark.smoke

LEVELS = ("baseline", "avx2", "avx512", "avx512_vnni")
calls: list[str] = []


def counted(name: str) -> Any:
    def kernel(*args: Any) -> None:
        calls.append(name)
        multiply_kernel(*args)

    return row(name, kernel)


def counted_with(name: str, **more: Any) -> Any:
    return row(name, counted(name).fn, **more)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(select, "_environment", None)
    monkeypatch.delenv("GLM5SDK_BACKENDS", raising=False)
    monkeypatch.delenv("GLM5SDK_STRICT", raising=False)
    calls.clear()
    log._said.clear()
    yield
    toy_multiply._selected.clear()


def ran(**kwargs: Any) -> str:
    """Which toy kernel a call ran; `reference` when none did."""
    calls.clear()
    toy_multiply(*operands(), **kwargs)
    return calls[0] if calls else "reference"


def leveled(*levels: str, **more: Any) -> Toy:
    rows = tuple(counted_with(f"toy.{v}", priority=10 + LEVELS.index(v), **more) for v in levels)
    return Toy(impls=rows, levels=LEVELS)


def test_the_highest_priority_that_can_run_is_the_default() -> None:
    with installed(Toy("one", (counted_with("one.a", priority=5),)), Toy("two", (counted_with("two.a", priority=7),))):
        assert ran() == "two.a"
    assert ran() == "reference"


def test_use_beats_environment_beats_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(*(Toy(n, (counted_with(f"{n}.a", priority=p),)) for n, p in (("one", 1), ("two", 2), ("three", 3)))):
        assert ran() == "three.a"
        monkeypatch.setenv("GLM5SDK_BACKENDS", "one")
        monkeypatch.setattr(select, "_environment", None)
        toy_multiply._selected.clear()
        assert (ran(), current_use()) == ("one.a", ("one",))
        with use("two"):
            assert (ran(), current_use()) == ("two.a", ("two",))
            with use("reference"):
                assert ran() == "reference"
            assert ran() == "two.a"
        assert ran() == "one.a"


def test_several_names_are_an_order_of_preference() -> None:
    half = counted_with("one.a", requires=Requires(dtypes=("bf16",)))
    with installed(Toy("one", (half,)), Toy("two", (counted("two.a"),))), use("one", "two"):
        assert ran() == "two.a"
        calls.clear()
        toy_multiply(*operands(dtype=torch.bfloat16))
        assert calls == ["one.a"]


@pytest.mark.parametrize(
    ("cap", "want"),
    [("toy", "avx512"), ("toy.baseline", "baseline"), ("toy.avx2", "baseline"), ("toy.avx512_vnni", "avx512")],
)
def test_a_level_is_a_cap(cap: str, want: str) -> None:
    with installed(leveled("baseline", "avx512")), use(cap):
        assert ran() == f"toy.{want}"


def test_below_the_cap_an_op_without_kernel_falls_back() -> None:
    with installed(leveled("avx512")), use("toy.avx2"):
        assert ran() == "reference"
        assert "toy.avx2 has no kernel for toy_multiply" in str(toy_multiply.explain(*operands()))


def test_an_exact_variant_is_that_variant() -> None:
    with installed(Toy("gpu", (counted("gpu.sm80"), counted_with("gpu.sm90", priority=99)))), use("gpu.sm80"):
        assert ran() == "gpu.sm80"


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(
        UnavailableError, match=r"backend is 'nosuch', needs one of: .*reference.*pip install glm5sdk-nosuch"
    ):
        use("nosuch")
    with (
        installed(leveled("baseline")),
        pytest.raises(ContractError, match=r"variant is 'toy.sse9', needs one of: avx2"),
    ):
        use("toy.sse9")
    with pytest.raises(ContractError, match="got no name"):
        use()


def test_a_refusal_lists_every_candidate_with_every_reason() -> None:
    tests = {"N": multiple_of(64), "T": at_most(1)}
    picky = counted_with("toy.a", requires=Requires(("cuda",), ("bf16",), tests, {"mode": ("fast",)}))
    with installed(Toy(impls=(picky, counted_with("toy.b", requires=Requires(dtypes=("f64",)))))), use("toy"):
        with pytest.raises(UnavailableError) as error:
            toy_multiply(*operands())
        text = str(error.value)
        assert text.startswith("toy_multiply: toy was asked for by name and refuses this call")
        assert "toy.a: device is cpu, needs cuda; dtype is f32, needs bf16; axis N is 4, needs a multiple of 64" in text
        assert "mode is 'plain', needs 'fast'" in text
        assert "toy.b: dtype is f32, needs f64" in text
        assert "reference: not asked for" in text
        assert "axis T" not in text  # how many rows there are is nobody's reason


def test_explain_says_what_runs_and_why_not_the_others() -> None:
    picky = counted_with("toy.a", requires=Requires(dtypes=("bf16",)))
    with installed(Toy(impls=(picky, counted("toy.b")))):
        explanation = toy_multiply.explain(*operands())
        assert explanation.chosen == "toy.b"
        text = str(explanation)
        assert "toy_multiply(f32 on cpu T=3 N=4 mode=plain)" in text
        assert "runs: toy.b (highest priority that can run)" in text
        assert "toy.a" in text
        assert "dtype is f32, needs bf16" in text
        calls.clear()
        toy_multiply(*operands())
        assert calls == ["toy.b"]
        with use("toy.a"):
            assert toy_multiply.explain(*operands()).chosen is None


def test_rows_do_not_enter_the_selection() -> None:
    with installed(Toy(impls=(counted("toy.a"),))):
        for rows in (0, 1, 4096):
            toy_multiply(*operands(rows, 4))
        assert len(toy_multiply._selected) == 1
        toy_multiply(*operands(1, 5))
        assert len(toy_multiply._selected) == 2


def test_each_option_and_dtype_is_selected_for_itself() -> None:
    fast = counted_with("toy.a", requires=Requires(options={"mode": ("fast",)}, dtypes=("f32",)))
    with installed(Toy(impls=(fast,))):
        assert ran(mode="fast") == "toy.a"
        assert ran(mode="plain") == "reference"
        calls.clear()
        toy_multiply(*operands(dtype=torch.float64), mode="fast")
        assert calls == []


def test_falling_back_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with installed(Toy(impls=(row("toy.a", op="toy_float"),))), caplog.at_level(logging.INFO, "glm5sdk"), use("toy"):
        for width in (3, 4, 5):
            toy_multiply(*operands(2, width))
        said = [r.message for r in caplog.records if "toy_multiply" in r.message]
        assert said == ["toy_multiply: toy has no kernel, runs reference"]


def test_strict_makes_falling_back_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(Toy(impls=(row("toy.a", op="toy_float"),))), use("toy"):
        assert ran() == "reference"
        with strict(), pytest.raises(UnavailableError, match=r"toy has no kernel for toy_multiply \(strict mode\)"):
            ran()
        assert ran() == "reference"
        monkeypatch.setenv("GLM5SDK_STRICT", "1")
        toy_multiply._selected.clear()
        with pytest.raises(UnavailableError, match="strict mode"):
            ran()
        with strict(False):
            assert ran() == "reference"


def test_composed_inherits_the_backend() -> None:
    with installed(Toy(impls=(counted("toy.a"),))):
        with use("toy"):
            toy_composed(*operands())
            assert calls == ["toy.a"]
            assert toy_composed.explain(*operands()).chosen == "composed"
        calls.clear()
        with use("reference"):
            toy_composed(*operands())
        assert calls == []


def test_some_backends_never_run_unasked() -> None:
    with installed(Toy(impls=(counted_with("toy.a", priority=1000),), automatic=False)):
        assert ran() == "reference"
        with use("toy"):
            assert ran() == "toy.a"


def test_new_threads_inherit_nothing() -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append((current_use(), toy_multiply.explain(*operands()).chosen))

    with installed(Toy(impls=(counted("toy.a"),))), use("reference"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
    assert seen == [((), "toy.a"), (("reference",), "reference")]


def test_a_scope_can_be_entered_again_and_left_by_an_error() -> None:
    scope = use("reference")
    with scope, scope:
        assert current_use() == ("reference",)
    with pytest.raises(KeyError), scope:
        raise KeyError
    assert current_use() == ()


def test_resolve_keeps_its_choice() -> None:
    with installed(Toy(impls=(counted("toy.a"),))):
        resolved = toy_multiply.resolve(*operands())
        with use("reference"):
            x, y = operands()
            assert torch.equal(resolved(x, y), x * y)
        assert calls == ["toy.a"]
        assert repr(resolved) == "<resolved toy_multiply -> toy.a>"
        out = torch.empty_like(x)
        resolved.kernel(x, y, None, "plain", 1.0, out)
        assert torch.equal(out, x * y)
        with pytest.raises(ContractError, match="axis N of y"):
            resolved.check(x, torch.zeros(3, 9))
    with pytest.raises(ContractError, match="inputs that require grad"):
        toy_multiply.resolve(x.requires_grad_(), y)


def test_requirements_give_reasons_as_sentences() -> None:
    call = CallInfo("cpu", "f32", {"N": 7}, {"mode": "plain"}, {"w": "w8a8/plain"})
    assert ONLY_F32.reasons(call) == []
    assert Requires(axes={"N": one_of(8, 16)}).reasons(call) == ["axis N is 7, needs one of 8, 16"]
    assert Requires(weights=("plain/plain",)).reasons(call) == ["weight w is w8a8/plain, needs plain/plain"]
    assert Requires(axes={"Q": one_of(1)}, options={"other": (1,)}).reasons(call) == []
