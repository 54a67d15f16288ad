"""Verify: is this folder, byte for byte, the release that the holder of a key signed?

Order: list what is there, read the statement, check its signature, only then parse it, compare sizes, hash, compare.
Nothing is written, loaded, fetched or executed, and no link is followed out of the package or its own Hub cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from blake3 import blake3

from quantmint.artifact import Artifact, digest_of, illegal_because
from quantmint.document import Document
from quantmint.errors import ReleaseError
from quantmint.manifest import (
    DOWNLOAD_CACHE,
    MAX_POINTER_BYTES,
    MODEL_FILE,
    RELEASE_FILE,
    UNSIGNED,
    FileFinding,
    Found,
    Grade,
    Release,
    compare,
    compare_model,
    contradictions,
    earned_grade,
    lfs_oid,
    parse_model,
    parse_release,
)
from quantmint.signers import PublicKey, load_public
from quantmint.statement import MAX_BUNDLE_BYTES, Subject, pae, parse_bundle

Algorithm = Literal["blake3", "sha256"]
CHUNK = 4 * 1024 * 1024
MAX_ENTRIES = 100_000
"""Entries of a package that are looked at before the listing is given up; a release has hundreds."""


class Progress(Protocol):
    """Called under a lock, from any thread, after each chunk: file, package bytes hashed so far, bytes to hash."""

    def __call__(self, file: str, done: int, total: int, /) -> None: ...


class GateLine(Document):
    """A gate as the signed statement tells it."""

    gate: str
    target: str
    verdict: str
    reasons: tuple[str, ...] = ()


class SkippedLine(Document):
    """A gate that the signed statement says was skipped."""

    gate: str
    target: str
    reason: str


class VerifyReport(Document):
    """What was verified and what was found. Sizes in bytes; no path of this machine, no time.

    `grade` is what the facts earn, `claimed_grade` what was signed. `statement` is the digest of the signed payload,
    `key` that of the public key's PEM. `unsigned` names files, and a folder with a slash at its end, that may differ
    without any signature noticing.
    """

    release: str
    grade: Grade
    claimed_grade: Grade
    epoch: int
    source: str
    statement: str
    key: str
    subjects: int
    files_hashed: int
    bytes_hashed: int
    algorithm: Algorithm
    gates: tuple[GateLine, ...]
    skipped_gates: tuple[SkippedLine, ...]
    model_signature: Literal["valid", "invalid", "absent"]
    unsigned: tuple[str, ...]
    findings: tuple[FileFinding, ...]

    @property
    def ok(self) -> bool:
        """Whether files were hashed and nothing at all was found."""
        return self.files_hashed > 0 and not self.findings

    def demand_ok(self) -> None:
        """Return when `ok`.

        Raises:
            ReleaseError: VERIFICATION_FAILED with the first finding, and how many more there are.
        """
        if self.ok:
            return
        if not self.findings:
            raise ReleaseError("VERIFICATION_FAILED", "no file was hashed")
        first = self.findings[0]
        more = f" (and {len(self.findings) - 1} more findings)" if len(self.findings) > 1 else ""
        raise ReleaseError(
            "VERIFICATION_FAILED",
            f"{first.code}: {first.message}{more}",
            file=first.file,
            expected=first.expected,
            actual=first.actual,
            hint=first.hint,
        )


@dataclass(frozen=True)
class Entry:
    """A regular file of a package: where its bytes are (a blob, in a Hub cache) and its size in bytes."""

    path: Path
    size: int


@dataclass(frozen=True)
class Listing:
    """What stands in a package: files by relative name, findings about everything else, and whether a cache does."""

    files: dict[str, Entry] = field(default_factory=dict)
    findings: list[FileFinding] = field(default_factory=list)
    cached: bool = False


def verify(
    package: Path,
    public_key: Path | PublicKey,
    *,
    progress: Progress | None = None,
    workers: int = 2,
    algorithm: Algorithm = "blake3",
) -> VerifyReport:
    """Compare a package, in either layout of a Hub download, with what the holder of `public_key` signed.

    Every signed file is read once. One signed digest is enough to identify bytes; BLAKE3 is the default because it
    costs about a third of SHA-256's CPU time. A file that differs is read again, so that its SHA-256 can be shown.

    Raises:
        ReleaseError: PACKAGE_MISSING, KEY_*, SIGNATURE_MISSING, SIGNATURE_INVALID, or a code of `parse_release`: then
            nothing can be said about files. Everything found about files is in the report instead.
    """
    key = public_key if isinstance(public_key, PublicKey) else load_public(public_key)
    listing = list_package(package)
    release, statement = _signed_release(listing, key)
    hasher = _Hasher(algorithm, progress)
    found = hasher.run(release.statement.subjects, listing, workers)
    against_files = compare(release.statement.subjects, found)
    model_signature, against_model = _model_signature(listing, release, statement, key)
    predicate = release.predicate
    return VerifyReport(
        release=predicate.release,
        grade=earned_grade(predicate),
        claimed_grade=predicate.grade,
        epoch=predicate.epoch,
        source=predicate.source.uri
        if predicate.source.revision is None
        else f"{predicate.source.uri}@{predicate.source.revision}",
        statement=release.digest,
        key=f"sha256:{key.key_id}",
        subjects=len(release.statement.subjects),
        files_hashed=hasher.files,
        bytes_hashed=hasher.bytes,
        algorithm=algorithm,
        gates=tuple(
            GateLine(gate=gate.gate, target=gate.target, verdict=gate.verdict, reasons=gate.reasons)
            for gate in predicate.gates
        ),
        skipped_gates=tuple(
            SkippedLine(gate=gate.gate, target=gate.target, reason=gate.reason) for gate in predicate.skipped_gates
        ),
        model_signature=model_signature,
        unsigned=_unsigned(listing),
        findings=(*against_files, *listing.findings, *contradictions(release), *against_model),
    )


def read_release(package: Path, *, public_key: Path | PublicKey | None) -> Release:
    """The release statement of a package; no other file is read.

    With `public_key` None nobody has vouched for a word of it: show it, never act on it.

    Raises:
        ReleaseError: as `verify`.
    """
    key = load_public(public_key) if isinstance(public_key, Path) else public_key
    release, _ = _signed_release(list_package(package), key)
    return release


def list_package(package: Path, *, limit: int = MAX_ENTRIES) -> Listing:
    """List a hostile folder without following it anywhere.

    A symbolic link counts as a file only in a Hub cache (`REPO/snapshots/REVISION/`), when it leads directly to a
    regular file in `REPO/blobs/`. All else that is no regular file or folder becomes a finding, and so does an
    entry beyond `limit`.

    Raises:
        ReleaseError: PACKAGE_MISSING when `package` is no folder.
    """
    root = Path(os.path.realpath(package))
    if not root.is_dir():
        raise ReleaseError("PACKAGE_MISSING", f"there is no package at {package.name!r}", file=package.name)
    return _Lister(root).run(limit)


class _Lister:
    """Walks one package; folders wait in `_pending`, what cannot be a file becomes a finding."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
        self._pending = deque([root])
        self._files: dict[str, Entry] = {}
        self._findings: list[FileFinding] = []
        self._cached = False

    def run(self, limit: int) -> Listing:
        first = [self._root / name for name in (RELEASE_FILE, MODEL_FILE)]
        for path in first:
            if os.path.lexists(path):
                self._take(path)
        seen = 0
        while self._pending and seen <= limit:
            folder = self._pending.popleft()
            try:
                with os.scandir(folder) as entries:
                    paths = sorted(Path(entry.path) for entry in itertools.islice(entries, limit + 1 - seen))
            except OSError as error:
                self._found("UNREADABLE_FILE", f"the folder cannot be listed: {error.strerror}", folder)
                continue
            seen += len(paths)
            for path in paths:
                if path not in first:
                    self._take(path)
        if seen > limit:
            message = f"more than {limit} entries; the rest was not looked at"
            self._findings.append(FileFinding(code="TOO_MANY_FILES", message=message))
        return Listing(self._files, self._findings, self._cached)

    def _take(self, path: Path) -> None:
        name = path.relative_to(self._root).as_posix()
        try:
            status = path.lstat()
            link = path.readlink() if stat.S_ISLNK(status.st_mode) else None
        except OSError as error:
            self._found("UNREADABLE_FILE", f"cannot be looked at: {error.strerror}", path)
            return
        if stat.S_ISDIR(status.st_mode):
            self._take_folder(path, name)
            return
        blob = None if link is None else _blob(path.parent / link, self._blobs)
        why = illegal_because(name)
        if link is not None and blob is None:
            self._found("SYMLINK", "a symbolic link that leads out of the package", path, shown(str(link)))
        elif link is None and not stat.S_ISREG(status.st_mode):
            self._found("SPECIAL_FILE", "neither a file nor a folder", path)
        elif why is not None:
            self._found("ILLEGAL_NAME", f"the name is not portable: {why}", path)
        else:
            self._files[name] = blob or Entry(path, status.st_size)

    def _take_folder(self, path: Path, name: str) -> None:
        if name == DOWNLOAD_CACHE:
            self._cached = True
        else:
            self._pending.append(path)

    def _found(self, code: str, message: str, path: Path, actual: str | None = None) -> None:
        name = shown(path.relative_to(self._root).as_posix())
        self._findings.append(FileFinding(code=code, message=f"{name}: {message}", file=name, actual=actual))


