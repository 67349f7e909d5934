# SPDX-License-Identifier: Apache-2.0
"""The target model built by vLLM, without an engine: interfaces, fusion, encoding, masking."""

from __future__ import annotations

import pytest
import torch
from random_checkpoints import (
    BACKBONES,
    HIDDEN,
    VOCAB_SIZE,
    build_checkpoint,
    build_modules,
    noise,
    salm_config,
)
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.interfaces import (
    has_inner_state,
    is_hybrid,
    supports_mamba_prefix_caching,
    supports_multimodal,
    supports_pp,
)
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM

from nemo.collections.speechlm2.vllm.salm import perception
from nemo.collections.speechlm2.vllm.salm.config import NUM_EXTRA_ROWS, NeMoSpeechLMConfig
from nemo.collections.speechlm2.vllm.salm.model import NeMoSpeechLMForConditionalGeneration as Target
from nemo.collections.speechlm2.vllm.salm.model import fuse_embeddings
from nemo.collections.speechlm2.vllm.salm.perception import MAX_SECONDS_PER_PASS

ROWS = VOCAB_SIZE + 1  # in the checkpoint
TABLE = VOCAB_SIZE + NUM_EXTRA_ROWS  # in the engine


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3"])
def model(request, checkpoint, build_model):
    return build_model(checkpoint(request.param), dtype="float32")


# --- interfaces


def test_declared_interfaces():
    for declared in (supports_multimodal, supports_pp, has_inner_state, is_hybrid, supports_mamba_prefix_caching):
        assert declared(Target), declared


@pytest.mark.parametrize("backbone", list(BACKBONES))
def test_vllm_sees_what_the_backbone_is(checkpoint, backbone):
    config = EngineArgs(model=str(checkpoint(backbone)), max_model_len=256).create_model_config()
    assert config.is_hybrid is (backbone not in ("qwen3", "nemotron_attention"))
    assert config.is_multimodal_model
    assert config.is_pp_supported
    assert config.get_vocab_size() == TABLE


def test_mamba_state_is_the_backbones(checkpoint):
    config = EngineArgs(model=str(checkpoint()), max_model_len=256, enforce_eager=True).create_engine_config()
    inner = config.with_hf_config(config.model_config.hf_config.text_config)
    with set_current_vllm_config(config):
        for name in ("get_mamba_state_shape_from_config", "get_mamba_state_dtype_from_config"):
            assert getattr(Target, name)(config) == getattr(NemotronHForCausalLM, name)(inner)
    assert Target.get_mamba_state_shape_from_config(config)[1] == (4, 32, 16)
    assert Target.get_mamba_state_dtype_from_config(config)[1] == torch.float32
    assert len(Target.get_mamba_state_copy_func()) == 2


def test_chat_placeholder_is_the_checkpoints_locator():
    NeMoSpeechLMConfig(**salm_config())
    assert Target.get_placeholder_str("audio", 1) == "<|audio|>"
    NeMoSpeechLMConfig(**{**salm_config(), "audio_locator_tag": "<|audioplaceholder|>"})
    assert Target.get_placeholder_str("audio", 2) == "<|audioplaceholder|>"
    assert Target.get_placeholder_str("image", 1) is None


def test_language_model_is_found(model):
    assert model.get_language_model() is model.language_model


# --- fusion


def test_text_embeddings_are_the_tables(model):
    llm, _ = build_modules(model.config.text_config.model_type)
    ids = torch.arange(ROWS)
    torch.testing.assert_close(model.embed_input_ids(ids), llm.get_input_embeddings()(ids))


@pytest.mark.parametrize("locator", [VOCAB_SIZE, TABLE, 10 * TABLE])
def test_audio_takes_the_placeholders_places(model, locator):
    """In the order given, whatever the placeholder's id, also one that the table has no row for."""
    ids = torch.tensor([5, locator, locator, 6, locator, 7])
    mask = ids == locator
    audio = [torch.randn(2, HIDDEN), torch.randn(1, HIDDEN)]
    fused = model.embed_input_ids(ids, audio, is_multimodal=mask)
    torch.testing.assert_close(fused[mask], torch.cat(audio))
    torch.testing.assert_close(fused[~mask], model.embed_input_ids(ids[~mask]))
    torch.testing.assert_close(model.get_input_embeddings(ids, audio, is_multimodal=mask), fused)


