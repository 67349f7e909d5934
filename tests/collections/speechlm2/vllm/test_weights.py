# SPDX-License-Identifier: Apache-2.0
"""Names, padding and ties; and that every tensor is loaded, set aside on purpose, or refused by name."""

from __future__ import annotations

import pytest
import torch
from random_checkpoints import (
    BACKBONES,
    VOCAB_SIZE,
    build_checkpoint,
    build_tensors,
    pack_experts,
    salm_config,
    with_adapters,
)
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo.collections.speechlm2.vllm.salm.config import NUM_EXTRA_ROWS
from nemo.collections.speechlm2.vllm.salm.lora import LoRAConfig
from nemo.collections.speechlm2.vllm.salm.weights import (
    NAME_RULES,
    NEMOTRON_H_RULES,
    ExpertTensors,
    VocabularyPadding,
)

ROWS = VOCAB_SIZE + 1
TABLE = VOCAB_SIZE + NUM_EXTRA_ROWS


@pytest.fixture(scope="module")
def models(checkpoint, build_model):
    return {name: build_model(checkpoint(name), load=False, dtype="float32") for name in ("nemotron_h", "qwen3")}


def reload(model: nn.Module, tensors: dict[str, torch.Tensor]) -> set[str]:
    """Load into a model whose weights were wiped, so that nothing is right by chance."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model.load_weights(iter(tensors.items()))


# --- names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llm.model.embed_tokens.weight", "language_model.model.embed_tokens.weight"),
        ("embed_tokens.weight", "language_model.model.embed_tokens.weight"),
        ("llm.lm_head.weight", "language_model.lm_head.weight"),
        ("llm.model.layers.3.mixer._fp32_params.A_log", "language_model.model.layers.3.mixer.A_log"),
        ("llm.model.layers.3.mixer.dt_bias", "language_model.model.layers.3.mixer.dt_bias"),
        ("perception.proj.weight", "perception.proj.weight"),
        ("perception.preprocessor.featurizer.fb", "perception.preprocessor.fb"),
        ("perception.encoder.pre_encode.conv.0.weight", "perception.encoder.subsampling.layers.0.weight"),
        ("perception.encoder.pre_encode.out.bias", "perception.encoder.subsampling.linear.bias"),
        ("perception.encoder.layers.1.self_attn.linear_pos.weight",
         "perception.encoder.layers.1.self_attn.relative_k_proj.weight"),
        ("perception.encoder.layers.1.self_attn.pos_bias_u", "perception.encoder.layers.1.self_attn.bias_u"),
        ("perception.encoder.layers.1.conv.batch_norm.bias", "perception.encoder.layers.1.conv.norm.bias"),
        ("llm.mtp.layers.0.mixer.q_proj.weight", None),
        ("llm.mtp.layers.0.enorm.weight", None),
        ("llm.model.layers.0.self_attn.q_proj._extra_state", None),
        ("perception.encoder._extra_state", None),
    ],
)  # fmt: skip
def test_name_rules(name, expected):
    assert NAME_RULES.map_name(name) == expected


def test_last_norm_of_a_nemotron_h():
    rules = NAME_RULES | NEMOTRON_H_RULES
    assert rules.map_name("llm.model.norm.weight") == "language_model.model.norm_f.weight"
    assert NAME_RULES.map_name("llm.model.norm.weight") == "language_model.model.norm.weight"
    assert rules.map_name("llm.model.layers.0.norm.weight") == "language_model.model.layers.0.norm.weight"


# --- padding


def test_padding_streams_and_appends_zeros():
    drawn = []

    def stream():
        for name in ("llm.model.embed_tokens.weight", "llm.model.norm.weight", "llm.lm_head.weight"):
            drawn.append(name)
            yield name, torch.ones(5, 2)

    padding = VocabularyPadding(8)
    padded = padding.pad(stream())
    assert not drawn
    name, table = next(padded)
    assert len(drawn) == 1
    assert table.tolist() == [[1, 1]] * 5 + [[0, 0]] * 3
    assert padding.checkpoint_rows == 5
    assert [tuple(t.shape) for _, t in padded] == [(5, 2), (8, 2)]


@pytest.mark.parametrize("name", ["embed_tokens.weight", "llm.model.embed_tokens.weight", "llm.lm_head.weight"])
def test_too_many_rows_are_refused(models, name):
    tensors = build_tensors("qwen3")
    tensors.pop("llm.model.embed_tokens.weight" if "embed" in name else name)
    with pytest.raises(ValueError, match=rf"{name} has {TABLE + 1} rows.*at most {TABLE}.*vocab_size"):
        reload(models["qwen3"], {**tensors, name: torch.zeros(TABLE + 1, 64)})


@pytest.mark.parametrize("rows", [VOCAB_SIZE, ROWS, TABLE])
def test_any_number_of_rows_up_to_the_table(models, rows):
    tensors = build_tensors("qwen3")
    for name in ("llm.model.embed_tokens.weight", "llm.lm_head.weight"):
        tensors[name] = torch.randn(rows, 64)
    model = models["qwen3"]
    reload(model, tensors)
    logits = model.padding.mask(torch.zeros(3, TABLE))
    assert logits[:, :rows].isfinite().all()
    assert (logits[:, rows:] == -torch.inf).all()
    assert (model.language_model.model.embed_tokens.weight[rows:TABLE] == 0).all()


# --- whole checkpoints


@pytest.mark.parametrize("backbone", ["nemotron_h", "qwen3"])
def test_everything_is_loaded_and_mtp_set_aside(models, backbone):
    model = models[backbone]
    tensors = build_tensors(backbone)
    loaded = reload(model, tensors)
    assert loaded >= {name for name, _ in model.named_parameters()}
    assert all(p.isfinite().all() for p in model.parameters())
    assert not any("mtp" in name for name in loaded)
    assert any(name.startswith("llm.mtp.") for name in tensors) is (backbone == "nemotron_h")


def test_statistics_and_mel_buffers_are_loaded(models):
    tensors = build_tensors()
    name = "perception.encoder.layers.1.conv.batch_norm.running_mean"
    tensors[name] = torch.full_like(tensors[name], 7.0)
    tensors["perception.preprocessor.featurizer.window"] = torch.full((400,), 0.25)
    reload(models["nemotron_h"], tensors)
    perception = models["nemotron_h"].perception
    assert (perception.encoder.layers[1].conv.norm.running_mean == 7).all()
    assert (perception.preprocessor.window == 0.25).all()


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_order_does_not_matter(models, order):
    model, tensors = models["nemotron_h"], build_tensors()
    reload(model, tensors)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = list(tensors)[::-1]
    if order == "shuffled":
        names = [names[i] for i in torch.randperm(len(names), generator=torch.Generator().manual_seed(0))]
    reload(model, {name: tensors[name] for name in names})
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


@pytest.mark.parametrize("backbone", ["nemotron_h", "qwen3"])
def test_embedding_table_outside_the_llm(models, backbone):
    tensors = build_tensors(backbone)
    table = tensors.pop("llm.model.embed_tokens.weight")
    reload(models[backbone], {**tensors, "embed_tokens.weight": table})
    torch.testing.assert_close(models[backbone].language_model.model.embed_tokens.weight[:ROWS], table)


@pytest.mark.parametrize("absent", ["llm.model.embed_tokens.weight", "llm.lm_head.weight"])
@pytest.mark.parametrize("backbone", ["nemotron_h", "qwen3"])
def test_one_table_stands_for_the_other(models, backbone, absent):
    tensors = build_tensors(backbone)
    tensors.pop(absent)
    (present,) = {"llm.model.embed_tokens.weight", "llm.lm_head.weight"} & set(tensors)
    model = models[backbone]
    reload(model, tensors)
    for table in (model.language_model.model.embed_tokens, model.language_model.lm_head):
        torch.testing.assert_close(table.weight[:ROWS], tensors[present])
    assert model.padding.checkpoint_rows == ROWS


def test_automodels_float32_holders_and_extra_states(models):
    tensors = {
        name.replace(".A_log", "._fp32_params.A_log").replace(".dt_bias", "._fp32_params.dt_bias"): tensor
        for name, tensor in build_tensors().items()
    }
    assert any("._fp32_params." in name for name in tensors)
    tensors["llm.model.layers.0.mixer.in_proj._extra_state"] = torch.zeros(0)
    reload(models["nemotron_h"], tensors)
    mixer = models["nemotron_h"].language_model.model.layers[0].mixer
    expected = -build_tensors()["llm.model.layers.0.mixer.A_log"].exp()
    torch.testing.assert_close(mixer.A.flatten(), expected)


FLOAT32 = ("A_log", "dt_bias", "D", "e_score_correction_bias")


def in_bfloat16(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint in bfloat16, but for values that it cannot hold, in Automodel's float32 holders."""
    stored = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        parent, _, kind = name.rpartition(".")
        if kind in FLOAT32:
            del stored[name]
            holder = parent if kind == "e_score_correction_bias" else f"{parent}._fp32_params"
            values = torch.rand(tensor.shape, generator=generator) + 0.5
            assert not torch.equal(values, values.bfloat16().float())
            stored[f"{holder}.{kind}"] = values
    return stored


