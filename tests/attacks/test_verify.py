"""One test for each attack on a sealed package or its statements; each must be noticed, and by name."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.artifact import Artifact, Tree, digest_of
from quantmint.errors import Exit, ReleaseError
from quantmint.manifest import MODEL_FILE, PREDICATE_TYPE, RELEASE_FILE, model_statement
from quantmint.seal import measure, seal
from quantmint.signers import generate, load_public, write_public
from quantmint.statement import MAX_BUNDLE_BYTES, bundle_bytes, pae
from quantmint.verify import VerifyReport, list_package, read_release, verify

SHARD = "model.safetensors"


@pytest.fixture
def signer():
    return generate()


@pytest.fixture
def package(tmp_path, predicate, signer) -> Path:
    return make(tmp_path / "demo", predicate, signer)


def make(package: Path, predicate, signer, fill: bytes = b"w") -> Path:
    (package / "launch").mkdir(parents=True)
    (package / SHARD).write_bytes(fill * 100_000)
    (package / "launch" / "cpu.toml").write_bytes(b"x = 1\n")
    (package / "README.md").write_bytes(b"# demo\n")
    seal(package, predicate, signer)
    return package


def found(package: Path, signer) -> list[tuple[str, str | None]]:
    """The findings; none of the attacks may leave the report in order."""
    report = verify(package, signer.public)
    assert not report.ok
    with pytest.raises(ReleaseError) as caught:
        report.demand_ok()
    assert (caught.value.code, caught.value.exit_code) == ("VERIFICATION_FAILED", Exit.INTEGRITY)
    assert VerifyReport.model_validate_json(report.canonical()) == report
    return [(finding.code, finding.file) for finding in report.findings]


def refused(package: Path, signer, file: str = RELEASE_FILE) -> ReleaseError:
    """The refusal to look at files at all."""
    with pytest.raises(ReleaseError) as caught:
        verify(package, signer.public)
    assert caught.value.exit_code == Exit.INTEGRITY
    assert caught.value.file == file
    return caught.value


def payload_of(package: Path, name: str = RELEASE_FILE) -> bytes:
    return base64.b64decode(json.loads((package / name).read_bytes())["dsseEnvelope"]["payload"])


def sign(package: Path, signer, payload: bytes, name: str = RELEASE_FILE) -> None:
    """What the holder of the key, or of a stolen key, can do: sign anything."""
    (package / name).write_bytes(bundle_bytes(payload, signer.sign(pae(payload)), signer.public.key_id))


def resign(package: Path, signer, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(payload_of(package))
    change(value)
    sign(package, signer, json.dumps(value).encode())


def rebundle(package: Path, change: Callable[[dict[str, Any]], object], name: str = RELEASE_FILE) -> None:
    value = json.loads((package / name).read_bytes())
    change(value)
    (package / name).write_text(json.dumps(value))


# the files


def test_flipped_byte(package, signer):
    data = bytearray((package / SHARD).read_bytes())
    data[50_000] ^= 1
    (package / SHARD).write_bytes(data)
    (finding,) = verify(package, signer.public).findings
    assert (finding.code, finding.file) == ("CHANGED_FILE", SHARD)
    assert finding.actual == digest_of(bytes(data))
    assert finding.expected == digest_of(b"w" * 100_000)
    assert finding.expected_blake3 != finding.actual_blake3
    assert finding.expected_size == finding.actual_size == 100_000


def test_truncated_file(package, signer):
    os.truncate(package / SHARD, 99_999)
    assert found(package, signer) == [("TRUNCATED_FILE", SHARD)]


def test_grown_file(package, signer):
    with (package / SHARD).open("ab") as stream:
        stream.write(b"!")
    assert found(package, signer) == [("GROWN_FILE", SHARD)]


def test_emptied_file(package, signer):
    os.truncate(package / SHARD, 0)
    assert found(package, signer) == [("TRUNCATED_FILE", SHARD)]


def test_extra_file(package, signer):
    (package / "modeling_evil.py").write_text("import os")
    assert found(package, signer) == [("EXTRA_FILE", "modeling_evil.py")]


def test_extra_file_in_a_git_folder(package, signer):
    (package / ".git").mkdir()
    (package / ".git" / "payload").write_text("x")
    assert found(package, signer) == [("EXTRA_FILE", ".git/payload")]


@pytest.mark.parametrize("folder", [MODEL_FILE, ".gitattributes"])
def test_folder_with_the_name_of_an_unsigned_file(package, signer, folder):
    (package / folder).unlink(missing_ok=True)
    (package / folder).mkdir()
    (package / folder / "x.py").write_text("x")
    missing = [("MISSING_FILE", MODEL_FILE)] if folder == MODEL_FILE else []
    assert found(package, signer) == [("EXTRA_FILE", f"{folder}/x.py"), *missing]


def test_missing_file(package, signer):
    (package / SHARD).unlink()
    assert found(package, signer) == [("MISSING_FILE", SHARD)]


def test_every_file_missing(package, signer):
    for path in (SHARD, "README.md", "launch/cpu.toml"):
        (package / path).unlink()
    report = verify(package, signer.public)
    assert report.files_hashed == 0
    assert {finding.code for finding in report.findings} == {"MISSING_FILE"}
    assert not report.ok


def test_renamed_file(package, signer):
    (package / SHARD).rename(package / "weights.safetensors")
    assert found(package, signer) == [("MISSING_FILE", SHARD), ("EXTRA_FILE", "weights.safetensors")]


def test_two_files_swapped(package, signer):
    one, two = (package / "README.md").read_bytes(), (package / "launch/cpu.toml").read_bytes()
    (package / "README.md").write_bytes(two)
    (package / "launch/cpu.toml").write_bytes(one)
    assert found(package, signer) == [("TRUNCATED_FILE", "README.md"), ("GROWN_FILE", "launch/cpu.toml")]


def test_case_collision_on_disk(package, signer):
    (package / "readme.md").write_bytes(b"# demo\n")
    assert found(package, signer) == [("EXTRA_FILE", "readme.md")]


def test_lfs_pointer_in_place_of_a_shard(package, signer):
    oid = digest_of((package / SHARD).read_bytes()).removeprefix("sha256:")
    (package / SHARD).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 100000\n")
    assert found(package, signer) == [("TRUNCATED_FILE", SHARD)]
    (finding,) = verify(package, signer.public).findings
    assert "git lfs pull" in (finding.hint or "")


def test_lfs_pointer_to_another_file(package, signer):
    (package / SHARD).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 100000\n")
    (finding,) = verify(package, signer.public).findings
    assert "other file" in (finding.hint or "")


# what is no file


def test_symlink_that_points_outside(package, signer, tmp_path):
    (tmp_path / "outside").write_bytes((package / SHARD).read_bytes())
    (package / SHARD).unlink()
    (package / SHARD).symlink_to(tmp_path / "outside")
    assert found(package, signer) == [("MISSING_FILE", SHARD), ("SYMLINK", SHARD)]


def test_symlink_to_a_folder_is_not_entered(package, signer, tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "x").write_text("x")
    (package / "more").symlink_to(tmp_path / "secret")
    assert found(package, signer) == [("SYMLINK", "more")]


def test_symlink_within_the_package(package, signer):
    (package / "copy").symlink_to("README.md")
    assert found(package, signer) == [("SYMLINK", "copy")]


def test_download_cache_that_is_a_symlink(package, signer, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (package / ".cache").mkdir()
    (package / ".cache" / "huggingface").symlink_to(tmp_path / "elsewhere")
    assert found(package, signer) == [("SYMLINK", ".cache/huggingface")]


def test_statement_that_is_a_symlink(package, signer, tmp_path):
    (package / RELEASE_FILE).rename(tmp_path / "statement")
    (package / RELEASE_FILE).symlink_to(tmp_path / "statement")
    assert refused(package, signer).code == "SIGNATURE_MISSING"


def snapshot_of(package: Path, root: Path) -> Path:
    snapshot = root / "models--o--m" / "snapshots" / "main"
    shutil.copytree(package, snapshot)
    (root / "models--o--m" / "blobs").mkdir()
    return snapshot


@pytest.mark.parametrize(
    "target", ["../../../models--other/blobs/x", "../../blobs/../secret", "../../blobs/deep/x", "/etc/hostname", "loop"]
)
def test_snapshot_link_that_leaves_its_blobs(package, signer, tmp_path, target):
    snapshot = snapshot_of(package, tmp_path / "hub")
    for path in ("models--other/blobs/x", "models--o--m/secret", "models--o--m/blobs/deep/x"):
        (tmp_path / "hub" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package / SHARD, tmp_path / "hub" / path)
    (snapshot / SHARD).unlink()
    (snapshot / SHARD).symlink_to(target if target != "loop" else SHARD)
    assert found(snapshot, signer) == [("MISSING_FILE", SHARD), ("SYMLINK", SHARD)]


def test_snapshot_link_to_a_blob_that_is_a_link(package, signer, tmp_path):
    snapshot = snapshot_of(package, tmp_path / "hub")
    blob = tmp_path / "hub" / "models--o--m" / "blobs" / "b"
    blob.symlink_to(package / SHARD)
    (snapshot / SHARD).unlink()
    (snapshot / SHARD).symlink_to("../../blobs/b")
    assert found(snapshot, signer) == [("MISSING_FILE", SHARD), ("SYMLINK", SHARD)]


def test_snapshot_link_to_a_missing_blob(package, signer, tmp_path):
    snapshot = snapshot_of(package, tmp_path / "hub")
    (snapshot / SHARD).unlink()
    (snapshot / SHARD).symlink_to("../../blobs/gone")
    assert found(snapshot, signer) == [("MISSING_FILE", SHARD), ("SYMLINK", SHARD)]


@pytest.mark.timeout(20)
def test_fifo_does_not_hang(package, signer):
    (package / SHARD).unlink()
    os.mkfifo(package / SHARD)
    assert found(package, signer) == [("MISSING_FILE", SHARD), ("SPECIAL_FILE", SHARD)]


@pytest.mark.timeout(20)
def test_fifo_in_place_of_the_statement_does_not_hang(package, signer):
    (package / RELEASE_FILE).unlink()
    os.mkfifo(package / RELEASE_FILE)
    assert refused(package, signer).code == "SIGNATURE_MISSING"


def test_socket(package, signer, monkeypatch):
    monkeypatch.chdir(package)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        assert found(package, signer) == [("SPECIAL_FILE", "s")]


def test_file_name_that_is_not_utf_8(package, signer):
    (package / os.fsdecode(b"\xff\xfe.py")).write_text("x")
    assert found(package, signer) == [("ILLEGAL_NAME", "\\xff\\xfe.py")]


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "a:b", "back\\slash", "nul", "e\u0301.txt", "\u202egpj.exe"])
def test_file_name_that_is_not_portable(package, signer, name):
    (package / name).write_text("x")
    ((code, file),) = found(package, signer)
    assert code == "ILLEGAL_NAME"
    assert (file or "").isprintable()


def test_more_entries_than_any_release(package):
    for number in range(10):
        (package / f"z{number}").write_text("x")
    whole = list_package(package)
    assert (len(whole.files), whole.findings) == (15, [])
    cut = list_package(package, limit=7)
    assert [finding.code for finding in cut.findings] == ["TOO_MANY_FILES"]
    assert {RELEASE_FILE, MODEL_FILE} < cut.files.keys()
    assert len(cut.files) < 15


def test_file_that_vanishes_while_verifying(package, signer):
    report = verify(
        package, signer.public, workers=1, progress=lambda *_: (package / "README.md").unlink(missing_ok=True)
    )
    assert [(finding.code, finding.file) for finding in report.findings] == [("UNREADABLE_FILE", "README.md")]


def test_file_that_becomes_a_link_while_verifying(package, signer, tmp_path):
    shutil.copyfile(package / "README.md", tmp_path / "same")

    def swap(*_: object) -> None:
        (package / "README.md").unlink()
        (package / "README.md").symlink_to(tmp_path / "same")

    report = verify(package, signer.public, workers=1, progress=swap)
    assert [(finding.code, finding.file) for finding in report.findings] == [("UNREADABLE_FILE", "README.md")]


@pytest.mark.timeout(20)
def test_file_that_becomes_a_fifo_while_verifying(package, signer):
    def swap(*_: object) -> None:
        (package / "README.md").unlink()
        os.mkfifo(package / "README.md")

    report = verify(package, signer.public, workers=1, progress=swap)
    assert [(finding.code, finding.file) for finding in report.findings] == [("UNREADABLE_FILE", "README.md")]


def test_file_that_grows_while_verifying(package, signer):
    report = verify(
        package, signer.public, workers=1, progress=lambda *_: (package / "README.md").write_bytes(b"# demo, longer\n")
    )
    assert [(finding.code, finding.file) for finding in report.findings] == [("GROWN_FILE", "README.md")]


# the statement and its signature


def test_no_statement(package, signer):
    (package / RELEASE_FILE).unlink()
    assert refused(package, signer).code == "SIGNATURE_MISSING"


def test_no_package(tmp_path, signer):
    with pytest.raises(ReleaseError) as caught:
        verify(tmp_path / "absent", signer.public)
    assert caught.value.code == "PACKAGE_MISSING"


def test_signature_by_another_key(package, signer, predicate):
    seal(package, predicate, generate())
    error = refused(package, signer)
    assert error.code == "SIGNATURE_INVALID"
    assert error.expected == "sha256:" + signer.public.key_id


def test_signature_by_another_key_with_the_hint_of_ours(package, signer):
    payload = payload_of(package)
    (package / RELEASE_FILE).write_bytes(bundle_bytes(payload, generate().sign(pae(payload)), signer.public.key_id))
    assert refused(package, signer).code == "SIGNATURE_INVALID"


def test_payload_swapped_between_two_packages(package, signer, predicate, tmp_path):
    other = make(tmp_path / "other", predicate, signer, b"o")
    foreign = json.loads((other / RELEASE_FILE).read_bytes())["dsseEnvelope"]["payload"]
    rebundle(package, lambda b: b["dsseEnvelope"].update(payload=foreign))
    assert refused(package, signer).code == "SIGNATURE_INVALID"


def test_statement_swapped_between_two_packages(package, signer, predicate, tmp_path):
    other = make(tmp_path / "other", predicate, signer, b"o")
    for name in (RELEASE_FILE, MODEL_FILE):
        shutil.copyfile(other / name, package / name)
    assert found(package, signer) == [("CHANGED_FILE", SHARD)]


def test_two_signatures(package, signer):
    rebundle(package, lambda b: b["dsseEnvelope"]["signatures"].append(b["dsseEnvelope"]["signatures"][0]))
    assert refused(package, signer).code == "MALFORMED_DOCUMENT"


def test_no_signature(package, signer):
    rebundle(package, lambda b: b["dsseEnvelope"].update(signatures=[]))
    assert refused(package, signer).code == "MALFORMED_DOCUMENT"


def test_wrong_payload_type(package, signer):
    rebundle(package, lambda b: b["dsseEnvelope"].update(payloadType="application/json"))
    assert refused(package, signer).code == "MALFORMED_DOCUMENT"


def test_duplicate_key_in_the_bundle(package, signer):
    text = (package / RELEASE_FILE).read_text()
    (package / RELEASE_FILE).write_text('{"mediaType":"x",' + text[1:])
    assert refused(package, signer).code == "DUPLICATE_KEY"


def test_duplicate_key_in_the_payload(package, signer):
    sign(package, signer, b'{"predicateType":"https://example.org/x",' + payload_of(package)[1:])
    assert refused(package, signer).code == "DUPLICATE_KEY"


def test_duplicate_key_deep_in_the_payload(package, signer):
    payload = payload_of(package).replace(b'"grade":"development"', b'"grade":"development","grade":"release"')
    sign(package, signer, payload)
    assert refused(package, signer).code == "DUPLICATE_KEY"


def test_oversized_statement(package, signer):
    with (package / RELEASE_FILE).open("r+b") as stream:
        stream.truncate(MAX_BUNDLE_BYTES + 1)
    error = refused(package, signer)
    assert (error.code, error.actual) == ("MALFORMED_DOCUMENT", f"{MAX_BUNDLE_BYTES + 1} bytes")


def test_deeply_nested_statement(package, signer):
    (package / RELEASE_FILE).write_text('{"a":' * 5_000 + "1" + "}" * 5_000)
    assert refused(package, signer).code == "MALFORMED_DOCUMENT"


CEILING = 768 * 1024 * 1024
"""Bytes of address space in which every refusal must happen; the interpreter and its libraries take about half."""

REFUSE = """
import resource, sys
from pathlib import Path
from quantmint.errors import ReleaseError
from quantmint.verify import verify, read_release
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]),) * 2)
try:
    verify(Path(sys.argv[1]), Path(sys.argv[2])) if sys.argv[2] else read_release(Path(sys.argv[1]), public_key=None)
