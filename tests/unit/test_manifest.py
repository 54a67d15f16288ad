from __future__ import annotations

import hashlib
import json
from collections import Counter

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from quantmint.artifact import Artifact, Tree
from quantmint.errors import ReleaseError
from quantmint.evidence import Evidence, EvidenceFile, Threshold, Verdict
from quantmint.manifest import (
    FINDINGS,
    MODEL_FILE,
    RELEASE_FILE,
    Found,
    Overlay,
    Predicate,
    SkippedGate,
    compare,
    compare_model,
    contradictions,
    earned_grade,
    lfs_oid,
    model_statement,
    parse_model,
    parse_release,
    release_statement,
    schema,
    subjects_of,
)
from quantmint.statement import Annotations, DigestSet, Subject, statement_bytes


def hexdigest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def artifact(path: str, text: str = "x") -> Artifact:
    return Artifact(path=path, size=len(text), digest="sha256:" + hexdigest(text))


def gate(verdict: Verdict = Verdict.PASSED, *files: Artifact) -> Evidence:
    return Evidence(
        gate="load",
        target="cpu",
        verdict=verdict,
        reasons=(),
        thresholds=(Threshold(measurement="mismatched", op="==", value=0),),
        measurements={"mismatched": 0, "seconds": 1.5},
        environment={"engine": "vllm 0.1"},
        files=tuple(EvidenceFile(path=file.path, size=file.size, digest=file.digest) for file in files),
    )


def changed(predicate: Predicate, **fields) -> Predicate:
    return Predicate.model_validate({**{name: getattr(predicate, name) for name in Predicate.model_fields}, **fields})


TREE = Tree.of([artifact("README.md"), artifact("a/b.bin", "bb"), artifact("a.bin", "ccc")])
STATEMENT = artifact(RELEASE_FILE, "statement")

facts = st.dictionaries(st.sampled_from("abcde"), st.tuples(st.integers(0, 3), st.sampled_from("pqr")), max_size=5)


def signed(values) -> list[Subject]:
    return [
        Subject(
            name=name,
            digest=DigestSet(sha256=hexdigest(text), blake3=hexdigest("b" + text)),
            annotations=Annotations(size=size),
        )
        for name, (size, text) in values.items()
    ]


def found(values, algorithm: str) -> list[Found]:
    return [
        Found(
            name,
            size,
            sha256=hexdigest(text) if algorithm != "blake3" else None,
            blake3=hexdigest("b" + text) if algorithm != "sha256" else None,
        )
        for name, (size, text) in values.items()
    ]


@given(facts, facts, st.sampled_from(["sha256", "blake3", "both"]))
def test_compare_is_empty_exactly_when_equal(left, right, algorithm):
    assert (compare(signed(left), found(right, algorithm)) == ()) == (left == right)


@given(facts, facts)
def test_compare_says_each_difference_once_and_by_its_kind(left, right):
    findings = compare(signed(left), found(right, "both"))
    assert [finding.file for finding in findings] == sorted(
        name for name in left.keys() | right.keys() if left.get(name) != right.get(name)
    )
    for finding in findings:
        before, after = left.get(finding.file), right.get(finding.file)
        kinds = {
            "MISSING_FILE": after is None,
            "EXTRA_FILE": before is None,
            "TRUNCATED_FILE": before and after and after[0] < before[0],
            "GROWN_FILE": before and after and after[0] > before[0],
            "CHANGED_FILE": before and after and after[0] == before[0],
        }
        assert [code for code, holds in kinds.items() if holds] == [finding.code]
        assert finding.code in FINDINGS


def test_a_changed_file_shows_both_sides():
    (finding,) = compare(signed({"a": (1, "p")}), found({"a": (1, "q")}, "both"))
    assert finding.expected == "sha256:" + hexdigest("p")
    assert finding.actual == "sha256:" + hexdigest("q")
    assert (finding.expected_blake3, finding.actual_blake3) == (hexdigest("bp"), hexdigest("bq"))
    assert (finding.expected_size, finding.actual_size) == (1, 1)


def test_a_file_that_was_not_read_is_never_equal():
    (finding,) = compare(signed({"a": (1, "p")}), [Found("a", 1)])
    assert finding.code == "UNREADABLE_FILE"


def test_release_statement_round_trip(predicate):
    blake3 = {item.path: hexdigest("b" + item.path) for item in TREE.artifacts}
    payload = release_statement(TREE, blake3, predicate)
    release = parse_release(payload, file="s")
    assert release.statement.subjects == subjects_of(TREE, blake3)
    assert release.statement.predicate == json.loads(predicate.canonical())
    assert release.predicate.release == "demo"
    assert release.digest == "sha256:" + hashlib.sha256(payload).hexdigest()
    assert Predicate.model_validate_json(json.dumps(release.statement.predicate)) == predicate


