# SPDX-License-Identifier: Apache-2.0
"""Human recordings to evaluate on, never to train on: Asterisk's English telephone prompts, as wavs with a manifest.

    apt-get install asterisk-core-sounds-en-g722 ffmpeg && apt-get download asterisk-core-sounds-en
    dpkg -x asterisk-core-sounds-en_*.deb transcripts
    python human_speech.py human --transcripts transcripts/usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz

The recordings (16 kHz, one speaker) and transcripts are CC-BY-SA and stay out of this repository and of the weights.
Left out are sounds without words, such as "[ascending tones]", and clips shorter than 0.5 s or longer than 20 s.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
from pathlib import Path

import soundfile
from sentences import DIGITS, TEENS, TENS

SOUNDS = Path("/usr/share/asterisk/sounds/en_US_f_Allison")


def spell(text: str) -> str:
    """Lower-case words of a-z and apostrophe; numbers below a hundred in words, longer ones digit by digit."""

    def number(match: re.Match) -> str:
        value = int(match.group())
        if value < 20:
            return f" {(DIGITS + TEENS)[value]} "
        if value < 100:
            return f" {TENS[value // 10 - 2]} {DIGITS[value % 10] if value % 10 else ''} "
        return " ".join(["", *(DIGITS[int(digit)] for digit in match.group()), ""])

    return " ".join(re.findall(r"[a-z']+", re.sub(r"\d+", number, text.lower())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sounds", type=Path, default=SOUNDS)
    parser.add_argument("--transcripts", type=Path, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for line in gzip.decompress(args.transcripts.read_bytes()).decode().splitlines():
        name, _, text = line.partition(": ")
        sound = args.sounds / f"{name}.g722"
        text = spell(text)
        if not text or re.search(r"[\[(<]", line) or not sound.is_file():
            continue
        wav = args.folder / f"{name.replace('/', '_')}.wav"
        command = ["ffmpeg", "-loglevel", "error", "-y", "-f", "g722", "-i", str(sound), "-ar", "16000", str(wav)]
        subprocess.run(command, check=True)
        duration = soundfile.info(wav).duration
        if 0.5 <= duration <= 20:
            lines.append(json.dumps({"audio_filepath": wav.name, "duration": duration, "text": text}))
    (args.folder / "manifest.json").write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} recordings in {args.folder}")


if __name__ == "__main__":
    main()
