"""The process runner: the same job folder, run by an image's virtual environment on this machine.

It isolates nothing (no network or memory limit, this user, this file system), so everything that it makes has grade
`development`. It must leave no process behind, even after the builder was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from quantmint.artifact import digest_of
from quantmint.document import canonical
from quantmint.runner import ENVIRONMENT, NATIVE, Ended, OnEvent, RunnerKind, wheels
from quantmint.stage import Hints
from quantmint.store import clear, disk_errors

Environments = Callable[[str], tuple[Path, str]]
"""Image name → (python of its virtual environment, digest of its lock file)."""


MAX_LINE = 1024 * 1024
HOME_PARENT = "/tmp"  # noqa: S108  mkdtemp makes a private folder in it
HOME_PREFIX = "quantmint-"
"""A job's HOME and TMPDIR: short, because engines put sockets there and a socket's path has 107 characters at most."""


def builder_mark() -> str:
    """This builder: boot, pid namespace, pid and start time; tells a living owner from a dead one after any kill."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    namespace = Path("/proc/self/ns/pid").readlink()
    return f"{boot}|{namespace}|{os.getpid()}|{started_at(os.getpid())}"


def abandoned(mark: str) -> bool:
    """Whether the builder of `mark` is gone; one in another pid namespace of this boot counts as living."""
    boot, _, rest = mark.partition("|")
    namespace, _, rest = rest.partition("|")
    pid, _, started = rest.partition("|")
    here = builder_mark().split("|")
    if boot != here[0]:
        return True
    return namespace == here[1] and pid.isdigit() and started_at(int(pid)) != started


def started_at(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, or None when it is gone (proc(5), stat field 22)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


class ProcessRunner:
    """Runs jobs as process groups of their own."""

    kind: RunnerKind = "process"

    def __init__(self, environments: Environments, jobs: Path) -> None:
        self._environments = environments
        self._jobs = jobs

    def identity(self, image: str) -> str:
        """Digest of {lock, interpreter}: the environment's stand-in for an image digest."""
        python, lock = self._environments(image)
        version = (python.parent.parent / "pyvenv.cfg").read_text("utf-8")
        line = next((row for row in version.splitlines() if row.startswith("version")), "")
        return digest_of(canonical({"lock": lock, "python": line}))

    def describe(self, image: str) -> str:
        """`environment` and the digest of what it was made from."""
        return f"environment {self.identity(image)}"

    def run(self, folder: Path, image: str, hints: Hints, log: Path, on_event: OnEvent) -> Ended:
        """See `Runner.run`. The memory hint is not enforced here."""
        python, _ = self._environments(image)
        native = python.parent.parent / NATIVE
        home = Path(tempfile.mkdtemp(prefix=HOME_PREFIX, dir=HOME_PARENT))
        environment = {
            **ENVIRONMENT,
            "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "TMPDIR": str(home),
            **({"LD_LIBRARY_PATH": str(native)} if native.is_dir() else {}),
            "PYTHONPATH": ":".join(str(folder / name) for name in wheels(folder)),
        }
        note = folder / "owner.json"
        process: subprocess.Popen[str] | None = None
        try:
            with log.open("ab") as stderr:
                process = subprocess.Popen(  # noqa: S603  our own interpreter and our own module
                    [str(python), "-P", "-m", "quantmint.worker", str(folder)],
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    start_new_session=True,
                    text=True,
                )
            owner = {
                "builder": builder_mark(),
                "pid": process.pid,
                "started": started_at(process.pid),
                "home": home.name,
            }
            with disk_errors():
                note.write_text(json.dumps(owner), "utf-8")
            return self._wait(process, hints, on_event)
        finally:
            if process is not None:
                _kill_group(process.pid)
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
            clear(home)
            note.unlink(missing_ok=True)

    def _wait(self, process: subprocess.Popen[str], hints: Hints, on_event: OnEvent) -> Ended:
        assert process.stdout is not None
        reader = threading.Thread(target=_read_events, args=(process.stdout, on_event), daemon=True)
        reader.start()
        try:
            code = process.wait(hints.deadline)
        except subprocess.TimeoutExpired:
            return Ended(-signal.SIGKILL, "deadline")
        _kill_group(process.pid)
        reader.join(5)
        return Ended(code)

    def sweep(self) -> int:
        """Kill process groups of jobs whose builder is gone."""
        removed = 0
        for note in self._jobs.glob("*/owner.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                owner: Mapping[str, Any] = json.loads(note.read_text("utf-8"))
                if not abandoned(str(owner["builder"])):
                    continue
                removed += _kill_session(int(owner["pid"]), str(owner["started"]))
                name = str(owner["home"])
                if name.startswith(HOME_PREFIX) and "/" not in name:
                    clear(Path(HOME_PARENT) / name)
                note.unlink()
        return removed


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _kill_session(leader: int, started: str) -> int:
    """Kill the job's session: its leader, if it still is the same process, and everything else in that session."""
    leader_start = started_at(leader)
    if leader_start is not None and leader_start != started:
        return 0
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text("utf-8").rpartition(")")[2].split()
                if int(fields[3]) == leader and int(fields[19]) >= int(started) and fields[0] != "Z":
                    members.append(int(entry.name))
    for pid in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while any(started_at(pid) is not None for pid in members) and time.monotonic() < deadline:
        time.sleep(0.02)
    return 1 if members else 0


def _read_events(stream: IO[str], on_event: OnEvent) -> None:
    with contextlib.suppress(ValueError):  # closed while it was read: the job was killed
        while line := stream.readline(MAX_LINE):
            event = parse_event(line)
            if event is not None:
                with contextlib.suppress(OSError):  # nobody reads any more; the job's pipe is drained all the same
                    on_event(event)


def parse_event(line: str) -> dict[str, Any] | None:
    """One event of a worker's stdout; None for anything that is not one."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
