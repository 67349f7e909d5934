# SPDX-License-Identifier: Apache-2.0
"""Text with the draft is text without it, in the real engine, in every way that requests meet.

Each scenario is run by an engine without a draft and by one with it, and their results are compared one by one. Some
engines are part of the ordinary tests; `make lossless` runs the whole grid of topologies, draft lengths and schedules.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import pytest
import soundfile
import torch
from random_checkpoints import TEST_SET, TRAINED, build_checkpoint, build_tensors, noise, prompt, salm_config
from scipy.stats import chisquare
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

TOPOLOGIES = {
    "attention *": ("nemotron_attention", "*"),
    "hybrid *": ("nemotron_h", "*"),
    "hybrid *E": ("nemotron_h", "*E"),
    "moe *": ("nemotron_moe", "*"),
    "moe *E": ("nemotron_moe", "*E"),
    "trained": None,
}
ENDS = (1, 24, 3, 30, 2, 17, 9, 5)  # answers of unequal length, many of which end inside a draft


def random_requests() -> list[dict]:
    """Audio of several lengths, two audios, and none."""
    audios = [[16_000], [320], [23_457], [9_000, 5_000], [], [48_000], [8_000]]
    return [
        {"prompt": prompt(f"say {i} ", len(sizes))}
        | ({"multi_modal_data": {"audio": [noise(size, i) for size in sizes]}} if sizes else {})
        for i, sizes in enumerate(islice(cycle(audios), 32))
    ]


def speech_requests() -> list[dict]:
    entries = [json.loads(line) for line in TEST_SET.read_text().splitlines()]
    audios = [soundfile.read(TEST_SET.parent / entry["audio_filepath"], dtype="float32")[0] for entry in entries]
    requests = [{"prompt": prompt("Transcribe: "), "multi_modal_data": {"audio": audio}} for audio in audios]
    pair = {"prompt": prompt("Transcribe: ", 2), "multi_modal_data": {"audio": audios[:2]}}
    return list(islice(cycle([*requests, pair, {"prompt": prompt("Transcribe: ", 0)}]), 32))


def params(index: int, **changes: Any) -> SamplingParams:
    """Greedy, to an end of its own."""
    settings = {"temperature": 0.0, "max_tokens": ENDS[index % len(ENDS)], "ignore_eos": index % 3 > 0}
    return SamplingParams(**{**settings, **changes})


def generate(llm: LLM, requests: list[dict], settings: list[SamplingParams]) -> list:
    return llm.generate(requests, settings, use_tqdm=False)


# --- scenarios: each returns a list of results


def batch_of(size: int) -> Callable[[LLM, list[dict]], list]:
    def scenario(llm: LLM, requests: list[dict]) -> list:
        outputs = generate(llm, requests[:size], [params(i) for i in range(size)])
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    return scenario


def joining_and_leaving(llm: LLM, requests: list[dict]) -> list:
    """Two requests join every third step; one is aborted while others run."""
    engine, waiting, finished, step = llm.llm_engine, list(enumerate(requests[:12])), {}, 0
    aborted = "5"
    while waiting or engine.has_unfinished_requests():
        if step % 3 == 0:
            for index, request in waiting[:2]:
                engine.add_request(str(index), request, params(index))
            del waiting[:2]
        if step == 8:
            engine.abort_request([aborted])
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = tuple(output.outputs[0].token_ids)
        step += 1
    return [finished[str(i)] for i in range(12) if str(i) != aborted]


def stop_strings(llm: LLM, requests: list[dict]) -> list:
    """A stop string from the middle of each answer, which ends it inside a draft or at its border."""
    texts = [output.outputs[0].text for output in generate(llm, requests[:8], [params(1)] * 8)]
    stops = [params(1, stop=[text[5:7] or "?"], include_stop_str_in_output=len(text) % 2 > 0) for text in texts]
    return [(output.outputs[0].text, output.outputs[0].stop_reason) for output in generate(llm, requests[:8], stops)]


def several_answers(llm: LLM, requests: list[dict]) -> list:
    """n > 1 is refused for greedy sampling, so the one best token is drawn at random."""
    settings = params(1, temperature=1.0, top_k=1, n=3)
    outputs = generate(llm, requests[:4], [settings] * 4)
    return [tuple(answer.token_ids) for output in outputs for answer in output.outputs]


def log_probabilities(llm: LLM, requests: list[dict]) -> list:
    outputs = generate(llm, requests[:4], [params(1, logprobs=3, prompt_logprobs=1)] * 4)
    return [
        [(token, entry[token].logprob) for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
        for output in outputs
        for answer in output.outputs
    ]


def structured(llm: LLM, requests: list[dict]) -> list:
    """A grammar between requests that have none."""
    regex = StructuredOutputsParams(regex="(yes|no|perhaps)( [a-z]{2,9}){2}")
    settings = [params(1, structured_outputs=regex if i % 2 else None) for i in range(8)]
    return [tuple(output.outputs[0].token_ids) for output in generate(llm, requests[:8], settings)]


def crowd(llm: LLM, requests: list[dict]) -> list:
    """Answers long enough to need more of the cache than they began with."""
    settings = params(1, max_tokens=100)
    return [tuple(output.outputs[0].token_ids) for output in generate(llm, requests[:10], [settings] * 10)]


SCENARIOS = {
    "alone": batch_of(1),
    "two": batch_of(2),
    "eight": batch_of(8),
    "32": batch_of(32),
    "joining and leaving": joining_and_leaving,
    "stop strings": stop_strings,
    "n > 1": several_answers,
    "logprobs": log_probabilities,
    "structured output": structured,
    "crowd": crowd,
}


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, float):
        return math.isclose(mine, theirs, abs_tol=1e-3)
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return mine == theirs


# --- the engines


@pytest.fixture(scope="module")
def laboratory(engine, tmp_path_factory, request):
    """Starts the engine of a topology, knows the results without a draft, and counts comparisons."""

    class Laboratory:
        def __init__(self):
            self.folders, self.known, self.compared = {"trained": TRAINED}, {}, Counter()

        def folder(self, topology: str):
            if topology not in self.folders:
                backbone, pattern = TOPOLOGIES[topology]
                config, tensors = salm_config(backbone, pattern), build_tensors(backbone, pattern=pattern)
                # A few loud tokens, so that a random draft is right from time to time.
                tensors["llm.lm_head.weight"][100:106] *= 6
                folder = tmp_path_factory.mktemp("topology")
                self.folders[topology] = build_checkpoint(folder, backbone, config, tensors)
            return self.folders[topology]

        def requests(self, topology: str) -> list[dict]:
            return speech_requests() if topology == "trained" else random_requests()

        def start(self, topology: str, drafts: int, **options: Any) -> LLM:
            speculation = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
            settings = {"dtype": "float32", "max_num_seqs": 32, "disable_log_stats": False, **options}
            return engine(self.folder(topology), speculative_config=speculation, **settings)

        def expected(self, topology: str) -> dict[str, list]:
            if topology not in self.known:
                llm = self.start(topology, 0)
                requests = self.requests(topology)
                self.known[topology] = {name: scenario(llm, requests) for name, scenario in SCENARIOS.items()}
            return self.known[topology]

        def compare(self, topology: str, llm: LLM, names) -> None:
            requests = self.requests(topology)
            for name in names:
                results, expected = SCENARIOS[name](llm, requests), self.expected(topology)[name]
                assert len(results) == len(expected)
                for index, (mine, theirs) in enumerate(zip(results, expected, strict=True)):
                    assert same(mine, theirs), f"{name}, result {index}: {mine} with the draft, {theirs} without"
                self.compared[name] += len(results)

    lab = Laboratory()
    yield lab
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    reporter.write_line(f"\n{lab.compared.total()} results compared with and without a draft: {dict(lab.compared)}")


def counted(llm: LLM, name: str) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


# Of the whole grid, what the ordinary tests run.
ORDINARY = {
    ("attention *", 5, "whole"),
    ("hybrid *", 4, "chunked"),
    ("hybrid *E", 3, "whole"),
    ("moe *E", 2, "chunked"),
    ("trained", 4, "whole"),
}
SCHEDULES = {"whole": {}, "chunked": {"max_num_batched_tokens": 96}}
GRID = [
    pytest.param(*point, id=f"{point[0]}-K={point[1]}-{point[2]}", marks=[] if point in ORDINARY else pytest.mark.grid)
    for point in ((t, k, s) for t in TOPOLOGIES for k in range(1, 9) for s in SCHEDULES)
]


@pytest.mark.parametrize(("topology", "drafts", "schedule"), GRID)
def test_a_draft_never_changes_a_result(laboratory, topology, drafts, schedule):
    laboratory.expected(topology)  # before the engine with the draft starts, since one runs at a time
    llm = laboratory.start(topology, drafts, **SCHEDULES[schedule])
    laboratory.compare(topology, llm, SCENARIOS)
    assert 0 < counted(llm, "spec_decode_num_accepted_tokens") < counted(llm, "spec_decode_num_draft_tokens")


@pytest.mark.parametrize(
    ("topology", "drafts"),
    [
        pytest.param(t, k, marks=[] if (t, k) == ("hybrid *", 3) else pytest.mark.grid)
        for t in TOPOLOGIES
        for k in (1, 3, 8)
    ],
)
def test_nor_when_requests_are_preempted(laboratory, topology, drafts):
    """The cache holds about two sequences, so others are thrown out and start again."""
    laboratory.expected(topology)
    small = {"max_model_len": 256, "block_size": 64, "num_gpu_blocks_override": 2 * (5 + drafts)}
    llm = laboratory.start(topology, drafts, **small)
    laboratory.compare(topology, llm, ["crowd"])
    assert counted(llm, "num_preemptions") > 0


def test_a_differing_token_in_bfloat16_is_a_tie(laboratory):
    """Batches of other shapes round differently; where that changes a token, the two were equally likely."""
    requests, settings = speech_requests()[:12], [params(1, max_tokens=64, ignore_eos=False, logprobs=2)] * 12
    results = []
    for drafts in (0, 4):
        llm = laboratory.start("trained", drafts, dtype="bfloat16")
        results.append([output.outputs[0] for output in generate(llm, requests, settings)])
    for plain, drafted in zip(*results, strict=True):
        differing = [
            i for i, pair in enumerate(zip(plain.token_ids, drafted.token_ids, strict=False)) if pair[0] != pair[1]
        ]
        if differing:
            best, second = sorted((entry.logprob for entry in plain.logprobs[differing[0]].values()), reverse=True)[:2]
            assert best - second < 0.1, (plain.text, drafted.text)
        else:
            assert plain.token_ids == drafted.token_ids


def test_sampled_text_has_the_targets_distribution(laboratory):
    """How often each triple of tokens is drawn, of the four likeliest at each place, against the target's own odds."""
    (request,), temperature, width = random_requests()[:1], 2.0, 4
    llm = laboratory.start("hybrid *", 0)
    ids = llm.get_tokenizer().encode(request["prompt"])
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        prompts = [{**request, "prompt_token_ids": [*ids, *triple]} for triple in expected]
        for p in prompts:
            del p["prompt"]
        outputs = generate(llm, prompts, [params(0, max_tokens=1, logprobs=width)] * len(prompts))
        longer = {}
        for (triple, odds), output in zip(expected.items(), outputs, strict=True):
            entries = sorted(output.outputs[0].logprobs[0].items(), key=lambda item: item[1].logprob)[-width:]
            shares = torch.tensor([entry.logprob / temperature for _, entry in entries]).softmax(0).tolist()
            longer |= {(*triple, token): odds * share for (token, _), share in zip(entries, shares, strict=True)}
        expected = longer

    llm = laboratory.start("hybrid *", 3)
    settings = [
        SamplingParams(temperature=temperature, top_k=width, max_tokens=3, ignore_eos=True, n=64, seed=1000 * i)
        for i in range(32)
    ]
    outputs = generate(llm, [request] * len(settings), settings)
    drawn = Counter(tuple(answer.token_ids) for output in outputs for answer in output.outputs)
    assert counted(llm, "spec_decode_num_accepted_tokens") > 0
    assert set(drawn) <= set(expected)
    total = drawn.total()
    common = [triple for triple, odds in expected.items() if odds * total >= 5]  # as the test's approximation needs
    rest = total - sum(drawn[triple] for triple in common), total * (1 - sum(expected[triple] for triple in common))
    observed = [*(drawn[triple] for triple in common), rest[0]]
    wanted = [*(total * expected[triple] for triple in common), rest[1]]
    assert chisquare(observed, wanted).pvalue > 0.001