def test_what_a_bfloat16_cannot_hold_stays_float32(checkpoint, build_model):
    model = build_model(checkpoint("nemotron_moe"), load=False, dtype="bfloat16")
    stored = in_bfloat16(build_tensors("nemotron_moe"))
    reload(model, stored)
    layers, name = model.language_model.model.layers, "llm.model.layers.0.mixer._fp32_params"
    assert torch.equal(layers[0].mixer.D, stored[f"{name}.D"])
    assert torch.equal(layers[0].mixer.dt_bias, stored[f"{name}.dt_bias"])
    assert torch.equal(layers[0].mixer.A, -stored[f"{name}.A_log"].exp())
    for number in (1, 3):
        bias = f"llm.model.layers.{number}.mixer.gate.e_score_correction_bias"
        assert torch.equal(layers[number].mixer.gate.e_score_correction_bias, stored[bias])
    assert layers[0].mixer.in_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("backend", "dtype"), [("triton", torch.float32), ("flashinfer", torch.bfloat16)])
def test_flashinfer_wants_the_dtype_of_the_activations(checkpoint, build_model, backend, dtype):
    model = build_model(checkpoint(), load=False, dtype="bfloat16", mamba_backend=backend)
    mixer = model.language_model.model.layers[0].mixer
    assert (mixer.D.dtype, mixer.dt_bias.dtype, mixer.A.dtype) == (dtype, dtype, torch.float32)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_huggingface_names_of_a_nemotron_h(models):
    """ModelOpt exports."""
    model, tensors = models["nemotron_h"], build_tensors()
    reload(model, tensors)
    expected = values(model)
    renamed = {
        name.replace("llm.model.embed_tokens.", "backbone.embeddings.")
        .replace("llm.model.norm.", "backbone.norm_f.")
        .replace("llm.model.", "backbone.")
        .removeprefix("llm."): tensor
        for name, tensor in tensors.items()
    }
    assert {"backbone.layers.0.mixer.A_log", "lm_head.weight", "mtp.layers.0.enorm.weight"} <= renamed.keys()
    reload(model, renamed)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