except ReleaseError as error:
    print(error.code, error.file)
"""


def within_the_ceiling(package: Path, key: Path | None) -> str:
    """The refusal of a package, told by a process that would die of asking for more memory."""
    command = [sys.executable, "-c", REFUSE, str(package), str(key or ""), str(CEILING)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


BOMBS = {"lists": b"[],", "numbers": b"0,", "members": b'{"a":0},'}


@pytest.mark.parametrize("piece", BOMBS.values(), ids=BOMBS)
def test_bundle_of_too_many_values(package, signer, tmp_path, piece):
    room = MAX_BUNDLE_BYTES - 20
    (package / RELEASE_FILE).write_bytes(b'{"a":[' + piece * (room // len(piece)) + b"0]}")
    write_public(signer.public, tmp_path / "key.pub")
    assert within_the_ceiling(package, tmp_path / "key.pub") == f"MALFORMED_DOCUMENT {RELEASE_FILE}"
    assert "too many values" in refused(package, signer).message


def test_payload_of_too_many_values_that_nobody_vouches_for(package):
    payload = b'{"a":[' + b"[]," * (MAX_BUNDLE_BYTES // 4 - 300) + b"0]}"
    (package / RELEASE_FILE).write_bytes(bundle_bytes(payload, b"none", "0" * 64))
    assert within_the_ceiling(package, None) == f"MALFORMED_DOCUMENT {RELEASE_FILE}"
    with pytest.raises(ReleaseError, match="too many values"):
        read_release(package, public_key=None)


def test_model_signature_of_too_many_values(package, signer):
    (package / MODEL_FILE).write_bytes(b'{"a":[' + b"[]," * 10_000 + b"0]}")
    (finding,) = verify(package, signer.public).findings
    assert finding.code == "MODEL_SIGNATURE_INVALID"
    assert "too many values" in finding.message


def test_bundle_with_the_names_of_another_spelling(package, signer):
    rebundle(package, lambda b: b.update(media_type=b.pop("mediaType")))
    assert refused(package, signer).code == "MALFORMED_DOCUMENT"


def test_empty_statement(package, signer):
    (package / RELEASE_FILE).write_bytes(b"")
    assert refused(package, signer).code == "MALFORMED_DOCUMENT"


def test_private_key_handed_as_public(signer):
    with pytest.raises(ReleaseError) as caught:
        load_public(signer.private_pem(None))
    assert caught.value.code == "KEY_INVALID"


# statements that a stolen key or a careless tool has signed


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "./x", "a//b", "C:x", "a\\b", "", "x/", "\u0000", "..", "e\u0301"]
)
def test_subject_that_leaves_the_package(package, signer, name):
    resign(package, signer, lambda s: s["subject"][0].update(name=name))
    assert refused(package, signer, name).code == "ILLEGAL_PATH"


def test_subject_that_is_not_unicode(package, signer):
    resign(package, signer, lambda s: s["subject"][0].update(name="\ud800"))
    assert refused(package, signer).code == "MALFORMED_DOCUMENT"


def test_subject_listed_twice(package, signer):
    resign(package, signer, lambda s: s["subject"].append(s["subject"][0]))
    assert "twice" in refused(package, signer).message


def test_subject_listed_twice_with_other_digests(package, signer):
    resign(package, signer, lambda s: s["subject"].append({**s["subject"][0], "digest": {"sha256": "0" * 64}}))
    assert "twice" in refused(package, signer).message


def test_subjects_that_collide_by_case(package, signer):
    resign(package, signer, lambda s: s["subject"].append({**s["subject"][0], "name": "readme.MD"}))
    assert refused(package, signer, "readme.MD").code == "ILLEGAL_PATH"


def test_subject_that_is_a_file_and_a_folder(package, signer):
    resign(package, signer, lambda s: s["subject"].append({**s["subject"][0], "name": "README.md/x"}))
    assert refused(package, signer, "README.md/x").code == "ILLEGAL_PATH"


def test_empty_subjects(package, signer):
    resign(package, signer, lambda s: s.update(subject=[]))
    assert refused(package, signer).code == "MALFORMED_DOCUMENT"


def test_subject_with_an_unknown_digest_only(package, signer):
    resign(package, signer, lambda s: s["subject"][0].update(digest={"crc32": "00000000"}))
    assert refused(package, signer).code == "MALFORMED_DOCUMENT"


def test_subject_whose_two_digests_disagree(package, signer):
    resign(package, signer, lambda s: s["subject"][0]["digest"].update(blake3="0" * 64))
    assert ("CHANGED_FILE", "README.md") in found(package, signer)


def test_float_for_a_size(package, signer):
    resign(package, signer, lambda s: s["subject"][0]["annotations"].update(size=7.0))
    assert refused(package, signer).code == "MALFORMED_DOCUMENT"


def test_more_subjects_than_any_release(package, signer):
    resign(
        package,
        signer,
        lambda s: s.update(subject=[{**s["subject"][0], "name": f"f{number}"} for number in range(10_001)]),
    )
    assert refused(package, signer).code == "MALFORMED_DOCUMENT"


def test_statement_of_another_predicate_type(package, signer):
    resign(package, signer, lambda s: s.update(predicateType="https://slsa.dev/provenance/v1"))
    error = refused(package, signer)
    assert (error.code, error.expected) == ("MALFORMED_DOCUMENT", PREDICATE_TYPE)


def test_model_signature_in_place_of_the_statement(package, signer):
    shutil.copyfile(package / MODEL_FILE, package / RELEASE_FILE)
    assert refused(package, signer).code == "MALFORMED_DOCUMENT"


def test_grade_release_that_was_not_earned(package, signer):
    resign(package, signer, lambda s: s["predicate"].update(grade="release"))
    assert ("CLAIM_CONTRADICTED", RELEASE_FILE) in found(package, signer)
    assert verify(package, signer.public).grade == "development"


def test_evidence_that_was_replaced(package, signer):
    gate = {
        "gate": "load",
        "target": "cpu",
        "verdict": "PASSED",
        "files": [{"path": "README.md", "size": 7, "digest": "sha256:" + "0" * 64}],
    }
    resign(package, signer, lambda s: s["predicate"].update(gates=[gate]))
    assert ("CLAIM_CONTRADICTED", "README.md") in found(package, signer)


def test_gate_that_passed_against_its_own_measurements(package, signer):
    gate = {
        "gate": "load",
        "target": "cpu",
        "verdict": "PASSED",
        "thresholds": [{"measurement": "tensors_different", "op": "==", "value": 0}],
        "measurements": {"tensors_different": 1},
    }
    resign(package, signer, lambda s: s["predicate"].update(gates=[gate]))
    (package / MODEL_FILE).unlink()
    finding, _ = verify(package, signer.public).findings
    assert (finding.code, finding.file, finding.expected) == ("CLAIM_CONTRADICTED", RELEASE_FILE, "FAILED")
    assert "tensors_different: 1" in finding.message


def test_operator_that_nobody_can_judge(package, signer):
    line = {"measurement": "m", "op": "!=", "value": 0}
    gate = {"gate": "load", "target": "cpu", "verdict": "PASSED", "thresholds": [line], "measurements": {"m": 0}}
    resign(package, signer, lambda s: s["predicate"].update(gates=[gate]))
    assert refused(package, signer).code == "MALFORMED_DOCUMENT"


def test_measurement_that_no_number_of_the_machine_can_hold(package, signer):
    line = {"measurement": "m", "op": ">=", "value": 0}
    gate = {"gate": "load", "target": "cpu", "verdict": "PASSED", "thresholds": [line], "measurements": {"m": 10**400}}
    resign(package, signer, lambda s: s["predicate"].update(gates=[gate]))
    assert ("CLAIM_CONTRADICTED", RELEASE_FILE) in found(package, signer)


def test_subject_of_endless_folders(package, signer):
    name = "/".join("d" * 33)
    resign(package, signer, lambda s: s["subject"][0].update(name=name))
    assert refused(package, signer, name).code == "ILLEGAL_PATH"


# model.sig


def model_of(package: Path) -> tuple[Tree, Artifact]:
    tree, _ = measure(package)
    data = (package / RELEASE_FILE).read_bytes()
    return tree, Artifact(path=RELEASE_FILE, size=len(data), digest=digest_of(data))


def test_model_signature_of_another_package(package, signer, predicate, tmp_path):
    other = make(tmp_path / "other", predicate, signer, b"o")
    shutil.copyfile(other / MODEL_FILE, package / MODEL_FILE)
    findings = found(package, signer)
    assert findings == [("MODEL_SIGNATURE_MISMATCH", MODEL_FILE)] * 2
    expected = verify(package, signer.public).findings[0].expected
    assert expected in (digest_of((package / SHARD).read_bytes()), digest_of((package / RELEASE_FILE).read_bytes()))


def test_model_signature_by_another_key(package, signer):
    tree, statement = model_of(package)
    sign(package, generate(), model_statement("demo", tree, statement), MODEL_FILE)
    assert found(package, signer) == [("MODEL_SIGNATURE_INVALID", MODEL_FILE)]


def test_model_signature_that_leaves_a_file_out(package, signer):
    tree, statement = model_of(package)
    less = Tree.of(artifact for artifact in tree.artifacts if artifact.path != SHARD)
    sign(package, signer, model_statement("demo", less, statement), MODEL_FILE)
    assert found(package, signer) == [("MODEL_SIGNATURE_MISMATCH", MODEL_FILE)]


def test_model_signature_that_ignores_everything(package, signer):
    value = json.loads(payload_of(package, MODEL_FILE))
    value["predicate"]["serialization"]["ignore_paths"].append(".")
    sign(package, signer, json.dumps(value).encode(), MODEL_FILE)
    assert found(package, signer) == [("MODEL_SIGNATURE_INVALID", MODEL_FILE)]


def test_model_signature_that_names_a_file_outside(package, signer):
    tree, statement = model_of(package)
    value = json.loads(model_statement("demo", tree, statement))
    value["predicate"]["resources"][0]["name"] = "../secret.txt"
    sign(package, signer, json.dumps(value).encode(), MODEL_FILE)
    assert set(found(package, signer)) == {("MODEL_SIGNATURE_MISMATCH", MODEL_FILE)}


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b"null"])
def test_model_signature_that_is_none(package, signer, data):
    (package / MODEL_FILE).write_bytes(data)
    assert found(package, signer) == [("MODEL_SIGNATURE_INVALID", MODEL_FILE)]


def test_model_signature_removed(package, signer):
    (package / MODEL_FILE).unlink()
    assert found(package, signer) == [("MISSING_FILE", MODEL_FILE)]
    assert verify(package, signer.public).model_signature == "absent"


def test_model_signature_that_was_never_promised_may_be_absent(package, signer):
    resign(package, signer, lambda s: s["predicate"].pop("model_signature"))
    (package / MODEL_FILE).unlink()
    report = verify(package, signer.public)
    assert report.ok
    assert report.model_signature == "absent"


@pytest.mark.parametrize("start", range(5))
def test_no_flipped_bit_of_the_statement_goes_unnoticed(package, signer, start):
    whole = (package / RELEASE_FILE).read_bytes()
    for position in range(start, len(whole), 41):
        data = bytearray(whole)
        data[position] ^= 1 << (position % 7)
        (package / RELEASE_FILE).write_bytes(data)
        try:
            noticed = not verify(package, signer.public).ok
        except ReleaseError as error:
            noticed = error.exit_code == Exit.INTEGRITY
        assert noticed, position


def test_no_flipped_bit_of_the_model_signature_breaks_the_verifier(package, signer):
    whole = (package / MODEL_FILE).read_bytes()
    for position in range(0, len(whole), 29):
        data = bytearray(whole)
        data[position] ^= 1 << (position % 7)
        (package / MODEL_FILE).write_bytes(data)
        report = verify(package, signer.public)
        assert {finding.code for finding in report.findings} <= {"MODEL_SIGNATURE_INVALID"}
