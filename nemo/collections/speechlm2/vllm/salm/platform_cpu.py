# SPDX-License-Identifier: Apache-2.0
"""Corrections that vLLM's CPU backend needs to run hybrid backbones with MTP drafts. Nothing here runs on a GPU.

``install`` looks for each fault before it corrects it, so a vLLM without the fault is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from vllm.logger import init_logger

logger = init_logger("vllm.nemo_speechlm")  # below vLLM's own, so that its settings hold


class _Sequences:
    """Between the tokens of several sequences, end to end, and a padded batch of them."""

    def __init__(self, query_start_loc: torch.Tensor):
        lengths = query_start_loc.diff()
        self.count, self.longest = len(lengths), int(lengths.max())
        # None where all are equally long, as in most decode steps: then both are views of one memory.
        self.inside = None
        if self.count * self.longest != int(query_start_loc[-1]):
            self.inside = torch.arange(self.longest) < lengths[:, None]

    def pad(self, tokens: torch.Tensor) -> torch.Tensor:
        """(tokens, ...) -> (sequences, longest, ...)"""
        if self.inside is None:
            return tokens[: self.count * self.longest].unflatten(0, (self.count, self.longest))
        padded = tokens.new_zeros(self.count, self.longest, *tokens.shape[1:])
        padded[self.inside] = tokens[: int(self.inside.sum())]
        return padded

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """(sequences, longest, ...) -> (tokens, ...)"""
        return padded.flatten(0, 1) if self.inside is None else padded[self.inside]


def speculative_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> torch.Tensor:
    """Mamba's causal convolution over a decode step in which each sequence brings its last token and its drafts.

    The state of a sequence keeps ``width - 1 + num_drafts`` columns, because how many drafts of the last step were
    accepted is known only now: its history starts at column ``num_accepted_tokens - 1``. Afterwards the state is that
    history without its first column, followed by all tokens of this step. The semantics are those of the GPU kernel
    behind ``causal_conv1d_update``.

    Args:
        x: (tokens, channels), the sequences end to end.
        conv_state: (slots, channels, columns), updated in place.
        weight: (channels, width); bias: (channels,) or None; activation: "silu", "swish" or None.
        conv_state_indices: (sequences,) or (sequences, n), of which the first column counts: each one's slot.
        num_accepted_tokens: (sequences,) tokens of the previous step that stand, at least 1.
        query_start_loc: (sequences + 1,) first token of each sequence in ``x``.

    Returns:
        (tokens, channels) in x's dtype; rows of no sequence are zero.
    """
    sequences, width = _Sequences(query_start_loc), weight.shape[1]
    slots = conv_state_indices.reshape(sequences.count, -1)[:, 0].long()
    columns = num_accepted_tokens.long()[:, None] + torch.arange(-1, width - 2)
    history = conv_state[slots[:, None], :, columns]  # (sequences, width - 1, channels)
    line = torch.cat([history, sequences.pad(x).to(history.dtype)], dim=1)
    # Columns past a shorter sequence's tokens are never read: its next history ends at its own last token.
    conv_state[slots, :, : line.shape[1] - 1] = line[:, 1:].transpose(1, 2)

    windows = (line[:, i : i + sequences.longest] * weight[:, i] for i in range(width))
    result = sum(windows, start=torch.zeros(()) if bias is None else bias)
    if activation is not None:
        result = F.silu(result)
    out = torch.zeros_like(x)
    out[: query_start_loc[-1]] = sequences.unpad(result)
    return out


def speculative_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    state_batch_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    dt_softplus: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Mamba2's state-space step over a decode step in which each sequence brings its last token and its drafts.

    A sequence has a state slot for each token of a step, and starts from that of the last accepted one:
    ``h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]`` and ``y[t] = h[t] C[t] + D x[t]`` (Dao & Gu 2024, eq. 1 with a
    scalar A per head), with h[t] kept in slot t.

    Args:
        state: (slots, heads, head_dim, state_size), updated in place.
        x: (tokens, heads, head_dim), the sequences end to end; B, C: (tokens, groups, state_size).
        dt: (tokens, heads, head_dim), dt_bias, D: (heads, head_dim) and A: (heads, head_dim, state_size), as Mamba1
            has them; in Mamba2 all values of a head are one, so the first is read.
        state_batch_indices: (sequences, 1 + num_drafts) slots.
        num_accepted_tokens, cu_seqlens: as ``num_accepted_tokens`` and ``query_start_loc`` of the convolution.
        out: (tokens, heads, head_dim), written.
        dt_softplus: whether softplus is applied to dt + dt_bias.
    """
    sequences = _Sequences(cu_seqlens)
    values, delta, B, C = (sequences.pad(tensor).float() for tensor in (x, dt[..., 0], B, C))
    if dt_bias is not None:
        delta = delta + dt_bias[:, 0]
    if dt_softplus:
        delta = F.softplus(delta)
    decay = (delta * A[:, 0, 0]).exp()[..., None, None]
    # By groups of heads, (sequences, steps, groups, channels, state_size), then by heads.
    states = (delta[..., None] * values).view(*B.shape[:3], -1, 1) * B[..., None, :]
    by_head = states.view(*values.shape, -1)
    before = state[state_batch_indices.gather(1, num_accepted_tokens.long()[:, None] - 1)[:, 0].long()].float()
    for step in range(sequences.longest):
        before = by_head[:, step].addcmul_(decay[:, step], before)

    result = (states @ C[..., None]).view_as(values)
    if D is not None:
        result = result + D[:, :1] * values
    out[: cu_seqlens[-1]] = sequences.unpad(result)
    slots = state_batch_indices[:, : sequences.longest].long()
    if sequences.inside is not None:
        from vllm.v1.attention.backends.utils import NULL_BLOCK_ID  # here: register() reads this file in every process

        slots = slots.masked_fill(~sequences.inside, NULL_BLOCK_ID)  # a slot that is never read
    state[slots.flatten()] = by_head.flatten(0, 1).to(state.dtype)
    return out


