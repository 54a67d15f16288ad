"""Publishing: a sealed package appears at its target whole, or not at all.

`dir:PATH` is the one target so far. What stood there is replaced only when it is itself a package of the same release
with nothing foreign in it; anything else is left untouched and refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from quantmint.artifact import digest_of
from quantmint.errors import ReleaseError
from quantmint.process import started_at
from quantmint.store import Store, clear, disk_errors
from quantmint.verify import list_package, read_release

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@contextlib.contextmanager
def staging(out: Path) -> Iterator[Path]:
    """An empty folder beside `out`, on the same file system, gone afterwards unless it was published."""
    require_parent(out)
    _sweep(out)
    folder = out.parent / f".{out.name}.staging-{os.getpid()}-{started_at(os.getpid())}"
    clear(folder)
    folder.mkdir()
    try:
        yield folder
    finally:
        clear(folder)


def require_parent(out: Path) -> None:
    """Make the folder that `out` goes into, and see that it can be written.

    Raises:
        ReleaseError: STORAGE_UNUSABLE or DISK_FULL.
    """
    with disk_errors():
        out.parent.mkdir(parents=True, exist_ok=True)
        probe = out.parent / f".{out.name}.probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()


def _sweep(out: Path) -> None:
    """Remove the staging folders of killed builders."""
    for left in out.parent.glob(f".{out.name}.staging-*"):
        pid, _, started = left.name.rpartition("staging-")[2].removesuffix("-replaced").partition("-")
        if pid.isdigit() and started_at(int(pid)) != started:
            clear(left)


def require_free(out: Path, release: str) -> None:
    """Return when `release` may be published at `out`: nothing is there, or a whole or damaged package of that release.

    Raises:
        ReleaseError: OUTPUT_NOT_EMPTY, naming what is in the way.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise ReleaseError(
            "OUTPUT_NOT_EMPTY", "the output is not a folder", file=str(out), expected="a folder or nothing"
        )
    if not any(out.iterdir()):
        return
    try:
        there = read_release(out, public_key=None)
        listing = list_package(out)
    except ReleaseError:
        raise ReleaseError(
            "OUTPUT_NOT_EMPTY",
            "the output folder is not empty and no package",
            file=str(out),
            expected=f"empty, or release {release}",
        ) from None
    if there.predicate.release != release:
        raise ReleaseError(
            "OUTPUT_NOT_EMPTY",
            "the output folder holds another release",
            file=str(out),
            expected=release,
            actual=there.predicate.release[:96],
        )
    signed = {subject.name for subject in there.statement.subjects}
    foreign = sorted(name for name in listing.files if name not in signed and name not in _OURS)
    if foreign or listing.findings:
        name = foreign[0] if foreign else str(listing.findings[0].file)
        raise ReleaseError(
            "OUTPUT_NOT_EMPTY",
            f"the output folder holds {name}, which is not part of the package",
            file=str(out),
            actual=name,
        )


_OURS = frozenset({"release.sigstore.json", "model.sig", ".gitattributes"})


def key_place(out: Path) -> Path:
    """Where the public half of the signing key goes: beside the package, `NAME.pub`."""
    return out.with_name(out.name + ".pub")


def require_key_place(out: Path, store: Store, key: bytes | None) -> None:
    """Return when the public key may be written beside `out`: nothing is there, or what a release put there.

    `key` is the PEM of the key that will sign, when it is known.

    Raises:
        ReleaseError: OUTPUT_NOT_EMPTY.
    """
    place = key_place(out)
    if not place.exists() and not place.is_symlink():
        return
    ours = False
    if place.is_file() and not place.is_symlink():
        data = place.read_bytes()
        ours = data == key or _published(store, data).exists()
        if not ours:
            with contextlib.suppress(ReleaseError):
                read_release(out, public_key=place)
                ours = True
    if not ours:
        raise ReleaseError(
            "OUTPUT_NOT_EMPTY",
            "where the public key of the release would go stands something that no release put there",
            file=str(place),
            expected="nothing, or the key of the package beside it",
        )


def _published(store: Store, key: bytes) -> Path:
    return store.folder("published") / digest_of(key).removeprefix("sha256:")


def publish(package: Path, out: Path, release: str, key: bytes, store: Store) -> None:
    """Make the sealed folder `package` (from `staging`) appear at `out` in one step, and its public key beside it.

    The key is on disk before the package appears and takes its name right after; see `recover`.

    Raises:
        ReleaseError: as `require_free` and `require_key_place`; DISK_FULL or STORAGE_UNUSABLE.
    """
    require_free(out, release)
    require_key_place(out, store, key)
    place = key_place(out)
    with disk_errors():
        waiting = place.with_name(f".{place.name}.new")
        waiting.write_bytes(key)
        _published(store, key).write_bytes(b"")
        if out.exists() and any(out.iterdir()):
            _exchange(package, out)
            clear(package)
        else:
            package.rename(out)
        waiting.replace(place)


def recover(out: Path) -> None:
    """Finish what a killed builder left between the two steps of `publish`: the package is there, its key waits."""
    place = key_place(out)
    waiting = place.with_name(f".{place.name}.new")
    if waiting.is_file() and not waiting.is_symlink():
        try:
            read_release(out, public_key=waiting)
        except ReleaseError:
            waiting.unlink()
        else:
            waiting.replace(place)


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders atomically (renameat2 with RENAME_EXCHANGE), or in two renames where that is unknown."""
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "renameat2"):
        done = library.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
        if done == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(number, os.strerror(number), str(other))
    aside = other.parent / f".{other.name}.staging-{os.getpid()}-{started_at(os.getpid())}-replaced"
    other.rename(aside)
    one.rename(other)
    aside.rename(one)
