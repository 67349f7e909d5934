# SPDX-License-Identifier: Apache-2.0
"""Write a trained ``TinySALM`` as a SALM checkpoint: NeMo's tensor names, config.json, tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from modeling import IM_END, IM_START, LLM, LOCATOR, NUM_MTP_STEPS, PAD, PERCEPTION, UNK, TinySALM
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from nemo.collections.speechlm2.vllm.salm.perception import NEMO_TO_PERCEPTION

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}<|audio|>{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

# The backbone's state-space constants and the tower's batch statistics lose too much in bfloat16, and are few.
FLOAT32 = (".A_log", ".D", ".dt_bias", ".running_mean", ".running_var", ".fb", ".window")


def nemo_name(name: str) -> str | None:
    """The checkpoint's name of a tensor of ``TinySALM``; None for the CTC layer, which is left out."""
    if name.startswith("perception."):
        for nemo, ours in NEMO_TO_PERCEPTION.items():
            name = name.replace(ours, nemo)
        return name
    if name.startswith("mtp."):
        return name.replace("mtp.", "llm.mtp.layers.0.", 1)
    if name.startswith("llm."):
        return name.replace(".embeddings.", ".embed_tokens.").replace(".norm_f.", ".norm.")
    return None


def load_checkpoint(folder: Path) -> TinySALM:
    """The model of an exported checkpoint, float32; its CTC layer is untrained."""
    model, tensors = TinySALM(), load_file(folder / "model.safetensors")
    names = {name: nemo_name(name) for name in model.state_dict() if nemo_name(name)}
    model.load_state_dict({name: tensors[nemo].float() for name, nemo in names.items()}, strict=False)
    return model.eval()


def export_checkpoint(model: TinySALM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint into ``folder``, bfloat16 but for ``FLOAT32``."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if (nemo := nemo_name(name)) is not None:
            exact = name.endswith(FLOAT32) or not tensor.is_floating_point()
            tensors[nemo] = tensor.contiguous() if exact else tensor.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    files = {
        "config.json": {
            "architectures": ["NeMoSpeechLMForConditionalGeneration"],
            "model_type": "nemo_speechlm",
            "dtype": "bfloat16",
            "pretrained_llm": "tiny-nemotron-h",
            "pretrained_asr": "tiny-fastconformer",
            "pretrained_weights": False,
            "prompt_format": "chatml",
            "audio_locator_tag": LOCATOR,
            "perception": PERCEPTION,
            "llm_config": LLM,
            "mtp": {
                "enabled": True,
                "num_nextn_predict_layers": NUM_MTP_STEPS,
                "use_repeated_layer": True,
                "hybrid_override_pattern": "*",
            },
        },
        "generation_config.json": {
            "pad_token_id": tokenizer.token_to_id(PAD),
            "bos_token_id": tokenizer.token_to_id(IM_START),
            "eos_token_id": tokenizer.token_to_id(IM_END),
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": IM_START,
            "eos_token": IM_END,
            "pad_token": PAD,
            "unk_token": UNK,
            "clean_up_tokenization_spaces": False,
            "model_max_length": LLM["max_position_embeddings"],
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