def test_later_fields_are_ignored_when_read(predicate):
    value = {**predicate.as_json(), "later": {"x": [1]}}
    value["builder"]["later"] = 1
    payload = statement_bytes(subjects_of(TREE, {}), "https://quantmint.dev/release/v1", value)
    assert parse_release(payload, file="s").predicate.epoch == 1


@pytest.mark.parametrize("path", [RELEASE_FILE, MODEL_FILE, ".gitattributes"])
def test_signatures_are_never_subjects(predicate, path):
    tree = Tree.of([*TREE.artifacts, artifact(path)])
    with pytest.raises(ReleaseError) as caught:
        release_statement(tree, {}, predicate)
    assert (caught.value.code, caught.value.file) == ("SEAL_REFUSED", path)
    payload = statement_bytes(subjects_of(tree, {}), "https://quantmint.dev/release/v1", predicate.as_json())
    with pytest.raises(ReleaseError, match="never be a subject"):
        parse_release(payload, file="s")


def test_a_subject_without_size_is_refused(predicate):
    subject = Subject(name="a", digest=DigestSet(sha256="0" * 64))
    payload = statement_bytes([subject], "https://quantmint.dev/release/v1", predicate.as_json())
    with pytest.raises(ReleaseError, match="no size"):
        parse_release(payload, file="s")


def test_an_empty_package_is_not_sealed(predicate):
    with pytest.raises(ReleaseError) as caught:
        release_statement(Tree.of([]), {}, predicate)
    assert caught.value.code == "SEAL_REFUSED"


@pytest.mark.parametrize(
    ("runner", "gates"),
    [("process", (gate(),)), ("container", ()), ("container", (gate(), gate(Verdict.INCONCLUSIVE)))],
)
def test_grade_release_must_be_earned(predicate, runner, gates):
    with pytest.raises(ValidationError, match="not earned"):
        changed(predicate, grade="release", runner=runner, gates=gates)


def test_an_unearned_grade_of_others_is_a_finding(predicate):
    value = {**predicate.as_json(), "grade": "release"}
    payload = statement_bytes(subjects_of(TREE, {}), "https://quantmint.dev/release/v1", value)
    release = parse_release(payload, file="s")
    assert earned_grade(release.predicate) == "development"
    assert Counter(finding.code for finding in contradictions(release)) == {"CLAIM_CONTRADICTED": 3}


def test_an_earned_grade_is_release(predicate):
    whole = changed(
        predicate, grade="release", runner="container", gates=(gate(Verdict.PASSED, artifact("a.bin", "ccc")),)
    )
    release = parse_release(release_statement(TREE, {}, whole), file="s")
    assert earned_grade(release.predicate) == "release"
    assert contradictions(release) == ()


def contradicted(predicate: Predicate, tree: Tree = TREE, **fields) -> list[tuple[str | None, str]]:
    """The contradictions of what somebody else has signed, as (file, message)."""
    value = {**predicate.as_json(), **fields}
    payload = statement_bytes(subjects_of(tree, {}), "https://quantmint.dev/release/v1", value)
    findings = contradictions(parse_release(payload, file="s"))
    assert {finding.code for finding in findings} <= {"CLAIM_CONTRADICTED"}
    return [(finding.file, finding.message) for finding in findings]


@pytest.fixture
def earned(predicate) -> Predicate:
    return changed(
        predicate, grade="release", runner="container", gates=(gate(Verdict.PASSED, artifact("a.bin", "ccc")),)
    )


def test_a_release_that_skipped_a_gate_contradicts_itself(predicate, earned):
    skipped = [{"gate": "api", "target": "cpu", "reason": "on request"}]
    ((file, message),) = contradicted(earned, skipped_gates=skipped)
    assert (file, "api was skipped" in message) == (RELEASE_FILE, True)
    assert contradicted(earned, grade="development", skipped_gates=skipped) == []
    with pytest.raises(ValidationError, match="api was skipped"):
        changed(earned, skipped_gates=(SkippedGate(gate="api", target="cpu", reason="on request"),))


def test_a_release_for_a_target_that_no_gate_asked_contradicts_itself(earned):
    ((_, message),) = contradicted(earned, targets=["cpu", "h200"])
    assert "target h200" in message
    everywhere = [{**earned.as_json()["gates"][0], "target": "any"}]
    ((_, message),) = contradicted(earned, gates=everywhere)
    assert "target cpu" in message
    assert contradicted(earned, targets=["cpu", "h200"], grade="development") == []


def test_a_release_without_evidence_contradicts_itself(earned):
    bare = [{**earned.as_json()["gates"][0], "files": []}]
    ((_, message),) = contradicted(earned, gates=bare)
    assert "load has no evidence file" in message
    assert contradicted(earned, gates=bare, grade="development") == []


