"""Handoffs under crashes, time-outs, lost, doubled and reordered messages: one owner, no pinned page, right tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from fake_cache import FakeCache, next_token
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.router.handoff import Action, Do, Handoff, Outcome, State
from glm5sdk.serve.router.owners import OwnerTable

TTL, TIMEOUT = 8.0, 5.0
NAMES = ("a", "b", "c")
SESSIONS = ("s", "t")


@dataclass
class Letter:
    """A message under way: an action to a replica, or a replica's answer to a handoff."""

    number: int
    action: Action | None = None
    answer: tuple[str, tuple[object, ...]] = ("", ())


class Network(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.engines = {name: FakeCache(12, lambda: self.now) for name in NAMES}
        self.owners = OwnerTable(10)
        self.prompts: dict[str, list[int]] = {name: list(range(ord(name), ord(name) + 9)) for name in SESSIONS}
        self.handoffs: dict[int, Handoff] = {}
        self.started: dict[int, str] = {}
        self.blobs: dict[tuple[int, str], bytes] = {}
        self.letters: list[Letter] = []

    def post(self, number: int, actions: list[Action]) -> None:
        self.letters += [Letter(number, action) for action in actions]

    @rule(session=st.sampled_from(SESSIONS), name=st.sampled_from(NAMES), grow=st.booleans())
    def request(self, session: str, name: str, grow: bool) -> None:
        """A request of the session runs on a replica; its token must be the one that its weights say."""
        if grow:
            self.prompts[session].append(len(self.prompts[session]) % 7)
        engine, tokens = self.engines[name], self.prompts[session]
        assert engine.generate(tokens, session) == next_token(engine.version, session, tokens)
        if self.owners.get(session) is None:
            self.owners.swap(session, None, name)

    @rule(session=st.sampled_from(SESSIONS), goal=st.sampled_from(NAMES), split=st.booleans())
    def begin(self, session: str, goal: str, split: bool) -> None:
        owner = self.owners.get(session)
        if owner is None or owner.replica == goal:
            return
        number = len(self.started)
        mine = {} if split else {"session": session, "owners": self.owners, "expected": owner}
        handoff = self.handoffs[number] = Handoff(owner.replica, goal, timeout=TIMEOUT, ttl=TTL, **mine)
        self.started[number] = session
        self.post(number, handoff.start(self.now))

    @rule(which=st.integers(0, 50), twice=st.booleans())
    def deliver(self, which: int, twice: bool) -> None:
        if not self.letters:
            return
        index = which % len(self.letters)
        letter = self.letters[index] if twice else self.letters.pop(index)
        if letter.action is not None:
            self.at_replica(letter.number, letter.action)
        elif (handoff := self.handoffs.get(letter.number)) is not None:
            method, arguments = letter.answer
            now = () if method == "released" else (self.now,)
            self.post(letter.number, getattr(handoff, method)(*arguments, *now))

    def at_replica(self, number: int, action: Action) -> None:
        engine, session = self.engines[action.at], self.started[number]
        try:
            if action.do is Do.EXPORT:
                arguments = {"token_ids": self.prompts[session], "salt": session, "ttl": TTL}
                out = engine.command("export_prefix", arguments)
                self.blobs[number, out["lease_id"]] = out["blob"]
                answer = ("exported", (out["lease_id"], out["tokens"]))
            elif action.do is Do.IMPORT:
                answer = ("imported", (engine.command("import_prefix", {"blob": self.blobs[number, action.lease]}),))
            elif action.do is Do.RENEW:
                engine.command("renew_lease", {"lease_id": action.lease, "ttl": TTL})
                answer = ("renewed", ())
            else:
                engine.command("release_lease", {"lease_id": action.lease})
                answer = ("released", (action.lease,))
        except ContractError as error:
            if action.do is Do.RENEW:
                return
            answer = ("failed", (str(error),))
        self.letters.append(Letter(number, answer=answer))

    @rule(which=st.integers(0, 50))
    def lose(self, which: int) -> None:
        if self.letters:
            self.letters.pop(which % len(self.letters))

    @rule(seconds=st.floats(0.1, 4.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for number, handoff in list(self.handoffs.items()):
            self.post(number, handoff.tick(self.now))

    @rule(name=st.sampled_from(NAMES))
    def crash_replica(self, name: str) -> None:
        self.engines[name].crash()
        self.owners.forget(name)

    @rule(name=st.sampled_from(NAMES), version=st.sampled_from(["w0", "w1"]))
    def new_weights(self, name: str, version: str) -> None:
        self.engines[name].update(version)

    @rule(which=st.integers(0, 50))
    def client_leaves(self, which: int) -> None:
        if self.handoffs:
            number = sorted(self.handoffs)[which % len(self.handoffs)]
            self.post(number, self.handoffs[number].cancel(self.now))

    @rule()
    def crash_router(self) -> None:
        """Its memory is gone; replicas keep theirs."""
        self.handoffs.clear()
        self.owners = OwnerTable(10)

    @invariant()
    def pages_add_up(self) -> None:
        for engine in self.engines.values():
            assert 0 <= engine.free <= engine.total

    @invariant()
    def tokens_are_right_everywhere(self) -> None:
        for session, tokens in self.prompts.items():
            for engine in self.engines.values():
                kept = dict(engine.cache)
                assert engine.generate(tokens, session) == next_token(engine.version, session, tokens)
                engine.cache = kept

    @invariant()
    def a_move_that_is_told_is_true(self) -> None:
        for handoff in self.handoffs.values():
            assert handoff.settled == (handoff.state in (State.RELEASING, State.DONE))

    def teardown(self) -> None:
        """No more faults: once what is under way has arrived or timed out, nothing is pinned and all is decided."""
        rng = random.Random(0)
        for _ in range(400):
            if not self.letters:
                break
            self.deliver(rng.randrange(50), twice=False)
        self.now += TIMEOUT
        self.wait(0.1)
        while self.letters:
            self.deliver(0, twice=False)
        self.now += 2 * TTL
        self.wait(0.1)
        assert all(handoff.state is State.DONE for handoff in self.handoffs.values())
        assert all(engine.free == engine.total for engine in self.engines.values())


Network.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestNetwork = Network.TestCase


def moved(owners: OwnerTable) -> Handoff:
    expected = owners.swap("s", None, "a")
    return Handoff("a", "b", timeout=TIMEOUT, ttl=TTL, session="s", owners=owners, expected=expected)


def test_the_straight_way() -> None:
    owners = OwnerTable(4)
    handoff = moved(owners)
    assert handoff.start(0) == [Action(Do.EXPORT, "a")]
    assert handoff.exported("l", 8, 1) == [Action(Do.IMPORT, "b", "l")]
    assert owners.get("s").replica == "a"  # until the target has it
    assert handoff.tick(4.9) == []
    assert handoff.imported(8, 4.9) == [Action(Do.RELEASE, "a", "l")]
    assert (handoff.outcome, owners.get("s").replica) == (Outcome.MOVED, "b")
    assert handoff.released("l") == []
    assert handoff.state is State.DONE


def test_nothing_to_move() -> None:
    handoff = moved(OwnerTable(4))
    handoff.start(0)
    assert handoff.exported("", 0, 1) == []
    assert (handoff.outcome, handoff.state) == (Outcome.NOTHING, State.DONE)


def test_somebody_was_faster() -> None:
    owners = OwnerTable(4)
    handoff = moved(owners)
    handoff.start(0)
    handoff.exported("l", 8, 1)
    owners.swap("s", owners.get("s"), "c")
    assert handoff.imported(8, 2) == [Action(Do.RELEASE, "a", "l")]
    assert (handoff.outcome, owners.get("s").replica) == (Outcome.LOST_RACE, "c")


def test_a_late_export_is_released() -> None:
    handoff = moved(OwnerTable(4))
    handoff.start(0)
    assert handoff.tick(TIMEOUT) == []
    assert handoff.outcome is Outcome.TIMEOUT
    assert handoff.exported("late", 8, 6) == [Action(Do.RELEASE, "a", "late")]


def test_a_slow_import_renews_and_a_lost_release_is_sent_again() -> None:
    handoff = Handoff("a", "b", timeout=100, ttl=TTL)
    handoff.start(0)
    handoff.exported("l", 8, 0)
    assert handoff.next_tick() == TTL / 2
    assert handoff.tick(TTL / 2) == [Action(Do.RENEW, "a", "l")]
    handoff.renewed(TTL / 2)
    assert handoff.exported("l", 8, 5) == []  # the same answer twice
    assert handoff.exported("m", 8, 5) == [Action(Do.RELEASE, "a", "m")]  # a second export of the same request
    assert handoff.imported(8, 6) == [Action(Do.RELEASE, "a", "l")]
    assert handoff.tick(6 + TTL / 4) == [Action(Do.RELEASE, "a", "l")]
    assert handoff.imported(8, 9) == []
    handoff.tick(TTL / 2 + TTL)
    assert handoff.state is State.DONE


@pytest.mark.parametrize("state", ["exporting", "importing"])
@pytest.mark.parametrize("how", ["failed", "cancel"])
def test_every_end_releases(state: str, how: str) -> None:
    handoff = moved(OwnerTable(4))
    handoff.start(0)
    if state == "importing":
        handoff.exported("l", 8, 1)
    actions = handoff.failed("x", 2) if how == "failed" else handoff.cancel(2)
    assert actions == ([Action(Do.RELEASE, "a", "l")] if state == "importing" else [])
    assert handoff.outcome is (Outcome.FAILED if how == "failed" else Outcome.CANCELLED)
