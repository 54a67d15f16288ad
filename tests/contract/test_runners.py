"""The job contract over every runner: same job, same report, nothing left running, every bad ending told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from quantmint.artifact import Tree, digest_of
from quantmint.document import canonical
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


@contextlib.contextmanager
def made_runner(kind: str, store: Store) -> Iterator[Runner]:
    if kind == "process":
        yield ProcessRunner(this_environment, store.folder("jobs"))
        return
    from quantmint.container import ContainerRunner, connect

    client = connect()
    try:
        runner = ContainerRunner(client, pinned_references(), store.root)
        yield runner
        assert not client.containers.list(all=True, filters={"label": f"dev.quantmint.job={runner._scope}"})
    finally:
        client.close()


@pytest.fixture(params=["process", pytest.param("container", marks=pytest.mark.engine)])
def runner(request: pytest.FixtureRequest, store: Store) -> Iterator[Runner]:
    with made_runner(request.param, store) as made:
        yield made


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
    assert walker.key(stage, {}) != other.key(stage, {})


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
    with made_runner("container", store) as runner:
        with pytest.raises(ReleaseError) as caught:
            run(store, runner, "memory", memory=128 * 1024**2)
        assert caught.value.code == "STAGE_OUT_OF_MEMORY"


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


def test_a_job_of_a_deep_folder_can_still_make_sockets(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    store = Store(deep / "state")
    runner = ProcessRunner(this_environment, store.folder("jobs"))
    found = run(store, runner, "well").record.report.measurements
    assert found["socket_in_tmpdir"] is True


def test_the_sweep_of_one_builder_spares_the_jobs_of_another(store: Store, runner: Runner) -> None:
    builder = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(store.root), runner.kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert builder.stdout is not None
        assert builder.stdout.readline()
        assert runner.sweep() == 0
        time.sleep(0.5)
        assert builder.poll() is None
    finally:
        builder.send_signal(signal.SIGINT)
        builder.wait(30)
        builder.stdout.close()


@pytest.mark.engine
def test_the_clients_proxy_never_enters_a_container(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxies = {"default": {"httpProxy": "http://alice:secret@127.0.0.1:9"}}
    (tmp_path / "config.json").write_text(json.dumps({"proxies": proxies}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with made_runner("container", store) as runner:
        assert run(store, runner, "well").record.report.measurements["secrets_in_environment"] is False


def test_two_builders_at_once_run_a_stage_once(store: Store, runner: Runner) -> None:
    from concurrent.futures import ThreadPoolExecutor

    notes = [Notes(), Notes()]
    walks = [walk(store, runner, note) for note in notes]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda entry: entry[0].execute(job(entry[1], entry[2]), {}), walks))
    assert sorted(finished.cached for finished in done) == [False, True]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("kind", ["process", pytest.param("container", marks=pytest.mark.engine)])
def test_a_full_disk_in_a_stage_is_told_and_loses_nothing(small_disk: Path, kind: str) -> None:
    store = Store(small_disk / "state")
    with made_runner(kind, store) as runner:
        with pytest.raises(ReleaseError) as caught:
            run(store, runner, "disk")
        assert caught.value.code == "DISK_FULL"
        assert run(store, runner, "well").record.outputs["copy"]


def foreign_image(folder: Path) -> str:
    """Load an image for arm64 into the engine, made by hand: one empty layer; its ID."""
    layer = folder / "layer.tar"
    with tarfile.open(layer, "w"):
        pass
    config = {
        "architecture": "arm64", "os": "linux", "config": {}, "history": [{"created_by": "test"}],
        "rootfs": {"type": "layers", "diff_ids": [digest_of(layer.read_bytes())]},
    }  # fmt: skip
    data = canonical(config)
    (folder / "config.json").write_bytes(data)
    (folder / "manifest.json").write_bytes(
        canonical([{"Config": "config.json", "RepoTags": None, "Layers": ["layer.tar"]}])
    )
    with tarfile.open(folder / "image.tar", "w") as archive:
        for name in ("config.json", "layer.tar", "manifest.json"):
            archive.add(folder / name, name)
    subprocess.run(["docker", "load", "-i", str(folder / "image.tar")], capture_output=True, check=True)
    return digest_of(data)


@pytest.mark.engine
class TestImages:
    """What the container runner says of images that it cannot run."""

    @pytest.mark.parametrize(
        ("reference", "code"),
        [
            ("sha256:" + "0" * 64, "IMAGE_ABSENT"),
            (f"{os.environ.get('QUANTMINT_REGISTRY', '127.0.0.1:1')}/quantmint/none@sha256:{'0' * 64}", "IMAGE_ABSENT"),
        ],
        ids=["local", "registry"],
    )
    def test_an_absent_image(self, store: Store, reference: str, code: str) -> None:
        assert self.refusal(store, {"verify": reference}).code == code

    def test_an_image_without_a_pin(self, store: Store) -> None:
        assert self.refusal(store, {}).code == "IMAGE_UNPINNED"

    def test_an_image_of_another_platform(self, store: Store, tmp_path: Path) -> None:
        image = foreign_image(tmp_path)
        try:
            error = self.refusal(store, {"verify": image})
        finally:
            subprocess.run(["docker", "rmi", image], capture_output=True, check=True)
        assert (error.code, error.expected, error.actual) == ("IMAGE_PLATFORM", "linux/amd64", "linux/arm64")

    def refusal(self, store: Store, references: dict[str, str]) -> ReleaseError:
        from quantmint.container import ContainerRunner, connect

        client = connect()
        try:
            with pytest.raises(ReleaseError) as caught:
                ContainerRunner(client, references, store.root).identity("verify")
        finally:
            client.close()
        return caught.value
