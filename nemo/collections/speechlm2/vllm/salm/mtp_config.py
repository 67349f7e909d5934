# SPDX-License-Identifier: Apache-2.0
"""The multi-token-prediction (MTP) fields of a checkpoint: where they stand, and what they may hold."""

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
            ValueError: a field is missing or of the wrong kind, or the pattern holds another symbol.
        """
        block = root.get("mtp")
        explicit = block is not None
        if explicit:
            if not isinstance(block, Mapping):
                raise ValueError(f"mtp is {block!r}; expected a dict with enabled, num_nextn_predict_layers, "
                                 "use_repeated_layer and hybrid_override_pattern.")  # fmt: skip
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
        return cls(
            num_nextn_predict_layers=heads,
            use_repeated_layer=explicit and _flag(block, prefix, "use_repeated_layer", False),
            pattern=_pattern(root.get("mtp") or {}, backbone),
            explicit=explicit,
        )


def _flag(given: Mapping[str, Any], prefix: str, name: str, default: bool | None) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{prefix}{name} is {value!r}; expected true or false.")
    return value


def _pattern(block: Mapping[str, Any], backbone: Mapping[str, Any]) -> str:
    sources = {
        "mtp.hybrid_override_pattern": block.get("hybrid_override_pattern"),
        "llm_config.mtp_hybrid_override_pattern": backbone.get("mtp_hybrid_override_pattern"),
        "llm_config.mtp_layers_block_type": backbone.get("mtp_layers_block_type"),
    }
    field, found = next(((name, value) for name, value in sources.items() if value is not None), (None, None))
    if field is None:
        raise ValueError(f"the MTP pattern is missing; expected one of {', '.join(sources)}.")
    symbols = {name: symbol for symbol, names in SYMBOLS.items() for name in (symbol, *names)}
    accepted = f"'*' or 'attention' or 'full_attention' (attention), 'E' or 'moe' (mixture of experts), not {found!r}"
    if not isinstance(found, str | list) or not found:
        raise ValueError(f"{field} must be a non-empty string or list of {accepted}.")
    unknown = [repr(part) for part in found if not isinstance(part, str) or part not in symbols]
    if unknown:
        raise ValueError(f"{field} holds {', '.join(unknown)}; it must be made of {accepted}.")
    return "".join(symbols[part] for part in found)
