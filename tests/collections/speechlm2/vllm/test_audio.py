# SPDX-License-Identifier: Apache-2.0
"""What users may send as audio, and what becomes of a prompt with it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from random_checkpoints import LOCATOR, VOCAB_SIZE, build_checkpoint, build_tokenizer, noise, prompt, salm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.cache import MultiModalProcessorOnlyCache

from nemo.collections.speechlm2.vllm.salm.audio import SALMDataParser, to_float_samples
from nemo.collections.speechlm2.vllm.salm.config import NeMoSpeechLMConfig

WAVE = noise(16_000)
STEREO = np.stack([WAVE, -0.5 * WAVE])
LOCATOR_ID = VOCAB_SIZE


@pytest.fixture(scope="module")
def parser():
    return SALMDataParser(NeMoSpeechLMConfig(**salm_config()))


@pytest.fixture(scope="module")
def processor(checkpoint):
    config = EngineArgs(model=str(checkpoint()), max_model_len=1024).create_model_config()
    return MULTIMODAL_REGISTRY.create_processor(config)


def parse(parser, audio) -> list[np.ndarray]:
    return parser.parse_mm_data({"audio": audio})["audio"].get_all()


# --- samples


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (np.array([-32768, 0, 16384], np.int16), [-1, 0, 0.5]),
        (np.array([-(2**31), 0, 2**30], np.int32), [-1, 0, 0.5]),
        (np.array([-128, 0, 64], np.int8), [-1, 0, 0.5]),
        (np.array([0, 128, 192], np.uint8), [-1, 0, 0.5]),
        (np.array([0, 2**15, 3 * 2**14], np.uint16), [-1, 0, 0.5]),
        (np.array([-32768, 0, 16384], np.int64), [-1, 0, 0.5]),
        ([-32768, 0, 16384], [-1, 0, 0.5]),
        ([-1.0, 0, 0.5], [-1, 0, 0.5]),
        (np.array([-1, 0, 0.5], np.float16), [-1, 0, 0.5]),
        (np.array([-1, 0, 0.5], np.float64), [-1, 0, 0.5]),
        (torch.tensor([-1, 0, 0.5], dtype=torch.bfloat16), [-1, 0, 0.5]),
        (torch.tensor([-1, 0, 0.5], requires_grad=True), [-1, 0, 0.5]),
        (torch.tensor([-32768, 0, 16384], dtype=torch.int16), [-1, 0, 0.5]),
    ],
)
def test_samples_of_any_type(samples, expected):
    result = to_float_samples(samples)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "empty"),
        (np.zeros((0, 2), np.float32), "empty"),
        ([0.1, float("nan")], "NaN or infinite"),
        (np.array([0.1, np.inf]), "NaN or infinite"),
        (np.array([1e300]), "NaN or infinite"),
        (np.zeros((2, 2, 400)), r"shape \(2, 2, 400\)"),
        (np.float32(1.0), r"shape \(\)"),
        (np.array(["a", "b"]), "type <U1"),
        (np.zeros(400, bool), "type bool"),
        (np.zeros(400, complex), "type complex128"),
        ([[0.1, 0.2], [0.3]], "rectangular"),
        (np.array([40_000]), "int64 samples beyond 16 bits"),
    ],
)
def test_bad_samples_are_refused(samples, message):
    with pytest.raises(ValueError, match=message):
        to_float_samples(samples)


# --- one audio or several, rates and channels


@pytest.mark.parametrize(
    "audio",
    [
        WAVE,
        WAVE.tolist(),
        torch.from_numpy(WAVE),
        (WAVE, 16_000),
        (WAVE, 16_000.0),
        (WAVE.tolist(), np.int64(16_000)),
        (torch.from_numpy(WAVE), 16_000),
        WAVE[None],
        WAVE[:, None],
        np.stack([WAVE, WAVE]),
        torch.from_numpy(np.stack([WAVE, WAVE], axis=1)),
    ],
)
def test_every_container_is_one_audio(parser, audio):
    """Alone or in a list: an array of two dimensions is never a batch, nor tensors embeddings."""
    for given in (audio, [audio]):
        (result,) = parse(parser, given)
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, WAVE, rtol=0, atol=1e-6)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("rate", [16_000, 8_000])
def test_stereo_is_mixed_down_whatever_the_order(parser, channels_last, rate):
    stereo = STEREO.T if channels_last else STEREO
    (result,) = parse(parser, (stereo, rate))
    (mono,) = parse(parser, (0.25 * WAVE, rate))
    np.testing.assert_allclose(result, mono, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_any_rate_is_resampled(parser, rate):
    """A tone keeps its pitch and its length."""
    seconds = 0.5
    tone = np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)
    (result,) = parse(parser, (tone, rate))
    assert abs(len(result) - seconds * 16_000) <= 2
    expected = np.sin(2 * np.pi * 440 * np.arange(len(result)) / 16_000)
    np.testing.assert_allclose(result[1000:-1000], expected[1000:-1000], atol=5e-3)


def test_several_audios_and_a_cached_one(parser):
    first, cached, second = parse(parser, [WAVE, None, (noise(8_000), 8_000)])
    assert len(first) == 16_000
    assert cached is None
    assert len(second) == 16_000


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        ([WAVE, []], "audio 1: empty"),
        ([WAVE, WAVE[:319]], "audio 1: too short, 319 samples.*320"),
        ((WAVE[:400], 48_000), "audio 0: too short, 13. samples"),
        ((WAVE, 0), "sampling rate in Hz"),
        ((WAVE, -16_000), "sampling rate in Hz"),
        ((WAVE, float("nan")), "sampling rate in Hz"),
        ((WAVE, "16k"), "sampling rate in Hz"),
        ((WAVE, 16_000, 1), "sampling rate in Hz"),
        ("speech.wav", "audio 0: an array of shape"),
        ({"audio_embeds": torch.zeros(1, 2, 3)}, "audio 0: an array of shape"),
    ],
)
def test_bad_audio_is_named(parser, audio, message):
    with pytest.raises(ValueError, match=message):
        parse(parser, audio)


def test_shortest_audio_is_two_frames(parser):
    assert len(parse(parser, WAVE[:320])[0]) == 320


# --- prompts


def process(processor, text_or_ids, audio, cache=None):
    return processor(text_or_ids, processor.info.parse_mm_data({"audio": audio}), cache=cache)


@pytest.mark.parametrize("num_samples", [320, 1_279, 1_280, 1_281, 16_000, 47_999, 640_000])
def test_a_locator_becomes_one_placeholder_per_embedding(processor, num_samples):
    result = process(processor, prompt("say "), noise(num_samples))
    expected = processor.info.get_hf_config().num_audio_tokens(num_samples)
    (place,) = result["mm_placeholders"]["audio"]
    ids = result["prompt_token_ids"]
    assert place.length == expected == ids.count(LOCATOR_ID)
    assert set(ids[place.offset : place.offset + place.length]) == {LOCATOR_ID}
    assert len(ids) == len(processor.info.get_tokenizer().encode(prompt("say "))) - 1 + expected


def test_audios_keep_their_order(processor):
    text = f"first {LOCATOR} then {LOCATOR}{LOCATOR}"
    lengths = [4_000, 16_000, 800]
    result = process(processor, text, [noise(n) for n in lengths])
    config = processor.info.get_hf_config()
    assert [p.length for p in result["mm_placeholders"]["audio"]] == [config.num_audio_tokens(n) for n in lengths]
    assert [len(item["audio"].data) for item in result["mm_kwargs"]["audio"]] == lengths


def test_token_ids_and_text_give_the_same(processor):
    ids = processor.info.get_tokenizer().encode(prompt("say "))
    assert (
        process(processor, ids, WAVE)["prompt_token_ids"]
        == process(processor, prompt("say "), WAVE)["prompt_token_ids"]
    )


def test_waveforms_stay_float32_in_a_bfloat16_model(processor):
    assert processor.info.ctx.model_config.dtype == torch.bfloat16
    (item,) = process(processor, prompt(""), WAVE)["mm_kwargs"]["audio"]
    assert item["audio"].data.dtype == torch.float32
    np.testing.assert_array_equal(item["audio"].data.numpy(), WAVE)


@pytest.mark.parametrize(("locators", "audios"), [(0, 1), (1, 0), (1, 2), (3, 2)])
def test_locators_must_match_audios(processor, locators, audios):
    with pytest.raises(ValueError, match=rf"{locators} audio locators \(<\|audio\|>\) for {audios} audios"):
        process(processor, prompt("", locators), [WAVE] * audios)


def test_cached_audio_gives_the_same_prompt(processor):
    cache = MultiModalProcessorOnlyCache(processor.info.ctx.model_config)
    fresh = process(processor, prompt("", 2), [WAVE, noise(4_000)], cache)
    again = process(processor, prompt("", 2), [noise(4_000), WAVE], cache)
    assert [p.length for p in again["mm_placeholders"]["audio"]] == [
        p.length for p in reversed(fresh["mm_placeholders"]["audio"])
    ]
    assert again["mm_hashes"]["audio"] == fresh["mm_hashes"]["audio"][::-1]
    assert cache.is_cached(fresh["mm_hashes"]["audio"]) == [True, True]


# --- what vLLM asks when it starts


@pytest.mark.parametrize("seq_len", [1, 8, 100, 1024, 100_000])
def test_profiled_audio_fits(processor, seq_len):
    (tokens,) = processor.info.get_mm_max_tokens_per_item(seq_len, {"audio": 1}).values()
    assert 1 <= tokens <= min(seq_len, 500)


def test_dummy_inputs_are_the_profiled_maximum(processor):
    dummy = processor.get_dummy_mm_inputs({"audio": 2})
    expected = processor.info.get_mm_max_tokens_per_item(1024, {"audio": 2})["audio"]
    assert [place.length for place in dummy["mm_placeholders"]["audio"]] == [expected] * 2


def test_any_number_of_audios(processor):
    assert processor.info.get_supported_mm_limits() == {"audio": None}


def processor_of(folder):
    config = EngineArgs(model=str(folder), max_model_len=256).create_model_config()
    return MULTIMODAL_REGISTRY.create_processor(config)


def test_a_tag_missing_from_the_tokenizer_is_added(tmp_path):
    """It takes the next free id, and prompts are tokenized with it."""
    folder = build_checkpoint(tmp_path, config={**salm_config(), "audio_locator_tag": "<|speech|>"})
    processor = processor_of(folder)
    free = len(build_tokenizer().get_vocab())
    assert processor.info.locator_id == free
    assert processor.info.get_tokenizer().encode("a<|speech|>b").count(free) == 1
    assert processor.info.locator_id == free


def test_a_tag_the_tokenizer_splits_is_refused(tmp_path):
    """One that is in the vocabulary, but not as a token of its own."""
    folder = build_checkpoint(tmp_path, config={**salm_config(), "audio_locator_tag": "ab"})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["ab"] = len(tokenizer["model"]["vocab"]) + 1
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="audio_locator_tag 'ab' is 2 tokens.*special token"):
        processor_of(folder)


def test_a_tag_beyond_the_table_is_refused(tmp_path):
    folder = build_checkpoint(tmp_path, config={**salm_config(), "audio_locator_tag": "<|speech|>"})
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens([f"<|extra{i}|>" for i in range(20)])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="'<.speech.>' has the id 280 .* expected one below 269"):
        processor_of(folder)