def _blob(target: Path, blobs: Path | None) -> Entry | None:
    """The blob that a link of a Hub snapshot leads to, or None when it leads anywhere else."""
    path = Path(os.path.normpath(target))
    if blobs is None or path.parent != blobs or blobs.is_symlink():
        return None
    try:
        status = path.lstat()
    except OSError:
        return None
    return Entry(path, status.st_size) if stat.S_ISREG(status.st_mode) else None


def hash_entry(entry: Entry, algorithms: Iterable[Algorithm]) -> Iterator[int | tuple[int, Mapping[Algorithm, str]]]:
    """Read a file once, giving the byte count of each chunk and at last (bytes read, hex digest by algorithm).

    Raises:
        OSError: when it cannot be opened as a regular file or read to its end.
    """
    hashers = {name: blake3() if name == "blake3" else hashlib.sha256() for name in algorithms}
    buffer = bytearray(min(CHUNK, entry.size + 1))
    view = memoryview(buffer)
    size = 0
    with _opened(entry.path) as descriptor:
        while count := os.readv(descriptor, [buffer]):
            for hasher in hashers.values():
                hasher.update(view[:count])
            size += count
            yield count
    yield size, {name: hasher.hexdigest() for name, hasher in hashers.items()}


def digests(entry: Entry, algorithms: Iterable[Algorithm]) -> tuple[int, Mapping[Algorithm, str]]:
    """Bytes read and hex digest by algorithm; see `hash_entry`."""
    for step in hash_entry(entry, algorithms):
        if isinstance(step, tuple):
            return step
    raise AssertionError


