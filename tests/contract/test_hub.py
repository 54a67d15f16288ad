"""Fetching from a Hub that speaks the Hub's protocol over real HTTP, honest and dishonest."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from quantmint import hub
from quantmint.errors import ReleaseError
from quantmint.recipe import Source
from quantmint.source import fetch, tree_at
from quantmint.store import Store

COMMIT = "a" * 40
WEIGHTS = b"\x10\x00\x00\x00\x00\x00\x00\x00{}              "
FILES = {"config.json": b'{"model_type": "laguna"}', "model.safetensors": WEIGHTS, "sub/notes.txt": b"notes"}


class Hub(BaseHTTPRequestHandler):
    """The three answers of the Hub that fetching needs."""

    files: ClassVar[dict[str, bytes]] = FILES
    lies: ClassVar[dict[str, bytes]] = {}
    sha = COMMIT
    asked: ClassVar[list[str]] = []

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path == f"/api/models/org/model/revision/{COMMIT}":
            self.send(200, json.dumps(self.info()).encode(), {"Content-Type": "application/json"}, body=body)
            return
        prefix = f"/org/model/resolve/{COMMIT}/"
        name = path.removeprefix(prefix)
        if not path.startswith(prefix) or name not in self.files:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound" if "model" not in path else "EntryNotFound"}, body=body)
            return
        if body:
            self.asked.append(name)
        data = self.lies.get(name, self.files[name])
        etag = hashlib.sha256(data).hexdigest()
        self.send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}, body=body)

    def info(self) -> dict[str, object]:
        rows = []
        for name, data in self.files.items():
            row: dict[str, object] = {
                "rfilename": name,
                "size": len(data),
                "blobId": hashlib.sha1(usedforsecurity=False, string=b"blob %d\0" % len(data) + data).hexdigest(),
            }
            if name.endswith(".safetensors"):
                row["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            rows.append(row)
        return {
            "id": "org/model",
            "modelId": "org/model",
            "sha": self.sha,
            "siblings": rows,
            "private": False,
            "tags": [],
        }

    def send(self, status: int, data: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, type[Hub]]]:
    for name in ("HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    handler = type("ThisHub", (Hub,), {"lies": {}, "asked": [], "files": dict(FILES)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_every_file_of_the_commit_arrives_and_a_second_fetch_asks_for_none(
    endpoint: tuple[str, type[Hub]], tmp_path: Path
) -> None:
    url, handler = endpoint
    told: list[tuple[str, int, int]] = []
    for _ in range(2):
        hub.fetch("org/model", COMMIT, tmp_path / "m", endpoint=url, progress=lambda *row: told.append(row))
    assert {name: (tmp_path / "m" / name).read_bytes() for name in FILES} == FILES
    assert sorted(handler.asked) == sorted(FILES)
    assert told[-1] == ("sub/notes.txt", 3, 3)


def test_a_file_with_other_bytes_is_named(endpoint: tuple[str, type[Hub]], tmp_path: Path) -> None:
    url, handler = endpoint
    handler.lies = {"config.json": b'{"model_type": "laguNa"}'}
    with pytest.raises(ReleaseError) as caught:
        hub.fetch("org/model", COMMIT, tmp_path / "m", endpoint=url)
    assert (caught.value.code, caught.value.file) == ("SOURCE_CHANGED", "config.json")


def test_another_commit_is_refused(endpoint: tuple[str, type[Hub]], tmp_path: Path) -> None:
    url, handler = endpoint
    handler.sha = "b" * 40
    with pytest.raises(ReleaseError) as caught:
        hub.fetch("org/model", COMMIT, tmp_path / "m", endpoint=url)
    assert caught.value.code == "SOURCE_UNPINNED"


def test_a_path_that_escapes_is_refused(endpoint: tuple[str, type[Hub]], tmp_path: Path) -> None:
    url, handler = endpoint
    handler.files = {"../escape": b"x"}
    with pytest.raises(ReleaseError) as caught:
        hub.fetch("org/model", COMMIT, tmp_path / "m", endpoint=url)
    assert caught.value.code == "ILLEGAL_PATH"


def test_an_absent_repository_and_an_unreachable_hub_are_told_apart(
    endpoint: tuple[str, type[Hub]], tmp_path: Path
) -> None:
    url, _ = endpoint
    with pytest.raises(ReleaseError) as absent:
        hub.fetch("org/model", "c" * 40, tmp_path / "m", endpoint=url)
    with pytest.raises(ReleaseError) as unreachable:
        hub.fetch("org/model", COMMIT, tmp_path / "m", endpoint="http://127.0.0.1:9")
    assert (absent.value.code, unreachable.value.code) == ("SOURCE_MISSING", "REMOTE_FAILED")


def test_a_short_commit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError) as caught:
        hub.fetch("org/model", "abc", tmp_path / "m", endpoint="http://127.0.0.1:9")
    assert caught.value.code == "SOURCE_UNPINNED"


def folder_source(tmp_path: Path) -> tuple[Store, Source]:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "config.json").write_text("{}")
    plain = Source(uri="dir:source")
    return Store(tmp_path / "state"), Source(uri="dir:source", digest=tree_at(tmp_path, plain).digest)


def take(store: Store, source: Source, root: Path) -> str:
    return fetch("base", source, root=root, store=store, recipe="x.toml", notice=lambda *_: None).digest


def test_a_pinned_folder_is_taken_and_a_changed_file_is_named(tmp_path: Path) -> None:
    store, source = folder_source(tmp_path)
    assert take(store, source, tmp_path) == source.digest
    (tmp_path / "source" / "config.json").write_text("{ }")
    with pytest.raises(ReleaseError) as caught:
        take(store, source, tmp_path)
    assert (caught.value.code, caught.value.file) == ("SOURCE_CHANGED", "source/config.json")
    assert caught.value.expected != caught.value.actual


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (WEIGHTS[:-4], "CORRUPT_SHARD"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n",
            "LFS_POINTER",
        ),
    ],
)
def test_a_corrupt_shard_goes_no_further(tmp_path: Path, data: bytes, code: str) -> None:
    store, source = folder_source(tmp_path)
    (tmp_path / "source" / "model.safetensors").write_bytes(data)
    pinned = Source(uri="dir:source", digest=tree_at(tmp_path, source).digest)
    with pytest.raises(ReleaseError) as caught:
        take(store, pinned, tmp_path)
    assert (caught.value.code, caught.value.file) == (code, "model.safetensors")


def test_a_missing_folder_and_an_unpinned_source_are_told(tmp_path: Path) -> None:
    store, source = folder_source(tmp_path)
    with pytest.raises(ReleaseError) as unpinned:
        take(store, Source(uri="dir:source"), tmp_path)
    with pytest.raises(ReleaseError) as missing:
        take(store, Source(uri="dir:elsewhere", digest=source.digest), tmp_path)
    assert (unpinned.value.code, missing.value.code) == ("SOURCE_UNPINNED", "SOURCE_MISSING")
