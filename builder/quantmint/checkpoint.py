"""Safetensors as facts: strict headers, the index over several files, and the deterministic layout that we write.

Bytes in, values out; nothing here opens a file. Every byte is hostile: a header that is not exactly right is refused
with the file, what was expected and what was found. What stock readers let pass is not thereby let pass here.
"""

from __future__ import annotations

import json
import re
import struct
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring as _quoted
from math import prod
from types import MappingProxyType
from typing import Any

from quantmint.artifact import illegal_because
from quantmint.document import parse_json
from quantmint.errors import ReleaseError

BITS: Mapping[str, int] = MappingProxyType(
    {
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
        **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
        **dict.fromkeys(("I32", "U32", "F32"), 32),
        **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    }
)
"""Safetensors dtype → bits per element."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit on the JSON part of a header."""
MAX_RANK = 8
MAX_EXTENT = 2**53 - 1
MAX_NAME_BYTES = 1024
PREFIX_BYTES = 1024
"""How many leading bytes `header_bytes` wants to see: enough for a whole Git LFS pointer."""
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
METADATA: Mapping[str, str] = MappingProxyType({"format": "pt"})
"""The only metadata we write: stock writers order several keys at random."""

TOKENIZER_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    }
)
"""Files beside the weights that decide what text becomes and how it is generated."""

_LICENCE = re.compile(r"^(licen[cs]e|notice|use_policy)([._-].*)?$", re.IGNORECASE)
_LFS = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?size (\d{1,20})\n")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as it should be: safetensors dtype, row-major shape, `nbytes` of its packed elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", span(self.dtype, self.shape))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as a file's header declares it; `begin` and `end` are absolute byte offsets in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in its file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header: `tensors` in file order, `metadata` as given, `size` of the whole file in bytes."""

    file: str
    size: int
    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]