@pytest.mark.parametrize("change", [{"measurements": {"mismatched": 1}}, {"measurements": {}}, {"thresholds": []}])
@pytest.mark.parametrize("grade", ["release", "development"])
def test_a_verdict_that_its_measurements_do_not_give_is_a_contradiction(earned, change, grade):
    gates = [{**earned.as_json()["gates"][0], **change}]
    ((file, message),) = contradicted(earned, gates=gates, grade=grade)
    assert (file, "claimed to have passed" in message) == (RELEASE_FILE, True)
    failed = [{**gates[0], "verdict": "FAILED"}]
    assert contradicted(earned, gates=failed, grade="development") == []


def test_evidence_of_another_size_than_signed_is_a_contradiction(earned):
    value = earned.as_json()["gates"][0]
    ((file, message),) = contradicted(earned, gates=[{**value, "files": [{**value["files"][0], "size": 4}]}])
    assert (file, "3 bytes, not 4" in message) == ("a.bin", True)


@pytest.mark.parametrize(("path", "field"), [("evidence/recipe.toml", "recipe"), ("evidence/plan.json", "plan")])
def test_recipe_and_plan_are_those_that_the_package_holds(earned, path, field):
    tree = Tree.of([*TREE.artifacts, artifact(path, "text")])
    ((file, message),) = contradicted(earned, tree)
    assert (file, field in message) == (path, True)
    assert contradicted(earned, tree, **{field: "sha256:" + hexdigest("text")}) == []


def test_what_is_sealed_promises_the_second_signature(predicate):
    release = parse_release(release_statement(TREE, {}, predicate), file="s")
    assert release.predicate.model_signature
    with pytest.raises(ValidationError):
        changed(predicate, model_signature=False)


@pytest.mark.parametrize("claimed", [artifact("a.bin", "other"), artifact("absent.jsonl")])
def test_evidence_and_overlay_must_be_subjects(predicate, claimed):
    with pytest.raises(ReleaseError) as caught:
        release_statement(TREE, {}, changed(predicate, gates=(gate(Verdict.PASSED, claimed),)))
    assert (caught.value.code, caught.value.file) == ("SEAL_REFUSED", claimed.path)
    overlay = Overlay(file=claimed.path, digest=claimed.digest, engine="vllm==0.1")
    with pytest.raises(ReleaseError) as caught:
        release_statement(TREE, {}, changed(predicate, overlay=overlay))
    assert (caught.value.code, caught.value.file) == ("SEAL_REFUSED", claimed.path)


def test_schema_accepts_what_is_written_and_refuses_what_is_not(predicate):
    published = json.loads(schema())
    assert published["$id"] == "https://quantmint.dev/release/v1"
    jsonschema.Draft202012Validator.check_schema(published)
    value = changed(predicate, gates=(gate(Verdict.FAILED, artifact("e.jsonl")),)).as_json()
    jsonschema.validate(value, published)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**value, "surprise": 1}, published)


def test_model_statement_has_the_root_digest_of_the_format():
    payload = model_statement("demo", TREE, STATEMENT)
    files = parse_model(payload, file="m")
    assert list(files) == ["README.md", "a.bin", "a/b.bin", RELEASE_FILE]
    root = hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in files.values())).hexdigest()
    assert json.loads(payload)["subject"] == [{"name": "demo", "digest": {"sha256": root}}]


def test_model_statement_is_compared_with_the_release(predicate):
    release = parse_release(release_statement(TREE, {}, predicate), file="s")
    files = parse_model(model_statement("demo", TREE, STATEMENT), file="m")
    assert compare_model(release, STATEMENT, files) == ()
    findings = compare_model(release, STATEMENT, {**files, "a.bin": "0" * 64, "z": "0" * 64})
    assert [(finding.code, finding.expected is None) for finding in findings] == [
        ("MODEL_SIGNATURE_MISMATCH", False),
        ("MODEL_SIGNATURE_MISMATCH", True),
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v["predicate"]["serialization"]["ignore_paths"].append("."),
        lambda v: v["predicate"]["serialization"].update(hash_type="blake3"),
        lambda v: v["predicate"]["resources"].append(v["predicate"]["resources"][0]),
        lambda v: v["predicate"]["resources"].pop(),
        lambda v: v.update(predicateType="https://example.org/other"),
    ],
)
def test_model_statements_of_another_shape_are_refused(change):
    value = json.loads(model_statement("demo", TREE, STATEMENT))
    change(value)
    with pytest.raises(ReleaseError) as caught:
        parse_model(json.dumps(value).encode(), file="m")
    assert caught.value.code == "MALFORMED_DOCUMENT"


def test_lfs_pointers_are_recognised():
    oid = "ab" * 32
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 12345\n".encode()
    assert lfs_oid(pointer) == oid
    assert lfs_oid(b"x" + pointer) is None
    assert lfs_oid(pointer + b"more") is None
    assert lfs_oid(b"") is None
