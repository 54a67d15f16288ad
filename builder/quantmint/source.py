"""Fetching: sources become trees of the store, pinned by digest or commit, every weight file's header parsed.

The only stage that runs on the host, because only the host has a network. A source that is not what was pinned, or
whose weight files are not what they say, goes no further.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quantmint.artifact import Artifact, Tree, legal_path
from quantmint.checkpoint import INDEX_FILE, PREFIX_BYTES, TensorIndex, header_bytes, parse_header
from quantmint.errors import ReleaseError
from quantmint.recipe import Source
from quantmint.store import Store, clear, hash_tree

Notice = Callable[[str, int, int], None]
"""Told of progress: what, done, total."""


def tree_at(root: Path, source: Source) -> Tree:
    """The tree of a `dir:` source as it is now, hashed anew.

    Raises:
        ReleaseError: SOURCE_MISSING or ILLEGAL_PATH.
    """
    folder = _inside(root, source.path)
    if not folder.is_dir():
        raise ReleaseError(
            "SOURCE_MISSING",
            "the source folder does not exist",
            file=source.path,
            expected="a folder",
            actual="nothing",
        )
    tree = hash_tree(folder)
    if not tree.artifacts:
        raise ReleaseError("SOURCE_MISSING", "the source folder is empty", file=source.path)
    return tree


def _inside(root: Path, path: str) -> Path:
    try:
        return root / legal_path(path)
    except ReleaseError as error:
        raise ReleaseError(
            "INVALID_VALUE", f"dir: takes a folder of this project: {error.message}", file=path
        ) from None


def fetch(name: str, source: Source, *, root: Path, store: Store, recipe: str, notice: Notice) -> Tree:
    """Take a source into the store and return its tree.

    Raises:
        ReleaseError: SOURCE_UNPINNED, SOURCE_MISSING, SOURCE_CHANGED, CORRUPT_SHARD, LFS_POINTER, or what the Hub says.
    """
    source.require_pinned(name, file=recipe)
    folder = _inside(root, source.path) if source.kind == "dir" else _fetched(source, store, notice)
    tree = tree_at(root, source) if source.kind == "dir" else hash_tree(folder)
    if source.digest is not None and tree.digest != source.digest:
        raise _changed(name, source, tree, store)
    _parse_weights(folder, tree)
    kept = Tree.of(
        Artifact(path=artifact.path, size=taken.size, digest=taken.digest)
        for artifact in tree.artifacts
        for taken in (artifact if store.has(artifact) else store.add_file(folder / artifact.path),)
    )
    if kept.digest != tree.digest:
        raise ReleaseError("SOURCE_CHANGED", f"source {name} changed while it was read", file=source.uri)
    store.keep_tree(tree)
    notice(f"source {name}", len(tree.artifacts), len(tree.artifacts))
    return tree


def _fetched(source: Source, store: Store, notice: Notice) -> Path:
    from quantmint import hub

    folder = store.folder("sources", source.repository.replace("/", "--"), source.revision)
    hub.fetch(source.repository, source.revision, folder, progress=notice)
    clear(folder / ".cache")
    return folder


def _changed(name: str, source: Source, tree: Tree, store: Store) -> ReleaseError:
    """SOURCE_CHANGED, naming the first file that differs when the pinned tree was seen here before."""
    assert source.digest is not None
    known = store.tree(source.digest)
    if known is not None:
        before = {artifact.path: artifact.digest for artifact in known.artifacts}
        after = {artifact.path: artifact.digest for artifact in tree.artifacts}
        for path in sorted({*before, *after}):
            if before.get(path) != after.get(path):
                return ReleaseError(
                    "SOURCE_CHANGED",
                    f"source {name} is not what the recipe pinned: {path} differs",
                    file=f"{source.path}/{path}",
                    expected=before.get(path, "absent"),
                    actual=after.get(path, "absent"),
                )
    return ReleaseError(
        "SOURCE_CHANGED",
        f"source {name} is not what the recipe pinned",
        file=source.uri,
        expected=source.digest,
        actual=tree.digest,
    )


def _parse_weights(folder: Path, tree: Tree) -> None:
    """Parse the header of every weight file and the index, so that a corrupt source costs seconds and not hours."""
    headers = []
    for artifact in tree.artifacts:
        if artifact.path.endswith(".safetensors"):
            with (folder / artifact.path).open("rb") as stream:
                prefix = stream.read(PREFIX_BYTES)
                length = header_bytes(prefix, file=artifact.path, size=artifact.size)
                stream.seek(0)
                headers.append(parse_header(stream.read(length), file=artifact.path, size=artifact.size))
    if headers:
        index = folder / INDEX_FILE
        TensorIndex.of(headers, index.read_bytes() if index.is_file() else None)
