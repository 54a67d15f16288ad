"""Measurements become evidence: thresholds fixed in the plan, one verdict each, and the reasons.

The judge is pure and fails closed: a measurement that is absent, of another type or not finite is never a pass.
Nothing here measures anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from quantmint.artifact import Digest, RelPath
from quantmint.document import Document

Scalar = bool | int | float | str
MAX_SHOWN_BITS = 1000


class Verdict(StrEnum):
    """The verdict of a gate."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    INCONCLUSIVE = "INCONCLUSIVE"
    ANOMALOUS = "ANOMALOUS"
    NOT_RUN = "NOT_RUN"


class Threshold(Document):
    """One locked acceptance line: `measurement` `op` `value`."""

    measurement: str
    op: Literal["==", ">=", "<="]
    value: Scalar


class Finding(Document):
    """Something noticed, with a stable code; expected bad news, never an exception."""

    code: str
    message: str
    file: str | None = None
    expected: str | None = None
    actual: str | None = None


class EvidenceFile(Document):
    """A raw evidence file of the package, by digest."""

    path: RelPath
    size: int
    digest: Digest


class Evidence(Document):
    """Measurement + threshold + verdict + where: what a gate found on a target."""

    gate: str
    target: str
    verdict: Verdict
    reasons: tuple[str, ...]
    thresholds: tuple[Threshold, ...]
    measurements: dict[str, Scalar]
    environment: dict[str, Scalar]
    files: tuple[EvidenceFile, ...]
    stage_key: Digest | None = None


def judge(thresholds: tuple[Threshold, ...], measurements: Mapping[str, Scalar]) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict on `measurements` and a line for each threshold that does not hold.

    No thresholds, or a measurement that is missing, not finite (an integer beyond the doubles is none) or not
    comparable: ANOMALOUS. Otherwise FAILED when
    any threshold does not hold, else PASSED.
    """
    if not thresholds:
        return Verdict.ANOMALOUS, ("no acceptance was declared",)
    anomalies: list[str] = []
    failures: list[str] = []
    for threshold in thresholds:
        name, value = threshold.measurement, measurements.get(threshold.measurement)
        if value is None:
            anomalies.append(f"{name}: not measured")
        elif not _comparable(value, threshold.value):
            anomalies.append(f"{name}: {_shown(value)} cannot be compared with {_shown(threshold.value)}")
        elif not _holds(threshold.op, value, threshold.value):
            failures.append(f"{name}: {value!r}, accepted {threshold.op} {threshold.value!r}")
    if anomalies:
        return Verdict.ANOMALOUS, (*anomalies, *failures)
    return (Verdict.FAILED, tuple(failures)) if failures else (Verdict.PASSED, ())


def _comparable(value: Scalar, wanted: Scalar) -> bool:
    if isinstance(value, bool) or isinstance(wanted, bool):
        return isinstance(value, bool) and isinstance(wanted, bool)
    if isinstance(value, str) or isinstance(wanted, str):
        return isinstance(value, str) and isinstance(wanted, str)
    return _finite(value) and _finite(wanted)


def _finite(value: float) -> bool:
    """Whether `value` is a number that a double could hold; an integer of 1.8e308 and beyond is none."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: Scalar) -> str:
    large = isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS
    return "an integer of more than 300 digits" if large else repr(value)


def _holds(op: str, value: Scalar, wanted: Scalar) -> bool:
    if op == "==" or isinstance(value, str) or isinstance(wanted, str):
        return op == "==" and value == wanted
    return value >= wanted if op == ">=" else value <= wanted
