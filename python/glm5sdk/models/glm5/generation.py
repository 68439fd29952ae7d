"""Offline generation: a padded batch of prompts in, a padded batch of prompts with their continuations out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5.padding import flatten_padding
from glm5sdk.nn.cache import LatentCache

if TYPE_CHECKING:
    from glm5sdk.models.glm5.model import Glm5ForCausalLM

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: Glm5ForCausalLM,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 32,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop_token_ids: Iterable[int] | None = None,
    page_size: int = 64,
    prefill_chunk: int = 2048,
    kv_format: str = "plain",
    index_format: str = "plain",
    on_token: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Continue each prompt until a stop token or `max_new_tokens`.

    Sampling is counter-based: token and seed decide the draw, so a row's continuation does not depend on its batch.

    Args:
        model: the model.
        input_ids: i64 [B, S], at least one real token a row.
        attention_mask: [B, S], 1 at real tokens; padding left or right.
        max_new_tokens: at least 1.
        temperature: 0 is greedy.
        ignore_eos: go on past stop tokens.
        top_k: sample among so many best tokens; 0 keeps all.
        top_p: nucleus in (0, 1]; 1 keeps all.
        min_p: smallest probability relative to the best; 0 keeps all.
        seed: of row b is seed + b.
        stop_token_ids: by default the config's eos_token_id, all of them.
        page_size: of the cache.
        prefill_chunk: prompt tokens of all rows together per step (memory against speed, never bits).
        kv_format: of the cache, see make_cache.
        index_format: of the cache, see make_cache.
        on_token: called with i64 [B] after each step, -1 for rows that have ended.

    Returns:
        i64 [B, S + new], prompt included; rows that ended early are filled with pad_token_id.

    Raises:
        ContractError: an argument is out of range; nothing was computed.
    """
    rows = flatten_padding(input_ids, attention_mask, model.config.vocab_size)
    _check(rows.lengths, max_new_tokens, temperature, top_p, min_p, prefill_chunk)
    batch, device = len(rows.lengths), model.device
    stops = _stops(model, ignore_eos, stop_token_ids)
    cache = model.make_cache(batch, max(rows.lengths) + max_new_tokens, page_size, kv_format, index_format)
    prompts = [row[keep] for row, keep in zip(input_ids.to(device), rows.keep.to(device), strict=True)]
    hidden_BN = _prefill(model, prompts, cache, prefill_chunk)
    settings = [
        torch.full((batch,), value, dtype=dtype, device=device)
        for value, dtype in ((temperature, torch.float32), (top_k, torch.int32), (top_p, torch.float32),
                             (min_p, torch.float32))
    ]  # fmt: skip
    seeds = torch.arange(seed, seed + batch, dtype=torch.int64, device=device)
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    new: list[Tensor] = []
    while True:
        positions = torch.tensor(cache.lengths, dtype=torch.int64, device=device)
        logits_BV = model.logits(hidden_BN).to(torch.float32)
        ids_B, _, _ = ops.sample(logits_BV, *settings, seeds, positions)
        step_B = torch.where(alive, ids_B, -1)
        new.append(step_B)
        if on_token is not None:
            on_token(step_B)
        if stops.numel():
            alive = alive & ~torch.isin(ids_B, stops)
        if len(new) == max_new_tokens or not bool(alive.any()):
            break
        hidden_BN = _decode(model, ids_B, alive, cache)
    pad = model.config.pad_token_id
    fill = pad if pad is not None else int(stops[0]) if stops.numel() else 0
    grown = torch.stack(new, dim=1)
    return torch.cat([input_ids.to(device), grown.where(grown >= 0, fill)], dim=1)


def _check(
    lengths: list[int], max_new_tokens: int, temperature: float, top_p: float, min_p: float, prefill_chunk: int
) -> None:
    if not lengths or min(lengths) == 0:
        raise ContractError("generate: a prompt is empty, needs at least one real token in each row")
    if max_new_tokens < 1:
        raise ContractError(f"generate: max_new_tokens is {max_new_tokens}, needs at least 1")
    if not 0.0 <= temperature < float("inf"):
        raise ContractError(f"generate: temperature is {temperature}, needs a finite number >= 0")
    if not 0.0 < top_p <= 1.0:
        raise ContractError(f"generate: top_p is {top_p}, needs a number in (0, 1]")
    if not 0.0 <= min_p <= 1.0:
        raise ContractError(f"generate: min_p is {min_p}, needs a number in [0, 1]")
    if prefill_chunk < 1:
        raise ContractError(f"generate: prefill_chunk is {prefill_chunk}, needs at least 1")


def _stops(model: Glm5ForCausalLM, ignore_eos: bool, stop_token_ids: Iterable[int] | None) -> Tensor:
    ids = [] if ignore_eos else list(model.config.eos_token_id if stop_token_ids is None else stop_token_ids)
    return torch.tensor(ids, dtype=torch.int64, device=model.device)


def _prefill(model: Glm5ForCausalLM, prompts: list[Tensor], cache: LatentCache, chunk: int) -> Tensor:
    """Write every prompt to the cache; the last hidden state of each, [B, N]."""
    done = [0] * len(prompts)
    last: list[Tensor | None] = [None] * len(prompts)
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        budget, step = chunk, []
        for d, p in zip(done, prompts, strict=True):
            step.append(min(budget, len(p) - d))
            budget -= step[-1]
        ids_T = torch.cat([p[d : d + n] for p, d, n in zip(prompts, done, step, strict=True)])
        hidden_TN = model.hidden_states(ids_T, model.context(cache.batch(step), cache))
        cache.advance(step)
        end = 0
        for row, n in enumerate(step):
            end += n
            done[row] += n
            if n and done[row] == len(prompts[row]):
                last[row] = hidden_TN[end - 1]
    return torch.stack([h for h in last if h is not None])


def _decode(model: Glm5ForCausalLM, ids_B: Tensor, alive: Tensor, cache: LatentCache) -> Tensor:
    """One token for each row that goes on; ended rows keep a row of zeros. [B, N]."""
    step = alive.to(torch.int64).tolist()
    hidden_TN = model.hidden_states(ids_B[alive], model.context(cache.batch(step), cache))
    cache.advance(step)
    out = hidden_TN.new_zeros(len(step), hidden_TN.shape[1])
    out[alive] = hidden_TN
    return out
