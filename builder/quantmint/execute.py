"""Walks a plan: each stage is found in the store by its key, or run by the runner and taken into the store.

A stage runs at most once for a key, also when two builders want it at once. Nothing half-done is ever recorded; what
a killed run finished is kept. Signing and publishing are not stages and are never cached.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quantmint.artifact import Tree
from quantmint.document import canonical, parse_json, receive
from quantmint.errors import CODES, ReleaseError
from quantmint.runner import Ended, Runner
from quantmint.stage import CONTRACT, HANDLERS, Job, JobInput, JobReport, Stage, stage_key
from quantmint.store import Record, Store, clear, disk_errors
from quantmint.worker import REPORT

MAX_REPORT_BYTES = 16 * 1024 * 1024


class Watcher(Protocol):
    """Is told what happens, in order; prints or records it."""

    def started(self, stage: str, *, key: str) -> None: ...
    def waiting(self, stage: str) -> None: ...
    def event(self, stage: str, event: Mapping[str, Any]) -> None: ...
    def finished(self, stage: str, *, cached: bool) -> None: ...


@dataclass(frozen=True)
class Finished:
    """A stage that is done: its key and what it left."""

    stage: Stage
    key: str
    record: Record
    cached: bool


@dataclass(frozen=True)
class Walk:
    """What executing needs: the store, the runner, trees of pinned inputs by digest, and where logs go."""

    store: Store
    runner: Runner
    watcher: Watcher
    pinned: Mapping[str, Tree]
    device_class: str
    logs: Path

    def execute(self, stage: Stage, done: Mapping[str, Finished], *, fresh: bool = False) -> Finished:
        """Find `stage` in the store or run it; `fresh` runs it in any case.

        Raises:
            ReleaseError: what the stage, the runner or the disk reported; nothing was recorded then.
        """
        if stage.handler not in HANDLERS or stage.image is None:
            raise ReleaseError("NOT_RUNNABLE_HERE", f"stage {stage.name}: handler {stage.handler} is not available")
        key, trees, digests = self._resolved(stage, done)
        self.watcher.started(stage.name, key=key)
        with self.store.lock(key, waiting=lambda: self.watcher.waiting(stage.name)):
            record = None if fresh else self.store.record(key)
            cached = record is not None
            if record is None:
                self.note(stage, key, "running")
                try:
                    record = self._run(stage, key, trees, digests)
                except ReleaseError as error:
                    self.note(stage, key, "failed", f"{error.code}: {error.message}")
                    raise
                except BaseException as error:
                    self.note(stage, key, "stopped", type(error).__name__)
                    raise
                self.store.keep(key, record)
            self.note(stage, key, "done")
        self.watcher.finished(stage.name, cached=cached)
        return Finished(stage, key, record, cached)

    def note(self, stage: Stage, key: str, state: str, message: str = "") -> None:
        """What `quantmint status` tells of a stage's last run."""
        row = {"stage": stage.name, "state": state, "key": key, "runner": self.runner.kind, "message": message}
        with disk_errors():
            self.logs.mkdir(parents=True, exist_ok=True)
            draft = self.logs / f".{stage.name}.{os.getpid()}"
            draft.write_bytes(canonical(row))
            draft.replace(self.logs / f"{stage.name}.json")

    def key(self, stage: Stage, done: Mapping[str, Finished]) -> str:
        """The key of `stage`, whose inputs are pinned or outputs of `done`."""
        return self._resolved(stage, done)[0]

    def _resolved(self, stage: Stage, done: Mapping[str, Finished]) -> tuple[str, dict[str, Tree], dict[str, str]]:
        """The stage key, and the tree and the digest of each input."""
        trees = {ref.name: self._tree(ref.name, stage, done) for ref in stage.inputs}
        digests = {
            ref.name: trees[ref.name].digest if ref.kind == "tree" else trees[ref.name].artifacts[0].digest
            for ref in stage.inputs
        }
        assert stage.image is not None
        key = stage_key(
            stage,
            inputs=digests,
            image=self.runner.identity(stage.image),
            runner=self.runner.kind,
            device_class=self.device_class,
        )
        return key, trees, digests

    def _tree(self, name: str, stage: Stage, done: Mapping[str, Finished]) -> Tree:
        ref = next(entry for entry in stage.inputs if entry.name == name)
        if ref.stage is not None and ref.output is not None:
            return done[ref.stage].record.outputs[ref.output]
        assert ref.digest is not None
        return self.pinned[ref.digest]

    def _run(self, stage: Stage, key: str, trees: Mapping[str, Tree], digests: Mapping[str, str]) -> Record:
        folder = self.store.folder("jobs", key.removeprefix("sha256:")[:40])
        _empty(folder)
        with disk_errors():
            (folder / "in").mkdir()
            (folder / "out").mkdir()
            (folder / "scratch").mkdir(exist_ok=True)
            self.logs.mkdir(parents=True, exist_ok=True)
            log = self.logs / f"{stage.name}.log"
            log.write_bytes(b"")
        inputs = []
        for ref in stage.inputs:
            tree = trees[ref.name]
            if ref.kind == "tree":
                self.store.put_tree(tree, folder / "in" / ref.name)
            else:
                self.store.put(tree.artifacts[0], folder / "in" / ref.name)
            inputs.append(JobInput(name=ref.name, path=f"in/{ref.name}", kind=ref.kind, digest=digests[ref.name]))
        job = Job(
            contract=CONTRACT,
            stage=stage.name,
            handler=stage.handler,
            version=stage.version,
            params=stage.params,
            seed=stage.seed,
            inputs=tuple(inputs),
            outputs=stage.outputs,
            key=key,
        )
        with disk_errors():
            (folder / "job.json").write_bytes(job.canonical())
        assert stage.image is not None
        ended = self.runner.run(
            folder, stage.image, stage.hints, log, lambda event: self.watcher.event(stage.name, event)
        )
        try:
            report = _truth(folder / "out" / REPORT, stage, key, ended)
            outputs = self.store.collect(folder / "out", stage.outputs)
        except ReleaseError:
            _empty(folder)
            raise
        clear(folder)
        return Record(report=report, outputs=outputs)


