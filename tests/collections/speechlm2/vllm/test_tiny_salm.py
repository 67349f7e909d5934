# SPDX-License-Identifier: Apache-2.0
"""The tiny SALM: its data are what the model card says, and the trainer's modules compute what the engine serves."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import soundfile
import torch
from random_checkpoints import TEST_SET, TRAINED
from vllm import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[4] / "examples/speechlm2/tiny_salm"))

from modeling import IM_END, IM_START, LOCATOR, NUM_MTP_STEPS, full_sequence_scan  # noqa: E402
from sentences import VOCABULARY, is_held_out, sentence  # noqa: E402


def test_vocabulary_is_large_and_plain():
    assert len(VOCABULARY) >= 1000
    assert all(set(word) <= set("abcdefghijklmnopqrstuvwxyz'") for word in VOCABULARY)


def test_sentences_are_reproducible_and_of_the_vocabulary():
    once = [sentence(random.Random(seed)) for seed in range(500)]
    assert once == [sentence(random.Random(seed)) for seed in range(500)]
    assert len(set(once)) > 480
    assert {word for text in once for word in text.split()} <= VOCABULARY


def test_test_sentences_are_held_out():
    texts = [json.loads(line)["text"] for line in TEST_SET.read_text().splitlines()]
    assert len(texts) >= 8
    assert all(is_held_out(text) for text in texts)
    share = sum(is_held_out(sentence(random.Random(seed))) for seed in range(5000)) / 5000
    assert 0.01 < share < 0.03


def test_full_sequence_scan_is_the_chunked_scan():
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    torch.manual_seed(0)
    x, dt = torch.randn(2, 70, 6, 8), torch.randn(2, 70, 6)
    b, c = torch.randn(2, 70, 2, 4), torch.randn(2, 70, 2, 4)
    options = {"A": -torch.rand(6), "D": torch.rand(6), "dt_bias": torch.rand(6), "dt_limit": (0.0, float("inf"))}
    theirs = mamba2_chunk_scan(x, dt, B=b, C=c, chunk_size=32, dt_softplus=True, **options)
    ours = full_sequence_scan(x, dt, B=b, C=c, chunk_size=32, dt_softplus=True, **options)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_trainer_and_engine_agree(engine):
    """Logits of the target at each generated token, and of the head at each draft of the first proposal, to 1e-3."""
    from export import load_checkpoint

    options = {"method": "mtp", "num_speculative_tokens": NUM_MTP_STEPS}
    llm = engine(TRAINED, dtype="float32", speculative_config=options, logprobs_mode="raw_logits", max_logprobs=-1)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    draft, drafted = runner.drafter.model, []
    compute = draft.compute_logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        drafted.append(compute(hidden).clone())
        return drafted[-1]

    draft.compute_logits = record
    entry = json.loads(TEST_SET.read_text().splitlines()[0])
    audio, _ = soundfile.read(TEST_SET.parent / entry["audio_filepath"], dtype="float32")
    prompt = f"{IM_START}user\nTranscribe: {LOCATOR}{IM_END}\n{IM_START}assistant\n"
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=-1)
    output = llm.generate({"prompt": prompt, "multi_modal_data": {"audio": audio}}, params, use_tqdm=False)[0]
    model = load_checkpoint(TRAINED)
    rows = model.llm.vocab_size

    with torch.no_grad():
        encoded, lengths = model.perception(torch.from_numpy(audio)[None], torch.tensor([len(audio)]))
        ids = torch.tensor([output.prompt_token_ids + list(output.outputs[0].token_ids)])
        start, locator = len(output.prompt_token_ids) - 1, llm.get_tokenizer().convert_tokens_to_ids(LOCATOR)
        assert int((ids == locator).sum()) == int(lengths)
        hidden = model.hidden(model.fuse(ids, encoded, lengths, locator))
        ours = model.llm.lm_head(hidden)[0, start:-1]
        for mine, theirs in zip(ours, output.outputs[0].logprobs, strict=True):
            assert len([i for i, entry in theirs.items() if entry.logprob > -torch.inf]) == rows
            engines = torch.tensor([theirs[i].logprob for i in range(rows)])
            torch.testing.assert_close(engines, mine, atol=1e-3, rtol=0)

        # What the engine proposed after the prompt: from the first token, each draft from the one before.
        proposal = torch.stack(drafted[:NUM_MTP_STEPS])[:, 0]
        assert proposal[:, rows:].max() == -torch.inf
        tokens = [output.outputs[0].token_ids[0], *proposal.argmax(-1).tolist()]
        ids = torch.tensor([output.prompt_token_ids + tokens])
        embeddings = model.fuse(ids, encoded, lengths, locator)
        outputs = model.mtp(embeddings, model.hidden(embeddings), torch.tensor([[start]]))
        ours = model.llm.lm_head(torch.cat(outputs, dim=1))[0]
        torch.testing.assert_close(proposal[:, :rows], ours, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "README.md"])
def test_checkpoint_is_complete_and_small(name):
    assert (TRAINED / name).is_file()
    assert sum(file.stat().st_size for file in TRAINED.iterdir()) <= 16 * 2**20
