# SPDX-License-Identifier: Apache-2.0
"""A SALM checkpoint's config.json, parsed and validated once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import AddedToken, AutoConfig, PretrainedConfig

from nemo.collections.speechlm2.vllm.salm.lora import LoRAConfig
from nemo.collections.speechlm2.vllm.salm.mtp_config import MTPConfig
from nemo.collections.speechlm2.vllm.salm.perception_config import PerceptionConfig

ARCHITECTURE = "NeMoSpeechLMForConditionalGeneration"

# A SALM's table has at most so many rows more than its backbone's: the locator, and headroom.
NUM_EXTRA_ROWS = 10

BACKBONE_FOLDER = "llm_backbone"
HYBRID_MODEL_TYPES = ("nemotron_h",)


class ConfigError(ValueError):
    """All that is wrong with a config.json; ``args`` holds one message for each problem."""

    def __str__(self) -> str:
        return "\n".join(self.args)


class NeMoSpeechLMConfig(PretrainedConfig):
    """The config of a ``nemo_speechlm`` checkpoint.

    Attributes:
        text_config: the backbone's config, of transformers' own class. Its ``vocab_size`` is the size of the table
            the engine builds: the backbone's rows plus ``NUM_EXTRA_ROWS``. How many of them exist, only the tensors
            tell; the rest are padding.
        perception_config: the audio tower, parsed from ``perception``.
        mtp_config: the MTP heads the checkpoint declares, or None.
        audio_locator_tag: the token that stands for one audio in a prompt.
        encoder_chunk_size_seconds: length of the chunks the tower was trained on, or None for whole audios.
        lora: the settings of the adapters that the weights hold, or None.

    Raises:
        ConfigError: fields are missing or unusable; the message names each, what was found and what is accepted.
    """

    model_type = "nemo_speechlm"
    has_no_defaults_at_init = True

    # vLLM's proposer copies this from any multimodal target to its draft; nothing of ours reads it.
    image_token_index: int | None = None

    # vLLM asks the model's class, which has no config, for the text that stands for an audio in a chat message. So the
    # tag of the checkpoint that was read last is kept here: a process serves one checkpoint.
    chat_placeholder = "<|audio|>"

    def __init__(self, **fields: Any):
        self._source = copy.deepcopy({name: value for name, value in fields.items() if name != "name_or_path"})
        checkpoint = fields.get("name_or_path") or ""
        perception = fields.pop("perception", None)
        audio_locator_tag = fields.pop("audio_locator_tag", None)
        pretrained_llm = fields.pop("pretrained_llm", None)
        llm_config = fields.pop("llm_config", None)
        chunk = fields.pop("encoder_chunk_size_seconds", None)
        lora = fields.pop("lora", None)
        mtp: dict[str, Any] = {name: fields[name] for name in ("mtp", "compute_mtp") if name in fields}

        # Each part is tried, whatever is wrong with the others.
        problems: list[str] = []

        def attempt(parse: Callable[..., Any], *given: Any) -> Any:
            try:
                return parse(*given)
            except ValueError as error:
                problems.append(str(error))
                return None

        self.perception = perception
        self.audio_locator_tag = audio_locator_tag
        self.encoder_chunk_size_seconds = chunk
        self.pretrained_llm = pretrained_llm
        self.perception_config = attempt(_parse_perception, perception)
        if not isinstance(audio_locator_tag, str) or not audio_locator_tag.strip():
            problems.append(f"audio_locator_tag is {audio_locator_tag!r}; expected a token such as '<|audio|>'.")
        backbone = attempt(_find_backbone, llm_config, pretrained_llm, checkpoint)
        self.text_config: Any = None if backbone is None else attempt(_parse_backbone, backbone)
        self.mtp_config = None if backbone is None else attempt(MTPConfig.from_dicts, mtp, backbone)
        self.lora = None if lora is None else attempt(LoRAConfig.from_dict, lora)
        if self.perception_config is not None:
            attempt(_check_chunk, chunk, self.perception_config)
            if self.text_config is not None:
                attempt(_check_width, self.perception_config, self.text_config)
        if problems:
            raise ConfigError(*problems)
        super().__init__(**{"architectures": [ARCHITECTURE], **fields})
        type(self).chat_placeholder = audio_locator_tag

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike, **kwargs: Any) -> NeMoSpeechLMConfig:
        """As transformers' own, which tells the config where it lies only when called through ``AutoConfig``."""
        kwargs.setdefault("name_or_path", str(pretrained_model_name_or_path))
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    def audio_chunks(self, num_samples: int) -> list[int]:
        """Lengths, in samples, of the pieces in which an audio is encoded; their embeddings follow each other.

        One piece unless the tower was trained on chunks of ``encoder_chunk_size_seconds``. A tail too short for two mel
        frames is folded into the chunk before it.
        """
        if self.encoder_chunk_size_seconds is None:
            return [num_samples]
        size = int(self.encoder_chunk_size_seconds * self.perception_config.sampling_rate)
        count, tail = divmod(num_samples, size)
        if count and tail < self.perception_config.min_num_samples:
            return [size] * (count - 1) + [size + tail]
        return [size] * count + [tail]

    def num_audio_tokens(self, num_samples: int) -> int:
        """Placeholders an audio of ``num_samples`` takes in a prompt: exactly as many as the tower emits embeddings."""
        return sum(map(self.perception_config.num_tokens, self.audio_chunks(num_samples)))

    def find_locator(self, tokenizer: Any) -> int:
        """The token id of the audio locator, which is the placeholders' too.

        A tag that the tokenizer does not have, as where it is the backbone's own, is added to it.

        Raises:
            ValueError: the tokenizer splits the tag, or has no id left that the embedding table has a row for.
        """
        tag, rows = self.audio_locator_tag, self.text_config.vocab_size
        if tokenizer.convert_tokens_to_ids(tag) in (None, tokenizer.unk_token_id):
            tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False)])
        ids = tokenizer.encode(tag, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(
                f"audio_locator_tag {tag!r} is {len(ids)} tokens to the checkpoint's tokenizer, {ids}; expected one. "
                "Add it to the tokenizer as a special token."
            )
        if ids[0] >= rows:
            raise ValueError(
                f"audio_locator_tag {tag!r} has the id {ids[0]} in the checkpoint's tokenizer; expected one below "
                f"{rows}, the rows of the embedding table. Is the tokenizer the one of this backbone?"
            )
        return ids[0]

    @property
    def is_hybrid(self) -> bool:
        """Whether the backbone mixes attention with state-space layers."""
        return "M" in getattr(self.text_config, "hybrid_override_pattern", "")

    @property
    def layer_types(self) -> list[str]:
        """What vLLM reads to tell a hybrid backbone from an ordinary one.

        One class serves both and declares the hybrid interface; vLLM takes that back for a model whose ``layer_types``
        are all attention. So nothing needs a second architecture name, nor a config rewritten in memory.
        """
        if self.is_hybrid:
            return self.text_config.layer_types
        return ["full_attention"] * self.text_config.num_hidden_layers

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PretrainedConfig:
        """The backbone's config, whichever side is asked for."""
        return self.text_config

    def to_dict(self) -> dict[str, Any]:
        """The fields this config was made from, ready for JSON."""
        return {"model_type": self.model_type, **copy.deepcopy(self._source)}


def _parse_perception(perception: Any) -> PerceptionConfig:
    if perception is None:
        raise ValueError("perception is missing; expected the dict of the audio tower's settings.")
    return PerceptionConfig.from_dict(perception)


def _check_chunk(chunk: Any, perception: PerceptionConfig) -> None:
    shortest = perception.min_num_samples / perception.sampling_rate
    number = isinstance(chunk, int | float) and not isinstance(chunk, bool)
    if chunk is not None and not (number and shortest <= chunk < math.inf):
        raise ValueError(f"encoder_chunk_size_seconds is {chunk!r}; expected null, or seconds, at least {shortest}.")


def _check_width(perception: PerceptionConfig, backbone: PretrainedConfig) -> None:
    if perception.output_dim != backbone.hidden_size:
        raise ValueError(
            f"perception.output_dim is {perception.output_dim}; expected the backbone's hidden_size, "
            f"{backbone.hidden_size}."
        )


def _find_backbone(llm_config: Any, pretrained_llm: Any, checkpoint: str) -> dict[str, Any]:
    """The backbone's raw config: embedded, else in the checkpoint's folder, else under its own name."""
    if llm_config is not None:
        if not isinstance(llm_config, Mapping):
            raise ValueError(f"llm_config is {llm_config!r}; expected the backbone's config as a dict.")
        return dict(llm_config)
    root = Path(checkpoint)
    if checkpoint and (root / BACKBONE_FOLDER).is_dir():
        source = str(root / BACKBONE_FOLDER)
    elif not isinstance(pretrained_llm, str) or not pretrained_llm:
        raise ValueError(
            f"pretrained_llm is {pretrained_llm!r}, and there is neither llm_config nor a {BACKBONE_FOLDER}/ folder in "
            "the checkpoint; expected one of the three to give the backbone."
        )
    elif Path(pretrained_llm).is_absolute():
        source = pretrained_llm
    else:
        # Refused before looking: whether a path outside the checkpoint exists is nobody's business.
        if ".." in Path(pretrained_llm).parts:
            raise ValueError(f"pretrained_llm is {pretrained_llm!r}; a folder must lie inside the checkpoint.")
        folder = root / pretrained_llm
        source = str(folder) if checkpoint and folder.is_dir() else pretrained_llm
    try:
        backbone, _ = PretrainedConfig.get_config_dict(source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the backbone's config was looked for in {source!r} and not found ({error}). Embed it as llm_config, or "
            f"put it in {BACKBONE_FOLDER}/ in the checkpoint."
        ) from error
    return backbone


def _parse_backbone(fields: dict[str, Any]) -> PretrainedConfig:
    fields = copy.deepcopy(fields)
    model_type = fields.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ValueError(f"llm_config.model_type is {model_type!r}; expected the backbone's, such as 'nemotron_h'.")
    vocab_size = fields.get("vocab_size")
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or vocab_size < 1:
        raise ValueError(f"llm_config.vocab_size is {vocab_size!r}; expected the number of rows of the table.")
    # Another spelling of one class, which transformers and vLLM do not know.
    architectures = fields.get("architectures") or []
    fields["architectures"] = [
        "NemotronHForCausalLM" if name == "NemotronHybridForCausalLM" else name for name in architectures
    ] or None
    try:
        config = AutoConfig.for_model(model_type, **fields)
    except Exception as error:
        raise ValueError(f"llm_config does not make a config of model_type {model_type!r}: {error}") from error
    if config.get_text_config() is not config:
        raise ValueError(f"llm_config.model_type is {model_type!r}, a composite model; expected a decoder-only one.")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if model_type not in HYBRID_MODEL_TYPES and not layer_types <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"llm_config.model_type is {model_type!r}, with layers of type {', '.join(sorted(layer_types))}; accepted "
            f"hybrid backbones: {', '.join(HYBRID_MODEL_TYPES)}."
        )
    config.vocab_size += NUM_EXTRA_ROWS
    return config
