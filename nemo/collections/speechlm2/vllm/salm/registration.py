# SPDX-License-Identifier: Apache-2.0
"""Everything ``register`` installs: one small function per registry of vLLM, each safe to run again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import AutoConfig, NemotronHConfig, PretrainedConfig

from nemo.collections.speechlm2.vllm.salm.config import NeMoSpeechLMConfig

_PACKAGE = __name__.rpartition(".")[0]
TARGET = "NeMoSpeechLMForConditionalGeneration"
DRAFT = "NeMoSpeechLMMTPModel"


def register() -> None:
    """Register the config and the models. Does no network, and imports nothing that vLLM has not loaded."""
    register_config()
    register_models()
    register_config_updates()
    register_draft_routing()


def register_config() -> None:
    """Let transformers and vLLM parse ``model_type: nemo_speechlm``."""
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    AutoConfig.register(NeMoSpeechLMConfig.model_type, NeMoSpeechLMConfig, exist_ok=True)
    _CONFIG_REGISTRY[NeMoSpeechLMConfig.model_type] = NeMoSpeechLMConfig


def register_models() -> None:
    """Name the classes; vLLM imports them when a checkpoint asks for one."""
    from vllm import ModelRegistry

    classes = {TARGET: f"{_PACKAGE}.model:{TARGET}", DRAFT: f"{_PACKAGE}.mtp:NeMoSpeechLMMTP"}
    for architecture in classes.keys() - ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(architecture, classes[architecture])


def register_config_updates() -> None:
    """Let no pickle near the model, check the weights' headers before anything is allocated, and adjust the engine's
    config to a hybrid backbone: its SSM cache dtype, by vLLM's own rule, and the CPU's limits.
    """
    from vllm.model_executor.models import config as model_configs
    from vllm.platforms import current_platform

    from nemo.collections.speechlm2.vllm.salm import platform_cpu

    class SALMConfigUpdate(model_configs.NemotronHForCausalLMConfig):
        @classmethod
        def verify_and_update_config(cls, vllm_config) -> None:
            config = vllm_config.model_config.hf_config
            refuse_pickles(vllm_config.load_config)
            check_weights(vllm_config)
            if config.is_hybrid:
                cls.update_mamba_ssm_cache_dtype(cache_config=vllm_config.cache_config, hf_config=config.text_config)
                # With it, a prompt longer than a block kills the engine, draft or none: the scan returns no states of
                # chunks, and the kernel that would store them is Triton's.
                if current_platform.is_cpu():
                    platform_cpu.turn_off_prefix_caching(vllm_config.cache_config)

    model_configs.MODELS_CONFIG_MAP.setdefault(TARGET, SALMConfigUpdate)


def refuse_pickles(load_config) -> None:
    """Keep vLLM from pickled weights, which it takes where it finds no safetensors, and which can run code.

    Raises:
        ValueError: ``--load-format`` asks for them.
    """
    if load_config.load_format in ("pt", "npcache"):
        raise ValueError(
            f"load_format is {load_config.load_format!r}, of pickled weights; a SALM's must be safetensors. "
            "Convert them, and leave out --load-format."
        )
    if load_config.load_format in ("auto", "hf"):
        load_config.load_format = "safetensors"


def check_weights(vllm_config) -> None:
    """Refuse a checkpoint in a folder whose weights do not fit its config; one on the hub is checked while it loads.

    Raises:
        ValueError: with all problems.
    """
    folder, speculation = Path(vllm_config.model_config.model), vllm_config.speculative_config
    if "safetensors" in vllm_config.load_config.load_format and folder.is_dir():
        from nemo.collections.speechlm2.vllm.salm.inspection import require_servable

        drafting = speculation is not None and speculation.method == "mtp"
        require_servable(folder, vllm_config.model_config.hf_config, drafting)


# What vLLM's draft override was before ours; kept here, not in a closure, because vLLM pickles the override by name.
_previous_override: Callable[[PretrainedConfig], PretrainedConfig] | None = None


def register_draft_routing() -> None:
    """Let ``method: mtp`` find the MTP head of a SALM checkpoint.

    vLLM decides by the model type which checkpoints hold a draft, in one function and for the families it lists; there
    is no registry to add to. "mtp" is among the types it accepts, so that function is all that is patched.
    """
    global _previous_override
    from vllm.config import SpeculativeConfig

    installed = SpeculativeConfig.hf_config_override
    # Another plugin may have wrapped ours since; to wrap that again would make a circle.
    if _previous_override in (None, installed):
        _previous_override = installed
        SpeculativeConfig.hf_config_override = staticmethod(draft_config_override)


def draft_config_override(config: PretrainedConfig) -> PretrainedConfig:
    """Turn a SALM checkpoint's config into its draft's; any other config goes to vLLM's own override.

    Raises:
        ValueError: the checkpoint has no MTP head, or one that vLLM cannot run.
    """
    if not isinstance(config, NeMoSpeechLMConfig):
        if _previous_override is None:  # a spawned process that unpickled this before the plugins were loaded
            register_draft_routing()
        assert _previous_override is not None
        return _previous_override(config)
    if config.mtp_config is None:
        raise ValueError(
            "The checkpoint has no MTP head (mtp is absent, disabled or has zero heads), so it cannot be served with "
            "method 'mtp'. Leave out --speculative-config, or use a checkpoint that was trained with MTP."
        )
    backbone = config.text_config
    if not isinstance(backbone, NemotronHConfig):
        raise ValueError(
            f"The checkpoint's backbone is {backbone.model_type}; vLLM runs MTP heads made of NemotronH modules only."
        )
    # One physical step, applied again for every token: so any number of tokens may be asked for.
    backbone.num_nextn_predict_layers = 1
    backbone.mtp_layers_block_type = NemotronHConfig._pattern_to_list(config.mtp_config.pattern)
    config.model_type = "mtp"
    config.update({"architectures": [DRAFT], "n_predict": 1})
    return config
