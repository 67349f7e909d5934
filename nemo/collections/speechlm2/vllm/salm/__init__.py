# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin for NVIDIA NeMo SpeechLM (SALM) checkpoints."""


def register() -> None:
    """vLLM's entry point (``vllm.general_plugins``): every process calls it, and calling it again changes nothing."""
    from nemo.collections.speechlm2.vllm.salm import registration

    registration.register()
