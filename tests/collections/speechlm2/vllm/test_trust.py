# SPDX-License-Identifier: Apache-2.0
"""Nothing that a checkpoint names is imported or executed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from random_checkpoints import build_checkpoint, salm_config
from transformers import AutoTokenizer
from vllm.engine.arg_utils import EngineArgs

MODULE = """\
from pathlib import Path
(Path(__file__).parent / "executed").touch()
(Path({folder!r}) / "executed").touch()

class Evil:
    pass
"""
CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor")
AUTO_MAP = dict.fromkeys(CLASSES, "evil.Evil")


class Payload:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def hostile(folder: Path, config: dict[str, Any]) -> Path:
    build_checkpoint(folder, config=config)
    (folder / "evil.py").write_text(MODULE.format(folder=str(folder)))
    return folder


def start(folder: Path, **options: Any) -> Any:
    """All that vLLM does of a checkpoint in the process that the user starts, up to building the model."""
    config = EngineArgs(model=str(folder), enforce_eager=True, max_model_len=256, **options).create_engine_config()
    config.model_config.registry.resolve_model_cls(config.model_config.architectures, config.model_config)
    return config


@pytest.mark.parametrize("place", ["config.json", "llm_config", "llm_backbone", "tokenizer_config.json"])
def test_auto_map_is_not_followed(place, tmp_path):
    config = salm_config()
    if place == "config.json":
        config["auto_map"] = AUTO_MAP
    elif place == "llm_config":
        config["llm_config"]["auto_map"] = AUTO_MAP
    elif place == "llm_backbone":
        config["llm_config"], backbone = None, {**config["llm_config"], "auto_map": AUTO_MAP}
    folder = hostile(tmp_path, config)
    if place == "llm_backbone":
        (folder / place).mkdir()
        (folder / place / "config.json").write_text(json.dumps(backbone))
        (folder / place / "evil.py").write_text(MODULE.format(folder=str(folder)))
    if place == "tokenizer_config.json":
        settings = json.loads((folder / place).read_text())
        (folder / place).write_text(json.dumps({**settings, "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}))
    start(folder)
    AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert not list(tmp_path.rglob("executed"))
    if place == "tokenizer_config.json":
        with contextlib.suppress(Exception):
            AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        assert list(tmp_path.rglob("executed"))  # it would have been


def test_a_backbone_of_unknown_code_is_refused(tmp_path):
    config = salm_config()
    config["llm_config"] |= {"model_type": "evil", "architectures": ["Evil"], "auto_map": AUTO_MAP}
    with pytest.raises(Exception, match="does not make a config of model_type 'evil'"):
        start(hostile(tmp_path, config))
    assert not list(tmp_path.rglob("executed"))


@pytest.mark.parametrize("part", ["preprocessor", "encoder", "modality_adapter", None])
@pytest.mark.parametrize(
    "target", ["os.system", "builtins.eval", "evil.Evil", "nemo.collections.asr.modules.RNNEncoder"]
)
def test_targets_come_from_a_closed_table(part, target, tmp_path):
    config = salm_config()
    place = config["perception"][part] if part else config["perception"]
    place |= {"_target_": target, "command": "touch executed"}
    with pytest.raises(Exception, match=rf"_target_ = '{target}'.* is not supported"):
        start(hostile(tmp_path, config))
    assert not list(tmp_path.rglob("executed"))


@pytest.mark.parametrize("name", ["../backbone", "inner/../../backbone", ".."])
def test_a_backbone_outside_the_checkpoint_is_not_read(name, tmp_path):
    outside = tmp_path / "backbone"
    outside.mkdir()
    (outside / "config.json").write_text(json.dumps(salm_config()["llm_config"]))
    config = {**salm_config(), "llm_config": None, "pretrained_llm": name}
    with pytest.raises(Exception, match="a folder must lie inside the checkpoint"):
        start(hostile(tmp_path / "checkpoint", config))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.pth"])
@pytest.mark.parametrize("load_format", ["auto", "hf", "pt"])
def test_pickles_are_refused_unread(name, load_format, tmp_path):
    folder = hostile(tmp_path, salm_config())
    (folder / "model.safetensors").unlink()
    torch.save({"llm.model.norm.weight": Payload(folder / "executed")}, folder / name, pickle_protocol=2)
    with pytest.raises(Exception, match="safetensors"):
        start(folder, load_format=load_format)
    assert not (folder / "executed").exists()
    torch.load(folder / name, weights_only=False)
    assert (folder / "executed").exists()  # it would have been


def test_an_index_leads_nowhere_else(tmp_path):
    folder = hostile(tmp_path / "checkpoint", salm_config())
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {"llm.model.norm.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Exception, match=r"outside\.safetensors"):
        start(folder)
