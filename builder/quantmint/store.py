"""The store: content-addressed blobs, stage records, locks, logs and scratch folders under one state folder.

Blobs are written once, by rename, read-only, and never trusted again without their hash. A record exists only when
all its blobs do. Nothing here knows what a stage means, and nothing outside the state folder is ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quantmint.artifact import Artifact, Tree, illegal_because
from quantmint.document import Document, author
from quantmint.errors import ReleaseError
from quantmint.evidence import EvidenceFile
from quantmint.stage import JobReport, Output

CHUNK = 4 * 1024 * 1024
UNUSABLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOENT, errno.ENOTEMPTY}
)
_held: set[int] = set()
WORKERS = 2


class Record(Document):
    """What a finished stage left: its report and its outputs (a file output is a tree of one artifact)."""

    report: JobReport
    outputs: dict[str, Tree]


def hash_file(path: Path) -> tuple[str, int]:
    """`Digest` and size in bytes of a file, read once in chunks."""
    digest = hashlib.sha256()
    size = 0
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
            size += count
    return "sha256:" + digest.hexdigest(), size


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn a full disk into DISK_FULL and a place that cannot be written into STORAGE_UNUSABLE; all else passes."""
    try:
        yield
    except OSError as error:
        place = str(error.filename or "") or None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ReleaseError("DISK_FULL", "the disk is full", file=place) from error
        if error.errno in UNUSABLE:
            raise ReleaseError("STORAGE_UNUSABLE", f"cannot be written: {error.strerror}", file=place) from error
        raise


def walk(root: Path) -> list[str]:
    """Relative POSIX paths of all regular files below `root`, sorted.

    Raises:
        ReleaseError: ILLEGAL_PATH for a symbolic link, a special file or a name that is not portable.
    """
    found: list[str] = []
    pending = [root]
    while pending:
        folder = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                path = Path(entry.path)
                name = path.relative_to(root).as_posix()
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    pending.append(path)
                elif stat.S_ISREG(mode):
                    why = illegal_because(name)
                    if why is not None:
                        raise ReleaseError("ILLEGAL_PATH", f"illegal file name {name!r}: {why}", file=name)
                    found.append(name)
                else:
                    raise ReleaseError(
                        "ILLEGAL_PATH",
                        f"{name} is a symbolic link or a special file",
                        file=name,
                        expected="a regular file",
                    )
    return sorted(found)


def hash_tree(root: Path, *, done: Callable[[int], None] | None = None) -> Tree:
    """Hash every file below `root`; `done(bytes)` is called after each file."""

    def one(name: str) -> Artifact:
        digest, size = hash_file(root / name)
        if done is not None:
            done(size)
        return Artifact(path=name, size=size, digest=digest)

    with ThreadPoolExecutor(WORKERS) as pool:
        return Tree.of(pool.map(one, walk(root)))


def held_locks() -> tuple[int, ...]:
    """Descriptors of the locks held by this process: a child that inherits them holds them as long as it lives."""
    return tuple(sorted(_held))


