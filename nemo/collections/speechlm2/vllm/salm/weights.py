# SPDX-License-Identifier: Apache-2.0
"""From the checkpoint's tensors to the engine's, one at a time: names, padding, and what fits nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.models.utils import AutoWeightsLoader, PPMissingLayer, StageMissingLayer, WeightsMapper

from nemo.collections.speechlm2.vllm.salm.lora import LoRAConfig, merge_lora
from nemo.collections.speechlm2.vllm.salm.perception import NEMO_TO_PERCEPTION

# Every layout's names -> those of a plain export.
LAYOUT_RULES = WeightsMapper(
    orig_to_new_prefix={
        "llm.base_model.model.": "llm.",  # PEFT's wrapping
        "backbone.embeddings.": "llm.model.embed_tokens.",  # ModelOpt exports, in Hugging Face's names of a NemotronH
        "backbone.": "llm.model.",
        "lm_head.": "llm.lm_head.",
        "mtp.": "llm.mtp.",
    },
    orig_to_new_substr={".base_layer.": "."},  # the bias; the weight has its adapters merged
)
# A plain export's names -> the engine's.
NAME_RULES = WeightsMapper(
    orig_to_new_substr={**NEMO_TO_PERCEPTION, "._fp32_params.": "."},
    orig_to_new_prefix={
        "llm.mtp.": None,  # set aside for the draft
        "llm.": "language_model.",
        "embed_tokens.": "language_model.model.embed_tokens.",
    },
    orig_to_new_suffix={"._extra_state": None},
)
# Automodel's name for the last norm of a NemotronH is that of an ordinary backbone.
NEMOTRON_H_RULES = WeightsMapper(orig_to_new_substr={"llm.model.norm.": "llm.model.norm_f."})

# The vocabulary's tables, under the engine's names.
EMBEDDING = "language_model.model.embed_tokens.weight"
HEAD = "language_model.lm_head.weight"
# Computed at construction, or of no use at inference.
OPTIONAL_BUFFERS = ("perception.preprocessor.fb", "perception.preprocessor.window", ".num_batches_tracked")


def plain_layout(
    weights: Iterable[tuple[str, torch.Tensor]], lora: LoRAConfig | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The (name, tensor) pairs of any layout as those of a plain export, with LoRA adapters merged."""
    for name, tensor in merge_lora(weights, lora):
        yield LAYOUT_RULES.map_name(name) or name, tensor


