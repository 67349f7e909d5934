# SPDX-License-Identifier: Apache-2.0
"""The doctor on checkpoints that serve; what it says of broken ones is in test_bad_checkpoints."""

from __future__ import annotations

import json
import math
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from random_checkpoints import BACKBONES, TRAINED, build_checkpoint, build_tensors, build_tokenizer, salm_config
from safetensors.torch import load_file, save_file

from nemo.collections.speechlm2.vllm.salm import __main__ as command
from nemo.collections.speechlm2.vllm.salm.inspection import inspect_checkpoint

BITS = {"BF16": 16, "F32": 32, "I64": 64}


def write_headers(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """A safetensors file of (dtype, shape) by name whose data is a hole: it takes no room on the disk."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content)
    with path.open("r+b") as file:
        file.truncate(8 + len(content) + end)


def tower(layers: int, width: int, mels: int, channels: int, out: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """NeMo's names and shapes of a FastConformer with biases and an IdentityConnector."""
    shapes: dict[str, tuple[int, ...]] = {
        "preprocessor.featurizer.window": (400,),
        "preprocessor.featurizer.fb": (1, mels, 257),
        "proj.weight": (out, width),
        "proj.bias": (out,),
        "encoder.pre_encode.out.weight": (width, channels * mels // 8),
        "encoder.pre_encode.out.bias": (width,),
    }
    for i, inputs in ((0, 1), (2, 1), (3, channels), (5, 1), (6, channels)):
        size = 1 if i in (3, 6) else 3
        shapes[f"encoder.pre_encode.conv.{i}.weight"] = (channels, inputs, size, size)
        shapes[f"encoder.pre_encode.conv.{i}.bias"] = (channels,)
    for i in range(layers):
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.pos_bias_u": (8, width // 8),
            "self_attn.pos_bias_v": (8, width // 8),
            "self_attn.linear_pos.weight": (width, width),
            "conv.pointwise_conv1.weight": (2 * width, width, 1),
            "conv.pointwise_conv1.bias": (2 * width,),
            "conv.depthwise_conv.weight": (width, 1, 9),
            "conv.depthwise_conv.bias": (width,),
            "conv.pointwise_conv2.weight": (width, width, 1),
            "conv.pointwise_conv2.bias": (width,),
            "conv.batch_norm.num_batches_tracked": (),
        }
        layer |= {f"conv.batch_norm.{name}": (width,) for name in ("weight", "bias", "running_mean", "running_var")}
        for norm in ("feed_forward1", "self_att", "conv", "feed_forward2", "out"):
            layer |= {f"norm_{norm}.weight": (width,), f"norm_{norm}.bias": (width,)}
        for name in ("q", "k", "v", "out"):
            layer |= {f"self_attn.linear_{name}.weight": (width, width), f"self_attn.linear_{name}.bias": (width,)}
        for name in ("feed_forward1", "feed_forward2"):
            layer |= {f"{name}.linear1.weight": (4 * width, width), f"{name}.linear1.bias": (4 * width,)}
            layer |= {f"{name}.linear2.weight": (width, 4 * width), f"{name}.linear2.bias": (width,)}
        shapes |= {f"encoder.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {
        f"perception.{name}": ("I64" if name.endswith("tracked") else "F32", shape) for name, shape in shapes.items()
    }


def large_tower(out: int) -> dict[str, Any]:
    """The ``perception`` of canary's FastConformer: 32 layers of width 1,024."""
    perception = salm_config()["perception"]
    perception["preprocessor"]["features"] = 128
    perception["encoder"] |= {"feat_in": 128, "n_layers": 32, "d_model": 1024, "n_heads": 8}
    perception["encoder"]["subsampling_conv_channels"] = 256
    return {**perception, "modality_adapter": {**perception["modality_adapter"], "d_model": 1024}, "output_dim": out}


def nemotron_nano(shards: int, folder: Path) -> None:
    """A SALM on a NemotronH of 30 B parameters with 128 experts a layer, with its MTP head: headers only."""
    hidden, rows, pattern = 2688, 131072, "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    backbone = {
        "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "vocab_size": rows,
        "hidden_size": hidden, "hybrid_override_pattern": pattern, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856, "ssm_state_size": 128,
        "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "tie_word_embeddings": False,
    }  # fmt: skip

    def layer(symbol: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        inner, groups = 4096, 4096 + 2 * 8 * 128
        if symbol == "M":
            shapes = {"in_proj.weight": (inner + groups + 64, hidden), "conv1d.weight": (groups, 1, 4)}
            shapes |= {"conv1d.bias": (groups,), "norm.weight": (inner,), "out_proj.weight": (hidden, inner)}
            shapes |= {"A_log": (64,), "D": (64,), "dt_bias": (64,)}
        elif symbol == "*":
            shapes = {f"{name}_proj.weight": (size, hidden) for name, size in (("q", 4096), ("k", 256), ("v", 256))}
            shapes["o_proj.weight"] = (hidden, 4096)
        else:
            shapes = {"gate.weight": (128, hidden), "gate.e_score_correction_bias": (128,)}
            parts = [(f"experts.{i}", 1856) for i in range(128)] + [("shared_experts", 3712)]
            shapes |= {f"{name}.up_proj.weight": (size, hidden) for name, size in parts}
            shapes |= {f"{name}.down_proj.weight": (hidden, size) for name, size in parts}
        exact = ("A_log", "D", "dt_bias", "bias")
        return {
            "norm.weight": ("BF16", (hidden,)),
            **{f"mixer.{name}": ("F32" if name.endswith(exact) else "BF16", shape) for name, shape in shapes.items()},
        }

    tensors = tower(32, 1024, 128, 256, hidden)
    tensors |= {f"llm.{name}.weight": ("BF16", (rows + 1, hidden)) for name in ("model.embed_tokens", "lm_head")}
    tensors["llm.model.norm.weight"] = ("BF16", (hidden,))
    for i, symbol in enumerate(pattern):
        tensors |= {f"llm.model.layers.{i}.{name}": header for name, header in layer(symbol).items()}
    for i, symbol in enumerate("*E"):
        tensors |= {f"llm.mtp.layers.{i}.{name}": header for name, header in layer(symbol).items()}
    for name in ("0.enorm", "0.hnorm", "1.final_layernorm"):
        tensors[f"llm.mtp.layers.{name}.weight"] = ("BF16", (hidden,))
    tensors["llm.mtp.layers.0.eh_proj.weight"] = ("BF16", (hidden, 2 * hidden))

    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        write_headers(folder / name, {tensor: tensors[tensor] for tensor in names[i::shards]})
        weight_map |= dict.fromkeys(names[i::shards], name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        **salm_config(pattern="*E"),
        "dtype": "bfloat16",
        "llm_config": backbone,
        "perception": large_tower(hidden),
    }
    (folder / "config.json").write_text(json.dumps(config))
    build_tokenizer().save(str(folder / "tokenizer.json"))


def canary_qwen(folder: Path) -> None:
    """The shape of canary-qwen-2.5b: Qwen3 under PEFT, r=128, its table outside the backbone: headers only."""
    hidden, rows, lora = 2048, 151936, {"q_proj": 2048, "v_proj": 1024}
    backbone = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": rows, "hidden_size": hidden,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 6144, "tie_word_embeddings": True,
    }  # fmt: skip
    tensors = tower(32, 1024, 128, 256, hidden)
    tensors["embed_tokens.weight"] = ("BF16", (rows, hidden))
    base = "llm.base_model.model.model"
    tensors[f"{base}.norm.weight"] = ("BF16", (hidden,))
    for i in range(28):
        layer: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")
        }
        layer |= {f"self_attn.{name}_norm.weight": (128,) for name in "qk"}
        layer |= {"self_attn.k_proj.weight": (1024, hidden), "self_attn.o_proj.weight": (hidden, 2048)}
        for name, out in lora.items():
            layer[f"self_attn.{name}.base_layer.weight"] = (out, hidden)
            layer[f"self_attn.{name}.lora_A.default.weight"] = (128, hidden)
            layer[f"self_attn.{name}.lora_B.default.weight"] = (out, 128)
        layer |= {f"mlp.{name}_proj.weight": (6144, hidden) for name in ("gate", "up")}
        layer["mlp.down_proj.weight"] = (hidden, 6144)
        tensors |= {f"{base}.layers.{i}.{name}": ("BF16", shape) for name, shape in layer.items()}
    write_headers(folder / "model.safetensors", tensors)
    config = {
        **salm_config("qwen3"),
        "llm_config": backbone,
        "perception": large_tower(hidden),
        "audio_locator_tag": "<|audioplaceholder|>",
        "lora": {"task_type": "CAUSAL_LM", "r": 128, "lora_alpha": 256, "target_modules": list(lora)},
    }
    (folder / "config.json").write_text(json.dumps(config))
    build_tokenizer().save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("backbone", [*BACKBONES, "trained"])
