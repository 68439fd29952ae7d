"""Ceilings by instruction level: which rate a kernel is compared with, and that the CPU backend measures its own."""

from __future__ import annotations

from typing import Any

import pytest

from glm5sdk.core.errors import ContractError, UnavailableError
from glm5sdk.perf import Ceilings, achieved, measure_ceilings
from glm5sdk.registry import Cost, Device, Impl, backends, register_backend, unregister_backend

LEVELS = ("baseline", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
CEILINGS = Ceilings(
    1e9,
    LEVELS,
    {
        "baseline": {"f32": 1.0},
        "avx2": {"f32": 2.0},
        "avx512": {"f32": 4.0},
        "avx512_vnni": {"f32": 4.0, "int8": 16.0},
        "avx512_bf16": {"f32": 4.0, "bf16": 8.0, "int8": 16.0},
        "amx": {"f32": 4.0, "bf16": 64.0, "int8": 128.0},
    },
    2,
)


@pytest.mark.parametrize(
    ("level", "dtype", "rate"),
    [
        ("amx", "bf16", 64.0),
        ("avx512_bf16", "bf16", 8.0),
        ("avx512_vnni", "bf16", 4.0),
        ("avx512", "bf16", 4.0),
        ("avx2", "int8", 2.0),
        ("avx512_vnni", "int8", 16.0),
        ("amx", "f32", 4.0),
        ("amx", "f16", 4.0),
        ("baseline", "f32", 1.0),
    ],
)
def test_a_level_is_compared_with_the_instruction_it_has(level: str, dtype: str, rate: float) -> None:
    assert CEILINGS.flops_of(level, dtype) == rate
    assert CEILINGS.peaks_of(level, dtype).flops_of(dtype) == rate


def test_a_level_that_was_not_measured_takes_the_one_below() -> None:
    partial = Ceilings(1e9, LEVELS, {"baseline": {"f32": 1.0}, "avx512": {"f32": 4.0}}, 1)
    assert [partial.flops_of(level, "bf16") for level in LEVELS] == [1.0, 1.0, 4.0, 4.0, 4.0, 4.0]


def test_of_two_measurements_the_higher_rate_counts() -> None:
    one = Ceilings(2.0, LEVELS, {"baseline": {"f32": 1.0}, "amx": {"f32": 5.0, "bf16": 9.0}}, 2)
    other = Ceilings(3.0, LEVELS, {"baseline": {"f32": 4.0}, "amx": {"f32": 3.0}}, 2)
    assert one.best_with(other).to_dict() == {
        "bandwidth": 3.0, "flops": {"baseline": {"f32": 4.0}, "amx": {"f32": 5.0, "bf16": 9.0}}, "threads": 2,
    }  # fmt: skip


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(ContractError, match=r"ceilings: level is 'sse9', needs one of baseline, avx2"):
        CEILINGS.flops_of("sse9", "f32")
    with pytest.raises(ContractError, match="nothing was measured for bf16 at or below avx2"):
        Ceilings(1e9, LEVELS, {"amx": {"bf16": 1.0}}, 1).flops_of("avx2", "bf16")
    with pytest.raises(UnavailableError, match="ceilings: backend nowhere is not installed"):
        measure_ceilings("nowhere")


class Plain:
    """A backend that measures nothing, or what a test gives it."""

    name, api_version, levels, automatic = "plain", 1, ("low", "high"), False

    def probe(self) -> Device:
        return Device("cpu", "nothing")

    def impls(self) -> list[Impl]:
        return []


class Measured(Plain):
    name = "measured"

    def peaks(self, seconds: float, read_bytes: int) -> dict[str, Any]:
        return {"bandwidth": float(read_bytes), "flops": {"low": {"f32": seconds}, "high": {"bf16": 9.0}}}


@pytest.fixture
def registered() -> Any:
    for backend in (Plain(), Measured()):
        register_backend(backend)
    yield
    for name in ("plain", "measured"):
        unregister_backend(name)


@pytest.mark.usefixtures("registered")
def test_a_backend_measures_its_own() -> None:
    with pytest.raises(UnavailableError, match="backend plain is without a way to measure them"):
        measure_ceilings("plain")
    found = measure_ceilings("measured", 0.5, 1000)
    assert found.to_dict() == {"bandwidth": 1000.0, "flops": {"low": {"f32": 0.5}, "high": {"bf16": 9.0}}, "threads": 1}
    assert achieved(Cost(18.0, 0, 0), 4.0, found.peaks_of("high", "bf16"), "f32").share == pytest.approx(0.5)


def test_the_cpu_backend_reaches_something_at_every_level_it_has() -> None:
    cpu = backends().get("cpu")
    if cpu is None or cpu.reason:
        pytest.skip("the CPU backend is not here")
    found = measure_ceilings("cpu", seconds=0.002, read_bytes=1 << 22)
    assert list(found.flops) == list(cpu.levels[: len(found.flops)])
    assert found.bandwidth > 1e7
    assert all(rate > 1e7 for rates in found.flops.values() for rate in rates.values())
    assert all("f32" in rates for rates in found.flops.values())
    for level, kinds in (("avx512_vnni", {"int8"}), ("avx512_bf16", {"bf16", "int8"}), ("amx", {"bf16", "int8"})):
        if level in found.flops:
            assert kinds <= set(found.flops[level])


def test_the_native_probes_refuse_what_they_cannot_measure() -> None:
    native = pytest.importorskip("glm5sdk_cpu._C")
    for arguments, message in (((0, 1), "bytes is 0"), ((1, 0), "repeats is 0")):
        with pytest.raises(ContractError, match=f"probe_read: {message}, needs 1 or more"):
            native.probe_read(*arguments)
    for arguments, message in (
        ((9, 0, 0.01), "level is 9, needs 0 to"),
        ((-1, 0, 0.01), "level is -1"),
        ((0, 3, 0.01), "product is 3, needs 0, 1 or 2"),
        ((0, 0, 0.0), "seconds is 0.0"),
    ):
        with pytest.raises(ContractError, match=message):
            native.probe_product(*arguments)