def span(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; elements narrower than a byte are packed along the last axis.

    Raises:
        KeyError: `dtype` is not in `BITS`.
        ValueError: the elements do not fill whole bytes.
    """
    bits = prod(shape) * BITS[dtype]
    if bits % 8:
        raise ValueError(f"{dtype} {list(shape)} does not fill whole bytes")
    return bits // 8


def _corrupt(file: str, message: str, expected: str | None = None, actual: str | None = None) -> ReleaseError:
    return ReleaseError("CORRUPT_SHARD", message, file=file, expected=expected, actual=actual)


def header_bytes(prefix: bytes, *, file: str, size: int) -> int:
    """How many leading bytes of the file make up its header (8 + JSON length).

    `prefix` holds the first `PREFIX_BYTES` bytes of the file, or all of it when it is shorter; `size` is the file's.

    Raises:
        ReleaseError: LFS_POINTER, or CORRUPT_SHARD when the length is absurd.
    """
    pointer = _LFS.match(prefix)
    if pointer is not None:
        raise ReleaseError(
            "LFS_POINTER",
            f"a {size}-byte Git LFS pointer stands where a weight file should be",
            file=file,
            expected=f"{int(pointer[1])} bytes of weights",
            actual=f"{size} bytes of pointer",
        )
    if size < 8 or len(prefix) < 8:
        raise _corrupt(
            file, "too short for a safetensors header", "at least 8 bytes", f"{min(size, len(prefix))} bytes"
        )
    (length,) = struct.unpack_from("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise _corrupt(file, "the header is overlong", f"at most {MAX_HEADER_BYTES} bytes", f"{length} bytes")
    if 8 + length > size:
        raise _corrupt(file, "the file ends inside its header", f"at least {8 + length} bytes", f"{size} bytes")
    if length < 2:
        raise _corrupt(file, "the header is empty", "a JSON object", f"{length} bytes")
    return 8 + int(length)


def parse_header(data: bytes, *, file: str, size: int) -> Header:
    """The header of a safetensors file of `size` bytes; `data` is its first `header_bytes(…)` bytes.

    Refused beyond what the format's reference reader refuses: duplicate keys, unknown keys or dtypes, numbers that are
    not plain integers, more than `MAX_RANK` axes, names with control characters, and any gap or surplus of bytes.

    Raises:
        ReleaseError: CORRUPT_SHARD or LFS_POINTER, naming `file`, what was expected and what was found.
    """
    length = header_bytes(data[:PREFIX_BYTES], file=file, size=size)
    if len(data) != length:
        raise _corrupt(file, "the header could not be read whole", f"{length} bytes", f"{len(data)} bytes")
    if data[8:9] != b"{":
        raise _corrupt(file, "the header is not a JSON object", "'{'", repr(data[8:9]))
    try:
        value = parse_json(data[8:], file=file, limit=MAX_HEADER_BYTES)
    except ReleaseError as error:
        raise _corrupt(file, f"the header is refused: {error.message}", "strict JSON", error.code) from None
    metadata = _metadata(value.pop("__metadata__", {}), file)
    entries = [_entry(name, described, file, length) for name, described in value.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end, entry.name))
    _contiguous(entries, file, length, size)
    return Header(file, size, tuple(entries), metadata)


def _metadata(value: Any, file: str) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise _corrupt(file, "the metadata is not an object of strings", "strings", repr(value)[:80])
    return MappingProxyType(value)


def _name(name: str, file: str) -> None:
    try:
        legal = 0 < len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        legal = False
    if not legal or any(unicodedata.category(char)[0] == "C" for char in name):
        raise _corrupt(file, "a tensor has an illegal name", "printable text", repr(name[:80]))


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_EXTENT


def _entry(name: str, value: Any, file: str, start: int) -> TensorEntry:
    _name(name, file)
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise _corrupt(file, f"tensor {name}: wrong description", "data_offsets, dtype, shape", str(found)[:120])
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _corrupt(file, f"tensor {name}: unknown dtype", ", ".join(BITS), repr(dtype)[:40])
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_natural, shape)):
        raise _corrupt(file, f"tensor {name}: illegal shape", f"at most {MAX_RANK} natural numbers", repr(shape)[:120])
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)) or offsets[0] > offsets[1]:
        raise _corrupt(file, f"tensor {name}: illegal offsets", "two ascending natural numbers", repr(offsets)[:120])
    try:
        needed = span(dtype, shape)
    except ValueError as error:
        raise _corrupt(file, f"tensor {name}: {error}", "whole bytes", f"{dtype} {shape}") from None
    if needed != offsets[1] - offsets[0]:
        raise _corrupt(
            file,
            f"tensor {name}: span mismatch",
            f"{needed} bytes for {dtype} {shape}",
            f"{offsets[1] - offsets[0]} bytes",
        )
    return TensorEntry(name, dtype, tuple(shape), file, start + offsets[0], start + offsets[1])


def _contiguous(entries: Sequence[TensorEntry], file: str, start: int, size: int) -> None:
    position = start
    for entry in entries:
        if entry.begin != position:
            kind = "overlaps the tensor before it" if entry.begin < position else "follows a hole"
            raise _corrupt(
                file,
                f"tensor {entry.name} {kind}",
                f"data offset {position - start}",
                f"data offset {entry.begin - start}",
            )
        position = entry.end
    if position != size:
        kind = "truncated" if position > size else "followed by surplus bytes"
        raise _corrupt(file, f"the tensors are {kind}", f"{position} bytes", f"{size} bytes")


# --- several files ---


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One way in which an index and the headers beside it contradict each other."""

    kind: str
    file: str
    message: str
    expected: str
    actual: str


@dataclass(frozen=True)
class TensorIndex:
    """All tensors of a checkpoint by name, in name order."""

    tensors: Mapping[str, TensorEntry]
    files: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, headers: Iterable[Header], index: bytes | None = None) -> TensorIndex:
        """The index over `headers`; `index` is the raw `model.safetensors.index.json`, None for a single file.

        Raises:
            ReleaseError: CORRUPT_SHARD for the first disagreement: a missing or unlisted shard, a ghost or unlisted
                tensor, a tensor in two shards. Other claims of the index (its total) are the writer's own.
        """
        ordered = sorted(headers, key=lambda header: header.file)
        for problem in disagreements(ordered, None if index is None else weight_map(index)):
            raise _corrupt(problem.file, f"{problem.kind}: {problem.message}", problem.expected, problem.actual)
        entries = sorted((entry for header in ordered for entry in header.tensors), key=lambda entry: entry.name)
        return cls(MappingProxyType({entry.name: entry for entry in entries}), tuple(header.file for header in ordered))

    def __getitem__(self, name: str) -> TensorEntry:
        return self.tensors[name]

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(entry.nbytes for entry in self.tensors.values())


def weight_map(index: bytes, *, file: str = INDEX_FILE) -> Mapping[str, str]:
    """Tensor name → shard of an index document; other keys (metadata) are ignored.

    Raises:
        ReleaseError: CORRUPT_SHARD, also for a shard path that leaves its folder.
    """
    try:
        value = parse_json(index, file=file, limit=MAX_HEADER_BYTES)
    except ReleaseError as error:
        raise _corrupt(file, f"the index is refused: {error.message}", "strict JSON", error.code) from None
    found = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(found, dict) or not all(isinstance(shard, str) for shard in found.values()):
        raise _corrupt(file, "the index has no weight_map", "an object of tensor → shard", type(found).__name__)
    for shard in set(found.values()):
        why = illegal_because(shard)
        if why is not None or "/" in shard:
            raise _corrupt(
                file, f"the index names an illegal shard: {why or 'not beside the index'}", actual=shard[:120]
            )
    return MappingProxyType(found)