def read_small(entry: Entry, limit: int) -> bytes:
    """The bytes of a file, at most `limit` and one more.

    Raises:
        OSError: when it cannot be opened as a regular file or read.
    """
    parts: list[bytes] = []
    left = limit + 1
    with _opened(entry.path) as descriptor:
        while left and (part := os.read(descriptor, min(left, CHUNK))):
            parts.append(part)
            left -= len(part)
    return b"".join(parts)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A regular file, opened without following a link or waiting for anybody."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file any more")
        yield descriptor
    finally:
        os.close(descriptor)


def shown(name: str) -> str:
    """A name that can be printed and written as JSON: undecodable bytes and control characters are escaped."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)[:1024]


def _signed_release(listing: Listing, key: PublicKey | None) -> tuple[Release, Artifact]:
    """The release, believed when `key` is given, and the artifact of the statement's own file."""
    entry = listing.files.get(RELEASE_FILE)
    if entry is None:
        raise ReleaseError("SIGNATURE_MISSING", f"the package holds no {RELEASE_FILE}", file=RELEASE_FILE)
    data = _bounded(entry, RELEASE_FILE)
    payload = _vouched(data, key, RELEASE_FILE)
    return parse_release(payload, file=RELEASE_FILE), Artifact(
        path=RELEASE_FILE, size=len(data), digest=digest_of(data)
    )


def _bounded(entry: Entry, file: str) -> bytes:
    if entry.size <= MAX_BUNDLE_BYTES:
        try:
            return read_small(entry, MAX_BUNDLE_BYTES)
        except OSError as error:
            raise ReleaseError("MALFORMED_DOCUMENT", f"cannot be read: {error.strerror}", file=file) from None
    raise ReleaseError(
        "MALFORMED_DOCUMENT",
        "document too large",
        file=file,
        expected=f"at most {MAX_BUNDLE_BYTES} bytes",
        actual=f"{entry.size} bytes",
    )


