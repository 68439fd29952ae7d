"""cache_index_keys: which rows are written, and the page layout of the fp8 format."""

from __future__ import annotations

import struct

import pytest
import torch
from attention_oracle import normal

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.ops._cache import read_index_rows


def test_plain_rows_land_in_their_slots() -> None:
    rows = normal(3, 4, seed=1, dtype=torch.float32)
    cache = torch.full((2, 3, 4), 7.0)
    ops.cache_index_keys.reference(rows, cache, torch.tensor([4, -1, 1]), "plain")
    want = torch.full((6, 4), 7.0)
    want[4], want[1] = rows[0], rows[2]
    assert torch.equal(cache.view(6, 4), want)


@pytest.mark.parametrize(
    ("dim", "size", "dtype"), [(128, 64, torch.bfloat16), (5, 3, torch.float32), (6, 1, torch.float32)]
)
def test_fp8_page_is_all_bytes_then_all_scales(dim: int, size: int, dtype: torch.dtype) -> None:
    rows = normal(2, dim, seed=2, dtype=dtype) * 5
    cache = torch.full((3, size * (dim + 4)), 255, dtype=torch.uint8)
    places = [(2, size - 1), (0, 0)]
    ops.cache_index_keys.reference(rows, cache, torch.tensor([p * size + o for p, o in places]), "fp8")
    want = torch.full((3, size * (dim + 4)), 255, dtype=torch.uint8)
    for row, (page, offset) in zip(rows.float(), places, strict=True):
        scale = row.abs().max() / 448
        codes = (row / scale).to(torch.float8_e4m3fn).view(torch.uint8)
        want[page, offset * dim : (offset + 1) * dim] = codes
        at = size * dim + 4 * offset
        want[page, at : at + 4] = torch.tensor(list(struct.pack("<f", float(scale))), dtype=torch.uint8)
        read = read_index_rows(cache, torch.tensor([page * size + offset]), dim, "fp8", torch.float64)[0]
        assert torch.equal(read, codes.view(torch.float8_e4m3fn).double() * scale.double())
        assert (read - row.double()).abs().max() <= row.abs().max() / 448 * 16  # half a step of the top binade
    assert torch.equal(cache, want)


def test_bad_slots_raise_before_anything_is_written() -> None:
    cache = torch.zeros(2, 3 * (4 + 4), dtype=torch.uint8)
    for slots in ([6, 0], [0, -2], [3, 3]):
        with pytest.raises(ContractError, match="slot"):
            ops.cache_index_keys.reference(torch.ones(2, 4), cache, torch.tensor(slots), "fp8")
    assert (cache == 0).all()


def test_no_rows() -> None:
    ops.cache_index_keys.reference(torch.ones(0, 4), torch.zeros(1, 8, dtype=torch.uint8), torch.zeros(0).long(), "fp8")
