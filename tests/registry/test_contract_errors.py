"""Every sentence that a broken contract can say, and what a kept one lets through."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_ops import operands, toy_cast, toy_float, toy_linear, toy_multiply, toy_paged, toy_write

from glm5sdk.core.errors import ContractError
from glm5sdk.registry import Weight, op
from glm5sdk.registry.formats import cache_shape, kv_row_bytes, page_size_of

pytestmark = pytest.mark.smoke

T, H, C, R, P, S, DI, I = 2, 3, 4, 2, 5, 6, 7, 8


def paged(**changes: Any) -> dict[str, Any]:
    """Arguments of toy_paged that fit, but for the changes."""
    return {
        "q": torch.zeros(T, H, C + R), "kv_cache": torch.zeros(P, S, C + R), "index_cache": torch.zeros(P, S, DI),
        "half": torch.zeros(T, 2 * I), "iw": torch.zeros(T, DI), "page": torch.zeros(T, dtype=torch.int32),
        "v_dim": C, **changes,
    }  # fmt: skip


def test_arguments_that_fit_pass() -> None:
    out, sums, picked = toy_paged(**paged())
    assert (out.shape, sums.shape, picked.shape) == ((T, H, C), (T,), (T, I))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q": [1]}, "toy_paged: q is list, needs a tensor"),
        ({"q": torch.zeros(T, C + R)}, "toy_paged: q is (2, 6), needs a[T, H, C+R]"),
        ({"q": torch.zeros(T, H, C + R, dtype=torch.int32)}, "q is int32, needs float32, bfloat16, float16 or float64"),
        ({"half": torch.zeros(T, 2 * I, dtype=torch.bfloat16)}, "toy_paged: half is bfloat16, needs float32"),
        ({"half": torch.zeros(T, 2 * I + 1)}, "a dimension of half is 17, needs a size of the form 2*I"),
        ({"half": torch.zeros(T + 1, 2 * I)}, "axis T of half is 3, needs 2 as in the arguments before it"),
        ({"iw": torch.zeros(T, DI, dtype=torch.bfloat16)}, "iw is bfloat16, needs float32"),
        ({"page": torch.zeros(T)}, "page is float32, needs int32"),
        ({"page": torch.zeros(T, dtype=torch.int64)}, "page is int64, needs int32"),
        ({"v_dim": 99}, "a dimension of q is 6, needs a size of the form C+R"),
        ({"v_dim": -1}, "v_dim is -1, needs a size >= 0"),
        ({"v_dim": 1.5}, "v_dim is 1.5, needs a size >= 0"),
        ({"kv_cache": torch.zeros(P, S, C + R + 1)}, "kv_cache is (5, 6, 7), needs (5, 6, 6) in format 'plain'"),
        ({"kv_cache": torch.zeros(P, S)}, "kv_cache is (5, 6), needs (5, 0, 6) in format 'plain'"),
        ({"kv_cache": torch.zeros(P, S, C + R, dtype=torch.float64)}, "kv_cache is float64, needs float32"),
        ({"index_cache": torch.zeros(P, S, DI + 1)}, "index_cache is (5, 6, 8), needs (5, 6, 7) in format 'plain'"),
        ({"format": "fp9"}, "kv_cache: format is 'fp9', needs one of: plain, fp8_ds_mla"),
        ({"format": "fp8_ds_mla"}, "kv_cache is float32, needs uint8"),
        ({"iw": torch.zeros(T, DI, device="meta")}, "iw is on meta, needs cpu like the arguments before it"),
    ],
)
def test_a_broken_contract_says_what_is_and_what_is_needed(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ContractError, match=re.escape(sentence)):
        toy_paged(**paged(**changes))


def test_the_bytes_of_a_cache_row_count() -> None:
    shape = (P, S, kv_row_bytes(C, R) + 1)
    caches = {"kv_cache": torch.zeros(shape, dtype=torch.uint8), "index_cache": torch.zeros(P, S, dtype=torch.uint8)}
    with pytest.raises(ContractError, match=re.escape(f"kv_cache is {shape}, needs {(*shape[:2], shape[2] - 1)}")):
        toy_paged(**paged(**caches, format="fp8_ds_mla"))


@pytest.mark.parametrize(
    ("word", "format", "row"),
    [("kv_cache", "plain", (4, 2)), ("kv_cache", "fp8_ds_mla", (512, 64)), ("index_cache", "fp8", (7,))],
)
def test_page_sizes_are_read_off_the_shape_they_made(word: str, format: str, row: tuple[int, ...]) -> None:
    shape = cache_shape(word, format, 3, 5, *row)
    assert page_size_of(word, format, shape, *row) == 5
    assert page_size_of(word, format, (1, 2, 3, 4), *row) == 0


def test_an_fp8_row_of_glm5_has_656_bytes() -> None:
    assert kv_row_bytes(512, 64) == 656


def test_axes_are_checked_between_arguments_of_a_simple_op() -> None:
    x, y = operands(3, 4)
    with pytest.raises(ContractError, match=r"axis N of y is 5, needs 4"):
        toy_multiply(x, torch.zeros(3, 5))
    with pytest.raises(ContractError, match=r"a dimension of bias is 5, needs 4 = N"):
        toy_multiply(x, y, torch.zeros(5))


def test_a_cache_that_is_written_must_be_contiguous() -> None:
    cache = torch.zeros(4, 6)[:, ::2]
    before = cache.clone()
    with pytest.raises(
        ContractError, match=r"cache has strides \(6, 2\), needs to be contiguous because it is written"
    ):
        toy_write(torch.ones(1, 3), cache, torch.tensor([0]))
    assert torch.equal(cache, before)


def test_an_op_that_writes_refuses_gradients_and_writes_nothing() -> None:
    rows, cache = torch.ones(1, 3, requires_grad=True), torch.zeros(4, 3)
    with pytest.raises(ContractError, match=r"an input requires grad, needs none: cache is written in place"):
        toy_write(rows, cache, torch.tensor([0]))
    assert not cache.any()
    with torch.no_grad():
        toy_write(rows, cache, torch.tensor([1]))
    assert cache.sum() == 3


def test_weights_are_tensors_or_weights() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(
        ContractError, match="w is str, needs a tensor or a Weight|w is 'w', needs a tensor or a Weight"
    ):
        toy_linear(x, "w")  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="w is float64, needs float32"):
        toy_linear(x, torch.zeros(4, 3, dtype=torch.float64))
    with pytest.raises(ContractError, match=r"axis N of w is 5, needs 3"):
        toy_linear(x, Weight("plain", "plain", (4, 5), (torch.zeros(4, 5),)))
    with pytest.raises(ContractError, match=r"w is \(4,\), needs W\[O, N\]"):
        toy_linear(x, Weight("plain", "plain", (4,), (torch.zeros(4),)))
    with pytest.raises(ContractError, match="w is on meta, needs cpu"):
        toy_linear(x, Weight("plain", "plain", (4, 3), (torch.zeros(4, 3, device="meta"),)))


def test_float32_is_float64_in_a_float64_call() -> None:
    wide = paged(**{n: v.double() for n, v in paged().items() if isinstance(v, Tensor) and v.is_floating_point()})
    assert toy_paged(**wide)[1].dtype == torch.float64
    assert toy_paged(**{**wide, "iw": wide["iw"].float()})[0].dtype == torch.float64
    assert toy_float(torch.zeros(2, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(ContractError, match="x is bfloat16, needs float32"):
        toy_float(torch.zeros(2, dtype=torch.bfloat16))


def test_missing_and_unknown_arguments_name_the_op() -> None:
    x, y = operands()
    with pytest.raises(TypeError, match=r"toy_multiply\(\) missing 1 required positional argument: 'y'"):
        toy_multiply(x)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"toy_multiply\(\) got an unexpected keyword argument 'z'"):
        toy_multiply(x, y, z=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_keywords_defaults_and_empty_batches(rows: int) -> None:
    x, y = operands(rows)
    want = x * y
    assert torch.equal(toy_multiply(x, y), want)
    assert torch.equal(toy_multiply(y=y, x=x, scale=1.0), want)
    assert torch.equal(toy_multiply(x, y, None, "plain", 2.0), 2.0 * x * y)
    assert toy_cast(x, out_dtype=torch.float16).dtype == torch.float16
    assert toy_cast(x).dtype == torch.float32


def test_inputs_with_gaps_reach_the_reference_as_they_mean() -> None:
    x, y = operands(4, 4)
    assert torch.equal(toy_multiply(x.T, y.T), x.T * y.T)


def test_the_generated_source_can_be_read() -> None:
    source = toy_paged.contract.source
    assert source.startswith("def bind(q, kv_cache,")
    assert "raise errors.cache(OP, 'kv_cache'" in source
    assert toy_paged.contract.axes[:2] == ("T", "H")


def _declare(inputs: dict[str, str], **more: Any) -> None:
    def toy_refused(x: Tensor, y: Tensor, k: int) -> Tensor:
        return x

    toy_refused.__signature__ = inspect.signature(toy_refused)  # type: ignore[attr-defined]
    op(inputs=inputs, outputs={"z": "a[T]"}, rows="T", **more)(toy_refused)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"x": "a[T]", "q": "a[T]"}, "rules for ['q'], needs names among the parameters"),
        ({"x": "a[T]", "y": "a[A*B]"}, "leave axes unknown, need one more argument that names them"),
        ({"x": "a[T]", "y": "a[k]"}, "axes ['k'] are named like parameters, need names of their own"),
        ({"x": "a[T"}, "shape rule: text is 'a[T'"),
    ],
)
def test_declarations_that_cannot_work_are_refused(inputs: dict[str, str], sentence: str) -> None:
    with pytest.raises(ContractError, match=re.escape(sentence)):
        _declare(inputs)


def test_conditions_speak_of_axes() -> None:
    with pytest.raises(ContractError, match=r"names \['Q'\], needs names among T"):
        _declare({"x": "a[T]", "y": "a[T]"}, where=("Q > 0",))