def test_what_it_says_of_a_good_checkpoint(backbone, checkpoint):
    folder = TRAINED if backbone == "trained" else checkpoint(backbone)
    report = inspect_checkpoint(folder, values=True).to_dict()
    tensors = load_file(folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    assert report["serves"] and not report["problems"]
    assert report["backbone"]["hidden_size"] == fields["llm_config"]["hidden_size"]
    assert report["backbone"]["pattern"] == fields["llm_config"].get("hybrid_override_pattern")
    assert report["tower"]["layers"] == fields["perception"]["encoder"]["n_layers"]
    assert report["tower"]["tokens_per_second"] == 12.5
    rows = fields["llm_config"]["vocab_size"]
    assert report["vocabulary"] == {
        "backbone_rows": rows, "checkpoint_rows": rows + 1, "table_rows": rows + 10, "padding_rows": 9
    }  # fmt: skip
    assert report["lora"] is None
    if "mtp" in fields:
        assert report["mtp"] == {"heads": 4, "repeated": True, "pattern": "*", "drafts": True}
    else:
        assert report["mtp"] is None
    places = {"llm.mtp.": "MTP head", "llm.": "backbone", "perception.": "audio tower"}
    expected: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        place = next(place for prefix, place in places.items() if name.startswith(prefix))
        counted = expected.setdefault(place, [0, 0])
        counted[0] += 1
        counted[1] += tensor.nbytes
    assert {place: list(found.values()) for place, found in report["tensors"].items()} == expected


def test_a_head_that_cannot_be_drafted_still_serves_the_rest(tmp_path):
    tensors = {name: tensor for name, tensor in build_tensors().items() if "mtp.layers.0.enorm" not in name}
    report = inspect_checkpoint(build_checkpoint(tmp_path, tensors=tensors))
    (problem,) = report.problems
    assert problem.draft_only and "llm.mtp.layers.0.enorm.weight" in problem.what
    assert report.facts["mtp"]["drafts"] is False


def test_nemotron_nano_from_headers_of_60_gb(tmp_path):
    nemotron_nano(12, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) > 60e9
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = inspect_checkpoint(tmp_path).to_dict()
    # In kB. A page of a mapped file counts as soon as it is read, so next to nothing was.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1e6
    assert report["problems"] == []
    assert 31e9 < report["backbone"]["parameters"] < 32e9
    assert report["tensors"]["MTP head"]["tensors"] == 270
    assert report["mtp"] == {"heads": 4, "repeated": True, "pattern": "*E", "drafts": True}
    assert 67e9 < report["loaded_bytes"] < 68e9


def test_canary_qwen(tmp_path):
    canary_qwen(tmp_path)
    report = inspect_checkpoint(tmp_path).to_dict()
    assert report["problems"] == []
    assert report["lora"] == {"rank": 128, "alpha": 256, "pairs": 56}
    assert report["tensors"]["adapters, merged"]["tensors"] == 112
    assert 1.7e9 < report["backbone"]["parameters"] < 2.1e9
    assert 0.8e9 < report["tower"]["parameters"] < 0.9e9
    assert report["vocabulary"]["padding_rows"] == 10


@pytest.mark.parametrize("serves", [True, False])
def test_exit_code_and_json(serves, checkpoint, tmp_path, capsys):
    folder = checkpoint("qwen3")
    if not serves:
        tensors = build_tensors("qwen3")
        tensors.pop("llm.model.norm.weight")
        folder = build_checkpoint(tmp_path, "qwen3", tensors=tensors)
    assert command.main(["inspect", str(folder), "--json"]) == (0 if serves else 1)
    report = json.loads(capsys.readouterr().out)
    assert report["serves"] is serves
    assert ["llm.model.norm.weight" in problem["what"] for problem in report["problems"]] == [True] * (not serves)
    assert command.main(["inspect", str(folder)]) == (0 if serves else 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == ("will serve" if serves else "1 problem")


def test_values_are_read_only_when_asked_for(tmp_path):
    tensors = build_tensors()
    tensors["perception.proj.bias"][3] = math.nan
    folder = build_checkpoint(tmp_path, tensors=tensors)
    assert inspect_checkpoint(folder).problems == []
    (problem,) = inspect_checkpoint(folder, values=True).problems
    assert "perception.proj.bias" in problem.what


def test_a_locator_that_the_tokenizer_lacks_is_no_problem(tmp_path):
    config = salm_config() | {"audio_locator_tag": "<|sound|>"}
    assert inspect_checkpoint(build_checkpoint(tmp_path, config=config)).problems == []


def test_shards_that_the_index_leaves_out_are_named(tmp_path):
    folder = build_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"x": tensors["llm.model.norm.weight"]}, folder / "consolidated.safetensors")
    report = inspect_checkpoint(folder)
    assert report.problems == []
    assert any("consolidated.safetensors" in note for note in report.notes)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["inspect", "nobody/nothing"], 2, "nobody/nothing is no folder, and not downloaded"),
        (["inspect", "not/a/name"], 2, "not/a/name is no folder"),
        (["inspect"], 2, "checkpoint"),
        (["inspect", str(TRAINED)], 0, "will serve"),
    ],
)
def test_as_a_command(arguments, code, words):
    module = command.__spec__.name.removesuffix(".__main__")
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
