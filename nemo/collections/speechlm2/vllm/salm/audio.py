# SPDX-License-Identifier: Apache-2.0
"""Audio in requests: vLLM's parser, processor and dummy inputs.

A waveform travels to the model as it is, mono float32 at the tower's rate; the number of placeholder tokens follows
from its length alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature
from vllm.multimodal.audio import MONO_AUDIO_SPEC, normalize_audio
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import AudioProcessorItems, MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    InputProcessingContext,
    ProcessorInputs,
    PromptReplacement,
    PromptUpdate,
    TimingContext,
)

from nemo.collections.speechlm2.vllm.salm.config import NeMoSpeechLMConfig

# The longest audio that memory is reserved for at start-up; longer ones are accepted while their tokens fit into the
# scheduler's max_num_batched_tokens.
PROFILED_SECONDS = 40


def to_float_samples(audio: Any) -> np.ndarray:
    """Samples of any real type as float32, in the shape they came in.

    Integers are scaled to [-1, 1] by the range of their type; those of no audio type (int64, Python's own) are taken
    for 16-bit samples. Floats are taken to lie in [-1, 1] already.

    Args:
        audio: list, array or tensor of shape (samples,), (samples, channels) or (channels, samples).

    Raises:
        ValueError: it is empty, of another kind or shape, or holds NaN or infinity.
    """
    if isinstance(audio, torch.Tensor):
        audio = audio.detach().cpu()
        audio = audio.float().numpy() if audio.dtype == torch.bfloat16 else audio.numpy()
    try:
        samples = np.asarray(audio)
    except ValueError as error:
        raise ValueError(f"not one rectangular array of samples ({error}).") from error
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "fiu":
        raise ValueError(
            f"an array of shape {samples.shape} and type {samples.dtype}; expected real numbers of shape (samples,), "
            "(samples, channels) or (channels, samples)."
        )
    if samples.size == 0:
        raise ValueError("empty; expected at least two mel frames of samples.")
    if samples.dtype.kind in "iu":
        if (bits := 8 * samples.dtype.itemsize) == 64:
            bits = 16
            if samples.min() < -(2**15) or samples.max() >= 2**15:
                raise ValueError(f"{samples.dtype} samples beyond 16 bits; give them as int32 or floats.")
        half = 2.0 ** (bits - 1)
        samples = (samples - half * (samples.dtype.kind == "u" and bits < 64)) / half
    with np.errstate(over="ignore"):
        samples = samples.astype(np.float32)
    if not np.isfinite(samples).all():
        raise ValueError("NaN or infinite samples; decode it again, or replace them.")
    return samples


class SALMDataParser(MultiModalDataParser):
    """Turns what users send into mono float32 waveforms at the tower's rate.

    One audio is anything ``to_float_samples`` takes, or a pair of that and its sampling rate in Hz; several audios are
    a list of these. Without a rate, the tower's is assumed.
    """

    def __init__(self, config: NeMoSpeechLMConfig):
        super().__init__(target_sr=config.perception_config.sampling_rate, audio_resample_method="soxr")
        self.shortest = config.perception_config.min_num_samples

    def _parse_audio_data(self, data: Any) -> AudioProcessorItems | None:
        # vLLM's own would take a two-dimensional array for a batch, and stereo tensors for embeddings.
        if data is None:
            return None
        several = isinstance(data, list) and not (data and isinstance(data[0], Real))
        waveforms = []
        for index, audio in enumerate(data if several else [data]):
            try:
                # A missing audio is one that the engine has cached.
                waveforms.append(None if audio is None else self._waveform(audio))
            except ValueError as error:
                raise ValueError(f"audio {index}: {error}") from error
        return AudioProcessorItems(waveforms)

    def _waveform(self, audio: Any) -> np.ndarray:
        rate = None
        if isinstance(audio, tuple):
            if len(audio) != 2 or not isinstance(audio[1], Real) or not 1 <= float(audio[1]) < math.inf:
                raise ValueError("a tuple, which must be (samples, sampling rate in Hz).")
            audio, rate = audio
        # Mixed down before resampling, which takes the last axis for time.
        samples = normalize_audio(to_float_samples(audio), MONO_AUDIO_SPEC)
        if rate is not None:
            samples = self.audio_resampler.resample(samples, orig_sr=float(rate))
        if len(samples) < self.shortest:
            raise ValueError(
                f"too short, {len(samples)} samples at {self.audio_resampler.target_sr} Hz; at least {self.shortest} "
                "(two mel frames) are needed to normalise it."
            )
        return np.ascontiguousarray(samples)


class SALMProcessingInfo(BaseProcessingInfo):
    """What vLLM's processing needs to know about the checkpoint."""

    def __init__(self, ctx: InputProcessingContext):
        super().__init__(ctx)
        if ctx.tokenizer is not None:
            _ = self.locator_id  # a missing tag must be there, and a bad one be known, before any prompt comes

    def get_hf_config(self) -> NeMoSpeechLMConfig:
        return self.ctx.get_hf_config(NeMoSpeechLMConfig)

    def get_data_parser(self) -> SALMDataParser:
        return SALMDataParser(self.get_hf_config())

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"audio": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"audio": self.get_hf_config().num_audio_tokens(self.get_profiled_samples(seq_len))}

    def get_profiled_samples(self, seq_len: int) -> int:
        """Samples of the longest audio to reserve memory for, which must fit into ``seq_len`` tokens."""
        perception = self.get_hf_config().perception_config
        # A token takes eight frames; chunks of the tower may add one token each, which halving leaves room for.
        fitting = max(8 * (seq_len // 2) * perception.hop_length, perception.min_num_samples)
        return min(PROFILED_SECONDS * perception.sampling_rate, fitting)

    @cached_property
    def locator_id(self) -> int:
        """The token id of the audio locator, in the tokenizer that prompts are read with."""
        return self.get_hf_config().find_locator(self.get_tokenizer())


class SALMDummyInputsBuilder(BaseDummyInputsBuilder[SALMProcessingInfo]):
    """Silence of the profiled length."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return self.info.get_hf_config().audio_locator_tag * mm_counts.get("audio", 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        audios = self._get_dummy_audios(
            length=self.info.get_profiled_samples(seq_len),
            num_audios=mm_counts.get("audio", 0),
            overrides=mm_options.get("audio"),
        )
        return {"audio": audios}


class SALMProcessor(BaseMultiModalProcessor[SALMProcessingInfo]):
    """Passes waveforms on, and widens each locator to as many placeholders as the tower will emit embeddings."""

    def _call_hf_processor(self, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, object]) -> BatchFeature:
        return BatchFeature({"audio": [torch.from_numpy(audio) for audio in hf_data["audio"]]})

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {"audio": MultiModalFieldConfig.batched("audio")}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        config, locator = self.info.get_hf_config(), self.info.locator_id

        def placeholders(index: int) -> list[int]:
            num_samples = mm_items.get_items("audio", AudioProcessorItems).get_audio_length(index)
            return [locator] * config.num_audio_tokens(num_samples)

        return [PromptReplacement("audio", [locator], placeholders)]

    def _cached_apply_hf_processor(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> Any:
        locators = inputs.prompt.count(self.info.locator_id)
        audios = inputs.mm_data_items.get_all_counts().get("audio", 0)
        if locators != audios:
            tag = self.info.get_hf_config().audio_locator_tag
            raise ValueError(
                f"the prompt holds {locators} audio locators ({tag}) for {audios} audios; write one for each audio."
            )
        return super()._cached_apply_hf_processor(inputs, timing_ctx)
