"""Finds the first of several stop strings in text that arrives in pieces, and how much of it may not be shown yet."""

from __future__ import annotations

from collections import deque
from functools import lru_cache

__all__ = ["StopStrings", "stop_strings"]


class StopStrings:
    """Aho and Corasick's automaton over the stop strings: one step a character, whatever their number and length.

    A state is the longest end of the text that begins a stop string. Its depth is therefore just the text that has to
    be held back.

    Attributes:
        ended: per state, the longest stop string that ends here; "" for none.
        held: per state, how many of the last characters may still become (part of) a stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fall = [0]
        self.ended = [""]
        depth = [0]
        for stop in stops:
            state = 0
            for character in stop:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._fall.append(0)
                    self.ended.append("")
                    depth.append(depth[state] + 1)
                state = self._next[state][character]
            self.ended[state] = stop
        self.held = list(depth)
        waiting = deque(self._next[0].values())
        while waiting:  # breadth first: shorter ends are finished before the states that fall back on them
            state = waiting.popleft()
            fall = self._fall[state]
            self.ended[state] = self.ended[state] or self.ended[fall]
            if not self._next[state]:  # nothing can grow from here: only a shorter end may
                self.held[state] = self.held[fall]
            for character, child in self._next[state].items():
                self._fall[child] = self.step(fall, character)
                waiting.append(child)

    def step(self, state: int, character: str) -> int:
        """The state after one more character; 0 is the start."""
        while (target := self._next[state].get(character)) is None:
            if not state:
                return 0
            state = self._fall[state]
        return target


@lru_cache(maxsize=256)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The automaton of these stop strings; requests with equal ones share it."""
    return StopStrings(stops)
