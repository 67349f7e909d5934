# SPDX-License-Identifier: Apache-2.0
"""Non-gated experts on CPU: against the dense formula and transformers' block; when they stand back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from random_checkpoints import HIDDEN, build_modules
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized

from nemo.collections.speechlm2.vllm.salm import cpu_experts

# As vLLM has them: this is run before any test, and so before a model of this process installs ours.
POST_INIT, KERNELS = FusedMoEConfig.__post_init__, unquantized.backend_to_kernel_cls
ACTIVATIONS = {
    "relu2_no_mul": lambda x: F.relu(x) ** 2,
    "silu_no_mul": F.silu,
    "gelu_no_mul": F.gelu,
    "gelu_tanh_no_mul": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.fixture
def stock(monkeypatch):
    """vLLM without our experts, and afterwards as it was before."""
    monkeypatch.setattr(FusedMoEConfig, "__post_init__", POST_INIT)
    monkeypatch.setattr(unquantized, "backend_to_kernel_cls", KERNELS)


def layer(activation: MoEActivation = MoEActivation.RELU2_NO_MUL, **changes) -> FusedMoEConfig:
    settings = {
        "num_experts": 8, "num_local_experts": 8, "num_logical_experts": 8, "experts_per_token": 3,
        "hidden_dim": HIDDEN, "intermediate_size": 48, "device": "cpu", "in_dtype": torch.float32,
        "routing_method": RoutingMethodType.DeepSeekV3,
        "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
    }  # fmt: skip
    return FusedMoEConfig(activation=activation, **{**settings, **changes})


# --- what they compute


def draw(tokens: int) -> list[torch.Tensor]:
    """Inputs (tokens, 10), up (8, 6, 10), down (8, 10, 6), weights and ids (tokens, 3); expert 5 is nobody's."""
    generator = torch.Generator().manual_seed(tokens)
    x, up, down = (torch.randn(shape, generator=generator) for shape in ((tokens, 10), (8, 6, 10), (8, 10, 6)))
    order = torch.rand(tokens, 8, generator=generator).index_fill(1, torch.tensor(5), 2.0).argsort(1)
    return [x, up, down, torch.rand(tokens, 3, generator=generator), order[:, :3].int()]


def dense(x, up, down, weights, ids, activation: str) -> torch.Tensor:
    """All experts on all tokens, then the weights: (tokens, 10)."""
    table = torch.zeros(len(x), len(up) + 1).scatter_(1, ids.long() % (len(up) + 1), weights)[:, :-1]
    hidden = ACTIVATIONS[activation](torch.einsum("td,eid->tei", x, up))
    return torch.einsum("tei,edi,te->td", hidden, down, table)


@pytest.mark.parametrize("tokens", [1, 2, 57])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_they_are_the_dense_formula(activation, tokens):
    inputs, output = draw(tokens), torch.full((tokens, 10), torch.nan)
    before = [tensor.clone() for tensor in inputs]
    cpu_experts.non_gated_experts(output, *inputs, activation)
    torch.testing.assert_close(output, dense(*inputs, activation), atol=1e-4, rtol=1e-4)
    assert all(map(torch.equal, inputs, before))


def test_they_sum_up_in_float32():
    """256 + 7 x 0.75: bfloat16, whose neighbour of 256 is 258, would stay at 256."""
    x, up, output = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((1, 1), (8, 1, 1), (1, 1)))
    down = torch.tensor([256] + [0.75] * 7, dtype=torch.bfloat16)[:, None, None]
    cpu_experts.non_gated_experts(output, x, up, down, torch.ones(1, 8), torch.arange(8)[None], "relu2_no_mul")
    assert output.item() == 262


def test_they_can_be_compiled():
    arguments = (torch.empty(5, 10), *draw(5), "relu2_no_mul")
    torch.library.opcheck(cpu_experts.non_gated_experts, arguments)


@pytest.fixture
def experts(stock):
    cpu_experts.install()
    return cpu_experts.NonGatedCPUExperts(layer(), FusedMoEQuantConfig.make())


def run(experts, x, up, down, weights, ids, expert_map=None, on_input=False) -> torch.Tensor:
    output, nothing = torch.full_like(x, torch.nan), torch.empty(0)
    experts.apply(
        output=output, hidden_states=x, w1=up, w2=down, topk_weights=weights, topk_ids=ids,
        activation=MoEActivation.RELU2_NO_MUL, global_num_experts=8, expert_map=expert_map, a1q_scale=None,
        a2_scale=None, workspace13=nothing, workspace2=nothing, expert_tokens_meta=None,
        apply_router_weight_on_input=on_input,
    )  # fmt: skip
    return output