@pytest.mark.parametrize("layout", ["peft", "automodel"])
@pytest.mark.parametrize("backbone", ["nemotron_h", "qwen3"])
def test_lora_is_merged(models, backbone, layout, monkeypatch):
    """The adapters' product is taken out of the stored weights, so that merged they are the reference."""
    model, tensors = models[backbone], build_tensors(backbone)
    reload(model, tensors)
    expected = values(model)
    lora = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "in_proj"]}
    monkeypatch.setattr(model.config, "lora", LoRAConfig.from_dict(lora))
    reload(model, with_adapters(tensors, layout, lora))
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


# --- routed experts

EXPERTS = "llm.model.layers.1.mixer.experts"


@pytest.fixture(scope="module")
def moes(checkpoint, build_model):
    names = ("nemotron_moe", "nemotron_latent")
    return {name: build_model(checkpoint(name), load=False, dtype="float32") for name in names}


@pytest.mark.parametrize("backbone", ["nemotron_moe", "nemotron_latent"])
def test_experts_in_any_layout_are_the_same(moes, backbone):
    model, tensors = moes[backbone], build_tensors(backbone)
    reload(model, tensors)
    experts = model.language_model.model.layers[1].mixer.experts.routed_experts
    for i in range(8):
        torch.testing.assert_close(experts.w13_weight[i], tensors[f"{EXPERTS}.{i}.up_proj.weight"])
        torch.testing.assert_close(experts.w2_weight[i], tensors[f"{EXPERTS}.{i}.down_proj.weight"])
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for layout in ("automodel", "transformers"):
        packed = pack_experts(tensors, layout)
        assert len(packed) == len(tensors) - 2 * 2 * 7
        reload(model, packed)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], msg=f"{layout} {name}")


@pytest.mark.parametrize("layout", ["automodel", "transformers"])
def test_where_the_shape_tells_the_orientation_it_decides(moes, layout):
    model, tensors = moes["nemotron_moe"], build_tensors("nemotron_moe")
    turned = {
        name: tensor.transpose(1, 2) if ".experts." in name and tensor.ndim == 3 else tensor
        for name, tensor in pack_experts(tensors, layout).items()
    }
    reload(model, turned)
    experts = model.language_model.model.layers[1].mixer.experts.routed_experts
    torch.testing.assert_close(experts.w13_weight[3], tensors[f"{EXPERTS}.3.up_proj.weight"])
    torch.testing.assert_close(experts.w2_weight[3], tensors[f"{EXPERTS}.3.down_proj.weight"])


