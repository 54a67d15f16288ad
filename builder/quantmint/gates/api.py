"""The API gate: a real server from the launch recipe, asked by the official client, on the loopback of the serve image.

Every probe is asked twice, whole and as a stream, greedily and with a fixed seed; every one is accounted for, also when
the server dies or talks nonsense. It measures and never judges; no time and no place of the host reaches the evidence.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx2
import jsonschema
import openai
from pydantic import Field

from quantmint.document import Document, author_value, canonical, parse_json
from quantmint.errors import ReleaseError
from quantmint.evidence import Scalar
from quantmint.launch import LaunchRecipe
from quantmint.stage import Emit

VERSION = 2
HOST = "127.0.0.1"
SEED = 0
READY_SECONDS = 600
ANSWER_SECONDS = 180
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>")
"""What the parsers must have taken out of an answer."""
VOLATILE = frozenset({"id", "created", "system_fingerprint", "service_tier", "prompt_token_ids", "token_ids"})
"""Fields of a response that differ from run to run, or say nothing; dropped wherever they stand."""
ANNOUNCEMENT = "quantmint overlay {"
SWITCH = "QUANTMINT_OVERLAY_DISABLE"
END_OF_STREAM = b"data: [DONE]"
"""What the last line of a whole stream says."""

Row = dict[str, Any]
_seen: dict[str, Scalar] = {}


class Call(Document):
    """The tool call that an answer must consist of, arguments compared by JSON value and type."""

    name: str
    arguments: dict[str, Any]


class Expected(Document):
    """What a right answer is; what is absent is not asked for.

    `reasoning`: whether the reasoning field is filled. `content`: the exact text. `contains`: a part of the text.
    `json`: the value of the text. `tool_call`: the one call. `prompt_tokens`: at least so many, as the server counts.
    `finish_reason`: tool_calls when `tool_call` is given, else stop.
    """

    reasoning: bool | None = None
    content: str | None = None
    contains: str | None = None
    json_value: Annotated[Any, Field(alias="json")] = None
    tool_call: Call | None = None
    prompt_tokens: int | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    status: int = 200


class Probe(Document):
    """One request of the chat API and what to expect of it. `model` is the served one unless it is named."""

    id: str | None = None
    kind: Annotated[str, Field(pattern=r"^[a-z][a-z_]{0,31}$")]
    messages: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    tools: tuple[dict[str, Any], ...] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: Annotated[int, Field(ge=1)]
    model: str | None = None
    expected: Expected


class Probes(Document):
    """A file of probes."""

    version: Literal[1]
    probes: Annotated[tuple[Probe, ...], Field(min_length=1)]


@dataclass(frozen=True)
class Answer:
    """An answer without its transport: the same for a whole one and for a reassembled stream."""

    status: int
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    chunks: int | None = None
    error: str | None = None

    def essence(self) -> tuple[Any, ...]:
        """What must not depend on streaming; arguments by value, since JSON may be spaced differently."""
        calls = tuple((name, json.dumps(arguments(text), sort_keys=True)) for name, text in self.calls)
        return self.status, self.content, self.reasoning, calls, self.finish_reason, self.prompt_tokens

    def as_json(self) -> Row:
        """JSON values; absent fields are left out."""
        row: Row = {
            "status": self.status,
            "content": self.content,
            "reasoning": self.reasoning,
            "tool_calls": [{"name": name, "arguments": text} for name, text in self.calls],
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "chunks": self.chunks,
            "error": self.error,
        }
        return {name: value for name, value in row.items() if value is not None}


def arguments(text: str) -> Any:
    """The JSON value of a call's arguments, or the text itself, marked, when it is not JSON."""
    try:
        return parse_json(text.encode(), file="arguments")
    except (ValueError, ReleaseError):
        return ("not JSON", text)


