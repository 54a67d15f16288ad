"""Documents: typos get a suggestion, hostile JSON is refused, canonical bytes are stable."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from quantmint.document import Document, author, canonical, parse_json
from quantmint.errors import CODES, Exit, ReleaseError
from quantmint.evidence import Threshold, Verdict, judge


class Inner(Document):
    layers: tuple[int, ...] = ()


class Outer(Document):
    name: str
    inner: dict[str, Inner] = Field(default_factory=dict)
    rows: tuple[Inner, ...] = ()


def code(text: str) -> ReleaseError:
    with pytest.raises(ReleaseError) as caught:
        author(Outer, text, file="x.toml")
    return caught.value


@pytest.mark.parametrize(
    ("text", "key", "near"),
    [
        ('name = "a"\nnmae = "b"', "nmae", "'name'"),
        ('name = "a"\n[inner.x]\nlayres = [1]', "inner.x.layres", "'layers'"),
        ('name = "a"\n[[rows]]\nlayer = [1]', "rows.0.layer", "'layers'"),
    ],
)
def test_a_typo_is_named_with_its_place_and_the_nearest_key(text: str, key: str, near: str) -> None:
    error = code(text)
    assert (error.code, error.actual) == ("UNKNOWN_KEY", key)
    assert f"did you mean {near}" in error.message


def test_a_wrong_type_is_named() -> None:
    error = code("name = 3")
    assert error.code == "INVALID_VALUE"
    assert "name" in error.message
    assert error.actual == "3"


def test_broken_toml_is_named() -> None:
    assert code("name = ").code == "RECIPE_SYNTAX"


@pytest.mark.parametrize(
    "data",
    [b'{"a":1,"a":2}', b'{"a":NaN}', b"\xff", b"{", b"[" * 100 + b"]" * 100, b"[" * 200_000, b'{"a":1}' + b" " * 100],
)
def test_hostile_json_is_refused(data: bytes) -> None:
    with pytest.raises(ReleaseError) as caught:
        parse_json(data, file="x.json", limit=100 if data.endswith(b" ") else 10**7)
    assert caught.value.file == "x.json"


def test_a_late_duplicate_in_a_large_object_is_found_in_linear_work() -> None:
    rows = ",".join(f'"k{number}":0' for number in range(200_000))
    with pytest.raises(ReleaseError) as caught:
        parse_json(("{" + rows + ',"k199999":1}').encode(), file="x.json")
    assert caught.value.code == "DUPLICATE_KEY"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_canonical_bytes_read_back_and_are_stable(value: object) -> None:
    data = canonical(value)  # type: ignore[arg-type]
    assert json.loads(data) == value
    assert canonical(json.loads(data)) == data


@given(st.sampled_from(["==", ">=", "<="]), st.integers(-5, 5), st.integers(-5, 5))
def test_the_judge_agrees_with_the_operators(op: str, value: int, wanted: int) -> None:
    threshold = Threshold(measurement="m", op=op, value=wanted)  # type: ignore[arg-type]
    holds = {"==": value == wanted, ">=": value >= wanted, "<=": value <= wanted}[op]
    assert judge((threshold,), {"m": value})[0] is (Verdict.PASSED if holds else Verdict.FAILED)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "0", True])
def test_what_was_not_measured_never_passes(value: object) -> None:
    measured = {} if value is None else {"m": value}
    verdict, reasons = judge((Threshold(measurement="m", op="<=", value=0),), measured)  # type: ignore[arg-type]
    assert verdict is Verdict.ANOMALOUS
    assert reasons


def test_no_acceptance_is_no_pass() -> None:
    assert judge((), {"m": 1})[0] is Verdict.ANOMALOUS


def test_every_code_exits_with_a_documented_code() -> None:
    assert {entry.exit_code for entry in CODES.values()} <= set(Exit) - {Exit.OK, Exit.BUG}
    assert all(entry.meaning.endswith(".") and entry.hint for entry in CODES.values())
