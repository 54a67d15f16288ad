"""The store: content decides, nothing half-written is ever found, a wrong blob is never used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmint.artifact import Artifact, Tree, collision, digest_of, illegal_because
from quantmint.errors import ReleaseError
from quantmint.stage import JobReport, Output
from quantmint.store import Record, Store, clear, hash_tree, walk


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


def test_what_goes_in_comes_out(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    (source / "a" / "b.bin").write_bytes(b"one")
    (source / "c.bin").write_bytes(b"two")
    tree = store.add_tree(source)
    assert tree == hash_tree(source)
    store.put_tree(tree, tmp_path / "copy")
    assert hash_tree(tmp_path / "copy") == tree
    assert (source / "c.bin").exists()


def test_a_copy_out_is_a_file_of_its_own(store: Store, tmp_path: Path) -> None:
    artifact = store.add_bytes(b"weights", "w")
    store.copy_out(artifact, tmp_path / "w")
    (tmp_path / "w").write_bytes(b"changed")
    assert store.blob(artifact.digest).read_bytes() == b"weights"


def test_a_rotten_blob_is_never_used_and_set_aside(store: Store, tmp_path: Path) -> None:
    artifact = store.add_bytes(b"weights", "w")
    blob = store.blob(artifact.digest)
    blob.chmod(0o644)
    blob.write_bytes(b"WEIGHTS")
    with pytest.raises(ReleaseError) as caught:
        store.put(artifact, tmp_path / "w")
    assert (caught.value.code, caught.value.expected) == ("STORE_CORRUPT", artifact.digest)
    assert not store.has(artifact)


def test_a_rotten_blob_is_never_published(store: Store, tmp_path: Path) -> None:
    artifact = store.add_bytes(b"weights", "w")
    store.blob(artifact.digest).chmod(0o644)
    store.blob(artifact.digest).write_bytes(b"WEIGHTS")
    with pytest.raises(ReleaseError) as caught:
        store.copy_out(artifact, tmp_path / "w")
    assert (caught.value.code, caught.value.file) == ("STORE_CORRUPT", "w")
    assert not store.has(artifact)


def test_a_damaged_record_is_no_record(store: Store) -> None:
    key = digest_of(b"key")
    report = JobReport(contract=1, key=key, status="completed", measurements={}, environment={})
    store.keep(key, Record(report=report, outputs={}))
    path = next((store.root / "records").iterdir())
    path.write_bytes(path.read_bytes()[:-5])
    assert store.record(key) is None
    assert store.record(key) is None


def test_drafts_of_the_dead_are_removed_and_those_of_the_living_kept(store: Store) -> None:
    drafts = store.folder("drafts")
    for name in ("a.4194304", f"b.{os.getpid()}"):
        (drafts / name).write_text("x")
    store.sweep()
    assert [path.name for path in drafts.iterdir()] == [f"b.{os.getpid()}"]


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ReleaseError) as caught:
        Store(tmp_path / "file").add_bytes(b"x", "x")
    assert caught.value.code == "STORAGE_UNUSABLE"


def test_a_record_without_its_blobs_is_no_record(store: Store) -> None:
    artifact = store.add_bytes(b"out", "out")
    key = digest_of(b"key")
    report = JobReport(contract=1, key=key, status="completed", measurements={"n": 1}, environment={})
    record = Record(report=report, outputs={"out": Tree.of([artifact])})
    store.keep(key, record)
    assert store.record(key) == record
    store.blob(artifact.digest).unlink()
    assert store.record(key) is None


def test_undeclared_and_missing_outputs_are_told_apart(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.json").write_text("{}")
    declared = (Output(name="copy", kind="file", path="copy"),)
    with pytest.raises(ReleaseError) as missing:
        store.collect(out, declared)
    (out / "copy").write_text("x")
    (out / "more").write_text("x")
    with pytest.raises(ReleaseError) as undeclared:
        store.collect(out, declared)
    assert (missing.value.code, undeclared.value.code) == ("OUTPUT_MISSING", "OUTPUT_UNDECLARED")
    assert (missing.value.file, undeclared.value.file) == ("copy", "more")


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_links_and_special_files_are_refused(tmp_path: Path, kind: str) -> None:
    if kind == "link":
        (tmp_path / "x").symlink_to("/etc/passwd")
    else:
        os.mkfifo(tmp_path / "x")
    with pytest.raises(ReleaseError) as caught:
        walk(tmp_path)
    assert caught.value.code == "ILLEGAL_PATH"


def test_clear_removes_read_only_folders(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "x").write_text("x")
    (folder / "in").chmod(0o500)
    clear(folder)
    assert not folder.exists()


@pytest.mark.parametrize(
    "path", ["/a", "a//b", "../a", "a/../b", "a\\b", "c:a", "a\n", "nul", "a.", "a/", "", "e\u0301", "x" * 256]
)
def test_illegal_paths(path: str) -> None:
    assert illegal_because(path)


@given(st.lists(st.sampled_from(["a", "b", "A", "a/b", "B/c", "d/e/f"]), unique=True))
def test_a_collision_is_found_exactly_when_two_paths_are_one_without_case(paths: list[str]) -> None:
    folded = [path.casefold() for path in paths]
    same = len(set(folded)) != len(folded)
    nested = any(one != other and other.startswith(one + "/") for one in folded for other in folded)
    assert (collision(paths) is not None) == (same or nested)


@given(st.dictionaries(st.sampled_from(["a", "b", "c/d"]), st.binary(max_size=8)))
def test_the_tree_digest_is_a_function_of_the_set(files: dict[str, bytes]) -> None:
    artifacts = [Artifact(path=path, size=len(data), digest=digest_of(data)) for path, data in files.items()]
    assert Tree.of(artifacts).digest == Tree.of(reversed(artifacts)).digest
