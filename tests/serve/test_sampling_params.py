"""SamplingParams says no to everything that is not what its field says, by the field's name, when it is made."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.params import SamplingParams, StructuredOutput

NAN, INF = math.nan, math.inf
WRONG = {
    "n": (0, -1, 129, True, 1.0, "1", None, NAN),
    "temperature": (-1, NAN, INF, -INF, 1e-6, 1e6, "1", None, True, [1]),
    "top_p": (0, -0.1, 1.1, NAN, INF, "1", None, True),
    "top_k": (-2, 2**31, 1.5, "1", None, True),
    "min_p": (-0.1, 1.1, NAN, None, "0"),
    "seed": (2**63, -(2**63) - 1, 2**63 - 1, 1.0, "1", True),
    "max_tokens": (0, -1, 1.0, "5", True, 2**31),
    "min_tokens": (-1, 17, None, "1", True),
    "stop": (5, [1], [""], "", ["a"] * 65, [None], {"a": 1}, b"x", [b"x"], True),
    "stop_token_ids": (5, "ab", [-1], [1.0], ["1"], [True], [2**31], {1: 2}, b"1"),
    "logprobs": (-1, 21, 1.0, "1", True),
    "prompt_logprobs": (-1, 21, True),
    "presence_penalty": (-2.1, 2.1, NAN, None, "1", True),
    "frequency_penalty": (-2.1, 2.1, NAN),
    "repetition_penalty": (0, -1, NAN, 101, None, "1"),
    "logit_bias": ({"x": 1}, {-1: 1}, {1: 101}, {1: NAN}, {1: "1"}, {1: None}, [(1, 2)], 5, "a", {1.5: 1}, {None: 1},
                   {True: 1}, {2**31: 1}, {"\u0661": 1}, {"9" * 5000: 1}),
    "ignore_eos": (1, "yes", None),
    "skip_special_tokens": (1, "yes", None),
    "include_stop_str_in_output": (1, None),
    "structured": ({}, 5, "x"),
}  # fmt: skip


def test_every_field_has_its_wrong_values():
    assert set(WRONG) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_values_are_named(name, value):
    with pytest.raises(ContractError, match=name):
        SamplingParams(**{name: value})


@given(st.sampled_from(list(WRONG)), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=2),
    max_leaves=4,
))  # fmt: skip
def test_anything_is_taken_or_refused_and_nothing_else(name, value):
    try:
        params = SamplingParams(**{name: value})
    except ContractError:
        return
    assert SamplingParams(**{name: getattr(params, name)}) == params


def test_what_users_of_json_send_is_taken():
    params = SamplingParams(
        stop="x", stop_token_ids=None, logit_bias={"7": 1, 8: -2.5}, structured=StructuredOutput("regex", "a")
    )
    assert params.stop == ("x",) and params.stop_token_ids == () and params.logit_bias == {7: 1.0, 8: -2.5}
    assert SamplingParams(stop=None, logit_bias=None) == SamplingParams()
