"""The wire format of a prefix: whole round trips, and nothing else gets in."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5sdk.serve.transfer import MAGIC, Packer, Part, Prefix, Receiver, Refused, pack, unpack

steady = settings(derandomize=True, deadline=None)  # other work on the machine is no failure

GEOMETRY = {"page_size": 4, "kv": "bfloat16", "index_layers": [True, False], "scale": 0.5}


def prefix(seed: int = 0, tokens: int = 8) -> Prefix:
    rng = random.Random(seed)
    parts = {
        "kv.0": Part("bfloat16", (tokens, 3), rng.randbytes(tokens * 6)),
        "index.0": Part("uint8", (tokens // 4, 5), rng.randbytes(tokens // 4 * 5)),
        "empty": Part("float32", (0, 7), b""),
    }
    return Prefix([rng.randrange(2**31) for _ in range(tokens)], tokens - bool(tokens), "v1", GEOMETRY, parts, "salt")


def blob(seed: int = 0) -> bytes:
    return b"".join(pack(prefix(seed)))


@steady
@given(st.integers(0, 2**32), st.integers(0, 40), st.integers(1, 200))
def test_round_trip_in_any_pieces(seed: int, tokens: int, piece: int) -> None:
    sent = prefix(seed, tokens)
    data = b"".join(pack(sent))
    receiver = Receiver()
    for start in range(0, len(data), piece):
        receiver.feed(data[start : start + piece])
    got = receiver.finish()
    assert list(got.token_ids) == list(sent.token_ids)
    assert (got.rows, got.weight_version, got.salt, got.geometry) == (sent.rows, "v1", "salt", GEOMETRY)
    assert {n: (p.dtype, p.shape, bytes(p.data)) for n, p in got.parts.items()} == {
        n: (p.dtype, p.shape, p.data) for n, p in sent.parts.items()
    }


@steady
@given(st.integers(0, 2**32))
def test_any_damage_is_found(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(blob())
    how = rng.randrange(3)
    if how == 0:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == 1:
        del data[rng.randrange(len(data)) :]
    else:
        data += rng.randbytes(rng.randrange(1, 50))
    with pytest.raises(Refused):
        unpack(data)


@steady
@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    for data in (noise, MAGIC + noise, MAGIC + b"\1\0\0\0" + noise):
        with pytest.raises(Refused):
            unpack(data)


def forged(payload: bytes = b"", length: int | None = None, **changes: Any) -> bytes:
    """A blob with a right checksum whose header says what the test wants."""
    header = {"weight_version": "v", "salt": "", "geometry": {}, "tokens": 0, "rows": 0,
              "parts": [{"name": "token_ids", "dtype": "int32", "shape": [0]}]} | changes  # fmt: skip
    coded = json.dumps(header).encode()
    front = struct.pack("<8sHHIQ", MAGIC, 1, 0, len(coded), len(payload) if length is None else length) + coded
    return front + payload + blake2b(front + payload, digest_size=32).digest()


IDS = {"name": "token_ids", "dtype": "int32", "shape": [0]}


def test_the_forger_can_also_write_a_sound_one() -> None:
    assert unpack(forged()).token_ids == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": -1}, "tokens is 0, -1"),
        ({"tokens": 2**40}, "tokens is"),
        ({"rows": 1}, "tokens is 1, 0"),
        ({"tokens": 1}, "first part"),
        ({"tokens": 1.5}, "header is unreadable"),
        ({"parts": []}, "first part"),
        ({"parts": [IDS, IDS]}, "a name of its own"),
        ({"parts": [IDS, {**IDS, "name": ""}]}, "a name of its own"),
        ({"parts": [IDS, {**IDS, "name": "a", "more": 1}]}, "a name of its own"),
        ({"parts": [IDS, {"name": "a", "dtype": "object", "shape": [1]}]}, "of dtype"),
        ({"parts": [IDS, {"name": "a", "dtype": "int8", "shape": [-1]}]}, "of shape"),
        ({"parts": [IDS, {"name": "a", "dtype": "int8", "shape": [True]}]}, "of shape"),
        ({"parts": [IDS, {"name": "a", "dtype": "int8", "shape": [2**60]}]}, "of shape"),
        ({"parts": [IDS, {"name": "a", "dtype": "int8", "shape": [1] * 9}]}, "of shape"),
        ({"parts": [IDS, {"name": "a", "dtype": "int8", "shape": [2**47, 2**47]}]}, "by their shapes"),
        ({"parts": [IDS, {"name": "a", "dtype": "int8", "shape": [1]}]}, "by their shapes"),
        ({"parts": [IDS] * 9000}, "at most 8192"),
        ({"weight_version": "v" * 1000}, "larger than any real one"),
        ({"geometry": {str(i): i for i in range(5000)}}, "larger than any real one"),
        ({"geometry": {"a": [[1]]}}, "header is unreadable"),
        ({"geometry": {"a": None}}, "header is unreadable"),
        ({"geometry": {"a": [0] * 5000}}, "larger than any real one"),
        ({"salt": None}, "header is unreadable"),
        ({"length": 2**62}, "at most"),
    ],
)
def test_hostile_headers(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        unpack(forged(**changes))


def test_negative_token_ids_are_refused() -> None:
    parts = [{**IDS, "shape": [1]}]
    with pytest.raises(Refused, match="token id is -1"):
        unpack(forged(struct.pack("<i", -1), tokens=1, parts=parts))


def test_nothing_large_is_made_for_what_is_only_announced() -> None:
    parts = [IDS, {"name": "a", "dtype": "int8", "shape": [2**34]}]
    tracemalloc.start()
    try:
        receiver = Receiver(limit=2**20)
        with pytest.raises(Refused, match="at most 1048576"):
            receiver.feed(forged(length=2**34, parts=parts))
        header = struct.pack("<8sHHIQ", MAGIC, 1, 0, 2**32 - 1, 0)
        with pytest.raises(Refused, match="header is 4294967295 bytes"):
            unpack(header)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_the_heading_comes_before_the_pages() -> None:
    data, receiver = blob(), Receiver()
    receiver.feed(data[:24])
    assert receiver.heading is None
    receiver.feed(data[24:-40])
    assert receiver.heading is not None
    assert (receiver.heading.weight_version, receiver.heading.rows) == ("v1", 7)


def test_a_sender_that_lies_to_itself_is_refused() -> None:
    lies = {"a": Part("int8", (4,), b"abc"), "b": Part("int8", (1,), b"xy")}
    with pytest.raises(Refused, match="part a is 3 bytes, needs 4 by its shape"):
        pack(Prefix([], 0, "v", {}, lies))
    packer = Packer(Prefix([], 0, "v", {}, lies))
    packer.piece(b"1234")
    with pytest.raises(Refused, match="1 bytes short"):
        packer.end()
    with pytest.raises(Refused, match="1 bytes too long"):
        packer.piece(b"56")


def test_pieces_make_the_same_blob() -> None:
    sent = prefix()
    packer = Packer(sent)
    data = bytes(packer.front())
    for part in sent.parts.values():
        for start in range(0, len(part.data), 5):
            data += packer.piece(part.data[start : start + 5])
    data += packer.end()
    assert data == blob()
    assert packer.total == len(data)
