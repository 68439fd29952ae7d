"""How a check says no: which check, of which pair, on which example."""

from __future__ import annotations

__all__ = ["CheckFailed"]


class CheckFailed(AssertionError):
    """A pair broke one promise.

    Attributes:
        check: name of the check, e.g. `right`, `guards`, `rows`.
        sentence: what was found and what was needed.
    """

    def __init__(self, check: str, sentence: str) -> None:
        super().__init__(f"check '{check}': {sentence}")
        self.check, self.sentence = check, sentence
