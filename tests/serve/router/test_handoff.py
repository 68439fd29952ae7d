"""Handoffs under crashes, time-outs, lost, doubled and reordered messages: one owner, no pinned page, right tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from fake_cache import FakeCache, next_token, packed, unpacked

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


class Network:
    """Replicas, a router, and letters between them; every fault is a method."""

    def __init__(self) -> None:
        self.now = 0.0
        self.moved = self.refused = 0
        self.engines = {name: FakeCache(12, lambda: self.now) for name in NAMES}
        self.owners = OwnerTable(10)
        # The same tokens under different salts: a page in the wrong place would be found.
        self.prompts: dict[str, list[int]] = {name: list(range(9)) for name in SESSIONS}
        self.handoffs: dict[int, Handoff] = {}
        self.started: dict[int, str] = {}
        self.blobs: dict[tuple[int, str], bytes] = {}
        self.letters: list[Letter] = []

    def post(self, number: int, actions: list[Action]) -> None:
        self.letters += [Letter(number, action) for action in actions]

    def request(self, session: str, name: str, grow: bool) -> None:
        """A request of the session runs on a replica; its token must be the one that its weights say."""
        if grow:
            self.prompts[session].append(len(self.prompts[session]) % 7)
        engine, tokens = self.engines[name], self.prompts[session]
        assert engine.generate(tokens, session) == next_token(engine.version, session, tokens)
        if self.owners.get(session) is None:
            self.owners.swap(session, None, name)

    def begin(self, session: str, goal: str, split: bool) -> None:
        owner = self.owners.get(session)
        if owner is None or owner.replica == goal:
            return
        number = len(self.started)
        mine = {} if split else {"session": session, "owners": self.owners, "expected": owner}
        handoff = self.handoffs[number] = Handoff(owner.replica, goal, timeout=TIMEOUT, ttl=TTL, **mine)
        self.started[number] = session
        self.post(number, handoff.start(self.now))

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
            was = handoff.outcome
            self.post(letter.number, getattr(handoff, method)(*arguments, *now))
            self.moved += was is not handoff.outcome is Outcome.MOVED

    def at_replica(self, number: int, action: Action) -> None:
        engine, session = self.engines[action.at], self.started[number]
        try:
            if action.do is Do.EXPORT:
                out = engine.export_prefix(self.prompts[session], session, TTL)
                lease = out["lease_id"] or ""
                if lease:
                    self.blobs[number, lease] = packed(out, engine.read_lease(lease), session)
                answer: tuple[str, tuple[object, ...]] = ("exported", (lease, out["rows"]))
            elif action.do is Do.IMPORT:
                rows = engine.import_prefix(**unpacked(self.blobs[number, action.lease]))
                answer = ("imported", (rows,))
            elif action.do is Do.RENEW:
                answer = ("renewed", ()) if engine.renew_lease(action.lease, TTL) else ("failed", ("it has ended",))
            else:
                engine.release_lease(action.lease)
                answer = ("released", (action.lease,))
        except ContractError as error:
            answer = ("failed", (str(error),))
            self.refused += 1
        self.letters.append(Letter(number, answer=answer))

    def calm(self) -> None:
        """All that is under way arrives, in order."""
        while self.letters:
            self.deliver(0, twice=False)

    def lose(self, which: int) -> None:
        if self.letters:
            self.letters.pop(which % len(self.letters))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for number, handoff in list(self.handoffs.items()):
            self.post(number, handoff.tick(self.now))

    def crash_replica(self, name: str) -> None:
        self.engines[name].crash()
        self.owners.forget(name)

    def new_weights(self, name: str, version: str) -> None:
        self.engines[name].update(version)

    def client_leaves(self, which: int) -> None:
        if self.handoffs:
            number = sorted(self.handoffs)[which % len(self.handoffs)]
            self.post(number, self.handoffs[number].cancel(self.now))

    def crash_router(self) -> None:
        """Its memory is gone; replicas keep theirs."""
        self.handoffs.clear()
        self.owners = OwnerTable(10)

    def pages_add_up(self) -> None:
        for engine in self.engines.values():
            assert 0 <= engine.free <= engine.total

    def tokens_are_right_everywhere(self) -> None:
        for session, tokens in self.prompts.items():
            for engine in self.engines.values():
                kept = dict(engine.cache)
                assert engine.generate(tokens, session) == next_token(engine.version, session, tokens)
                engine.cache = kept

    def a_move_that_is_told_is_true(self) -> None:
        for handoff in self.handoffs.values():
            assert handoff.settled == (handoff.state in (State.RELEASING, State.DONE))

    def come_to_rest(self) -> None:
        """No more faults: once what is under way has arrived or timed out, nothing is pinned and all is decided."""
        rng = random.Random(0)
        for _ in range(400):
            if not self.letters:
                break
            self.deliver(rng.randrange(50), twice=False)
        self.now += TIMEOUT
        self.wait(0.1)
        self.calm()
        self.now += 2 * TTL
        self.wait(0.1)
        assert all(handoff.state is State.DONE for handoff in self.handoffs.values())
        assert all(engine.free == engine.total for engine in self.engines.values())


STEPS = (("request", 6), ("begin", 6), ("deliver", 16), ("calm", 3), ("lose", 1), ("wait", 2), ("crash_replica", 1),
         ("new_weights", 1), ("client_leaves", 1), ("crash_router", 0.2))  # fmt: skip


def simulate(seed: int) -> Network:
    """One random history, checked after every step."""
    rng = random.Random(seed)
    network = Network()
    names, weights = zip(*STEPS, strict=True)
    for step in rng.choices(names, weights, k=80):
        arguments = {
            "request": lambda: (rng.choice(SESSIONS), rng.choice(NAMES), rng.random() < 0.2),
            "begin": lambda: (rng.choice(SESSIONS), rng.choice(NAMES), rng.random() < 0.3),
            "deliver": lambda: (rng.randrange(50), rng.random() < 0.15),
            "lose": lambda: (rng.randrange(50),),
            "wait": lambda: (rng.uniform(0.1, 4.0),),
            "crash_replica": lambda: (rng.choice(NAMES),),
            "new_weights": lambda: (rng.choice(NAMES), rng.choice(["w0", "w1"])),
            "client_leaves": lambda: (rng.randrange(50),),
        }.get(step, tuple)()
        getattr(network, step)(*arguments)
        network.pages_add_up()
        network.tokens_are_right_everywhere()
        network.a_move_that_is_told_is_true()
    network.come_to_rest()
    return network


@pytest.mark.parametrize("seed", range(0, 200, 50))
def test_random_histories(seed: int) -> None:
    networks = [simulate(s) for s in range(seed, seed + 50)]
    # The histories do reach what they are about.
    assert sum(n.moved for n in networks) > 50
    assert sum(n.refused for n in networks) > 5


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
