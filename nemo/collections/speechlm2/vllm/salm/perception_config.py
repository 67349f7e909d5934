# SPDX-License-Identifier: Apache-2.0
"""The ``perception`` block of a SALM checkpoint's config.json, validated: which audio tower, and how many tokens.

NeMo writes one config dict per part (``preprocessor``, ``encoder``, ``modality_adapter``), each with the ``_target_``
of the class it configures. A field that is absent has the default of NeMo's constructor. Fields that change the result
and are not supported here are refused by name, and so are fields this module does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class _Field(NamedTuple):
    """A field's default in NeMo, whether a value is supported, and the supported values in words."""

    default: Any
    supports: Callable[[Any], bool]
    supported: str


_MISSING = object()


def _one_of(*values: Any, required: bool = False) -> _Field:
    """The first of ``values`` is NeMo's default, unless the field is ``required``."""
    default = _MISSING if required else values[0]
    return _Field(default, lambda value: value in values, " or ".join(map(repr, values)))


def _integer(default: Any = _MISSING, multiple_of: int = 1, also: tuple = ()) -> _Field:
    supported = "a positive integer" if multiple_of == 1 else f"a positive multiple of {multiple_of}"
    return _Field(
        default,
        lambda value: value in also or (type(value) is int and value > 0 and value % multiple_of == 0),
        " or ".join([supported, *map(repr, also)]),
    )


def _number(default: Any, minimum: float = 0.0, also: tuple = ()) -> _Field:
    return _Field(
        default,
        lambda value: value in also or (type(value) in (int, float) and minimum <= value < float("inf")),
        " or ".join([f"a number of at least {minimum:g}", *map(repr, also)]),
    )


# Fields with no effect on inference: regularisation, execution, and arguments that NeMo itself ignores.
_UNUSED = _Field(None, lambda value: True, "any value")

# Class names are compared with these and never imported.
_PREPROCESSOR = (
    "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
    "nemo.collections.asr.modules.audio_preprocessing.AudioToMelSpectrogramPreprocessor",
)
_CONFORMER = (
    "nemo.collections.asr.modules.ConformerEncoder",
    "nemo.collections.asr.modules.conformer_encoder.ConformerEncoder",
)
_IDENTITY = ("nemo.collections.speechlm2.modules.perception.IdentityConnector",)
_PERCEPTION = (
    "nemo.collections.speechlm2.modules.perception.AudioPerceptionModule",
    "nemo.collections.speechlm2.modules.AudioPerceptionModule",
)

_PREPROCESSOR_FIELDS = {
    "_target_": _one_of(*_PREPROCESSOR, required=True),
    "sample_rate": _integer(16000),
    "window_size": _number(0.02, minimum=1e-4),
    "window_stride": _number(0.01, minimum=1e-4),
    "n_window_size": _one_of(None),
    "n_window_stride": _one_of(None),
    "window": _one_of("hann"),
    "normalize": _one_of("per_feature"),
    "n_fft": _integer(None, multiple_of=2, also=(None,)),
    "preemph": _number(0.97, also=(None,)),
    "features": _integer(64, multiple_of=8),
    "lowfreq": _number(0),
    "highfreq": _number(None, also=(None,)),
    "log": _one_of(True),
    "log_zero_guard_type": _one_of("add"),
    "log_zero_guard_value": _number(2**-24, minimum=2**-126),
    "frame_splicing": _one_of(1),
    "exact_pad": _one_of(False),
    "mag_power": _one_of(2.0),
    "mel_norm": _one_of("slaney"),
    "use_torchaudio": _one_of(False),
    "stft_exact_pad": _one_of(False),
    "stft_conv": _one_of(False),
    "dither": _UNUSED,
    "pad_to": _UNUSED,
    "pad_value": _UNUSED,
    "rng": _UNUSED,
    "nb_augmentation_prob": _UNUSED,
    "nb_max_freq": _UNUSED,
}

