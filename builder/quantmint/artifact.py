"""Files as facts: digests, legal relative paths, artifacts and tree digests.

Values only: nothing here opens a file. A path that is not portable and contained can never become an `Artifact`.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from quantmint.document import Document, canonical
from quantmint.errors import ReleaseError

MAX_COMPONENTS = 32
DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
Digest = Annotated[str, Field(pattern=DIGEST_PATTERN)]
"""`sha256:` and 64 lower-case hex digits."""

_RESERVED = re.compile(r"^(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?$", re.IGNORECASE)


def digest_of(data: bytes) -> str:
    """SHA-256 of `data` as a `Digest`."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def illegal_because(path: str) -> str | None:
    """Why `path` is not a legal relative path, or None when it is one.

    Legal: POSIX separators, NFC, no empty, `.` or `..` component, no control characters, backslash or colon, no name
    that Windows reserves, no trailing dot or space, at most 255 bytes a component, 32 components and
    1,024 bytes in all.
    """
    if not path or path.startswith("/"):
        return "empty or absolute"
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        return "not valid Unicode"
    if len(raw) > 1024:
        return "longer than 1,024 bytes"
    if unicodedata.normalize("NFC", path) != path:
        return "not in Unicode normal form C"
    if any(unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp") for char in path) or "\\" in path or ":" in path:
        return "holds a control character, a backslash or a colon"
    parts = path.split("/")
    if len(parts) > MAX_COMPONENTS:
        return f"has more than {MAX_COMPONENTS} components"
    return next((why for part in parts if (why := _illegal_component(part)) is not None), None)


def _illegal_component(part: str) -> str | None:
    if part in ("", ".", ".."):
        return "holds an empty, '.' or '..' component"
    if len(part.encode()) > 255:
        return "holds a component longer than 255 bytes"
    if part.endswith((".", " ")) or _RESERVED.match(part):
        return "holds a component that is not portable"
    return None


def legal_path(path: str) -> str:
    """`path` itself.

    Raises:
        ReleaseError: ILLEGAL_PATH.
    """
    why = illegal_because(path)
    if why is not None:
        raise ReleaseError("ILLEGAL_PATH", f"illegal path {path[:200]!r}: {why}", file=path[:200])
    return path


def _validated(path: str) -> str:
    why = illegal_because(path)
    if why is not None:
        raise ValueError(f"illegal path: {why}")
    return path


RelPath = Annotated[str, AfterValidator(_validated)]
"""A legal relative path, see `illegal_because`."""


class Artifact(Document):
    """A hashed file: its path relative to its tree, its size in bytes and its digest."""

    path: RelPath
    size: Annotated[int, Field(ge=0, le=2**53 - 1)]
    digest: Digest


class Tree(Document):
    """A set of artifacts, sorted by path, no two of which collide on a case-insensitive file system."""

    artifacts: tuple[Artifact, ...]

    @model_validator(mode="after")
    def _sorted_and_distinct(self) -> Self:
        paths = [artifact.path for artifact in self.artifacts]
        if paths != sorted(set(paths)):
            raise ValueError("artifacts must be sorted by path, each path once")
        clash = collision(paths)
        if clash is not None:
            raise ValueError(f"paths collide: {clash[0]} and {clash[1]}")
        return self

    @classmethod
    def of(cls, artifacts: Iterable[Artifact]) -> Tree:
        """A tree of `artifacts` in any order.

        Raises:
            ReleaseError: ILLEGAL_PATH when two paths are one on a case-insensitive file system.
        """
        ordered = tuple(sorted(artifacts, key=lambda artifact: artifact.path))
        clash = collision(artifact.path for artifact in ordered)
        if clash is not None:
            raise ReleaseError("ILLEGAL_PATH", f"paths collide: {clash[0]} and {clash[1]}", file=clash[1])
        return cls(artifacts=ordered)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of [[path, size, digest], …] in path order, as a `Digest`."""
        return digest_of(canonical([[a.path, a.size, a.digest] for a in self.artifacts]))

    @property
    def size(self) -> int:
        """Bytes of all artifacts."""
        return sum(artifact.size for artifact in self.artifacts)

    def __getitem__(self, path: str) -> Artifact:
        for artifact in self.artifacts:
            if artifact.path == path:
                return artifact
        raise KeyError(path)


def collision(paths: Iterable[str]) -> tuple[str, str] | None:
    """The first two paths that are one on a case-insensitive file system, or where a file is also a folder."""
    seen: dict[str, str] = {}
    ordered = sorted(paths)
    for path in ordered:
        folded = unicodedata.normalize("NFC", path.casefold())
        if folded in seen:
            return seen[folded], path
        seen[folded] = path
    for path in ordered:
        parts = unicodedata.normalize("NFC", path.casefold()).split("/")
        for cut in range(1, len(parts)):
            folder = "/".join(parts[:cut])
            if folder in seen:
                return seen[folder], path
    return None