def _agree(theirs: Callable[[], torch.Tensor], ours: torch.Tensor) -> bool:
    try:
        return torch.allclose(theirs(), ours, atol=1e-3)
    except (RuntimeError, TypeError, ValueError):
        return False


def convolution_is_right(update: Callable[..., torch.Tensor]) -> bool:
    """Whether the engine's convolution update honours accepted drafts, seen on one small case."""
    generator = torch.Generator().manual_seed(0)
    x, state = torch.randn(4, 64, generator=generator), torch.randn(3, 64, 4, generator=generator)
    weight, bias = torch.randn(64, 4, generator=generator), torch.randn(64, generator=generator)
    indices = torch.tensor([[1, 0], [2, 0]], dtype=torch.int32)
    accepted, starts = torch.tensor([2, 1], dtype=torch.int32), torch.tensor([0, 2, 4], dtype=torch.int32)
    ours = speculative_conv1d_update(x.clone(), state.clone(), weight, bias, "silu", indices, accepted, starts)
    options = {
        "conv_state_indices": indices,
        "num_accepted_tokens": accepted,
        "query_start_loc": starts,
        "max_query_len": 2,
    }
    return _agree(lambda: update(x.clone(), state.clone(), weight, bias, "silu", **options), ours)


def state_update_is_right(update: Callable[..., torch.Tensor]) -> bool:
    """Whether the engine's state-space update honours accepted drafts, seen on one small case."""
    generator = torch.Generator().manual_seed(0)
    state, x = torch.randn(5, 2, 16, 16, generator=generator), torch.randn(4, 2, 16, generator=generator)
    dt = torch.randn(4, 2, 1, generator=generator).expand(-1, -1, 16)
    B, C = torch.randn(4, 1, 16, generator=generator), torch.randn(4, 1, 16, generator=generator)
    A = -torch.rand(2, 1, 1, generator=generator).expand(-1, 16, 16)
    options: dict[str, Any] = {
        "dt_softplus": True,
        "state_batch_indices": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        "num_accepted_tokens": torch.tensor([2, 1], dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 2, 4], dtype=torch.int32),
    }
    ours = speculative_state_update(state.clone(), x, dt, A, B, C, out=torch.zeros_like(x), **options)
    options |= {"dst_state_batch_indices": options["state_batch_indices"], "out": torch.zeros_like(x)}
    return _agree(lambda: update(state.clone(), x, dt, A, B, C, **options), ours)


