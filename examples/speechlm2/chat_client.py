# SPDX-License-Identifier: Apache-2.0
"""Ask a running `vllm serve CHECKPOINT` to transcribe audio files, with OpenAI's chat API.

python chat_client.py --base-url http://127.0.0.1:8000/v1 speech.wav
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path

from openai import OpenAI

PROMPT = "Transcribe: "
MAX_TOKENS = 256


def audio_message(path: Path, prompt: str = PROMPT) -> dict:
    """The chat message that asks for the transcript of one audio file: the prompt, then the file in base64."""
    audio = {"data": base64.b64encode(path.read_bytes()).decode(), "format": path.suffix.lstrip(".").lower()}
    return {
        "role": "user",
        "content": [{"type": "text", "text": prompt}, {"type": "input_audio", "input_audio": audio}],
    }


def ask(client: OpenAI, path: Path, prompt: str = PROMPT) -> str:
    """The answer to one audio file from the only model that the server serves."""
    model = client.models.list().data[0].id
    completion = client.chat.completions.create(
        model=model, messages=[audio_message(path, prompt)], temperature=0.0, max_tokens=MAX_TOKENS
    )
    return completion.choices[0].message.content or ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Transcribe audio files with a running vLLM server.")
    parser.add_argument("audio", nargs="+", type=Path, help="audio files (wav, flac, mp3, ...)")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="only for a server started with --api-key")
    parser.add_argument("--prompt", default=PROMPT, help="the text before the audio (default: %(default)r)")
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    for path in args.audio:
        print(f"{path}: {ask(client, path, args.prompt)}")


if __name__ == "__main__":
    main()
