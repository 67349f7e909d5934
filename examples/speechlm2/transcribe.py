# SPDX-License-Identifier: Apache-2.0
"""Transcribe audio files with a NeMo SpeechLM checkpoint and vLLM, offline: no server, one process.

    python transcribe.py CHECKPOINT speech.wav more.flac
    python transcribe.py CHECKPOINT --manifest manifest.json

A manifest is NeMo's: one JSON object a line, with `audio_filepath` (relative to the manifest, or absolute) and
optionally `text`, the reference transcript. With references the word error rate is printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jiwer
import soundfile
from chat_client import MAX_TOKENS, PROMPT, audio_message

if TYPE_CHECKING:
    from vllm import LLM


@dataclass
class Utterance:
    path: Path
    reference: str | None = None


def read_manifest(path: Path) -> list[Utterance]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [Utterance(path.parent / line["audio_filepath"], line.get("text")) for line in lines]


def load_engine(checkpoint: str, dtype: str = "auto", max_model_len: int | None = None) -> LLM:
    """vLLM with the checkpoint in it. vLLM finds the plugin by itself, as an installed package's entry point."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB; on a CPU vLLM would take much of the memory
    from vllm import LLM  # here, because it takes seconds and reads the environment

    return LLM(
        checkpoint,
        dtype=dtype,
        max_model_len=max_model_len,
        limit_mm_per_prompt={"audio": 1},
        enforce_eager=True,  # compiling takes longer than the few files this script is for
        use_tqdm_on_load=False,
    )


def transcribe(engine: LLM, utterances: list[Utterance], prompt: str = PROMPT) -> list[str]:
    """One greedy transcript per utterance; vLLM batches them as it sees fit."""
    from vllm import SamplingParams

    outputs = engine.chat(
        [[audio_message(utterance.path, prompt)] for utterance in utterances],
        SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
        use_tqdm=False,
    )
    return [output.outputs[0].text.strip() for output in outputs]


def word_error_rate(references: list[str], hypotheses: list[str]) -> float:
    """Word errors per reference word, case and punctuation aside."""
    words = jiwer.Compose(
        [
            jiwer.ToLowerCase(),
            jiwer.RemovePunctuation(),
            jiwer.RemoveMultipleSpaces(),
            jiwer.Strip(),
            jiwer.ReduceToListOfListOfWords(),
        ]
    )
    return jiwer.wer(references, hypotheses, reference_transform=words, hypothesis_transform=words)


def transcribe_and_report(engine: LLM, utterances: list[Utterance], prompt: str = PROMPT) -> None:
    """Transcribe, then print every file with its reference and hypothesis, the word error rate, and the speed."""
    begin = time.perf_counter()
    hypotheses = transcribe(engine, utterances, prompt)
    seconds = time.perf_counter() - begin

    for utterance, hypothesis in zip(utterances, hypotheses, strict=True):
        print(f"\n{utterance.path.name}")
        if utterance.reference is not None:
            print(f"  reference   {utterance.reference}")
        print(f"  hypothesis  {hypothesis}")

    print()
    known = [(u.reference, h) for u, h in zip(utterances, hypotheses, strict=True) if u.reference is not None]
    if known:
        print(f"Word error rate   {word_error_rate([r for r, _ in known], [h for _, h in known]):.1%}")
    audio_seconds = sum(soundfile.info(utterance.path).duration for utterance in utterances)
    print(
        f"Real-time factor  {seconds / audio_seconds:.3f} "
        f"({audio_seconds:.1f} s of audio in {seconds:.1f} s, {len(utterances)} files, engine start-up apart)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Transcribe audio files with a NeMo SpeechLM checkpoint, offline.")
    parser.add_argument("checkpoint", help="folder of the checkpoint")
    parser.add_argument("audio", nargs="*", type=Path, help="audio files (wav, flac, mp3, ...)")
    parser.add_argument("--manifest", type=Path, help="NeMo manifest, in addition to or instead of audio files")
    parser.add_argument("--prompt", default=PROMPT, help="the text before the audio (default: %(default)r)")
    parser.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16, ...")
    parser.add_argument("--max-model-len", type=int, help="most tokens of prompt, audio and answer together")
    args = parser.parse_args()
    utterances = [Utterance(path) for path in args.audio] + (read_manifest(args.manifest) if args.manifest else [])
    if not utterances:
        parser.error("nothing to transcribe: name audio files or a --manifest")
    if missing := [str(utterance.path) for utterance in utterances if not utterance.path.is_file()]:
        parser.error(f"no such audio file: {', '.join(missing)}")
    transcribe_and_report(load_engine(args.checkpoint, args.dtype, args.max_model_len), utterances, args.prompt)


if __name__ == "__main__":
    main()