class VocabularyPadding:
    """The rows of the vocabulary that the engine's tables have and the checkpoint does not.

    They are zero and must never be produced: a zero row gives logit 0, which beats a row of negative logits.
    """

    def __init__(self, table_rows: int):
        self.table_rows = table_rows
        self.checkpoint_rows = table_rows

    def pad(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass (name, tensor) pairs of a checkpoint on, with zero rows appended to its vocabulary tables.

        Raises:
            ValueError: a table has more rows than ``table_rows``.
        """
        for name, tensor in weights:
            if NAME_RULES.map_name(name) in (EMBEDDING, HEAD):
                rows = len(tensor)
                if rows > self.table_rows:
                    raise ValueError(
                        f"tensor {name} has {rows} rows; expected at most {self.table_rows}: llm_config.vocab_size "
                        "and the few rows that a SALM adds. Correct llm_config.vocab_size."
                    )
                self.checkpoint_rows = rows
                tensor = F.pad(tensor, (0, 0, 0, self.table_rows - rows))
            yield name, tensor

    def mask(self, logits: torch.Tensor | None) -> torch.Tensor | None:
        """Set the padding's logits (tokens, table_rows) to -inf in place; None, on other ranks, stays None."""
        if logits is not None:
            logits[..., self.checkpoint_rows :] = -torch.inf
        return logits


class ExpertTensors:
    """The tensors of a model's routed experts, one per expert and projection, however the checkpoint packs them.

    vLLM's loader passes over expert names it does not know, fills a part where a tensor is too small, and counts a
    layer as loaded once one expert is.

    Attributes:
        missing: engine's names, ``<layer>.experts.<number>.<projection>.weight``, of what this rank still lacks.
    """

    def __init__(self, model: nn.Module):
        modules = model.named_modules()
        self._layers = {
            name.rpartition(".")[0]: module for name, module in modules if isinstance(module, RoutedExperts)
        }
        self._shapes: dict[str, tuple[int, int] | None] = {}
        self.missing: set[str] = set()
        for prefix, layer in self._layers.items():
            up = layer.moe_config.intermediate_size, layer.moe_config.hidden_dim_unpadded
            # As in ("experts.w13_", "experts.3.up_proj.", 3, "w1"): the parameter's name, and the tensor's.
            for parameter, tensor, expert, shard in layer.get_expert_mapping():
                start = parameter.removeprefix("experts.")
                ends = [name.removeprefix(start) for name, _ in layer.named_parameters() if name.startswith(start)]
                names = [f"{prefix.removesuffix('experts')}{tensor}{end}" for end in ends]
                # Of quantized tensors, only vLLM knows the shapes.
                shape = (up[::-1] if shard == "w2" else up) if layer.quant_config is None else None
                self._shapes.update(dict.fromkeys(names, shape))
                if layer._map_global_expert_id_to_local_expert_id(expert) >= 0:
                    self.missing.update(names)

    def take(self, original: str, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Split one tensor of the checkpoint into those of single experts: (engine's name, view) pairs.

        Args:
            original: its name in the checkpoint, for messages.
            name: its name in the model.
            tensor: of one expert, or of all of a layer: Automodel's ``experts.gate_and_up_projs`` and
                ``experts.down_projs`` are (experts, in, out), transformers' ``experts.up_proj`` and
                ``experts.down_proj`` (experts, out, in). Where there is a gate, it is the first half of out.

        Returns:
            nothing if the tensor is no routed expert's.

        Raises:
            ValueError: the tensor has the wrong shape.
        """
        prefix, _, projection = name.rpartition(".")
        pairs = [(name, tensor)] if name in self._shapes else []
        if (shape := self._shapes.get(name)) and tensor.shape != shape:
            raise ValueError(
                f"tensor {original} has shape {tuple(tensor.shape)}; expected {shape} (out, in). {_CORRECT}"
            )
        if (layer := self._layers.get(prefix)) and projection in PACKED_EXPERTS:
            projections, experts = _unpack(original, projection, layer, tensor)
            pairs = [
                (f"{prefix}.{number}.{part}.weight", half)
                for number, expert in enumerate(experts)
                for part, half in zip(projections, expert.chunk(len(projections)), strict=True)
            ]
        self.missing.difference_update(place for place, _ in pairs)
        return pairs


_CORRECT = "Correct the number and sizes of experts in llm_config, or the export."
PACKED_EXPERTS = ("gate_and_up_projs", "gate_up_proj", "up_proj", "down_projs", "down_proj")


def _unpack(original: str, projection: str, layer: Any, tensor: torch.Tensor) -> tuple[list[str], torch.Tensor]:
    """The projections that all experts' ``tensor`` holds, and the tensor as (experts, out, in)."""
    moe = layer.moe_config
    if projection.startswith("down"):
        projections, sizes = [layer.ckpt_down_proj_name], (moe.hidden_dim_unpadded, moe.intermediate_size)
    else:
        projections = [name for name in (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name) if name]
        sizes = len(projections) * moe.intermediate_size, moe.hidden_dim_unpadded
    straight = moe.num_logical_experts, *sizes
    transposed = moe.num_logical_experts, *sizes[::-1]
    if tensor.shape not in (straight, transposed):
        raise ValueError(
            f"tensor {original} has shape {tuple(tensor.shape)}; expected {transposed} (experts, in, out) or "
            f"{straight} (experts, out, in). {_CORRECT}"
        )
    # Only where both shapes are one does the name decide.
    turn = projection.endswith("projs") if straight == transposed else tensor.shape == transposed
    return projections, tensor.transpose(1, 2) if turn else tensor


class SALMLoader:
    """Loads one checkpoint into the target model.

    Args:
        model: the target, with children ``perception`` and ``language_model``.
        padding: of the model's vocabulary tables; learns how many rows the checkpoint holds.
        rules: the checkpoint's names -> the engine's.
    """

    def __init__(self, model: nn.Module, padding: VocabularyPadding, rules: WeightsMapper):
        self.model = model
        self.padding = padding
        self.rules = rules
        self._places = set(model.state_dict())
        self._experts = ExpertTensors(model)
        # Parts that live on another rank, or that the user switched off.
        self._unseen = tuple(
            f"{name}." for name, m in model.named_modules() if isinstance(m, PPMissingLayer | StageMissingLayer)
        )
        self._unmatched: list[str] = []
        self._current = ""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a plain export's (name, tensor) pairs in any order; return the names of what was loaded.

        Raises:
            ValueError: a tensor has the wrong shape or no place, or a parameter has no tensor; all of them are named.
                Or a tensor of the tower holds NaN or infinity.
        """
        try:
            loaded = AutoWeightsLoader(self.model).load_weights(self._tied(self._matched(self.padding.pad(weights))))
        except (AssertionError, RuntimeError) as error:
            raise ValueError(f"tensor {self._current} does not fit the model: {error}") from error
        wanted = {name for name, _ in self.model.named_parameters()}
        wanted |= {name for name in self._places if name.startswith("perception.")}
        missing = sorted(name for name in wanted - loaded if not name.endswith(OPTIONAL_BUFFERS))
        missing += sorted(self._experts.missing)
        problems = []
        if self._unmatched:
            problems.append(f"tensors of the checkpoint that fit nothing in the model: {', '.join(self._unmatched)}")
        if missing:
            problems.append(f"parameters of the model that the checkpoint leaves unloaded: {', '.join(missing)}")
        if problems:
            raise ValueError("; ".join(problems) + ". Does config.json describe these weights?")
        return loaded

    def _matched(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that fit, under the engine's names; the others are noted.

        vLLM's loader would stop at the first unknown name, and pass over an unknown bias in silence.
        """
        backbone = getattr(self.model.language_model, "hf_to_vllm_mapper", WeightsMapper())
        for original, tensor in weights:
            name = self.rules.map_name(original)
            if name is None:
                continue
            self._current = f"{original} {tuple(tensor.shape)}"
            place = name
            if name.startswith("language_model."):
                place = f"language_model.{backbone.map_name(name.removeprefix('language_model.'))}"
            if experts := self._experts.take(original, place, tensor):
                yield from experts
            elif place in self._places or place.startswith(self._unseen):
                if name.startswith("perception.") and not tensor.isfinite().all():
                    raise ValueError(f"tensor {original} holds NaN or infinity. Export weights that did not diverge.")
                yield name, tensor  # the backbone's loader applies its own rules
            else:
                self._unmatched.append(original)

    def _tied(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Let the embedding table stand for a missing head, or the head for a missing table."""
        tables: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name in (EMBEDDING, HEAD):
                tables[name] = tensor
            yield name, tensor
        if len(tables) == 1:
            ((name, tensor),) = tables.items()
            yield HEAD if name == EMBEDDING else EMBEDDING, tensor
