# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from nemo.collections.speechlm2.vllm.salm.perception import NEMO_TO_PERCEPTION, AudioPerception
from nemo.collections.speechlm2.vllm.salm.perception_config import PerceptionConfig

GOLDEN = Path(__file__).parent / "golden"
TOWERS = ["mel80_xscaling_bias", "mel128_plain", "mel80_conformer_adapter"]


class Golden:
    """A tower with the golden weights, and what NeMo computes with them."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32):
        with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
            config = PerceptionConfig.from_dict(json.loads(file.metadata()["perception"]))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not iterable)
        self.output = tensors.pop("output")
        self.output_lengths = tensors.pop("output_lengths")
        self.nemo_names = set(tensors)
        state = {}
        for name, tensor in tensors.items():
            for nemo, ours in NEMO_TO_PERCEPTION.items():
                name = name.replace(nemo, ours)
            state[name.removeprefix("perception.")] = tensor
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            self.tower = AudioPerception(config).eval()
        finally:
            torch.set_default_dtype(default)
        self.initial = {name: tensor.clone() for name, tensor in self.tower.preprocessor.state_dict().items()}
        self.tower.load_state_dict(state)  # strict: no name of NeMo's is left over, none of ours is left out

    @torch.inference_mode()
    def __call__(self, clips: list[torch.Tensor], padding: float = 0.0, extra: int = 0) -> list[torch.Tensor]:
        """Each clip's embeddings, computed in one batch padded with ``padding``."""
        lengths = torch.tensor([len(clip) for clip in clips])
        audio = torch.full((len(clips), int(lengths.max()) + extra), padding)
        for row, clip in zip(audio, clips, strict=True):
            row[: len(clip)] = clip
        output, output_lengths = self.tower(audio, lengths)
        assert output_lengths.tolist() == [self.tower.config.num_tokens(len(clip)) for clip in clips]
        return [row[:length] for row, length in zip(output, output_lengths, strict=True)]


@pytest.fixture(scope="module", params=TOWERS)
def golden(request) -> Golden:
    return Golden(request.param)


@pytest.fixture(scope="module")
def clips() -> list[torch.Tensor]:
    audio = load_file(GOLDEN / "audio.safetensors")
    return [audio[name] / 32768 for name in sorted(audio)]


def max_difference(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """NaN if there is one: unlike Python's, torch's maximum does not skip it."""
    return torch.stack([(a.float() - b.float()).abs().max() for a, b in zip(left, right, strict=True)]).max().item()


def test_equals_nemo(golden, clips):
    ours = golden(clips)
    assert [len(embedding) for embedding in ours] == golden.output_lengths.tolist()
    nemos = [row[:length] for row, length in zip(golden.output, golden.output_lengths, strict=True)]
    assert max_difference(ours, nemos) <= 1e-4
    assert all(embedding.std() > 0.1 for embedding in nemos)  # the comparison is not between zeros


def test_front_end_starts_as_nemos(golden):
    for name, initial in golden.initial.items():
        assert torch.allclose(initial, golden.tower.preprocessor.state_dict()[name], rtol=0, atol=1e-7), name


def test_names_can_be_turned_back(golden):
    names = set()
    for name in golden.tower.state_dict():
        name = f"perception.{name}"
        for nemo, ours in NEMO_TO_PERCEPTION.items():
            name = name.replace(ours, nemo)
        names.add(name)
    assert names == golden.nemo_names


@pytest.mark.parametrize("padding", [0.0, 0.7, float("nan")])
def test_padding_changes_nothing(golden, clips, padding):
    silence = torch.zeros(5000)
    short = clips[0][8000:8320]
    batch = [*clips, silence, short]
    together = golden(batch, padding, extra=12345)
    alone = [golden([clip])[0] for clip in batch]
    assert max_difference(together, alone) <= 1e-5


def test_silence_is_featureless(golden):
    features, frames = golden.tower.preprocessor(torch.zeros(2, 4000), torch.tensor([4000, 2000]))
    assert frames.tolist() == [25, 12]
    assert features.abs().max() == 0


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.05), (torch.float16, 0.005)])
@pytest.mark.parametrize("name", TOWERS)
def test_half_precision(name, dtype, tolerance, clips):
    golden = Golden(name, dtype)
    assert golden.tower.preprocessor.fb.dtype == torch.float32
    ours = golden(clips)
    assert {embedding.dtype for embedding in ours} == {dtype}
    nemos = [row[:length] for row, length in zip(golden.output, golden.output_lengths, strict=True)]
    assert max_difference(ours, nemos) <= tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masked_positions_stay_finite_in_half_precision(dtype, clips):
    golden = Golden("mel80_conformer_adapter", dtype)
    for name, parameter in golden.tower.named_parameters():
        if "q_proj" in name:
            parameter.data *= 100  # scores of some hundreds, which added to float16's lowest number overflow
    together = golden(clips, extra=4000)
    assert all(embedding.isfinite().all() for embedding in together)


