"""Which parameter is updated by whom, and the pair of optimisers as one thing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from glm5sdk.core.errors import CheckpointError
from glm5sdk.models.glm5.config import Glm5Config
from glm5sdk.models.glm5.model import Glm5ForCausalLM
from glm5sdk.train.config import OptimizerConfig
from glm5sdk.train.muon import Muon, Partition

__all__ = ["Optimizer", "partition"]

# Tables that rows are looked up in or compared with one by one, and the router: no linear map to orthogonalise.
_TABLES = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight", "mlp.gate.weight")


def partition(name: str, parameter: nn.Parameter, config: Glm5Config, split_heads: bool = True) -> Partition | None:
    """How Muon sees a parameter; None leaves it to AdamW.

    With `split_heads` the up-projections of queries, keys and values are orthogonalised head by head (Muon Split), as
    GLM-5 is trained: each head then moves at its own pace, and attention logits stay bounded without clipping.

    Args:
        name: as in the model's `named_parameters`.
        parameter: its value.
        config: of the model.
        split_heads: False treats those projections as whole matrices.
    """
    if parameter.dim() < 2 or name.endswith(_TABLES):
        return None
    c = config
    if name.endswith("experts.gate_up_proj"):
        return Partition(c.n_routed_experts, (c.moe_intermediate_size, c.moe_intermediate_size))
    if name.endswith("experts.down_proj"):
        return Partition(c.n_routed_experts, (c.hidden_size,))
    if split_heads and name.endswith("self_attn.q_b_proj.weight"):
        return Partition(c.num_attention_heads, (c.qk_nope_head_dim + c.qk_rope_head_dim,))
    if split_heads and name.endswith("self_attn.kv_b_proj.weight"):
        return Partition(c.num_attention_heads, (c.qk_nope_head_dim, c.v_head_dim))
    return Partition(1, (parameter.shape[0],))


class Optimizer:
    """Muon for matrices and AdamW for the rest, or AdamW alone; one `step`, one state.

    Args:
        model: whose parameters; frozen ones (without gradient) keep value and state.
        config: see OptimizerConfig.
    """

    def __init__(self, model: Glm5ForCausalLM, config: OptimizerConfig) -> None:
        self.config = config
        matrices: list[tuple[nn.Parameter, Partition]] = []
        tables: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            how = partition(name, parameter, model.config, config.split_heads) if config.name == "muon" else None
            if how is not None:
                matrices.append((parameter, how))
            else:
                (tables if parameter.dim() > 1 else vectors).append(parameter)
        groups = [{"params": tables, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        # Its fused form updates all parameters in one call; plain loops cost more than the arithmetic at these sizes.
        self._adamw = torch.optim.AdamW(groups, lr=config.adamw_lr, betas=config.betas, eps=config.eps, fused=True)
        self._muon = (
            Muon(matrices, config.muon_lr, config.momentum, config.orthogonal_steps, config.weight_decay)
            if matrices
            else None
        )
        self._parameters = list(model.parameters())

    def step(self, factor: float) -> float:
        """Clip, update and forget the gradients.

        Args:
            factor: on both learning rates.

        Returns:
            Norm of the whole gradient before clipping; when it is not finite nothing was updated.
        """
        with_grad = [p for p in self._parameters if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in with_grad if p.grad is not None])
        if bool(norm.isfinite()):
            if self.config.clip and norm > self.config.clip:
                nn.utils.clip_grads_with_norm_(with_grad, self.config.clip, norm)
            for optimizer, rate in self._pairs():
                for group in optimizer.param_groups:
                    group["lr"] = rate * factor
                optimizer.step()
        for parameter in with_grad:
            parameter.grad = None
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        """State of both, tensors by reference."""
        return {type(o).__name__: o.state_dict() for o, _ in self._pairs()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of an optimiser made the same way.

        Raises:
            CheckpointError: it was another optimiser, or another model's.
        """
        names = [type(o).__name__ for o, _ in self._pairs()]
        if sorted(names) != sorted(state):
            raise CheckpointError(f"optimizer: saved state is of {', '.join(sorted(state))}, needs {', '.join(names)}")
        for optimizer, _ in self._pairs():
            try:
                optimizer.load_state_dict(state[type(optimizer).__name__])
            except (ValueError, KeyError) as error:
                raise CheckpointError(
                    f"optimizer: saved state is of another model ({error}), needs this one"
                ) from error

    def _pairs(self) -> Iterator[tuple[torch.optim.Optimizer, float]]:
        if self._muon is not None:
            yield self._muon, self.config.muon_lr
        yield self._adamw, self.config.adamw_lr
