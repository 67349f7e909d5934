# SPDX-License-Identifier: Apache-2.0
"""The real vLLM engine in this process, on random checkpoints and on the trained one."""

from __future__ import annotations

import base64
import io
import json

import jiwer
import numpy as np
import pytest
import soundfile
import torch
from random_checkpoints import (
    LOCATOR,
    TEST_SET,
    TRAINED,
    VOCAB_SIZE,
    build_checkpoint,
    build_modules,
    build_tensors,
    noise,
    pack_experts,
    prompt,
    salm_config,
    with_adapters,
)
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

ROWS = VOCAB_SIZE + 1
LOCATOR_ID = VOCAB_SIZE
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

# Mixed lengths, several audios to a prompt, none at all.
REQUESTS: list[tuple[str, list[np.ndarray]]] = [
    (prompt("say "), [noise(16_000)]),
    (prompt("a longer text to begin with: "), [noise(320, 1)]),
    (f"<|im_start|>user\n{LOCATOR} and then {LOCATOR}?<|im_end|>\n", [noise(23_457, 2), noise(8_000, 3)]),
    (prompt("only text", 0), []),
    (prompt("", 3), [noise(5_000, 4), noise(5_000, 4), noise(40_000, 5)]),
    (prompt("long "), [noise(160_000, 6)]),
]


def as_vllm(text: str, audios: list[np.ndarray]) -> dict:
    return {"prompt": text, "multi_modal_data": {"audio": audios}} if audios else {"prompt": text}


def generate(llm, requests, params=GREEDY) -> list[tuple[int, ...]]:
    outputs = llm.generate(requests, params, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@torch.no_grad()
def reference(backbone: str, tokenizer, requests, tied: bool = False) -> list[tuple[int, ...]]:
    """Greedy tokens by transformers' own backbone, over the tower's embeddings put in place of the locators."""
    llm, tower = build_modules(backbone)
    if tied:
        llm.lm_head.weight = llm.get_input_embeddings().weight
    for module in llm.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))  # the engine does not clamp the step
    results = []
    for text, audios in requests:
        ids = tokenizer.encode(text)
        rows = llm.get_input_embeddings()(torch.tensor(ids))
        parts, start = [], 0
        for place, audio in zip([i for i, x in enumerate(ids) if x == LOCATOR_ID], audios, strict=True):
            encoded, _ = tower(torch.from_numpy(audio)[None], torch.tensor([len(audio)]))
            parts += [rows[start:place], encoded[0]]
            start = place + 1
        fused = torch.cat([*parts, rows[start:]])[None]
        tokens: list[int] = []
        while len(tokens) < GREEDY.max_tokens:
            tokens.append(int(llm(inputs_embeds=fused, use_cache=False).logits[0, -1].argmax()))
            fused = torch.cat([fused, llm.get_input_embeddings()(torch.tensor([[tokens[-1]]]))], dim=1)
        results.append(tuple(tokens))
    return results


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3"])
def llm(request, engine, checkpoint):
    llm = engine(checkpoint(request.param), dtype="float32")
    llm.backbone = request.param
    return llm


def test_hybrid_only_where_the_backbone_is(llm):
    assert llm.llm_engine.model_config.is_hybrid is (llm.backbone == "nemotron_h")


def test_greedy_tokens_are_those_of_transformers(llm):
    """One batch of everything; equal tokens mean equal fusion, tower, backbone, state and masking."""
    expected = reference(llm.backbone, llm.get_tokenizer(), REQUESTS)
    assert generate(llm, [as_vllm(*request) for request in REQUESTS]) == expected
    assert len(set(expected)) == len(expected)


def test_alone_and_again_give_the_same(llm):
    """Neither the batch nor what processor, encoder and prefix caches remember changes a token."""
    together = generate(llm, [as_vllm(*request) for request in REQUESTS])
    assert [generate(llm, [as_vllm(*request)])[0] for request in REQUESTS] == together


def test_audio_is_heard(llm):
    texts = {generate(llm, [as_vllm(prompt("say "), [noise(16_000, seed)])])[0] for seed in range(4)}
    assert len(texts) == 4


