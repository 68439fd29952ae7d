"""What comes back from the engine: pieces while a request runs, whole outputs at its end."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CompletionOutput", "Delta", "RequestOutput", "TokenLogprob"]


@dataclass(frozen=True)
class TokenLogprob:
    """One token's log-probability (natural log, temperature 1, unfiltered) and the best tokens at its place.

    Attributes:
        token_id: the token.
        logprob: of the token; bit for bit what `Glm5ForCausalLM.logprobs` gives on the same backend.
        top: (token id, logprob) of the best tokens, best first, ties to the lower id; as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Delta:
    """What one sequence of one request gained since its last delta. The last one has a finish_reason.

    Attributes:
        request_id: the caller's name for the request.
        index: which of the request's n sequences.
        token_ids: new tokens, the stop token included when one ended the sequence.
        text: new text, without stop token and stop string; only whole characters, and nothing that a stop string
            could still take back.
        logprobs: one entry a new token when asked for.
        prompt_logprobs: with the first delta of sequence 0 when asked for; None stands for the first token, which
            nothing predicts.
        finish_reason: "stop", "length", "abort" or "error" with the last delta.
        stop_reason: the stop string or stop token id that ended it; None when a stop token of the model's own did.
        error: what went wrong, with finish_reason "error".
        prompt_tokens: length of the prompt.
        cached_tokens: prompt tokens that came from the prefix cache.
        weight_version: of the weights that made these tokens.
        seed: of the draws.
        queue_seconds: with the first delta: from arrival to the first step that ran the request; None when unknown.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str = ""
    seed: int = 0
    queue_seconds: float | None = None


@dataclass
class CompletionOutput:
    """One finished sequence; fields as in `Delta`, put together."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_version: str = ""
    seed: int = 0


@dataclass
class RequestOutput:
    """A finished request.

    Attributes:
        request_id: its name.
        prompt: the prompt's text, when it was given as text.
        prompt_token_ids: the prompt.
        prompt_logprobs: when asked for; None stands for the first token.
        outputs: its sequences, by index.
        cached_tokens: prompt tokens that came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    outputs: list[CompletionOutput]
    cached_tokens: int = 0

    @classmethod
    def begun(cls, request_id: str, prompt: str | None, prompt_token_ids: list[int], sequences: int) -> RequestOutput:
        """One whose deltas are still to come."""
        return cls(request_id, prompt, prompt_token_ids, None, [CompletionOutput(i) for i in range(sequences)])

    def add(self, delta: Delta) -> None:
        """Take in a delta of this request."""
        output = self.outputs[delta.index]
        output.text += delta.text
        output.token_ids += delta.token_ids
        if delta.logprobs is not None:
            output.logprobs = (output.logprobs or []) + delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        output.weight_version, output.seed = delta.weight_version, delta.seed
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
