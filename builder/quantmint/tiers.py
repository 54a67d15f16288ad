"""What a weight costs in each stored form, and which experts stay hot.

Exact tensors, bytes and bits per weight of BF16, FP8, NVFP4 (two layouts) and EXL3, and the tier map. Pure arithmetic:
nothing here reads a weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import prod
from typing import Annotated, Self

from pydantic import Field, model_validator

from quantmint.checkpoint import TensorSpec
from quantmint.document import Document
from quantmint.errors import ReleaseError

NVFP4_GROUP = 16
"""Weights along the input axis that share one E4M3 scale."""
EXL3_TILE = 16
"""Edge of an EXL3 tile; a tile of 256 weights at K bits takes 16·K int16."""
EXL3_BLOCK = 128
"""Edge of the Hadamard blocks; a slice must be a multiple of it on both axes."""


class Precision(StrEnum):
    """A stored form that a placement can ask for."""

    BF16 = "bf16"
    FP8_W8A8 = "fp8-w8a8"
    NVFP4_W4A16 = "nvfp4-w4a16"


NOMINAL_BITS: Mapping[Precision, int] = {Precision.BF16: 16, Precision.FP8_W8A8: 8, Precision.NVFP4_W4A16: 4}
"""Bits of a weight's own code, without its share of any scale."""


def _stem(tensor: TensorSpec) -> str:
    return tensor.name.removesuffix("weight")


