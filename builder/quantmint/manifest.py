"""The release manifest: what a release claims, which files it covers, and how found files differ from signed ones.

`Predicate` is what we write (closed), `ReceivedPredicate` what we read (open). The same subjects also become the
ecosystem's own model-signing statement. Pure: nothing here opens a file or checks a signature.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from quantmint.artifact import Artifact, Digest, RelPath, Tree, digest_of
from quantmint.document import Document, Received, json_schema, receive_value
from quantmint.errors import ReleaseError
from quantmint.evidence import Evidence, Finding, Scalar, Threshold, Verdict, judge
from quantmint.statement import Annotations, DigestSet, Hex256, Statement, Subject, parse_statement, statement_bytes

PREDICATE_TYPE = "https://quantmint.dev/release/v1"
MODEL_PREDICATE_TYPE = "https://model_signing/signature/v1.0"
RELEASE_FILE = "release.sigstore.json"
MODEL_FILE = "model.sig"
RECIPE_FILE = "evidence/recipe.toml"
PLAN_FILE = "evidence/plan.json"
UNSIGNED = frozenset({RELEASE_FILE, MODEL_FILE, ".gitattributes"})
"""The only files of a package that are not subjects: the two signatures, and the one that the Hub edits."""
DOWNLOAD_CACHE = ".cache/huggingface"
"""Folder that `hf download --local-dir` leaves beside the files; never loaded from, never signed, never read."""
MODEL_IGNORES = (".cache", ".git", ".gitattributes", ".github", ".gitignore", "attestations", MODEL_FILE)

FINDINGS: Mapping[str, str] = MappingProxyType(
    {
        "MISSING_FILE": "A signed file is not in the package.",
        "EXTRA_FILE": "The package holds a file that was never signed.",
        "CHANGED_FILE": "A file has its signed size but other bytes.",
        "TRUNCATED_FILE": "A file is smaller than signed.",
        "GROWN_FILE": "A file is larger than signed.",
        "UNREADABLE_FILE": "A file could not be read to its end, so nothing is known about it.",
        "ILLEGAL_NAME": "The package holds a file whose name is not portable.",
        "SYMLINK": "A symbolic link stands in the package and does not lead into the blobs of its own Hub cache.",
        "SPECIAL_FILE": "The package holds something that is neither a file nor a folder.",
        "TOO_MANY_FILES": "The package holds more entries than any release could.",
        "CLAIM_CONTRADICTED": "The signed claims contradict the signed files, or each other.",
        "MODEL_SIGNATURE_INVALID": "model.sig is not a readable signature by the same key.",
        "MODEL_SIGNATURE_MISMATCH": "model.sig signs other files than the release statement does.",
    }
)
"""Every finding code of `verify` and what it means."""

Grade = Literal["release", "development"]
ReleaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")]
Text = Annotated[str, Field(min_length=1, max_length=1024)]


class Source(Document):
    """Where the weights came from: uri, commit where there is one, and the `Tree.digest` of the files fetched."""

    uri: Text
    revision: Text | None = None
    files: Digest


class Overlay(Document):
    """The engine plug-in that the package needs: its wheel in the package and the engine versions it knows."""

    file: RelPath
    digest: Digest
    engine: Text


class Quantization(Document):
    """What was quantized to what (module group → format) and the effective bits per weight."""

    placement: dict[str, str]
    effective_bits: Annotated[float, Field(gt=0, le=64)]


class SkippedGate(Document):
    """A gate that was planned and left out, and who says why."""

    gate: Text
    target: Text
    reason: Text


class Builder(Document):
    """What built the release: program, version, digest of the worker wheel."""

    name: Text
    version: Text
    wheel: Digest


class Predicate(Document):
    """What a release claims. `epoch` only ever grows; `supersedes` is the digest of the payload it replaces.

    A grade of `release` can be written only when containers ran every stage and every gate passed. `model_signature`
    says that `model.sig` goes with the statement, so that its absence is noticed.
    """

    release: ReleaseName
    grade: Grade
    source: Source
    recipe: Digest
    plan: Digest
    runner: Text
    images: dict[str, Text]
    overlay: Overlay | None = None
    quantization: Quantization
    targets: Annotated[tuple[Text, ...], Field(min_length=1)]
    gates: tuple[Evidence, ...]
    skipped_gates: tuple[SkippedGate, ...] = ()
    epoch: Annotated[int, Field(ge=0, le=2**53 - 1)]
    supersedes: Digest | None = None
    builder: Builder
    model_signature: Literal[True] = True

    @model_validator(mode="after")
    def _grade_is_earned(self) -> Self:
        if self.grade == "release":
            reasons = development_because(
                self.runner,
                ((gate.gate, gate.verdict) for gate in self.gates),
                skipped=(entry.gate for entry in self.skipped_gates),
            )
            if reasons:
                raise ValueError(f"grade release is not earned: {reasons[0]}")
        return self


class ReceivedSource(Received):
    """See `Source`."""

    uri: str
    revision: str | None = None
    files: Digest


class ReceivedOverlay(Received):
    """See `Overlay`."""

    file: str
    digest: Digest
    engine: str


class ReceivedQuantization(Received):
    """See `Quantization`."""

    placement: dict[str, str]
    effective_bits: float


class ReceivedFile(Received):
    """See `evidence.EvidenceFile`."""

    path: str
    size: int
    digest: Digest


class ReceivedThreshold(Received):
    """See `evidence.Threshold`. An operator that cannot be judged here is refused, not ignored."""

    measurement: str
    op: Literal["==", ">=", "<="]
    value: Scalar


class ReceivedGate(Received):
    """See `evidence.Evidence`; the environment stays in `Release.statement.predicate`."""

    gate: str
    target: str
    verdict: str
    reasons: tuple[str, ...] = ()
    thresholds: tuple[ReceivedThreshold, ...] = ()
    measurements: dict[str, Scalar] = Field(default_factory=dict)
    files: tuple[ReceivedFile, ...] = ()


class ReceivedSkippedGate(Received):
    """See `SkippedGate`."""

    gate: str
    target: str
    reason: str


class ReceivedBuilder(Received):
    """See `Builder`."""

    name: str
    version: str
    wheel: Digest


class ReceivedPredicate(Received):
    """See `Predicate`. Its grade is a claim: `contradictions` and `development_because` tell whether it is earned."""

    release: ReleaseName
    grade: Grade
    source: ReceivedSource
    recipe: Digest
    plan: Digest
    runner: str
    images: dict[str, str]
    overlay: ReceivedOverlay | None = None
    quantization: ReceivedQuantization
    targets: tuple[str, ...]
    gates: tuple[ReceivedGate, ...]
    skipped_gates: tuple[ReceivedSkippedGate, ...] = ()
    epoch: Annotated[int, Field(ge=0, le=2**53 - 1)]
    supersedes: Digest | None = None
    builder: ReceivedBuilder
    model_signature: bool = False


@dataclass(frozen=True)
class Release:
    """A parsed release statement: the bytes, the subjects, and the claims."""

    statement: Statement
    predicate: ReceivedPredicate

    @property
    def digest(self) -> str:
        """SHA-256 of the payload, as a `Digest`: what a later release names in `supersedes`."""
        return digest_of(self.statement.payload)


class FileFinding(Finding):
    """A finding with what is known of both sides; `expected` and `actual` are SHA-256 digests where it is about bytes.

    Sizes are in bytes.
    """

    expected_size: int | None = None
    actual_size: int | None = None
    expected_blake3: Hex256 | None = None
    actual_blake3: Hex256 | None = None
    hint: str | None = None


@dataclass(frozen=True)
class Found:
    """A file of a package as it was found. Without any digest it was not, or could not be, read.

    `lfs_oid` is the SHA-256 that a Git LFS pointer names, when the file is one.
    """

    name: str
    size: int
    sha256: str | None = None
    blake3: str | None = None
    lfs_oid: str | None = None


def development_because(
    runner: str,
    gates: Iterable[tuple[str, str]],
    *,
    skipped: Iterable[str] = (),
    unasked: Iterable[str] = (),
    bare: Iterable[str] = (),
) -> tuple[str, ...]:
    """Why a release with these facts is of development grade; empty when it may be called a release.

    `gates` gives (gate, verdict) of every gate that was run, `skipped` the gates left out, `unasked` the targets that
    no gate was run for, `bare` the gates that were judged and left no evidence file.
    """
    verdicts = tuple(gates)
    known = {gate for gate, verdict in verdicts if verdict != Verdict.PASSED}
    reasons = [] if runner == "container" else [f"stages ran in the {runner} runner, not in containers"]
    if not verdicts:
        reasons.append("no gate was run")
    reasons.extend(f"gate {gate} is {verdict}" for gate, verdict in verdicts if verdict != Verdict.PASSED)
    reasons.extend(f"gate {gate} was skipped" for gate in skipped if gate not in known)
    reasons.extend(f"no gate was run for the target {target}" for target in unasked)
    reasons.extend(f"gate {gate} has no evidence file" for gate in bare if gate not in known)
    return tuple(reasons)


def _development_because(predicate: ReceivedPredicate) -> tuple[str, ...]:
    gates = predicate.gates
    asked = {gate.target for gate in gates}
    return development_because(
        predicate.runner,
        ((gate.gate, gate.verdict) for gate in gates),
        skipped=(entry.gate for entry in predicate.skipped_gates),
        unasked=(target for target in predicate.targets if target not in asked),
        bare=(gate.gate for gate in gates if gate.thresholds and not gate.files),
    )


def subjects_of(tree: Tree, blake3: Mapping[str, str]) -> tuple[Subject, ...]:
    """The subjects of `tree`; `blake3` maps each path to 64 hex digits and may leave paths out."""
    return tuple(
        Subject(
            name=artifact.path,
            digest=DigestSet(sha256=_hex(artifact.digest), blake3=blake3.get(artifact.path)),
            annotations=Annotations(size=artifact.size),
        )
        for artifact in tree.artifacts
    )


def release_statement(tree: Tree, blake3: Mapping[str, str], predicate: Predicate) -> bytes:
    """The payload of `release.sigstore.json`: every file of `tree` a subject, `predicate` the claim.

    Raises:
        ReleaseError: SEAL_REFUSED when `tree` is empty, holds a file that is never signed, or contradicts the claims.
    """
    if not tree.artifacts:
        raise ReleaseError("SEAL_REFUSED", "the package is empty", expected="at least one file", actual="none")
    for artifact in tree.artifacts:
        if artifact.path in UNSIGNED:
            raise ReleaseError("SEAL_REFUSED", f"{artifact.path} can never be a subject", file=artifact.path)
    payload = statement_bytes(subjects_of(tree, blake3), PREDICATE_TYPE, predicate.as_json())
    against = contradictions(parse_release(payload, file=RELEASE_FILE))
    if against:
        first = against[0]
        raise ReleaseError("SEAL_REFUSED", first.message, file=first.file, expected=first.expected, actual=first.actual)
    return payload


def parse_release(payload: bytes, *, file: str) -> Release:
    """Parse the payload of a release statement whose signature already holds.

    Raises:
        ReleaseError: as `statement.parse_statement`; MALFORMED_DOCUMENT for another predicate type, a subject without
            size, a subject that is never signed, or claims that cannot be read.
    """
    statement = parse_statement(payload, file=file)
    if statement.predicate_type != PREDICATE_TYPE:
        raise ReleaseError(
            "MALFORMED_DOCUMENT",
            "not a release statement",
            file=file,
            expected=PREDICATE_TYPE,
            actual=statement.predicate_type,
        )
    for subject in statement.subjects:
        if subject.size is None:
            raise ReleaseError("MALFORMED_DOCUMENT", f"the subject {subject.name!r} has no size", file=file)
        if subject.name in UNSIGNED or _is_cached(subject.name):
            raise ReleaseError("MALFORMED_DOCUMENT", f"{subject.name} can never be a subject", file=file)
    return Release(statement, _received(ReceivedPredicate, statement.predicate, file))


def contradictions(release: Release) -> tuple[FileFinding, ...]:
    """Where the claims contradict the signed files or each other: files, verdicts, grade. One finding each."""
    return (*_against_files(release), *_against_verdicts(release.predicate), *_against_grade(release.predicate))


def _against_files(release: Release) -> Iterator[FileFinding]:
    """Files that a claim names and that are not signed so; recipe and plan may be left out of a package."""
    predicate = release.predicate
    signed = {subject.name: subject for subject in release.statement.subjects}
    claimed: list[tuple[str, str, str, int | None]] = [
        (f"evidence of gate {gate.gate}", item.path, item.digest, item.size)
        for gate in predicate.gates
        for item in gate.files
    ]
    if predicate.overlay is not None:
        claimed.append(("the overlay", predicate.overlay.file, predicate.overlay.digest, None))
    documents = (("the recipe", RECIPE_FILE, predicate.recipe), ("the plan", PLAN_FILE, predicate.plan))
    claimed.extend((what, path, digest, None) for what, path, digest in documents if path in signed)
    for what, path, digest, size in claimed:
        subject = signed.get(path)
        actual = None if subject is None else f"sha256:{subject.digest.sha256}"
        other = "not signed" if subject is None else "signed with other bytes"
        if actual == digest and subject is not None:
            if size in (None, subject.size):
                continue
            other = f"signed with {subject.size} bytes, not {size}"
        yield FileFinding(
            code="CLAIM_CONTRADICTED",
            message=f"{what} is claimed as {path}, which is {other}",
            file=path,
            expected=digest,
            actual=actual,
            expected_size=size,
            actual_size=None if subject is None else subject.size,
        )


def _against_verdicts(predicate: ReceivedPredicate) -> Iterator[FileFinding]:
    """Gates that passed, they say, and do not when their own measurements are judged again."""
    for gate in predicate.gates:
        thresholds = tuple(
            Threshold(measurement=line.measurement, op=line.op, value=line.value) for line in gate.thresholds
        )
        verdict, reasons = judge(thresholds, gate.measurements)
        if gate.verdict == Verdict.PASSED and verdict is not Verdict.PASSED:
            yield FileFinding(
                code="CLAIM_CONTRADICTED",
                message=f"gate {gate.gate} is claimed to have passed on {gate.target}, but {reasons[0]}",
                file=RELEASE_FILE,
                expected=verdict.value,
                actual=gate.verdict,
            )


def _against_grade(predicate: ReceivedPredicate) -> Iterator[FileFinding]:
    if predicate.grade == "release":
        for reason in _development_because(predicate):
            yield FileFinding(
                code="CLAIM_CONTRADICTED",
                message=f"grade release is claimed, but {reason}",
                file=RELEASE_FILE,
                expected="development",
                actual="release",
            )


def earned_grade(predicate: ReceivedPredicate) -> Grade:
    """The grade that the facts of `predicate` earn, whatever it claims; never better than the claim."""
    return "development" if _development_because(predicate) else predicate.grade


def compare(signed: Iterable[Subject], found: Iterable[Found]) -> tuple[FileFinding, ...]:
    """How the files found differ from those signed, in name order; empty exactly when they are the same.

    Codes: MISSING_FILE, EXTRA_FILE, TRUNCATED_FILE, GROWN_FILE (by size), CHANGED_FILE (same size, another digest),
    UNREADABLE_FILE (same size, no digest).
    """
    wanted = {subject.name: subject for subject in signed}
    present = {file.name: file for file in found}
    findings = (_difference(wanted.get(name), present.get(name)) for name in sorted(wanted.keys() | present.keys()))
    return tuple(finding for finding in findings if finding is not None)


def _difference(subject: Subject | None, file: Found | None) -> FileFinding | None:
    if subject is None:
        return None if file is None else _finding("EXTRA_FILE", f"{file.name} was never signed", subject, file)
    code, message = _kind(subject, file)
    return None if code is None else _finding(code, f"{subject.name} {message}", subject, file)


def _kind(subject: Subject, file: Found | None) -> tuple[str | None, str]:
    size = subject.size
    if file is None:
        return "MISSING_FILE", "is missing"
    if size is not None and file.size != size:
        code = "TRUNCATED_FILE" if file.size < size else "GROWN_FILE"
        return code, f"has {file.size} bytes, {size} were signed"
    pairs = [(subject.digest.sha256, file.sha256), (subject.digest.blake3, file.blake3)]
    known = [want == got for want, got in pairs if want is not None and got is not None]
    if not known:
        return "UNREADABLE_FILE", "could not be read"
    return (None, "") if all(known) else ("CHANGED_FILE", "has other bytes than were signed")


def _finding(code: str, message: str, subject: Subject | None, file: Found | None) -> FileFinding:
    return FileFinding(
        code=code,
        message=message,
        file=subject.name if subject is not None else file.name if file is not None else None,
        expected=None if subject is None else f"sha256:{subject.digest.sha256}",
        actual=None if file is None or file.sha256 is None else f"sha256:{file.sha256}",
        expected_size=None if subject is None else subject.size,
        actual_size=None if file is None else file.size,
        expected_blake3=None if subject is None else subject.digest.blake3,
        actual_blake3=None if file is None else file.blake3,
        hint=_hint(subject, file),
    )


def _hint(subject: Subject | None, file: Found | None) -> str | None:
    if file is None or file.lfs_oid is None:
        return None
    if subject is not None and file.lfs_oid == subject.digest.sha256:
        return "A Git LFS pointer to exactly the signed file stands here; fetch the file itself: git lfs pull."
    return "A Git LFS pointer to some other file stands here."


_POINTER = re.compile(
    rb"\Aversion https://git-lfs\.github\.com/spec/v1\n(?:ext-[^\n]*\n)*oid sha256:([0-9a-f]{64})\nsize [0-9]+\n?\Z"
)
MAX_POINTER_BYTES = 1024


def lfs_oid(data: bytes) -> str | None:
    """The SHA-256 (hex) that a Git LFS pointer names, or None when `data` is no pointer (git-lfs spec v1)."""
    match = _POINTER.match(data) if len(data) <= MAX_POINTER_BYTES else None
    return None if match is None else match.group(1).decode()


class _Resource(Document):
    name: RelPath
    algorithm: Literal["sha256"]
    digest: Hex256
    size: Annotated[int, Field(ge=0, le=2**53 - 1)]


class _ReceivedResource(Received):
    name: str
    algorithm: Literal["sha256"]
    digest: Hex256


class _Serialization(Received):
    method: Literal["files"]
    hash_type: Literal["sha256"]
    ignore_paths: tuple[str, ...] = ()


class _ModelPredicate(Received):
    serialization: _Serialization
    resources: tuple[_ReceivedResource, ...]


def model_statement(release: str, tree: Tree, statement: Artifact) -> bytes:
    """The payload of `model.sig`: OpenSSF model-signing v1.0 over `tree` and `statement`, the release statement's file.

    The one subject carries the SHA-256 of all raw file digests in name order, as the format asks.
    """
    artifacts = Tree.of((*tree.artifacts, statement)).artifacts
    resources = [
        _Resource(name=item.path, algorithm="sha256", digest=_hex(item.digest), size=item.size).as_json()
        for item in artifacts
    ]
    predicate = {
        "serialization": {
            "method": "files",
            "hash_type": "sha256",
            "allow_symlinks": False,
            "ignore_paths": list(MODEL_IGNORES),
        },
        "resources": resources,
    }
    root = _root(_hex(item.digest) for item in artifacts)
    return statement_bytes([Subject(name=release, digest=DigestSet(sha256=root))], MODEL_PREDICATE_TYPE, predicate)


def parse_model(payload: bytes, *, file: str) -> dict[str, str]:
    """Name → hex SHA-256 of every file that a model-signing payload covers; its signature already holds.

    Raises:
        ReleaseError: as `statement.parse_statement`; MALFORMED_DOCUMENT when it is of another kind, names a file
            twice, ignores more paths than a release may, or its root digest does not follow from its files.
    """
    statement = parse_statement(payload, file=file)
    if statement.predicate_type != MODEL_PREDICATE_TYPE:
        raise ReleaseError(
            "MALFORMED_DOCUMENT",
            "not a model-signing statement",
            file=file,
            expected=MODEL_PREDICATE_TYPE,
            actual=statement.predicate_type,
        )
    predicate = _received(_ModelPredicate, statement.predicate, file)
    files = {resource.name: resource.digest for resource in predicate.resources}
    ignored = sorted(set(predicate.serialization.ignore_paths) - set(MODEL_IGNORES))
    root = _root(resource.digest for resource in predicate.resources)
    if len(files) != len(predicate.resources):
        raise ReleaseError("MALFORMED_DOCUMENT", "a file is listed twice", file=file)
    if ignored:
        raise ReleaseError("MALFORMED_DOCUMENT", f"the path {ignored[0]!r} would be ignored", file=file)
    if len(statement.subjects) != 1 or statement.subjects[0].digest.sha256 != root:
        raise ReleaseError(
            "MALFORMED_DOCUMENT",
            "the root digest does not follow from the files listed",
            file=file,
            expected=root,
            actual=statement.subjects[0].digest.sha256,
        )
    return files


def compare_model(release: Release, statement: Artifact, files: Mapping[str, str]) -> tuple[FileFinding, ...]:
    """Where `model.sig` (its `files`) disagrees with the signed subjects and the statement's own file."""
    wanted = {subject.name: subject.digest.sha256 for subject in release.statement.subjects}
    wanted[statement.path] = _hex(statement.digest)
    return tuple(
        FileFinding(
            code="MODEL_SIGNATURE_MISMATCH",
            message=f"model.sig and the release statement disagree about {name[:200]!r}",
            file=MODEL_FILE,
            expected=_digest(wanted.get(name)),
            actual=_digest(files.get(name)),
        )
        for name in sorted(wanted.keys() | files.keys())
        if wanted.get(name) != files.get(name)
    )


def schema() -> bytes:
    """The published JSON Schema of the predicate."""
    return json_schema(Predicate, PREDICATE_TYPE)


def _is_cached(name: str) -> bool:
    return name == DOWNLOAD_CACHE or name.startswith(DOWNLOAD_CACHE + "/")


R = TypeVar("R", bound=Received)


def _received(model: type[R], predicate: Mapping[str, Any], file: str) -> R:
    return receive_value(model, predicate, file=file)


def _root(digests: Iterable[str]) -> str:
    total = hashlib.sha256()
    for digest in digests:
        total.update(bytes.fromhex(digest))
    return total.hexdigest()


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _digest(value: str | None) -> str | None:
    return None if value is None else f"sha256:{value}"
