# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint will serve, from its config.json and the headers of its weights: for the doctor and the engine.

No tensor is read. What a checkpoint must hold is told by transformers' own model of the backbone and by our tower, both
built without memory (on PyTorch's meta device); names go through the tables that loading uses.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, NemotronHConfig, PretrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.initialization import no_init_weights

from nemo.collections.speechlm2.vllm.salm.config import NUM_EXTRA_ROWS, ConfigError, NeMoSpeechLMConfig
from nemo.collections.speechlm2.vllm.salm.lora import is_adapter, pair_adapters
from nemo.collections.speechlm2.vllm.salm.perception import NEMO_TO_PERCEPTION, AudioPerception
from nemo.collections.speechlm2.vllm.salm.weights import (
    EMBEDDING,
    HEAD,
    LAYOUT_RULES,
    NAME_RULES,
    NEMOTRON_H_RULES,
    OPTIONAL_BUFFERS,
    PACKED_EXPERTS,
)

INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".nemo")
_FLOATS = ("F64", "F32", "BF16", "F16")
_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}

# Where a tensor goes.
TOWER, BACKBONE, MTP, ADAPTERS = "audio tower", "backbone", "MTP head", "adapters, merged"
SET_ASIDE, IGNORED, UNMATCHED = "set aside", "ignored", "fits nothing"


