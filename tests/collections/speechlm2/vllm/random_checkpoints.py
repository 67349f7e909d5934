# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints, made with transformers' own models; what prompts for them look like; the trained one."""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import NemotronHConfig, NemotronHForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nemo.collections.speechlm2.vllm.salm.perception import NEMO_TO_PERCEPTION, AudioPerception
from nemo.collections.speechlm2.vllm.salm.perception_config import PerceptionConfig

EXAMPLES = Path(__file__).parents[4] / "examples" / "speechlm2"
TRAINED = EXAMPLES / "tiny_salm" / "checkpoint"
TEST_SET = EXAMPLES / "tiny_salm" / "test_set" / "manifest.json"

HIDDEN = 64
SPECIALS = ["<pad>", "<|im_start|>", "<|im_end|>"]
LOCATOR = "<|audio|>"
VOCAB_SIZE = 256 + len(SPECIALS)  # of the backbone; the locator is the row after it

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}{{ part.text if part.type == 'text' else '<|audio|>' }}{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""

PERCEPTION = {
    "preprocessor": {
        "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
        "sample_rate": 16000,
        "normalize": "per_feature",
        "window_size": 0.025,
        "window_stride": 0.01,
        "window": "hann",
        "features": 80,
        "n_fft": 512,
    },
    "encoder": {
        "_target_": "nemo.collections.asr.modules.ConformerEncoder",
        "feat_in": 80,
        "n_layers": 2,
        "d_model": 32,
        "subsampling": "dw_striding",
        "subsampling_factor": 8,
        "subsampling_conv_channels": 16,
        "self_attention_model": "rel_pos",
        "n_heads": 2,
        "conv_kernel_size": 9,
        "xscaling": False,
    },
    "modality_adapter": {
        "_target_": "nemo.collections.speechlm2.modules.perception.IdentityConnector",
        "d_model": 32,
    },
    "output_dim": HIDDEN,
}

BACKBONES: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "hybrid_override_pattern": "M-*-",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "max_position_embeddings": 1024,
        "ssm_state_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "chunk_size": 32,
        "expand": 2,
        # Of layers "E", in the backbone or in the MTP head alone.
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 96,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    },
}

BACKBONES["nemotron_attention"] = {**BACKBONES["nemotron_h"], "hybrid_override_pattern": "*-*-"}
BACKBONES["nemotron_moe"] = {**BACKBONES["nemotron_h"], "hybrid_override_pattern": "ME*E"}
# The experts work in a space of their own, and its size is theirs: no shape tells which way round a tensor is.
BACKBONES["nemotron_latent"] = {**BACKBONES["nemotron_moe"], "moe_latent_size": 48}

MTP = {"enabled": True, "num_nextn_predict_layers": 4, "use_repeated_layer": True, "hybrid_override_pattern": "*"}


def salm_config(backbone: str = "nemotron_h", pattern: str = "*") -> dict[str, Any]:
    """A config.json, free to be changed; ``pattern`` is the MTP head's."""
    config = {
        "architectures": ["NeMoSpeechLMForConditionalGeneration"],
        "model_type": "nemo_speechlm",
        "dtype": "float32",
        "pretrained_llm": "nowhere/to-be-found",
        "pretrained_asr": "none",
        "pretrained_weights": False,
        "prompt_format": "chatml",
        "audio_locator_tag": LOCATOR,
        "perception": PERCEPTION,
        "llm_config": BACKBONES[backbone],
    }
    if backbone.startswith("nemotron"):
        config["mtp"] = {**MTP, "hybrid_override_pattern": pattern}
    return copy.deepcopy(config)


def build_tokenizer() -> Tokenizer:
    """One token per byte, the special ones, and the locator last."""
    names = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in [*SPECIALS, LOCATOR]])
    return tokenizer


