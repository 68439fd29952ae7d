"""Health, retry budget, owners and whole events: small machines with a clock that the test turns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.router.budget import RetryBudget
from glm5sdk.serve.router.events import WholeEvents
from glm5sdk.serve.router.health import Health, HealthRules
from glm5sdk.serve.router.owners import OwnerTable
from glm5sdk.serve.router.settings import RouterSettings

steady = settings(derandomize=True, deadline=None)  # other work on the machine is no failure


def test_health_falls_and_rises() -> None:
    health = Health(HealthRules(interval=10, fall=3, rise=2, first_recheck=1))
    assert not health.up
    assert health.passed()  # the first check decides
    assert [health.failed("x") for _ in range(2)] == [False, False]
    assert not health.passed()  # a good one between starts the count anew
    assert [health.failed("x") for _ in range(3)] == [False, False, True]
    assert (health.up, health.reason, health.ejections) == (False, "x", 1)
    assert [health.next_check() for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    assert [health.passed() for _ in range(2)] == [False, True]
    assert health.next_check() == 10
    assert health.eject("gone")
    assert not health.eject("gone")
    assert health.next_check() == 1


@pytest.mark.parametrize("wrong", [{"interval": 0}, {"timeout": float("inf")}, {"fall": 0}, {"rise": 0}])
def test_health_rules_are_judged(wrong: dict[str, float]) -> None:
    with pytest.raises(ContractError):
        HealthRules(**wrong)


@steady
@given(st.lists(st.one_of(st.just("deposit"), st.just("withdraw"), st.floats(0, 5)), max_size=200))
def test_budget_never_pays_more_than_came_in(steps: list[str | float]) -> None:
    now, came, spent = 0.0, 10.0, 0
    budget = RetryBudget(0.25, 0.5, 10.0, clock=lambda: now)
    for step in steps:
        if step == "deposit":
            budget.deposit()
            came += 0.25
        elif step == "withdraw":
            spent += budget.withdraw()
        else:
            now += float(step)
            came += 0.5 * float(step)
        assert spent <= came + 1e-9


def test_budget_refills_to_its_bound() -> None:
    now = 0.0
    budget = RetryBudget(0.5, 1.0, 3.0, clock=lambda: now)
    assert [budget.withdraw() for _ in range(4)] == [True, True, True, False]
    now = 100.0
    assert [budget.withdraw() for _ in range(4)] == [True, True, True, False]
    budget.deposit()
    assert not budget.withdraw()
    budget.deposit()
    assert budget.withdraw()


@steady
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.booleans()), max_size=40))
def test_owners_swap_once(steps: list[tuple[str, str, bool]]) -> None:
    """Each step holds an owner it read earlier or reads it now; only one of two swaps from the same view succeeds."""
    table, old = OwnerTable(10), {"a": None, "b": None}
    versions = []
    for session, replica, stale in steps:
        current = table.get(session)
        expected = old[session] if stale else current
        new = table.swap(session, expected, replica)
        assert (new is not None) == (expected == current)
        assert table.get(session) == (new or current)
        if new is not None:
            versions.append(new.version)
            old[session] = current
    assert versions == sorted(set(versions))


def test_owners_are_bounded_and_forgotten() -> None:
    table = OwnerTable(3)
    stale = table.swap("0", None, "r")
    for name in "123":
        table.swap(name, None, "r" if name == "1" else "q")
    assert table.get("0") is None
    assert table.swap("0", stale, "x") is None
    assert table.forget("q") == 2
    assert (len(table), table.get("2")) == (1, None)


lines = st.text("ab", min_size=1, max_size=8).map(str.encode)


@steady
@given(st.lists(lines, max_size=6), st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"]), lines, st.randoms())
def test_only_whole_events_come_out(data: list[bytes], end: bytes, half: bytes, rng: object) -> None:
    stream = b"".join(b"data: " + d + end for d in data)
    whole, out, sent = WholeEvents(), b"", stream + half
    while sent:
        cut = rng.randint(1, len(sent))  # type: ignore[attr-defined]
        out += whole.feed(sent[:cut])
        sent = sent[cut:]
        assert out == b"" or out.endswith(end)
    assert out == stream
    assert whole.rest == len(half)


def test_an_endless_event_is_refused() -> None:
    whole = WholeEvents(largest=10)
    with pytest.raises(ValueError, match="over 10 bytes"):
        whole.feed(b"x" * 11)


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicas": ("http://a:1", "http://a:1/")},
        {"replicas": ("http://a:1",), "prefill": ("http://a:1",), "admin_key": "k"},
        {"prefill": ("http://a:1",)},
        {"migrate": True},
        {"api_keys": ("",)},
        {"admin_key": ""},
        {"max_in_flight": 0},
        {"max_retries": -1},
        {"lease_ttl": 0},
    ],
)
def test_settings_are_judged(wrong: dict[str, object]) -> None:
    with pytest.raises(ContractError):
        RouterSettings(**wrong)  # type: ignore[arg-type]
