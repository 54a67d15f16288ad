"""A job that tests the runner rather than a model: what is reachable from in here, and every way of ending badly.

`quantmint doctor` runs it in each image, and the contract tests over every runner. It must touch nothing outside its
job folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantmint.errors import ReleaseError
from quantmint.evidence import Scalar
from quantmint.stage import Emit

VERSION = 1
SECRETS = ("QUANTMINT", "TOKEN", "PROXY", "PASS", "SECRET", "DOCKER", "AWS")
"""Words that the name of no variable in a job may hold."""
NOWHERE = ("192.0.2.1", 9)
"""An address reserved for documentation (RFC 5737): it has a route exactly where there is a network."""


def run(
    params: Mapping[str, Any], inputs: Mapping[str, Path], out: Path, scratch: Path, emit: Emit
) -> Mapping[str, Scalar]:
    """Copy the input `data` to the output `copy` and measure the isolation.

    `params["ending"]` names another way to end: one for each promise of the job contract that a job can break.
    """
    ending = params.get("ending", "well")
    counter = scratch / "attempts"
    attempts = int(counter.read_text()) + 1 if counter.exists() else 1
    counter.write_text(str(attempts))
    emit("progress", done=0, total=1, unit="steps")
    if not ending.endswith("-once") or attempts == 1:
        _end(ending.removesuffix("-once"), out, emit)
    if ending != "missing":
        shutil.copyfile(inputs["data"], out / "copy")
    if ending == "undeclared":
        (out / "surplus").write_text("x")
    if ending == "link":
        (out / "copy").unlink()
        (out / "copy").symlink_to("/etc/passwd")
    emit("progress", done=1, total=1, unit="steps")
    return {"attempts": attempts, "bytes": inputs["data"].stat().st_size, **isolation(inputs["data"])}


def _end(ending: str, out: Path, emit: Emit) -> None:
    if ending == "error":
        raise ReleaseError("CORRUPT_SHARD", "as asked", file="data", expected="nothing", actual="something")
    if ending == "bug":
        raise RuntimeError("as asked")
    if ending == "silent":
        os._exit(0)
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(128 + signal.SIGKILL)  # the first process of a container cannot be killed from inside it
    if ending == "sleep":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        emit("note", text=f"child {child.pid}")
        time.sleep(600)
    if ending == "memory":
        hoard = [bytearray(os.urandom(1024 * 1024)) * 64 for _ in range(256)]
        emit("note", text=f"{len(hoard)}")
    if ending == "disk":
        with (out / "copy").open("wb") as stream:
            while True:
                stream.write(bytes(1024 * 1024))


def isolation(read_only: Path) -> dict[str, Scalar]:
    """What this process can do that a sealed job cannot."""
    status = Path("/proc/self/status").read_text("utf-8")
    capabilities = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff"))
    return {
        "root_user": os.geteuid() == 0,
        "network": _can_route(),
        "root_writable": _can_write(Path("/.quantmint-probe")),
        "inputs_writable": _can_write(read_only.parent / ".quantmint-probe"),
        "capabilities": int(capabilities, 16) != 0,
        "socket_in_tmpdir": _can_listen(),
        "secrets_in_environment": any(word in name.upper() for name in os.environ for word in SECRETS),
    }


def _can_write(path: Path) -> bool:
    try:
        path.write_bytes(b"")
        path.unlink()
    except OSError:
        return False
    return True


def _can_listen() -> bool:
    """Whether an engine could put a socket with a name like those of ZeroMQ into TMPDIR."""
    place = Path(tempfile.gettempdir()) / "00000000-0000-0000-0000-000000000000"
    with socket.socket(socket.AF_UNIX) as door:
        try:
            door.bind(str(place))
        except OSError:
            return False
    place.unlink()
    return True


def _can_route() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(NOWHERE)
        except OSError:
            return False
    return True
