"""concat_and_cache_mla: which rows are written, and the bytes of the fp8 row."""

from __future__ import annotations

import struct

import pytest
import torch
from attention_oracle import normal

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.ops._cache import read_kv_rows
from glm5sdk.registry.formats import kv_row_bytes


def e4m3(byte: int) -> float:
    """The value of an e4m3fn byte, by its definition."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def nearest_e4m3(value: float) -> float:
    """The closest e4m3fn value, ties to the even byte."""
    return e4m3(min((b for b in range(256) if b & 0x7F != 0x7F), key=lambda b: (abs(e4m3(b) - value), b & 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_rows_land_in_their_slots(dtype: torch.dtype) -> None:
    rows = normal(4, 5, seed=1, dtype=dtype)
    cache = torch.full((3, 2, 5), 7.0, dtype=dtype)
    ops.concat_and_cache_mla.reference(rows, cache, torch.tensor([5, -1, 0, 2]), 3, "plain")
    want = torch.full((6, 5), 7.0, dtype=dtype)
    want[5], want[0], want[2] = rows[0], rows[2], rows[3]
    assert torch.equal(cache.view(6, 5), want)


def test_glm5_row_has_656_bytes() -> None:
    assert kv_row_bytes(512, 64) == 656


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (130, 6), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_row_byte_by_byte(latent: int, rope: int, dtype: torch.dtype) -> None:
    groups = -(-latent // 128)
    row = (normal(1, latent + rope, seed=2) * 3).to(dtype)
    row[0, 0] = 0.0
    cache = torch.full((2, 2, kv_row_bytes(latent, rope)), 255, dtype=torch.uint8)
    ops.concat_and_cache_mla.reference(row, cache, torch.tensor([2]), latent, "fp8_ds_mla")
    assert (cache.view(4, -1)[[0, 1, 3]] == 255).all()
    data = bytes(cache[1, 0].tolist())
    scales = struct.unpack(f"<{groups}f", data[latent : latent + 4 * groups])
    for group in range(groups):
        part = row[0, 128 * group : min(128 * (group + 1), latent)].float()
        scale = float(part.abs().max() / torch.tensor(448.0))
        assert scales[group] == scale
        for i, value in enumerate(part):
            quotient = float(value / torch.tensor(scale))  # float32, as the format says
            assert e4m3(data[128 * group + i]) == nearest_e4m3(quotient)
    stored = torch.frombuffer(bytearray(data[latent + 4 * groups :]), dtype=torch.bfloat16)
    assert torch.equal(stored, row[0, latent:].bfloat16())


def test_scales_are_not_powers_of_two_and_zero_rows_have_one() -> None:
    rows = torch.stack([torch.full((128,), 3.0), torch.zeros(128)])
    cache = torch.zeros(1, 2, kv_row_bytes(128, 0), dtype=torch.uint8)
    ops.concat_and_cache_mla.reference(rows, cache, torch.tensor([0, 1]), 128, "fp8_ds_mla")
    scales = cache[0, :, 128:].clone().view(torch.float32)[:, 0]
    assert scales.tolist() == [float(torch.tensor(3.0) / 448), float(torch.tensor(1e-4) / 448)]
    assert torch.equal(read_kv_rows(cache, torch.tensor([0, 1]), 128, "fp8_ds_mla", torch.float64)[1], rows[1].double())


def test_reading_multiplies_by_any_positive_scale() -> None:
    cache = torch.zeros(1, 1, kv_row_bytes(2, 2), dtype=torch.uint8)
    cache[0, 0] = torch.tensor([*struct.pack("<BBf", 0x38, 0xC0, 0.3), *struct.pack("<HH", 0x3F80, 0xBF80)])
    got = read_kv_rows(cache, torch.tensor([0]), 2, "fp8_ds_mla", torch.float64)
    scale = struct.unpack("<f", struct.pack("<f", 0.3))[0]
    assert got[0].tolist() == [scale, -2 * scale, 1.0, -1.0]


@pytest.mark.parametrize(
    ("slots", "words"), [([6, 0], r"slots\[0\] is 6"), ([0, -2], r"slots\[1\] is -2"), ([1, 1], "2 times")]
)
def test_bad_slots_raise_before_anything_is_written(slots: list[int], words: str) -> None:
    cache = torch.zeros(3, 2, 5)
    with pytest.raises(ContractError, match=words):
        ops.concat_and_cache_mla.reference(torch.ones(2, 5), cache, torch.tensor(slots), 3, "plain")
    assert (cache == 0).all()


def test_inference_only() -> None:
    with pytest.raises(ContractError, match="written in place"):
        ops.concat_and_cache_mla(torch.ones(1, 5, requires_grad=True), torch.zeros(1, 1, 5), torch.tensor([0]), 3)


def test_no_rows() -> None:
    for format, shape, dtype in (("plain", (1, 1, 5), torch.float32), ("fp8_ds_mla", (1, 1, 11), torch.uint8)):
        ops.concat_and_cache_mla.reference(
            torch.ones(0, 5), torch.zeros(shape, dtype=dtype), torch.zeros(0).long(), 3, format
        )