def same_json(one: Any, other: Any) -> bool:
    """Equality of JSON values that tells true from 1 and 1 from 1.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return bool(one == other)


def faults(probe: Probe, answer: Answer) -> list[str]:
    """Every reason why `answer` is not what `probe` expects; empty when it passes."""
    wanted = probe.expected
    if answer.status != wanted.status:
        return [f"status {answer.status}, expected {wanted.status}"]
    if answer.status != 200:
        return []
    found = [f"{where}: {why}" for where, why in _leaks(probe, answer)]
    if wanted.reasoning is not None and bool(answer.reasoning.strip()) != wanted.reasoning:
        found.append("reasoning is empty" if wanted.reasoning else "reasoning is filled though thinking is off")
    reason = wanted.finish_reason or ("tool_calls" if wanted.tool_call is not None else "stop")
    if answer.finish_reason != reason:
        found.append(f"finish_reason {answer.finish_reason}, expected {reason}")
    least = wanted.prompt_tokens
    if least is not None and (answer.prompt_tokens or 0) < least:
        found.append(f"{answer.prompt_tokens} prompt tokens reached the server, expected {least} or more")
    return [*found, *_call_faults(wanted.tool_call, answer), *_text_faults(probe, answer)]


def _leaks(probe: Probe, answer: Answer) -> Iterator[tuple[str, str]]:
    for where, text in (("content", answer.content), ("reasoning", answer.reasoning)):
        for marker in MARKERS:
            if marker in text and marker not in (probe.expected.content or ""):
                yield where, f"holds the marker {marker}"


def _call_faults(wanted: Call | None, answer: Answer) -> Iterator[str]:
    if wanted is None:
        if answer.calls:
            yield f"{len(answer.calls)} tool calls, expected none"
        return
    if len(answer.calls) != 1:
        yield f"{len(answer.calls)} tool calls, expected one"
        return
    name, text = answer.calls[0]
    if name != wanted.name:
        yield f"tool {name!r}, expected {wanted.name!r}"
    if not same_json(arguments(text), wanted.arguments):
        yield "the arguments of the call differ in value or type"


def _text_faults(probe: Probe, answer: Answer) -> Iterator[str]:
    wanted = probe.expected
    if wanted.content is not None and answer.content != wanted.content:
        yield "the text is not the expected one"
    if wanted.contains is not None and wanted.contains not in answer.content:
        yield "the text lacks the expected part"
    schema = ((probe.response_format or {}).get("json_schema") or {}).get("schema")
    if schema is None and wanted.json_value is None:
        return
    try:
        value = parse_json(answer.content.encode(), file="answer")
    except (ValueError, ReleaseError):
        yield "the text is not JSON"
        return
    if schema is not None:
        problem = next(iter(jsonschema.Draft202012Validator(schema).iter_errors(value)), None)
        if problem is not None:
            yield f"the JSON breaks its schema: {problem.message[:120]}"
    if wanted.json_value is not None and not same_json(value, wanted.json_value):
        yield "the JSON has other values"


def own_probes(launch: LaunchRecipe) -> tuple[Probe, ...]:
    """What every server is asked besides the given probes: a greeting, finish reasons, and what it must refuse."""
    hello = ({"role": "user", "content": "Hi"},)
    thinks = launch.chat_template_defaults.get("enable_thinking")
    default = thinks if isinstance(thinks, bool) and launch.reasoning_parser is not None else None
    chats = [
        Probe(kind="chat", messages=hello, max_tokens=128, expected=Expected(reasoning=default)),
        *(
            Probe(
                kind="chat",
                messages=hello,
                max_tokens=128,
                chat_template_kwargs={"enable_thinking": on},
                expected=Expected(reasoning=on),
            )
            for on in ((True, False) if launch.reasoning_parser is not None else ())
        ),
    ]
    long = ({"role": "user", "content": "word " * (2 * launch.context_length)},)
    return (
        *chats,
        Probe(kind="finish", messages=hello, max_tokens=1, expected=Expected(finish_reason="length")),
        Probe(kind="finish", messages=hello, max_tokens=128, expected=Expected(finish_reason="stop")),
        Probe(kind="refusal", messages=long, max_tokens=1, expected=Expected(status=400)),
        Probe(kind="refusal", messages=hello, max_tokens=1, model="no-such-model", expected=Expected(status=404)),
    )


def numbered(probes: Iterable[Probe]) -> tuple[tuple[str, Probe], ...]:
    """Each probe with its id: its own, or its kind and its place among its kind.

    Raises:
        ReleaseError: INVALID_VALUE when two ids are one.
    """
    counts: Counter[str] = Counter()
    named: dict[str, Probe] = {}
    for probe in probes:
        name = probe.id or f"{probe.kind}-{counts[probe.kind]:03d}"
        counts[probe.kind] += 1
        if name in named:
            raise ReleaseError("INVALID_VALUE", f"two probes are called {name!r}", file="probes")
        named[name] = probe
    return tuple(named.items())


class _Watched(httpx2.SyncByteStream):
    """The body of a response, remembering how it ended: the official client does not tell."""

    def __init__(self, stream: httpx2.SyncByteStream) -> None:
        self._stream = stream
        self.tail = b""

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            self.tail = (self.tail + chunk)[-64:]
            yield chunk

    def close(self) -> None:
        self._stream.close()


class Client:
    """The official client, and answers out of its responses."""

    def __init__(self, port: int, model: str) -> None:
        self._model = model
        self._body: _Watched | None = None
        self._http = openai.DefaultHttpxClient(
            trust_env=False, timeout=ANSWER_SECONDS, event_hooks={"response": [self._watch]}
        )
        self._openai = openai.OpenAI(
            base_url=f"http://{HOST}:{port}/v1", api_key="none", max_retries=0, http_client=self._http
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _watch(self, response: httpx2.Response) -> None:
        if isinstance(response.stream, httpx2.SyncByteStream):
            response.stream = self._body = _Watched(response.stream)

    def context_length(self) -> int | None:
        """What the server says its context is, in tokens; None when it says nothing that can be used."""
        try:
            models = {entry.id: entry for entry in self._openai.models.list()}
            found = (models[self._model].model_extra or {}).get("max_model_len") if self._model in models else None
        except Exception:  # noqa: BLE001  a server may say anything
            return None
        return found if type(found) is int else None

    def request(self, probe: Probe) -> Row:
        """The request body, without the model's name."""
        body: Row = {
            "messages": list(probe.messages),
            "max_tokens": probe.max_tokens,
            "temperature": 0.0,
            "seed": SEED,
        }
        if probe.tools is not None:
            body["tools"] = list(probe.tools)
        if probe.response_format is not None:
            body["response_format"] = probe.response_format
        if probe.chat_template_kwargs is not None:
            body["extra_body"] = {"chat_template_kwargs": probe.chat_template_kwargs}
        return body

    def ask(self, probe: Probe, *, stream: bool) -> tuple[Answer, Row | None]:
        """The answer, and the body of a whole one without what is volatile.

        Whatever is not an answer of this API (no choice, other types, no JSON, a stream without its end) has status 0.
        """
        body = {**self.request(probe), "model": probe.model or self._model}
        try:
            answer, raw = (self._streamed(body), None) if stream else self._whole(body)
            canonical([answer.as_json(), raw])
        except openai.APIStatusError as error:
            return Answer(error.status_code, error=_message(error)), None
        except Exception as error:  # noqa: BLE001  a server may answer anything; what it broke is told
            return Answer(0, error=type(error).__name__), None
        return answer, raw

    def _whole(self, body: Row) -> tuple[Answer, Row]:
        response = self._openai.chat.completions.create(**body)
        choice = response.choices[0]
        usage = response.usage
        answer = Answer(
            200,
            _text(choice.message.content),
            _reasoning(choice.message),
            tuple(
                (_text(call.function.name), _text(call.function.arguments)) for call in choice.message.tool_calls or ()
            ),
            _text(choice.finish_reason) or None,
            _count(usage.prompt_tokens) if usage else None,
            _count(usage.completion_tokens) if usage else None,
        )
        return answer, stable(response.model_dump(mode="json", exclude_none=True, warnings=False))

    def _streamed(self, body: Row) -> Answer:
        content = reasoning = ""
        calls: dict[int, list[str]] = {}
        finish: str | None = None
        usage: Any = None
        chunks = 0
        options = {"stream": True, "stream_options": {"include_usage": True}}
        for chunk in self._openai.chat.completions.create(**body, **options):
            chunks += 1
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += _text(choice.delta.content)
                reasoning += _reasoning(choice.delta)
                finish = _text(choice.finish_reason) or finish
                for part in choice.delta.tool_calls or ():
                    call = calls.setdefault(_count(part.index), ["", ""])
                    if part.function is not None:
                        call[0] += _text(part.function.name)
                        call[1] += _text(part.function.arguments)
        if self._body is None or not self._body.tail.rstrip().endswith(END_OF_STREAM):
            raise EOFError("the stream ends without its last line")
        return Answer(
            200,
            content,
            reasoning,
            tuple((name, text) for _, (name, text) in sorted(calls.items())),
            finish,
            _count(usage.prompt_tokens) if usage else None,
            _count(usage.completion_tokens) if usage else None,
            chunks,
        )