def disagreements(headers: Sequence[Header], listed: Mapping[str, str] | None) -> Iterator[Disagreement]:
    """Every contradiction between `headers` and the weight map `listed`, or among the headers when there is no map."""
    home: dict[str, str] = {}
    for header in headers:
        for entry in header.tensors:
            if entry.name in home:
                yield Disagreement(
                    "DUPLICATE_TENSOR", header.file, f"{entry.name} stands in two shards", "one shard",
                    f"{home[entry.name]} and {header.file}",
                )  # fmt: skip
            home.setdefault(entry.name, header.file)
    if listed is not None:
        yield from _against_index({header.file for header in headers}, home, listed)
    elif len(headers) > 1:
        yield Disagreement("MISSING_INDEX", INDEX_FILE, "several shards and no index", INDEX_FILE, "no such file")


def _against_index(present: set[str], home: Mapping[str, str], listed: Mapping[str, str]) -> Iterator[Disagreement]:
    for shard in sorted(set(listed.values()) - present):
        count = sum(1 for name in listed if listed[name] == shard)
        yield Disagreement("MISSING_SHARD", shard, f"the index places {count} tensors there", "a shard", "no such file")
    for shard in sorted(present - set(listed.values())):
        yield Disagreement("UNLISTED_SHARD", shard, "the index does not name it", "a shard of the index", shard)
    for name in sorted(listed.keys() | home.keys()):
        said, found = listed.get(name), home.get(name)
        if said is None:
            yield Disagreement("UNLISTED_TENSOR", str(found), f"{name} is not in the index", "an index entry", "none")
        elif found != said and said in present:
            yield Disagreement(
                "GHOST_TENSOR", said, f"the index places {name} there, its header lacks it", said, found or "nowhere"
            )


# --- what we write ---


def tokenizer_file(path: str) -> bool:
    """Whether the file `path` of a checkpoint belongs to its tokenizer, template or generation."""
    return path in TOKENIZER_FILES


def carried_over(path: str) -> bool:
    """Whether a build copies the file `path` of its source, byte for byte: tokenizer, template, licence texts."""
    return tokenizer_file(path) or _LICENCE.match(path) is not None


@dataclass(frozen=True, slots=True)
class Shard:
    """A file to be written: its name, its header bytes and its tensors in file order."""

    file: str
    header: bytes
    tensors: tuple[TensorSpec, ...]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def encode_header(tensors: Sequence[TensorSpec]) -> bytes:
    """Header bytes of a file that holds `tensors` in this order: compact JSON, one metadata key, padded to 8 bytes."""
    rows = [f'"__metadata__":{json.dumps(dict(METADATA), separators=(",", ":"))}']
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        shape = ",".join(map(str, tensor.shape))
        rows.append(
            f'{_quoted(tensor.name)}:{{"dtype":"{tensor.dtype}","shape":[{shape}],"data_offsets":[{position},{end}]}}'
        )
        position = end
    text = ("{" + ",".join(rows) + "}").encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def shards(tensors: Iterable[TensorSpec], limit: int) -> tuple[Shard, ...]:
    """Cut `tensors`, in the order given, into files of at most `limit` payload bytes (one tensor may exceed it).

    Within a file tensors are sorted by element width, widest first, then by name, so that each is aligned. One file is
    named `model.safetensors`, several `model-00001-of-0000N.safetensors`.
    """
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    total = len(groups)
    made = []
    for number, group in enumerate(groups, 1):
        file = SINGLE_FILE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
        ordered = tuple(sorted(group, key=lambda tensor: (-BITS[tensor.dtype], tensor.name)))
        made.append(Shard(file, encode_header(ordered), ordered))
    return tuple(made)


def encode_index(files: Iterable[Shard]) -> bytes:
    """The `model.safetensors.index.json` of `files`: total payload bytes and the weight map in name order."""
    rows = []
    total = 0
    for shard in files:
        rows += [f"    {_quoted(tensor.name)}: {_quoted(shard.file)}" for tensor in shard.tensors]
        total += sum(tensor.nbytes for tensor in shard.tensors)
    head = f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": {{\n'
    return (head + ",\n".join(sorted(rows)) + "\n  }\n}\n").encode()
