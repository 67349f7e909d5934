# SPDX-License-Identifier: Apache-2.0
"""Train the tiny SALM from nothing on synthetic speech, on a CPU, within a budget of minutes.

    python speech.py data/train --count 60000 --seed 1 --split train
    python speech.py data/dev --count 400 --seed 2 --split test_seen
    python train.py --data data/train --dev data/dev --work run --out checkpoint --minutes 120

One process per core computes on its own part of each batch. The loss is next-token cross-entropy + 0.5 x CTC on the
tower (whole words) + 0.3 x the mean cross-entropy of the MTP steps; for the first minutes CTC alone, because a backbone
learns nothing from a tower that hears nothing. Learning rate and curriculum follow the share of the budget that is used
up, so a stop loses little: starting again with the same ``--work`` goes on from the last state.
The weights kept are an exponential average; the best on the development set is exported to ``--out``.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import jiwer
import numpy as np
import soxr
import torch
import torch.distributed as dist
import torch.nn.functional as F
from export import export_checkpoint, load_checkpoint
from modeling import IM_END, IM_START, LOCATOR, NUM_MTP_STEPS, TinySALM, train_tokenizer, use_full_sequence_scan
from sentences import VOCABULARY, sentence
from tokenizers import Tokenizer
from torch import nn

# What a prompt's user turn may look like around the audio; the first is the one that is evaluated.
PROMPTS = ("Transcribe: {}", "{}", "{}\nTranscribe: ", "Transcribe the audio: {}", "{}\nTranscribe the audio: ")
CTC_WEIGHT, MTP_WEIGHT = 0.5, 0.3
SECONDS_PER_BATCH = 52.0
SAMPLE_RATE = 16000


@dataclass
class Utterance:
    shard: np.ndarray
    offset: int
    num_samples: int
    text: str

    def audio(self, rng: random.Random | None = None) -> torch.Tensor:
        """float32 samples; with ``rng`` half of them at another speed and pitch, which makes voices of a voice."""
        samples = self.shard[self.offset : self.offset + self.num_samples].astype(np.float32) / 32768
        if rng and rng.random() < 0.5:
            samples = soxr.resample(samples, SAMPLE_RATE, SAMPLE_RATE * rng.uniform(0.92, 1.08), quality="LQ")
        return torch.from_numpy(samples)


def load_utterances(folder: Path) -> list[Utterance]:
    """All utterances of the shards that are complete, in order."""
    utterances = []
    for shard in sorted(path for path in folder.iterdir() if path.is_dir() and (path / "index.jsonl").exists()):
        samples = np.load(shard / "audio.npy", mmap_mode="r")
        for line in (shard / "index.jsonl").read_text().splitlines():
            entry = json.loads(line)
            utterances.append(Utterance(samples, entry["offset"], entry["num_samples"], entry["text"]))
    return utterances


class Batcher:
    """Turns utterances into padded tensors; a prompt holds one audio, sometimes two."""

    def __init__(self, tokenizer: Tokenizer, model: TinySALM):
        self.tokenizer = tokenizer
        self.locator = tokenizer.token_to_id(LOCATOR)
        self.num_tokens = model.perception.config.num_tokens
        self.words = {word: index for index, word in enumerate(sorted(VOCABULARY))}

    def __call__(
        self, groups: list[list[Utterance]], rng: random.Random | None, augment: bool = False
    ) -> dict[str, torch.Tensor]:
        """``groups`` holds the utterances of each prompt; without ``rng`` the prompt is the evaluated one."""
        audios, rows, starts = [], [], []
        for group in groups:
            user = (rng.choice(PROMPTS) if rng else PROMPTS[0]).format("\n".join([LOCATOR] * len(group)))
            prompt = self.tokenizer.encode(f"{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n").ids
            audio = [utterance.audio(rng if augment else None) for utterance in group]
            counts = iter(self.num_tokens(len(samples)) for samples in audio)
            ids = [i for token in prompt for i in [token] * (next(counts) if token == self.locator else 1)]
            starts.append(len(ids))
            rows.append(ids + self.tokenizer.encode("\n".join(u.text for u in group) + IM_END).ids)
            audios += audio
        targets = [[self.words[word] for word in u.text.split()] for group in groups for u in group]
        pad = nn.utils.rnn.pad_sequence
        return {
            "input_ids": pad([torch.tensor(row) for row in rows], batch_first=True),
            "starts": torch.tensor(starts),
            "lengths": torch.tensor([len(row) for row in rows]),
            "audio": pad(audios, batch_first=True),
            "audio_lengths": torch.tensor([len(audio) for audio in audios]),
            "ctc_targets": pad([torch.tensor(t) for t in targets], batch_first=True),
            "ctc_lengths": torch.tensor([len(t) for t in targets]),
        }


def mask_features(features: torch.Tensor, lengths: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """SpecAugment (Park et al. 2019): two bands of mels and two stretches of frames set to the mean, per utterance."""
    features = features.clone()
    for row, length in zip(features, lengths.tolist(), strict=True):
        for _ in range(2):
            width, span = rng.randint(0, 10), rng.randint(0, max(1, length // 25))
            band, start = rng.randint(0, row.shape[1] - width), rng.randint(0, length - span)
            row[:, band : band + width] = 0
            row[start : start + span] = 0
    return features


class Losses(nn.Module):
    def __init__(self, model: TinySALM, locator: int):
        super().__init__()
        self.model, self.locator = model, locator

    def forward(
        self, batch: dict[str, torch.Tensor], mask_rng: random.Random | None = None, ctc_only: bool = False
    ) -> dict[str, torch.Tensor]:
        model, ids, lengths = self.model, batch["input_ids"], batch["lengths"]
        with torch.no_grad():
            features, frames = model.perception.preprocessor(batch["audio"], batch["audio_lengths"])
            if mask_rng:
                features = mask_features(features, frames, mask_rng)
        audio, audio_lengths = model.perception.encode(features, frames)
        ctc = F.ctc_loss(
            model.ctc(audio).log_softmax(-1).transpose(0, 1),
            batch["ctc_targets"],
            audio_lengths,
            batch["ctc_lengths"],
            blank=len(VOCABULARY),
            zero_infinity=True,
        )
        if ctc_only:
            return {"loss": ctc, "ctc": ctc}
        embeddings = model.fuse(ids, audio, audio_lengths, self.locator)
        hidden = model.hidden(embeddings)
        rows = torch.arange(len(ids))[:, None]
        responses = int((lengths - batch["starts"]).max())
        starts = batch["starts"][:, None] - 1 + torch.arange(responses)  # positions that predict a response token

        def cross_entropy(states: torch.Tensor, ahead: int) -> tuple[torch.Tensor, torch.Tensor]:
            target = starts + ahead
            valid = target < lengths[:, None]
            labels = ids[rows, target.clamp(max=ids.shape[1] - 1)][valid]
            logits = model.llm.lm_head(states[valid])
            return F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean()

        inside = starts.clamp(max=ids.shape[1] - 1)
        lm, accuracy = cross_entropy(hidden[rows, inside], 1)
        drafts = [cross_entropy(out, 2 + k) for k, out in enumerate(model.mtp(embeddings, hidden, inside))]
        mtp = sum(loss for loss, _ in drafts) / NUM_MTP_STEPS
        result = {"loss": lm + CTC_WEIGHT * ctc + MTP_WEIGHT * mtp, "lm": lm, "ctc": ctc, "mtp": mtp, "acc": accuracy}
        return result | {f"acc{k + 1}": accuracy for k, (_, accuracy) in enumerate(drafts)}


@torch.inference_mode()
def transcribe(model: TinySALM, batcher: Batcher, utterances: list[Utterance], max_tokens: int = 64) -> list[str]:
    """Greedy text of each utterance, by running the whole sequence again for each token: slow, simple, cache-free."""
    model.eval()
    texts = []
    for first in range(0, len(utterances), 32):
        batch = batcher([[utterance] for utterance in utterances[first : first + 32]], None)
        audio, audio_lengths = model.perception(batch["audio"], batch["audio_lengths"])
        rows, lengths = torch.arange(len(batch["starts"])), batch["starts"].clone()
        ids = F.pad(batch["input_ids"], (0, max_tokens))
        ids[torch.arange(ids.shape[1]) >= lengths[:, None]] = 0
        end, done = batcher.tokenizer.token_to_id(IM_END), torch.zeros(len(rows), dtype=torch.bool)
        for _ in range(max_tokens):
            used = int(lengths.max())
            embeddings = model.fuse(ids[:, :used], audio, audio_lengths, batcher.locator)
            following = model.llm.lm_head(model.hidden(embeddings)[rows, lengths - 1]).argmax(-1)
            done |= following == end
            ids[rows[~done], lengths[~done]] = following[~done]
            lengths += (~done).long()
            if done.all():
                break
        starts = batch["starts"].tolist()
        texts += [
            batcher.tokenizer.decode(row[start:stop])
            for row, start, stop in zip(ids.tolist(), starts, lengths.tolist(), strict=True)
        ]
    return texts


def batches(folder: Path, clock: dict, rank: int, ranks: int, seed: int):
    """Endless groups of utterances of similar length: of the shortest ``clock["share"]`` of the data."""
    round_number = 0
    while True:
        pool = sorted(load_utterances(folder), key=lambda utterance: utterance.num_samples)
        allowed = pool[: int(len(pool) * clock["share"])]
        rng = random.Random(f"{seed} {round_number}")
        chosen = sorted(rng.sample(allowed, min(2000, len(allowed))), key=lambda utterance: utterance.num_samples)
        cut, batch = [], []
        for utterance in chosen:
            longest = utterance.num_samples / SAMPLE_RATE
            if batch and (len(batch) == clock["utterances"] or longest * (len(batch) + 1) > SECONDS_PER_BATCH):
                cut.append(batch)
                batch = []
            batch.append(utterance)
        cut = cut[: len(cut) // ranks * ranks]  # the rest, of the longest, comes again in another round
        order = list(range(0, len(cut), ranks))
        rng.shuffle(order)  # neighbours are of one length, so the processes finish a step together
        for first in order:
            batch = cut[first + rank]
            if rng.random() < 0.15 and len(batch) >= 4:
                yield [batch[:2], *([utterance] for utterance in batch[2:])]
            else:
                yield [[utterance] for utterance in batch]
        round_number += 1


@torch.no_grad()
def share_out(parameters: list[nn.Parameter], owner: int) -> None:
    """Give every process the values that process ``owner`` has for ``parameters``."""
    flat = nn.utils.parameters_to_vector(parameters)
    dist.broadcast(flat, owner)
    nn.utils.vector_to_parameters(flat, parameters)


def save_file(state: object, path: Path) -> None:
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


def train(rank: int, ranks: int, args: argparse.Namespace) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(args.port))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    use_full_sequence_scan()
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    model = load_checkpoint(args.init) if args.init else TinySALM()
    batcher = Batcher(tokenizer, model)
    losses = nn.parallel.DistributedDataParallel(Losses(model, batcher.locator), find_unused_parameters=True)
    # Muon (Jordan et al. 2024) for the inner matrices needs about half of AdamW's steps here; as its update costs a
    # third of a step, each process computes its part of the matrices and hands the result round.
    outer = ("ctc.", "llm.model.embeddings.", "llm.lm_head.")
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and not name.startswith(outer)]
    inner.sort(key=torch.Tensor.numel)
    others = [p for p in model.parameters() if not any(p is matrix for matrix in inner)]
    optimizers = [
        torch.optim.Muon(inner[rank::ranks], lr=args.lr, weight_decay=0.01, ns_steps=4, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.6 * args.lr, weight_decay=0.0, betas=(0.9, 0.98), fused=True),
    ]
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    average = copy.deepcopy(model)
    step, used, best = 0, 0.0, math.inf
    state_file, own_file = args.work / "state.pt", args.work / f"optimizers-{rank}.pt"
    if state_file.exists():
        state = torch.load(state_file, map_location="cpu")
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        step, used, best = state["step"], state["used"], state["best"]
    if own_file.exists():
        for optimizer, own in zip(optimizers, torch.load(own_file, map_location="cpu"), strict=True):
            optimizer.load_state_dict(own)
    dev = load_utterances(args.dev)[: args.dev_count] if rank == 0 else []
    clock = {"share": args.shortest, "utterances": args.utterances}
    stream = batches(args.data, clock, rank, ranks, args.seed + step)
    rng = random.Random(f"{args.seed} {rank} {step}")
    started, sums, last_eval, last_save, last_log = time.monotonic() - used, {}, used, used, (step, used)
    while used < 60 * args.minutes:
        now = torch.tensor([time.monotonic() - started])
        dist.broadcast(now, 0)
        used = now.item()
        ctc_only = used < 60 * args.ctc_minutes
        # Each phase goes from short utterances to all of them: alignments are found on short ones.
        joint_share = (used - 60 * args.ctc_minutes) / (60 * (args.minutes - args.ctc_minutes))
        ramp = (used / (60 * args.ctc_minutes) - 0.4) / 0.5 if ctc_only else (joint_share - 0.3) / 0.3
        clock["share"] = min(1.0, max(args.shortest, args.shortest + (1 - args.shortest) * ramp))
        share = min(1.0, used / (60 * args.minutes))
        factor = min(1.0, (step + 1) / 200) * max(0.01, min(1.0, (1 - share) / 0.5))  # constant, then to nothing
        for group, rate in zip((g for optimizer in optimizers for g in optimizer.param_groups), rates, strict=True):
            group["lr"] = rate * factor
        model.train()
        augment = used < 60 * (args.minutes - args.clean_minutes)
        batch = batcher(next(stream), rng, augment)
        result = losses(batch, rng if augment and not ctc_only else None, ctc_only)
        result["loss"].backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            if norm.isfinite():
                optimizer.step()
            optimizer.zero_grad()
        for owner in range(ranks):
            share_out(inner[owner::ranks], owner)
        step += 1
        finished = used >= 60 * args.minutes
        save = finished or used - last_save > 180
        if save:
            last_save = used
            save_file([optimizer.state_dict() for optimizer in optimizers], own_file)
        if rank:
            continue
        keep = min(0.995, step / (step + 10))
        with torch.no_grad():
            for ours, theirs in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                ours.lerp_(theirs, 1 - keep) if ours.is_floating_point() else ours.copy_(theirs)
        for key, value in result.items():
            sums[key] = sums.get(key, 0.0) + value.item()
        if step % 50 == 0:
            pace = (used - last_log[1]) / (step - last_log[0])
            figures = " ".join(f"{key} {value / 50:.3f}" for key, value in sums.items())
            print(f"{used / 60:6.1f} min step {step} {pace:.2f} s/step lr {args.lr * factor:.1e} {figures}", flush=True)
            sums, last_log = {}, (step, used)
        if finished or (used - last_eval > 60 * args.eval_minutes and not ctc_only):
            last_eval = used
            torch.set_num_threads(ranks)
            texts = transcribe(average, batcher, dev)
            torch.set_num_threads(1)
            references = [utterance.text for utterance in dev]
            wer = jiwer.wer(references, texts)
            print(
                f"{used / 60:6.1f} min step {step} WER {100 * wer:.2f} %  {references[0]!r} -> {texts[0]!r}", flush=True
            )
            if wer <= best:
                best = wer
                export_checkpoint(average, tokenizer, args.out)
        if save:
            weights = {"model": model.state_dict(), "average": average.state_dict()}
            save_file(weights | {"step": step, "used": used, "best": best}, state_file)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of training shards made by speech.py")
    parser.add_argument("--dev", type=Path, required=True, help="folder of development shards")
    parser.add_argument("--work", type=Path, required=True, help="folder for the tokenizer and the resumable state")
    parser.add_argument("--out", type=Path, required=True, help="folder for the exported checkpoint")
    parser.add_argument("--init", type=Path, help="start from an exported checkpoint; its CTC layer is trained anew")
    parser.add_argument("--minutes", type=float, default=120, help="budget, counted over all restarts")
    parser.add_argument(
        "--ctc-minutes", type=float, default=15, help="of the budget, at its start: CTC on the tower alone"
    )
    parser.add_argument(
        "--clean-minutes", type=float, default=20, help="of the budget, at its end: no SpecAugment, no change of speed"
    )
    parser.add_argument("--eval-minutes", type=float, default=6)
    parser.add_argument("--dev-count", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--shortest", type=float, default=0.3, help="share of the data, shortest first, to begin with")
    parser.add_argument("--utterances", type=int, default=16, help="at most, per process and step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--port", type=int, default=29511, help="loopback port the processes meet on")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.init:
        shutil.copy(args.init / "tokenizer.json", args.work)
    elif not (args.work / "tokenizer.json").exists():
        rng = random.Random(args.seed)
        train_tokenizer([sentence(rng) for _ in range(20000)]).save(str(args.work / "tokenizer.json"))
    torch.multiprocessing.spawn(train, args=(args.processes, args), nprocs=args.processes)


if __name__ == "__main__":
    main()