def _reasoning(message: Any) -> str:
    return _text((message.model_extra or {}).get("reasoning"))


def _text(value: Any) -> str:
    """`value` as the text it must be; nothing is empty."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text belongs")
    return value


def _count(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{type(value).__name__} where a number belongs")
    return value


def _message(error: openai.APIStatusError) -> str:
    body = error.body if isinstance(error.body, dict) else {}
    return str(body.get("message", type(error).__name__))[:300].encode("utf-8", "replace").decode()


def stable(value: Any) -> Any:
    """`value` without its volatile fields, at every depth."""
    if isinstance(value, dict):
        return {key: stable(item) for key, item in value.items() if key not in VOLATILE}
    return [stable(item) for item in value] if isinstance(value, list) else value


def ask_all(probes: Iterable[tuple[str, Probe]], client: Client, server: Server) -> Iterator[Row]:
    """One row per probe, asked one after another; once the server is gone the rest is unanswered."""
    for name, probe in probes:
        asked = client.request(probe)
        row: Row = {"id": name, "kind": probe.kind, "request": asked, "expected": probe.expected.as_json()}
        if len(canonical(asked)) > 65536 and probe.expected.status != 200:
            row["request"] = {**asked, "messages": f"{len(canonical(asked['messages']))} bytes of messages, not kept"}
        if not server.alive():
            yield {**row, "verdict": "failed", "reasons": ["the server is gone"]}
            continue
        whole, body = client.ask(probe, stream=False)
        streamed, _ = client.ask(probe, stream=True)
        reasons = faults(probe, whole)
        equal = whole.essence() == streamed.essence()
        if not equal:
            reasons.append("the stream differs from the whole answer")
        row |= {"response": whole.as_json(), "stream": streamed.as_json(), "stream_equal": equal}
        if body is not None:
            row["body"] = body
        yield {**row, "verdict": "failed" if reasons else "passed", "reasons": reasons}


def measurements(rows: Iterable[Mapping[str, Any]]) -> dict[str, Scalar]:
    """Counts per kind and over all; a kind without probes has no measurement."""
    table = list(rows)
    found: dict[str, Scalar] = {}
    for kind in sorted({str(row["kind"]) for row in table}):
        mine = [row for row in table if row["kind"] == kind]
        passed = sum(row["verdict"] == "passed" for row in mine)
        found |= {f"{kind}_n": len(mine), f"{kind}_passed": passed, f"{kind}_failed": len(mine) - passed}
    statuses = [row[side]["status"] for row in table for side in ("response", "stream") if side in row]
    sizes = [row["response"].get("prompt_tokens", 0) for row in table if "response" in row]
    return found | {
        "probes_n": len(table),
        "probes_unanswered": sum("response" not in row for row in table),
        "stream_mismatches": sum(not row["stream_equal"] for row in table if "stream_equal" in row),
        "marker_leaks": sum("holds the marker" in reason for row in table for reason in row["reasons"]),
        "server_errors": sum(status == 0 or status >= 500 for status in statuses),
        "prompt_tokens_max": max(sizes, default=0),
    }


class Server:
    """A server process and its log."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, port: int) -> None:
        self._process = process
        self.log = log
        self.port = port

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def wait_ready(self, seconds: float, emit: Emit) -> bool:
        """Whether the server answers its health question before it exits or `seconds` have passed."""
        started = time.monotonic()
        while self.alive() and time.monotonic() - started < seconds:
            if self._healthy():
                return True
            emit("note", text=f"the server starts: {int(time.monotonic() - started)} s")
            time.sleep(1)
        return False

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def overlay(self) -> Row:
        """What the overlay announced in the log; empty when it said nothing."""
        text = self.log.read_text("utf-8", errors="replace")
        start = text.rfind(ANNOUNCEMENT)
        if start < 0:
            return {}
        try:
            found, _ = json.JSONDecoder().raw_decode(text, start + len(ANNOUNCEMENT) - 1)
        except ValueError:
            return {}
        return dict(found)

    def stop(self) -> None:
        """End the process and everything it started."""
        import psutil

        try:
            parent = psutil.Process(self._process.pid)
            family = [*parent.children(recursive=True), parent]
        except psutil.NoSuchProcess:
            family = []
        if self.alive():
            self._process.terminate()
        _, left = psutil.wait_procs(family, timeout=10)
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=10)
        self._process.wait()


