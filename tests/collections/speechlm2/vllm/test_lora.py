# SPDX-License-Identifier: Apache-2.0
"""LoRA: both spellings of its settings, and the merge whatever order the tensors come in."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from nemo.collections.speechlm2.vllm.salm.lora import LoRAConfig, merge_lora

PEFT = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "lora_dropout": 0.01, "target_modules": ["q_proj", "v_proj"]}
AUTOMODEL = {
    "dim": 4,
    "alpha": 8,
    "dropout": 0.0,
    "target_modules": ["*.q_proj", "*.v_proj"],
    "match_all_linear": False,
}


@pytest.mark.parametrize("lora", [PEFT, AUTOMODEL, {**PEFT, "target_modules": "all-linear"}])
def test_both_spellings(lora):
    config = LoRAConfig.from_dict(lora)
    assert (config.rank, config.alpha) == (4, 8.0)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("yes", "lora is 'yes'; expected a dict"),
        ({"rank": 4, "alpha": 8}, r"lora has the keys \['alpha', 'rank'\]; expected r and lora_alpha or dim and alpha"),
        ({"r": 4}, "expected r and lora_alpha or dim and alpha"),
        ({**PEFT, "r": 0}, "lora.r is 0"),
        ({**PEFT, "r": True}, "lora.r is True"),
        ({**AUTOMODEL, "dim": "4"}, "lora.dim is '4'"),
        ({**PEFT, "lora_alpha": None}, "lora.lora_alpha is None"),
        ({**PEFT, "use_rslora": True}, "lora.use_rslora is True"),
        ({**PEFT, "use_dora": True}, "lora.use_dora is True"),
        ({**PEFT, "rank_pattern": {"q_proj": 8}}, "lora.rank_pattern is"),
    ],
)
def test_other_settings_are_refused_by_name(lora, message):
    with pytest.raises(ValueError, match=message):
        LoRAConfig.from_dict(lora)


def checkpoint(layout: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of a layout, and what they mean when merged."""
    generator = torch.Generator().manual_seed(0)
    root = "llm.base_model.model.model.layers" if layout == "peft" else "llm.model.layers"
    infix, base = (".default", ".base_layer") if layout == "peft" else ("", "")
    stored, merged = {}, {}
    for layer in range(3):
        for name, out in (("q_proj", 6), ("k_proj", 5), ("v_proj", 5)):
            module = f"{root}.{layer}.self_attn.{name}"
            weight = torch.randn(out, 7, generator=generator)
            if name == "k_proj":
                stored[f"{module}.weight"] = merged[f"{module}.weight"] = weight
                continue
            a, b = torch.randn(4, 7, generator=generator), torch.randn(out, 4, generator=generator)
            stored |= {
                f"{module}{base}.weight": weight,
                f"{module}.lora_A{infix}.weight": a,
                f"{module}.lora_B{infix}.weight": b,
            }
            merged[f"{module}.weight"] = weight + 2.0 * b @ a
        for extra in (f"{root}.{layer}.norm.weight", f"perception.encoder.layers.{layer}.linear.weight"):
            stored[extra] = merged[extra] = torch.randn(7, generator=generator)
    return stored, merged


@pytest.mark.parametrize("layout", ["peft", "automodel"])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
@pytest.mark.parametrize("seed", range(5))
def test_merged_in_any_order(layout, targets, seed):
    stored, merged = checkpoint(layout)
    names = list(stored)
    random.Random(seed).shuffle(names)
    lora = LoRAConfig.from_dict({**PEFT, "target_modules": targets})
    result = dict(merge_lora(((name, stored[name]) for name in names), lora))
    assert result.keys() == merged.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(result[name], tensor)


@pytest.mark.parametrize("layout", ["peft", "automodel"])
def test_nothing_complete_is_held(layout):
    """In the order that files have, each weight comes out as soon as its last part went in."""
    stored, _ = checkpoint(layout)
    fed: list[str] = []

    def feed() -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(stored):
            fed.append(name)
            yield name, stored[name]

    for name, _ in merge_lora(feed(), LoRAConfig.from_dict(PEFT)):
        module = name.removesuffix(".weight")
        parts = {other for other in stored if other.startswith(f"{module}.")}
        assert parts <= set(fed)
        assert fed[-1] in parts


def test_merged_in_float32_and_given_back_in_the_weights_type():
    stored = {name: tensor.bfloat16() for name, tensor in checkpoint("peft")[0].items()}
    lora = LoRAConfig.from_dict(PEFT)
    for name, tensor in merge_lora(stored.items(), lora):
        assert tensor.dtype == torch.bfloat16
        if name.endswith("q_proj.weight"):
            module = name.removesuffix(".weight")
            weight, a, b = (
                stored[f"{module}.{part}.weight"].double()
                for part in ("base_layer", "lora_A.default", "lora_B.default")
            )
            torch.testing.assert_close(tensor, (weight + 2 * b @ a).bfloat16(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("layout", ["peft", "automodel"])
@pytest.mark.parametrize("lost", ["lora_A", "lora_B", "weight"])
def test_an_incomplete_adapter_is_an_error(layout, lost):
    stored, _ = checkpoint(layout)
    module = next(name for name in stored if "layers.1.self_attn.q_proj" in name).partition(".q_proj")[0] + ".q_proj"
    part = {"weight": ".base_layer.weight" if layout == "peft" else ".weight"}.get(lost, f".{lost}")
    kept = {name: tensor for name, tensor in stored.items() if not name.startswith(module + part)}
    assert len(kept) == len(stored) - 1
    with pytest.raises(ValueError, match=r"lack their other half or their weight: .*layers\.1\.self_attn\.q_proj\."):
        dict(merge_lora(kept.items(), LoRAConfig.from_dict(PEFT)))


def test_another_rank_is_an_error():
    stored, _ = checkpoint("peft")
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj, .* A \(4, 7\) .* expected \(8, 7\)"):
        dict(merge_lora(stored.items(), LoRAConfig.from_dict({**PEFT, "r": 8})))


def test_adapters_without_settings_are_an_error():
    stored, _ = checkpoint("peft")
    with pytest.raises(
        ValueError, match="q_proj.lora_A.default.weight is a LoRA adapter's, but config.json has no lora"
    ):
        dict(merge_lora(stored.items(), None))