def test_order_of_audios_matters(llm):
    text, (first, second) = REQUESTS[2]
    assert len(set(generate(llm, [as_vllm(text, [first, second]), as_vllm(text, [second, first])]))) == 2


def test_token_ids_stand_for_text(llm):
    ids = llm.get_tokenizer().encode(REQUESTS[2][0])
    request = {"prompt_token_ids": ids, "multi_modal_data": {"audio": REQUESTS[2][1]}}
    assert generate(llm, [request]) == generate(llm, [as_vllm(*REQUESTS[2])])


def test_the_shape_of_canary_qwen(engine, tmp_path):
    """Qwen3 under PEFT with a rank beyond its width, the head tied to a table outside, the tag not in the tokenizer."""
    tag, lora = "<|audioplaceholder|>", {"r": 128, "lora_alpha": 256, "target_modules": ["q_proj", "v_proj"]}
    tensors = build_tensors("qwen3")
    del tensors["llm.lm_head.weight"]
    stored = with_adapters(tensors, "peft", lora)
    stored["embed_tokens.weight"] = stored.pop("llm.base_model.model.model.embed_tokens.weight")
    config = {**salm_config("qwen3"), "audio_locator_tag": tag, "lora": {**lora, "task_type": "CAUSAL_LM"}}
    llm = engine(build_checkpoint(tmp_path, "qwen3", config, stored), dtype="float32")
    requests = [
        (f"<|im_start|>user\nTranscribe the following: {LOCATOR}<|im_end|>\n<|im_start|>assistant\n", [noise(16_000)]),
        (f"<|im_start|>user\n{LOCATOR} or {LOCATOR}?<|im_end|>\n", [noise(9_000, 1), noise(5_000, 2)]),
    ]
    sent = [as_vllm(text.replace(LOCATOR, tag), audios) for text, audios in requests]
    assert generate(llm, sent) == reference("qwen3", llm.get_tokenizer(), requests, tied=True)


def wav(samples: np.ndarray, rate: int = 16_000, subtype: str = "FLOAT") -> str:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype=subtype)
    return base64.b64encode(file.getvalue()).decode()


