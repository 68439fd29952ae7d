"""How long sequences may be, and how many pages the cache gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from glm5sdk.core.errors import ContractError
from glm5sdk.nn.cache import CachePools
from glm5sdk.serve.config import EngineConfig

if TYPE_CHECKING:
    from glm5sdk.models.glm5.model import Glm5ForCausalLM

__all__ = ["longest_sequence", "make_pools"]


def longest_sequence(model: Glm5ForCausalLM, config: EngineConfig) -> int:
    """Tokens of prompt and continuation together.

    Raises:
        ContractError: the config asks for more than the model has positions.
    """
    most = model.config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > most:
        raise ContractError(
            f"engine: max_model_len is {config.max_model_len}, needs at most max_position_embeddings {most}"
        )
    return config.max_model_len or most


def make_pools(model: Glm5ForCausalLM, config: EngineConfig) -> CachePools:
    """The cache: pages as told, or for max_num_seqs of the longest sequences as far as cache_bytes go.

    Raises:
        CapacityError: it does not fit into memory.
    """
    sizes = model.cache_sizes(with_mtp=config.speculative_tokens > 0)
    pages = config.num_pages
    if pages is None:
        each = -(-(longest_sequence(model, config) + config.speculative_tokens) // config.page_size)
        page_bytes = CachePools(1, config.page_size, sizes, "meta", *config.formats).page_bytes
        pages = max(1, min(config.max_num_seqs * each, config.cache_bytes // page_bytes))
    return CachePools(pages, config.page_size, sizes, model.device, *config.formats)