def _vouched(data: bytes, key: PublicKey | None, file: str) -> bytes:
    """The payload of a bundle, once `key` vouches for it."""
    envelope = parse_bundle(data, file=file)
    if key is None:
        return envelope.payload
    if envelope.hint != key.key_id:
        raise ReleaseError(
            "SIGNATURE_INVALID",
            "the statement was signed with another key",
            file=file,
            expected=f"sha256:{key.key_id}",
            actual=f"sha256:{envelope.hint}",
        )
    try:
        key.verify(pae(envelope.payload), envelope.signature)
    except ReleaseError as error:
        raise ReleaseError(error.code, error.message, file=file) from None
    return envelope.payload


def _model_signature(
    listing: Listing, release: Release, statement: Artifact, key: PublicKey
) -> tuple[Literal["valid", "invalid", "absent"], tuple[FileFinding, ...]]:
    entry = listing.files.get(MODEL_FILE)
    if entry is None:
        missing = FileFinding(code="MISSING_FILE", message=f"{MODEL_FILE} is missing", file=MODEL_FILE)
        return "absent", (missing,) if release.predicate.model_signature else ()
    try:
        files = parse_model(_vouched(_bounded(entry, MODEL_FILE), key, MODEL_FILE), file=MODEL_FILE)
    except ReleaseError as error:
        finding = FileFinding(
            code="MODEL_SIGNATURE_INVALID",
            message=f"{MODEL_FILE}: {error.message}",
            file=MODEL_FILE,
            expected=error.expected,
            actual=error.actual,
        )
        return "invalid", (finding,)
    findings = compare_model(release, statement, files)
    return ("invalid" if findings else "valid"), findings


class _Hasher:
    """Hashes the files that could be right, in a few threads of one buffer each, the largest first."""

    def __init__(self, algorithm: Algorithm, progress: Progress | None) -> None:
        self.files = 0
        self.bytes = 0
        self._algorithm = algorithm
        self._progress = progress
        self._lock = threading.Lock()
        self._total = 0

    def run(self, subjects: Iterable[Subject], listing: Listing, workers: int) -> list[Found]:
        """Every file that must be signed, as found; with digests where its size is the signed one."""
        signed = {subject.name: subject for subject in subjects}
        found = [
            Found(name, entry.size)
            for name, entry in listing.files.items()
            if name not in UNSIGNED and name not in signed
        ]
        right: list[tuple[Subject, Entry]] = []
        for name in signed.keys() & listing.files.keys():
            subject, entry = signed[name], listing.files[name]
            if entry.size == subject.size:
                right.append((subject, entry))
            else:
                found.append(Found(name, entry.size, lfs_oid=_lfs_oid(entry)))
        right.sort(key=lambda pair: (-pair[1].size, pair[0].name))
        self._total = sum(entry.size for _, entry in right)
        with ThreadPoolExecutor(max(1, workers)) as pool:
            found.extend(pool.map(lambda pair: self._one(*pair), right))
        return found

    def _one(self, subject: Subject, entry: Entry) -> Found:
        algorithm: Algorithm = self._algorithm if subject.digest.blake3 is not None else "sha256"
        file = Found(subject.name, entry.size)
        try:
            for step in hash_entry(entry, (algorithm,)):
                if isinstance(step, int):
                    self._advance(subject.name, step)
                    continue
                size, digest = step
                file = Found(subject.name, size, sha256=digest.get("sha256"), blake3=digest.get("blake3"))
            with self._lock:
                self.files += 1
            if file.sha256 is None and compare((subject,), (file,)):
                file = replace(file, sha256=digests(entry, ("sha256",))[1]["sha256"])
        except OSError:
            return Found(subject.name, entry.size)
        return file

    def _advance(self, name: str, count: int) -> None:
        with self._lock:
            self.bytes += count
            if self._progress is not None:
                self._progress(name, self.bytes, self._total)


def _unsigned(listing: Listing) -> tuple[str, ...]:
    files = (name for name in sorted(UNSIGNED & listing.files.keys()) if name not in (RELEASE_FILE, MODEL_FILE))
    return (*files, f"{DOWNLOAD_CACHE}/") if listing.cached else tuple(files)


def _lfs_oid(entry: Entry) -> str | None:
    if entry.size > MAX_POINTER_BYTES:
        return None
    try:
        return lfs_oid(read_small(entry, MAX_POINTER_BYTES))
    except OSError:
        return None
