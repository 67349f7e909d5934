# SPDX-License-Identifier: Apache-2.0
"""The tiny SALM as PyTorch modules: FastConformer tower, NemotronH backbone, repeated-layer MTP head.

Everything that an existing library computes is taken from it: the tower is the one the plugin serves
(``AudioPerception``), the backbone is transformers' ``NemotronHForCausalLM``. Only the MTP head is written here,
because transformers has none; its maths is that of vLLM's ``NemotronHMTP``, so that what is trained is what is served.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sentences import VOCABULARY
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import NemotronHConfig, NemotronHForCausalLM
from transformers.models.nemotron_h import modeling_nemotron_h

from nemo.collections.speechlm2.vllm.salm.perception import AudioPerception
from nemo.collections.speechlm2.vllm.salm.perception_config import PerceptionConfig

PAD, UNK, IM_START, IM_END, LOCATOR = "<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<|audio|>"
VOCAB_SIZE = 512  # the backbone's rows; the locator is row 512, appended as NeMo appends it
NUM_MTP_STEPS = 4
HIDDEN_SIZE = 192
TOWER_SIZE = 144

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
        "log": True,
        "frame_splicing": 1,
        "dither": 0.0,
        "pad_to": 0,
        "pad_value": 0.0,
    },
    "encoder": {
        "_target_": "nemo.collections.asr.modules.ConformerEncoder",
        "feat_in": 80,
        "feat_out": -1,
        "n_layers": 6,
        "d_model": TOWER_SIZE,
        "subsampling": "dw_striding",
        "subsampling_factor": 8,
        "subsampling_conv_channels": 64,
        "causal_downsampling": False,
        "ff_expansion_factor": 4,
        "self_attention_model": "rel_pos",
        "n_heads": 4,
        "att_context_size": [-1, -1],
        "xscaling": False,
        "untie_biases": True,
        "pos_emb_max_len": 5000,
        "conv_kernel_size": 9,
        "conv_norm_type": "batch_norm",
        "conv_context_size": None,
        "use_bias": True,
        "dropout": 0.0,
        "dropout_pre_encoder": 0.0,
        "dropout_emb": 0.0,
        "dropout_att": 0.0,
    },
    "modality_adapter": {
        "_target_": "nemo.collections.speechlm2.modules.perception.IdentityConnector",
        "d_model": TOWER_SIZE,
    },
    "output_dim": HIDDEN_SIZE,
}

LLM = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "hybrid_override_pattern": "M-*-M-*-M-*-M-*-",
    "num_hidden_layers": 16,
    "tie_word_embeddings": False,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "intermediate_size": 512,
    "mlp_hidden_act": "relu2",
    "ssm_state_size": 32,
    "mamba_num_heads": 6,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "n_groups": 2,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 128,
    "mamba_ssm_cache_dtype": "float32",
    "layer_norm_epsilon": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


def train_tokenizer(sentences: list[str]) -> Tokenizer:
    """A byte-pair tokenizer of ``VOCAB_SIZE`` rows that spells printable ASCII; the locator is one row more."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "merged_with_next"), pre_tokenizers.Split("\n", "isolated")]
    )
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, UNK, IM_START, IM_END],
        initial_alphabet=["\n", *map(chr, range(32, 127))],
        show_progress=False,
    )
    prompts = [
        "user\n",
        "assistant\n",
        "Transcribe: ",
        "Transcribe the audio: ",
    ] * 500  # often enough to be whole tokens
    tokenizer.train_from_iterator([*sentences, *prompts], trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the tokenizer learned {tokenizer.get_vocab_size()} rows, expected {VOCAB_SIZE}")
    tokenizer.add_special_tokens([AddedToken(LOCATOR, special=True, normalized=False)])
    return tokenizer


def full_sequence_scan(hidden_states, dt, A, B, C, chunk_size, D, dt_bias, dt_limit, **unused):
    """Mamba2's scan over one whole short sequence, as masked attention (Dao & Gu 2024, eq. 16).

    Equal to transformers' chunked scan without an initial state, and some times faster on sequences of about 100.
    Shapes: hidden_states (b, l, h, p), dt (b, l, h), A (h,), B and C (b, l, g, n); returns (b, l, h, p).
    """
    heads_per_group = hidden_states.shape[2] // B.shape[2]
    dt = F.softplus(dt + dt_bias).clamp(*dt_limit)
    decay = torch.cumsum(dt * A, dim=1).transpose(1, 2)
    decay = (decay[..., :, None] - decay[..., None, :]).masked_fill(
        torch.ones(dt.shape[1], dt.shape[1], dtype=torch.bool).triu(1), -torch.inf
    )
    scores = torch.einsum("blgn,bsgn->bgls", C, B).repeat_interleave(heads_per_group, dim=1)
    mixed = (scores * decay.exp()) @ (hidden_states * dt[..., None]).transpose(1, 2)
    return mixed.transpose(1, 2) + D[:, None] * hidden_states


class MTPHead(nn.Module):
    """One step of vLLM's ``NemotronHMTP`` with pattern ``*``, applied again for each further token.

    A step takes the embedding of the next token and a hidden state (the backbone's normed output at first, its own
    output afterwards): ``final_layernorm(r + attention(norm(r)))`` with ``r = eh_proj([enorm(e); hnorm(h)])``.
    """

    def __init__(self, config: NemotronHConfig):
        super().__init__()
        norm = modeling_nemotron_h.NemotronHRMSNorm
        size, eps = config.hidden_size, config.layer_norm_epsilon
        self.enorm, self.hnorm = norm(size, eps), norm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.norm, self.final_layernorm = norm(size, eps), norm(size, eps)
        self.mixer = modeling_nemotron_h.NemotronHAttention(config, layer_idx=0)
        self.head_dim = config.head_dim

    def project(self, embeddings: torch.Tensor, hidden: torch.Tensor):
        """The residual stream and the attention's queries, keys and values, heads first."""
        residual = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))
        normed = self.norm(residual)
        groups = self.mixer.num_key_value_groups

        def split(projection: nn.Linear, repeat: int) -> torch.Tensor:
            heads = projection(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            return heads.repeat_interleave(repeat, dim=1)

        return residual, split(self.mixer.q_proj, 1), split(self.mixer.k_proj, groups), split(self.mixer.v_proj, groups)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor, starts: torch.Tensor, steps: int = NUM_MTP_STEPS):
        """Draft ``steps`` tokens from each start, exactly as the engine's proposer would with these tokens as drafts.

        Args:
            embeddings: (b, l, d) fused embeddings of the sequence.
            hidden: (b, l, d) the backbone's output after its final norm.
            starts: (b, r) positions t whose next token is known; step k predicts token t + 1 + k.

        Returns:
            A list of ``steps`` tensors (b, r, d), each to be multiplied with the output head.
        """
        following = F.pad(embeddings[:, 1:], (0, 0, 0, 1))
        residual, query, first_keys, first_values = self.project(following, hidden)
        rows = torch.arange(len(starts))[:, None]
        residual, query = residual[rows, starts], query.transpose(1, 2)[rows, starts].transpose(1, 2)
        future = (torch.arange(embeddings.shape[1]) > starts[..., None])[:, None]
        scale = self.head_dim**-0.5
        outputs, own_keys, own_values = [], [], []
        for step in range(steps):
            if step:
                position = (starts + step + 1).clamp(max=embeddings.shape[1] - 1)
                residual, query, key, value = self.project(embeddings[rows, position], outputs[-1])
                own_keys.append(key)
                own_values.append(value)
            scores = (query @ first_keys.transpose(-1, -2)).masked_fill(future, -torch.inf)
            own = [(query * key).sum(-1, keepdim=True) for key in own_keys]
            weights = (torch.cat([scores, *own], dim=-1) * scale).softmax(-1)
            mixed = weights[..., : scores.shape[-1]] @ first_values
            for index, value in enumerate(own_values):
                mixed = mixed + weights[..., scores.shape[-1] + index, None] * value
            attended = self.mixer.o_proj(mixed.transpose(1, 2).flatten(-2))
            outputs.append(self.final_layernorm(residual + attended))
        return outputs


