from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quantmint.errors import ReleaseError
from quantmint.evidence import Evidence, EvidenceFile, Threshold, Verdict
from quantmint.manifest import PLAN_FILE, RECIPE_FILE, RELEASE_FILE, Predicate
from quantmint.rerender import MAX_TEXT_BYTES, rerender
from quantmint.seal import measure, seal
from quantmint.signers import generate, write_public
from quantmint.statement import pae
from quantmint.verify import VerifyReport, read_release, verify

SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def signer():
    return generate()


@pytest.fixture
def package(tmp_path, predicate, signer) -> Path:
    package = tmp_path / "demo"
    (package / "launch").mkdir(parents=True)
    (package / SHARD).write_bytes(os.urandom(5_000_000))
    (package / "launch" / "cpu.toml").write_bytes(b"x = 1\n")
    (package / "README.md").write_bytes(b"# demo\n")
    seal(package, predicate, signer)
    return package


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_whole_package_has_no_findings(package, signer, algorithm, workers):
    report = verify(package, signer.public, algorithm=algorithm, workers=workers)
    assert report.ok
    report.demand_ok()
    assert (report.subjects, report.files_hashed, report.bytes_hashed) == (3, 3, 5_000_000 + 6 + 7)
    assert (report.release, report.grade, report.epoch, report.source) == ("demo", "development", 1, "dir:source")
    assert report.key == "sha256:" + signer.public.key_id
    assert str(package) not in report.model_dump_json()
    assert VerifyReport.model_validate_json(report.canonical()) == report


def test_the_key_may_be_a_file(package, signer, tmp_path):
    write_public(signer.public, tmp_path / "demo.pub")
    assert verify(package, tmp_path / "demo.pub").ok


def test_progress_tells_of_every_byte_in_order(package, signer):
    seen: list[tuple[str, int, int]] = []
    report = verify(package, signer.public, progress=lambda *event: seen.append(event))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1:] == (report.bytes_hashed, report.bytes_hashed)
    assert {name for name, _, _ in seen} == {SHARD, "launch/cpu.toml", "README.md"}


def test_demand_ok_names_the_file_and_its_digests(package, signer):
    (package / "README.md").write_bytes(b"# Demo\n")
    (package / "extra").write_bytes(b"")
    with pytest.raises(ReleaseError) as caught:
        verify(package, signer.public).demand_ok()
    error = caught.value
    assert (error.code, error.exit_code, error.file) == ("VERIFICATION_FAILED", 6, "README.md")
    assert error.expected == "sha256:" + hashlib.sha256(b"# demo\n").hexdigest()
    assert error.actual == "sha256:" + hashlib.sha256(b"# Demo\n").hexdigest()
    assert "1 more" in error.message


def test_a_report_without_any_hashed_file_is_not_ok(package, signer):
    report = verify(package, signer.public)
    nothing = VerifyReport.model_validate(
        {**{name: getattr(report, name) for name in VerifyReport.model_fields}, "files_hashed": 0}
    )
    assert not nothing.ok
    with pytest.raises(ReleaseError) as caught:
        nothing.demand_ok()
    assert caught.value.code == "VERIFICATION_FAILED"


def test_gates_are_shown_with_their_verdicts(package, signer, predicate):
    tree, _ = measure(package)
    readme = tree["README.md"]
    gate = Evidence(
        gate="api",
        target="cpu",
        verdict=Verdict.FAILED,
        reasons=("exact: 3, accepted >= 4",),
        thresholds=(Threshold(measurement="exact", op=">=", value=4),),
        measurements={"exact": 3},
        environment={},
        files=(EvidenceFile(path=readme.path, size=readme.size, digest=readme.digest),),
    )
    fields = {name: getattr(predicate, name) for name in Predicate.model_fields}
    seal(package, Predicate.model_validate({**fields, "gates": (gate,)}), signer)
    report = verify(package, signer.public)
    (line,) = report.gates
    assert (line.gate, line.target, line.verdict, line.reasons) == ("api", "cpu", "FAILED", gate.reasons)
    assert report.grade == "development"


def as_hub_cache(package: Path, root: Path) -> Path:
    """The layout of a Hub cache: blobs named by digest, a snapshot of links."""
    repo = root / "models--org--demo"
    snapshot = repo / "snapshots" / ("0" * 40)
    (repo / "blobs").mkdir(parents=True)
    for path in sorted(package.rglob("*")):
        if path.is_file():
            blob = repo / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.copyfile(path, blob)
            link = snapshot / path.relative_to(package)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_a_hub_cache_verifies(package, signer, tmp_path):
    snapshot = as_hub_cache(package, tmp_path / "hub")
    report = verify(snapshot, signer.public)
    assert report.ok
    assert (report.files_hashed, report.model_signature) == (3, "valid")
    (tmp_path / "alias").symlink_to(snapshot)
    assert verify(tmp_path / "alias", signer.public).ok


