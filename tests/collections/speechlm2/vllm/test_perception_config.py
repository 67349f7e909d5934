# SPDX-License-Identifier: Apache-2.0
import copy

import pytest

from nemo.collections.speechlm2.vllm.salm.perception_config import PerceptionConfig

# The perception block of nvidia/canary-qwen-2.5b, the most used public SALM checkpoint.
CANARY_QWEN = {
    "target": "nemo.collections.speechlm2.modules.perception.AudioPerceptionModule",
    "output_dim": 2048,
    "preprocessor": {
        "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
        "sample_rate": 16000,
        "normalize": "per_feature",
        "window_size": 0.025,
        "window_stride": 0.01,
        "window": "hann",
        "features": 128,
        "n_fft": 512,
        "log": True,
        "frame_splicing": 1,
        "dither": 1e-05,
        "pad_to": 0,
        "pad_value": 0.0,
    },
    "encoder": {
        "_target_": "nemo.collections.asr.modules.ConformerEncoder",
        "feat_in": 128,
        "feat_out": -1,
        "n_layers": 32,
        "d_model": 1024,
        "subsampling": "dw_striding",
        "subsampling_factor": 8,
        "subsampling_conv_channels": 256,
        "causal_downsampling": False,
        "ff_expansion_factor": 4,
        "self_attention_model": "rel_pos",
        "n_heads": 8,
        "att_context_size": [-1, -1],
        "xscaling": False,
        "untie_biases": True,
        "pos_emb_max_len": 5000,
        "conv_kernel_size": 9,
        "conv_norm_type": "batch_norm",
        "conv_context_size": None,
        "dropout": 0.1,
        "dropout_pre_encoder": 0.1,
        "dropout_emb": 0.0,
        "dropout_att": 0.1,
    },
    "modality_adapter": {
        "_target_": "nemo.collections.speechlm2.modules.perception.IdentityConnector",
        "d_model": 1024,
    },
}
CONFORMER_ADAPTER = {
    "_target_": "nemo.collections.asr.modules.conformer_encoder.ConformerEncoder",
    "feat_in": 1024,
    "feat_out": -1,
    "n_layers": 2,
    "d_model": 512,
    "subsampling": "dw_striding",
    "subsampling_factor": 1,
    "subsampling_conv_channels": 256,
    "reduction": None,
    "reduction_position": None,
    "reduction_factor": 1,
    "n_heads": 8,
    "att_context_style": "regular",
    "conv_kernel_size": 9,
}
DELETE = object()


def changed(path: str, value, base: dict = CANARY_QWEN) -> dict:
    config = copy.deepcopy(base)
    *parents, name = path.split(".")
    part = config
    for parent in parents:
        part = part[parent]
    if value is DELETE:
        del part[name]
    else:
        part[name] = value
    return config


def test_public_checkpoint():
    config = PerceptionConfig.from_dict(CANARY_QWEN)
    assert (config.sampling_rate, config.hop_length, config.output_dim) == (16000, 160, 2048)
    assert (config.mel.window_length, config.mel.n_fft, config.mel.num_mels) == (400, 512, 128)
    assert config.encoder.hidden_size == 1024 and config.encoder.feed_forward_size == 4096
    assert not config.encoder.xscaling
    assert config.encoder.bias  # absent from the dict: NeMo's default
    assert config.adapter is None


def test_conformer_adapter():
    config = PerceptionConfig.from_dict(changed("modality_adapter", CONFORMER_ADAPTER))
    assert config.adapter is not None
    assert (config.adapter.feat_in, config.adapter.hidden_size, config.adapter.subsampling_factor) == (1024, 512, 1)
    assert config.num_tokens(16000) == PerceptionConfig.from_dict(CANARY_QWEN).num_tokens(16000)


def test_defaults_are_nemos():
    preprocessor = {"_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor"}
    mel = PerceptionConfig.from_dict(changed("encoder.feat_in", 64, changed("preprocessor", preprocessor))).mel
    assert (mel.window_length, mel.hop_length, mel.n_fft, mel.num_mels) == (320, 160, 512, 64)
    assert (mel.min_frequency, mel.max_frequency, mel.preemphasis, mel.log_guard) == (0, 8000, 0.97, 2**-24)
    encoder = PerceptionConfig.from_dict(changed("encoder.conv_kernel_size", DELETE)).encoder
    assert encoder.kernel_size == 31


@pytest.mark.parametrize(
    "path, value",
    [
        ("preprocessor.dither", 0.0),
        ("preprocessor.pad_to", 16),
        ("preprocessor.preemph", None),
        ("preprocessor.stft_conv", False),
        ("encoder._target_", "nemo.collections.asr.modules.conformer_encoder.ConformerEncoder"),
        ("encoder.xscaling", True),
        ("encoder.use_bias", False),
        ("encoder.feat_out", 1024),
        ("encoder.att_context_size", None),
        ("encoder.subsampling_conv_channels", -1),
        ("encoder.dropout", 0.3),
        ("encoder.stochastic_depth_drop_prob", 0.1),
        ("target", DELETE),
        ("spec_augment", {"_target_": "nemo.collections.asr.modules.SpectrogramAugmentation", "freq_masks": 2}),
    ],
)
def test_accepts(path, value):
    PerceptionConfig.from_dict(changed(path, value))


