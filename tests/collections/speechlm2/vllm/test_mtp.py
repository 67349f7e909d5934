# SPDX-License-Identifier: Apache-2.0
"""The MTP draft: its routing, its weights, and what makes it right; test_lossless.py shows that it is."""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import soundfile
import torch
from random_checkpoints import (
    BACKBONES,
    LOCATOR,
    MTP,
    TEST_SET,
    TRAINED,
    build_checkpoint,
    build_tensors,
    noise,
    pack_experts,
    prompt,
    salm_config,
)
from torch import nn
from transformers import DeepseekV3Config, NemotronHConfig, PretrainedConfig, Qwen3Config
from vllm import ModelRegistry, SamplingParams
from vllm.config import SpeculativeConfig

from nemo.collections.speechlm2.vllm.salm import platform_cpu, register, registration
from nemo.collections.speechlm2.vllm.salm.config import NeMoSpeechLMConfig
from nemo.collections.speechlm2.vllm.salm.mtp import NeMoSpeechLMMTP

register()


def config(**changes) -> NeMoSpeechLMConfig:
    return NeMoSpeechLMConfig(**{**salm_config(), **changes})


# --- routing


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("pattern", ["*", "*E"])
def test_a_salm_becomes_its_draft(heads, pattern):
    block = {**MTP, "num_nextn_predict_layers": heads, "hybrid_override_pattern": pattern}
    draft = SpeculativeConfig.hf_config_override(config(mtp=block))
    assert draft.architectures == ["NeMoSpeechLMMTPModel"]
    assert draft.n_predict == 1
    backbone = draft.get_text_config()
    assert backbone.num_nextn_predict_layers == 1
    assert backbone.mtp_hybrid_override_pattern == pattern


def test_draft_class_is_registered():
    assert ModelRegistry.models["NeMoSpeechLMMTPModel"].load_model_cls() is NeMoSpeechLMMTP


@pytest.mark.parametrize("block", [None, {**MTP, "enabled": False}, {**MTP, "num_nextn_predict_layers": 0}])
def test_without_a_head_there_is_no_draft(block):
    with pytest.raises(ValueError, match="The checkpoint has no MTP head"):
        SpeculativeConfig.hf_config_override(config(mtp=block))


def test_other_backbones_have_no_draft():
    with pytest.raises(ValueError, match="backbone is qwen3; .* NemotronH"):
        SpeculativeConfig.hf_config_override(config(llm_config=BACKBONES["qwen3"]))


OTHERS = {
    "deepseek": lambda: DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], num_nextn_predict_layers=1),
    "nemotron_h": lambda: NemotronHConfig(architectures=["NemotronHForCausalLM"], num_nextn_predict_layers=1),
    "mimo": lambda: PretrainedConfig(architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1),
    "ernie": lambda: type("C", (PretrainedConfig,), {"model_type": "ernie4_5_moe"})(architectures=["ErnieX"]),
    "no draft": lambda: Qwen3Config(architectures=["Qwen3ForCausalLM"]),
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_routed_as_before(family):
    expected = registration._previous_override(OTHERS[family]())
    assert SpeculativeConfig.hf_config_override(OTHERS[family]()).to_json_string() == expected.to_json_string()


def test_override_is_picklable_by_name():
    override = SpeculativeConfig.hf_config_override
    assert pickle.loads(pickle.dumps(override)) is override is registration.draft_config_override
    assert b"registration" in pickle.dumps(override)


def test_override_wraps_once():
    for _ in range(3):
        register()
    assert SpeculativeConfig.hf_config_override is registration.draft_config_override
    assert registration._previous_override is not registration.draft_config_override


def test_another_plugin_may_wrap_ours(monkeypatch):
    def theirs(inner, config):
        seen.append(config)
        return inner(config)

    seen: list[PretrainedConfig] = []
    wrapped = functools.partial(theirs, SpeculativeConfig.hf_config_override)
    monkeypatch.setattr(SpeculativeConfig, "hf_config_override", staticmethod(wrapped))
    register()
    assert SpeculativeConfig.hf_config_override is wrapped
    assert SpeculativeConfig.hf_config_override(config()).architectures == ["NeMoSpeechLMMTPModel"]
    assert SpeculativeConfig.hf_config_override(OTHERS["no draft"]()).architectures == ["Qwen3ForCausalLM"]
    assert len(seen) == 2


