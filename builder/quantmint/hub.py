"""The door to the Hugging Face Hub: resolve a commit, fetch its files, and check every byte against what the Hub says.

The only importer of huggingface_hub. A moving branch name never gets through: what is fetched is a full commit, and
each file's hash is recorded. Tokens come from the library's own environment and appear nowhere.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quantmint.artifact import illegal_because
from quantmint.errors import ReleaseError

FULL_COMMIT = 40
Progress = Callable[[str, int, int], None]
"""Called after each file with its name, files done, and files in all."""


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    """The one table from huggingface_hub's and its transport's exceptions to ours."""
    from huggingface_hub import errors

    try:
        yield
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise ReleaseError(
            "SOURCE_MISSING",
            f"{doing}: the Hub has no such repository, revision or file",
            hint="Check the source uri, and access.",
        ) from error
    except Exception as error:
        ours = isinstance(error, errors.HfHubHTTPError | errors.OfflineModeIsEnabled | ConnectionError)
        if not ours and not type(error).__module__.startswith("httpx"):  # its transport changes names between releases
            raise
        raise ReleaseError("REMOTE_FAILED", f"{doing}: {type(error).__name__}: {error}"[:500]) from error


def _api(endpoint: str | None) -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ReleaseError(
            "MISSING_EXTRA", "fetching from the Hub needs huggingface_hub", hint="pip install 'quantmint[hub]'"
        ) from None
    return HfApi(endpoint=endpoint)


def fetch(
    repository: str, commit: str, target: Path, *, endpoint: str | None = None, progress: Progress | None = None
) -> None:
    """Fetch every file of `repository` at the full `commit` into `target`, each checked against the Hub's own hash.

    Files that are there already and whole are kept, so that a broken fetch goes on where it stood.

    Raises:
        ReleaseError: MISSING_EXTRA, SOURCE_MISSING, SOURCE_UNPINNED (the Hub resolved another commit), REMOTE_FAILED,
            ILLEGAL_PATH, or SOURCE_CHANGED naming the file whose bytes are not those of the commit.
    """
    api = _api(endpoint)
    if len(commit) != FULL_COMMIT:
        raise ReleaseError(
            "SOURCE_UNPINNED", f"{repository}: a full commit is needed", expected="40 hex digits", actual=commit
        )
    with _translated(f"asking for {repository}"):
        info = api.model_info(repository, revision=commit, files_metadata=True)
    if info.sha != commit:
        raise ReleaseError(
            "SOURCE_UNPINNED", f"{repository} resolved to another commit", expected=commit, actual=str(info.sha)
        )
    siblings = sorted(info.siblings or [], key=lambda sibling: str(sibling.rfilename))
    for done, sibling in enumerate(siblings):
        name = sibling.rfilename
        why = illegal_because(name)
        if why is not None:
            raise ReleaseError(
                "ILLEGAL_PATH", f"{repository} names an illegal path {name[:200]!r}: {why}", file=name[:200]
            )
        place = target / name
        if not (place.is_file() and _is(place, sibling)):
            with _translated(f"fetching {name}"):
                api.hf_hub_download(repository, name, revision=commit, local_dir=target)
            if not _is(place, sibling):
                expected = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
                raise ReleaseError(
                    "SOURCE_CHANGED",
                    f"{name} arrived with other bytes than the commit has",
                    file=name,
                    expected=str(expected),
                )
        if progress is not None:
            progress(name, done + 1, len(siblings))


def _is(path: Path, sibling: Any) -> bool:
    """Whether a file has the hash that the Hub states: SHA-256 for LFS files, a git blob's SHA-1 for the rest."""
    size = path.stat().st_size
    if sibling.lfs is not None:
        digest, expected = hashlib.sha256(), sibling.lfs.sha256
    else:
        digest, expected = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), sibling.blob_id
    with path.open("rb") as stream:
        while chunk := stream.read(4 * 1024 * 1024):
            digest.update(chunk)
    return bool(digest.hexdigest() == expected)
