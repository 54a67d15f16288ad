"""Documents: typos get a suggestion, hostile JSON is refused, canonical bytes are stable."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from quantmint.artifact import MAX_COMPONENTS, illegal_because
from quantmint.document import MAX_VALUES, Document, Received, author, author_value, canonical, parse_json, receive
from quantmint.errors import CODES, Exit, ReleaseError
from quantmint.evidence import Threshold, Verdict, judge


class Inner(Document):
    layers: tuple[int, ...] = ()


class Outer(Document):
    name: str
    inner: dict[str, Inner] = Field(default_factory=dict)
    rows: tuple[Inner, ...] = ()


class Free(Document):
    params: dict[str, Any] = Field(default_factory=dict)


class Spelled(Received):
    media_type: str = Field(alias="mediaType")


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
    ("text", "expected"),
    [
        ("[params]\nx = nan", "INVALID_VALUE"),
        ("[params]\nx = [inf]", "INVALID_VALUE"),
        ("[params]\nx = 9007199254740992", "INVALID_VALUE"),
        ("[params]\nx = 0x" + "f" * 5_000, "INVALID_VALUE"),
        ("[params]\nx = 2026-01-01", "INVALID_VALUE"),
        ("x = " + "1" * 5_000, "RECIPE_SYNTAX"),
        ("[params]\nx = " + "[" * 5_000 + "]" * 5_000, "RECIPE_SYNTAX"),
        ("[params]\nx = " + "[" * 100 + "]" * 100, "RECIPE_SYNTAX"),
        ("[params]\n" + ".".join("x" * 3_000) + " = 1", "RECIPE_SYNTAX"),
    ],
    ids=range(9),
)
def test_what_has_no_canonical_form_is_refused_where_anything_is_allowed(text: str, expected: str) -> None:
    with pytest.raises(ReleaseError) as caught:
        author(Free, text, file="x.toml")
    assert (caught.value.code, caught.value.file) == (expected, "x.toml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"params":{"x":NaN}}', "INVALID_VALUE"),
        ('{"params":{"x":"\\ud800"}}', "INVALID_VALUE"),
        ('{"params":{"x":1,"x":2}}', "DUPLICATE_KEY"),
        ('{"params":' + '{"x":' * 50_000 + "1" + "}" * 50_001, "RECIPE_SYNTAX"),
        ("{", "RECIPE_SYNTAX"),
    ],
    ids=range(5),
)
def test_authored_json_is_refused_by_name(text: str, expected: str) -> None:
    with pytest.raises(ReleaseError) as caught:
        author(Free, text, file="x.json", syntax="json")
    assert (caught.value.code, caught.value.file) == (expected, "x.json")


def test_the_largest_numbers_that_are_exact_are_kept() -> None:
    params = {"x": 2**53 - 1, "y": -(2**53) + 1, "z": 1.7e308}
    assert author_value(Free, {"params": params}, file="x").params == params


def test_values_are_counted_before_anything_is_parsed() -> None:
    assert parse_json(b"[1,2,3]", file="x.json", values=3) == [1, 2, 3]
    for data in (b"[1,2,3,4]", b'{"a":[],"b":[]}', b"[,,, this is no JSON"):
        with pytest.raises(ReleaseError, match="too many values"):
            parse_json(data, file="x.json", values=3)
    with pytest.raises(ReleaseError, match="too many values"):
        receive(Spelled, b'{"mediaType":"a","b":[1,2]}', file="x.json", values=3)
    with pytest.raises(ReleaseError, match="too many values"):
        parse_json(b"[" + b"0," * MAX_VALUES + b"0]", file="x.json")


def test_a_header_of_very_many_tensors_is_no_bomb() -> None:
    row = b'"model.layers.%d.mlp.experts.0.up_proj.weight":{"dtype":"BF16","shape":[1,1],"data_offsets":[0,2]}'
    data = b"{" + b",".join(row % number for number in range(150_000)) + b"}"
    assert len(parse_json(data, file="x.safetensors")) == 150_000


def test_a_number_that_overflows_is_refused() -> None:
    with pytest.raises(ReleaseError, match="too large"):
        parse_json(b'{"a":1e400}', file="x.json")


def test_received_documents_have_one_spelling() -> None:
    assert receive(Spelled, b'{"mediaType":"a","later":1}', file="x.json").media_type == "a"
    with pytest.raises(ReleaseError) as caught:
        receive(Spelled, b'{"media_type":"a"}', file="x.json")
    assert caught.value.code == "MALFORMED_DOCUMENT"


def test_a_path_has_so_many_components() -> None:
    assert illegal_because("/".join("d" * MAX_COMPONENTS)) is None
    assert "components" in (illegal_because("/".join("d" * (MAX_COMPONENTS + 1))) or "")


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


@pytest.mark.parametrize(
    "value", [None, float("nan"), float("inf"), "0", True, 10**309, -(10**309), 1 << 20_000], ids=range(8)
)
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
