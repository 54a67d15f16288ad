"""The job contract over every runner: same job, same report, nothing left running, every bad ending told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from quantmint.artifact import Tree
from quantmint.errors import ReleaseError
from quantmint.execute import Finished, Walk
from quantmint.process import ProcessRunner, started_at
from quantmint.runner import Runner
from quantmint.stage import Hints, InputRef, Output, Stage
from quantmint.store import Store

PAYLOAD = b"bytes that must arrive whole\n"


class Notes:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[Mapping[str, Any]] = []

    def started(self, stage: str, *, key: str) -> None:
        self.lines.append(f"started {stage}")

    def waiting(self, stage: str) -> None:
        self.lines.append(f"waiting {stage}")

    def event(self, stage: str, event: Mapping[str, Any]) -> None:
        self.events.append(event)

    def finished(self, stage: str, *, cached: bool) -> None:
        self.lines.append(f"finished {stage} {'cached' if cached else 'run'}")


def this_environment(image: str) -> tuple[Path, str]:
    """This interpreter stands for every image: it is a virtual environment with quantmint in it."""
    del image
    return Path(sys.prefix) / "bin" / "python", "sha256:" + "0" * 64


def pinned_references() -> dict[str, str]:
    from quantmint.images import parse_pins, resolve

    path = Path(os.environ["QUANTMINT_PINS"])
    return {"verify": resolve(parse_pins(path.read_text("utf-8"), file=path.name), "verify", "linux/amd64")}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


@pytest.fixture(params=["process", pytest.param("container", marks=pytest.mark.engine)])
def runner(request: pytest.FixtureRequest, store: Store) -> Iterator[Runner]:
    if request.param == "process":
        yield ProcessRunner(this_environment, store.folder("jobs"))
        return
    from quantmint.container import ContainerRunner, connect

    client = connect()
    runner = ContainerRunner(client, pinned_references(), store.root)
    yield runner
    assert not client.containers.list(all=True, filters={"label": f"dev.quantmint.job={runner._scope}"})
    client.close()


def walk(store: Store, runner: Runner, notes: Notes | None = None) -> tuple[Walk, str, str]:
    from quantmint.wheels import worker_wheel

    data = store.add_bytes(PAYLOAD, "data")
    worker = Tree.of([store.add_file(worker_wheel(Path(__file__).resolve().parents[2], store.folder("wheels")))])
    pinned = {data.digest: Tree.of([data]), worker.digest: worker}
    walker = Walk(store, runner, notes or Notes(), pinned, "cpu", store.root / "logs")
    return walker, data.digest, worker.digest


def job(data: str, worker: str, *, ending: str = "well", deadline: int = 60, memory: int = 1024**3) -> Stage:
    return Stage(
        name="selftest",
        kind="check",
        handler="selftest",
        version=1,
        image="verify",
        params={"ending": ending},
        inputs=(
            InputRef(name="data", kind="file", digest=data),
            InputRef(name="worker", digest=worker),
        ),
        outputs=(Output(name="copy", kind="file", path="copy"),),
        hints=Hints(deadline=deadline, memory=memory),
    )


def run(store: Store, runner: Runner, ending: str, **options: int) -> Finished:
    walker, data, worker = walk(store, runner)
    return walker.execute(job(data, worker, ending=ending, **options), {})


def test_a_job_runs_once_and_is_then_found(store: Store, runner: Runner) -> None:
    notes = Notes()
    walker, data, worker = walk(store, runner, notes)
    first = walker.execute(job(data, worker), {})
    again = walker.execute(job(data, worker), {})
    assert (first.cached, again.cached) == (False, True)
    assert first.record == again.record
    copy = first.record.outputs["copy"].artifacts[0]
    assert store.blob(copy.digest).read_bytes() == PAYLOAD
    assert {"event": "progress", "done": 1, "total": 1, "unit": "steps"} in notes.events
    assert not list((store.root / "jobs").iterdir())


def test_a_container_is_sealed_and_a_process_is_known_not_to_be(store: Store, runner: Runner) -> None:
    found = run(store, runner, "well").record.report.measurements
    assert found["secrets_in_environment"] is False
    if runner.kind == "container":
        names = ("root_user", "network", "root_writable", "inputs_writable", "capabilities")
        assert {name: found[name] for name in names} == dict.fromkeys(names, False)


def test_runners_never_share_a_key(store: Store) -> None:
    process = ProcessRunner(this_environment, store.folder("jobs"))
    walker, data, worker = walk(store, process)
    stage = job(data, worker)

    class Elsewhere(ProcessRunner):
        kind = "container"

    other = Walk(store, Elsewhere(this_environment, store.folder("jobs")), Notes(), walker.pinned, "cpu", walker.logs)
    assert walker.key_if_known(stage, {}) != other.key_if_known(stage, {})


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("error", "CORRUPT_SHARD"),
        ("bug", "STAGE_FAILED"),
        ("silent", "BROKEN_WORKER"),
        ("killed", "BROKEN_WORKER"),
        ("missing", "OUTPUT_MISSING"),
        ("undeclared", "OUTPUT_UNDECLARED"),
        ("link", "OUTPUT_UNDECLARED"),
    ],
)
def test_every_bad_ending_is_one_clear_error(store: Store, runner: Runner, ending: str, code: str) -> None:
    with pytest.raises(ReleaseError) as caught:
        run(store, runner, ending)
    assert caught.value.code == code
    assert not list((store.root / "records").glob("*")) if (store.root / "records").exists() else True


def test_a_job_past_its_deadline_is_killed_with_its_children(store: Store, runner: Runner) -> None:
    notes = Notes()
    walker, data, worker = walk(store, runner, notes)
    with pytest.raises(ReleaseError) as caught:
        walker.execute(job(data, worker, ending="sleep", deadline=4), {})
    assert caught.value.code == "STAGE_DEADLINE"
    if runner.kind == "process":
        child = next(str(event["text"]) for event in notes.events if event["event"] == "note")
        assert started_at(int(child.split()[1])) is None


def test_scratch_survives_a_broken_worker(store: Store, runner: Runner) -> None:
    with pytest.raises(ReleaseError):
        run(store, runner, "silent-once")
    assert run(store, runner, "silent-once").record.report.measurements["attempts"] == 2


@pytest.mark.engine
def test_a_container_out_of_memory_says_so(store: Store) -> None:
    from quantmint.container import ContainerRunner, connect

    client = connect()
    try:
        runner = ContainerRunner(client, pinned_references(), store.root)
        with pytest.raises(ReleaseError) as caught:
            run(store, runner, "memory", memory=128 * 1024**2)
        assert caught.value.code == "STAGE_OUT_OF_MEMORY"
    finally:
        client.close()


KILLED = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import test_runners as t
    from quantmint.process import ProcessRunner
    from quantmint.store import Store
    store = Store(Path(sys.argv[2]))
    if sys.argv[3] == "process":
        runner = ProcessRunner(t.this_environment, store.folder("jobs"))
    else:
        from quantmint.container import ContainerRunner, connect
        runner = ContainerRunner(connect(), t.pinned_references(), store.root)
    class Loud(t.Notes):
        def event(self, stage, event):
            if event["event"] == "note":
                print(event["text"], flush=True)
    t.walk(store, runner)
    walker, data, worker = t.walk(store, runner, Loud())
    walker.execute(t.job(data, worker, ending="sleep-once", deadline=300), {})
    """
)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill-9", "ctrl-c"])
def test_a_killed_builder_leaves_nothing_running_and_the_next_resumes(
    store: Store, runner: Runner, number: signal.Signals
) -> None:
    builder = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(store.root), runner.kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert builder.stdout is not None
    child = int(builder.stdout.readline().split()[1])
    builder.send_signal(number)
    try:
        assert builder.wait(30) != 0
    finally:
        builder.kill()
        builder.wait()
        builder.stdout.close()
    assert runner.sweep() == (1 if number == signal.SIGKILL else 0)
    if runner.kind == "process":
        for _ in range(100):
            if started_at(child) is None:
                break
            time.sleep(0.05)
        assert started_at(child) is None
    assert run(store, runner, "sleep-once", deadline=300).record.report.measurements["attempts"] == 2


def test_two_builders_at_once_run_a_stage_once(store: Store, runner: Runner) -> None:
    from concurrent.futures import ThreadPoolExecutor

    notes = [Notes(), Notes()]
    walks = [walk(store, runner, note) for note in notes]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda entry: entry[0].execute(job(entry[1], entry[2]), {}), walks))
    assert sorted(finished.cached for finished in done) == [False, True]