def test_a_stray_locator_beyond_the_table_is_survived(model):
    assert model.embed_input_ids(torch.tensor([5, 10 * TABLE])).isfinite().all()


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_no_audio_is_text(model, nothing):
    ids = torch.tensor([5, 6])
    expected = model.embed_input_ids(ids)
    torch.testing.assert_close(model.embed_input_ids(ids, nothing, is_multimodal=torch.zeros(2, dtype=bool)), expected)
    torch.testing.assert_close(model.embed_input_ids(ids, nothing), expected)


def test_embeddings_without_a_mask_are_an_error(model):
    with pytest.raises(ValueError, match="is_multimodal"):
        model.embed_input_ids(torch.tensor([5]), [torch.zeros(1, HIDDEN)])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_count_mismatch_is_an_error(model, rows):
    ids = torch.tensor([5, VOCAB_SIZE, VOCAB_SIZE])
    with pytest.raises(ValueError, match=rf"{rows} .* 2 placeholders"):
        model.embed_input_ids(ids, [torch.zeros(rows, HIDDEN)], is_multimodal=ids == VOCAB_SIZE)


def test_fusion_casts_to_the_tables_type_and_leaves_the_ids():
    table, ids = torch.randn(4, 8, dtype=torch.bfloat16), torch.tensor([1, 9])
    fused = fuse_embeddings(ids, lambda i: table[i], 4, [torch.ones(1, 8)], torch.tensor([False, True]))
    assert fused.dtype == torch.bfloat16
    assert fused[1].tolist() == [1.0] * 8
    assert ids.tolist() == [1, 9]


# --- encoding


def test_audios_are_encoded_as_the_tower_does(model):
    """A ragged batch: as many rows as counted, equal to each audio alone in a tower with the same weights."""
    _, tower = build_modules(model.config.text_config.model_type)
    audios = [torch.from_numpy(noise(n, seed=n)) for n in (16_000, 320, 1_281, 30_123)]
    batch = model.embed_multimodal(audio=audios)
    assert [len(rows) for rows in batch] == [model.config.num_audio_tokens(len(a)) for a in audios]
    for audio, rows in zip(audios, batch, strict=True):
        expected, _ = tower(audio[None], torch.tensor([len(audio)]))
        torch.testing.assert_close(rows, expected[0], rtol=1e-4, atol=1e-4)


def test_equal_lengths_come_as_one_tensor(model):
    audios = torch.from_numpy(noise(32_000)).view(2, 16_000)
    stacked, listed = model.embed_multimodal(audio=audios), model.embed_multimodal(audio=list(audios))
    for a, b in zip(stacked, listed, strict=True):
        torch.testing.assert_close(a, b)


def test_no_audio_is_nothing(model):
    assert len(model.embed_multimodal()) == 0


@pytest.fixture(scope="module")
def chunked(tmp_path_factory, build_model):
    """A function: the model whose tower was trained on chunks of some seconds."""
    folder = build_checkpoint(tmp_path_factory.mktemp("chunked"), "qwen3")
    model = build_model(folder, dtype="float32")

    def with_chunks(seconds):
        model.config.encoder_chunk_size_seconds = seconds
        return model

    return with_chunks


