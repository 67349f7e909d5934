# SPDX-License-Identifier: Apache-2.0
"""The multi-token-prediction (MTP) contract of a checkpoint: parsed, validated, described for a draft.

A *head* predicts one further token; it is one pass over a *pattern* of modules. vLLM builds the modules of one head and
applies them again for each further token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# One symbol per module of a head, with the names transformers has used for it.
SYMBOLS = {"*": ("full_attention", "attention"), "E": ("moe",)}


@dataclass(frozen=True)
class MTPConfig:
    """The MTP heads a checkpoint declares.

    ``pattern`` has one symbol per module of a head: ``*`` attention, ``E`` mixture of experts. ``explicit`` tells a
    root ``mtp`` block, whose ``num_nextn_predict_layers`` counts heads, from a legacy export, where that field of the
    backbone may count the modules of one head instead and only the tensors decide.
    """

    num_nextn_predict_layers: int
    use_repeated_layer: bool
    pattern: str
    explicit: bool

    @classmethod
    def from_dicts(cls, root: Mapping[str, Any], backbone: Mapping[str, Any]) -> MTPConfig | None:
        """Read config.json's ``root`` and its backbone's raw config; None when there are no heads, or they are off.

        Raises:
            ValueError: a field is missing or of the wrong kind, a module is of a kind that no head may have, root and
                backbone disagree, or the heads have weights of their own.
        """
        block = root.get("mtp")
        explicit = block is not None
        if explicit:
            if not isinstance(block, Mapping):
                raise ValueError(
                    f"mtp is {block!r}; expected a dict with enabled, num_nextn_predict_layers, use_repeated_layer and "
                    "hybrid_override_pattern."
                )
            enabled, prefix = _flag(block, "mtp.", "enabled", None), "mtp."
        else:
            block, prefix, enabled = backbone, "llm_config.", _flag(root, "", "compute_mtp", False)
        if not enabled:
            return None
        heads = block.get("num_nextn_predict_layers")
        if not isinstance(heads, int) or isinstance(heads, bool) or heads < 0:
            raise ValueError(f"{prefix}num_nextn_predict_layers is {heads!r}; expected a whole number of at least 0.")
        if heads == 0:
            return None
        repeated = explicit and _flag(block, prefix, "use_repeated_layer", False)
        if explicit and heads > 1 and not repeated:
            raise ValueError(
                f"mtp.num_nextn_predict_layers is {heads} with use_repeated_layer false: {heads} heads with weights of "
                "their own. vLLM executes one head and applies it again for each further token, so it cannot run "
                "these. Train with use_repeated_layer true, or set mtp.enabled to false to serve without a draft."
            )
        pattern = _pattern(block if explicit else {}, backbone)
        if explicit:
            # Exporters have written there: heads, physical heads (one, when repeated), and modules.
            count = backbone.get("num_nextn_predict_layers")
            if count not in (None, 0, 1, heads, len(pattern), heads * len(pattern)):
                raise ValueError(
                    f"mtp.num_nextn_predict_layers is {heads} but llm_config.num_nextn_predict_layers is {count!r}; "
                    "correct the one that does not match the llm.mtp.* tensors."
                )
        return cls(heads, repeated, pattern, explicit)


def _flag(given: Mapping[str, Any], prefix: str, name: str, default: bool | None) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{prefix}{name} is {value!r}; expected true or false.")
    return value


def _pattern(block: Mapping[str, Any], backbone: Mapping[str, Any]) -> str:
    sources = {"mtp.hybrid_override_pattern": block.get("hybrid_override_pattern")}
    # transformers writes a default topology into every NemotronH config; it means something beside a count only.
    if backbone.get("num_nextn_predict_layers") or not block:
        for name in ("mtp_hybrid_override_pattern", "mtp_layers_block_type"):
            sources[f"llm_config.{name}"] = backbone.get(name)
    found = {field: _symbols(field, value) for field, value in sources.items() if value is not None}
    if not found:
        raise ValueError(
            "the MTP pattern is missing; expected one of mtp.hybrid_override_pattern, "
            "llm_config.mtp_hybrid_override_pattern, llm_config.mtp_layers_block_type."
        )
    if len(set(found.values())) > 1:
        values = ", ".join(f"{field} is {pattern!r}" for field, pattern in found.items())
        raise ValueError(f"{values}; they must agree. Correct those that do not match the llm.mtp.* tensors.")
    return next(iter(found.values()))


def _symbols(field: str, given: Any) -> str:
    symbols = {name: symbol for symbol, names in SYMBOLS.items() for name in (symbol, *names)}
    accepted = f"'*' or 'attention' or 'full_attention' (attention), 'E' or 'moe' (mixture of experts), not {given!r}"
    if not isinstance(given, str | list) or not given:
        raise ValueError(f"{field} must be a non-empty string or list of {accepted}.")
    unknown = [repr(part) for part in given if not isinstance(part, str) or part not in symbols]
    if unknown:
        raise ValueError(f"{field} holds {', '.join(unknown)}; it must be made of {accepted}.")
    return "".join(symbols[part] for part in given)
