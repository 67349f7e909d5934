# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, models and engines for the tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

# Before vLLM is imported: a small cache, the engine in this process, and no thought of a network.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# pytest's importlib mode leaves this folder off the path, and random_checkpoints with it.
sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402
from random_checkpoints import build_checkpoint  # noqa: E402
from torch import nn  # noqa: E402


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the random checkpoint with a given backbone, written once."""
    folders: dict[str, Path] = {}

    def get(backbone: str = "nemotron_h") -> Path:
        if backbone not in folders:
            folders[backbone] = build_checkpoint(tmp_path_factory.mktemp(backbone), backbone)
        return folders[backbone]

    return get


@pytest.fixture(scope="module")
def build_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., nn.Module]]:
    """Build the target model of a checkpoint as vLLM does, without an engine around it.

    Without ``load`` its parameters are as allocated; once loaded, the CPU backend packs them, and they load no more.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"

    def build(folder: Path, load: bool = True, **options: Any) -> nn.Module:
        args = EngineArgs(model=str(folder), enforce_eager=True, max_model_len=256, **options)
        vllm_config = args.create_engine_config()
        with set_current_vllm_config(vllm_config), set_default_torch_dtype(vllm_config.model_config.dtype):
            init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            if not load:
                return initialize_model(vllm_config)
            # Without an accelerator this raises; vLLM's CPU worker takes it away too.
            with mock.patch("torch.accelerator.empty_cache"):
                return get_model(vllm_config=vllm_config)

    yield build
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def engine() -> Iterator[Callable[..., Any]]:
    """Start a vLLM engine in this process; the one before is closed first, and the last with the module."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    running: list[Any] = []

    def stop() -> None:
        while running:
            running.pop().llm_engine.engine_core.shutdown()
        gc.collect()
        cleanup_dist_env_and_memory()

    def start(model: Path, **options: Any) -> LLM:
        stop()
        defaults = {"enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 8, "seed": 0}
        running.append(LLM(str(model), **{**defaults, **options}))
        return running[-1]

    yield start
    stop()
