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

logger = init_logger(__name__)


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
    width = weight.shape[1]
    slots = conv_state_indices.reshape(len(conv_state_indices), -1)[:, 0].long()
    starts, counts = query_start_loc[:-1].long(), query_start_loc.diff().long()
    longest = int(counts.max())
    steps = torch.arange(longest)
    inside = steps < counts[:, None]
    tokens = (starts[:, None] + steps).masked_fill(~inside, 0)

    history = (num_accepted_tokens.long() - 1)[:, None] + torch.arange(width - 1)
    history = conv_state[slots].gather(2, history[:, None].expand(-1, conv_state.shape[1], -1))
    step = x[tokens].to(conv_state.dtype).masked_fill(~inside[..., None], 0).transpose(1, 2)
    sequence = torch.cat([history, step], dim=2)
    # Columns past a shorter sequence's tokens are never read: its next history ends at its own last token.
    conv_state[slots, :, : width - 2 + longest] = sequence[:, :, 1:]

    result = F.conv1d(sequence.to(weight.dtype), weight[:, None], bias, groups=len(weight))
    if activation is not None:
        result = F.silu(result)
    out = torch.zeros_like(x)
    out[tokens[inside]] = result.transpose(1, 2)[inside].to(x.dtype)
    return out


def _drops_accepted_tokens(update: Callable[..., torch.Tensor]) -> bool:
    """Whether an engine's update ignores how many drafts were accepted, seen on one small case."""
    generator = torch.Generator().manual_seed(0)
    x, state = torch.randn(4, 64, generator=generator), torch.randn(3, 64, 4, generator=generator)
    weight, bias = torch.randn(64, 4, generator=generator), torch.randn(64, generator=generator)
    indices = torch.tensor([[1, 0], [2, 0]], dtype=torch.int32)
    accepted, starts = torch.tensor([2, 1], dtype=torch.int32), torch.tensor([0, 2, 4], dtype=torch.int32)
    ours = speculative_conv1d_update(x.clone(), state.clone(), weight, bias, "silu", indices, accepted, starts)
    try:
        theirs = update(
            x.clone(), state.clone(), weight, bias, "silu", conv_state_indices=indices,
            num_accepted_tokens=accepted, query_start_loc=starts, max_query_len=2,
        )  # fmt: skip
    except (RuntimeError, TypeError, ValueError):
        return True
    return not torch.allclose(ours, theirs, atol=1e-4)


def install() -> None:
    """Give Mamba2 mixers a convolution update that honours accepted drafts, if the engine's own does not.

    To be called when a hybrid model is built on a CPU, before it runs; calling again changes nothing.
    """
    from vllm.model_executor.layers.mamba import mamba_mixer2

    original = mamba_mixer2.causal_conv1d_update
    if getattr(original, "honours_accepted_tokens", False) or not _drops_accepted_tokens(original):
        return

    def update(x, conv_state, weight, bias=None, activation=None, *, num_accepted_tokens=None, **kwargs):
        if num_accepted_tokens is None:
            return original(x, conv_state, weight, bias, activation, **kwargs)
        return speculative_conv1d_update(
            x, conv_state, weight, bias, activation, kwargs["conv_state_indices"], num_accepted_tokens,
            kwargs["query_start_loc"],
        )  # fmt: skip

    update.honours_accepted_tokens = True  # type: ignore[attr-defined]
    mamba_mixer2.causal_conv1d_update = update
    logger.info("CPU: Mamba2's convolution update replaced by one that honours rejected drafts.")


def turn_off_prefix_caching(cache_config: Any) -> None:
    """Serve a hybrid backbone with a draft without prefix caching.

    The states at block borders would be copied by a Triton kernel, which has no CPU substitute; the engine would die on
    the first request.
    """
    if cache_config.enable_prefix_caching:
        cache_config.enable_prefix_caching = False
        logger.warning("CPU: prefix caching is off, because vLLM cannot combine it with a hybrid backbone and a draft here.")