class Store:
    """One state folder. Safe for several processes at once: blobs and records appear whole, by rename."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def folder(self, *parts: str) -> Path:
        """A folder of the store, made when absent."""
        path = self.root.joinpath(*parts)
        with disk_errors():
            path.mkdir(parents=True, exist_ok=True)
        return path

    def blob(self, digest: str) -> Path:
        """Where the blob of `digest` stands or would stand."""
        value = digest.removeprefix("sha256:")
        return self.root / "blobs" / value[:2] / value[2:]

    def has(self, artifact: Artifact) -> bool:
        """Whether a blob of that digest and size stands in the store."""
        try:
            return self.blob(artifact.digest).stat().st_size == artifact.size
        except FileNotFoundError:
            return False

    def add_file(self, source: Path, *, move: bool = False) -> Artifact:
        """Take a file into the store by content; `move` consumes it. The artifact's path is the file's name."""
        with disk_errors():
            if move:
                digest, size = hash_file(source)
                target = self.blob(digest)
                if target.exists():
                    source.unlink()
                else:
                    self.folder("blobs", target.parent.name)
                    if os.geteuid() == 0:
                        os.chown(source, 0, 0)
                    source.chmod(0o444)
                    source.rename(target)
                return Artifact(path=source.name, size=size, digest=digest)
            digest, size = hash_file(source)
            target = self.blob(digest)
            if not target.exists():
                self._copy_in(source, digest, target)
        return Artifact(path=source.name, size=size, digest=digest)

    def _copy_in(self, source: Path, digest: str, target: Path) -> None:
        self.folder("blobs", target.parent.name)
        draft = self.folder("drafts") / f"{target.name[:16]}.{os.getpid()}"
        try:
            shutil.copyfile(source, draft)
            copied, _ = hash_file(draft)
            if copied != digest:
                raise ReleaseError(
                    "SOURCE_CHANGED", f"{source.name} changed while it was read", file=source.name, expected=digest
                )
            draft.chmod(0o444)
            draft.rename(target)
        finally:
            draft.unlink(missing_ok=True)

    def add_bytes(self, data: bytes, name: str) -> Artifact:
        """Take bytes into the store under a display name."""
        draft = self.folder("drafts") / f"{name}.{os.getpid()}"
        with disk_errors():
            draft.write_bytes(data)
        artifact = self.add_file(draft, move=True)
        return Artifact(path=name, size=artifact.size, digest=artifact.digest)

    def add_tree(self, root: Path, *, move: bool = False, done: Callable[[int], None] | None = None) -> Tree:
        """Take every file below `root` into the store."""

        def one(name: str) -> Artifact:
            taken = self.add_file(root / name, move=move)
            if done is not None:
                done(taken.size)
            return Artifact(path=name, size=taken.size, digest=taken.digest)

        with ThreadPoolExecutor(WORKERS) as pool:
            return Tree.of(pool.map(one, walk(root)))

    def put(self, artifact: Artifact, target: Path) -> None:
        """Place the blob of `artifact` at `target`, hashed before use; hard-linked where the file system allows it.

        Raises:
            ReleaseError: STORE_CORRUPT; the bad blob is set aside, so that a new run makes it again.
        """
        source = self.blob(artifact.digest)
        with disk_errors():
            try:
                actual, _ = hash_file(source)
            except FileNotFoundError:
                actual = "absent"
            if actual != artifact.digest:
                raise self._rotten(artifact, actual)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                    raise
                shutil.copyfile(source, target)

    def copy_out(self, artifact: Artifact | EvidenceFile, target: Path) -> None:
        """Copy a blob to `target` as a file of its own, mode 0644, hashed on the way.

        Raises:
            ReleaseError: STORE_CORRUPT or DISK_FULL.
        """
        with disk_errors():
            target.parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256()
            try:
                with (
                    self.blob(artifact.digest).open("rb", buffering=0) as source,
                    target.open("wb", buffering=0) as sink,
                ):
                    while chunk := source.read(CHUNK):
                        digest.update(chunk)
                        sink.write(chunk)
            except FileNotFoundError:
                raise self._rotten(artifact, "absent") from None
            target.chmod(0o644)
        if "sha256:" + digest.hexdigest() != artifact.digest:
            raise self._rotten(artifact, "sha256:" + digest.hexdigest())

    def _rotten(self, artifact: Artifact | EvidenceFile, actual: str) -> ReleaseError:
        """STORE_CORRUPT; the bad blob is set aside, so that a new run makes it again."""
        if actual != "absent":
            with disk_errors():
                self.blob(artifact.digest).rename(self.folder("drafts") / f"corrupt-{artifact.digest[7:39]}")
        return ReleaseError(
            "STORE_CORRUPT",
            f"the stored bytes of {artifact.path} are not what was recorded",
            file=artifact.path,
            expected=artifact.digest,
            actual=actual,
        )

    def put_tree(self, tree: Tree, target: Path) -> None:
        """Place a tree; see `put`."""
        target.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(lambda artifact: self.put(artifact, target / artifact.path), tree.artifacts))

    def record(self, key: str) -> Record | None:
        """The record of a stage key, or None when there is none or one of its blobs is gone."""
        path = self.root / "records" / f"{key.removeprefix('sha256:')}.json"
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            return None
        try:
            record = author(Record, text, file=path.name, syntax="json")
        except ReleaseError:  # cut short by a power failure, or of another version: as good as none
            path.rename(self.folder("drafts") / f"unreadable-{path.name}")
            return None
        whole = all(self.has(artifact) for tree in record.outputs.values() for artifact in tree.artifacts)
        return record if whole else None

    def keep(self, key: str, record: Record) -> None:
        """Write a record by rename."""
        name = f"{key.removeprefix('sha256:')}.json"
        draft = self.folder("drafts") / f"{name}.{os.getpid()}"
        with disk_errors():
            with draft.open("wb") as stream:
                stream.write(record.canonical())
                stream.flush()
                os.fsync(stream.fileno())
            draft.rename(self.folder("records") / name)

    def tree(self, digest: str) -> Tree | None:
        """A tree that `keep_tree` kept, or None."""
        try:
            text = (self.root / "trees" / f"{digest.removeprefix('sha256:')}.json").read_text("utf-8")
        except FileNotFoundError:
            return None
        tree = author(Tree, text, file="tree", syntax="json")
        return tree if tree.digest == digest else None

    def keep_tree(self, tree: Tree) -> None:
        """Remember which artifacts a tree digest stands for."""
        name = f"{tree.digest.removeprefix('sha256:')}.json"
        draft = self.folder("drafts") / f"{name}.{os.getpid()}"
        with disk_errors():
            draft.write_bytes(tree.canonical())
            draft.rename(self.folder("trees") / name)

    @contextlib.contextmanager
    def lock(self, name: str, *, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the exclusive lock `name`; `waiting()` is called once when another process holds it."""
        path = self.folder("locks") / f"{name.removeprefix('sha256:')}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is not None:
                    waiting()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            _held.add(descriptor)
            yield
        finally:
            _held.discard(descriptor)
            os.close(descriptor)

    def locked(self, name: str) -> bool:
        """Whether some process holds the lock `name`."""
        path = self.root / "locks" / f"{name.removeprefix('sha256:')}.lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def sweep(self) -> None:
        """Remove the drafts of processes that are gone."""
        drafts = self.root / "drafts"
        for draft in drafts.iterdir() if drafts.is_dir() else ():
            owner = draft.name.rpartition(".")[2]
            if owner.isdigit() and not Path("/proc", owner).exists():
                clear(draft) if draft.is_dir() else draft.unlink(missing_ok=True)

    def collect(self, out: Path, outputs: tuple[Output, ...]) -> dict[str, Tree]:
        """Take the declared outputs of a job into the store.

        Raises:
            ReleaseError: OUTPUT_MISSING or OUTPUT_UNDECLARED, naming the file.
        """
        try:
            names = [name for name in walk(out) if name != "report.json"]
        except ReleaseError as error:
            raise ReleaseError("OUTPUT_UNDECLARED", error.message, file=error.file) from None
        except PermissionError as error:
            raise ReleaseError(
                "OUTPUT_UNDECLARED", "the stage left something unreadable", file=str(error.filename)
            ) from None
        claimed: dict[str, list[str]] = {output.name: [] for output in outputs}
        for name in names:
            owner = next(
                (o for o in outputs if name == o.path or (o.kind == "tree" and name.startswith(o.path + "/"))), None
            )
            if owner is None:
                raise ReleaseError("OUTPUT_UNDECLARED", f"the stage wrote {name}, which it does not declare", file=name)
            claimed[owner.name].append(name)
        collected: dict[str, Tree] = {}
        for output in outputs:
            if not claimed[output.name]:
                raise ReleaseError("OUTPUT_MISSING", f"the stage did not write {output.path}", file=output.path)
            if output.kind == "file":
                collected[output.name] = Tree.of([self.add_file(out / output.path, move=True)])
            else:
                collected[output.name] = self.add_tree(out / output.path, move=True)
        return collected


def clear(folder: Path) -> None:
    """Remove a folder of the store, also where a container left files of another user."""

    def writable(_function: object, path: str, _info: object) -> None:
        entry = Path(path)
        with contextlib.suppress(OSError):
            entry.parent.chmod(0o700)
            entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    if folder.exists():
        shutil.rmtree(folder, onerror=writable)
