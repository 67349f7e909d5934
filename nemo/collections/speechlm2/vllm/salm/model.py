# SPDX-License-Identifier: Apache-2.0
"""The target model: audio tower and backbone, fused at the placeholders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights
from vllm.config import VllmConfig
from vllm.config.mamba import MambaBackendEnum
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsHybrid,
    MultiModalEmbeddings,
    SupportsMambaPrefixCaching,
    SupportsMultiModal,
    SupportsPP,
)
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM
from vllm.model_executor.models.utils import _merge_multimodal_embeddings, init_vllm_registered_model, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from nemo.collections.speechlm2.vllm.salm import cpu_experts, platform_cpu
from nemo.collections.speechlm2.vllm.salm.audio import (
    SALMDummyInputsBuilder,
    SALMProcessingInfo,
    SALMProcessor,
)
from nemo.collections.speechlm2.vllm.salm.config import NeMoSpeechLMConfig
from nemo.collections.speechlm2.vllm.salm.perception import AudioPerception
from nemo.collections.speechlm2.vllm.salm.weights import (
    NAME_RULES,
    NEMOTRON_H_RULES,
    SALMLoader,
    VocabularyPadding,
    plain_layout,
)


def fuse_embeddings(
    input_ids: torch.Tensor,
    embed: Callable[[torch.Tensor], torch.Tensor],
    table_rows: int,
    multimodal_embeddings: MultiModalEmbeddings | None,
    is_multimodal: torch.Tensor | None,
) -> torch.Tensor:
    """Token embeddings with the audio embeddings in the placeholders' places, for target and draft alike.

    Args:
        input_ids: (tokens,) of a batch of requests.
        embed: the embedding table's lookup, (tokens,) -> (tokens, hidden).
        table_rows: rows of that table. Ids beyond it, which a placeholder may have, or a locator that came as text
            without its audio, are taken for the last row.
        multimodal_embeddings: per audio (placeholders, hidden), in the placeholders' order; None or empty for text.
        is_multimodal: (tokens,) bool, true at the placeholders; needed with embeddings.

    Raises:
        ValueError: there are embeddings but no mask, or more or fewer rows than placeholders.
    """
    embeddings = embed(input_ids.clamp(max=table_rows - 1))
    if multimodal_embeddings is None or len(multimodal_embeddings) == 0:
        return embeddings
    if is_multimodal is None:
        raise ValueError("is_multimodal is None although there are audio embeddings; it must mark their places.")
    # vLLM's merge would spread a single row over all places.
    if sum(map(len, multimodal_embeddings)) == 1 and (places := int(is_multimodal.sum())) != 1:
        raise ValueError(f"there is 1 audio embedding for {places} placeholders; expected one for each.")
    return _merge_multimodal_embeddings(embeddings, multimodal_embeddings, is_multimodal)


def keep_float32(backbone: nn.Module) -> None:
    """Give Mamba2's ``D`` and ``dt_bias`` (heads,) float32 parameters, whatever the model's dtype.

    Checkpoints hold them so, for what a bfloat16 rounds off is multiplied along the whole sequence. ``A`` and the
    correction bias of a MoE are float32 in vLLM already.
    """
    for module in backbone.modules():
        if isinstance(module, MambaMixer2):
            for parameter in (module.D, module.dt_bias):
                parameter.data = parameter.data.float()


@MULTIMODAL_REGISTRY.register_processor(SALMProcessor, info=SALMProcessingInfo, dummy_inputs=SALMDummyInputsBuilder)
class NeMoSpeechLMForConditionalGeneration(
    nn.Module, SupportsMultiModal, SupportsPP, HasInnerState, IsHybrid, SupportsMambaPrefixCaching
):
    """A SALM: the tower's embeddings of the audios take the placeholders' places among the backbone's token embeddings.

    Being hybrid is a property of the backbone: ``NeMoSpeechLMConfig.layer_types`` tells vLLM when this one is not.
    """

    hf_to_vllm_mapper = NAME_RULES

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config: NeMoSpeechLMConfig = vllm_config.model_config.hf_config
        self.config = config
        if current_platform.is_cpu() and vllm_config.speculative_config is not None:
            platform_cpu.install()
        if current_platform.is_cpu() and "E" in getattr(config.text_config, "hybrid_override_pattern", ""):
            cpu_experts.install()
        # transformers' random start values, all overwritten in loading, take 17 s for a tower of 800 M parameters.
        with self._mark_tower_model(vllm_config, "audio"), no_init_weights():  # type: ignore[operator]
            self.perception = AudioPerception(config.perception_config).eval()
        with self._mark_language_model(vllm_config):  # type: ignore[operator]
            self.language_model = init_vllm_registered_model(
                vllm_config, hf_config=config.text_config, prefix=maybe_prefix(prefix, "language_model")
            )
        # FlashInfer's kernel alone wants them in the dtype of the activations, as vLLM allocates them.
        if vllm_config.mamba_config.backend != MambaBackendEnum.FLASHINFER:
            keep_float32(self.language_model)
        self.padding = VocabularyPadding(config.text_config.vocab_size)
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """The text that stands for an audio in a chat message, where the chat template leaves that to vLLM."""
        return NeMoSpeechLMConfig.chat_placeholder if modality == "audio" else None

    # The state of the backbone; every hybrid one we accept is a NemotronH.
    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Any:
        return NemotronHForCausalLM.get_mamba_state_dtype_from_config(_backbone_view(vllm_config))

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        return NemotronHForCausalLM.get_mamba_state_shape_from_config(_backbone_view(vllm_config))

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        return NemotronHForCausalLM.get_mamba_state_copy_func()

    def embed_multimodal(
        self, audio: list[torch.Tensor] | torch.Tensor | None = None, **_: Any
    ) -> MultiModalEmbeddings:
        """Encode a batch of audios, each cut into the chunks that the tower was trained on.

        Args:
            audio: per audio (samples,) float32 at the tower's rate.

        Returns:
            per audio (tokens, hidden) in the model's dtype.
        """
        if audio is None:
            return []
        chunks = [self.config.audio_chunks(len(samples)) for samples in audio]
        pieces = [piece for samples, sizes in zip(audio, chunks, strict=True) for piece in samples.split(sizes)]
        encoded = iter(self.perception.encode_clips(pieces))
        return tuple(torch.cat([next(encoded) for _ in sizes]) for sizes in chunks)

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(tokens,) ids -> (tokens, hidden) embeddings; see ``fuse_embeddings``."""
        embed, rows = self.language_model.embed_input_ids, self.padding.table_rows
        return fuse_embeddings(input_ids, embed, rows, multimodal_embeddings, is_multimodal)

    get_input_embeddings = embed_input_ids  # the older name

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor | IntermediateTensors:
        """The backbone's hidden states (tokens, hidden), or what the next pipeline stage needs."""
        if intermediate_tensors is not None:
            inputs_embeds = None
        return self.language_model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits (tokens, table rows), -inf in the rows that the checkpoint does not hold."""
        return self.padding.mask(self.language_model.compute_logits(hidden_states))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint's (name, tensor) pairs; each is loaded, set aside on purpose, or an error by name."""
        rules = NAME_RULES | NEMOTRON_H_RULES if isinstance(self.language_model, NemotronHForCausalLM) else NAME_RULES
        return SALMLoader(self, self.padding, rules).load(plain_layout(weights, self.config.lora))


def _backbone_view(vllm_config: VllmConfig) -> VllmConfig:
    return vllm_config.with_hf_config(vllm_config.model_config.hf_config.text_config)
