"""What the API gate calls a right answer: every fault is named, nothing else is one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmint.document import author
from quantmint.errors import ReleaseError
from quantmint.gates.api import (
    Answer,
    Expected,
    Probe,
    Probes,
    faults,
    measurements,
    numbered,
    own_probes,
    same_json,
    stable,
)
from quantmint.launch import LaunchRecipe

USER = ({"role": "user", "content": "x"},)
GOOD = Answer(200, content="yes", reasoning="", finish_reason="stop", prompt_tokens=9)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}}
CALL_A = {"name": "f", "arguments": {"a": 1}}
UNCOUNTED = replace(GOOD, prompt_tokens=None)
OTHER_ARGUMENTS = "the arguments of the call differ in value or type"
BROKEN_SCHEMA = "the JSON breaks its schema: '3' is not of type 'integer'"
LAUNCH = LaunchRecipe(
    target="cpu",
    served_model_name="m",
    context_length=64,
    max_num_seqs=1,
    reasoning_parser="p",
    chat_template_defaults={"enable_thinking": True},
)


def probe(kind="echo", form=None, **expected):
    return Probe(kind=kind, messages=USER, max_tokens=8, response_format=form, expected=Expected(**expected))


def call(arguments, name="f"):
    return replace(GOOD, content="", calls=((name, arguments),), finish_reason="tool_calls")


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (probe(), GOOD),
        (probe(content="yes", reasoning=False), GOOD),
        (probe(contains="e"), GOOD),
        (probe(prompt_tokens=9), GOOD),
        (probe(reasoning=True), replace(GOOD, reasoning="because")),
        (probe(finish_reason="length"), replace(GOOD, finish_reason="length")),
        (probe(tool_call={"name": "f", "arguments": {"a": 1, "b": "1"}}), call('{"b": "1","a": 1}')),
        (probe(form=FORM, json={"a": 3}), replace(GOOD, content=' {"a": 3}')),
        (probe(status=404), Answer(404)),
        (probe(content="an <think> in the prompt"), replace(GOOD, content="an <think> in the prompt")),
    ],
)
def test_a_right_answer_has_no_fault(asked, answer):
    assert faults(asked, answer) == []


@pytest.mark.parametrize(
    ("asked", "answer", "fault"),
    [
        (probe(content="yes"), replace(GOOD, content="yes "), "the text is not the expected one"),
        (probe(contains="no"), GOOD, "the text lacks the expected part"),
        (probe(prompt_tokens=10), GOOD, "9 prompt tokens reached the server, expected 10 or more"),
        (probe(prompt_tokens=1), UNCOUNTED, "None prompt tokens reached the server, expected 1 or more"),
        (probe(reasoning=True), replace(GOOD, reasoning=" \n"), "reasoning is empty"),
        (probe(reasoning=False), replace(GOOD, reasoning="x"), "reasoning is filled though thinking is off"),
        (probe(), replace(GOOD, content="a</think>b"), "content: holds the marker </think>"),
        (probe(), replace(GOOD, reasoning="<tool_call>"), "reasoning: holds the marker <tool_call>"),
        (probe(), replace(GOOD, finish_reason="length"), "finish_reason length, expected stop"),
        (probe(), replace(GOOD, finish_reason=None), "finish_reason None, expected stop"),
        (probe(), replace(call("{}"), finish_reason="stop"), "1 tool calls, expected none"),
        (probe(tool_call=CALL_A), replace(GOOD, finish_reason="tool_calls"), "0 tool calls, expected one"),
        (probe(tool_call={"name": "g", "arguments": {}}), call("{}"), "tool 'f', expected 'g'"),
        (probe(tool_call=CALL_A), call('{"a": "1"}'), OTHER_ARGUMENTS),
        (probe(tool_call=CALL_A), call('{"a": true}'), OTHER_ARGUMENTS),
        (probe(tool_call=CALL_A), call('{"a": 1'), OTHER_ARGUMENTS),
        (probe(form=FORM), replace(GOOD, content="{"), "the text is not JSON"),
        (probe(form=FORM), replace(GOOD, content='{"a": "3"}'), BROKEN_SCHEMA),
        (probe(json={"a": 3}), replace(GOOD, content='{"a": 3.0}'), "the JSON has other values"),
        (probe(status=400), GOOD, "status 200, expected 400"),
        (probe(), Answer(500), "status 500, expected 200"),
    ],
)  # fmt: skip
def test_a_wrong_answer_has_exactly_its_fault(asked, answer, fault):
    assert faults(asked, answer) == [fault]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=2), below, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_same_json_is_reflexive_through_text(value):
    assert same_json(json.loads(json.dumps(value)), value)


@given(VALUES, VALUES)
def test_same_json_is_equality_of_text_with_sorted_keys(one, other):
    alike = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    if alike:
        assert same_json(one, other)
    if not same_json(one, other):
        assert not alike


def test_every_essential_field_tells_a_stream_from_a_whole_answer():
    changes = {"content": "z", "reasoning": "z", "calls": (("f", "{}"),), "finish_reason": "length", "prompt_tokens": 1}
    for name, value in changes.items():
        assert replace(GOOD, **{name: value}).essence() != GOOD.essence()
    assert replace(GOOD, chunks=7).essence() == GOOD.essence()
    assert call('{"a":1, "b":2}').essence() == call('{"b": 2, "a": 1}').essence()


def test_volatile_fields_are_dropped_at_every_depth():
    assert stable({"id": "x", "choices": [{"created": 1, "message": {"id": "y", "text": "z"}}]}) == {
        "choices": [{"message": {"text": "z"}}]
    }


def test_probes_are_numbered_within_their_kind():
    names = [name for name, _ in numbered((probe(), probe("json"), probe(), probe("json")))]
    assert names == ["echo-000", "json-000", "echo-001", "json-001"]


def test_two_probes_of_one_name_are_refused():
    with pytest.raises(ReleaseError, match="two probes are called 'a'"):
        numbered(replace_id(probe(), "a") for _ in range(2))


def replace_id(one, name):
    return one.model_copy(update={"id": name})


def test_a_typo_in_a_probe_file_is_named():
    row = {**probe().as_json(), "expected": {"contant": "x"}}
    with pytest.raises(ReleaseError) as caught:
        author(Probes, json.dumps({"version": 1, "probes": [row]}), file="probes.json", syntax="json")
    assert caught.value.code == "UNKNOWN_KEY"
    assert "did you mean 'content'" in caught.value.message


def test_the_gate_asks_for_finish_reasons_and_refusals_itself():
    own = own_probes(LAUNCH)
    assert [one.kind for one in own] == ["chat", "chat", "chat", "finish", "finish", "refusal", "refusal"]
    assert [one.expected.reasoning for one in own[:3]] == [True, True, False]
    assert [one.expected.status for one in own[-2:]] == [400, 404]
    silent = LAUNCH.model_copy(update={"reasoning_parser": None})
    assert [one.expected.reasoning for one in own_probes(silent) if one.kind == "chat"] == [None]


def row(kind, verdict="passed", **more):
    answered = {"response": {"status": 200, "prompt_tokens": 5}, "stream": {"status": 200}, "stream_equal": True}
    return {"kind": kind, "verdict": verdict, "reasons": [], **answered, **more}


def test_every_probe_is_counted_and_an_absent_kind_is_not_measured():
    unanswered = {"kind": "json", "verdict": "failed", "reasons": ["the server is gone"]}
    found = measurements(
        [
            row("echo"),
            row("echo", "failed", stream_equal=False, reasons=["content: holds the marker <think>"]),
            row("json", "failed", response={"status": 500, "prompt_tokens": 99}, stream={"status": 0}),
            unanswered,
        ]
    )
    assert found == {
        "echo_n": 2, "echo_passed": 1, "echo_failed": 1,
        "json_n": 2, "json_passed": 0, "json_failed": 2,
        "probes_n": 4, "probes_unanswered": 1, "stream_mismatches": 1, "marker_leaks": 1, "server_errors": 2,
        "prompt_tokens_max": 99,
    }  # fmt: skip