_CONFORMER_FIELDS = {
    "feat_in": _integer(),
    "n_layers": _integer(),
    "d_model": _integer(multiple_of=2),
    "causal_downsampling": _one_of(False),
    "subsampling_conv_channels": _integer(-1, also=(-1,)),
    "reduction": _one_of(None),
    "reduction_factor": _one_of(1),
    "ff_expansion_factor": _integer(4),
    "self_attention_model": _one_of("rel_pos"),
    "n_heads": _integer(4),
    "att_context_size": _one_of(None, [-1, -1], [[-1, -1]]),
    "att_chunk_context_size": _one_of(None),
    "att_context_style": _one_of("regular"),
    "xscaling": _one_of(True, False),
    "untie_biases": _one_of(True),
    "conv_kernel_size": _Field(
        31, lambda value: type(value) is int and value > 0 and value % 2 == 1, "a positive odd integer"
    ),
    "conv_norm_type": _one_of("batch_norm"),
    "conv_context_size": _one_of(None),
    "conv_context_style": _one_of("regular"),
    "use_bias": _one_of(True, False),
    "global_tokens": _one_of(0),
    "conv_dual_mode": _one_of(False),
    "reduction_position": _UNUSED,
    "subsampling_conv_chunking_factor": _UNUSED,
    "att_context_probs": _UNUSED,
    "pos_emb_max_len": _UNUSED,
    "dropout": _UNUSED,
    "dropout_pre_encoder": _UNUSED,
    "dropout_emb": _UNUSED,
    "dropout_att": _UNUSED,
    "stochastic_depth_drop_prob": _UNUSED,
    "stochastic_depth_mode": _UNUSED,
    "stochastic_depth_start_layer": _UNUSED,
    "global_tokens_spacing": _UNUSED,
    "global_attn_separate": _UNUSED,
    "use_pytorch_sdpa": _UNUSED,
    "use_pytorch_sdpa_backends": _UNUSED,
    "sync_max_audio_length": _UNUSED,
}

# The tower subsamples 8x by depthwise-separable convolutions; the adapter keeps the frame rate.
_ENCODER_FIELDS = {
    "_target_": _one_of(*_CONFORMER, required=True),
    "subsampling": _one_of("dw_striding", required=True),
    "subsampling_factor": _one_of(8, required=True),
} | _CONFORMER_FIELDS
_ADAPTER_FIELDS = {
    "_target_": _one_of(*_IDENTITY, *_CONFORMER, required=True),
    "subsampling": _UNUSED,
    "subsampling_factor": _one_of(1, required=True),
} | _CONFORMER_FIELDS
_IDENTITY_FIELDS = {"_target_": _one_of(*_IDENTITY, required=True), "d_model": _integer()}
_PERCEPTION_FIELDS = {
    "_target_": _one_of(None, *_PERCEPTION),
    "target": _one_of(None, *_PERCEPTION),
    "preprocessor": _Field(_MISSING, lambda value: isinstance(value, Mapping), "a dict"),
    "encoder": _Field(_MISSING, lambda value: isinstance(value, Mapping), "a dict"),
    "modality_adapter": _Field(_MISSING, lambda value: isinstance(value, Mapping), "a dict"),
    "output_dim": _integer(),
    "spec_augment": _UNUSED,
}


def _read(config: Any, path: str, fields: Mapping[str, _Field]) -> dict[str, Any]:
    """All ``fields`` with their values in ``config`` or NeMo's defaults, each checked."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{path} = {config!r} is not supported; accepted: a dict")
    values = {}
    for name, field in fields.items():
        value = config.get(name, field.default)
        if value is _MISSING:
            raise ValueError(f"{path}.{name} is missing; add it: {field.supported}")
        if not field.supports(value):
            origin = "" if name in config else " (NeMo's default, as the field is missing)"
            raise ValueError(f"{path}.{name} = {value!r}{origin} is not supported; accepted: {field.supported}")
        values[name] = value
    for name in config:
        if name not in fields:
            raise ValueError(
                f"{path}.{name} = {config[name]!r} is not a known field; remove it if it does not change the result. "
                f"Known: {', '.join(sorted(fields))}"
            )
    return values


def _expect_equal(path: str, found: int, other_path: str, expected: int) -> None:
    if found != expected:
        raise ValueError(f"{path} = {found} must equal {other_path} = {expected}; correct the one that is wrong")


@dataclass(frozen=True)
class MelConfig:
    """NeMo's ``AudioToMelSpectrogramPreprocessor``; lengths in samples, frequencies in Hz."""

    sampling_rate: int
    window_length: int
    hop_length: int
    n_fft: int
    num_mels: int
    min_frequency: float
    max_frequency: float
    preemphasis: float
    log_guard: float

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], path: str) -> MelConfig:
        values = _read(config, path, _PREPROCESSOR_FIELDS)
        rate = values["sample_rate"]
        window = int(values["window_size"] * rate)
        hop = int(values["window_stride"] * rate)
        for name, samples in (("window_size", window), ("window_stride", hop)):
            if samples < 1:
                raise ValueError(
                    f"{path}.{name} = {values[name]!r} is shorter than one sample at {rate} Hz; enlarge it"
                )
        n_fft = values["n_fft"] or 1 << (window - 1).bit_length()
        if n_fft < window:
            raise ValueError(f"{path}.n_fft = {n_fft} is shorter than the window; accepted: at least {window}")
        highest = values["highfreq"] or rate / 2
        if not values["lowfreq"] < highest <= rate / 2:
            raise ValueError(
                f"{path}.highfreq = {values['highfreq']!r} is not supported; accepted: null or a frequency above "
                f"lowfreq = {values['lowfreq']} and at most {rate / 2:g}"
            )
        return cls(
            sampling_rate=rate,
            window_length=window,
            hop_length=hop,
            n_fft=n_fft,
            num_mels=values["features"],
            min_frequency=values["lowfreq"],
            max_frequency=highest,
            preemphasis=values["preemph"] or 0.0,
            log_guard=values["log_zero_guard_value"],
        )


