"""The wire format of a cached prefix: what one replica's cache holds of a prompt, for another one's.

    offset  bytes  what
    0       8      magic, b"\\x89GLM5KV\\n"
    8       2      version, little-endian like all that follows
    10      2      zero
    12      4      H, bytes of the header
    16      8      P, bytes of the parts
    24      H      header, JSON: weight_version, salt, geometry, tokens, rows, parts (name, dtype, shape)
    24+H    P      the parts one after another: token ids as int32, then the pages in the header's order
    24+H+P  32     BLAKE2b of all before it

A reader learns every size from the first 24 + H bytes and refuses before it makes room for anything larger than its
limit. The sum finds damage, not malice: whoever may send a prefix is trusted with the answers that follow from it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from glm5sdk.core.errors import ContractError

__all__ = ["DTYPE_BYTES", "MAGIC", "Heading", "Packer", "Part", "Prefix", "Receiver", "Refused", "pack", "unpack"]

MAGIC = b"\x89GLM5KV\n"
VERSION = 1
PRELUDE = struct.Struct("<8sHHIQ")
DIGEST = 32
MOST_HEADER = 1 << 20
MOST_PARTS = 8192
MOST_WORD = 256
MOST_TOKENS = 1 << 24
DEFAULT_LIMIT = 8 << 30
IDS = "token_ids"
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1, "int8": 1,
               "int32": 4, "int64": 8}  # fmt: skip


class Refused(ContractError):
    """These bytes are no prefix that this reader takes."""


@dataclass(frozen=True)
class Part:
    """One tensor of pages.

    Attributes:
        dtype: a name of `DTYPE_BYTES`.
        shape: sizes.
        data: its bytes, row-major, little-endian; nothing yet while a `Packer` only announces it.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview = b""

    @property
    def size(self) -> int:
        """Bytes that dtype and shape say."""
        return math.prod(self.shape) * DTYPE_BYTES.get(self.dtype, 0)


@dataclass(frozen=True)
class Prefix:
    """What travels.

    Attributes:
        token_ids: the prefix, and as many tokens behind it as a row depends on.
        rows: tokens whose rows are in the pages.
        weight_version: of the weights that computed it.
        geometry: what must be equal on both sides for the pages to mean the same; words, numbers and lists of them.
        parts: name -> tensor.
        salt: of the cache.
    """

    token_ids: Sequence[int]
    rows: int
    weight_version: str
    geometry: Mapping[str, Any]
    parts: Mapping[str, Part]
    salt: str = ""


class Packer:
    """Writes a blob whose parts come piece by piece: `front`, then every byte of the parts in order, then `end`."""

    def __init__(self, prefix: Prefix) -> None:
        """Announce.

        Args:
            prefix: the data of its parts is not looked at.

        Raises:
            Refused: the prefix breaks the format's own limits.
        """
        import msgspec

        ids = struct.pack(f"<{len(prefix.token_ids)}i", *prefix.token_ids)
        parts = {IDS: Part("int32", (len(prefix.token_ids),)), **prefix.parts}
        header = {
            "weight_version": prefix.weight_version,
            "salt": prefix.salt,
            "geometry": dict(prefix.geometry),
            "tokens": len(prefix.token_ids),
            "rows": prefix.rows,
            "parts": [{"name": n, "dtype": p.dtype, "shape": list(p.shape)} for n, p in parts.items()],
        }
        coded = msgspec.json.encode(header)
        payload = sum(part.size for part in parts.values())
        _sizes(_heading(coded), payload)
        front = PRELUDE.pack(MAGIC, VERSION, 0, len(coded), payload) + coded + ids
        self.total = PRELUDE.size + len(coded) + payload + DIGEST
        self._left = payload - len(ids)
        self._digest = blake2b(front, digest_size=DIGEST)
        self._front = front

    def front(self) -> bytes:
        """All before the pages."""
        return self._front

    def piece(self, data: bytes | bytearray | memoryview) -> bytes | bytearray | memoryview:
        """The next bytes of the parts; returned as they are."""
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        self._left -= view.nbytes
        if self._left < 0:
            raise _refuse("parts", f"{-self._left} bytes too long", "what was announced")
        self._digest.update(view)
        return data

    def end(self) -> bytes:
        """The checksum."""
        if self._left:
            raise _refuse("parts", f"{self._left} bytes short", "what was announced")
        return self._digest.digest()


def pack(prefix: Prefix) -> Iterator[bytes | bytearray | memoryview]:
    """The blob of a prefix that is all there, in pieces, without a copy of the parts.

    Raises:
        Refused: the prefix breaks the format's own limits, or a part's data its shape; before the first piece.
    """
    for name, part in prefix.parts.items():
        if memoryview(part.data).nbytes != part.size:
            raise _refuse(f"part {name}", f"{memoryview(part.data).nbytes} bytes", f"{part.size} by its shape")
    packer = Packer(prefix)

    def pieces() -> Iterator[bytes | bytearray | memoryview]:
        yield packer.front()
        for part in prefix.parts.values():
            yield packer.piece(part.data)
        yield packer.end()

    return pieces()


def unpack(blob: bytes | bytearray | memoryview, limit: int = DEFAULT_LIMIT) -> Prefix:
    """Read a whole blob.

    Args:
        blob: the bytes.
        limit: of the parts, in bytes.

    Raises:
        Refused: they are no prefix.
    """
    receiver = Receiver(limit)
    receiver.feed(blob)
    return receiver.finish()


@dataclass
class Heading:
    """The header as it was sent; its words and sizes are within the format's limits."""

    weight_version: str
    salt: str
    geometry: dict[str, bool | str | int | float | list[bool | str | int | float]]
    tokens: int
    rows: int
    parts: list[dict[str, Any]]