def expand_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each sequence's setting (sequences,) for its drafts: (num_tokens,), with one value replaced.

    ``cu_num_tokens`` holds (sequences,) running totals of the drafts.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts)


def expansion_is_right(expand: Callable[..., torch.Tensor]) -> bool:
    """Whether the rejection sampler gets the temperatures, top_k and top_p that the requests have."""
    values, totals = torch.tensor([0.7, 0.0, 1.3]), torch.tensor([2, 2, 5], dtype=torch.int32)
    return _agree(lambda: expand(values, totals, 5, 0, 1), expand_to_tokens(values, totals, 5, 0, 1))


def top_k_is_right(top_k: Callable[..., torch.Tensor]) -> bool:
    """Whether top-k sampling survives a step in which no sequence brings a draft."""
    return _agree(lambda: top_k(torch.empty(0, 8), torch.empty(0, dtype=torch.int32)), torch.empty(0, 8))


def install() -> None:
    """Give Mamba2's mixers and the rejection sampler what they need to be right with drafts.

    What the engine does right is left alone. To be called when a model with a draft is built on a CPU, before it runs;
    calling again changes nothing.
    """
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops.cpu import mamba_ssm
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    if getattr(mamba_mixer2, "_honours_accepted_drafts", False):
        return
    mamba_mixer2._honours_accepted_drafts = True

    convolve = mamba_mixer2.causal_conv1d_update
    if not convolution_is_right(convolve):

        def causal_conv1d_update(
            x, conv_state, weight, bias=None, activation=None, *, num_accepted_tokens=None, **kwargs
        ):
            if num_accepted_tokens is None:
                return convolve(x, conv_state, weight, bias, activation, **kwargs)
            return speculative_conv1d_update(
                x, conv_state, weight, bias, activation, kwargs["conv_state_indices"], num_accepted_tokens,
                kwargs["query_start_loc"],
            )  # fmt: skip

        mamba_mixer2.causal_conv1d_update = causal_conv1d_update
        logger.info("CPU: Mamba2's convolution update replaced by one that honours accepted drafts.")

    update, dispatch = mamba_ssm.selective_state_update, mamba_mixer2.selective_state_update
    if not state_update_is_right(update):

        def selective_state_update(*args, num_accepted_tokens=None, dst_state_batch_indices=None, **kwargs):
            if num_accepted_tokens is None:
                return dispatch(*args, dst_state_batch_indices=dst_state_batch_indices, **kwargs)
            return speculative_state_update(*args, num_accepted_tokens=num_accepted_tokens, **kwargs)

        mamba_mixer2.selective_state_update = selective_state_update
        logger.info("CPU: Mamba2's state-space update replaced by one that honours accepted drafts.")

    if not expansion_is_right(rejection_sampler.expand_batch_to_tokens):
        # Its kernel writes to a copy, and the sampler reads memory that nobody has written.
        rejection_sampler.expand_batch_to_tokens = expand_to_tokens
        logger.info("CPU: the rejection sampler's expansion of sampling settings replaced by one that works.")

    top_k = topk_topp_sampler.apply_top_k_only
    if not top_k_is_right(top_k):
        # It takes the maximum of no rows, and a request with top_k would kill the engine.
        topk_topp_sampler.apply_top_k_only = lambda logits, k: top_k(logits, k) if len(logits) else logits


def turn_off_prefix_caching(cache_config: Any) -> None:
    """Serve a hybrid backbone without prefix caching.

    The states at block borders are kept by Triton kernels that have no CPU substitute; the engine would die on the
    first prompt that is longer than a block.
    """
    if cache_config.enable_prefix_caching:
        cache_config.enable_prefix_caching = False
        logger.warning("CPU: prefix caching is off, because vLLM cannot combine it with a hybrid backbone here.")