def modelopt(tensor: TensorSpec, precision: Precision) -> tuple[TensorSpec, ...]:
    """What ModelOpt's exporter stores for a 2-D BF16 weight [out, in].

    BF16: itself. FP8: E4M3 [out, in], F32 `weight_scale` and `input_scale`. NVFP4 W4A16: two codes to a byte
    [out, in / 2], an E4M3 `weight_scale` [out, in / 16] and the F32 `weight_scale_2`.

    Raises:
        ReleaseError: INVALID_VALUE when the input axis does not fall into groups.
    """
    if precision is Precision.BF16:
        return (tensor,)
    stem = _stem(tensor)
    if precision is Precision.FP8_W8A8:
        return (
            TensorSpec(tensor.name, "F8_E4M3", tensor.shape),
            TensorSpec(f"{stem}weight_scale", "F32", ()),
            TensorSpec(f"{stem}input_scale", "F32", ()),
        )
    rows, columns = _grouped(tensor)
    return (
        TensorSpec(tensor.name, "U8", (rows, columns // 2)),
        TensorSpec(f"{stem}weight_scale", "F8_E4M3", (rows, columns // NVFP4_GROUP)),
        TensorSpec(f"{stem}weight_scale_2", "F32", ()),
    )


def _grouped(tensor: TensorSpec) -> tuple[int, int]:
    rows, columns = tensor.shape
    if columns % NVFP4_GROUP:
        raise ReleaseError(
            "INVALID_VALUE",
            f"{tensor.name} cannot be NVFP4: its input axis does not fall into groups",
            expected=f"a multiple of {NVFP4_GROUP}",
            actual=str(columns),
        )
    return rows, columns


def compressed(tensor: TensorSpec) -> tuple[TensorSpec, ...]:
    """What compressed-tensors' `nvfp4-pack-quantized` stores for a 2-D weight [out, in]: codes, scales, two globals."""
    rows, columns = _grouped(tensor)
    stem = _stem(tensor)
    return (
        TensorSpec(f"{stem}weight_packed", "U8", (rows, columns // 2)),
        TensorSpec(f"{stem}weight_scale", "F8_E4M3", (rows, columns // NVFP4_GROUP)),
        TensorSpec(f"{stem}weight_global_scale", "F32", ()),
        TensorSpec(f"{stem}input_global_scale", "F32", ()),
    )


def exl3(tensor: TensorSpec, *, bits: int, slices: int, codebook: str) -> tuple[TensorSpec, ...]:
    """What EXL3 stores for an expert's projection [out, in], cut into `slices` along the intermediate axis.

    Input first, for each slice `rank<r>`: trellis int16 [in / 16, out / 16, 16·bits], `suh` F16 [in], `svh` F16 [out]
    and the int32 multiplier of `codebook` (mcg or mul1; none for 3inst). The hidden axis is never cut.

    Raises:
        ReleaseError: INVALID_VALUE when a slice is not a multiple of 128 on both axes.
    """
    out, into = tensor.shape
    cut_input = tensor.name.endswith("down_proj.weight")
    into, out = (into // slices, out) if cut_input else (into, out // slices)
    if into % EXL3_BLOCK or out % EXL3_BLOCK or (into if cut_input else out) * slices not in tensor.shape:
        raise ReleaseError(
            "INVALID_VALUE",
            f"{tensor.name} cannot be cut into {slices} EXL3 slices",
            expected=f"slices of a multiple of {EXL3_BLOCK} on both axes",
            actual=str(list(tensor.shape)),
        )
    found = []
    for rank in range(slices):
        stem = f"{_stem(tensor)}rank{rank}."
        found += [
            TensorSpec(f"{stem}trellis", "I16", (into // EXL3_TILE, out // EXL3_TILE, EXL3_TILE * bits)),
            TensorSpec(f"{stem}suh", "F16", (into,)),
            TensorSpec(f"{stem}svh", "F16", (out,)),
        ]
        if codebook != "3inst":
            found.append(TensorSpec(f"{stem}{codebook}", "I32", ()))
    return tuple(found)


def nbytes(tensors: Sequence[TensorSpec]) -> int:
    """Bytes of `tensors` without headers."""
    return sum(tensor.nbytes for tensor in tensors)


def bits_per_weight(stored_bytes: int, weights: int) -> float:
    """Effective bits: everything stored for the weights, scales included, over their number."""
    return stored_bytes * 8 / weights


def weights_in(tensors: Sequence[TensorSpec]) -> int:
    """Number of elements of unquantized `tensors`."""
    return sum(prod(tensor.shape) for tensor in tensors)


class LayerTiers(Document):
    """The hot experts of one layer, ascending; all others are tail experts."""

    layer: Annotated[int, Field(ge=0)]
    hot: tuple[Annotated[int, Field(ge=0)], ...]

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if list(self.hot) != sorted(set(self.hot)):
            raise ValueError("hot experts must be ascending, each once")
        return self


class TierMap(Document):
    """Expert → precision tier, for every sparse layer; `tier_map.json` of a package."""

    experts: Annotated[int, Field(gt=0)]
    layers: tuple[LayerTiers, ...]

    @model_validator(mode="after")
    def _partition(self) -> Self:
        numbers = [entry.layer for entry in self.layers]
        if numbers != sorted(set(numbers)):
            raise ValueError("layers must be ascending, each once")
        if any(entry.hot and entry.hot[-1] >= self.experts for entry in self.layers):
            raise ValueError(f"a hot expert is not one of {self.experts}")
        return self

    @classmethod
    def choose(cls, scores: Mapping[int, Sequence[float]], hot: int) -> TierMap:
        """The map that keeps the `hot` best experts of each layer; `scores` is layer → one score per expert.

        Higher is better; of equal scores the lower expert number wins.

        Raises:
            ReleaseError: INVALID_VALUE for a score that is not finite, layers of unequal length, or too few experts.
        """
        counts = {len(values) for values in scores.values()}
        if len(counts) != 1 or not 0 <= hot <= min(counts):
            raise ReleaseError(
                "INVALID_VALUE",
                "scores do not fit the tiers",
                expected=f"at least {hot} experts, the same in each layer",
            )
        for layer, values in scores.items():
            if not all(map(math.isfinite, values)):
                raise ReleaseError("INVALID_VALUE", f"layer {layer}: a score is not finite")
        (experts,) = counts
        layers = []
        for layer in sorted(scores):
            ranked = sorted(range(experts), key=lambda expert, layer=layer: (-scores[layer][expert], expert))  # type: ignore[misc]
            layers.append(LayerTiers(layer=layer, hot=tuple(sorted(ranked[:hot]))))
        return cls(experts=experts, layers=tuple(layers))

    def hot(self, layer: int) -> tuple[int, ...]:
        """Hot experts of `layer`.

        Raises:
            KeyError: the map does not know the layer.
        """
        for entry in self.layers:
            if entry.layer == layer:
                return entry.hot
        raise KeyError(layer)

    def tail(self, layer: int) -> tuple[int, ...]:
        """Tail experts of `layer`: all that are not hot."""
        hot = set(self.hot(layer))
        return tuple(expert for expert in range(self.experts) if expert not in hot)
