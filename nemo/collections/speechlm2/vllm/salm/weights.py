# SPDX-License-Identifier: Apache-2.0
"""From the checkpoint's tensors to the engine's, one at a time: names, padding, and what fits nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.models.utils import AutoWeightsLoader, PPMissingLayer, StageMissingLayer, WeightsMapper

from nemo.collections.speechlm2.vllm.salm.perception import NEMO_TO_PERCEPTION

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
_OPTIONAL_BUFFERS = ("perception.preprocessor.fb", "perception.preprocessor.window", ".num_batches_tracked")


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
        # Parts that live on another rank, or that the user switched off.
        self._unseen = tuple(
            f"{name}." for name, m in model.named_modules() if isinstance(m, PPMissingLayer | StageMissingLayer)
        )
        self._unmatched: list[str] = []
        self._current = ""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load (name, tensor) pairs in any order; return the names of the loaded parameters and buffers.

        Raises:
            ValueError: a tensor has the wrong shape or no place, or a parameter has no tensor; all of them are named.
        """
        try:
            loaded = AutoWeightsLoader(self.model).load_weights(self._tied(self._matched(self.padding.pad(weights))))
        except (AssertionError, RuntimeError) as error:
            raise ValueError(f"tensor {self._current} does not fit the model: {error}") from error
        wanted = {name for name, _ in self.model.named_parameters()}
        wanted |= {name for name in self._places if name.startswith("perception.")}
        missing = sorted(name for name in wanted - loaded if not name.endswith(_OPTIONAL_BUFFERS))
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
            if place in self._places or place.startswith(self._unseen) or ".experts." in place:
                yield name, tensor  # the backbone's loader applies its own rules; that of experts knows all their names
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