def test_front_end_ignores_autocast(clips):
    front_end = Golden("mel80_xscaling_bias").tower.preprocessor
    audio, lengths = clips[1][None], torch.tensor([len(clips[1])])
    expected, _ = front_end(audio, lengths)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features, _ = front_end(audio, lengths)
    assert torch.equal(features, expected)


def test_trains(clips):
    tower = Golden("mel80_conformer_adapter").tower.train()
    features, frames = tower.preprocessor(clips[1][None], torch.tensor([len(clips[1])]))
    output, _ = tower.encode(features, frames)
    output.square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in tower.parameters())


@pytest.fixture(scope="module")
def smallest_tower() -> AudioPerception:
    config = json.loads(safe_open(GOLDEN / "mel80_xscaling_bias.safetensors", "pt").metadata()["perception"])
    config["preprocessor"]["features"] = 8
    config["encoder"] |= {"feat_in": 8, "n_layers": 1, "d_model": 2, "n_heads": 1, "subsampling_conv_channels": 1}
    config["modality_adapter"]["d_model"] = 2
    return AudioPerception(PerceptionConfig.from_dict(config)).eval()


FORTY_SECONDS = 40 * 16000


def test_every_length_has_the_count_the_tower_computes(smallest_tower):
    config = smallest_tower.config
    lengths = range(config.min_num_samples, FORTY_SECONDS + 1)
    frames = torch.tensor(lengths) // config.hop_length
    expected = smallest_tower.encoder._get_subsampling_output_length(frames)
    assert [config.num_tokens(length) for length in lengths] == expected.tolist()


@torch.inference_mode()
def test_every_frame_count_has_the_count_the_convolutions_emit(smallest_tower):
    config = smallest_tower.config
    features = torch.zeros(1, config.num_frames(FORTY_SECONDS), config.mel.num_mels)
    for frames in range(2, features.shape[1] + 1):
        emitted = smallest_tower.encoder.subsampling(features[:, :frames]).shape[1]
        assert emitted == config.num_tokens(frames * config.hop_length), frames


@torch.inference_mode()
def test_every_short_length_gives_the_counted_frames(smallest_tower):
    config = smallest_tower.config
    audio = torch.randn(1, 3 * 8 * config.hop_length)
    for length in range(config.min_num_samples, audio.shape[1] + 1):
        features, frames = smallest_tower.preprocessor(audio[:, :length], torch.tensor([length]))
        assert features.shape[1] == frames.item() == config.num_frames(length), length


@torch.inference_mode()
@pytest.mark.parametrize("seconds", [0.02, 0.08, 0.16, 1.2, 9.84, 30, 40])
def test_whole_tower_emits_the_count_around_a_token_border(smallest_tower, seconds):
    config = smallest_tower.config
    border = int(seconds * 16000)
    offsets = [-161, -160, -159, -1, 0, 1, 159, 160, 161]
    for length in [border + offset for offset in offsets if border + offset >= config.min_num_samples]:
        output, lengths = smallest_tower(torch.randn(1, length), torch.tensor([length]))
        assert output.shape[1] == lengths.item() == config.num_tokens(length), length
