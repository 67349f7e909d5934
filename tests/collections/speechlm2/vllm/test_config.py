# SPDX-License-Identifier: Apache-2.0
"""NeMoSpeechLMConfig and its MTP block: what is accepted, and how the rest is refused."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from random_checkpoints import BACKBONES, MTP, VOCAB_SIZE, salm_config
from transformers import NemotronHConfig, Qwen3Config

from nemo.collections.speechlm2.vllm.salm.config import NUM_EXTRA_ROWS, NeMoSpeechLMConfig


def parse(**changes) -> NeMoSpeechLMConfig:
    """The ordinary config with fields changed; None drops a field."""
    fields = {**salm_config(), **changes}
    return NeMoSpeechLMConfig.from_dict({name: value for name, value in fields.items() if value is not None})


def backbone(kind: str = "nemotron_h", **changes) -> dict:
    return {name: value for name, value in {**BACKBONES[kind], **changes}.items() if value is not None}


def write_config(folder, fields: dict) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return str(folder)


# --- the backbone


@pytest.mark.parametrize(
    ("kind", "cls", "hybrid"), [("nemotron_h", NemotronHConfig, True), ("qwen3", Qwen3Config, False)]
)
def test_both_kinds_of_backbone(kind, cls, hybrid):
    config = parse(llm_config=backbone(kind))
    assert type(config.get_text_config()) is cls
    assert config.get_text_config(decoder=True) is config.text_config
    assert config.is_hybrid is hybrid
    assert all(kind == "full_attention" for kind in config.layer_types) is not hybrid


def test_table_is_the_backbones_and_the_extra_rows():
    assert parse().text_config.vocab_size == VOCAB_SIZE + NUM_EXTRA_ROWS


def test_windowed_attention_is_not_hybrid():
    windows = {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    config = parse(llm_config=backbone("qwen3", **windows))
    assert config.text_config.layer_types == windows["layer_types"]
    assert set(config.layer_types) == {"full_attention"}


@pytest.mark.parametrize(
    "spelling",
    [
        {"layers_block_type": ["mamba", "mlp", "attention", "moe"]},
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]},
        {"hybrid_override_pattern": "M-*E"},
    ],
)
def test_spellings_of_layer_types(spelling):
    config = parse(llm_config=backbone(hybrid_override_pattern=None) | spelling)
    assert config.text_config.hybrid_override_pattern == "M-*E"
    assert config.layer_types == ["linear_attention", "mlp", "full_attention", "moe"]


def test_alias_of_nemotron_h():
    config = parse(llm_config=backbone(architectures=["NemotronHybridForCausalLM"]))
    assert config.text_config.architectures == ["NemotronHForCausalLM"]


def test_embedded_config_comes_before_any_folder(tmp_path):
    write_config(tmp_path / "llm_backbone", backbone("qwen3"))
    config = NeMoSpeechLMConfig.from_pretrained(write_config(tmp_path, salm_config()))
    assert config.text_config.model_type == "nemotron_h"


def test_backbone_folder_comes_before_the_name(tmp_path):
    write_config(tmp_path / "llm_backbone", backbone("qwen3"))
    write_config(tmp_path / "named", backbone())
    folder = write_config(tmp_path, {**salm_config(), "llm_config": None, "mtp": None, "pretrained_llm": "named"})
    assert NeMoSpeechLMConfig.from_pretrained(folder).text_config.model_type == "qwen3"


@pytest.mark.parametrize("name", ["llm/inner", "absolute"])
def test_backbone_by_folder(tmp_path, monkeypatch, name):
    """A relative name is a folder of the checkpoint, wherever the process runs."""
    monkeypatch.chdir("/")
    inner = write_config(tmp_path / "llm" / "inner", backbone("qwen3"))
    pretrained_llm = inner if name == "absolute" else name
    folder = write_config(tmp_path, {**salm_config("qwen3"), "llm_config": None, "pretrained_llm": pretrained_llm})
    assert NeMoSpeechLMConfig.from_pretrained(folder).text_config.model_type == "qwen3"


def test_no_backbone_says_where_it_was_looked_for(tmp_path):
    folder = write_config(tmp_path, {**salm_config(), "llm_config": None})
    with pytest.raises(ValueError, match=r"(?s)'nowhere/to-be-found'.*llm_config.*llm_backbone/"):
        NeMoSpeechLMConfig.from_pretrained(folder)


@pytest.mark.parametrize("name", ["../elsewhere", "llm/../../elsewhere"])
def test_a_folder_outside_the_checkpoint_is_refused(tmp_path, name):
    write_config(tmp_path / "elsewhere", backbone())
    folder = write_config(tmp_path / "checkpoint", {**salm_config(), "llm_config": None, "pretrained_llm": name})
    with pytest.raises(ValueError, match="pretrained_llm.*inside the checkpoint"):
        NeMoSpeechLMConfig.from_pretrained(folder)


# --- fields that are missing or bad: each message names the field and what was found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"perception": None}, "perception is missing"),
        ({"perception": "tower"}, "perception.*'tower'"),
        ({"audio_locator_tag": None}, "audio_locator_tag is None"),
        ({"audio_locator_tag": 7}, "audio_locator_tag is 7"),
        ({"audio_locator_tag": " "}, "audio_locator_tag is ' '"),
        ({"llm_config": None, "pretrained_llm": None}, "pretrained_llm is None.*llm_config.*llm_backbone"),
        ({"llm_config": ["nemotron_h"]}, r"llm_config is \['nemotron_h'\]"),
        ({"llm_config": backbone(model_type=None)}, "llm_config.model_type is None"),
        ({"llm_config": backbone(model_type="no_such_llm")}, "model_type 'no_such_llm'"),
        ({"llm_config": backbone(vocab_size=None)}, "llm_config.vocab_size is None"),
        ({"llm_config": backbone(vocab_size="many")}, "llm_config.vocab_size is 'many'"),
        ({"llm_config": backbone(vocab_size=0)}, "llm_config.vocab_size is 0"),
        ({"llm_config": backbone(hidden_size="wide")}, "llm_config.*hidden_size"),
        ({"llm_config": backbone(hybrid_override_pattern="M-?")}, "llm_config.*nemotron_h"),
        ({"llm_config": backbone(hidden_size=48)}, "perception.output_dim is 64.*48"),
        ({"llm_config": {"model_type": "jamba", "vocab_size": 9, "hidden_size": 64}}, "'jamba'.*nemotron_h"),
        ({"encoder_chunk_size_seconds": "long"}, "encoder_chunk_size_seconds is 'long'"),
        ({"encoder_chunk_size_seconds": True}, "encoder_chunk_size_seconds is True"),
        ({"encoder_chunk_size_seconds": 0.01}, "encoder_chunk_size_seconds is 0.01.*0.02"),
        ({"encoder_chunk_size_seconds": float("inf")}, "encoder_chunk_size_seconds is inf"),
        ({"lora": "yes"}, "lora is 'yes'"),
        ({"mtp": True}, "mtp is True"),
        ({"mtp": {**MTP, "enabled": "yes"}}, "mtp.enabled is 'yes'"),
        ({"mtp": {k: v for k, v in MTP.items() if k != "enabled"}}, "mtp.enabled is None"),
        ({"mtp": {**MTP, "num_nextn_predict_layers": "four"}}, "mtp.num_nextn_predict_layers is 'four'"),
        ({"mtp": {**MTP, "num_nextn_predict_layers": -1}}, "mtp.num_nextn_predict_layers is -1"),
        ({"mtp": {**MTP, "use_repeated_layer": 1}}, "mtp.use_repeated_layer is 1"),
        ({"mtp": {**MTP, "hybrid_override_pattern": "*M"}}, "mtp.hybrid_override_pattern holds 'M'"),
        ({"mtp": {**MTP, "hybrid_override_pattern": ""}}, "mtp.hybrid_override_pattern must be a non-empty"),
        ({"mtp": {**MTP, "hybrid_override_pattern": None}}, "MTP pattern is missing.*mtp_layers_block_type"),
        ({"mtp": None, "compute_mtp": "on"}, "compute_mtp is 'on'"),
        ({"mtp": None, "compute_mtp": True}, "llm_config.num_nextn_predict_layers is None"),
    ],
)
def test_bad_fields_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        parse(**changes)


# --- MTP


def test_mtp_block():
    mtp = parse().mtp_config
    assert (mtp.num_nextn_predict_layers, mtp.use_repeated_layer, mtp.pattern, mtp.explicit) == (4, True, "*", True)


@pytest.mark.parametrize("changes", [{"enabled": False}, {"num_nextn_predict_layers": 0}])
def test_mtp_switched_off(changes):
    assert parse(mtp={**MTP, **changes}).mtp_config is None


def test_no_mtp():
    assert parse(mtp=None).mtp_config is None


@pytest.mark.parametrize(
    "topology",
    [
        {"mtp_hybrid_override_pattern": "*E"},
        {"mtp_layers_block_type": ["attention", "moe"]},
        {"mtp_layers_block_type": ["full_attention", "moe"]},
    ],
)
def test_legacy_mtp(topology):
    mtp = parse(mtp=None, compute_mtp=True, llm_config=backbone(num_nextn_predict_layers=2, **topology)).mtp_config
    assert (mtp.num_nextn_predict_layers, mtp.use_repeated_layer, mtp.pattern, mtp.explicit) == (2, False, "*E", False)


# --- audio lengths


def test_whole_audios_are_one_piece():
    config = parse()
    assert config.audio_chunks(1_000_000) == [1_000_000]
    assert config.num_audio_tokens(16_000) == config.perception_config.num_tokens(16_000) == 13


@pytest.mark.parametrize(
    ("num_samples", "chunks"),
    [
        (8_000, [8_000]),
        (16_000, [16_000]),
        (16_319, [16_319]),
        (16_320, [16_000, 320]),
        (32_001, [16_000, 16_001]),
        (40_000, [16_000, 16_000, 8_000]),
    ],
)
def test_chunks_and_their_tails(num_samples, chunks):
    config = parse(encoder_chunk_size_seconds=1.0)
    assert config.audio_chunks(num_samples) == chunks
    assert config.num_audio_tokens(num_samples) == sum(map(config.perception_config.num_tokens, chunks))


# --- as transformers and vLLM handle configs


def test_survives_pickle_and_copy():
    config = parse()
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert other.text_config.vocab_size == config.text_config.vocab_size
        assert other.perception_config == config.perception_config
        assert other.layer_types == config.layer_types


def test_round_trip_keeps_the_fields(tmp_path):
    config = parse()
    config.save_pretrained(tmp_path)
    again = NeMoSpeechLMConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict() == salm_config()
    assert again.text_config.vocab_size == config.text_config.vocab_size
    assert "nemo_speechlm" in repr(config)


def test_parsing_leaves_its_input_alone():
    fields = salm_config()
    NeMoSpeechLMConfig(**fields)
    assert fields == salm_config()


def test_architecture_and_dtype():
    assert parse().architectures == parse(architectures=None).architectures == ["NeMoSpeechLMForConditionalGeneration"]
    assert str(parse().dtype) == "torch.float32"
