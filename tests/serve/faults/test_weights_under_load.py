"""Weights that are changed, well and badly, while requests run: each answer is that of the version it names."""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import Said, ask, stream
from real_server import Offline, RealServer, save_model, serving, until


@pytest.fixture(scope="module")
def mutable(fault_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server whose weights may be changed."""
    log = tmp_path_factory.mktemp("mutable") / "log"
    with serving(fault_model, log, "--num-pages", "128", "--max-num-seqs", "8") as running:
        yield running


def tensors(folder: Path) -> tuple[Path, dict[str, Any], bytes]:
    """The file of a checkpoint, its header, and its data."""
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return file, json.loads(raw[8 : 8 + length]), raw[8 + length :]


def rewrite(folder: Path, header: dict[str, Any], data: bytes) -> None:
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)


def first_of(header: dict[str, Any], rank: int) -> str:
    return next(n for n, entry in header.items() if n != "__metadata__" and len(entry["shape"]) == rank)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def cut_the_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def huge_header(folder: Path) -> None:
    _, header, data = tensors(folder)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + json.dumps(header).encode() + data)


def not_a_number(folder: Path) -> None:
    _, header, data = tensors(folder)
    begin, end = header[first_of(header, 2)]["data_offsets"]
    assert header[first_of(header, 2)]["dtype"] == "F32"
    wrong = np.frombuffer(data, dtype=np.uint8).copy()
    wrong[begin:end].view(np.float32)[3] = np.nan
    rewrite(folder, header, wrong.tobytes())


def other_shape(folder: Path) -> None:
    _, header, data = tensors(folder)
    entry = header[first_of(header, 2)]
    rows, columns = entry["shape"]
    entry["shape"] = [rows * columns]
    rewrite(folder, header, data)


def another_name(folder: Path) -> None:
    _, header, data = tensors(folder)
    header["model.nonsense.weight"] = header.pop(first_of(header, 1))
    rewrite(folder, header, data)


def overlapping(folder: Path) -> None:
    _, header, data = tensors(folder)
    names = [n for n, e in header.items() if n != "__metadata__" and len(e["shape"]) == 1]
    pair = next((a, b) for a in names for b in names if a < b and header[a]["shape"] == header[b]["shape"])
    header[pair[0]]["data_offsets"] = header[pair[1]]["data_offsets"]
    rewrite(folder, header, data)


def other_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 2 * config["hidden_size"]}))


def a_link_to_nowhere(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "none")


DAMAGES: list[Callable[[Path], None]] = [
    truncate, cut_the_header, huge_header, not_a_number, other_shape, another_name, overlapping, other_config,
    a_link_to_nowhere,
]  # fmt: skip


def test_damaged_checkpoints(mutable: RealServer, fault_model: Path, offline: Offline, tmp_path: Path) -> None:
    """Each is refused in words while requests run; those and later ones get the old weights' tokens."""
    version = mutable.stats()["weight_version"]

    async def refused(client, command: str, arguments: dict[str, Any]) -> str:
        answer = await client.post(f"/admin/{command}", json=arguments)
        assert 400 <= answer.status_code < 500, (command, str(arguments)[:200], answer.text[:500])
        message = answer.json()["error"]["message"]
        assert message and len(answer.content) < 4000
        return message

    async def run() -> None:
        async with mutable.async_client() as client:
            running = [asyncio.create_task((ask if i % 2 else stream)(client, i, 200)) for i in range(4)]
            for damage in DAMAGES:
                folder = tmp_path / damage.__name__
                shutil.copytree(fault_model, folder)
                damage(folder)
                assert folder.name in await refused(client, "update_weights", {"path": str(folder), "version": "bad"})
            (tmp_path / "empty").mkdir()
            paths: list[Any] = [
                "/nowhere", "", "../../../../etc", "/etc/passwd", "/dev/zero", "/proc/self/mem", "x\x00y", "a" * 10_000,
                str(tmp_path / "empty"), 5, None, ["x"], {}, "http://example.invalid/x",
            ]  # fmt: skip
            for path in paths:
                for command in ("update_weights", "swap_experts"):
                    await refused(client, command, {"path": path})
                await refused(client, "load_adapter", {"name": "a", "path": path})
            for arguments in ({}, {"path": "x", "more": 1}, {"path": str(fault_model), "version": 5}):
                await refused(client, "update_weights", arguments)
            for name in ("", "model", "../x", 5):
                await refused(client, "unload_adapter", {"name": name})
            for body in ({"command": "nonsense"}, {"command": "__init__"}, {"command": 5}, {}):
                await refused(client, "control", body)
            for said in await asyncio.gather(*running):
                assert said.how == "done" and said.tokens == offline.tokens(said.number, 200), said
            said = await ask(client, 50)
            assert said.tokens == offline.tokens(50) and said.version == version

    asyncio.run(run())
    assert mutable.stats()["weight_version"] == version
    assert until(mutable.at_rest)


def test_updates_while_requests_run(mutable: RealServer, fault_model: Path, offline: Offline, tmp_path: Path) -> None:
    """A dozen updates between two models: an answer's tokens are the offline ones of the version it reports."""
    other = save_model(tmp_path / "other", seed=1)
    first = mutable.stats()["weight_version"]
    oracles = {"odd": Offline(other), "even": offline}

    async def run() -> list[Said]:
        answers: list[Said] = []
        async with mutable.async_client() as client:
            done = False

            async def keep_asking(number: int) -> None:
                while not done:
                    answers.append(await (ask if number % 2 else stream)(client, number, 12))

            asking = asyncio.gather(*(keep_asking(i) for i in range(8)))
            for turn in range(12):
                path, kind = (fault_model, "even") if turn % 2 else (other, "odd")
                answer = await client.post(
                    "/admin/update_weights", json={"path": str(path), "version": f"{kind}-{turn}"}
                )
                assert answer.status_code == 200, answer.text
                assert answer.json()["weight_version"] == f"{kind}-{turn}"
                late = await ask(client, 90 + turn, 6)
                assert late.version == f"{kind}-{turn}", "a request after the answer gets the new weights"
                answers.append(late)
            done = True
            await asking
        return answers

    answers = asyncio.run(run())
    kinds = set()
    for said in answers:
        kind = "even" if said.version == first else said.version.partition("-")[0]
        assert said.how == "done" and said.tokens == oracles[kind].tokens(said.number, said.asked), said
        kinds.add(said.version)
    assert len(kinds) >= 12
    assert until(mutable.at_rest), mutable.stats()
