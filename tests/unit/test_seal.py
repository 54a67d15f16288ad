from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantmint.errors import ReleaseError
from quantmint.manifest import MODEL_FILE, RELEASE_FILE, Predicate, SkippedGate
from quantmint.seal import measure, seal
from quantmint.signers import generate, write_public
from quantmint.verify import verify


@pytest.fixture
def package(tmp_path) -> Path:
    package = tmp_path / "dist" / "demo"
    (package / "evidence").mkdir(parents=True)
    (package / "model.safetensors").write_bytes(os.urandom(300_000))
    (package / "evidence" / "load.jsonl").write_bytes(b"{}\n")
    (package / "README.md").write_bytes(b"# demo\n")
    (package / "empty.txt").write_bytes(b"")
    return package


def names(package: Path) -> list[str]:
    return sorted(path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file())


def test_a_sealed_package_verifies(package, predicate):
    signer = generate()
    tree = seal(package, predicate, signer)
    assert [item.path for item in tree.artifacts] == [
        "README.md", "empty.txt", "evidence/load.jsonl", "model.safetensors",
    ]  # fmt: skip
    report = verify(package, signer.public)
    assert report.ok
    assert report.model_signature == "valid"
    assert names(package.parent) == sorted(f"demo/{name}" for name in names(package))


def test_sealing_again_gives_the_same_bytes(package, predicate):
    signer = generate()
    seal(package, predicate, signer)
    before = {name: (package / name).read_bytes() for name in names(package)}
    seal(package, predicate, signer)
    assert {name: (package / name).read_bytes() for name in names(package)} == before


def test_the_hub_may_edit_its_own_file(package, predicate):
    (package / ".gitattributes").write_text("a")
    signer = generate()
    tree = seal(package, predicate, signer)
    assert ".gitattributes" not in [item.path for item in tree.artifacts]
    (package / ".gitattributes").write_text("b")
    report = verify(package, signer.public)
    assert report.ok
    assert report.unsigned == (".gitattributes",)


def link(package: Path) -> None:
    (package / "link").symlink_to("README.md")


def cache(package: Path) -> None:
    (package / ".cache" / "huggingface").mkdir(parents=True)


def pipe(package: Path) -> None:
    os.mkfifo(package / "pipe")


def twin(package: Path) -> None:
    (package / "readme.MD").write_bytes(b"x")


@pytest.mark.parametrize("spoil", [link, cache, pipe, twin])
def test_what_a_package_must_not_hold_is_refused_and_nothing_signed(package, predicate, spoil):
    seal(package, predicate, generate())
    spoil(package)
    with pytest.raises(ReleaseError) as caught:
        seal(package, predicate, generate())
    assert caught.value.code == "SEAL_REFUSED"
    assert not {MODEL_FILE, RELEASE_FILE} & set(names(package))


@pytest.mark.parametrize("name", [MODEL_FILE, RELEASE_FILE])
def test_a_folder_in_place_of_a_signature_is_refused(package, predicate, name):
    (package / name).mkdir()
    with pytest.raises(ReleaseError) as caught:
        seal(package, predicate, generate())
    assert (caught.value.code, caught.value.file) == ("SEAL_REFUSED", name)
    assert not {MODEL_FILE, RELEASE_FILE} & set(names(package))


def test_an_absent_package_is_said(tmp_path, predicate):
    with pytest.raises(ReleaseError) as caught:
        seal(tmp_path / "absent", predicate, generate())
    assert caught.value.code == "PACKAGE_MISSING"


class Meddler:
    """A signer whose machine changes a file between hashing and signing."""

    def __init__(self, victim: Path) -> None:
        self._signer = generate()
        self._victim = victim

    @property
    def public(self):
        return self._signer.public

    def sign(self, message: bytes) -> bytes:
        data = bytearray(self._victim.read_bytes())
        data[0] ^= 1
        self._victim.write_bytes(data)
        return self._signer.sign(message)


class Forger(Meddler):
    """A signer that signs something else than it was given."""

    def sign(self, message: bytes) -> bytes:
        return self._signer.sign(message + b" ")


def test_a_package_that_changes_while_sealed_stays_unsigned(package, predicate):
    victim = package / "README.md"

    class Once(Meddler):
        done = False

        def sign(self, message: bytes) -> bytes:
            if self.done:
                return self._signer.sign(message)
            self.done = True
            return super().sign(message)

    with pytest.raises(ReleaseError, match="CHANGED_FILE") as caught:
        seal(package, predicate, Once(victim))
    assert (caught.value.code, caught.value.file) == ("SEAL_REFUSED", "README.md")
    assert not {MODEL_FILE, RELEASE_FILE} & set(names(package))


def test_a_signature_that_does_not_hold_is_never_left_behind(package, predicate):
    with pytest.raises(ReleaseError) as caught:
        seal(package, predicate, Forger(package / "README.md"))
    assert caught.value.code == "SIGNATURE_INVALID"
    assert not {MODEL_FILE, RELEASE_FILE} & set(names(package))


def test_measure_gives_both_digests(package):
    tree, blake3 = measure(package)
    assert tree["empty.txt"].digest == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert blake3["empty.txt"] == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert set(blake3) == {item.path for item in tree.artifacts}


def test_the_stock_tool_verifies_a_package_and_notices_a_flipped_byte(package, predicate, tmp_path):
    signer, public = generate(), tmp_path / "demo.pub"
    seal(package, predicate, signer)
    write_public(signer.public, public)
    (package / ".cache" / "huggingface").mkdir(parents=True)
    (package / ".cache" / "huggingface" / "x.metadata").write_text("x")
    (package / ".gitattributes").write_text("x")
    command = [
        sys.executable, "-m", "model_signing", "verify", "key", str(package),
        "--signature", str(package / MODEL_FILE), "--public_key", str(public),
    ]  # fmt: skip
    good = subprocess.run(command, capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stderr
    assert "succeeded" in good.stdout + good.stderr
    data = bytearray((package / "model.safetensors").read_bytes())
    data[1000] ^= 1
    (package / "model.safetensors").write_bytes(data)
    assert subprocess.run(command, capture_output=True, text=True, check=False).returncode != 0


def test_skipped_gates_are_sealed_and_shown(package, predicate):
    fields = {name: getattr(predicate, name) for name in Predicate.model_fields}
    skipped = Predicate.model_validate(
        {**fields, "skipped_gates": (SkippedGate(gate="soak", target="cpu", reason="asked for by --skip"),)}
    )
    signer = generate()
    seal(package, skipped, signer)
    (line,) = verify(package, signer.public).skipped_gates
    assert (line.gate, line.reason) == ("soak", "asked for by --skip")