REFUSED = [
    ("preprocessor", DELETE),
    ("preprocessor", "mel"),
    ("preprocessor._target_", DELETE),
    ("preprocessor._target_", "nemo.collections.asr.modules.AudioToMFCCPreprocessor"),
    ("preprocessor.sample_rate", 0),
    ("preprocessor.sample_rate", "16000"),
    ("preprocessor.window_size", 0),
    ("preprocessor.window_size", float("nan")),
    ("preprocessor.window_stride", float("inf")),
    ("preprocessor.n_window_size", 400),
    ("preprocessor.window", "hamming"),
    ("preprocessor.normalize", "all_features"),
    ("preprocessor.normalize", "NA"),
    ("preprocessor.n_fft", 256),
    ("preprocessor.n_fft", 511),
    ("preprocessor.features", 100),
    ("preprocessor.lowfreq", -1),
    ("preprocessor.highfreq", 9000),
    ("preprocessor.log", False),
    ("preprocessor.log_zero_guard_type", "clamp"),
    ("preprocessor.log_zero_guard_value", "tiny"),
    ("preprocessor.frame_splicing", 3),
    ("preprocessor.exact_pad", True),
    ("preprocessor.mag_power", 1.0),
    ("preprocessor.mel_norm", None),
    ("preprocessor.use_torchaudio", True),
    ("preprocessor.loudness", 1),
    ("encoder", None),
    ("encoder._target_", "os.system"),
    ("encoder._target_", ["nemo.collections.asr.modules.ConformerEncoder"]),
    ("encoder._target_", "nemo.collections.asr.modules.SqueezeformerEncoder"),
    ("encoder.feat_in", 80),
    ("encoder.feat_in", DELETE),
    ("encoder.feat_out", 512),
    ("encoder.n_layers", 0),
    ("encoder.n_layers", True),
    ("encoder.d_model", "1024"),
    ("encoder.d_model", 1023),
    ("encoder.d_model", DELETE),
    ("encoder.n_heads", 7),
    ("encoder.subsampling", "striding"),
    ("encoder.subsampling", "stacking"),
    ("encoder.subsampling", DELETE),
    ("encoder.subsampling_factor", 4),
    ("encoder.causal_downsampling", True),
    ("encoder.reduction", "striding"),
    ("encoder.reduction_factor", 2),
    ("encoder.ff_expansion_factor", 0),
    ("encoder.self_attention_model", "rel_pos_local_attn"),
    ("encoder.self_attention_model", "abs_pos"),
    ("encoder.att_context_size", [128, 128]),
    ("encoder.att_context_size", [[70, 13], [-1, -1]]),
    ("encoder.att_context_style", "chunked_limited"),
    ("encoder.att_chunk_context_size", [[70], [1], [0]]),
    ("encoder.xscaling", "yes"),
    ("encoder.untie_biases", False),
    ("encoder.conv_kernel_size", 8),
    ("encoder.conv_norm_type", "layer_norm"),
    ("encoder.conv_context_size", "causal"),
    ("encoder.conv_context_style", "dcc"),
    ("encoder.conv_dual_mode", True),
    ("encoder.use_bias", None),
    ("encoder.global_tokens", 1),
    ("encoder.mixture_of_experts", 8),
    ("modality_adapter", DELETE),
    ("modality_adapter._target_", "nemo.collections.speechlm2.modules.perception.QformerConnector"),
    ("modality_adapter._target_", "nemo.collections.speechlm2.modules.perception.MultiLayerProjectionConnector"),
    ("modality_adapter.d_model", 512),
    ("modality_adapter.d_model", DELETE),
    ("modality_adapter.output_dim", 2048),
    ("output_dim", DELETE),
    ("output_dim", -1),
    ("target", "nemo.collections.speechlm2.modules.perception.AudioTranscriptionPerceptionModule"),
    ("asr", {}),
]


@pytest.mark.parametrize("path, value", REFUSED, ids=[f"{path}={value!r:.40}" for path, value in REFUSED])
def test_refuses_by_name(path, value):
    with pytest.raises(ValueError) as error:
        PerceptionConfig.from_dict(changed(path, value))
    message = str(error.value)
    assert f"perception.{path}" in message
    if value is DELETE:
        assert "missing" in message
    elif not (path == "encoder.n_heads" or path.endswith("n_fft")):
        assert repr(value) in message


@pytest.mark.parametrize(
    "name, value", [("feat_in", 512), ("subsampling_factor", 2), ("subsampling_factor", DELETE), ("n_heads", 5)]
)
def test_refuses_adapter_by_name(name, value):
    config = changed("modality_adapter", CONFORMER_ADAPTER)
    with pytest.raises(ValueError, match=f"perception.modality_adapter.{name}"):
        PerceptionConfig.from_dict(changed(f"modality_adapter.{name}", value, config))


@pytest.mark.parametrize("config", [None, [], "perception"])
def test_refuses_what_is_no_dict(config):
    with pytest.raises(ValueError, match="perception = .* accepted: a dict"):
        PerceptionConfig.from_dict(config)


def test_does_not_keep_the_callers_dict():
    config = copy.deepcopy(CANARY_QWEN)
    parsed = PerceptionConfig.from_dict(config)
    config["encoder"]["d_model"] = 7
    assert parsed == PerceptionConfig.from_dict(CANARY_QWEN)


@pytest.mark.parametrize(
    "num_samples, frames, tokens",
    [(0, 0, 0), (159, 0, 0), (160, 1, 1), (320, 2, 1), (1439, 8, 1), (1440, 9, 2), (20011, 125, 16), (64000, 400, 50)],
)
def test_counts(num_samples, frames, tokens):
    config = PerceptionConfig.from_dict(CANARY_QWEN)
    assert config.num_frames(num_samples) == frames
    assert config.num_tokens(num_samples) == tokens


def test_shortest_clip_has_two_frames():
    config = PerceptionConfig.from_dict(CANARY_QWEN)
    assert config.num_frames(config.min_num_samples) == 2
    assert config.num_frames(config.min_num_samples - 1) == 1
