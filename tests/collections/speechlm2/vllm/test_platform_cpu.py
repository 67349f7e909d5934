# SPDX-License-Identifier: Apache-2.0
"""What the CPU corrects under speculative decoding: Mamba2's updates, against a walk token by token, and sampling."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_update_cpu
from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_only
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

from nemo.collections.speechlm2.vllm.salm import platform_cpu

SLOTS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], dtype=torch.int32)
DRAFTS = SLOTS.shape[1] - 1


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def steps(seed: int, count: int = 12):
    """Random query lengths of three sequences, and how many of those tokens will stand."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        lengths = torch.randint(1, DRAFTS + 2, (3,), generator=generator)
        yield lengths.tolist(), [int(torch.randint(1, n + 1, (1,), generator=generator)) for n in lengths.tolist()]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolution_walks_only_over_what_stands(bias, activation):
    torch.manual_seed(0)
    channels, width = 6, 4
    weight, bias = torch.randn(channels, width), torch.randn(channels) if bias else None
    # The engine's states are strided views into its cache pages.
    state = torch.randn(13, width - 1 + DRAFTS, channels + 5)[..., :channels].transpose(1, 2)
    history = [state[slot, :, : width - 1].clone() for slot in SLOTS[:, 0]]
    accepted = [1, 1, 1]
    for lengths, standing in steps(0):
        tokens = [torch.randn(n, channels) for n in lengths]
        starts = ints([0, *torch.tensor(lengths).cumsum(0).tolist()])
        out = platform_cpu.speculative_conv1d_update(
            torch.cat(tokens), state, weight, bias, activation, SLOTS, ints(accepted), starts
        )
        full = [torch.cat([past, new.T], dim=1) for past, new in zip(history, tokens, strict=True)]
        expected = torch.cat([F.conv1d(x[None], weight[:, None], bias, groups=channels)[0].T for x in full])
        torch.testing.assert_close(out, F.silu(expected) if activation else expected, atol=1e-5, rtol=1e-5)
        history = [x[:, n : n + width - 1] for x, n in zip(full, standing, strict=True)]
        accepted = standing


