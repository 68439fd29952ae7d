"""Norms, feed-forward and head of GlmMoeDsa on our ops, and the experts as an entry of transformers' own registry."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.integrations.transformers.replaced import Replaced, plain_linear
from glm5sdk.nn.stamp import stamp

__all__ = ["EXPERTS", "GateForward", "LinearForward", "MlpForward", "NormForward", "experts_forward"]

EXPERTS = "glm5sdk"  # name in ALL_EXPERTS_FUNCTIONS


class NormForward(Replaced):
    """GlmMoeDsaRMSNorm.forward."""

    def __call__(self, hidden_states: Tensor) -> Tensor:
        x_TN = hidden_states.reshape(-1, hidden_states.shape[-1])
        return ops.rms_norm(x_TN, self.module.weight, self.module.variance_epsilon).view(hidden_states.shape)


class LinearForward(Replaced):
    """nn.Linear.forward: the head."""

    def __call__(self, input: Tensor) -> Tensor:
        y_TV = ops.linear(input.reshape(-1, input.shape[-1]), self.module.weight, self.module.bias)
        return y_TV.view(*input.shape[:-1], -1)


class MlpForward(Replaced):
    """GlmMoeDsaMLP.forward."""

    def __call__(self, x: Tensor) -> Tensor:
        x_TN = x.reshape(-1, x.shape[-1])
        gate, up = (ops.linear(x_TN, plain_linear(self.module, name)) for name in ("gate_proj", "up_proj"))
        hidden_TI = ops.silu_and_mul(torch.cat([gate, up], dim=-1))
        return ops.linear(hidden_TI, plain_linear(self.module, "down_proj")).view(x.shape)


class GateForward(Replaced):
    """GlmMoeDsaTopkRouter.forward; logits are computed only for those who record them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._wide: tuple[tuple[object, ...], Tensor] | None = None

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        gate = self.module
        x_TN = hidden_states.reshape(-1, gate.hidden_dim)
        w = self._weight()
        ids_TA, weights_TA = ops.moe_gate(
            x_TN, w, gate.e_score_correction_bias.to(w.dtype), gate.top_k, gate.num_group, gate.topk_group, "sigmoid",
            bool(gate.norm_topk_prob), float(gate.routed_scaling_factor),
        )  # fmt: skip
        logits = ops.linear(x_TN.to(w.dtype), w) if gate._forward_hooks else None
        return logits, weights_TA, ids_TA

    def _weight(self) -> Tensor:
        """The router in float32 (float64 in such a model), made once while nothing changes it."""
        w = self.module.weight
        if w.dtype in (torch.float32, torch.float64):
            return w
        if torch.is_grad_enabled() and w.requires_grad:
            self._wide = None
            return w.to(torch.float32)
        now = stamp(w)
        if self._wide is None or self._wide[0] != now:
            self._wide = (now, w.detach().to(torch.float32))
        return self._wide[1]


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The `glm5sdk` entry of ALL_EXPERTS_FUNCTIONS: routed SwiGLU experts of any model that stores them our way.

    Args:
        module: experts with gate_up_proj [E, 2I, N] (gate rows first) and down_proj [E, N, I].
        hidden_states: [T, N].
        top_k_index: [T, A] experts of each token.
        top_k_weights: [T, A].

    Raises:
        ContractError: the module stores or combines its experts in another way.
    """
    wrong = [
        words
        for words, is_so in (
            ("interleaved gate and up rows", not module.is_concatenated),
            ("transposed weights", module.is_transposed),
            ("biases", module.has_bias),
            ("no gate", not module.has_gate),
            ("a norm after each expert", module.has_post_expert_norm),
            ("experts on other ranks", module._is_expert_parallel),
            (f"activation {type(module.act_fn).__name__}", not isinstance(module.act_fn, (nn.SiLU, SiLUActivation))),
        )
        if is_so
    ]
    if wrong:
        raise ContractError(f"experts: {type(module).__name__} has {', '.join(wrong)}, needs plain SwiGLU experts")
    wide = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
    return ops.moe_experts(
        hidden_states, top_k_index.to(torch.int32), top_k_weights.to(wide), module.gate_up_proj, module.down_proj
    )


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