def test_ranks_add_up_to_the_whole(experts):
    x, up, down, weights, ids = draw(57)
    total = 0
    for mine in ([0, 3, 5], [1, 2, 4, 6, 7]):
        expert_map = torch.full((8,), -1)
        expert_map[mine] = torch.arange(len(mine))
        total = total + run(experts, x, up[mine], down[mine], weights, ids, expert_map)
    torch.testing.assert_close(total, dense(x, up, down, weights, ids, "relu2_no_mul"), atol=1e-4, rtol=1e-4)


def test_weights_that_the_input_holds_are_not_applied_again(experts):
    x, up, down, weights, ids = draw(5)
    ones = torch.ones_like(weights)
    output = run(experts, x, up, down, weights, ids, on_input=True)
    torch.testing.assert_close(output, dense(x, up, down, ones, ids, "relu2_no_mul"), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backbone", ["nemotron_moe", "nemotron_latent"])
@torch.no_grad()
def test_an_e_layer_is_that_of_transformers(checkpoint, build_model, backbone):
    """Router, its groups and correction, scaling, shared experts and latent projections included."""
    model = build_model(checkpoint(backbone), dtype="float32").language_model
    theirs, _ = build_modules(backbone)
    x = torch.randn(23, HIDDEN, generator=torch.Generator().manual_seed(0))
    with set_forward_context(None, model.vllm_config):
        output = model.model.layers[1].mixer(x)
    torch.testing.assert_close(output, theirs.model.layers[1].mixer(x[None])[0], atol=1e-4, rtol=1e-4)


# --- when they are used


def selected(config: FusedMoEConfig) -> type:
    return unquantized.select_unquantized_moe_backend(config)[1]


def test_this_vllm_has_none(stock):
    """Fails when vLLM heals: then ours may go."""
    assert cpu_experts.vllm_refuses()
    with pytest.raises(NotImplementedError, match="is_act_and_mul=False"):
        layer()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_once_installed_they_are_used(stock, activation):
    cpu_experts.install()
    assert not cpu_experts.vllm_refuses()
    assert selected(layer(MoEActivation(activation))) is cpu_experts.NonGatedCPUExperts


def test_installing_again_changes_nothing(stock):
    cpu_experts.install()
    once = FusedMoEConfig.__post_init__, unquantized.backend_to_kernel_cls
    assert once[0] is not POST_INIT and once[1] is not KERNELS
    cpu_experts.install()
    assert once == (FusedMoEConfig.__post_init__, unquantized.backend_to_kernel_cls)


def test_gated_experts_are_left_alone(stock):
    before = selected(layer(MoEActivation.SILU))
    cpu_experts.install()
    assert selected(layer(MoEActivation.SILU)) is before
    assert issubclass(before, CPUUnquantizedExperts) and before is not cpu_experts.NonGatedCPUExperts
    # A gated layer that vLLM cannot run stays one: its kernel wants multiples of 32.
    with pytest.raises(NotImplementedError):
        selected(layer(MoEActivation.SILU, hidden_dim=HIDDEN + 1))


def test_a_gated_layer_that_vllm_refuses_stays_refused(stock, monkeypatch):
    def refuse(self):
        raise NotImplementedError("no experts at all")

    monkeypatch.setattr(FusedMoEConfig, "__post_init__", refuse)
    cpu_experts.install()
    with pytest.raises(NotImplementedError, match="no experts at all"):
        layer(MoEActivation.SILU)


def test_other_backends_are_left_alone(stock):
    cpu_experts.install()
    triton = unquantized.UnquantizedMoeBackend.BATCHED_TRITON
    assert unquantized.backend_to_kernel_cls(triton) == KERNELS(triton)


def test_biases_are_refused(stock):
    cpu_experts.install()
    with pytest.raises(NotImplementedError):
        selected(layer(has_bias=True))


def test_experts_of_vllms_own_are_preferred(stock, monkeypatch):
    """A vLLM that no longer refuses is left as it is."""

    class Theirs(cpu_experts.NonGatedCPUExperts):
        pass

    def kernels(backend):
        return [*KERNELS(backend), Theirs]

    cpu_experts.install()  # for its __post_init__, which accepts such layers
    monkeypatch.setattr(unquantized, "backend_to_kernel_cls", kernels)
    post_init = FusedMoEConfig.__post_init__
    cpu_experts.install()
    assert unquantized.backend_to_kernel_cls is kernels
    assert FusedMoEConfig.__post_init__ is post_init
    assert selected(layer()) is Theirs
