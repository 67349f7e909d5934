# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that holds its backbone's config needs no network: the engine runs where every connection fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from random_checkpoints import BACKBONES, build_checkpoint, salm_config

# Python runs it at the start of each process, so it holds for the engine's own processes too.
NO_NETWORK = """\
import os, socket

def local(host):
    return host in (None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname())

def refuse(host):
    with open(os.environ["ATTEMPTS"], "a") as log:
        log.write(f"{host}\\n")
    raise socket.gaierror(f"the test has no network, and no {host}")

def guard(original):
    def call(self, address, *rest):
        if self.family != socket.AF_UNIX and not local(address[0]):
            refuse(address[0])
        return original(self, address, *rest)
    return call

lookup = socket.getaddrinfo
socket.getaddrinfo = lambda host, *rest, **options: lookup(host, *rest, **options) if local(host) else refuse(host)
socket.socket.connect = guard(socket.socket.connect)
socket.socket.connect_ex = guard(socket.socket.connect_ex)
"""

GENERATE = """\
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    engine = LLM(sys.argv[1], enforce_eager=True, max_model_len=256)
    (output,) = engine.generate(["<|im_start|>user"], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    print("tokens:", len(output.outputs[0].token_ids))
"""


def run(folder: Path, script: str, *arguments: str) -> tuple[subprocess.CompletedProcess, list[str]]:
    """A Python process without a network, and the hosts that it tried to reach."""
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    (folder / "script.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "VLLM_ENABLE_V1"))}
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"PYTHONPATH": path, "ATTEMPTS": str(folder / "attempts"), "HF_HOME": str(folder / "cache")}
    command = [sys.executable, str(folder / "script.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    attempts = folder / "attempts"
    return done, attempts.read_text().split() if attempts.exists() else []


@pytest.mark.parametrize("place", ["llm_config", "llm_backbone/"])
def test_starts_and_generates(place, tmp_path):
    config = salm_config()
    if place == "llm_backbone/":
        del config["llm_config"]
    checkpoint = build_checkpoint(tmp_path / "checkpoint", config=config)
    if place == "llm_backbone/":
        (checkpoint / "llm_backbone").mkdir()
        (checkpoint / "llm_backbone" / "config.json").write_text(json.dumps(BACKBONES["nemotron_h"]))
    done, attempts = run(tmp_path, GENERATE, str(checkpoint))
    assert "tokens: 5" in done.stdout, done.stderr[-3000:]
    assert not [host for host in attempts if "huggingface" in host or "hf" in host]


def test_a_missing_backbone_says_what_was_tried(tmp_path):
    config = {**salm_config(), "llm_config": None, "pretrained_llm": "somebody/a-backbone"}
    checkpoint = build_checkpoint(tmp_path / "checkpoint", config=config)
    script = "import sys\nfrom nemo.collections.speechlm2.vllm.salm.config import NeMoSpeechLMConfig\n"
    done, attempts = run(tmp_path, f"{script}NeMoSpeechLMConfig.from_pretrained(sys.argv[1])", str(checkpoint))
    assert done.returncode == 1
    assert "looked for in 'somebody/a-backbone' and not found" in done.stderr, done.stderr[-3000:]
    assert attempts  # so the guard above does see such attempts