def _empty(folder: Path) -> None:
    """Leave nothing of an earlier try in a job folder but its scratch."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            if entry.name != "scratch":
                clear(entry)
        else:
            entry.unlink()


def last_runs(store: Store, recipe: str, stages: Iterable[str]) -> list[dict[str, str]]:
    """How each stage's last execution ended: `done`, `failed`, `stopped`, `running`, `killed` or `never`."""
    rows: list[dict[str, str]] = []
    for stage in stages:
        try:
            data = (store.root / "logs" / recipe / f"{stage}.json").read_bytes()
        except FileNotFoundError:
            rows.append({"stage": stage, "state": "never"})
            continue
        row = {name: str(value) for name, value in parse_json(data, file=f"{stage}.json").items()}
        if row["state"] == "running" and not store.locked(row["key"]):
            row["state"] = "killed"
        rows.append(row)
    return rows


def _truth(path: Path, stage: Stage, key: str, ended: Ended) -> JobReport:
    """The report of a job that completed, or the one error that tells why there is none."""
    if not path.is_file() or path.is_symlink():
        if ended.reason == "deadline":
            raise ReleaseError(
                "STAGE_DEADLINE", f"stage {stage.name} ran past its deadline", expected=f"{stage.hints.deadline} s"
            )
        if ended.reason == "memory":
            raise ReleaseError(
                "STAGE_OUT_OF_MEMORY",
                f"stage {stage.name} needed more memory than it may have",
                expected=f"at most {stage.hints.memory} bytes",
            )
        raise ReleaseError(
            "BROKEN_WORKER",
            f"stage {stage.name} ended without a report",
            expected="a report",
            actual=f"exit code {ended.exit_code}",
        )
    if path.stat().st_size > MAX_REPORT_BYTES:
        raise ReleaseError("BROKEN_WORKER", f"stage {stage.name} wrote a report beyond {MAX_REPORT_BYTES} bytes")
    data = path.read_bytes()
    parse_json(data, file=REPORT, limit=MAX_REPORT_BYTES)
    report = receive(JobReport, data, file=REPORT)
    try:
        canonical(report.as_json())
    except ValueError as unsealable:  # a number that no document can hold
        raise ReleaseError(
            "BROKEN_WORKER", f"stage {stage.name} reported what cannot be sealed: {unsealable}"
        ) from None
    if report.key != key:
        raise ReleaseError("BROKEN_WORKER", f"stage {stage.name} reported another job", expected=key, actual=report.key)
    if report.status == "failed":
        error = report.error or {}
        code = str(error.get("code", "STAGE_FAILED"))
        raise ReleaseError(
            code if code in CODES else "STAGE_FAILED",
            f"stage {stage.name}: {error.get('message', 'failed without a message')}",
            file=_text(error, "file"),
            expected=_text(error, "expected"),
            actual=_text(error, "actual"),
            hint=f"Read its log with `quantmint logs {stage.name}`."
            if code == "STAGE_FAILED" or code not in CODES
            else CODES[code].hint,
        )
    return report


def _text(error: Mapping[str, Any], name: str) -> str | None:
    value = error.get(name)
    return None if value is None else str(value)
