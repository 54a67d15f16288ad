"""How a run is shown: progress for people, events for machines, tables and errors.

Everything here writes to stderr except what a verb returns as data. Foreign text is stripped of control characters
before it reaches a terminal.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TextIO

from quantmint.errors import ReleaseError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from quantmint.plan import Table

Mode = Literal["auto", "plain", "json", "quiet"]


def plain(text: object) -> str:
    """`text` without control characters: nothing foreign can move a cursor or colour a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in str(text))


def _write(stream: TextIO, text: str) -> None:
    """Write at once. When nobody reads any more, the rest goes nowhere: a closed pipe decides no release."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def say(text: str) -> None:
    """A line for people."""
    _write(sys.stderr, plain(text) + "\n")


def give(text: str) -> None:
    """Data on stdout."""
    _write(sys.stdout, plain(text) + "\n")


def give_json(value: Any) -> None:
    """Data on stdout, as JSON."""
    _write(sys.stdout, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def tell_error(error: ReleaseError, *, as_json: bool) -> None:
    """One clear error: to stdout as JSON, or to stderr for people."""
    if as_json:
        give_json({"error": error.as_json()})
        return
    say(f"error {error.code}: {error.message}")
    for name, value in (
        ("file", error.file),
        ("expected", error.expected),
        ("found", error.actual),
        ("hint", error.hint),
    ):
        if value:
            say(f"  {name}: {value}")


def table(entry: Table) -> None:
    """A table for people, on stdout."""
    give(entry.text())


QUIET_SECONDS = 5


class PlainWatcher:
    """Lines on stderr: one when a stage starts and ends, and between them at most one in five seconds and the last."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._told = 0.0

    def started(self, stage: str, *, key: str) -> None:
        del key
        self._began[stage] = time.monotonic()
        say(f"{stage}: started")

    def waiting(self, stage: str) -> None:
        say(f"{stage}: another run is executing it; waiting")

    def event(self, stage: str, event: Mapping[str, Any]) -> None:
        now = time.monotonic()
        last = "total" in event and event.get("done") == event["total"]
        if now - self._told < QUIET_SECONDS and not last:
            return
        self._told = now
        say(f"{stage}: {described(event)}")

    def finished(self, stage: str, *, cached: bool) -> None:
        took = time.monotonic() - self._began.get(stage, time.monotonic())
        say(f"{stage}: unchanged, taken from the store" if cached else f"{stage}: done in {took:.1f} s")

    def close(self) -> None: ...


class JsonWatcher:
    """Events on stderr, one JSON object a line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def _tell(self, **fields: Any) -> None:
        _write(self._stream, json.dumps(fields, sort_keys=True) + "\n")

    def started(self, stage: str, *, key: str) -> None:
        self._tell(stage=stage, event="started", key=key)

    def waiting(self, stage: str) -> None:
        self._tell(stage=stage, event="waiting")

    def event(self, stage: str, event: Mapping[str, Any]) -> None:
        self._tell(**{**event, "stage": stage})

    def finished(self, stage: str, *, cached: bool) -> None:
        self._tell(stage=stage, event="finished", cached=cached)

    def close(self) -> None: ...


class QuietWatcher:
    """Nothing at all."""

    def started(self, stage: str, *, key: str) -> None: ...
    def waiting(self, stage: str) -> None: ...
    def event(self, stage: str, event: Mapping[str, Any]) -> None: ...
    def finished(self, stage: str, *, cached: bool) -> None: ...
    def close(self) -> None: ...


class BarWatcher:
    """A live bar on a terminal, one line for each stage."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._escape = escape
        self._tasks: dict[str, TaskID] = {}
        self._progress: Progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[told]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._progress.start()

    def started(self, stage: str, *, key: str) -> None:
        del key
        self._tasks[stage] = self._progress.add_task(self._escape(stage), total=None, told="")

    def waiting(self, stage: str) -> None:
        self._progress.update(self._tasks[stage], told="another run is executing it; waiting")

    def event(self, stage: str, event: Mapping[str, Any]) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(self._escape(stage), total=None, told="")
        told = self._escape(plain(described(event)))[:80]
        if event.get("event") == "progress":
            self._progress.update(
                self._tasks[stage], completed=event.get("done", 0), total=event.get("total"), told=told
            )
        else:
            self._progress.update(self._tasks[stage], told=told)

    def finished(self, stage: str, *, cached: bool) -> None:
        told = "unchanged, taken from the store" if cached else "done"
        self._progress.update(self._tasks[stage], completed=1, total=1, told=told)

    def close(self) -> None:
        self._progress.stop()


Shown = PlainWatcher | JsonWatcher | QuietWatcher | BarWatcher


def watcher(mode: Mode) -> Shown:
    """The watcher for `--progress`: `auto` is a live bar on a terminal and plain lines elsewhere."""
    if mode == "json":
        return JsonWatcher()
    if mode == "quiet":
        return QuietWatcher()
    return BarWatcher() if mode == "auto" and sys.stderr.isatty() else PlainWatcher()


def described(event: Mapping[str, Any]) -> str:
    """An event as words."""
    if event.get("event") == "progress":
        text = f"{event['text']}: " if event.get("text") else ""
        total = f" of {event['total']}" if event.get("total") is not None else ""
        return f"{text}{event.get('done', 0)}{total} {event.get('unit', '')}".rstrip()
    if "text" in event:
        return str(event["text"])
    return ", ".join(f"{name} {value}" for name, value in event.items() if name != "event") or str(event.get("event"))
