# SPDX-License-Identifier: Apache-2.0
"""What the draft of a checkpoint is worth: word errors, acceptance and decode speed with and without it.

    python benchmark.py CHECKPOINT --manifest manifest.json --drafts 1 2 3 4 5 6 --batches 1 4 8 --out figures.json

Each number of draft tokens is measured in a pair of processes, one with the draft and one without, that take turns, so
only one works at a time. A figure is the median of the turns. Decode speed leaves out the prompt: the tokens after each
answer's first, over the time from the first to the last of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from itertools import cycle, islice
from pathlib import Path

from transcribe import MAX_TOKENS, PROMPT, audio_message, read_manifest, word_error_rate


def worker(pipe, checkpoint: str, dtype: str, audio: list[Path], largest: int, drafts: int) -> None:
    """An engine that transcribes all audio in batches of the size that each message asks for, at most ``largest``."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; on a CPU vLLM would take all memory for one engine
    from vllm import LLM, SamplingParams

    speculation = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
    engine = LLM(checkpoint, dtype=dtype, enforce_eager=True, disable_log_stats=False, speculative_config=speculation)
    # Repeated until the largest batches are full.
    whole = -(-len(audio) // largest) * largest
    messages = [[audio_message(path, PROMPT)] for path in islice(cycle(audio), whole)]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    pipe.send("ready")
    while batch := pipe.recv():
        texts, tokens, seconds = [], 0, 0.0
        for first in range(0, len(messages), batch):
            outputs = engine.chat(messages[first : first + batch], params, use_tqdm=False)
            texts += [output.outputs[0].text.strip() for output in outputs]
            tokens += sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
            last = max(output.metrics.last_token_ts for output in outputs)
            seconds += last - min(output.metrics.first_token_ts for output in outputs)
        counts: dict[str, list[int]] = {}
        for metric in engine.get_metrics():
            if metric.name.startswith("vllm:spec_decode_num_"):
                name = metric.name.removeprefix("vllm:spec_decode_num_")
                counts[name] = list(getattr(metric, "values", None) or [metric.value])
        pipe.send({"texts": texts[: len(audio)], "speed": tokens / seconds, "counts": counts})
    engine.llm_engine.engine_core.shutdown()


class Engine:
    """A worker process; ``run`` waits for its answer, so two engines never work at once."""

    def __init__(self, *args):
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=worker, args=(theirs, *args))
        self.process.start()
        theirs.close()  # so that reading from a worker that died raises EOFError
        self.pipe.recv()

    def run(self, batch: int) -> dict:
        self.pipe.send(batch)
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(0)
        self.process.join()


def measure(
    checkpoint: str, manifest: Path, drafts: list[int], batches: list[int], turns: int, dtype: str = "float32"
) -> dict:
    """The figures as they are written to JSON; a line of them is printed for each number of drafts."""
    utterances = read_manifest(manifest)
    audio, references = [u.path for u in utterances], [u.reference or "" for u in utterances]
    plain = Engine(checkpoint, dtype, audio, max(batches), 0)
    expected = plain.run(max(batches))["texts"]
    figures = {"files": len(audio), "dtype": dtype, "wer": word_error_rate(references, expected), "drafts": {}}
    for count in drafts:
        drafted = Engine(checkpoint, dtype, audio, max(batches), count)
        first = drafted.run(max(batches))  # warm, and the texts and counts of one whole pass
        counts = first["counts"]
        steps = counts["drafts"][0]
        figures["drafts"][count] = entry = {
            "wer": word_error_rate(references, first["texts"]),
            "same_text": sum(a == b for a, b in zip(first["texts"], expected, strict=True)),
            "mean_accepted_length": 1 + counts["accepted_tokens"][0] / steps,
            "acceptance_per_position": [n / steps for n in counts["accepted_tokens_per_pos"]],
            "speed": {},
        }
        for batch in batches:
            pairs = [(drafted.run(batch)["speed"], plain.run(batch)["speed"]) for _ in range(turns)]
            entry["speed"][batch] = {
                "tokens_per_second": statistics.median(mine for mine, _ in pairs),
                "without": statistics.median(theirs for _, theirs in pairs),
                "ratio": statistics.median(mine / theirs for mine, theirs in pairs),
            }
        drafted.close()
        positions = " ".join(f"{share:.0%}" for share in entry["acceptance_per_position"])
        print(
            f"  K={count}  WER {entry['wer']:.2%} (without {figures['wer']:.2%}), {entry['same_text']} of {len(audio)} "
            f"texts the same, {entry['mean_accepted_length']:.2f} tokens a step (accepted: {positions})",
            flush=True,
        )
        for batch, speed in entry["speed"].items():
            print(
                f"       batch {batch}: {speed['tokens_per_second']:.0f} tokens/s, without {speed['without']:.0f}: "
                f"{speed['ratio']:.2f} times as fast",
                flush=True,
            )
    plain.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    figures = measure(args.checkpoint, args.manifest, args.drafts, args.batches, args.turns, args.dtype)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
