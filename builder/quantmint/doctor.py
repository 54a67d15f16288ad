"""The doctor: runs one real job in the real runner and tells what this machine is and what the job could reach.

Nothing is assumed: isolation is what the job measured from inside. It changes nothing but the store.
"""

from __future__ import annotations

import shutil

from quantmint.artifact import Tree
from quantmint.document import Document
from quantmint.errors import ReleaseError
from quantmint.execute import Walk, Watcher
from quantmint.plan import gigabytes
from quantmint.project import Project
from quantmint.runner import Runner
from quantmint.stage import HANDLERS, Hints, InputRef, Output, Stage
from quantmint.wheels import worker_wheel

SEALED = ("root_user", "network", "root_writable", "inputs_writable", "capabilities")
ENOUGH_DISK = 8 * 1024**3


class Row(Document):
    """One thing looked at, and whether it is as it must be."""

    what: str
    found: str
    healthy: bool


def examine(project: Project, runner: Runner, watcher: Watcher) -> tuple[Row, ...]:
    """Disk, abandoned jobs, and the self-test job in the `verify` image."""
    store = project.store
    free = shutil.disk_usage(store.folder()).free
    swept = runner.sweep()
    rows = [
        Row(what="runner", found=runner.kind, healthy=True),
        Row(what="free disk", found=gigabytes(free), healthy=free >= ENOUGH_DISK),
        Row(what="jobs left by killed runs", found=f"{swept} removed", healthy=True),
    ]
    data = store.add_bytes(b"quantmint doctor\n", "data")
    worker = Tree.of([store.add_file(worker_wheel(project.root, store.folder("wheels")))])
    stage = Stage(
        name="selftest", kind="check", handler="selftest", version=HANDLERS["selftest"][1], image="verify", params={},
        inputs=(InputRef(name="data", kind="file", digest=data.digest), InputRef(name="worker", digest=worker.digest)),
        outputs=(Output(name="copy", kind="file", path="copy"),), hints=Hints(memory=1024**3, deadline=120),
    )  # fmt: skip
    pinned = {data.digest: Tree.of([data]), worker.digest: worker}
    walk = Walk(store, runner, watcher, pinned, "cpu", store.root / "logs" / "doctor")
    try:
        found = walk.execute(stage, {}, fresh=True).record.report.measurements
    except ReleaseError as error:
        return (*rows, Row(what="a real job", found=f"{error.code}: {error.message}", healthy=False))
    rows.append(Row(what="a real job", found="completed, its output came back whole", healthy=True))
    for name in SEALED:
        sealed = not found[name]
        words = "no" if sealed else "yes" if runner.kind == "container" else "yes (the process runner isolates nothing)"
        rows.append(
            Row(what=f"a job has {name.replace('_', ' ')}", found=words, healthy=sealed or runner.kind == "process")
        )
    rows.append(
        Row(
            what="a job sees secrets",
            found="yes" if found["secrets_in_environment"] else "no",
            healthy=not found["secrets_in_environment"],
        )
    )
    return tuple(rows)