class Receiver:
    """Reads a blob as it arrives; makes room for the parts once, after the header was found to be sound.

    Attributes:
        heading: the header, once it is there: a caller can refuse before the pages come.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self._limit = limit
        self._digest = blake2b(digest_size=DIGEST)
        self._front = bytearray()
        self._need = PRELUDE.size
        self.heading: Heading | None = None
        self._sizes: dict[str, int] = {}
        self._parts = bytearray()
        self._filled = 0
        self._tail = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes.

        Raises:
            Refused: they cannot belong to a prefix that this reader takes.
        """
        rest = memoryview(data).cast("B")
        while self.heading is None and rest.nbytes:
            take = rest[: self._need - len(self._front)]
            self._front += take
            rest = rest[take.nbytes :]
            if len(self._front) == self._need:
                self._advance()
        if rest.nbytes and self._filled < len(self._parts):
            take = rest[: len(self._parts) - self._filled]
            self._parts[self._filled : self._filled + take.nbytes] = take
            self._filled += take.nbytes
            self._digest.update(take)
            rest = rest[take.nbytes :]
        if len(self._tail) + rest.nbytes > DIGEST:
            raise _refuse("blob", "longer than its header says", "nothing after the checksum")
        self._tail += rest

    def finish(self) -> Prefix:
        """The prefix, once every byte was fed.

        Raises:
            Refused: bytes are missing, or the checksum is wrong.
        """
        if self.heading is None or self._filled < len(self._parts) or len(self._tail) < DIGEST:
            raise _refuse("blob", "cut short", "all that its header says")
        if self._digest.digest() != bytes(self._tail):
            raise _refuse("checksum", self._tail.hex()[:16] + "...", "that of the bytes before it")
        whole, offset, parts = memoryview(self._parts), 0, {}
        for entry, (name, size) in zip(self.heading.parts, self._sizes.items(), strict=True):
            parts[name] = Part(entry["dtype"], tuple(entry["shape"]), whole[offset : offset + size])
            offset += size
        ids = struct.unpack(f"<{self.heading.tokens}i", parts.pop(IDS).data)
        if ids and min(ids) < 0:
            raise _refuse("token id", str(min(ids)), "at least 0")
        said = self.heading
        return Prefix(ids, said.rows, said.weight_version, said.geometry, parts, said.salt)

    def _advance(self) -> None:
        magic, version, zero, length, payload = PRELUDE.unpack_from(self._front)
        if self._need == PRELUDE.size:
            if magic != MAGIC or zero:
                raise _refuse("magic", repr(bytes(magic)), repr(MAGIC))
            if version != VERSION:
                raise _refuse("version", str(version), str(VERSION))
            if not 2 <= length <= MOST_HEADER:
                raise _refuse("header", f"{length} bytes", f"at most {MOST_HEADER}")
            if payload > self._limit:
                raise _refuse("parts", f"{payload} bytes", f"at most {self._limit}")
            self._need += length
            return
        header = _heading(bytes(self._front[PRELUDE.size :]))
        self._sizes = _sizes(header, payload)
        self._digest.update(self._front)
        self.heading, self._parts = header, bytearray(payload)


def _heading(coded: bytes) -> Heading:
    import msgspec

    if len(coded) > MOST_HEADER:
        raise _refuse("header", f"{len(coded)} bytes", f"at most {MOST_HEADER}")
    try:
        header = msgspec.json.decode(coded, type=Heading)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _refuse("header", f"unreadable ({error})", "JSON of the known fields") from error
    values = [v for value in header.geometry.values() for v in (value if isinstance(value, list) else [value])]
    words = [header.weight_version, *header.geometry, *(v for v in values if isinstance(v, str))]
    if len(values) > 4096 or any(len(word) > MOST_WORD for word in words) or len(header.salt) > 4096:
        raise _refuse("header", "larger than any real one", f"words of at most {MOST_WORD} characters")
    if not 0 <= header.rows <= header.tokens <= MOST_TOKENS:
        raise _refuse("rows, tokens", f"{header.rows}, {header.tokens}", f"0 <= rows <= tokens <= {MOST_TOKENS}")
    return header


def _sizes(header: Heading, payload: int) -> dict[str, int]:
    """Bytes of each part; what the header says must be consistent in itself."""
    if len(header.parts) > MOST_PARTS:
        raise _refuse("parts", str(len(header.parts)), f"at most {MOST_PARTS}")
    sizes: dict[str, int] = {}
    for entry in header.parts:
        name, dtype, shape = entry.get("name"), entry.get("dtype"), entry.get("shape")
        if not isinstance(name, str) or not 0 < len(name) <= MOST_WORD or name in sizes or len(entry) != 3:
            raise _refuse("part", repr(entry)[:80], "a name of its own, a dtype and a shape")
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            raise _refuse(f"part {name}", f"of dtype {dtype!r}", f"one of {', '.join(DTYPE_BYTES)}")
        if not isinstance(shape, list) or len(shape) > 8 or not all(type(n) is int and 0 <= n < 2**48 for n in shape):
            raise _refuse(f"part {name}", f"of shape {shape!r}"[:80], "at most 8 sizes")
        sizes[name] = math.prod(shape) * DTYPE_BYTES[dtype]
    first = header.parts[0] if header.parts else {}
    if first != {"name": IDS, "dtype": "int32", "shape": [header.tokens]}:
        raise _refuse("first part", repr(first)[:80], f"{IDS}, int32[{header.tokens}]")
    if sum(sizes.values()) != payload:
        raise _refuse("parts", f"{payload} bytes", f"{sum(sizes.values())} by their shapes")
    return sizes


def _refuse(what: str, got: str, want: str) -> Refused:
    return Refused(f"prefix transfer: {what} is {got}, needs {want}")