def test_a_changed_blob_of_a_hub_cache_is_found(package, signer, tmp_path):
    snapshot = as_hub_cache(package, tmp_path / "hub")
    blob = (snapshot / SHARD).resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 128
    blob.write_bytes(data)
    (finding,) = verify(snapshot, signer.public).findings
    assert (finding.code, finding.file) == ("CHANGED_FILE", SHARD)


def test_a_local_dir_download_verifies(package, signer):
    cache = package / ".cache" / "huggingface" / "download"
    cache.mkdir(parents=True)
    (cache / "README.md.metadata").write_text("x")
    (package / ".gitattributes").write_text("x")
    report = verify(package, signer.public)
    assert report.ok
    assert report.unsigned == (".gitattributes", ".cache/huggingface/")


def test_nothing_else_hides_in_the_cache_folder(package, signer):
    (package / ".cache" / "other").mkdir(parents=True)
    (package / ".cache" / "other" / "x.py").write_text("x")
    (finding,) = verify(package, signer.public).findings
    assert (finding.code, finding.file) == ("EXTRA_FILE", ".cache/other/x.py")


def test_read_release_with_and_without_a_key(package, signer):
    release = read_release(package, public_key=signer.public)
    assert release.predicate.release == "demo"
    assert [subject.name for subject in release.statement.subjects] == ["README.md", "launch/cpu.toml", SHARD]
    assert read_release(package, public_key=None).digest == release.digest
    with pytest.raises(ReleaseError) as caught:
        read_release(package, public_key=generate().public)
    assert caught.value.code == "SIGNATURE_INVALID"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_alone_verifies_the_release_statement(package, signer, tmp_path):
    bundle = json.loads((package / RELEASE_FILE).read_bytes())
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    (tmp_path / "signed").write_bytes(pae(payload))
    (tmp_path / "signature").write_bytes(base64.b64decode(bundle["dsseEnvelope"]["signatures"][0]["sig"]))
    write_public(signer.public, tmp_path / "demo.pub")
    command = ["openssl", "dgst", "-sha256", "-verify", "demo.pub", "-signature", "signature", "signed"]
    good = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (good.returncode, good.stdout) == (0, "Verified OK\n")
    (tmp_path / "signed").write_bytes(pae(payload + b" "))
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode != 0


def test_verifying_imports_nothing_heavy(package, signer, tmp_path):
    write_public(signer.public, tmp_path / "demo.pub")
    program = (
        "import sys, pathlib; from quantmint.verify import verify;"
        "assert verify(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])).ok;"
        "heavy = {'torch', 'vllm', 'modelopt', 'docker', 'huggingface_hub', 'requests', 'numpy', 'ray', 'safetensors'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, str(package), str(tmp_path / "demo.pub")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda place, _: place.write_bytes(b"\xff\xfe"), "MALFORMED_DOCUMENT"),
        (lambda place, _: place.write_bytes(b""), "INVALID_VALUE"),
        (lambda place, _: place.write_bytes(b"x = " + b"[" * 5_000 + b"]" * 5_000), "RECIPE_SYNTAX"),
        (lambda place, _: place.write_bytes(b"#" * (MAX_TEXT_BYTES + 1)), "MALFORMED_DOCUMENT"),
        (lambda place, _: place.unlink(), "MALFORMED_DOCUMENT"),
        (lambda place, outside: (place.unlink(), place.symlink_to(outside)), "MALFORMED_DOCUMENT"),
        (lambda place, _: (place.unlink(), os.mkfifo(place)), "MALFORMED_DOCUMENT"),
    ],
    ids=["not UTF-8", "empty", "deep", "large", "missing", "link", "pipe"],
)
@pytest.mark.timeout(20)
def test_a_card_is_not_rendered_from_what_is_no_recipe(package, predicate, signer, root, tmp_path, spoil, code):
    recipe = (root / "manifests" / "recipes" / "demo.toml").read_bytes()
    (tmp_path / "outside").write_bytes(recipe)
    place = package / RECIPE_FILE
    place.parent.mkdir()
    place.write_bytes(recipe)
    with pytest.raises(ReleaseError) as caught:
        rerender(package)
    assert caught.value.file == PLAN_FILE
    spoil(place, tmp_path / "outside")
    with pytest.raises(ReleaseError) as caught:
        rerender(package)
    assert (caught.value.code, caught.value.file) == (code, RECIPE_FILE)


@pytest.mark.parametrize("data", [b"\xff", b"[" * 100_000, b"{}", b'{"plan":1,"plan":1}'])
def test_a_card_is_not_rendered_from_what_is_no_plan(package, root, data):
    (package / RECIPE_FILE).parent.mkdir()
    (package / RECIPE_FILE).write_bytes((root / "manifests" / "recipes" / "demo.toml").read_bytes())
    (package / PLAN_FILE).write_bytes(data)
    with pytest.raises(ReleaseError) as caught:
        rerender(package)
    assert caught.value.code in ("MALFORMED_DOCUMENT", "DUPLICATE_KEY")
    assert caught.value.file == PLAN_FILE