def _randomise(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Weights large enough that no two logits are nearly equal, and batch statistics that matter."""
    for name, tensor in module.state_dict().items():
        if name.endswith(("A_log", "dt_bias", ".D", "num_batches_tracked", ".fb", ".window")):
            continue
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 2.0, generator=generator)
        elif tensor.ndim < 2:
            tensor.normal_(float("norm" in name and name.endswith("weight")), 0.1, generator=generator)
        else:
            inputs = tensor.shape[-1] if ".experts." in name else tensor[0].numel()
            tensor.normal_(0.0, 1.5 * inputs**-0.5, generator=generator)
    return module.eval()


def build_modules(backbone: str = "nemotron_h", seed: int = 0) -> tuple[nn.Module, AudioPerception]:
    """The random backbone (transformers' own model, with the locator's row) and tower."""
    generator = torch.Generator().manual_seed(seed)
    classes = {"nemotron_h": (NemotronHConfig, NemotronHForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config_class, model_class = classes[BACKBONES[backbone]["model_type"]]
    torch.manual_seed(seed)  # transformers draws A_log and dt_bias itself
    llm = model_class(config_class(**{**BACKBONES[backbone], "vocab_size": VOCAB_SIZE + 1}))
    return _randomise(llm, generator), _randomise(AudioPerception(PerceptionConfig.from_dict(PERCEPTION)), generator)


def build_tensors(backbone: str = "nemotron_h", seed: int = 0, pattern: str = "*") -> dict[str, torch.Tensor]:
    """The same under NeMo's names, and a random MTP head beside a NemotronH."""
    llm, perception = build_modules(backbone, seed)
    tensors = {}
    for name, tensor in perception.state_dict().items():
        name = f"perception.{name}"
        for nemo, ours in NEMO_TO_PERCEPTION.items():
            name = name.replace(ours, nemo)
        tensors[name] = tensor
    for name, tensor in llm.state_dict().items():
        name = "llm." + name.replace(".embeddings.", ".embed_tokens.").replace(".norm_f.", ".norm.")
        if ".experts." in name:  # as NemotronH's checkpoints have them
            layer, _, projection = name.rpartition(".")
            tensors |= {f"{layer}.{i}.{projection}.weight": expert for i, expert in enumerate(tensor)}
        else:
            tensors[name] = tensor
    if backbone.startswith("nemotron"):
        generator = torch.Generator().manual_seed(seed + 1)
        for i, symbol in enumerate(pattern):
            shapes = {"eh_proj.weight": (HIDDEN, 2 * HIDDEN)} if i == 0 else {}
            norms = (["enorm", "hnorm"] if i == 0 else []) + ["norm"]
            norms += ["final_layernorm"] if i == len(pattern) - 1 else []
            shapes |= {f"{name}.weight": (HIDDEN,) for name in norms}
            shapes |= _attention_shapes() if symbol == "*" else _moe_shapes(BACKBONES[backbone])
            for name, shape in shapes.items():
                tensors[f"llm.mtp.layers.{i}.{name}"] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def _attention_shapes() -> dict[str, tuple[int, ...]]:
    shapes = {f"mixer.{x}_proj.weight": (size, HIDDEN) for x, size in (("q", 128), ("k", 64), ("v", 64))}
    return {**shapes, "mixer.o_proj.weight": (HIDDEN, 128)}


def _moe_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    experts, inner, shared = (
        config[name] for name in ("n_routed_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size")
    )
    latent = config.get("moe_latent_size")
    outer = latent or HIDDEN
    shapes = {
        "mixer.gate.weight": (experts, HIDDEN),
        "mixer.gate.e_score_correction_bias": (experts,),
        "mixer.shared_experts.up_proj.weight": (shared, HIDDEN),
        "mixer.shared_experts.down_proj.weight": (HIDDEN, shared),
    }
    if latent:
        shapes |= {"mixer.fc1_latent_proj.weight": (latent, HIDDEN), "mixer.fc2_latent_proj.weight": (HIDDEN, latent)}
    for i in range(experts):
        shapes[f"mixer.experts.{i}.up_proj.weight"] = (inner, outer)
        shapes[f"mixer.experts.{i}.down_proj.weight"] = (outer, inner)
    return shapes


def pack_experts(tensors: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """All experts of a layer in one tensor per projection, as "automodel" or "transformers" has them."""
    packed, stacks = {}, defaultdict(list)
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.\d+\.(up|down)_proj\.weight", name):
            stacks[match.groups()].append(tensor)
        else:
            packed[name] = tensor
    for (layer, projection), experts in stacks.items():
        if layout == "automodel":
            name = "gate_and_up_projs" if projection == "up" else "down_projs"
            packed[f"{layer}.{name}"] = torch.stack(experts).transpose(1, 2).contiguous()
        else:
            packed[f"{layer}.{projection}_proj"] = torch.stack(experts)
    return packed


def with_adapters(tensors: dict[str, torch.Tensor], layout: str, lora: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The backbone's ``lora["target_modules"]`` as weights and adapters, in PEFT's or Automodel's names.

    What the adapters add is taken out of the weights, so that merged they are what they were.
    """
    generator, rank = torch.Generator().manual_seed(2), lora["r"]
    result = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if layout == "peft" and name.startswith("llm."):
            module = module.replace("llm.", "llm.base_model.model.", 1)
        adapted = name.startswith("llm.model.") and module.endswith(tuple(lora["target_modules"]))
        if not adapted:
            result[f"{module}.{kind}"] = tensor
            continue
        a = torch.randn(rank, tensor.shape[1], generator=generator) * 0.1
        b = torch.randn(tensor.shape[0], rank, generator=generator) * 0.1
        base, infix = ("base_layer.", ".default") if layout == "peft" else ("", "")
        result[f"{module}.{base}{kind}"] = tensor - lora["lora_alpha"] / rank * b @ a
        result |= {f"{module}.lora_A{infix}.weight": a, f"{module}.lora_B{infix}.weight": b}
    return result


def build_checkpoint(
    folder: Path,
    backbone: str = "nemotron_h",
    config: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write a checkpoint; ``config`` and ``tensors`` stand for the ordinary ones."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors or build_tensors(backbone), folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    files = {
        "config.json": config or salm_config(backbone),
        "generation_config.json": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<pad>",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def prompt(text: str, audios: int = 1) -> str:
    return f"<|im_start|>user\n{text}{LOCATOR * audios}<|im_end|>\n<|im_start|>assistant\n"


def noise(num_samples: int, seed: int = 0) -> np.ndarray:
    """A waveform that is different for every seed: (samples,) float32 at 16 kHz."""
    return np.random.default_rng(seed).normal(0, 0.1, num_samples).astype(np.float32)
