# SPDX-License-Identifier: Apache-2.0
"""register(): what it installs, that it may run again, and what it must not do."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
from random_checkpoints import salm_config
from transformers import AutoConfig
from vllm import ModelRegistry
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.platforms import current_platform
from vllm.transformers_utils.config import _CONFIG_REGISTRY, get_config

from nemo.collections.speechlm2.vllm.salm import register
from nemo.collections.speechlm2.vllm.salm.config import ARCHITECTURE, NeMoSpeechLMConfig


@pytest.fixture(autouse=True)
def registered():
    register()


def test_entry_point_is_register():
    (entry,) = (e for e in entry_points(group="vllm.general_plugins") if e.name == "nemo_speechlm")
    assert entry.load() is register


def test_config_reaches_transformers_and_vllm(checkpoint):
    assert _CONFIG_REGISTRY["nemo_speechlm"] is NeMoSpeechLMConfig
    assert isinstance(AutoConfig.from_pretrained(checkpoint()), NeMoSpeechLMConfig)
    assert isinstance(get_config(checkpoint(), trust_remote_code=False), NeMoSpeechLMConfig)


def test_model_is_registered():
    assert ARCHITECTURE in ModelRegistry.get_supported_archs()
    model_class, name = ModelRegistry.resolve_model_cls([ARCHITECTURE], SimpleNamespace(model_impl="vllm"))
    assert model_class.__name__ == name == ARCHITECTURE


def test_registering_again_changes_nothing():
    before = ModelRegistry.models[ARCHITECTURE], MODELS_CONFIG_MAP[ARCHITECTURE], _CONFIG_REGISTRY["nemo_speechlm"]
    register()
    after = ModelRegistry.models[ARCHITECTURE], MODELS_CONFIG_MAP[ARCHITECTURE], _CONFIG_REGISTRY["nemo_speechlm"]
    assert all(a is b for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("backbone", "given", "named", "expected"),
    [
        ("nemotron_h", "auto", None, "float32"),
        ("nemotron_h", "auto", "float32", "float32"),
        ("nemotron_h", "auto", "bfloat16", "bfloat16"),
        ("nemotron_h", "auto", "auto", "auto"),  # the model's dtype
        ("nemotron_h", "bfloat16", "float32", "bfloat16"),
        ("qwen3", "auto", None, "auto"),
    ],
)
def test_ssm_cache_follows_the_backbone(checkpoint, backbone, given, named, expected):
    """What the user asks for, else what the backbone's config names, else float32."""
    fields = salm_config(backbone)
    if named:
        fields["llm_config"]["mamba_ssm_cache_dtype"] = named
    cache = SimpleNamespace(mamba_ssm_cache_dtype=given, enable_prefix_caching=True)
    model = SimpleNamespace(hf_config=NeMoSpeechLMConfig(**fields), model=str(checkpoint(backbone)))
    load = SimpleNamespace(load_format="auto")
    MODELS_CONFIG_MAP[ARCHITECTURE].verify_and_update_config(
        SimpleNamespace(model_config=model, load_config=load, cache_config=cache, speculative_config=None)
    )
    assert cache.mamba_ssm_cache_dtype == expected


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a limit of vLLM's CPU backend")
@pytest.mark.parametrize("backbone", ["nemotron_h", "qwen3"])
def test_prefix_caching_on_a_cpu(checkpoint, backbone):
    """A hybrid backbone's prefixes cannot be cached there, draft or none; an ordinary one's can."""
    args = EngineArgs(model=str(checkpoint(backbone)), max_model_len=256, enforce_eager=True)
    cache = args.create_engine_config().cache_config
    assert cache.enable_prefix_caching is (backbone == "qwen3")
    assert cache.mamba_cache_mode == "none"


def test_registration_is_light_and_offline():
    """In a fresh process where every connection fails: no model is imported, and nothing asks for the network."""
    program = """
import socket, sys
def refuse(*args, **kwargs):
    raise OSError("the network was asked for")
socket.socket.connect = socket.getaddrinfo = refuse
import vllm.config, vllm.engine.arg_utils
before = set(sys.modules)
from nemo.collections.speechlm2.vllm.salm import register
assert "nemo.collections.speechlm2.vllm.salm.registration" not in sys.modules
register()
register()
new = set(sys.modules) - before
ours = tuple(f"nemo.collections.speechlm2.vllm.salm.{x}" for x in ("model", "audio", "perception.", "weights", "mtp."))
heavy = {x for x in new if f"{x}.".startswith((*ours, "transformers.models.parakeet.", "vllm.model_executor.layers."))}
assert not heavy, heavy
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
