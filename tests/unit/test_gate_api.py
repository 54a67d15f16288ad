"""What the API gate calls a right answer: every fault is named, nothing else is one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmint.document import canonical
from quantmint.errors import ReleaseError
from quantmint.gates.api import (
    Answer,
    Client,
    Expected,
    Probe,
    Server,
    ask_all,
    faults,
    given_probes,
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


def probes_file(folder, text):
    (folder / "probes.json").write_text(text, "utf-8")
    return {"probes": folder / "probes.json"}


def test_a_typo_in_a_probe_file_is_named(tmp_path):
    row = {**probe().as_json(), "expected": {"contant": "x"}}
    with pytest.raises(ReleaseError) as caught:
        given_probes({}, probes_file(tmp_path, json.dumps({"version": 1, "probes": [row]})))
    assert caught.value.code == "UNKNOWN_KEY"
    assert "did you mean 'content'" in caught.value.message


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"version": 1, "version": 1, "probes": []}', "DUPLICATE_KEY"),
        ('{"version": 1, "probes": ' + "[" * 9999 + "]" * 9999 + "}", "MALFORMED_DOCUMENT"),
        ('{"version": 1, "probes": ' + "[" * 99 + "]" * 99 + "}", "MALFORMED_DOCUMENT"),
        ('{"version": NaN}', "MALFORMED_DOCUMENT"),
        ("{", "MALFORMED_DOCUMENT"),
    ],
)
def test_a_probe_file_is_parsed_strictly(tmp_path, text, code):
    with pytest.raises(ReleaseError) as caught:
        given_probes({}, probes_file(tmp_path, text))
    assert (caught.value.code, caught.value.file) == (code, "probes.json")


def test_probes_come_from_a_folder_a_file_or_the_parameters(tmp_path):
    row = probe(content="x").as_json()
    inputs = probes_file(tmp_path, json.dumps({"version": 1, "probes": [row]}))
    wanted = given_probes({"probes": [row]}, {})
    assert given_probes({}, inputs) == given_probes({}, {"probes": tmp_path}) == wanted


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


# --- a server that speaks badly ---

MESSAGE = {"role": "assistant", "content": "yes"}
WHOLE: dict[str, Any] = {
    "id": "a", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
}  # fmt: skip
MODELS = {
    "object": "list",
    "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "x", "max_model_len": 64}],
}


def chunk(**choice: Any) -> str:
    rows = [{"index": 0, "delta": {}, "finish_reason": None, **choice}]
    return "data: " + json.dumps(
        {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": rows}
    )


LAST = "data: " + json.dumps({"id": "a", "created": 1, "model": "m", "choices": [], "usage": WHOLE["usage"]})
STREAM = [chunk(delta=MESSAGE), chunk(finish_reason="stop"), LAST]
GOOD_STREAM = "\n\n".join([*STREAM, "data: [DONE]", ""])
GOOD_WHOLE = json.dumps(WHOLE)


def whole_with(**changes: Any) -> str:
    return json.dumps({**WHOLE, **changes})


def said(**changes: Any) -> str:
    return whole_with(choices=[{"index": 0, "message": {**MESSAGE, **changes}, "finish_reason": "stop"}])


@contextmanager
def speaking(
    whole: str, stream: str, *, models: str = json.dumps(MODELS), kind: str = "application/json"
) -> Iterator[int]:
    """A real server on the loopback that answers every chat request with these texts; its port."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def answer(self, text: str, content: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            self.answer(models, "application/json")

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(stream, "text/event-stream") if asked.get("stream") else self.answer(whole, kind)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def running(tmp_path):
    """A process that stands for a server that lives."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield Server(process, tmp_path / "log", 0)
    process.communicate(b"\n")


def asked(port: int, server: Server) -> list[dict[str, Any]]:
    client = Client(port, "m")
    try:
        return list(ask_all(numbered([probe(content="yes"), probe(content="yes")]), client, server))
    finally:
        client.close()


def test_a_server_that_speaks_well_passes(running):
    with speaking(GOOD_WHOLE, GOOD_STREAM) as port:
        rows = asked(port, running)
    assert [row["verdict"] for row in rows] == ["passed", "passed"], rows
    assert measurements(rows)["server_errors"] == 0
    assert rows[0]["stream"]["chunks"] == 3


@pytest.mark.parametrize(
    "whole",
    [
        whole_with(choices=[]),
        whole_with(choices=None),
        whole_with(choices=[None]),
        whole_with(choices=[{"index": 0}]),
        whole_with(usage={"prompt_tokens": "9"}),
        whole_with(usage={"prompt_tokens": True}),
        whole_with(usage=7),
        said(content=5),
        said(content=["x"]),
        said(content="\ud800"),
        said(reasoning={"a": 1}),
        said(tool_calls=[{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]),
        said(tool_calls=[{"id": "c"}]),
        said(tool_calls=3),
        whole_with(extra=2**70),
        "[]",
        "null",
        "<html>",
        "",
        "[" * 99_999,
        "{",
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "text/html"])
def test_a_broken_answer_is_counted_and_the_next_probe_is_asked(running, whole, kind):
    with speaking(whole, GOOD_STREAM, kind=kind) as port:
        rows = asked(port, running)
    found = measurements(rows)
    assert (found["probes_n"], found["probes_unanswered"], found["echo_failed"]) == (2, 0, 2)
    assert (found["server_errors"], found["stream_mismatches"]) == (2, 2)
    assert canonical(rows)


def test_a_number_that_is_none_does_not_reach_the_evidence(running):
    with speaking(GOOD_WHOLE.replace('"model": "m"', '"other": Infinity'), GOOD_STREAM) as port:
        rows = asked(port, running)
    assert b"Infinity" not in canonical(rows)


@pytest.mark.parametrize(
    "stream",
    [
        "\n\n".join(STREAM) + "\n\n",
        "\n\n".join([*STREAM[:2], "data: {", ""]),
        "\n\n".join(["data: {not json}", *STREAM, "data: [DONE]", ""]),
        "\n\n".join([chunk(delta=7), *STREAM, "data: [DONE]", ""]),
        "\n\n".join([chunk(delta={"content": 7}), *STREAM, "data: [DONE]", ""]),
        "\n\n".join([chunk(delta={"tool_calls": [{"index": None}]}), *STREAM, "data: [DONE]", ""]),
        "\n\n".join(['data: {"choices": null}', *STREAM, "data: [DONE]", ""]),
        'data: {"error": {"message": "lost"}}\n\ndata: [DONE]\n\n',
        "\n\n".join([*STREAM, 'data: {"say": "data: [DONE]"}', ""]),
        "<html>",
        "",
    ],
)
def test_a_broken_stream_is_counted_and_the_next_probe_is_asked(running, stream):
    with speaking(GOOD_WHOLE, stream) as port:
        rows = asked(port, running)
    found = measurements(rows)
    assert (found["probes_n"], found["probes_unanswered"], found["echo_failed"]) == (2, 0, 2)
    assert (found["server_errors"], found["stream_mismatches"]) == (2, 2)
    assert canonical(rows)


def test_a_server_that_is_gone_is_counted(running):
    with speaking(GOOD_WHOLE, GOOD_STREAM) as port:
        pass
    client = Client(port, "m")
    assert client.context_length() is None
    client.close()
    found = measurements(asked(port, running))
    assert (found["probes_n"], found["server_errors"], found["echo_failed"]) == (2, 4, 2)


@pytest.mark.parametrize("models", ["", "[]", "null", "{}", '{"data": [3]}', json.dumps(MODELS).replace("64", "true")])
def test_a_server_that_does_not_know_its_context(models):
    with speaking(GOOD_WHOLE, GOOD_STREAM, models=models) as port:
        client = Client(port, "m")
        assert client.context_length() is None
        client.close()


def test_a_server_that_knows_its_context():
    with speaking(GOOD_WHOLE, GOOD_STREAM) as port:
        client = Client(port, "m")
        assert client.context_length() == 64
        client.close()


@pytest.mark.parametrize(
    ("text", "applied"),
    [
        ('x quantmint overlay {"fixes": {"a": "applied"}}\n', {"fixes": {"a": "applied"}}),
        ("quantmint overlay {", {}),
        ("nothing", {}),
    ],
)
def test_the_announcement_of_an_overlay_is_read_from_the_log(running, text, applied):
    running.log.write_text(text)
    assert running.overlay() == applied


@pytest.mark.parametrize("text", ["[" * 99_999, '{"a": 1, "a": 2}', "\ud800", "NaN"])
def test_text_that_only_looks_like_json_is_a_fault(text):
    assert faults(probe(json={"a": 2}), replace(GOOD, content=text)) == ["the text is not JSON"]
    assert faults(probe(tool_call=CALL_A), call(text)) == [OTHER_ARGUMENTS]
