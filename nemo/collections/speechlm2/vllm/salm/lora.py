# SPDX-License-Identifier: Apache-2.0
"""LoRA checkpoints: the adapters' settings, and their merge into the backbone while the weights stream by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, Protocol, TypeVar

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

    def may_adapt(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a tensor of the checkpoint may be the weight of a layer with adapters."""
        if len(shape) != 2 or ".layers." not in name or not name.endswith(".weight"):
            return False
        targets = self.target_modules or ("",)
        return any(fnmatchcase(name, f"*{target}.weight") for target in targets)

    def check(self, module: str, weight: Sequence[int], a: Sequence[int], b: Sequence[int]) -> None:
        """Raise ValueError unless adapters of the shapes ``a`` and ``b`` fit a weight of the shape ``weight``."""
        expected = (self.rank, *weight[1:]), (*weight[:1], self.rank)
        if len(weight) != 2 or (tuple(a), tuple(b)) != expected:
            raise ValueError(
                f"the LoRA adapters of {module}, whose weight is {tuple(weight)}, are A {tuple(a)} and B {tuple(b)}; "
                f"expected {expected[0]} and {expected[1]}. Does lora in config.json give their rank?"
            )

    def merge(self, module: str, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """``weight`` (out, in) plus the scaled product of b (out, rank) and a (rank, in), computed in float32."""
        self.check(module, weight.shape, a.shape, b.shape)
        return torch.addmm(weight.float(), b.float(), a.float(), alpha=self.alpha / self.rank).to(weight.dtype)


def is_adapter(name: str) -> bool:
    """Whether a tensor of this name is half of an adapter."""
    return _ADAPTER.fullmatch(name) is not None


class _Shaped(Protocol):
    """A tensor, or what a file's header says of one."""

    @property
    def shape(self) -> Sequence[int]: ...


T = TypeVar("T", bound=_Shaped)


def pair_adapters(
    weights: Iterable[tuple[str, T]], lora: LoRAConfig | None
) -> Iterator[tuple[str, T, tuple[T, T] | None]]:
    """Each weight with its adapters: (name, weight, (A, B)), or (name, weight, None) where there are none.

    The pairs of ``weights`` may come in any order. No more is held than the parts of modules that are still incomplete.
    PEFT marks a weight that has adapters by ``base_layer``; Automodel does not, so there one that
    ``lora.target_modules`` names waits for them.

    Raises:
        ValueError: an adapter lacks its other half or its weight (all are named, after the last pair), or ``lora`` is
            None.
    """
    waiting: dict[str, dict[str, tuple[str, T]]] = {}
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
        elif lora is not None and ".base_model." not in name and lora.may_adapt(name, tensor.shape):
            module, part = name.removesuffix(".weight"), "weight"
        else:
            yield name, tensor, None
            continue
        parts = waiting.setdefault(module, {})
        parts[part] = name, tensor
        if lora is not None and len(parts) == 3:
            weight, a, b = (waiting[module][part][1] for part in ("weight", "A", "B"))
            del waiting[module]
            yield f"{module}.weight", weight, (a, b)
    incomplete = []
    for parts in waiting.values():
        if set(parts) == {"weight"} and not parts["weight"][0].endswith(_BASE):
            yield *parts["weight"], None
        else:
            incomplete += [found for found, _ in parts.values()]
    if incomplete:
        raise ValueError(
            f"LoRA adapters that lack their other half or their weight: {', '.join(sorted(incomplete))}. Export all of "
            "lora_A, lora_B and the weight, or merge before the export."
        )


def merge_lora(
    weights: Iterable[tuple[str, torch.Tensor]], lora: LoRAConfig | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass (name, tensor) pairs on with adapters merged into their weights, in any order of the checkpoint.

    Raises:
        ValueError: as ``pair_adapters``, or adapters do not fit their weight.
    """
    for name, weight, adapters in pair_adapters(weights, lora):
        if lora is not None and adapters is not None:
            weight = lora.merge(name.removesuffix(".weight"), weight, *adapters)
        yield name, weight