def test_packed_experts_are_split_without_a_copy(moes):
    packed = torch.randn(8, 64, 48)
    name = "language_model.model.layers.1.mixer.experts"
    pairs = ExpertTensors(moes["nemotron_moe"]).take("", f"{name}.gate_and_up_projs", packed)
    assert [place for place, _ in pairs] == [f"{name}.{i}.up_proj.weight" for i in range(8)]
    assert {view.untyped_storage().data_ptr() for _, view in pairs} == {packed.untyped_storage().data_ptr()}
    torch.testing.assert_close(pairs[5][1], packed[5].T)


@pytest.mark.parametrize(
    ("name", "shape", "accepted"),
    [
        ("gate_and_up_projs", (8, 64, 96), r"\(8, 64, 48\) \(experts, in, out\) or \(8, 48, 64\)"),
        ("down_projs", (7, 48, 64), r"\(8, 48, 64\) \(experts, in, out\) or \(8, 64, 48\)"),
        ("up_proj", (8, 48), r"\(8, 64, 48\) \(experts, in, out\) or \(8, 48, 64\)"),
    ],
)
def test_packed_experts_of_another_shape_are_refused(moes, name, shape, accepted):
    tensors = {**pack_experts(build_tensors("nemotron_moe"), "automodel"), f"{EXPERTS}.{name}": torch.zeros(shape)}
    found = ", ".join(map(str, shape))
    with pytest.raises(ValueError, match=rf"tensor {EXPERTS}.{name} has shape \({found}\); expected {accepted}"):
        reload(moes["nemotron_moe"], tensors)


@pytest.mark.parametrize("shape", [(47, 64), (48, 63), (49, 64), (64, 48)])
def test_an_expert_of_another_shape_is_refused(moes, shape):
    """vLLM would load a smaller one into a part of its place."""
    name = f"{EXPERTS}.3.up_proj.weight"
    with pytest.raises(ValueError, match=rf"{name} has shape \({shape[0]}, {shape[1]}\); expected \(48, 64\)"):
        reload(moes["nemotron_moe"], {**build_tensors("nemotron_moe"), name: torch.zeros(shape)})


def test_a_missing_expert_is_named(moes):
    tensors = build_tensors("nemotron_moe")
    del tensors[f"{EXPERTS}.3.up_proj.weight"], tensors[f"{EXPERTS}.7.down_proj.weight"]
    with pytest.raises(ValueError, match="unloaded: ") as refusal:
        reload(moes["nemotron_moe"], tensors)
    names = (f"language_model.model.layers.1.mixer.experts.{x}_proj.weight" for x in ("3.up", "7.down"))
    assert f"unloaded: {', '.join(names)}. " in str(refusal.value)


@pytest.mark.parametrize(
    "name",
    [
        "8.up_proj.weight",
        "0.gate_proj.weight",
        "0.up_proj.bias",
        "0.up_proj",
        "surprise",
        "up_projs",
        "03.up_proj.weight",
    ],
)
def test_an_unknown_expert_tensor_is_named(moes, name):
    with pytest.raises(ValueError, match=rf"fit nothing in the model: {EXPERTS}.{name}\. Does"):
        reload(moes["nemotron_moe"], {**build_tensors("nemotron_moe"), f"{EXPERTS}.{name}": torch.zeros(48, 64)})


def test_gated_experts_too(build_model, tmp_path):
    """Of a backbone whose experts have a gate, which is the first half of a packed tensor."""
    sizes = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }  # fmt: skip
    settings = {**BACKBONES["qwen3"], **sizes, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    config = {**salm_config("qwen3"), "llm_config": settings}
    backbone = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**settings, "vocab_size": ROWS}))
    tensors = {name: tensor for name, tensor in build_tensors("qwen3").items() if name.startswith("perception.")}
    tensors |= {f"llm.{name}": tensor for name, tensor in backbone.state_dict().items()}
    model = build_model(build_checkpoint(tmp_path, config=config, tensors=tensors), load=False, dtype="float32")
    name = "llm.model.layers.1.mlp.experts"
    gate_up, down = tensors.pop(f"{name}.gate_up_proj"), tensors.pop(f"{name}.down_proj")
    single = {
        f"{name}.{i}.{part}_proj.weight": tensor
        for i in range(4)
        for part, tensor in (("gate", gate_up[i, :96]), ("up", gate_up[i, 96:]), ("down", down[i]))
    }
    automodel = {f"{name}.gate_and_up_projs": gate_up.transpose(1, 2), f"{name}.down_projs": down.transpose(1, 2)}
    for layout in (single, {f"{name}.gate_up_proj": gate_up, f"{name}.down_proj": down}, automodel):
        reload(model, {**tensors, **layout})
        experts = model.language_model.model.layers[1].mlp.experts.routed_experts
        torch.testing.assert_close(experts.w13_weight.data, gate_up)
        torch.testing.assert_close(experts.w2_weight.data, down)
    del single[f"{name}.2.gate_proj.weight"]
    with pytest.raises(ValueError, match=r"unloaded: language_model.model.layers.1.mlp.experts.2.gate_proj.weight\. "):
        reload(model, {**tensors, **single})


