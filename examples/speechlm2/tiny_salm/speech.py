# SPDX-License-Identifier: Apache-2.0
"""Synthetic speech for the tiny SALM: sentences of ``sentences.py`` spoken by espeak-ng and flite, with light noise.

    python speech.py data/train --count 60000 --seed 1 --split train        # shards for train.py
    python speech.py test_set --count 12 --seed 6 --split test_seen --wav   # wavs with a NeMo manifest

Needs Debian's espeak-ng and flite. Utterance i of a set depends on its seed, split and i alone. A shard is a folder of
``audio.npy`` (int16, 16 kHz, utterances end to end) and ``index.jsonl`` (offset, num_samples, text, voice); finished
shards are kept, so a stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import soundfile
import soxr
from sentences import is_held_out, sentence

SAMPLE_RATE = 16000
MAX_SECONDS = 6.0
SHARD = 2000

SEEN = [
    *(f"espeak:{accent}{variant}"
      for accent in ("en-us", "en-gb", "en-gb-x-rp")
      for variant in ("", "+m1", "+m3", "+m4", "+m7", "+f1", "+f2", "+f4")),
    "flite:rms", "flite:slt", "flite:kal16",
]  # fmt: skip
UNSEEN = [
    "espeak:en-gb-scotland",
    "espeak:en-us+m5",
    "espeak:en-us+f3",
    "espeak:en-us-nyc+m2",
    "espeak:en-gb+f5",
    "flite:awb",
]


def speak(text: str, voice: str, rng: random.Random) -> np.ndarray:
    """float32 samples at 16 kHz of ``text`` said by ``voice``, at a random speed and pitch."""
    engine, name = voice.split(":")
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        if engine == "espeak":
            options = ["-v", name, "-s", str(rng.randint(135, 195)), "-p", str(rng.randint(30, 70))]
            command = ["espeak-ng", *options, "-w", file.name, text]
        else:
            pitch = rng.uniform(150, 200) if name == "slt" else rng.uniform(85, 125)
            settings = [f"duration_stretch={rng.uniform(0.85, 1.2):.3f}", f"int_f0_target_mean={pitch:.1f}"]
            command = ["flite", "-voice", name, "-t", text, "-o", file.name]
            command += [word for setting in settings for word in ("--setf", setting)]
        subprocess.run(command, check=True, capture_output=True)
        samples, rate = soundfile.read(file.name, dtype="float32")
    return soxr.resample(samples, rate, SAMPLE_RATE)


def disturb(samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Silence around, a random level, and on half of the utterances white or low-pass noise at 10 to 35 dB SNR."""
    active = np.flatnonzero(np.abs(samples) > 1e-3)
    samples = samples[active[0] : active[-1] + 1]
    silence = [np.zeros(rng.integers(800, 4000), np.float32) for _ in range(2)]
    samples = np.concatenate([silence[0], samples, silence[1]])
    samples *= 10 ** rng.uniform(-1.0, -0.2) / np.abs(samples).max()
    if rng.random() < 0.5:
        noise = rng.standard_normal(len(samples)).astype(np.float32)
        if rng.random() < 0.5:
            noise = np.convolve(noise, np.ones(8, np.float32) / 8, mode="same")
        noise *= np.sqrt(np.mean(samples**2) / np.mean(noise**2)) * 10 ** (-rng.uniform(10, 35) / 20)
        samples = samples + noise
    return np.clip(samples, -1, 1)


def utterance(seed: int, split: str, index: int) -> tuple[np.ndarray, str, str]:
    """int16 samples, text and voice of utterance ``index`` of a set."""
    for attempt in range(10000):
        rng = random.Random(f"{seed} {split} {index} {attempt}")
        text = sentence(rng)
        if is_held_out(text) == (split == "train"):
            continue
        voices = UNSEEN if split == "test_unseen" else SEEN
        flite = [voice for voice in voices if voice.startswith("flite")]
        voice = rng.choice(flite if rng.random() < 0.35 else [voice for voice in voices if voice not in flite])
        samples = disturb(speak(text, voice, rng), np.random.default_rng(rng.getrandbits(64)))
        if len(samples) <= MAX_SECONDS * SAMPLE_RATE:
            return (samples * 32767).astype(np.int16), text, voice
    raise RuntimeError(f"no utterance of at most {MAX_SECONDS} s found (seed {seed}, {split}, {index})")


def write_shard(folder: Path, seed: int, split: str, shard: int, count: int) -> None:
    target = folder / f"{shard:04d}"
    if (target / "index.jsonl").exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    pieces, lines, offset = [], [], 0
    for index in range(shard * SHARD, min(count, (shard + 1) * SHARD)):
        samples, text, voice = utterance(seed, split, index)
        lines.append(json.dumps({"offset": offset, "num_samples": len(samples), "text": text, "voice": voice}))
        pieces.append(samples)
        offset += len(samples)
    np.save(target / "audio.npy", np.concatenate(pieces))
    (target / "index.tmp").write_text("\n".join(lines) + "\n")
    (target / "index.tmp").rename(target / "index.jsonl")  # the index marks a shard as complete
    print(f"{target}: {len(lines)} utterances, {offset / SAMPLE_RATE / 3600:.2f} h", flush=True)


def write_wavs(folder: Path, seed: int, split: str, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(count):
        samples, text, _ = utterance(seed, split, index)
        name = f"{index:02d}.wav"
        soundfile.write(folder / name, samples, SAMPLE_RATE, subtype="PCM_16")
        lines.append(json.dumps({"audio_filepath": name, "duration": len(samples) / SAMPLE_RATE, "text": text}))
    (folder / "manifest.json").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--split", choices=["train", "test_seen", "test_unseen"], required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--wav", action="store_true", help="write wavs and manifest.json instead of shards")
    args = parser.parse_args()
    if args.wav:
        write_wavs(args.folder, args.seed, args.split, args.count)
        return
    with ProcessPoolExecutor(args.jobs) as pool:
        shards = range(-(-args.count // SHARD))
        jobs = [pool.submit(write_shard, args.folder, args.seed, args.split, shard, args.count) for shard in shards]
        for job in jobs:
            job.result()


if __name__ == "__main__":
    main()
