"""Weight files inside a job: read by header and range, written in the layout of `checkpoint`. Standard library alone.

Never a whole file in memory, and never a tensor trusted beyond its parsed header.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from quantmint.checkpoint import (
    INDEX_FILE,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    Header,
    Shard,
    TensorEntry,
    TensorIndex,
    TensorSpec,
    header_bytes,
    parse_header,
)
from quantmint.errors import ReleaseError

CHUNK = 4 * 1024 * 1024


def read_header(path: Path) -> Header:
    """The header of one weight file, named by its file name.

    Raises:
        ReleaseError: CORRUPT_SHARD or LFS_POINTER.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(PREFIX_BYTES)
        length = header_bytes(prefix, file=path.name, size=size)
        data = prefix[:length] + stream.read(max(0, length - len(prefix)))
    return parse_header(data, file=path.name, size=size)


def read_index(folder: Path) -> TensorIndex:
    """All tensors of the checkpoint in `folder`, headers and index in agreement.

    Raises:
        ReleaseError: CORRUPT_SHARD or LFS_POINTER; SOURCE_MISSING when there is no weight file at all.
    """
    headers = [read_header(path) for path in sorted(folder.glob("*.safetensors"))]
    index = folder / INDEX_FILE
    if not headers and not index.exists():
        raise ReleaseError(
            "SOURCE_MISSING", "the checkpoint has no weight file", file=folder.name, expected="*.safetensors"
        )
    raw = None
    if index.exists():
        if index.stat().st_size > MAX_HEADER_BYTES:
            raise ReleaseError(
                "CORRUPT_SHARD", "the index is overlong", file=INDEX_FILE, expected=f"{MAX_HEADER_BYTES} bytes"
            )
        raw = index.read_bytes()
    return TensorIndex.of(headers, raw)


def read_range(folder: Path, entry: TensorEntry) -> Iterator[bytes]:
    """The raw bytes of a tensor, in chunks.

    Raises:
        ReleaseError: CORRUPT_SHARD when the file has become shorter than its header says.
    """
    with (folder / entry.file).open("rb") as stream:
        stream.seek(entry.begin)
        left = entry.nbytes
        while left:
            chunk = stream.read(min(CHUNK, left))
            if not chunk:
                raise ReleaseError("CORRUPT_SHARD", f"tensor {entry.name} ends early", file=entry.file)
            left -= len(chunk)
            yield chunk


def range_digest(folder: Path, entry: TensorEntry) -> str:
    """SHA-256 of the raw bytes of a tensor, as a digest."""
    digest = hashlib.sha256()
    for chunk in read_range(folder, entry):
        digest.update(chunk)
    return "sha256:" + digest.hexdigest()


def write_shard(folder: Path, shard: Shard, payload: Callable[[TensorSpec], Iterable[bytes]]) -> None:
    """Write one weight file; `payload` yields the bytes of each tensor of the shard, in its order.

    Raises:
        ReleaseError: CHECKPOINT_MISMATCH when a payload has not the length of its tensor.
    """
    with (folder / shard.file).open("wb") as stream:
        stream.write(shard.header)
        for tensor in shard.tensors:
            written = sum(stream.write(chunk) for chunk in payload(tensor))
            if written != tensor.nbytes:
                raise ReleaseError(
                    "CHECKPOINT_MISMATCH",
                    f"tensor {tensor.name} has the wrong length",
                    file=shard.file,
                    expected=f"{tensor.nbytes} bytes",
                    actual=f"{written} bytes",
                )
