"""Text that arrives in pieces, searched for tags that a piece may cut anywhere."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["TagBuffer"]

_SPACE = re.compile(r"\s*")


class TagBuffer:
    """What has arrived and was not taken. Every character is copied and searched a bounded number of times.

    Attributes:
        final: nothing more will arrive; what could have become a tag is text.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self.final = False

    def push(self, text: str) -> None:
        """Add what arrived."""
        self._text, self._at = self._text[self._at :] + text, 0

    @property
    def empty(self) -> bool:
        """Whether all was taken."""
        return self._at == len(self._text)

    def until(self, *tags: str, newline: bool = False) -> tuple[str, str]:
        """Take the text before the first of some tags, and the tag.

        Args:
            *tags: the tags.
            newline: one newline before a tag belongs to the tag.

        Returns:
            The text and the tag as it stands there. Without a tag: the text that can be no part of one, and "".
        """
        match = _pattern(tags, newline).search(self._text, self._at)
        start, end = match.span() if match else (self._certain(tags, newline), 0)
        text = self._text[self._at : start]
        self._at = end if match else start
        return text, match[0] if match else ""

    def before(self, *tags: str, limit: int) -> tuple[str, str]:
        """Like `until`, but takes nothing and looks no further than `limit` characters."""
        window = self._text[self._at : self._at + limit + max(map(len, tags))]
        match = _pattern(tags, False).search(window)
        if match:
            return window[: match.start()], match[0]
        return window[: len(window) - (0 if self.final else _begun(window, tags))], ""

    def skip(self, count: int) -> None:
        """Drop so many characters, which must be there."""
        self._at += count

    def back(self, count: int) -> None:
        """Untake so many characters that were taken since the last `push`."""
        self._at -= count

    def begins(self, tag: str) -> bool | None:
        """Whether the text begins with a tag; None as long as that is open."""
        if self._text.startswith(tag, self._at):
            return True
        rest = self._text[self._at : self._at + len(tag)]
        return None if not self.final and tag.startswith(rest) else False

    def space(self) -> str:
        """Take the white space at the start."""
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return match[0] if match else ""

    def rest(self) -> str:
        """Take everything."""
        text, self._at = self._text[self._at :], len(self._text)
        return text

    def _certain(self, tags: tuple[str, ...], newline: bool) -> int:
        """Where the text ends that can be no part of a tag."""
        if self.final:
            return len(self._text)
        spelled = (*tags, *(f"\n{tag}" for tag in tags)) if newline else tags
        return len(self._text) - min(_begun(self._text, spelled), len(self._text) - self._at)


def _begun(text: str, tags: tuple[str, ...]) -> int:
    """Length of the longest end of the text that begins a tag without being one."""
    end = text[-max(map(len, tags)) + 1 :]
    for start, character in enumerate(end):
        if character in "<\n":  # with which all tags begin
            tail = end[start:]
            if any(len(tail) < len(tag) and tag.startswith(tail) for tag in tags):
                return len(tail)
    return 0


@lru_cache(maxsize=64)
def _pattern(tags: tuple[str, ...], newlines: bool) -> re.Pattern[str]:
    return re.compile(("\n?" if newlines else "") + f"(?:{'|'.join(map(re.escape, tags))})")
