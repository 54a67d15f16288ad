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

from quantmint.errors import ReleaseError
from quantmint.process import started_at
from quantmint.store import clear, disk_errors
from quantmint.verify import list_package, read_release

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@contextlib.contextmanager
def staging(out: Path) -> Iterator[Path]:
    """An empty folder beside `out`, on the same file system, gone afterwards unless it was published."""
    with disk_errors():
        out.parent.mkdir(parents=True, exist_ok=True)
    _sweep(out)
    folder = out.parent / f".{out.name}.staging-{os.getpid()}-{started_at(os.getpid())}"
    clear(folder)
    folder.mkdir()
    try:
        yield folder
    finally:
        clear(folder)


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


def publish(package: Path, out: Path, release: str) -> None:
    """Make the sealed folder `package` (from `staging`) appear at `out` in one step.

    Raises:
        ReleaseError: as `require_free`; DISK_FULL.
    """
    require_free(out, release)
    with disk_errors():
        if out.exists() and any(out.iterdir()):
            _exchange(package, out)
            clear(package)
        else:
            package.rename(out)


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