@dataclass(frozen=True)
class Problem:
    """Why a checkpoint does not serve, and what to do; ``draft_only`` if it does, but without its MTP head."""

    what: str
    cure: str
    draft_only: bool = False


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of one tensor; ``dtype`` in its spelling (``BF16``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _BITS.get(self.dtype, 8) // 8


@dataclass
class Report:
    """What an inspection found: ``problems``, ``notes`` on what needs no cure, and ``facts`` ready for JSON."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def problem(self, what: str, cure: str, draft_only: bool = False) -> None:
        self.problems.append(Problem(what, cure, draft_only))

    def to_dict(self) -> dict[str, Any]:
        problems = [asdict(problem) for problem in self.problems]
        return {"serves": not problems, "problems": problems, "notes": self.notes, **self.facts}


def inspect_checkpoint(folder: Path, values: bool = False) -> Report:
    """Everything that can be told of a checkpoint without loading it.

    Args:
        folder: of config.json, tokenizer and weights.
        values: read the audio tower's tensors too, and report NaN and infinity in them.
    """
    report = Report(facts={"checkpoint": str(folder)})
    config = _read_config(folder, report)
    if config is None:
        _read_headers(folder, report)
        return report
    headers = check_weights(folder, config, report)
    _check_tokenizer(folder, config, report)
    if values:
        _check_values(folder, headers, report)
    return report


def require_servable(folder: Path, config: NeMoSpeechLMConfig, drafting: bool) -> None:
    """Refuse weights that do not fit ``config``, before anything is allocated for them.

    Args:
        drafting: the MTP head is wanted; else what is wrong with it is no reason.

    Raises:
        ValueError: with all problems.
    """
    report = Report()
    check_weights(folder, config, report)
    problems = [problem for problem in report.problems if drafting or not problem.draft_only]
    if problems:
        lines = [f"{folder} cannot be served:", *(f"* {problem.what} {problem.cure}" for problem in problems)]
        raise ValueError("\n".join(lines))


def _names(names: Iterable[str], most: int = 10) -> str:
    """The first of the names, for a message, and how many there are."""
    names = list(names)
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, ... (first {most} of {len(names)})"


# --- files


def _read_json(path: Path, report: Report) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        report.problem(f"{path.name} is not valid JSON: {error}.", "Correct it there.")
    except (OSError, UnicodeDecodeError) as error:
        report.problem(f"{path.name} cannot be read: {error}.", "Give the folder of a whole checkpoint.")
    else:
        if isinstance(content, dict):
            return content
        report.problem(f"{path.name} holds a {type(content).__name__}; expected an object.", "Export it again.")
    return None


def _read_config(folder: Path, report: Report) -> NeMoSpeechLMConfig | None:
    fields = _read_json(folder / "config.json", report)
    if fields is None:
        return None
    if (model_type := fields.get("model_type")) != NeMoSpeechLMConfig.model_type:
        report.problem(
            f"config.json: model_type is {model_type!r}; expected {NeMoSpeechLMConfig.model_type!r}.",
            "If this is a SALM, add it.",
        )
        return None
    try:
        return NeMoSpeechLMConfig.from_pretrained(folder)
    except ConfigError as error:
        for message in error.args:
            report.problem(f"config.json: {message}", "Correct config.json.")
    except (ValueError, TypeError, OSError) as error:  # transformers' own fields
        report.problem(f"config.json: {error}", "Correct config.json.")
    return None


def _read_headers(folder: Path, report: Report) -> tuple[dict[str, Header], bool]:
    """All tensors by name, from one file or from shards with or without an index; whether no file lacks."""
    files = sorted(folder.glob("*.safetensors"))
    index, complete = None, True
    if (folder / INDEX).exists():
        content = _read_json(folder / INDEX, report)
        if content is None:
            return {}, False
        index = content.get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
            report.problem(f"{INDEX}: weight_map is no object of file names.", "Export the index again.")
            return {}, False
        if absent := sorted(set(index.values()) - {path.name for path in files}):
            report.problem(f"{INDEX} names shards that are absent: {_names(absent)}.", "Copy them too.")
            complete = False
        if extra := [path.name for path in files if path.name not in index.values()]:
            report.notes.append(f"not in {INDEX}, and not loaded: {_names(extra)}")
        files = [path for path in files if path.name in index.values()]
    elif not files:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES) if folder.is_dir() else []
        report.problem(
            f"there are no weights (*.safetensors){f', only {_names(pickles)}' if pickles else ''}.",
            "Convert them to safetensors: pickled weights can run code, and are refused."
            if pickles
            else "Copy the weights too.",
        )
        complete = False
    headers: dict[str, Header] = {}
    homes: dict[str, list[str]] = defaultdict(list)
    unread: set[str] = set()
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no dict)
                    part = file.get_slice(name)
                    headers[name] = Header(name, tuple(part.get_shape()), part.get_dtype(), path)
                    homes[name].append(path.name)
        except (OSError, SafetensorError) as error:
            unread.add(path.name)
            complete = False
            report.problem(
                f"{path.name} cannot be read ({path.stat().st_size} bytes): {error}.",
                "Copy it again, or make it readable.",
            )
    if twice := [f"{name} ({', '.join(shards)})" for name, shards in homes.items() if len(shards) > 1]:
        report.problem(f"tensors that several files hold: {_names(twice)}.", "Keep one of each.")
    if index is not None:
        present = {path.name for path in files} - unread
        lost = [f"{name} ({shard})" for name, shard in index.items() if shard in present and shard not in homes[name]]
        if lost:
            report.problem(f"tensors that {INDEX} places in a shard without them: {_names(lost)}.", "Export it again.")
        if unlisted := [f"{name} ({homes[name][0]})" for name in headers if name not in index]:
            report.problem(f"tensors that {INDEX} does not list: {_names(unlisted)}.", "Export the index again.")
    return headers, complete


# --- what a checkpoint must hold


@dataclass
class _Experts:
    """A layer's routed experts: how many, and the shape (out, in) of each projection."""

    count: int
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def find(self, rest: str) -> tuple[list[str], list[tuple[int, ...]]] | None:
        """What the tensor ``<layer>.experts.<rest>`` stands for, and the shapes it may have."""
        if rest in PACKED_EXPERTS:
            down = rest.startswith("down")
            parts = [name for name in self.shapes if (name == "down_proj") is down]
            out, inner = self.shapes[parts[0]]
            shapes: list[tuple[int, ...]] = [
                (self.count, len(parts) * out, inner),
                (self.count, inner, len(parts) * out),
            ]
            return [name for name in self.names if name.split(".")[1] in parts], shapes
        projection = rest.removesuffix(".weight").partition(".")[2]
        return ([rest], [self.shapes[projection]]) if rest in self.names else None

    @cached_property
    def names(self) -> dict[str, None]:
        """Of one tensor per expert and projection; the keys of a dict, to keep their order."""
        return dict.fromkeys(f"{number}.{part}.weight" for number in range(self.count) for part in self.shapes)


class _Expected:
    """A model's tensors: shapes of single ones by name, and routed experts by the layer that holds them."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.experts: dict[str, _Experts] = {}

    def add(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
        """Take a model's tensors; transformers' experts of a layer are (experts, out, in), a gate first in out."""
        for name, tensor in tensors.items():
            layer, _, projection = name.rpartition(".")
            if tensor.ndim == 3 and layer.endswith(".experts") and projection in PACKED_EXPERTS:
                experts, out, inner = tensor.shape
                parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
                group = self.experts.setdefault(f"{prefix}{layer}", _Experts(experts))
                group.shapes.update(dict.fromkeys(parts, (out // len(parts), inner)))
            else:
                self.shapes[f"{prefix}{name}"] = tuple(tensor.shape)

    def find(self, place: str) -> tuple[list[str], list[tuple[int, ...]]] | None:
        """The parameters that the tensor of this name fills, and the shapes it may have."""
        if place in self.shapes:
            return [place], [self.shapes[place]]
        layer, _, rest = place.partition(".experts.")
        if (experts := self.experts.get(f"{layer}.experts")) and (found := experts.find(rest)):
            return [f"{layer}.experts.{name}" for name in found[0]], found[1]
        return None

    def names(self) -> Iterator[str]:
        yield from self.shapes
        for layer, experts in self.experts.items():
            yield from (f"{layer}.{name}" for name in experts.names)

    def num_values(self, prefix: str = "") -> int:
        """How many numbers the tensors hold whose names start with ``prefix``."""
        places = [(name, self.find(name)) for name in self.names() if name.startswith(prefix)]
        return sum(math.prod(found[1][0]) for _, found in places if found)


def _meta_tensors(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """The tensors of transformers' model of a backbone, under the engine's names."""
    with torch.device("meta"), no_init_weights():
        tensors = AutoModelForCausalLM.from_config(copy.deepcopy(config)).state_dict()
    return {name.replace("model.embeddings.", "model.embed_tokens."): tensor for name, tensor in tensors.items()}


def _mtp_tensors(config: PretrainedConfig, pattern: str) -> dict[str, torch.Tensor]:
    """The tensors of one MTP head: modules as those of the backbone, and what joins them to it."""
    modules = copy.deepcopy(config)
    modules.layer_types = NemotronHConfig._pattern_to_list(pattern)
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in _meta_tensors(modules).items()
        if name.startswith("model.layers.")
    }
    width, last = config.hidden_size, len(pattern) - 1
    for name in ("layers.0.enorm", "layers.0.hnorm", f"layers.{last}.final_layernorm"):
        tensors[f"{name}.weight"] = torch.empty(width, device="meta")
    tensors["layers.0.eh_proj.weight"] = torch.empty(width, 2 * width, device="meta")
    return tensors


def _why_unknown(config: PretrainedConfig) -> str | None:
    """Why transformers' model does not tell the names that a backbone's tensors have in a checkpoint."""
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return "transformers has no such model"
    for rule in get_checkpoint_conversion_mapping(config.model_type) or ():
        ordinary = all(re.search(r"experts\.\*\.(gate|up|down)_proj\.weight$", name) for name in rule.source_patterns)
        if not ordinary and rule.source_patterns != ["backbone."]:
            return "transformers renames them while loading"
    return None


# --- weights

_DESCRIBES = "Export the checkpoint again, or correct config.json: it must describe these weights."


class _Comparison:
    """Takes a checkpoint's tensors one by one, under a plain export's names, and compares them with the model's."""

    def __init__(self, config: NeMoSpeechLMConfig, quantized: bool, report: Report):
        self.config, self.report, self.quantized = config, report, quantized
        backbone, mtp = config.text_config, config.mtp_config
        self.hybrid = isinstance(backbone, NemotronHConfig)
        self.rules = NAME_RULES | NEMOTRON_H_RULES if self.hybrid else NAME_RULES
        self.expected = _Expected()
        with torch.device("meta"), no_init_weights():
            self.expected.add(AudioPerception(config.perception_config).state_dict(), "perception.")
        # Prefixes of tensors that cannot be compared, with the reason; and of the MTP head's, for a draft only.
        self.unknown: dict[str, str] = {}
        if why := _why_unknown(backbone):
            self.unknown["language_model."] = why
        else:
            try:
                self.expected.add(_meta_tensors(backbone), "language_model.")
            except Exception as error:  # of any kind, from transformers' models
                report.problem(f"llm_config makes no {backbone.model_type}: {error}.", "Correct llm_config.")
                self.unknown["language_model."] = "the model cannot be built"
            if any(
                len({s if p != "down_proj" else s[::-1] for p, s in e.shapes.items()}) > 1
                for e in self.expected.experts.values()
            ):
                self.unknown["language_model."] = "transformers packs its experts in an order of its own"
        self.drafts = mtp is not None and self.hybrid
        if mtp is not None and self.hybrid:
            self.expected.add(_mtp_tensors(backbone, mtp.pattern), "llm.mtp.")
        elif mtp is not None:
            report.problem(
                f"mtp: the backbone is {backbone.model_type}; vLLM runs MTP heads made of NemotronH modules only.",
                "Serve without a draft, and set mtp.enabled to false.",
                draft_only=True,
            )
        self.filled: dict[str, list[str]] = defaultdict(list)
        self.sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.dtypes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.rows: dict[str, int] = {}
        self.unchecked: dict[str, int] = defaultdict(int)
        # Of the target, and of the draft.
        self.wrong: dict[tuple[str, bool], list[str]] = defaultdict(list)

    def take(self, name: str, header: Header, adapters: Sequence[Header]) -> None:
        for found in (header, *adapters):
            self._count(self.dtypes[found.dtype], found)
        for found in adapters:
            self._count(self.sizes[ADAPTERS], found)
        plain = LAYOUT_RULES.map_name(name) or name
        mtp = plain.startswith("llm.mtp.")
        place = self.rules.map_name(plain.removeprefix("llm.mtp.") if mtp else plain)
        if place is None or (mtp and not self.drafts):
            self._count(self.sizes[SET_ASIDE if mtp else IGNORED], header)
            return
        place = f"llm.mtp.{place}" if mtp else place
        self._count(self.sizes[self._compare(place, header, adapters)], header)

    @staticmethod
    def _count(size: list[int], header: Header) -> None:
        size[0] += 1
        size[1] += header.num_bytes

    def _compare(self, place: str, header: Header, adapters: Sequence[Header]) -> str:
        """Note what is wrong with one tensor; return where it goes."""
        mtp = place.startswith("llm.mtp.")
        part = next((part for prefix, part in _PARTS.items() if place.startswith(prefix)), UNMATCHED)
        if place in (EMBEDDING, HEAD) and header.shape:
            self.rows[place] = header.shape[0]
        if why := next((why for prefix, why in self.unknown.items() if place.startswith(prefix)), None):
            self.unchecked[why] += 1
            return part
        found = self.expected.find(place)
        if self._is_quantized(place, found[1][0] if found else None):
            self.unchecked["it is quantized"] += 1
            for name in found[0] if found else ():
                self.filled[name].append(header.name)
            return part
        if found is None:
            index = re.match(r"llm\.mtp\.layers\.(\d+)\.", place)
            steps = len(self.config.mtp_config.pattern) if mtp and self.config.mtp_config else 0
            self.wrong["stray head" if index and int(index[1]) >= steps else "stray", mtp].append(header.name)
            return UNMATCHED
        places, shapes = found
        for name in places:
            self.filled[name].append(header.name)
        shape, whole = header.shape, shapes[0]
        if place in (EMBEDDING, HEAD) and len(shape) == 2 and 0 < shape[0] <= whole[0]:
            whole = (shape[0], whole[1])  # the rest is padding
            shapes = [whole]
        if shape not in shapes:
            accepted = f"at most {whole}" if place in (EMBEDDING, HEAD) else " or ".join(map(str, shapes))
            self.wrong["shape", mtp].append(f"{header.name} {shape}, expected {accepted}")
        elif adapters and self.config.lora:
            try:
                self.config.lora.check(header.name.removesuffix(".weight"), shape, *(part.shape for part in adapters))
            except ValueError as error:
                self.wrong["lora", mtp].append(str(error))
        for tensor in (header, *adapters):
            if tensor.dtype not in _FLOATS and not place.endswith(".num_batches_tracked"):
                self.wrong["dtype", mtp].append(f"{tensor.name} {tensor.dtype}")
        return part

    def _is_quantized(self, place: str, shape: tuple[int, ...] | None) -> bool:
        """Whether a tensor may be of a quantized layer, of whose shapes and types only vLLM knows."""
        inside = place.startswith(("language_model.", "llm.mtp."))
        return self.quantized and inside and (shape is None or (len(shape) > 1 and place not in (EMBEDDING, HEAD)))

    def finish(self, complete: bool) -> None:
        """Report what is wrong; what is missing only if the checkpoint's files are ``complete``."""
        report = self.report
        for place in (name for name in self.expected.names() if complete and name not in self.filled):
            found = self.expected.find(place)
            other = {EMBEDDING: HEAD, HEAD: EMBEDDING}.get(place)
            if not (
                place.endswith(OPTIONAL_BUFFERS)
                or other in self.filled
                or any(place.startswith(prefix) for prefix in self.unknown)
                or self._is_quantized(place, found[1][0] if found else None)
            ):
                self.wrong["missing", place.startswith("llm.mtp.")].append(_checkpoint_name(place))
        for place, names in self.filled.items():
            if len(names) > 1:
                self.wrong["double", place.startswith("llm.mtp.")].append(" and ".join(names))
        for (kind, mtp), names in self.wrong.items():
            head = " of the MTP head" if mtp else ""
            cure = _DESCRIBES if not mtp else f"{_DESCRIBES} Or set mtp.enabled to false to serve without a draft."
            report.problem(_KINDS[kind].format(head=head, names=_names(dict.fromkeys(names))), cure, mtp)
        if len(set(self.rows.values())) > 1:
            report.problem(
                f"the embedding table has {self.rows[EMBEDDING]} rows and the head (lm_head) {self.rows[HEAD]}.",
                "Export both with the same vocabulary.",
            )
        for why, count in self.unchecked.items():
            report.notes.append(f"{count} tensors of the backbone were not checked: {why}")
        if SET_ASIDE in self.sizes:
            report.notes.append("the checkpoint holds llm.mtp.* tensors, but no MTP head that can be used: set aside")

    def facts(self, dtype: torch.dtype) -> dict[str, Any]:
        config, backbone, tower, mtp = (
            self.config, self.config.text_config, self.config.perception_config, self.config.mtp_config,
        )  # fmt: skip
        table, rows = backbone.vocab_size, max(self.rows.values(), default=None)
        heads = [problem.what for problem in self.report.problems if problem.draft_only]
        values = self.expected.num_values()
        if len(self.rows) == 1 or backbone.tie_word_embeddings:
            values -= math.prod(self.expected.shapes.get(HEAD, (0,)))
        sizes = {place: {"tensors": n, "bytes": size} for place, (n, size) in self.sizes.items()}
        return {
            "backbone": {
                "class": (backbone.architectures or [type(backbone).__name__])[0],
                "layers": backbone.num_hidden_layers,
                "hidden_size": backbone.hidden_size,
                "pattern": backbone.hybrid_override_pattern if self.hybrid else None,
                "parameters": self.expected.num_values("language_model.") or None,
            },
            "tower": {
                "layers": tower.encoder.num_layers,
                "hidden_size": tower.encoder.hidden_size,
                "mels": tower.mel.num_mels,
                "adapter_layers": tower.adapter.num_layers if tower.adapter else 0,
                "parameters": self.expected.num_values("perception."),
                "tokens_per_second": tower.sampling_rate / tower.hop_length / tower.encoder.subsampling_factor,
                "chunk_seconds": config.encoder_chunk_size_seconds,
            },
            "vocabulary": {
                "backbone_rows": table - NUM_EXTRA_ROWS,
                "checkpoint_rows": rows,
                "table_rows": table,
                "padding_rows": None if rows is None else max(table - rows, 0),
            },
            "lora": config.lora and {
                "rank": config.lora.rank, "alpha": config.lora.alpha, "pairs": self.sizes[ADAPTERS][0] // 2
            },
            "mtp": mtp and {
                "heads": mtp.num_nextn_predict_layers,
                "repeated": mtp.use_repeated_layer,
                "pattern": mtp.pattern,
                "drafts": not heads,
            },
            "tensors": sizes,
            "dtypes": {name: {"tensors": n, "bytes": size} for name, (n, size) in self.dtypes.items()},
            "loaded_bytes": values * dtype.itemsize,
        }  # fmt: skip


_PARTS = {"perception.": TOWER, "language_model.": BACKBONE, "llm.mtp.": MTP}
_KINDS = {
    "missing": "tensors{head} are missing: {names}.",
    "stray": "tensors fit nothing in the model{head}: {names}.",
    "stray head": "tensors are of further MTP heads than the one that vLLM executes again for each token: {names}.",
    "shape": "tensors{head} have another shape: {names}.",
    "dtype": "tensors{head} are of a type that no weight has (accepted: F32, BF16, F16, F64): {names}.",
    "double": "parameters{head} have several tensors each: {names}.",
    "lora": "{names}",
}


def _checkpoint_name(place: str) -> str:
    """The name in a plain export of what is ``place`` in the engine."""
    if place.startswith("perception."):
        for nemo, ours in NEMO_TO_PERCEPTION.items():
            place = place.replace(ours, nemo)
    return re.sub(r"^language_model\.", "llm.", place)


def check_weights(folder: Path, config: NeMoSpeechLMConfig, report: Report) -> dict[str, Header]:
    """Compare the headers in ``folder`` with what ``config`` asks for; fill ``report``, and return the headers."""
    headers, complete = _read_headers(folder, report)
    quantized = (folder / "hf_quant_config.json").exists() or any(
        getattr(part, "quantization_config", None) for part in (config, config.text_config)
    )
    comparison = _Comparison(config, quantized, report)
    weights = headers
    if config.lora is None and (adapters := [name for name in headers if is_adapter(name)]):
        report.problem(
            f"tensors are LoRA adapters', but config.json has no lora: {_names(adapters)}.",
            "Add lora with its r and lora_alpha, or merge before the export.",
        )
        weights = {name.replace(".base_layer.", "."): headers[name] for name in headers.keys() - set(adapters)}
    left = dict(weights)
    try:
        for name, header, pair in pair_adapters(weights.items(), config.lora):
            for taken in (header, *(pair or ())):
                left.pop(taken.name, None)
            comparison.take(name, header, pair or ())
    except ValueError as error:
        report.problem(str(error), "")
        for name, header in left.items():
            if not is_adapter(name):
                comparison.take(name, header, ())
    comparison.finish(complete)
    sizes = {name: bits for name, (_, bits) in comparison.dtypes.items() if name in _FLOATS}
    main = {"F64": "float64", "F32": "float32", "F16": "float16"}.get(
        max(sizes, key=sizes.__getitem__, default=""), "bfloat16"
    )
    report.facts |= comparison.facts(config.dtype or getattr(torch, main))
    if config.lora and not comparison.sizes[ADAPTERS][0]:
        report.notes.append("lora is given, but there are no adapters: taken for merged")
    return headers


# --- tokenizer and values


def _check_tokenizer(folder: Path, config: NeMoSpeechLMConfig, report: Report) -> None:
    AutoConfig.register(NeMoSpeechLMConfig.model_type, NeMoSpeechLMConfig, exist_ok=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any kind, from the tokenizers' parsers
        report.problem(
            f"the tokenizer cannot be read from {folder.name}/: {error}.",
            "Copy tokenizer.json and tokenizer_config.json of the backbone into the checkpoint.",
        )
        return
    ids = tokenizer.get_vocab()
    try:
        config.find_locator(tokenizer)
    except ValueError as error:
        report.problem(str(error), "")
    vocabulary = report.facts["vocabulary"]
    rows = vocabulary["checkpoint_rows"]
    beyond = (
        sorted(name for name, number in ids.items() if number >= rows and name != config.audio_locator_tag)
        if rows
        else []
    )
    if beyond and rows < vocabulary["backbone_rows"]:
        report.problem(
            f"the tokenizer has {len(beyond)} tokens without a row in the embedding table of {rows} rows: "
            f"{_names(beyond)}.",
            "Export the whole table, or copy the tokenizer of this backbone.",
        )
    if tokenizer.chat_template is None:
        report.notes.append("no chat template: chat requests need vLLM's --chat-template")


def _check_values(folder: Path, headers: Mapping[str, Header], report: Report) -> None:
    bad = []
    for path in sorted({header.path for header in headers.values()}):
        with safe_open(path, framework="pt") as file:
            bad += [
                name
                for name, header in headers.items()
                if header.path == path and name.startswith("perception.") and not file.get_tensor(name).isfinite().all()
            ]
    if bad:
        report.problem(f"tensors hold NaN or infinity: {_names(bad)}.", "Export a checkpoint that did not diverge.")
