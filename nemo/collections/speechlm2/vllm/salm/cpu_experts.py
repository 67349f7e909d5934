# SPDX-License-Identifier: Apache-2.0
"""Non-gated experts on CPU, for the ``E`` layers of a NemotronH. vLLM's CPU backend has only gated ones.

``install`` asks vLLM first, so one that has such experts is left as it is; gated experts are vLLM's own in any case.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm.model_executor.layers.fused_moe.activation import (
    MoEActivation,
    apply_moe_activation,
    apply_moe_activation_supported,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized

logger = init_logger("vllm.nemo_speechlm")  # below vLLM's own, so that its settings hold


# An operator of its own, because the sizes depend on the data and torch.compile would not trace it.
@torch.library.custom_op("nemo_speechlm::non_gated_experts", mutates_args=("output",))
def non_gated_experts(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
) -> None:
    """Each token's weighted sum over its experts e of ``down[e] activation(up[e] x)``, in float32.

    The formula is that of transformers' ``NemotronHExperts``.

    Args:
        output: (tokens, hidden), written.
        hidden_states: (tokens, hidden).
        up: (experts, intermediate, hidden); down: (experts, hidden, intermediate).
        weights, ids: (tokens, k) of each token's experts; an id of -1 is another rank's, and left out.
        activation: a value of ``MoEActivation`` without a gate.
    """
    order = ids.flatten().argsort()
    experts, counts = ids.flatten()[order].unique_consecutive(return_counts=True)
    total = torch.zeros(output.shape, dtype=torch.float32)
    for expert, chosen in zip(experts.tolist(), order.split(counts.tolist()), strict=True):
        if expert >= 0:
            tokens = chosen // ids.shape[1]
            hidden = F.linear(hidden_states[tokens], up[expert])
            apply_moe_activation(MoEActivation(activation), hidden, hidden)
            total.index_add_(0, tokens, F.linear(hidden, down[expert]).float() * weights.flatten()[chosen, None])
    output.copy_(total)


class NonGatedCPUExperts(CPUUnquantizedExperts):
    """``non_gated_experts`` behind vLLM's interface: right rather than fast, on the weights as they were loaded."""

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return not activation.is_gated and apply_moe_activation_supported(activation)

    @classmethod
    def _supports_grouped_gemm(cls, config: moe_config.FusedMoEConfig) -> tuple[bool, str | None]:
        return (False, "kernel does not support biases") if config.has_bias else (True, None)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: the gated ones pack theirs for their kernel."""

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *,
        expert_map, apply_router_weight_on_input, **_,
    ) -> None:  # fmt: skip
        if expert_map is not None:
            topk_ids = expert_map[topk_ids]
        if apply_router_weight_on_input:  # done before
            topk_weights = torch.ones_like(topk_weights)
        non_gated_experts(output, hidden_states, w1, w2, topk_weights, topk_ids, activation.value)


def vllm_refuses() -> bool:
    """Whether this vLLM, as it is now, finds no experts for a small non-gated layer."""
    try:
        config = moe_config.FusedMoEConfig(
            num_experts=2, num_local_experts=2, num_logical_experts=2, experts_per_token=1, hidden_dim=64,
            intermediate_size=64, activation=MoEActivation.RELU2_NO_MUL, device="cpu", in_dtype=torch.float32,
            routing_method=moe_config.RoutingMethodType.DeepSeekV3,
            moe_parallel_config=moe_config.FusedMoEParallelConfig.make_no_parallel(),
        )  # fmt: skip
        unquantized.select_unquantized_moe_backend(config)
    except NotImplementedError:
        return True
    return False


def install() -> None:
    """Give vLLM non-gated experts, unless it has some. To be called on a CPU, before a model with ``E`` is built."""
    if not vllm_refuses():
        return
    post_init, kernels = moe_config.FusedMoEConfig.__post_init__, unquantized.backend_to_kernel_cls

    def accept_non_gated(self) -> None:
        # Once all its fields are set, it refuses non-gated activations on every CPU, whatever experts there are.
        try:
            post_init(self)
        except NotImplementedError:
            if self.is_act_and_mul:
                raise

    def with_non_gated(backend):
        # vLLM takes the first that supports a layer; its list cannot be extended from outside.
        ours = [NonGatedCPUExperts] if backend is unquantized.UnquantizedMoeBackend.CPU else []
        return [*kernels(backend), *ours]

    moe_config.FusedMoEConfig.__post_init__ = accept_non_gated
    unquantized.backend_to_kernel_cls = with_non_gated
    logger.info("CPU: non-gated experts installed.")
