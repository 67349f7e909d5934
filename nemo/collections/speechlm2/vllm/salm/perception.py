# SPDX-License-Identifier: Apache-2.0
"""The audio tower: NeMo's mel front end, FastConformer encoder, modality adapter and projection.

The encoder is transformers' ``ParakeetEncoder``, which computes what NeMo's ``ConformerEncoder`` computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import ParakeetEncoder, ParakeetEncoderConfig
from transformers.audio_utils import mel_filter_bank

from .perception_config import ConformerConfig, MelConfig, PerceptionConfig

# Parts of a parameter's name, NeMo's -> ours, to be replaced in this order (in both directions).
NEMO_TO_PERCEPTION = {
    "preprocessor.featurizer.": "preprocessor.",
    ".pre_encode.conv.": ".subsampling.layers.",
    ".pre_encode.out.": ".subsampling.linear.",
    ".pre_encode.": ".subsampling.",
    ".self_attn.linear_q.": ".self_attn.q_proj.",
    ".self_attn.linear_k.": ".self_attn.k_proj.",
    ".self_attn.linear_v.": ".self_attn.v_proj.",
    ".self_attn.linear_out.": ".self_attn.o_proj.",
    ".self_attn.linear_pos.": ".self_attn.relative_k_proj.",
    ".self_attn.pos_bias_u": ".self_attn.bias_u",
    ".self_attn.pos_bias_v": ".self_attn.bias_v",
    ".conv.batch_norm.": ".conv.norm.",
}

# The most audio, padding included, in one pass of the tower over several clips, which takes 4 MB a second in bfloat16
# (128 mels, 256 channels of subsampling).
MAX_SECONDS_PER_PASS = 320


class MelSpectrogram(nn.Module):
    """Normalised log-mel features as NeMo's ``FilterbankFeatures`` computes them at inference, always in float32.

    Buffers: ``fb`` (1, mels, n_fft // 2 + 1) and ``window`` (window length,), both replaced by the checkpoint's.
    """

    fb: torch.Tensor
    window: torch.Tensor

    def __init__(self, config: MelConfig):
        super().__init__()
        self.config = config
        filters = mel_filter_bank(
            num_frequency_bins=config.n_fft // 2 + 1,
            num_mel_filters=config.num_mels,
            min_frequency=config.min_frequency,
            max_frequency=config.max_frequency,
            sampling_rate=config.sampling_rate,
            norm="slaney",
            mel_scale="slaney",
        )
        self.register_buffer("fb", torch.tensor(filters.T[None], dtype=torch.float32))
        self.register_buffer("window", torch.hann_window(config.window_length, periodic=False, dtype=torch.float32))

    def forward(self, audio: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn clips into mel frames.

        Args:
            audio: (batch, samples) waveforms in [-1, 1]; what lies past a clip's length is ignored.
            lengths: (batch,) samples per clip, each at least one hop.

        Returns:
            Features (batch, samples // hop, mels) float32, zero past a clip's frames; valid frames per clip (batch,).
        """
        config = self.config
        audio = audio.float()
        audio = torch.cat([audio[:, :1], audio[:, 1:] - config.preemphasis * audio[:, :-1]], dim=1)
        audio = audio.masked_fill(torch.arange(audio.shape[1], device=audio.device) >= lengths[:, None], 0.0)
        spectrum = torch.stft(
            audio,
            n_fft=config.n_fft,
            hop_length=config.hop_length,
            win_length=config.window_length,
            window=self.window.float(),
            center=True,
            pad_mode="constant",
            return_complex=True,
        )
        power = torch.view_as_real(spectrum).square().sum(-1)
        with torch.autocast(power.device.type, enabled=False):
            energies = self.fb.float() @ power
        features = torch.log(energies + config.log_guard).transpose(1, 2)

        # A centred transform gives one frame more than there are hops; NeMo does not count it.
        features = features[:, : audio.shape[1] // config.hop_length]
        frames = lengths // config.hop_length
        valid = (torch.arange(features.shape[1], device=audio.device) < frames[:, None])[..., None]
        # Taken relative to the first frame, a band that never changes (digital silence) has mean and deviation exactly
        # zero. Else rounding errors, divided by 1e-5, would become features that depend on the padding.
        features = (features - features[:, :1]).masked_fill(~valid, 0.0)
        count = frames[:, None, None]
        centred = (features - features.sum(1, keepdim=True) / count).masked_fill(~valid, 0.0)
        deviation = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        return centred / (deviation + 1e-5), frames


class _FrameProjection(nn.Linear):
    """Stands where a tower has its subsampling convolutions, in a Conformer that keeps the frame rate."""

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input)


def _conformer(config: ConformerConfig) -> ParakeetEncoder:
    encoder = ParakeetEncoder(
        ParakeetEncoderConfig(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.feed_forward_size,
            attention_bias=config.bias,
            convolution_bias=config.bias,
            conv_kernel_size=config.kernel_size,
            subsampling_factor=config.subsampling_factor,
            subsampling_conv_channels=config.subsampling_channels,
            num_mel_bins=config.feat_in,
            scale_input=config.xscaling,
            dropout=0.0,
            layerdrop=0.0,
            activation_dropout=0.0,
            attention_dropout=0.0,
            # Adds scores to the mask (the dtype's lowest number) in float32; eager attention overflows in float16.
            attn_implementation="sdpa",
        )
    )
    if config.subsampling_factor == 1:
        encoder.subsampling = _FrameProjection(config.feat_in, config.hidden_size)
    return encoder


class AudioPerception(nn.Module):
    """Waveforms to embeddings of the language model's width."""

    def __init__(self, config: PerceptionConfig):
        super().__init__()
        self.config = config
        self.preprocessor = MelSpectrogram(config.mel)
        self.encoder = _conformer(config.encoder)
        self.modality_adapter = _conformer(config.adapter) if config.adapter else None
        self.proj = nn.Linear((config.adapter or config.encoder).hidden_size, config.output_dim)

    def forward(self, audio: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode clips.

        Args:
            audio: (batch, samples) float32 waveforms at ``config.sampling_rate``, padded to a common length.
            lengths: (batch,) samples per clip, each at least ``config.min_num_samples``.

        Returns:
            Embeddings (batch, tokens, output_dim) in the tower's dtype, meaningless past a clip's tokens, and tokens
            per clip (batch,), which are ``config.num_tokens(lengths)``.
        """
        return self.encode(*self.preprocessor(audio, lengths))

    def encode_clips(self, clips: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Encode any number of clips in bounded memory: of ``MAX_SECONDS_PER_PASS``, or of the longest clip.

        Args:
            clips: per clip (samples,) float32, as ``forward`` takes them.

        Returns:
            Embeddings (tokens, output_dim) of each clip, independent of the others.
        """
        embeddings = list(clips)
        sizes = [len(clip) for clip in clips]
        for batch in _passes(sizes, MAX_SECONDS_PER_PASS * self.config.sampling_rate):
            lengths = torch.tensor([sizes[index] for index in batch], device=clips[0].device)
            padded, _ = self(pad_sequence([clips[index] for index in batch], batch_first=True), lengths)
            for index, rows in zip(batch, padded, strict=True):
                # Counted on the host, which so waits for no device.
                embeddings[index] = rows[: self.config.num_tokens(sizes[index])]
        return embeddings

    def encode(self, features: torch.Tensor, frame_lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``forward`` from mel features (batch, frames, mels) and valid frames per clip (batch,) on."""
        mask = torch.arange(features.shape[1], device=features.device) < frame_lengths[:, None]
        output = self.encoder(features.to(self.proj.weight.dtype), attention_mask=mask)
        hidden, mask = output.last_hidden_state, output.attention_mask
        if self.modality_adapter is not None:
            hidden = self.modality_adapter(hidden, attention_mask=mask).last_hidden_state
        return self.proj(hidden), mask.sum(-1)


def _passes(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Group clips of these sizes, by their indices, so that padded to one length a group has at most ``most``."""
    group: list[int] = []
    for index in sorted(range(len(sizes)), key=sizes.__getitem__):
        if group and (len(group) + 1) * sizes[index] > most:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