def test_chunks_are_encoded_apart(chunked):
    model, audio = chunked(1.0), torch.from_numpy(noise(40_100))
    (rows,) = model.embed_multimodal(audio=[audio])
    pieces = model.embed_multimodal(audio=list(audio.split(16_000)))
    assert len(rows) == model.config.num_audio_tokens(len(audio))
    torch.testing.assert_close(rows, torch.cat(pieces), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_every_length_around_a_chunk_border_has_its_count(chunked):
    """The placeholders are as many as the tower emits for the pieces, each encoded alone."""
    model, size, hop = chunked(0.5), 8_000, 160
    emitted: dict[int, int] = {}
    for count in (1, 2, 5):
        for length in range(count * size - 2 * hop, count * size + 3 * hop + 1):
            pieces = model.config.audio_chunks(length)
            assert sum(pieces) == length
            assert all(piece >= 320 for piece in pieces)
            for piece in pieces:
                if piece not in emitted:
                    rows, lengths = model.perception(torch.from_numpy(noise(piece))[None], torch.tensor([piece]))
                    assert rows.shape[1] == int(lengths)
                    emitted[piece] = rows.shape[1]
            assert model.config.num_audio_tokens(length) == sum(emitted[piece] for piece in pieces), length
    lengths = [count * size + beyond for count in (1, 2, 5) for beyond in (-161, -1, 0, 159, 319, 320, 321, 479)]
    rows = model.embed_multimodal(audio=[torch.from_numpy(noise(length)) for length in lengths])
    assert [len(embeddings) for embeddings in rows] == [model.config.num_audio_tokens(length) for length in lengths]


def passes(model, audios):
    """What ``embed_multimodal`` gives, and the (clips, samples) of each pass of the tower."""
    shapes = []
    hook = model.perception.register_forward_hook(lambda module, inputs, output: shapes.append(inputs[0].shape))
    try:
        return model.embed_multimodal(audio=audios), shapes
    finally:
        hook.remove()


@torch.inference_mode()
def test_an_hour_is_encoded_in_bounded_memory(chunked):
    model, size = chunked(30.0), 30 * 16_000
    audio = torch.from_numpy(noise(3_600 * 16_000 + 5_000))
    (rows,), shapes = passes(model, [audio])
    assert len(rows) == model.config.num_audio_tokens(len(audio)) == 120 * 375 + 4
    assert max(shape.numel() for shape in shapes) <= MAX_SECONDS_PER_PASS * 16_000
    assert sum(clips for clips, _ in shapes) == 121
    for chunk in (0, 57, 119):
        (alone,) = model.embed_multimodal(audio=[audio[chunk * size : (chunk + 1) * size]])
        torch.testing.assert_close(rows[chunk * 375 : (chunk + 1) * 375], alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(rows[-4:], model.embed_multimodal(audio=[audio[-5_000:]])[0], rtol=0, atol=1e-5)


@torch.inference_mode()
def test_many_audios_are_encoded_in_bounded_memory(chunked, monkeypatch):
    """Grouped by length; longer ones than the bound alone; and the results are in the order of the audios."""
    monkeypatch.setattr(perception, "MAX_SECONDS_PER_PASS", 1)
    model = chunked(None)
    audios = [torch.from_numpy(noise(n, seed=n)) for n in (40_000, 320, 9_000, 8_000, 400, 7_900, 20_000)]
    together, shapes = passes(model, audios)
    assert [tuple(shape) for shape in shapes] == [(2, 400), (2, 8_000), (1, 9_000), (1, 20_000), (1, 40_000)]
    for audio, rows in zip(audios, together, strict=True):
        torch.testing.assert_close(rows, model.embed_multimodal(audio=[audio])[0], rtol=0, atol=1e-5)


# --- logits


def test_padded_rows_are_never_produced(model):
    assert model.padding.checkpoint_rows == ROWS
    llm, _ = build_modules(model.config.text_config.model_type)
    hidden = torch.randn(5, HIDDEN)
    logits = model.compute_logits(hidden)
    assert logits.shape == (5, TABLE)
    assert (logits[:, ROWS:] == -torch.inf).all()
    torch.testing.assert_close(logits[:, :ROWS], llm.lm_head(hidden), rtol=1e-4, atol=1e-4)


def test_a_zero_row_would_win_without_the_mask(model):
    weight = model.language_model.lm_head.weight
    direction = torch.linalg.lstsq(weight[:ROWS].float(), -torch.ones(ROWS, 1)).solution.T
    logits = model.language_model.compute_logits(direction)
    assert (logits[:, ROWS:] == 0).all()
    assert model.compute_logits(direction).argmax() < ROWS


def test_other_ranks_have_no_logits(model, monkeypatch):
    monkeypatch.setattr(model.language_model, "compute_logits", lambda hidden: None)
    assert model.compute_logits(torch.zeros(1, HIDDEN)) is None


# --- precision


def test_tower_has_the_models_type_and_mels_stay_float32(checkpoint, build_model):
    model = build_model(checkpoint("nemotron_h"), dtype="bfloat16")
    assert {p.dtype for p in model.perception.parameters()} == {torch.bfloat16}
    assert model.perception.preprocessor.fb.dtype == model.perception.preprocessor.window.dtype == torch.float32
    (rows,) = model.embed_multimodal(audio=[torch.from_numpy(noise(16_000))])
    assert rows.dtype == torch.bfloat16
    assert not model.training
    assert not model.perception.training