def test_chat_is_the_template_around_the_locators(llm):
    first, second = noise(16_000), noise(9_000, 1)
    content = [
        {"type": "text", "text": "say "},
        {"type": "input_audio", "input_audio": {"data": wav(first), "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{wav(second)}"}},
    ]
    (output,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    assert [tuple(output.outputs[0].token_ids)] == generate(llm, [as_vllm(prompt("say ", 2), [first, second])])


def test_any_rate_and_channel(llm):
    """An audio at another rate and in stereo is the audio that vLLM's parser makes of it."""
    audio = noise(8_000, 7)
    stereo = np.stack([audio, audio], axis=1)
    mono, both, integers = generate(
        llm,
        [
            as_vllm(prompt(""), [(audio, 8_000)]),
            as_vllm(prompt(""), [(stereo, 8_000)]),
            as_vllm(prompt(""), [((audio * 2**31).astype(np.int32), 8_000)]),
        ],
    )
    assert mono == both == integers


BAD = {
    "empty": (prompt(""), [np.zeros(0, np.float32)], "empty"),
    "NaN": (prompt(""), [np.full(16_000, np.nan, np.float32)], "NaN"),
    "infinite": (prompt(""), [np.full(16_000, np.inf, np.float32)], "infinite"),
    "one frame": (prompt(""), [noise(319)], "too short"),
    "no locator": (prompt("", 0), [noise(16_000)], "0 audio locators"),
    "too many locators": (prompt("", 2), [noise(16_000)], "2 audio locators"),
    "too few locators": (prompt("", 1), [noise(16_000), noise(16_000)], "1 audio locators"),
    "longer than the context": (prompt(""), [noise(1_600_000)], "maximum model length"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_request_is_refused_and_the_engine_lives(llm, bad):
    good = [as_vllm(*REQUESTS[0])]
    before = generate(llm, good)
    text, audios, message = BAD[bad]
    with pytest.raises((ValueError, VLLMValidationError), match=message):
        llm.generate([as_vllm(text, audios)], GREEDY, use_tqdm=False)
    assert generate(llm, good) == before


def test_padded_rows_are_never_sampled(llm):
    """However much they are favoured; a row of the checkpoint gives way to the same bias."""
    table = llm.llm_engine.model_config.get_vocab_size()
    for favoured, drawn in ((range(ROWS, table), False), (range(3, 13), True)):
        bias = dict.fromkeys(favoured, 100.0)
        params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, n=4, seed=1, logit_bias=bias)
        (output,) = llm.generate([as_vllm(*REQUESTS[0])], params, use_tqdm=False)
        tokens = {token for completion in output.outputs for token in completion.token_ids}
        assert (tokens <= set(favoured)) is drawn
        assert max(tokens) < ROWS


def test_chunked_prefill_splits_an_audio(engine, checkpoint):
    """A step of 64 tokens takes the 125 placeholders of one audio in pieces."""
    llm = engine(checkpoint("nemotron_h"), dtype="float32", max_num_batched_tokens=192, enable_prefix_caching=False)
    requests = [REQUESTS[5], REQUESTS[2], REQUESTS[5]]
    expected = reference("nemotron_h", llm.get_tokenizer(), requests)
    assert generate(llm, [as_vllm(*request) for request in requests]) == expected


# Plain experts, one by one and packed; and ones with a latent size, packed.
@pytest.mark.parametrize(
    ("backbone", "layout"), [("nemotron_moe", None), ("nemotron_moe", "automodel"), ("nemotron_latent", "automodel")]
)
def test_experts_are_those_of_transformers(engine, tmp_path, backbone, layout):
    tensors = build_tensors(backbone)
    tensors = pack_experts(tensors, layout) if layout else tensors
    llm = engine(build_checkpoint(tmp_path, backbone, tensors=tensors), dtype="float32")
    expected = reference(backbone, llm.get_tokenizer(), REQUESTS)
    assert generate(llm, [as_vllm(*request) for request in REQUESTS]) == expected
    assert len(set(expected)) == len(expected)


# --- the trained checkpoint


def test_set() -> list[tuple[str, np.ndarray]]:
    entries = [json.loads(line) for line in TEST_SET.read_text().splitlines()]
    return [(e["text"], soundfile.read(TEST_SET.parent / e["audio_filepath"], dtype="float32")[0]) for e in entries]


test_set.__test__ = False  # a name for people, not for pytest


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def trained_llm(request, engine):
    return engine(TRAINED, dtype=request.param)


def test_real_speech_becomes_text(trained_llm):
    """All bundled recordings in one batch, by the checkpoint's own chat template."""
    audios = test_set()
    chats = [
        [{"role": "user", "content": [
            {"type": "text", "text": "Transcribe: "},
            {"type": "input_audio", "input_audio": {"data": wav(audio), "format": "wav"}},
        ]}]
        for _, audio in audios
    ]  # fmt: skip
    outputs = trained_llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=128), use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
    references = [text for text, _ in audios]
    # 4 % when it was trained; text that does not hear makes as many errors as there are words.
    assert jiwer.wer(references, texts) <= 0.08, list(zip(references, texts, strict=True))


def test_real_speech_at_the_wrong_rate_and_in_stereo(trained_llm):
    text, audio = test_set()[0]
    doubled = np.repeat(audio, 2)  # 32 kHz, roughly
    message = "<|im_start|>user\nTranscribe: <|audio|><|im_end|>\n<|im_start|>assistant\n"
    request = {"prompt": message, "multi_modal_data": {"audio": (np.stack([doubled, doubled]), 32_000)}}
    (output,) = trained_llm.generate([request], SamplingParams(temperature=0.0, max_tokens=128), use_tqdm=False)
    assert jiwer.wer(text, output.outputs[0].text) <= 0.2, (text, output.outputs[0].text)
