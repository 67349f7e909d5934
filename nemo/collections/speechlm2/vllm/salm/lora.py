# SPDX-License-Identifier: Apache-2.0
"""LoRA checkpoints: the adapters' settings, and their merge into the backbone while the weights stream by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

import torch

# PEFT's spelling of the rank and alpha, and Automodel's.
SPELLINGS = (("r", "lora_alpha"), ("dim", "alpha"))
# Variants that change the merged weight; none of them occurs in a public SALM.
_REFUSED = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "moe_rank_scaling")

_ADAPTER = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(\.\w+)?\.weight")
_BASE = ".base_layer.weight"


@dataclass(frozen=True)
class LoRAConfig:
    """The checkpoint's ``lora``: a weight W stands for ``W + alpha / rank * B A`` (Hu et al. 2021)."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...] = ()  # none: any linear layer

    @classmethod
    def from_dict(cls, lora: Any) -> LoRAConfig:
        """Parse either spelling.

        Raises:
            ValueError: it is no dict, has another spelling, or asks for a variant of LoRA.
        """
        if not isinstance(lora, Mapping):
            raise ValueError(f"lora is {lora!r}; expected a dict with the rank and alpha, or null.")
        if refused := [name for name in _REFUSED if lora.get(name)]:
            raise ValueError(
                f"lora.{refused[0]} is {lora[refused[0]]!r}; only plain LoRA is supported. Merge it before the export."
            )
        for rank, alpha in SPELLINGS:
            if rank in lora and alpha in lora:
                break
        else:
            raise ValueError(
                f"lora has the keys {sorted(lora)}; expected {' or '.join(f'{r} and {a}' for r, a in SPELLINGS)}."
            )
        if not isinstance(lora[rank], int) or isinstance(lora[rank], bool) or lora[rank] < 1:
            raise ValueError(f"lora.{rank} is {lora[rank]!r}; expected the adapters' rank, a positive integer.")
        if not isinstance(lora[alpha], Real) or isinstance(lora[alpha], bool):
            raise ValueError(f"lora.{alpha} is {lora[alpha]!r}; expected a number.")
        targets = lora.get("target_modules")
        # One string is PEFT's regular expression, or "all-linear".
        return cls(lora[rank], float(lora[alpha]), tuple(targets) if isinstance(targets, list | tuple) else ())

    def may_adapt(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the checkpoint may be the weight of a layer with adapters."""
        if tensor.ndim != 2 or ".layers." not in name or not name.endswith(".weight"):
            return False
        targets = self.target_modules or ("",)
        return any(fnmatchcase(name, f"*{target}.weight") for target in targets)

    def merge(self, module: str, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """``weight`` (out, in) plus the scaled product of b (out, rank) and a (rank, in), computed in float32."""
        expected = (self.rank, weight.shape[1]), (weight.shape[0], self.rank)
        if (a.shape, b.shape) != expected:
            raise ValueError(
                f"the LoRA adapters of {module}, whose weight is {tuple(weight.shape)}, are A {tuple(a.shape)} and B "
                f"{tuple(b.shape)}; expected {expected[0]} and {expected[1]}. Does lora in config.json give their rank?"
            )
        return torch.addmm(weight.float(), b.float(), a.float(), alpha=self.alpha / self.rank).to(weight.dtype)


def merge_lora(
    weights: Iterable[tuple[str, torch.Tensor]], lora: LoRAConfig | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass (name, tensor) pairs on with adapters merged into their weights, in any order of the checkpoint.

    No more is held than the parts of modules that are still incomplete. PEFT marks a weight that has adapters by
    ``base_layer``; Automodel does not, so there one that ``lora.target_modules`` names waits for them.

    Raises:
        ValueError: an adapter lacks its other half or its weight, has another rank or shape, or ``lora`` is None.
    """
    waiting: dict[str, dict[str, tuple[str, torch.Tensor]]] = {}
    for name, tensor in weights:
        adapter = _ADAPTER.fullmatch(name)
        if adapter:
            module, part = adapter["module"], adapter["half"]
            if lora is None:
                raise ValueError(
                    f"tensor {name} is a LoRA adapter's, but config.json has no lora; add its r and alpha."
                )
        elif name.endswith(_BASE):
            module, part = name.removesuffix(_BASE), "weight"
        elif lora is not None and ".base_model." not in name and lora.may_adapt(name, tensor):
            module, part = name.removesuffix(".weight"), "weight"
        else:
            yield name, tensor
            continue
        parts = waiting.setdefault(module, {})
        parts[part] = name, tensor
        if lora is not None and len(parts) == 3:
            weight, a, b = (waiting[module][part][1] for part in ("weight", "A", "B"))
            del waiting[module]
            yield f"{module}.weight", lora.merge(module, weight, a, b)
    incomplete = []
    for parts in waiting.values():
        if set(parts) == {"weight"} and not parts["weight"][0].endswith(_BASE):
            yield parts["weight"]
        else:
            incomplete += [found for found, _ in parts.values()]
    if incomplete:
        raise ValueError(
            f"LoRA adapters that lack their other half or their weight: {', '.join(sorted(incomplete))}. Export all of "
            "lora_A, lora_B and the weight, or merge before the export."
        )
