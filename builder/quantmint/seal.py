"""Seal: hash a finished package, sign what it is and what it claims, and prove it by verifying it at once.

Nothing but `release.sigstore.json` and `model.sig` is written, each by rename, `model.sig` last. A package that does
not verify is left without signatures.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quantmint.artifact import Artifact, Tree, collision, digest_of
from quantmint.errors import ReleaseError
from quantmint.manifest import (
    DOWNLOAD_CACHE,
    MODEL_FILE,
    RELEASE_FILE,
    UNSIGNED,
    Predicate,
    model_statement,
    release_statement,
)
from quantmint.signers import Signer
from quantmint.statement import bundle_bytes, pae
from quantmint.store import disk_errors
from quantmint.verify import digests, list_package, verify

WORKERS = 2


def measure(package: Path) -> tuple[Tree, dict[str, str]]:
    """Every file of a package that must be signed, read once: its tree, and the hex BLAKE3 of each path.

    Raises:
        ReleaseError: PACKAGE_MISSING; SEAL_REFUSED for a link, a special file, a name that is not portable, two
            names that collide, a download cache, or a file that cannot be read.
    """
    listing = list_package(package)
    if listing.findings:
        first = listing.findings[0]
        raise ReleaseError("SEAL_REFUSED", f"{first.code}: {first.message}", file=first.file)
    if listing.cached:
        raise ReleaseError("SEAL_REFUSED", "a package to be sealed holds a download cache", file=DOWNLOAD_CACHE)
    clash = collision(listing.files)
    if clash is not None:
        raise ReleaseError("SEAL_REFUSED", f"{clash[0]} and {clash[1]} cannot both be files everywhere", file=clash[1])

    def one(name: str) -> tuple[Artifact, str]:
        try:
            size, found = digests(listing.files[name], ("sha256", "blake3"))
        except OSError as error:
            raise ReleaseError("SEAL_REFUSED", f"{name} cannot be read: {error.strerror}", file=name) from None
        return Artifact(path=name, size=size, digest=f"sha256:{found['sha256']}"), found["blake3"]

    with ThreadPoolExecutor(WORKERS) as pool:
        pairs = list(pool.map(one, (name for name in listing.files if name not in UNSIGNED)))
    return Tree.of(artifact for artifact, _ in pairs), {artifact.path: blake3 for artifact, blake3 in pairs}


def seal(package: Path, predicate: Predicate, signer: Signer) -> Tree:
    """Sign a package in place and return the tree of its subjects. Signatures that it had are replaced.

    Raises:
        ReleaseError: as `measure`; SEAL_REFUSED when the package is empty, contradicts the claims, changed while it
            was sealed, or holds a folder in place of a signature; DISK_FULL. Then no signature stands in the package.
    """
    if not package.is_dir():
        raise ReleaseError("PACKAGE_MISSING", f"there is no package at {package.name!r}", file=package.name)
    with _all_or_nothing(package):
        tree, blake3 = measure(package)
        payload = release_statement(tree, blake3, predicate)
        statement = bundle_bytes(payload, signer.sign(pae(payload)), signer.public.key_id)
        artifact = Artifact(path=RELEASE_FILE, size=len(statement), digest=digest_of(statement))
        model = model_statement(predicate.release, tree, artifact)
        model_signature = bundle_bytes(model, signer.sign(pae(model)), signer.public.key_id)
        _put(package, RELEASE_FILE, statement)
        _put(package, MODEL_FILE, model_signature)
        report = verify(package, signer.public, workers=WORKERS)
        if not report.ok or report.model_signature != "valid" or report.statement != digest_of(payload):
            first = report.findings[0] if report.findings else None
            raise ReleaseError(
                "SEAL_REFUSED",
                "the package changed while it was sealed" if first is None else f"{first.code}: {first.message}",
                file=None if first is None else first.file,
            )
    return tree


@contextlib.contextmanager
def _all_or_nothing(package: Path) -> Iterator[None]:
    """Start without signatures, and end without them unless everything went well."""

    def unsign() -> None:
        for name in (MODEL_FILE, RELEASE_FILE):
            try:
                (package / name).unlink(missing_ok=True)
            except OSError as error:
                raise ReleaseError("SEAL_REFUSED", f"{name} cannot be replaced: {error.strerror}", file=name) from None

    unsign()
    try:
        yield
    except BaseException:
        unsign()
        raise


def _put(package: Path, name: str, data: bytes) -> None:
    """Write a file of the package by rename; the draft stands beside the package, never in it."""
    draft = package.absolute().parent / f".{package.name}.{name}.{os.getpid()}"
    try:
        with disk_errors():
            with draft.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            draft.replace(package / name)
    finally:
        draft.unlink(missing_ok=True)