def test_override_restored_by_another_is_installed_again(monkeypatch):
    monkeypatch.setattr(SpeculativeConfig, "hf_config_override", staticmethod(registration._previous_override))
    register()
    assert SpeculativeConfig.hf_config_override is registration.draft_config_override


# --- contract


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp": {**MTP, "use_repeated_layer": False}}, "4 with use_repeated_layer false.*vLLM executes one head"),
        (
            {
                "llm_config": {
                    **BACKBONES["nemotron_h"],
                    "num_nextn_predict_layers": 4,
                    "mtp_hybrid_override_pattern": "*E",
                }
            },
            r"mtp.hybrid_override_pattern is '\*', llm_config.mtp_hybrid_override_pattern is '\*E'",
        ),
        (
            {
                "llm_config": {
                    **BACKBONES["nemotron_h"],
                    "num_nextn_predict_layers": 3,
                    "mtp_layers_block_type": ["attention"],
                }
            },
            "mtp.num_nextn_predict_layers is 4 but llm_config.num_nextn_predict_layers is 3",
        ),
        ({"mtp": {**MTP, "hybrid_override_pattern": "*-"}}, "mtp.hybrid_override_pattern holds '-'"),
    ],
)
def test_contradictions_and_what_vllm_cannot_run(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_a_default_topology_of_transformers_is_no_contradiction():
    backbone = {
        **BACKBONES["nemotron_h"],
        "num_nextn_predict_layers": 0,
        "mtp_layers_block_type": ["full_attention", "moe"],
    }
    assert config(llm_config=backbone).mtp_config.pattern == "*"


# --- the draft alone


@pytest.fixture(scope="module")
def build_draft(tmp_path_factory) -> Iterator:
    """Build the draft of a checkpoint as vLLM does, without an engine around it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    folders: dict[tuple[str, str], Path] = {}
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"

    def build(backbone: str = "nemotron_h", pattern: str = "*", tables: bool = False) -> NeMoSpeechLMMTP:
        if (backbone, pattern) not in folders:
            config, tensors = salm_config(backbone, pattern), build_tensors(backbone, pattern=pattern)
            folders[backbone, pattern] = build_checkpoint(tmp_path_factory.mktemp("draft"), backbone, config, tensors)
        folder = folders[backbone, pattern]
        speculation = {"method": "mtp", "num_speculative_tokens": 3}
        args = EngineArgs(model=str(folder), enforce_eager=True, max_model_len=256, speculative_config=speculation)
        vllm_config = args.create_engine_config()
        with set_current_vllm_config(vllm_config), set_default_torch_dtype(torch.float32):
            init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            draft = initialize_model(vllm_config, model_config=vllm_config.speculative_config.draft_model_config)
            if tables:  # which the engine takes from the target
                rows = draft.padding.table_rows
                draft.lm_head, draft.model.embed_tokens = ParallelLMHead(rows, 64), VocabParallelEmbedding(rows, 64)
            return draft

    yield build
    cleanup_dist_env_and_memory()


def test_draft_takes_all_of_its_tensors_and_no_others(build_draft):
    draft, tensors = build_draft(), build_tensors()
    assert draft.supports_multimodal_embeddings
    # The vocabulary's tables are the target's: none of its own takes memory meanwhile.
    assert all(name.startswith("model.layers.") for name, _ in draft.named_parameters())
    draft.load_weights(tensors.items())
    own = draft.model.layers["0"]
    for name in ("enorm", "hnorm", "eh_proj", "norm", "final_layernorm"):
        torch.testing.assert_close(getattr(own, name).weight, tensors[f"llm.mtp.layers.0.{name}.weight"])
    torch.testing.assert_close(own.mixer.o_proj.weight, tensors["llm.mtp.layers.0.mixer.o_proj.weight"])
    stacked = [tensors[f"llm.mtp.layers.0.mixer.{x}_proj.weight"] for x in "qkv"]
    torch.testing.assert_close(own.mixer.qkv_proj.weight, torch.cat(stacked))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llm.mtp.layers.1.enorm.weight", r"llm.mtp.layers.1.enorm.weight is not of the one physical .*'\*'"),
        ("llm.mtp.shared.weight", "llm.mtp.shared.weight is not of the one physical MTP head"),
        ("llm.mtp.layers.0.mixer.up_proj.weight", "up_proj"),
        ("llm.mtp.layers.0.mixer.q_proj.bias", "q_proj.bias fits nothing in the MTP head"),
        ("llm.mtp.layers.0.strange.weight", "strange"),
    ],
)
def test_a_stray_tensor_is_refused_by_name(build_draft, name, message):
    with pytest.raises(ValueError, match=message):
        build_draft().load_weights({**build_tensors(), name: torch.zeros(64)}.items())


@pytest.mark.parametrize("part", ["eh_proj", "enorm", "final_layernorm", "mixer.o_proj"])
def test_a_head_partly_missing_is_an_error(build_draft, part):
    tensors = build_tensors()
    del tensors[f"llm.mtp.layers.0.{part}.weight"]
    with pytest.raises(ValueError, match=f"lacks 1 parameters: model.layers.0.{part}.weight"):
        build_draft().load_weights(tensors.items())


EXPERTS = "llm.mtp.layers.1.mixer.experts"


# Over a backbone that has no experts, and one whose experts are of a shape that does not tell their orientation.
@pytest.mark.parametrize("backbone", ["nemotron_h", "nemotron_latent"])
def test_experts_of_the_head_in_any_layout_are_the_same(build_draft, backbone):
    draft, tensors = build_draft(backbone, "*E"), build_tensors(backbone, pattern="*E")
    module = draft.model.layers["1"]
    experts = module.mixer.experts.routed_experts
    for layout in (tensors, pack_experts(tensors, "automodel"), pack_experts(tensors, "transformers")):
        for parameter in draft.parameters():
            nn.init.constant_(parameter, torch.nan)
        draft.load_weights(layout.items())
        for i in range(8):
            torch.testing.assert_close(experts.w13_weight[i], tensors[f"{EXPERTS}.{i}.up_proj.weight"])
            torch.testing.assert_close(experts.w2_weight[i], tensors[f"{EXPERTS}.{i}.down_proj.weight"])
        own = dict(module.named_parameters())
        for name in ("final_layernorm.weight", "mixer.gate.weight", "mixer.gate.e_score_correction_bias"):
            torch.testing.assert_close(own[name].data, tensors[f"llm.mtp.layers.1.{name}"])


def test_a_missing_expert_of_the_head_is_an_error(build_draft):
    tensors = build_tensors(pattern="*E")
    del tensors[f"{EXPERTS}.6.down_proj.weight"]
    with pytest.raises(ValueError, match="lacks 1 parameters: model.layers.1.mixer.experts.6.down_proj.weight"):
        build_draft(pattern="*E").load_weights(tensors.items())


@pytest.mark.parametrize("name", ["8.up_proj.weight", "0.gate_proj.weight", "0.up_proj.bias", "strange"])
def test_an_unknown_expert_tensor_of_the_head_is_refused(build_draft, name):
    tensors = {**build_tensors(pattern="*E"), f"{EXPERTS}.{name}": torch.zeros(48, 64)}
    with pytest.raises(ValueError, match=rf"{EXPERTS}.{name} fits nothing in the MTP head .*'\*E'"):
        build_draft(pattern="*E").load_weights(tensors.items())


def test_packed_experts_of_the_head_of_another_shape_are_refused(build_draft):
    tensors = {**build_tensors(pattern="*E"), f"{EXPERTS}.down_projs": torch.zeros(8, 48, 63)}
    with pytest.raises(ValueError, match=rf"{EXPERTS}.down_projs has shape \(8, 48, 63\); expected \(8, 48, 64\)"):
        build_draft(pattern="*E").load_weights(tensors.items())


def test_drafts_padded_rows_are_never_produced(build_draft):
    draft = build_draft()
    draft.load_weights(build_tensors().items())
    draft.lm_head = build_draft(tables=True).lm_head
    nn.init.zeros_(draft.lm_head.weight)
    logits = draft.compute_logits(torch.randn(3, 64))
    rows = len(build_tensors()["llm.lm_head.weight"])
    assert logits[:, rows:].eq(-torch.inf).all()
    assert logits[:, :rows].isfinite().all()


def test_drafts_fusion_is_the_targets(build_draft):
    draft = build_draft(tables=True)
    nn.init.normal_(draft.model.embed_tokens.weight)
    ids = torch.tensor([5, 10**6, 10**6, 7])
    mask = torch.tensor([False, True, True, False])
    audio = torch.randn(2, 64)
    fused = draft.get_input_embeddings(ids, [audio], is_multimodal=mask)
    torch.testing.assert_close(fused[1:3], audio)
    torch.testing.assert_close(fused[[0, 3]], draft.embed_input_ids(ids[[0, 3]]))
    with pytest.raises(ValueError, match="is_multimodal is None"):
        draft.embed_input_ids(ids.clamp(max=9), [audio])
    with pytest.raises(ValueError, match="3 multimodal tokens to 2 placeholders"):
        draft.embed_input_ids(ids, [torch.randn(3, 64)], is_multimodal=mask)


# --- in the engine

LENGTHS = (16_000, 320, 23_457, 48_000, 8_000)
REQUESTS = [
    *({"prompt": prompt("say "), "multi_modal_data": {"audio": noise(n, n)}} for n in LENGTHS),
    {"prompt": prompt(f"{LOCATOR} and ", 1), "multi_modal_data": {"audio": [noise(9_000, 1), noise(5_000, 2)]}},
    {"prompt": prompt("only text", 0)},
]
GREEDY = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 24, 17, 30, 5, 21, 26)]


def generate(llm) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(REQUESTS, GREEDY, use_tqdm=False)]


def counted(llm, name: str) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:spec_decode_num_{name}")


def test_an_attention_only_backbone_is_no_hybrid(engine, checkpoint):
    plain = engine(checkpoint("nemotron_attention"), dtype="float32")
    assert not plain.llm_engine.model_config.is_hybrid
    assert plain.llm_engine.vllm_config.cache_config.enable_prefix_caching


def test_without_our_corrections_the_text_is_wrong(engine, checkpoint, monkeypatch):
    """Fails when vLLM heals: then the corrections may go."""
    undrafted = generate(engine(checkpoint(), dtype="float32"))
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops import ssu_dispatch
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_update_cpu

    monkeypatch.setattr(platform_cpu, "install", lambda: None)
    monkeypatch.setattr(mamba_mixer2, "causal_conv1d_update", causal_conv1d_update_cpu)
    monkeypatch.setattr(mamba_mixer2, "selective_state_update", ssu_dispatch.selective_state_update)
    speculation = {"method": "mtp", "num_speculative_tokens": 4}
    assert generate(engine(checkpoint(), dtype="float32", speculative_config=speculation)) != undrafted


# --- in the engine, on real speech


def transcripts(llm) -> list[str]:
    entries = [json.loads(line) for line in TEST_SET.read_text().splitlines()]
    text = "<|im_start|>user\nTranscribe: <|audio|><|im_end|>\n<|im_start|>assistant\n"
    audios = [soundfile.read(TEST_SET.parent / entry["audio_filepath"], dtype="float32")[0] for entry in entries]
    requests = [{"prompt": text, "multi_modal_data": {"audio": audio}} for audio in audios]
    outputs = llm.generate(requests, SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_a_trained_head_is_accepted_and_fusion_is_why(engine, monkeypatch):
    """The same text three times; the draft is often right, and much less often when it does not get the audio."""
    expected = transcripts(engine(TRAINED, dtype="float32"))
    accepted = {}
    for fused in (True, False):
        monkeypatch.setattr(NeMoSpeechLMMTP, "supports_multimodal_embeddings", fused)
        speculation = {"method": "mtp", "num_speculative_tokens": 4}
        llm = engine(TRAINED, dtype="float32", speculative_config=speculation, disable_log_stats=False)
        assert transcripts(llm) == expected
        accepted[fused] = counted(llm, "accepted_tokens") / counted(llm, "drafts")
    assert accepted[True] > 1.0
    assert accepted[True] > accepted[False]
