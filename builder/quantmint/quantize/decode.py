"""Stored weights back to numbers, in plain Python: how far a quantized matrix is from the matrix it was made of.

Slow and exact on purpose: it shares no code with the quantizer and needs neither torch nor numpy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import chain, repeat

from quantmint.tiers import NVFP4_GROUP

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each 4-bit code."""
NOT_FINITE = 1e30
"""Told as the error of a matrix that holds a value which is no finite number, or of one that should be zero."""

_PAIRS = tuple((E2M1[byte & 15], E2M1[byte >> 4]) for byte in range(256))


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))


E4M3 = tuple(map(_e4m3, range(256)))
"""Value of each 8-bit code; there is no infinity, and two codes are no number."""


def bf16(data: bytes) -> tuple[float, ...]:
    """The numbers of little-endian BF16 `data`."""
    wide = bytearray(2 * len(data))
    wide[2::4], wide[3::4] = data[0::2], data[1::2]
    return struct.unpack(f"<{len(data) // 2}f", wide)


def f32(data: bytes) -> float:
    """The one number of little-endian F32 `data`."""
    (value,) = struct.unpack("<f", data)
    return float(value)


def nvfp4_error(weights: Sequence[float], codes: bytes, scales: bytes, scale: float) -> float:
    """Relative Frobenius error of rows in NVFP4: two e2m1 codes a byte, an E4M3 scale a group, one global `scale`."""
    values = list(chain.from_iterable(map(_PAIRS.__getitem__, codes)))
    return _error(weights, values, [E4M3[code] * scale for code in scales], NVFP4_GROUP)


def fp8_error(weights: Sequence[float], codes: bytes, scale: float) -> float:
    """Relative Frobenius error of rows in E4M3 with one `scale`."""
    size = NVFP4_GROUP
    return _error(weights, list(map(E4M3.__getitem__, codes)), list(repeat(scale, -(-len(codes) // size))), size)


def _error(weights: Sequence[float], values: Sequence[float], factors: Sequence[float], group: int) -> float:
    """‖W - Ŵ‖ / ‖W‖ summed in order, so that every machine finds the same number; `NOT_FINITE` when it is none."""
    wrong = whole = 0.0
    for number, factor in enumerate(factors):
        begin = number * group
        end = begin + group
        for weight, value in zip(weights[begin:end], values[begin:end], strict=True):
            difference = weight - factor * value
            wrong += difference * difference
            whole += weight * weight
    if whole == 0.0:
        return 0.0 if wrong == 0.0 else NOT_FINITE
    found = math.sqrt(wrong / whole)
    return found if math.isfinite(found) else NOT_FINITE