# --- refusals: all names in one message

STRAY = [
    "llm.model.layers.9.norm.weight",
    "llm.model.layers.0.mixer.in_proj.bias",  # vLLM's loader would pass over it in silence
    "llm.model.layers.0.surprise.weight",
    "llm.mtp_head.weight",
    "perception.encoder.layers.0.norm_extra.bias",
    "perception.encoder.layers.7.self_attn.linear_q.weight",
    "perception.modality_adapter.layers.0.conv.batch_norm.weight",
    "something.else",
]


def test_every_unmatched_name_is_listed(models):
    with pytest.raises(ValueError, match="fit nothing") as refusal:
        reload(models["nemotron_h"], {**build_tensors(), **{name: torch.zeros(1) for name in STRAY}})
    listed = str(refusal.value)
    assert all(name in listed for name in STRAY)
    assert "unloaded" not in listed


@pytest.mark.parametrize("backbone", ["nemotron_h", "qwen3"])
@pytest.mark.parametrize("name", ["llm.model.layers.0.bias", "perception.proj.weight.bias", "proj.bias"])
def test_one_stray_bias_is_refused(models, backbone, name):
    with pytest.raises(ValueError, match=rf"fit nothing in the model: {name}\b"):
        reload(models[backbone], {**build_tensors(backbone), name: torch.zeros(1)})


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("llm.model.norm.weight", "language_model.model.norm_f.weight"),
        ("llm.model.layers.0.mixer.A_log", "language_model.model.layers.0.mixer.A"),
        ("perception.proj.bias", "perception.proj.bias"),
        (
            "perception.encoder.layers.0.conv.batch_norm.running_var",
            "perception.encoder.layers.0.conv.norm.running_var",
        ),
        ("perception.encoder.layers.1.self_attn.pos_bias_v", "perception.encoder.layers.1.self_attn.bias_v"),
    ],
)  # fmt: skip
def test_a_missing_tensor_is_named(models, name, listed):
    tensors = build_tensors()
    tensors.pop(name)
    with pytest.raises(ValueError, match="unloaded: ") as refusal:
        reload(models["nemotron_h"], tensors)
    assert f"unloaded: {listed}. " in str(refusal.value)


def test_missing_and_unmatched_are_listed_together(models):
    tensors = build_tensors()
    del tensors["perception.proj.weight"], tensors["llm.model.layers.1.norm.weight"]
    with pytest.raises(ValueError, match="fit nothing") as refusal:
        reload(models["nemotron_h"], {**tensors, "stray.weight": torch.zeros(1)})
    for name in ("stray.weight", "perception.proj.weight", "language_model.model.layers.1.norm.weight"):
        assert name in str(refusal.value)


def test_no_tables_at_all_are_named(models):
    tensors = {k: v for k, v in build_tensors().items() if "embed_tokens" not in k and "lm_head" not in k}
    with pytest.raises(ValueError, match=r"unloaded: language_model.lm_head.weight, .*embed_tokens.weight"):
        reload(models["nemotron_h"], tensors)


@pytest.mark.parametrize(
    "name",
    [
        "perception.proj.weight",
        "perception.encoder.layers.0.self_attn.linear_q.weight",
        "llm.model.layers.0.mixer.in_proj.weight",
        "llm.model.layers.2.mixer.q_proj.weight",
        "llm.model.norm.weight",
    ],
)
def test_a_misshapen_tensor_is_named(models, name):
    tensors = build_tensors()
    tensors[name] = torch.zeros([size + 1 for size in tensors[name].shape])
    with pytest.raises(ValueError, match=rf"tensor {name} \({len(tensors[name])}, ?.*does not fit"):
        reload(models["nemotron_h"], tensors)


def test_the_tower_may_be_left_out(checkpoint, build_model):
    """With audio switched off vLLM builds no tower; its tensors are no error then."""
    model = build_model(checkpoint("qwen3"), dtype="float32", limit_mm_per_prompt={"audio": 0})
    assert not any(name.startswith("perception.") for name, _ in model.named_parameters())