@dataclass(frozen=True)
class ConformerConfig:
    """NeMo's ``ConformerEncoder``: the tower (8x subsampling) or an adapter behind it (none)."""

    feat_in: int
    hidden_size: int
    num_layers: int
    num_heads: int
    feed_forward_size: int
    kernel_size: int
    subsampling_factor: int
    subsampling_channels: int
    xscaling: bool
    bias: bool

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], path: str, fields: Mapping[str, _Field]) -> ConformerConfig:
        values = _read(config, path, {**fields, "feat_out": _one_of(-1, config.get("d_model"))})
        width = values["d_model"]
        if width % values["n_heads"]:
            raise ValueError(f"{path}.n_heads = {values['n_heads']} must divide d_model = {width}")
        channels = values["subsampling_conv_channels"]
        return cls(
            feat_in=values["feat_in"],
            hidden_size=width,
            num_layers=values["n_layers"],
            num_heads=values["n_heads"],
            feed_forward_size=width * values["ff_expansion_factor"],
            kernel_size=values["conv_kernel_size"],
            subsampling_factor=values["subsampling_factor"],
            subsampling_channels=width if channels == -1 else channels,
            xscaling=bool(values["xscaling"]),
            bias=bool(values["use_bias"]),
        )


@dataclass(frozen=True)
class PerceptionConfig:
    """The audio tower: mel front end, encoder, adapter (``None`` is the identity) and width of the projection."""

    mel: MelConfig
    encoder: ConformerConfig
    adapter: ConformerConfig | None
    output_dim: int

    @classmethod
    def from_dict(cls, config: Any) -> PerceptionConfig:
        """Validate NeMo's ``perception`` dict.

        Raises:
            ValueError: a field is missing, unknown, of an unsupported value, or contradicts another; it is named.
        """
        parts = _read(config, "perception", _PERCEPTION_FIELDS)
        mel = MelConfig.from_dict(parts["preprocessor"], "perception.preprocessor")
        encoder = ConformerConfig.from_dict(parts["encoder"], "perception.encoder", _ENCODER_FIELDS)
        _expect_equal("perception.encoder.feat_in", encoder.feat_in, "perception.preprocessor.features", mel.num_mels)

        adapter, path = None, "perception.modality_adapter"
        if parts["modality_adapter"].get("_target_") in _IDENTITY:
            width = _read(parts["modality_adapter"], path, _IDENTITY_FIELDS)["d_model"]
            _expect_equal(f"{path}.d_model", width, "perception.encoder.d_model", encoder.hidden_size)
        else:
            adapter = ConformerConfig.from_dict(parts["modality_adapter"], path, _ADAPTER_FIELDS)
            _expect_equal(f"{path}.feat_in", adapter.feat_in, "perception.encoder.d_model", encoder.hidden_size)
        return cls(mel=mel, encoder=encoder, adapter=adapter, output_dim=parts["output_dim"])

    @property
    def sampling_rate(self) -> int:
        """Of the audio the tower takes, Hz."""
        return self.mel.sampling_rate

    @property
    def hop_length(self) -> int:
        """Samples from one mel frame to the next."""
        return self.mel.hop_length

    @property
    def min_num_samples(self) -> int:
        """Fewest samples that give two mel frames; the deviation of a single one, used to normalise, is undefined."""
        return 2 * self.hop_length

    def num_frames(self, num_samples: int) -> int:
        """Valid mel frames of a clip."""
        return num_samples // self.hop_length

    def num_tokens(self, num_samples: int) -> int:
        """Embeddings the tower emits for a clip: each of its stride-2 stages takes n frames to ``(n - 1) // 2 + 1``."""
        return -(-self.num_frames(num_samples) // self.encoder.subsampling_factor)
