# SPDX-License-Identifier: Apache-2.0
"""The draft: a SALM checkpoint's MTP head, run by vLLM's ``NemotronHMTP`` on the target's fused embeddings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.models.interfaces import MultiModalEmbeddings
from vllm.model_executor.models.nemotron_h_mtp import NemotronHMTP
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.platforms import current_platform

from nemo.collections.speechlm2.vllm.salm import cpu_experts
from nemo.collections.speechlm2.vllm.salm.model import fuse_embeddings
from nemo.collections.speechlm2.vllm.salm.weights import ExpertTensors, VocabularyPadding, plain_layout


class NeMoSpeechLMMTP(NemotronHMTP):
    # Without this flag vLLM drafts from the placeholders' token embeddings, and acceptance on audio collapses.
    supports_multimodal_embeddings = True

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "llm.mtp.layers.": "model.layers.",
            "llm.model.embed_tokens.": "model.embed_tokens.",
            "embed_tokens.": "model.embed_tokens.",
        },
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
        },
        orig_to_new_substr={"._extra_state": None},
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        config = vllm_config.speculative_config.draft_model_config.hf_config
        if current_platform.is_cpu() and "E" in config.get_text_config().mtp_hybrid_override_pattern:
            cpu_experts.install()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.lora = config.lora
        self.padding = VocabularyPadding(self.config.vocab_size)
        # vLLM puts the target's in their places, but the table for pipeline stages, which do not hold it. Its own would
        # take memory while both models load and, on a CPU, be freed in the midst of compiling, with a traceback.
        del self.lm_head
        self.needs_table = get_pp_group().world_size > 1
        if not self.needs_table:
            del self.model.embed_tokens

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        embed, rows = self.model.embed_tokens, self.padding.table_rows
        return fuse_embeddings(input_ids, embed, rows, multimodal_embeddings, is_multimodal)

    get_input_embeddings = embed_input_ids

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.padding.mask(super().compute_logits(hidden_states))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load all of ``llm.mtp.*``; the embedding table and the head are the target's.

        Raises:
            ValueError: a tensor of ``llm.mtp.*`` has no place in one physical head, or one of the head's is missing.
        """
        experts = ExpertTensors(self)
        # Before adapters are merged, since those of the backbone are not the draft's.
        weights = (pair for pair in weights if ".layers." not in pair[0] or "mtp." in pair[0])
        mine = self._own(self.padding.pad(plain_layout(weights, self.lora)), experts)
        loaded = AutoWeightsLoader(self).load_weights(mine, mapper=self.hf_to_vllm_mapper)
        missing = experts.missing | {name for name, _ in self.named_parameters()} - loaded
        if missing:
            raise ValueError(
                f"The checkpoint's MTP head lacks {len(missing)} parameters: {', '.join(sorted(missing))}. Export "
                "llm.mtp.* completely, or set mtp.enabled to false to serve without a draft."
            )
        return loaded

    def _own(
        self, weights: Iterable[tuple[str, torch.Tensor]], experts: ExpertTensors
    ) -> Iterator[tuple[str, torch.Tensor]]:
        steps, places = self.model.pattern_len, set(self.state_dict())
        for name, tensor in weights:
            if name.startswith("llm.mtp."):
                index = re.match(r"llm\.mtp\.layers\.(\d+)\.", name)
                if index is None or int(index.group(1)) >= steps:
                    raise ValueError(
                        f"{name} is not of the one physical MTP head that vLLM executes: the pattern "
                        f"{self.model.pattern_str!r} has the modules llm.mtp.layers.0 to {steps - 1}. Heads with "
                        "weights of their own are not supported; train with use_repeated_layer true, or set "
                        "mtp.enabled to false to serve without a draft."
                    )
                place = self.hf_to_vllm_mapper.map_name(name)
                if parts := experts.take(name, place or "", tensor):
                    yield from parts
                elif place in places:
                    yield name, tensor
                elif place is not None:
                    raise ValueError(
                        f"{name} fits nothing in the MTP head with the pattern {self.model.pattern_str!r}. Does "
                        "config.json describe these weights?"
                    )
            elif self.needs_table and self.hf_to_vllm_mapper.map_name(name) == "model.embed_tokens.weight":
                yield name, tensor
