"""The worker: runs one job where it stands, in an image or in a process, and writes the report last.

Entry point of every image: `python -m quantmint.worker JOBDIR`. Events go to stdout as JSON lines, everything else to
stderr. It imports the handler that the job names from the table in `stage`, and must never import the host's doors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import json
import os
import platform
import shutil
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import IO

from quantmint.document import author
from quantmint.errors import ReleaseError
from quantmint.evidence import Scalar
from quantmint.stage import CONTRACT, HANDLERS, Handler, Job, JobReport

REPORT = "report.json"
PR_SET_PDEATHSIG = 1
"""prctl(2): be told when the builder that started this process dies."""


class _Events:
    """Writes events to the job's stdout, which the handlers' libraries cannot reach."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __call__(self, event: str, /, **fields: Scalar) -> None:
        self._stream.write(json.dumps({"event": event, **fields}, separators=(",", ":")) + "\n")
        self._stream.flush()


def _private_stdout() -> IO[str]:
    """The real stdout; afterwards whatever prints to file descriptor 1 reaches stderr."""
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return stream


def _terminated(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _trace() -> None:
    """The traceback of the exception at hand, to the log, unless the log's disk is full."""
    with contextlib.suppress(OSError):
        traceback.print_exc()


def _module(job: Job) -> ModuleType:
    name, version = HANDLERS[job.handler]
    if version != job.version:
        raise ReleaseError(
            "STAGE_FAILED", f"{job.handler}: another version", expected=str(job.version), actual=str(version)
        )
    return importlib.import_module(name)


def perform(folder: Path, emit: _Events) -> JobReport:
    """Run the job in `folder` and return its report; never raises for what a handler did."""
    job = author(Job, (folder / "job.json").read_text("utf-8"), file="job.json", syntax="json")
    environment: dict[str, Scalar] = {"python": platform.python_version(), "machine": platform.machine()}
    try:
        module = _module(job)
        run: Handler = module.run
        inputs = {entry.name: folder / entry.path for entry in job.inputs}
        measurements = run(job.params, inputs, folder / "out", folder / "scratch", emit)
        describe = getattr(module, "environment", None)
        if describe is not None:
            environment.update(describe())
    except ReleaseError as error:
        _trace()
        return _failed(job, environment, dict(error.as_json()))
    except OSError as error:
        _trace()
        code = "DISK_FULL" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "STAGE_FAILED"
        return _failed(job, environment, {"code": code, "message": f"{type(error).__name__}: {error.strerror}"})
    except MemoryError:
        _trace()
        return _failed(job, environment, {"code": "STAGE_OUT_OF_MEMORY", "message": "memory ran out"})
    except Exception as error:  # noqa: BLE001  a handler's bug is a failed job with its traceback in the log
        _trace()
        return _failed(job, environment, {"code": "STAGE_FAILED", "message": f"{type(error).__name__}: {error}"[:2000]})
    return JobReport(
        contract=CONTRACT, key=job.key, status="completed", measurements=dict(measurements), environment=environment
    )


def _failed(job: Job, environment: Mapping[str, Scalar], error: Mapping[str, Scalar]) -> JobReport:
    return JobReport(
        contract=CONTRACT,
        key=job.key,
        status="failed",
        measurements={},
        environment=dict(environment),
        error=dict(error),
    )


def write_report(folder: Path, report: JobReport) -> None:
    """Write `out/report.json` by rename, so that a report is whole or absent.

    A failed job's outputs are removed first: nobody takes them, and a full disk must not silence the report.
    """
    if report.status == "failed":
        for entry in (folder / "out").iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    draft = folder / "scratch" / ".report.json"
    with draft.open("wb") as stream:
        stream.write(report.canonical())
        stream.flush()
        os.fsync(stream.fileno())
    target = folder / "out" / REPORT
    try:
        draft.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        beside = folder / "out" / ("." + REPORT)
        beside.write_bytes(report.canonical())
        beside.rename(target)
        draft.unlink()


def main(argv: list[str] | None = None) -> int:
    """Perform the job of the folder named in `argv`; 0 when a report was written, whatever it says."""
    arguments = sys.argv[1:] if argv is None else argv
    folder = Path(arguments[0])
    emit = _Events(_private_stdout())
    signal.signal(signal.SIGTERM, _terminated)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    write_report(folder, perform(folder, emit))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
