# SPDX-License-Identifier: Apache-2.0
"""Run NeMo's audio tower on real speech and write what test_perception.py compares ours with.

    python -m venv /tmp/parity && /tmp/parity/bin/pip install -r requirements/parity.txt
    /tmp/parity/bin/python tests/collections/speechlm2/vllm/golden/make_golden.py

Needs espeak-ng and flite. Writes, beside this file, ``audio.safetensors`` (16 kHz int16 clips) and one file per tower:
its weights under NeMo's names, NeMo's ``output`` (batch, tokens, width) and ``output_lengths`` (batch,) for all clips
in one padded batch, and, as metadata, its ``perception`` dict.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import soundfile
import soxr
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

import nemo.collections

HERE = Path(__file__).parent

SPEECH = [
    "espeak-ng -v en-us -s 165 -w {wav} 'Transfer forty two dollars to account nine.'",
    "flite -voice slt -o {wav} -t 'Call the office.'",
    "flite -voice rms -o {wav} -t 'Yes.'",
    "espeak-ng -v en-gb+f3 -s 140 -w {wav} 'No.'",
]

CONFORMER = {
    "_target_": "nemo.collections.asr.modules.ConformerEncoder",
    "feat_out": -1,
    "n_layers": 2,
    "n_heads": 4,
    "subsampling": "dw_striding",
    "causal_downsampling": False,
    "ff_expansion_factor": 4,
    "self_attention_model": "rel_pos",
    "att_context_size": [-1, -1],
    "untie_biases": True,
    "pos_emb_max_len": 5000,
    "conv_norm_type": "batch_norm",
    "conv_context_size": None,
}
ENCODER = {"subsampling_factor": 8, "subsampling_conv_channels": 16, "conv_kernel_size": 9}


def perception(mels: int, encoder: dict, adapter: dict) -> dict:
    """A ``perception`` dict as checkpoints carry it."""
    return {
        "preprocessor": {
            "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
            "sample_rate": 16000,
            "normalize": "per_feature",
            "window_size": 0.025,
            "window_stride": 0.01,
            "window": "hann",
            "features": mels,
            "n_fft": 512,
            "log": True,
            "frame_splicing": 1,
            "dither": 1e-5,
            "pad_to": 0,
            "pad_value": 0.0,
        },
        "encoder": CONFORMER | ENCODER | {"feat_in": mels} | encoder,
        "modality_adapter": adapter,
        "output_dim": 24,
    }


def identity(width: int) -> dict:
    return {"_target_": "nemo.collections.speechlm2.modules.perception.IdentityConnector", "d_model": width}


TOWERS = {
    "mel80_xscaling_bias": perception(80, {"d_model": 32, "xscaling": True, "use_bias": True}, identity(32)),
    "mel128_plain": perception(
        128,
        {"d_model": 48, "n_heads": 3, "xscaling": False, "use_bias": False, "subsampling_conv_channels": -1},
        identity(48),
    ),
    "mel80_conformer_adapter": perception(
        80,
        {"d_model": 32, "xscaling": False, "use_bias": True},
        CONFORMER
        | {"feat_in": 32, "d_model": 40, "subsampling_factor": 1, "xscaling": True, "use_bias": True}
        | {"conv_kernel_size": 5, "ff_expansion_factor": 2},
    ),
}


def speak(command: str) -> torch.Tensor:
    """Synthetic speech as 16 kHz int16."""
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        subprocess.run(shlex.split(command.format(wav=file.name)), check=True)
        audio, rate = soundfile.read(file.name, dtype="int16")
    return torch.from_numpy(soxr.resample(audio, rate, 16000))


def randomise(tower: torch.nn.Module) -> None:
    """Give what NeMo initialises to zero or one, batch statistics included, values that a mix-up would show."""
    for module in tower.modules():
        if isinstance(module, (torch.nn.LayerNorm, torch.nn.BatchNorm1d)):
            module.weight.uniform_(0.5, 1.5)
            module.bias.normal_(std=0.3)
        if isinstance(module, torch.nn.BatchNorm1d):
            module.running_mean.normal_(std=0.5)
            module.running_var.uniform_(0.3, 2.0)
            module.num_batches_tracked.fill_(1000)
        if hasattr(module, "pos_bias_u"):
            module.pos_bias_u.normal_(std=0.5)
            module.pos_bias_v.normal_(std=0.5)


def perception_module() -> type:
    """NeMo's class, without the training and speech-synthesis stacks that its packages import along with it."""
    root = Path(nemo.collections.__path__[0])
    for name in ("speechlm2", "speechlm2/modules"):
        package = types.ModuleType("nemo.collections." + name.replace("/", "."))
        package.__path__ = [str(root / name)]
        sys.modules[package.__name__] = package
    from nemo.collections.speechlm2.modules.perception import AudioPerceptionModule

    return AudioPerceptionModule


@torch.inference_mode()
def main() -> None:
    clips = [speak(command) for command in SPEECH]
    clips.append(clips[0][8000:8401].clone())  # two mel frames, the shortest that can be normalised
    save_file({f"clip{index}": clip for index, clip in enumerate(clips)}, HERE / "audio.safetensors")
    audio = torch.nn.utils.rnn.pad_sequence([clip / 32768 for clip in clips], batch_first=True)
    lengths = torch.tensor([len(clip) for clip in clips])

    for seed, (name, config) in enumerate(TOWERS.items()):
        torch.manual_seed(seed)
        tower = perception_module()(OmegaConf.create(config)).eval()
        randomise(tower)
        output, output_lengths = tower(input_signal=audio, input_signal_length=lengths)
        tensors = {f"perception.{key}": value for key, value in tower.state_dict().items()}
        tensors |= {"output": output[:, : output_lengths.max()], "output_lengths": output_lengths}
        path = HERE / f"{name}.safetensors"
        save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"perception": json.dumps(config)})
        print(f"{path.name}: {output_lengths.tolist()} tokens, {path.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
