# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` as a person starts it, and requests by OpenAI's client: good ones, bad ones, good ones again."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
import soundfile
from random_checkpoints import TEST_SET, TRAINED, noise

MODEL = "salm"
START_SECONDS = 420
DRAFTS = 4


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[openai.OpenAI]:
    """A server of the trained checkpoint with its draft, on a free port of the loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # As a user would have it: the engine in processes of its own, which load the plugin by themselves.
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(TRAINED), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", MODEL, "--max-model-len", "512", "--enforce-eager"]
    command += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": DRAFTS})]
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            deadline = time.monotonic() + START_SECONDS
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except OSError:
                    assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
                    time.sleep(1)
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def wav(samples: np.ndarray, rate: int = 16_000, subtype: str = "PCM_16") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype=subtype)
    return file.getvalue()


def part(data: bytes) -> dict:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def chat(client: openai.OpenAI, *parts: dict | str, max_tokens: int = 16) -> str:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], temperature=0.0, max_tokens=max_tokens
    )
    return answer.choices[0].message.content


def test_chat_with_one_audio(client):
    say = part(wav(noise(16_000)))
    assert chat(client, "Transcribe: ", say) == chat(client, "Transcribe: ", say)


def test_chat_with_two_audios_by_both_content_types(client):
    url = "data:audio/wav;base64," + base64.b64encode(wav(noise(9_000, 1))).decode()
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [
            {"type": "text", "text": "Transcribe: "},
            part(wav(noise(16_000))),
            {"type": "audio_url", "audio_url": {"url": url}},
        ]}],
        temperature=0.0,
        max_tokens=4,
    )  # fmt: skip
    one = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "Transcribe: "}, part(wav(noise(16_000)))]}],
        temperature=0.0,
        max_tokens=4,
    )
    # 9,000 samples are 56 frames, and those 7 tokens.
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens + 7


def test_stereo_at_another_rate(client):
    stereo = np.stack([noise(22_050), noise(22_050)], axis=1)
    assert isinstance(chat(client, part(wav(stereo, 44_100))), str)


def test_text_only(client):
    assert isinstance(chat(client, "Say something."), str)
    completion = client.completions.create(model=MODEL, prompt="one two", max_tokens=4, temperature=0.0)
    assert completion.usage.completion_tokens <= 4


BAD = {
    "empty": wav(np.zeros(0)),
    "one frame": wav(noise(319)),
    "NaN": wav(np.full(16_000, np.nan, np.float32), subtype="FLOAT"),
    "infinite": wav(np.full(16_000, np.inf, np.float32), subtype="FLOAT"),
    "no audio file": b"these bytes are no audio at all",
    "longer than the context": wav(noise(16_000 * 60)),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_audio_is_a_bad_request_and_the_server_lives(client, bad):
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(client, "Transcribe: ", part(BAD[bad]))
    assert refusal.value.status_code == 400
    assert isinstance(chat(client, "Transcribe: ", part(wav(noise(16_000))), max_tokens=4), str)


def test_a_locator_in_the_text_needs_its_audio(client):
    with pytest.raises(openai.BadRequestError, match="2 audio locators .* for 1 audios"):
        chat(client, "Transcribe <|audio|>: ", part(wav(noise(16_000))))
    assert isinstance(chat(client, "Transcribe: ", part(wav(noise(16_000))), max_tokens=4), str)


def scrape(client: openai.OpenAI) -> dict[str, float]:
    """The server's counters of drafts, by what follows `vllm:spec_decode_num_` and, for positions, by position."""
    with urllib.request.urlopen(str(client.base_url).replace("/v1/", "/metrics"), timeout=10) as page:
        lines = page.read().decode().splitlines()
    counters = {}
    for line in lines:
        if found := re.match(r'vllm:spec_decode_num_(\w+)_total\{.*?(?:position="(\d+)")?\} (\S+)', line):
            counters[found[1] + (found[2] or "")] = float(found[3])
    return counters


def test_metrics_count_the_drafts(client):
    before = scrape(client)
    tokens = 33
    client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [part((TEST_SET.parent / "00.wav").read_bytes())]}],
        temperature=0.0,
        max_tokens=tokens,
        extra_body={"ignore_eos": True},
    )
    grown = {name: value - before[name] for name, value in scrape(client).items()}
    assert 0 < grown["accepted_tokens"] <= grown["draft_tokens"] <= DRAFTS * grown["drafts"]
    positions = [grown[f"accepted_tokens_per_pos{i}"] for i in range(DRAFTS)]
    assert sum(positions) == grown["accepted_tokens"]
    assert positions == sorted(positions, reverse=True)
    # The prompt gives one token, a step one and what it accepts; the last may accept more than is wanted.
    assert tokens - 1 <= 1 + grown["drafts"] + grown["accepted_tokens"] <= tokens + DRAFTS


def test_real_speech_becomes_text(client):
    """The first recordings, of which the checkpoint gets most right word for word."""
    entries = [json.loads(line) for line in TEST_SET.read_text().splitlines()[:4]]
    heard = [
        chat(client, "Transcribe: ", part((TEST_SET.parent / entry["audio_filepath"]).read_bytes()), max_tokens=96)
        for entry in entries
    ]
    right = [text.strip().lower() == entry["text"].strip().lower() for text, entry in zip(heard, entries, strict=True)]
    assert sum(right) >= 3, list(zip(heard, entries, strict=True))
