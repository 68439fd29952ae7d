"""`glm5 convert`: read a checkpoint in any accepted form, write it in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM, count_parameters

__all__ = ["convert_checkpoint"]


def convert_checkpoint(console: Console, source: Path, target: Path, dtype: str, max_shard_gb: float) -> None:
    """Rewrite `source` as `target`.

    Raises:
        ContractError: the target is the source, or the shard size is not positive; nothing was read.
        CheckpointError: the source is damaged.
    """
    if source.resolve() == target.resolve():
        raise ContractError(f"convert: target is {target}, needs a folder other than the source")
    if max_shard_gb <= 0:
        raise ContractError(f"convert: max_shard_gb is {max_shard_gb}, needs a number above 0")
    model = Glm5ForCausalLM.from_pretrained(source, dtype=dtype)
    model.save_pretrained(target, max_shard_bytes=int(max_shard_gb * 1e9))
    kinds = ", ".join([str(model.dtype).removeprefix("torch."), *sorted(model.weight_kinds)])
    console.print(f"{target}: {count_parameters(model.config):,} parameters in {kinds}", highlight=False)
