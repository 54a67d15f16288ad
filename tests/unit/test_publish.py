"""Publishing is atomic, replaces only what is ours, and leaves no staging behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quantmint.errors import ReleaseError
from quantmint.manifest import Predicate
from quantmint.publish import publish, recover, require_free, require_key_place, require_parent, staging
from quantmint.seal import seal
from quantmint.signers import generate
from quantmint.store import Store
from quantmint.verify import verify


def sealed(folder: Path, predicate: Predicate, text: str) -> bytes:
    (folder / "config.json").write_text(text)
    signer = generate()
    seal(folder, predicate, signer)
    return signer.public.pem


def test_a_package_appears_whole_and_the_next_replaces_it(tmp_path: Path, predicate: Predicate) -> None:
    out, store = tmp_path / "dist" / "demo", Store(tmp_path / "state")
    for text in ("{}", '{"a":1}'):
        with staging(out) as folder:
            key = sealed(folder, predicate, text)
            publish(folder, out, predicate.release, key, store)
        assert (out / "config.json").read_text() == text
        assert sorted(entry.name for entry in out.parent.iterdir()) == ["demo", "demo.pub"]
        assert verify(out, out.parent / "demo.pub").ok


def test_nothing_is_left_when_sealing_fails(tmp_path: Path) -> None:
    out = tmp_path / "dist" / "demo"

    def half_way() -> None:
        with staging(out) as folder:
            (folder / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half_way()
    assert not list(out.parent.iterdir())


def test_the_staging_of_a_killed_builder_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "dist" / "demo"
    left = out.parent / ".demo.staging-4194305-1"
    left.mkdir(parents=True)
    (left / "half").write_text("x")
    with staging(out):
        assert not left.exists()


def test_a_foreign_folder_is_refused_and_untouched(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(ReleaseError) as caught:
        require_free(out, "demo")
    assert caught.value.code == "OUTPUT_NOT_EMPTY"
    assert (out / "thesis.txt").read_text() == "mine"


def test_a_package_with_a_foreign_file_is_refused(tmp_path: Path, predicate: Predicate) -> None:
    out = tmp_path / "demo"
    out.mkdir()
    sealed(out, predicate, "{}")
    require_free(out, predicate.release)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ReleaseError) as caught:
        require_free(out, predicate.release)
    assert caught.value.actual == "notes.txt"


def test_another_release_is_refused(tmp_path: Path, predicate: Predicate) -> None:
    out = tmp_path / "demo"
    out.mkdir()
    sealed(out, predicate, "{}")
    with pytest.raises(ReleaseError) as caught:
        require_free(out, "another")
    assert (caught.value.expected, caught.value.actual) == ("another", predicate.release)


def test_a_damaged_package_of_the_same_release_may_be_replaced(tmp_path: Path, predicate: Predicate) -> None:
    out = tmp_path / "demo"
    out.mkdir()
    sealed(out, predicate, "{}")
    (out / "config.json").write_text("damaged")
    require_free(out, predicate.release)


def test_a_file_in_the_place_of_the_output_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    out.write_text("a file")
    with pytest.raises(ReleaseError):
        require_free(out, "demo")
    shutil.rmtree(tmp_path)


def test_the_public_key_never_replaces_a_key_that_no_release_put_there(tmp_path: Path, predicate: Predicate) -> None:
    store, out = Store(tmp_path / "state"), tmp_path / "demo"
    lasting = tmp_path / "demo.pub"
    lasting.write_bytes(generate().public.pem)
    with pytest.raises(ReleaseError) as caught:
        require_key_place(out, store, None)
    assert (caught.value.code, caught.value.file) == ("OUTPUT_NOT_EMPTY", str(lasting))
    require_key_place(out, store, lasting.read_bytes())
    lasting.unlink()
    lasting.mkdir()
    with pytest.raises(ReleaseError):
        require_key_place(out, store, None)


def test_a_key_that_waits_is_found_again(tmp_path: Path, predicate: Predicate) -> None:
    out, signer = tmp_path / "demo", generate()
    out.mkdir()
    (out / "config.json").write_text("{}")
    seal(out, predicate, signer)
    waiting = tmp_path / ".demo.pub.new"
    waiting.write_bytes(signer.public.pem)
    recover(out)
    assert (tmp_path / "demo.pub").read_bytes() == signer.public.pem
    waiting.write_bytes(generate().public.pem)
    recover(out)
    assert not waiting.exists()
    assert (tmp_path / "demo.pub").read_bytes() == signer.public.pem


@pytest.mark.parametrize("out", ["/dev/null/x/demo", "/proc/demo", "file/demo"])
def test_an_output_that_cannot_be_is_one_clear_error(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ReleaseError) as caught:
        require_parent(tmp_path / out)
    assert caught.value.code == "STORAGE_UNUSABLE"
