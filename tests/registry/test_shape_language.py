"""The shape language: what it reads it can evaluate, solve and print; everything else is refused with the text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5sdk.core.errors import ContractError
from glm5sdk.registry.contract_source import python
from glm5sdk.registry.shapes import AxisRule, TensorRule, parse_dim, parse_rule

pytestmark = pytest.mark.smoke

NAMES = ("T", "N", "H", "Hi", "Di", "C", "R", "Pmax")
FACTOR = st.one_of(st.integers(0, 12).map(str), st.sampled_from(NAMES))
TERM = st.lists(FACTOR, min_size=1, max_size=3).map("*".join)
QUOTIENT = st.tuples(st.sampled_from(NAMES), st.integers(1, 130)).map(lambda pair: f"{pair[0]}/{pair[1]}")
ANY_TERM = st.lists(st.one_of(FACTOR, QUOTIENT), min_size=1, max_size=3).map("*".join)
DIM = st.lists(ANY_TERM, min_size=1, max_size=3).map("+".join)
SIZES = st.fixed_dictionaries({name: st.integers(0, 7) for name in NAMES})


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=DIM, axes=SIZES)
def test_a_dimension_means_what_python_means(text: str, axes: dict[str, int]) -> None:
    dim = parse_dim(text)
    rounded_up = re.sub(r"(\w+)/(\d+)", r"-(-\1//\2)", text)
    want = eval(rounded_up, {}, axes)  # noqa: S307  made of names, digits, +, * and /
    assert dim.evaluate(axes) == want
    assert eval(python(dim), {}, axes) == want  # noqa: S307
    assert set(dim.names()) == {n for n in NAMES if n in re.split(r"[+*/]", text)}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    dims=st.lists(DIM, max_size=4), word=st.sampled_from(["a", "f32", "i32", "W", "kv_cache"]), optional=st.booleans()
)
def test_a_rule_prints_as_it_reads(dims: list[str], word: str, optional: bool) -> None:
    rule = parse_rule(f"{word}[{', '.join(dims)}]{'?' if optional else ''}")
    assert isinstance(rule, TensorRule)
    assert parse_rule(str(rule)) == rule
    assert (rule.word, len(rule.dims), rule.optional) == (word, len(dims), optional)
    assert rule.is_weight == (word == "W")
    assert rule.is_cache == (word == "kv_cache")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    rest=st.lists(TERM, max_size=2),
    factor=st.integers(1, 5),
    others=st.lists(st.sampled_from(["H", "C"]), max_size=2),
    axes=SIZES,
)
def test_solving_undoes_evaluating(rest: list[str], factor: int, others: list[str], axes: dict[str, int]) -> None:
    rest = [t for t in rest if "N" not in t.split("*")]
    dim = parse_dim("+".join([*rest, "*".join([str(factor), *others, "N"])]))
    numerator, divisor = dim.solve_for("N")
    scope = {**axes, "_size": dim.evaluate(axes)}
    left, right = eval(numerator, {}, scope), eval(divisor, {}, scope)  # noqa: S307
    assert left == right * axes["N"]


@pytest.mark.parametrize("text", ["N*N", "N+N", "2*N*N+1"])
def test_only_linear_axes_can_be_solved_for(text: str) -> None:
    with pytest.raises(ContractError, match="N stands twice, needs to be linear"):
        parse_dim(text).solve_for("N")


def test_a_quotient_tells_no_axis() -> None:
    with pytest.raises(ContractError, match="does not tell N, needs an argument that does"):
        parse_dim("N/2").solve_for("N")


def test_an_axis_that_is_not_there_cannot_be_solved_for() -> None:
    with pytest.raises(ContractError, match="does not contain H"):
        parse_dim("2*N").solve_for("H")


def test_an_axis_rule_names_its_axis() -> None:
    assert parse_rule("= K") == AxisRule("K")
    assert str(parse_rule("= K")) == "= K"


@pytest.mark.parametrize("text", ["a[T", "a T", "", "a[T]!", "=K", "= K*2", "a(T)", "a[T]??"])
def test_other_texts_are_refused_with_the_text(text: str) -> None:
    with pytest.raises(ContractError, match="shape rule: text is"):
        parse_rule(text)


@pytest.mark.parametrize(
    "text", ["a[T-1]", "a[T/0]", "a[T/N]", "a[4/2]", "a[2T]", "a[(T)]", "a[T+]", "a[*T]", "a[T N]"]
)
def test_other_dimensions_are_refused_with_the_dimension(text: str) -> None:
    with pytest.raises(ContractError, match="needs sums and products of names and integers"):
        parse_rule(text)