def walk(state, x, dt, A, B, C, D, dt_bias):
    """Mamba2's recurrence for one sequence (Dao & Gu 2024): outputs, and the state after each token."""
    outputs, states = [], []
    for t in range(len(x)):
        delta = F.softplus(dt[t] + dt_bias)
        b, c = (v[t].repeat_interleave(x.shape[1] // v.shape[1], 0)[:, None] for v in (B, C))
        state = state * torch.exp(delta[..., None] * A) + (delta * x[t])[..., None] * b
        outputs.append((state * c).sum(-1) + D * x[t])
        states.append(state)
    return torch.stack(outputs), states


def test_state_walks_only_over_what_stands():
    torch.manual_seed(0)
    heads, size, groups, width = 4, 16, 2, 16
    A, D, dt_bias = (
        -torch.rand(heads)[:, None, None].expand(-1, size, width),
        torch.rand(heads, 1),
        torch.rand(heads, 1),
    )
    D, dt_bias = D.expand(-1, size), dt_bias.expand(-1, size)
    pages = torch.randn(13, heads * size * width + 99)
    state = pages[:, : heads * size * width].view(13, heads, size, width)
    now = [state[slot].clone() for slot in SLOTS[:, 0]]
    accepted = [1, 1, 1]
    for lengths, standing in steps(1):
        total = sum(lengths)
        starts = ints([0, *torch.tensor(lengths).cumsum(0).tolist()])
        x, dt = torch.randn(total, heads, size), torch.randn(total, heads, 1).expand(-1, -1, size)
        B, C = torch.randn(total, groups, width), torch.randn(total, groups, width)
        out, unused = torch.full_like(x, torch.nan), torch.cat([SLOTS[i, n:] for i, n in enumerate(lengths)])
        kept = state[unused].clone()
        platform_cpu.speculative_state_update(
            state, x, dt, A, B, C, D, dt_bias, dt_softplus=True,
            state_batch_indices=SLOTS, num_accepted_tokens=ints(accepted), cu_seqlens=starts, out=out,
        )  # fmt: skip
        assert torch.equal(state[unused], kept)
        for i, (first, last) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            part = slice(first, last)
            expected, states = walk(now[i], x[part], dt[part], A, B[part], C[part], D, dt_bias)
            torch.testing.assert_close(out[part], expected, atol=1e-4, rtol=1e-4)
            now[i] = states[standing[i] - 1]
        accepted = standing


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_settings_are_repeated_for_each_draft(dtype):
    totals = ints([2, 2, 5])
    expanded = platform_cpu.expand_to_tokens(torch.tensor([7, 8, 0], dtype=dtype), totals, 5, 0, 1)
    assert expanded.tolist() == [7, 7, 1, 1, 1]
    assert expanded.dtype == dtype


def test_this_engines_own_updates_are_wrong():
    """Fails when vLLM heals: then the corrections may go."""
    assert not platform_cpu.convolution_is_right(causal_conv1d_update_cpu)
    assert not platform_cpu.state_update_is_right(selective_state_update)
    assert not platform_cpu.top_k_is_right(apply_top_k_only)
    assert not platform_cpu.expansion_is_right(expand_batch_to_tokens)


def test_right_updates_are_left_alone(monkeypatch):
    def convolution(
        x, state, weight, bias, activation, *, conv_state_indices, num_accepted_tokens, query_start_loc, **_
    ):
        return platform_cpu.speculative_conv1d_update(
            x, state, weight, bias, activation, conv_state_indices, num_accepted_tokens, query_start_loc
        )

    def state_update(*args, num_accepted_tokens=None, dst_state_batch_indices=None, **kwargs):
        if num_accepted_tokens is None:
            return selective_state_update(*args, **kwargs)
        kwargs["num_accepted_tokens"] = num_accepted_tokens
        return platform_cpu.speculative_state_update(*args, **kwargs)

    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops.cpu import mamba_ssm

    assert platform_cpu.convolution_is_right(convolution)
    assert platform_cpu.state_update_is_right(state_update)
    monkeypatch.setattr(mamba_mixer2, "_honours_accepted_drafts", False, raising=False)
    monkeypatch.setattr(mamba_mixer2, "causal_conv1d_update", convolution)
    monkeypatch.setattr(mamba_mixer2, "selective_state_update", state_update)
    monkeypatch.setattr(mamba_ssm, "selective_state_update", state_update)
    platform_cpu.install()
    assert mamba_mixer2.causal_conv1d_update is convolution
    assert mamba_mixer2.selective_state_update is state_update


@pytest.fixture
def stock(monkeypatch):
    """vLLM's own updates and sampling in their places; restored afterwards, whatever an engine here has installed."""
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    monkeypatch.setattr(mamba_mixer2, "_honours_accepted_drafts", False, raising=False)
    places = {
        (mamba_mixer2, "causal_conv1d_update"): causal_conv1d_update_cpu,
        (mamba_mixer2, "selective_state_update"): selective_state_update,
        (rejection_sampler, "expand_batch_to_tokens"): expand_batch_to_tokens,
        (topk_topp_sampler, "apply_top_k_only"): apply_top_k_only,
    }
    for (module, name), function in places.items():
        monkeypatch.setattr(module, name, function)
    return places


def test_wrong_ones_are_replaced_once(stock):
    platform_cpu.install()
    once = {place: getattr(*place) for place in stock}
    assert all(once[place] is not function for place, function in stock.items())
    expand, top_k = list(once.values())[2:]
    assert platform_cpu.expansion_is_right(expand)
    assert platform_cpu.top_k_is_right(top_k)
    platform_cpu.install()
    assert once == {place: getattr(*place) for place in stock}


def test_prefix_caching_is_turned_off():
    cache = SimpleNamespace(enable_prefix_caching=True)
    platform_cpu.turn_off_prefix_caching(cache)
    assert cache.enable_prefix_caching is False
