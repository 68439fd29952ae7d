"""Offline generation: a padded batch of prompts in, a padded batch of prompts with their continuations out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glm5sdk import ops
from glm5sdk.core.errors import CapacityError, ContractError
from glm5sdk.models.glm5.padding import flatten_padding
from glm5sdk.nn.cache import LatentCache
from glm5sdk.registry.contract_scalars import as_float, as_int

if TYPE_CHECKING:
    from glm5sdk.models.glm5.model import Glm5ForCausalLM

__all__ = ["generate"]

COLDEST, HOTTEST = 1e-5, 1e5


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
        temperature: 0 is greedy, else 1e-5 to 1e5.
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
        CapacityError: prompt and continuation exceed max_position_embeddings, or memory; nothing was computed.
    """
    rows = flatten_padding(input_ids, attention_mask, model.config.vocab_size)
    max_new_tokens, prefill_chunk, top_k, seed = (
        as_int("generate", name, value)
        for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk), ("top_k", top_k),
                            ("seed", seed))
    )  # fmt: skip
    temperature, top_p, min_p = (
        as_float("generate", name, value)
        for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p))
    )
    _check(rows.lengths, max_new_tokens, temperature, top_p, min_p, prefill_chunk)
    if on_token is not None and not callable(on_token):
        raise ContractError(f"generate: on_token is {on_token!r}, needs a function")
    _check_room(model, max(rows.lengths) + max_new_tokens, top_k, seed, len(rows.lengths))
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
    if temperature != 0.0 and not COLDEST <= temperature <= HOTTEST:
        raise ContractError(
            f"generate: temperature is {temperature}, needs 0 (greedy) or {COLDEST} to {HOTTEST}: "
            "outside of it logits / temperature are no longer numbers that float32 can tell apart"
        )
    if not 0.0 < top_p <= 1.0:
        raise ContractError(f"generate: top_p is {top_p}, needs a number in (0, 1]")
    if not 0.0 <= min_p <= 1.0:
        raise ContractError(f"generate: min_p is {min_p}, needs a number in [0, 1]")
    if prefill_chunk < 1:
        raise ContractError(f"generate: prefill_chunk is {prefill_chunk}, needs at least 1")


def _check_room(model: Glm5ForCausalLM, length: int, top_k: int, seed: int, batch: int) -> None:
    """The last token is drawn but never read, so it needs no position of its own."""
    most = model.config.max_position_embeddings
    if length - 1 > most:
        raise CapacityError(
            f"generate: the longest prompt and max_new_tokens are {length} tokens, "
            f"needs at most {most + 1}, max_position_embeddings and one more"
        )
    if not -(2**31) <= top_k < 2**31:
        raise ContractError(f"generate: top_k is {top_k}, needs an int of 32 bits; 0 keeps all tokens")
    if not -(2**63) <= seed <= 2**63 - batch:
        raise ContractError(f"generate: seed is {seed}, needs an int of 64 bits, with room for {batch} rows")


def _stops(model: Glm5ForCausalLM, ignore_eos: bool, stop_token_ids: Iterable[int] | None) -> Tensor:
    given = model.config.eos_token_id if stop_token_ids is None else stop_token_ids
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise ContractError(f"generate: stop_token_ids is {given!r}, needs token ids in a list")
    ids = [as_int("generate", "a stop token", i.item() if isinstance(i, Tensor) else i) for i in given]
    if bad := [i for i in ids if not 0 <= i < 2**31]:
        raise ContractError(f"generate: a stop token is {bad[0]}, needs a token id")
    ids = [] if ignore_eos else ids
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
