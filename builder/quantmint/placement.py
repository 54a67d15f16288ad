"""Which module is stored in which precision, and the exact tensors that follow.

A placement is total: what no rule names stays BF16. Pure; nothing here knows how a precision is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field

from quantmint import tiers
from quantmint.checkpoint import TensorSpec
from quantmint.document import Document
from quantmint.errors import ReleaseError
from quantmint.geometry import Geometry, ModelTensor, Role
from quantmint.tiers import Precision

LAYERS_PATTERN = r"^(all|[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*)$"
LayerRange = Annotated[str, Field(pattern=LAYERS_PATTERN, examples=["all", "1-5", "6,8-10"])]
"""`all`, or layer numbers and inclusive ranges separated by commas."""

Modules = Literal["routed-experts", "shared-expert", "attention", "dense-mlp"]
"""Roles whose weights can be quantized."""


class Rule(Document):
    """One line of a placement: these modules, in these layers, are stored in this precision."""

    modules: Modules
    layers: LayerRange = "all"
    precision: Precision


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the quantized checkpoint and where it comes from; `source` is None for a KV-cache scale."""

    spec: TensorSpec
    source: ModelTensor | None
    precision: Precision

    @property
    def copied(self) -> bool:
        """Whether its bytes are the source's."""
        return self.source is not None and self.precision is Precision.BF16


def layer_numbers(text: str) -> tuple[int, ...] | None:
    """The layers of a `LayerRange` in the order written; None for `all`.

    Raises:
        ReleaseError: INVALID_VALUE for another syntax, a range that runs backwards, or a layer named twice.
    """
    if text == "all":
        return None
    if not re.fullmatch(LAYERS_PATTERN, text):
        raise ReleaseError(
            "INVALID_VALUE", f"not a range of layers: {text!r}", expected="all, or like 1-5,7", actual=text
        )
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            raise ReleaseError("INVALID_VALUE", f"the range {part} runs backwards", expected="first-last", actual=part)
        found.extend(numbers)
    if len(set(found)) != len(found):
        raise ReleaseError("INVALID_VALUE", f"a layer stands twice in {text}", actual=text)
    return tuple(found)


@dataclass(frozen=True)
class Placement:
    """(role, layer) → precision for every module that can be quantized."""

    geometry: Geometry
    precisions: Mapping[tuple[Role, int], Precision]
    kv_scales: bool = False

    @classmethod
    def of(cls, rules: Iterable[Rule], geometry: Geometry, *, kv_scales: bool = False) -> Placement:
        """The placement that `rules` describe on a model.

        Raises:
            ReleaseError: INVALID_VALUE when a rule names a layer that has no such module, or two rules name one module.
        """
        modules = {(tensor.role, tensor.layer) for tensor in geometry.tensors if tensor.layer is not None}
        placed: dict[tuple[Role, int], Precision] = {}
        for rule in rules:
            role = Role(rule.modules)
            present = sorted(layer for kind, layer in modules if kind is role and layer is not None)
            wanted = layer_numbers(rule.layers)
            for layer in present if wanted is None else wanted:
                if layer not in present:
                    raise ReleaseError(
                        "INVALID_VALUE",
                        f"placement: layer {layer} has no {rule.modules}",
                        expected=f"layers {compact(present)}",
                        actual=rule.layers,
                    )
                if (role, layer) in placed:
                    raise ReleaseError(
                        "INVALID_VALUE",
                        f"placement: {rule.modules} of layer {layer} are placed twice",
                        expected="each module in one rule",
                        actual=rule.layers,
                    )
                placed[role, layer] = rule.precision
        placement = cls(geometry, MappingProxyType(placed), kv_scales)
        placement.stored()
        return placement

    def precision(self, tensor: ModelTensor) -> Precision:
        """The precision of `tensor`; only 2-D weights are ever quantized."""
        if tensor.layer is None or len(tensor.shape) != 2:
            return Precision.BF16
        return self.precisions.get((tensor.role, tensor.layer), Precision.BF16)

    def stored(self) -> tuple[Stored, ...]:
        """Every tensor of the quantized checkpoint, in model order.

        With `kv_scales`, an F32 `k_scale` and `v_scale` follow the projections of each layer, as ModelOpt names them.
        """
        return self._stored

    @cached_property
    def _stored(self) -> tuple[Stored, ...]:
        found: list[Stored] = []
        for tensor in self.geometry.tensors:
            precision = self.precision(tensor)
            found.extend(Stored(spec, tensor, precision) for spec in tiers.modelopt(tensor.spec, precision))
            for letter in "kv":
                if self.kv_scales and tensor.name.endswith(f".self_attn.{letter}_proj.weight"):
                    name = f"{tensor.name.removesuffix('weight')}{letter}_scale"
                    found.append(Stored(TensorSpec(name, "F32", ()), None, Precision.FP8_W8A8))
        return tuple(found)

    def by_layer(self) -> dict[str, dict[str, str]]:
        """Module → precision → layers (compact), for people and for `quantization_recipe.json`."""
        table: dict[str, dict[str, list[int]]] = {}
        for (role, layer), precision in sorted(self.precisions.items()):
            table.setdefault(role.value, {}).setdefault(precision.value, []).append(layer)
        return {role: {name: compact(layers) for name, layers in row.items()} for role, row in table.items()}


def compact(layers: Iterable[int]) -> str:
    """Layer numbers as ascending ranges: `1-5,7`."""
    ordered = sorted(set(layers))
    ranges: list[list[int]] = []
    for layer in ordered:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