@contextmanager
def serving(launch: LaunchRecipe, package: Path, disable: Iterable[str], log: Path) -> Iterator[Server]:
    """The server of `launch` for `package` on a free port; gone when the block ends, however it ends."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, *launch.argv(str(package), HOST, port)[1:]]
    local = {SWITCH: ",".join(disable), "VLLM_HOST_IP": HOST}
    variables = {**os.environ, **launch.process_environment(), **local}
    with log.open("wb") as stream:
        server = Server(
            subprocess.Popen(  # noqa: S603  the launch recipe's own command
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=variables
            ),
            log,
            port,
        )
    try:
        yield server
    finally:
        server.stop()


def environment() -> dict[str, Scalar]:
    """What the last run found out about engine, overlay and client: names and versions only."""
    return dict(_seen)


def run(
    params: Mapping[str, Any], inputs: Mapping[str, Path], out: Path, scratch: Path, emit: Emit
) -> Mapping[str, Scalar]:
    """Serve `inputs["package"]` under `params["launch"]`, a LaunchRecipe, and ask every probe.

    The probes are the file (or the one file of the folder) `inputs["probes"]`, or `params["probes"]`; the gate adds its
    own kinds chat, finish and refusal. Optional params: `disable` (overlay fixes to leave out), `ready_seconds`. Writes
    `evidence/transcript.jsonl` (one object per probe) and `evidence/environment.jsonl` (one object).

    Raises:
        ReleaseError: INVALID_VALUE or UNKNOWN_KEY for the parameters and the probes, MALFORMED_DOCUMENT or
            DUPLICATE_KEY for the file of the probes.
    """
    launch = author_value(LaunchRecipe, params["launch"], file="launch")
    probes = numbered((*own_probes(launch), *given_probes(params, inputs)))
    _seen.clear()
    rows: list[Row] = []
    told: Row = {"launch": launch.as_json(), "client": f"openai {openai.__version__}"}
    started = time.monotonic()
    with serving(launch, inputs["package"], params.get("disable", ()), scratch / "server.log") as server:
        ready = server.wait_ready(float(params.get("ready_seconds", READY_SECONDS)), emit)
        ready_seconds = time.monotonic() - started
        client = Client(server.port, launch.served_model_name)
        if ready:
            told["context_length_served"] = client.context_length()
        else:
            server.stop()
        for row in ask_all(probes, client, server):
            rows.append(row)
            emit("progress", done=len(rows), total=len(probes), unit="probes")
        client.close()
        exited = not server.alive()
        told["overlay"] = server.overlay()
        if exited:
            sys.stderr.write(server.log.read_text("utf-8", errors="replace")[-8000:])
    evidence = out / "evidence"
    evidence.mkdir()
    (evidence / "transcript.jsonl").write_bytes(b"".join(canonical(row) + b"\n" for row in rows))
    (evidence / "environment.jsonl").write_bytes(canonical(told) + b"\n")
    _seen.update(_summary(told))
    return measurements(rows) | {
        "server_ready": ready,
        "server_exits": int(ready and exited),
        "context_length_served": told.get("context_length_served") or 0,
        "overlays_applied": int(bool(told["overlay"])),
        "overlay_fixes_disabled": sum(state == "disabled" for state in told["overlay"].get("fixes", {}).values()),
        "ready_seconds": round(ready_seconds, 3),
        "probes_seconds": round(time.monotonic() - started - ready_seconds, 3),
    }


def given_probes(params: Mapping[str, Any], inputs: Mapping[str, Path]) -> tuple[Probe, ...]:
    """The probes of the file, or of the one file of the folder, `inputs["probes"]`, else of `params["probes"]`.

    Raises:
        ReleaseError: INVALID_VALUE, UNKNOWN_KEY, MALFORMED_DOCUMENT or DUPLICATE_KEY.
    """
    if "probes" in inputs:
        path = inputs["probes"]
        if path.is_dir():
            path = next(iter(sorted(path.glob("*.json"))))
        return author_value(Probes, parse_json(path.read_bytes(), file=path.name), file=path.name).probes
    return author_value(Probes, {"version": 1, "probes": list(params["probes"])}, file="probes").probes


def _summary(told: Mapping[str, Any]) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {"client": told["client"]}
    overlay = told["overlay"]
    if overlay:
        found["engine"] = f"{overlay['engine']['distribution']} {overlay['engine']['version']}"
        found["device"] = overlay["device"]
        found["overlay.labels"] = ", ".join(overlay["labels"])
        found |= {f"overlay.fix.{name}": state for name, state in overlay["fixes"].items()}
    return found