class TinySALM(nn.Module):
    """Tower, backbone and MTP head; ``ctc`` is a training aid that the checkpoint does not keep."""

    def __init__(self):
        super().__init__()
        self.perception = AudioPerception(PerceptionConfig.from_dict(PERCEPTION))
        # transformers starts every weight at std 0.02, from which the tower's CTC loss does not move.
        for module in self.perception.modules():
            if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Linear):
                module.reset_parameters()
        # Three times faster on a CPU for these depthwise convolutions.
        self.perception.encoder.subsampling.to(memory_format=torch.channels_last)
        config = NemotronHConfig(**{**LLM, "vocab_size": VOCAB_SIZE + 1})
        self.llm = NemotronHForCausalLM(config)
        for module in self.llm.modules():
            if isinstance(module, modeling_nemotron_h.NemotronHMamba2Mixer):
                module.time_step_limit = (0.0, float("inf"))  # the engine does not clamp the step size
        self.mtp = MTPHead(config)
        self.ctc = nn.Linear(HIDDEN_SIZE, len(VOCABULARY) + 1)  # of whole words, and the blank

    def fuse(self, input_ids: torch.Tensor, audio: torch.Tensor, audio_lengths: torch.Tensor, locator: int):
        """Token embeddings (b, l, d) with the tower's rows at the locators, in order."""
        embeddings = self.llm.model.embeddings(input_ids)
        valid = torch.arange(audio.shape[1]) < audio_lengths[:, None]
        return embeddings.masked_scatter((input_ids == locator)[..., None], audio[valid])

    def hidden(self, embeddings: torch.Tensor) -> torch.Tensor:
        """The backbone's output after its final norm (b, l, d); right padding needs no mask, all layers are causal."""
        return self.llm.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state


def use_full_sequence_scan() -> None:
    """Train with ``full_sequence_scan`` in place of transformers' chunked scan."""
    modeling_nemotron_h.mamba2_chunk_scan = full_sequence_scan
