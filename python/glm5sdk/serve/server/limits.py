"""Admission: how much may wait. What is over is told to come back, before anything of it is kept."""

from __future__ import annotations

import time
from types import TracebackType

from glm5sdk.core.errors import CapacityError
from glm5sdk.serve.interface import EngineClient, OverloadedError
from glm5sdk.serve.server.settings import ServerSettings

__all__ = ["Admission", "Ticket"]


class Admission:
    """Counts the sequences in the engine's hands and the prompt tokens that still wait for their first answer.

    Args:
        engine: its batch size and its own queue count too: it may hold requests of other users than this server.
        settings: the limits.
    """

    def __init__(self, engine: EngineClient, settings: ServerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._sequences = 0
        self._tokens = 0
        self._seconds = 1.0  # of a request; a moving average

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of requests that have not given a token yet."""
        return self._tokens

    def check(self) -> None:
        """Refuse early, before a prompt is rendered and tokenised.

        Raises:
            OverloadedError: the queue is full.
        """
        queued = self._queued()
        if queued and queued >= self._settings.max_queued_requests:
            raise OverloadedError(f"server: {queued} sequences wait, as many as may", self._retry_after(queued))

    def _queued(self) -> int:
        return max(self._sequences - self._engine.info.max_num_seqs, self._engine.stats().waiting, 0)

    def enter(self, sequences: int, tokens: int) -> Ticket:
        """Take a request in.

        Args:
            sequences: how many it asks for.
            tokens: of its prompt.

        Raises:
            CapacityError: it alone is more than may ever wait.
            OverloadedError: too much waits already.
        """
        info, limits = self._engine.info, self._settings
        batch, queued = info.max_num_seqs, self._queued()
        most, most_tokens = batch + limits.max_queued_requests, max(limits.max_queued_tokens, info.max_model_len)
        if sequences > most:
            raise CapacityError(f"server: the request asks for {sequences} sequences, needs at most {most}")
        if tokens > most_tokens:
            raise CapacityError(f"server: the request's prompts are {tokens} tokens, needs at most {most_tokens}")
        room = max(batch - self._sequences, 0) if queued == 0 else 0  # what finds a place in the batch does not queue
        if queued + max(sequences - room, 0) > limits.max_queued_requests:
            raise OverloadedError(
                f"server: {queued} sequences wait, {sequences} more need a limit over {limits.max_queued_requests}",
                self._retry_after(queued),
            )
        if self._tokens and self._tokens + tokens > limits.max_queued_tokens:
            raise OverloadedError(
                f"server: {self._tokens} prompt tokens wait, {tokens} more need a limit over "
                f"{limits.max_queued_tokens}",
                self._retry_after(queued),
            )
        return Ticket(self, sequences, tokens)

    def _retry_after(self, queued: int) -> float:
        rounds = 1 + queued / max(self._engine.info.max_num_seqs, 1)
        return min(max(self._seconds * rounds, 1.0), 60.0)


class Ticket:
    """A request's place; use it as a context, and call `started` when its first token came."""

    def __init__(self, admission: Admission, sequences: int, tokens: int) -> None:
        self._admission = admission
        self._sequences = sequences
        self._tokens = tokens
        self._begin = time.monotonic()
        admission._sequences += sequences
        admission._tokens += tokens

    def started(self) -> None:
        """The prompt no longer waits."""
        self._admission._tokens -= self._tokens
        self._tokens = 0

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.started()
        self._admission._sequences -= self._sequences
        if kind is None:
            took = time.monotonic() - self._begin
            self._admission._seconds += 0.1 * (took - self._admission._seconds)
