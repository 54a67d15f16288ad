"""Compares a quantized checkpoint with its source and its placement: names, dtypes, shapes, bytes, files, values.

Pure Python over headers and raw ranges. It reads every byte of both checkpoints, changes none, and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from quantmint import tiers
from quantmint.checkpoint import (
    INDEX_FILE,
    METADATA,
    Shard,
    TensorEntry,
    TensorIndex,
    TensorSpec,
    carried_over,
    encode_index,
    tokenizer_file,
)
from quantmint.document import author_value, canonical, parse_json
from quantmint.errors import ReleaseError
from quantmint.evidence import Finding, Scalar
from quantmint.geometry import Geometry, Role
from quantmint.placement import Placement, Rule, Stored
from quantmint.quantize import decode, described
from quantmint.quantize.files import range_digest, read_header, read_index, read_range
from quantmint.stage import Emit
from quantmint.tiers import Precision

VERSION = 2

PRODUCED = frozenset({described.CONFIG, described.DESCRIBED, described.RECIPE, INDEX_FILE})
"""Files that the producer writes besides weights; the index stands only beside several shards."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that engines fuse into one matrix with one scalar scale."""
FUSED_SUFFIXES = ("weight_scale_2", "input_scale", "weight_scale")
WEIGHTS_DECODED = 2**23
"""How many weights are decoded to measure errors; a larger model is sampled, evenly, at least a row a matrix."""


@dataclass
class _Audit:
    """Findings and their counts while the checkpoint is walked."""

    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            (
                "tensors_missing", "tensors_unexpected", "tensors_wrong_shape", "tensors_changed",
                "fused_scales_unequal", "files_missing", "files_unexpected", "files_changed", "config_changed",
                "metadata_surplus", "documents_wrong",
            ), 0,
        )
    )  # fmt: skip

    def found(self, count: str, message: str, **where: str | None) -> None:
        """Note one finding under the measurement `count`."""
        self.counts[count] += 1
        self.findings.append(Finding(code=count.upper(), message=message, **where))


def run(
    params: Mapping[str, Any], inputs: Mapping[str, Path], out: Path, scratch: Path, emit: Emit
) -> Mapping[str, Scalar]:
    """Audit the input `checkpoint` against `source` (and `tokenizer`); see `plan` for `params`."""
    del scratch
    source, checkpoint = inputs["source"], inputs["checkpoint"]
    config = parse_json((source / "config.json").read_bytes(), file="config.json")
    placement = planned(params, config)
    audit = _Audit()
    origin, made = read_index(source), read_index(checkpoint)
    _metadata(checkpoint, made, audit)
    _files(source, inputs.get("tokenizer", source), checkpoint, made, audit)
    _index(made, checkpoint, audit)
    _documents(params, placement, config, checkpoint, audit)
    rows = list(_tensors(placement, source, origin, checkpoint, made, audit, emit))
    _fused(placement, checkpoint, made, audit)
    errors = list(_errors(placement, source, origin, checkpoint, made, emit))
    evidence = out / "evidence"
    evidence.mkdir()
    _write(evidence / "tensors.jsonl", rows)
    _write(evidence / "errors.jsonl", errors)
    _write(evidence / "findings.jsonl", (finding.as_json() for finding in audit.findings))
    roles = _roles(placement, made)
    _write(evidence / "roles.jsonl", roles)
    for finding in audit.findings[:20]:
        emit("note", text=f"{finding.code}: {finding.message}")
    return {
        **audit.counts,
        **_sizes(placement, made),
        "tensors_compared": sum(row["copied"] for row in rows),
        "quantized_compared": len(errors),
        "quantized_error_max": max((row["relative_error"] for row in errors), default=0.0),
    }


def planned(params: Mapping[str, Any], config: Any) -> Placement:
    """The placement of `params`, on the geometry that was planned.

    Raises:
        ReleaseError: CHECKPOINT_MISMATCH when the source's configuration is of another geometry.
    """
    geometry = Geometry.of(config)
    if geometry.model_dump(mode="json") != params["geometry"]:
        raise ReleaseError("CHECKPOINT_MISMATCH", "the source is another model than was planned", file="config.json")
    rules = [author_value(Rule, rule, file="job.json") for rule in params["placement"]]
    return Placement.of(rules, geometry, kv_scales=params["kv_cache_scales"])


def _metadata(checkpoint: Path, made: TensorIndex, audit: _Audit) -> None:
    for file in made.files:
        keys = dict(read_header(checkpoint / file).metadata)
        if keys != dict(METADATA):
            audit.found(
                "metadata_surplus",
                "unexpected metadata",
                file=file,
                expected=str(dict(METADATA)),
                actual=str(keys)[:200],
            )


def _files(source: Path, tokenizer: Path, checkpoint: Path, made: TensorIndex, audit: _Audit) -> None:
    """Nothing but weights, what the producer writes, and what is carried over unchanged."""
    carried = {path.name: path for path in source.iterdir() if carried_over(path.name) and path.is_file()}
    if tokenizer != source:
        carried = {name: path for name, path in carried.items() if not tokenizer_file(name)}
        carried |= {path.name: path for path in tokenizer.iterdir() if tokenizer_file(path.name) and path.is_file()}
    present = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if not path.is_dir()}
    required = {*made.files, *carried, *PRODUCED} - ({INDEX_FILE} if len(made.files) == 1 else set())
    for name in sorted(required - present.keys()):
        audit.found("files_missing", f"{name} is missing", file=name)
    for name in sorted(present.keys() - required):
        audit.found("files_unexpected", f"{name} does not belong to the checkpoint", file=name)
    for name in sorted(carried.keys() & present.keys()):
        if carried[name].read_bytes() != present[name].read_bytes():
            audit.found("files_changed", f"{name} differs from the source's", file=name)


def _index(made: TensorIndex, checkpoint: Path, audit: _Audit) -> None:
    """The index must be the one of the files as they are, byte for byte: its total and its order are claims too."""
    if len(made.files) < 2:
        return
    tensors: dict[str, list[TensorSpec]] = {file: [] for file in made.files}
    for entry in made.tensors.values():
        tensors[entry.file].append(TensorSpec(entry.name, entry.dtype, entry.shape))
    wanted = encode_index(Shard(file, b"", tuple(specs)) for file, specs in tensors.items())
    found = (checkpoint / INDEX_FILE).read_bytes()
    if found != wanted:
        audit.found(
            "documents_wrong",
            "the index is not that of the files beside it",
            file=INDEX_FILE,
            expected=f"sha256:{sha256(wanted).hexdigest()}, total {made.nbytes}",
            actual=f"sha256:{sha256(found).hexdigest()}",
        )


def _documents(params: Mapping[str, Any], placement: Placement, config: Any, checkpoint: Path, audit: _Audit) -> None:
    """What is said about the weights: strict JSON, and what the placement makes of them."""
    documents: dict[str, Any] = {}
    for name in (described.CONFIG, described.DESCRIBED, described.RECIPE):
        path = checkpoint / name
        try:
            if path.is_file():
                documents[name] = parse_json(path.read_bytes(), file=name)
        except ReleaseError as error:
            audit.found("documents_wrong", error.message, file=name, expected="strict JSON", actual=error.code)
    if described.CONFIG in documents:
        found = documents[described.CONFIG]
        told = found.pop("quantization_config", None) if isinstance(found, dict) else None
        documents[described.CONFIG] = told
        if not described.alike(found, config):
            audit.found("config_changed", "config.json changes fields of the source", file=described.CONFIG)
    for file, what, wanted, actual in described.disagreements(documents, placement, params):
        audit.found(
            "documents_wrong", f"{what} disagrees with the placement", file=file, expected=wanted, actual=actual
        )


def _tensors(
    placement: Placement,
    source: Path,
    origin: TensorIndex,
    checkpoint: Path,
    made: TensorIndex,
    audit: _Audit,
    emit: Emit,
) -> Iterator[dict[str, Any]]:
    """Evidence rows of all tensors, in model order; unexpected ones last."""
    stored = placement.stored()
    expected = {entry.spec.name: entry for entry in stored}
    modelled = {tensor.name for tensor in placement.geometry.tensors}
    for name in sorted(origin.tensors.keys() - modelled):
        audit.found("tensors_missing", f"the source's {name} is not part of the planned model", file=origin[name].file)
    for number, entry in enumerate(stored):
        if number % 1000 == 0:
            emit("progress", done=number, total=len(stored), unit="tensors")
        found = made.tensors.get(entry.spec.name)
        if found is None:
            audit.found(
                "tensors_missing",
                f"{entry.spec.name} is missing",
                expected=f"{entry.spec.dtype} {list(entry.spec.shape)}",
            )
            continue
        if (found.dtype, found.shape) != (entry.spec.dtype, entry.spec.shape):
            audit.found(
                "tensors_wrong_shape", f"{entry.spec.name} has another form", file=found.file,
                expected=f"{entry.spec.dtype} {list(entry.spec.shape)}", actual=f"{found.dtype} {list(found.shape)}",
            )  # fmt: skip
        digest = range_digest(checkpoint, found)
        if entry.copied:
            _unchanged(entry, source, origin, found, digest, audit)
        yield _row(found, digest, entry)
    for name in sorted(made.tensors.keys() - expected.keys()):
        found = made[name]
        audit.found(
            "tensors_unexpected",
            f"{name} was not planned",
            file=found.file,
            actual=f"{found.dtype} {list(found.shape)}",
        )
        yield _row(found, range_digest(checkpoint, found), None)
    emit("progress", done=len(stored), total=len(stored), unit="tensors")


def _unchanged(
    entry: Stored, source: Path, origin: TensorIndex, found: TensorEntry, digest: str, audit: _Audit
) -> None:
    name = entry.spec.name
    if name not in origin.tensors:
        audit.found("tensors_changed", f"{name} has no counterpart in the source", file=found.file)
        return
    before = origin[name]
    wanted = range_digest(source, before)
    if (before.dtype, before.shape, wanted) != (found.dtype, found.shape, digest):
        audit.found(
            "tensors_changed", f"{name} is not the source's", file=found.file,
            expected=f"{before.dtype} {wanted}", actual=f"{found.dtype} {digest}",
        )  # fmt: skip


def _row(found: TensorEntry, digest: str, entry: Stored | None) -> dict[str, Any]:
    role = entry.source.role.value if entry is not None and entry.source is not None else "kv-cache-scale"
    return {
        "name": found.name,
        "file": found.file,
        "dtype": found.dtype,
        "shape": list(found.shape),
        "bytes": found.nbytes,
        "digest": digest,
        "role": role if entry is not None else "unexpected",
        "precision": entry.precision.value if entry is not None else "unexpected",
        "copied": entry is not None and entry.copied,
    }


def _fused(placement: Placement, checkpoint: Path, made: TensorIndex, audit: _Audit) -> None:
    """Engines fuse q, k, v and gate, up, and keep one scalar scale for each: those of one group must be equal."""
    for entry in placement.stored():
        name = entry.spec.name
        leader = next((names for names in FUSED if f".{names[0]}." in name), None)
        if leader is None or entry.spec.shape != () or not name.endswith(FUSED_SUFFIXES):
            continue
        group = [name.replace(f".{leader[0]}.", f".{other}.") for other in leader]
        values = {each: b"".join(read_range(checkpoint, made[each])) for each in group if each in made.tensors}
        if len(set(values.values())) > 1:
            audit.found(
                "fused_scales_unequal", f"{name} and its partners differ", file=made[next(iter(values))].file,
                expected="one value", actual=", ".join(value.hex() for value in values.values()),
            )  # fmt: skip


def _errors(
    placement: Placement, source: Path, origin: TensorIndex, checkpoint: Path, made: TensorIndex, emit: Emit
) -> Iterator[dict[str, Any]]:
    """Relative error of each quantized matrix against the source's; one that cannot be decoded has no row.

    When there are more than `WEIGHTS_DECODED` weights, rows are taken at even distances; the digest of the matrix's
    name says where they begin.
    """
    matrices = [tensor for tensor in placement.geometry.tensors if placement.precision(tensor) is not Precision.BF16]
    total = tiers.weights_in([tensor.spec for tensor in matrices])
    for number, tensor in enumerate(matrices):
        if number % 64 == 0:
            emit("progress", done=number, total=len(matrices), unit="matrices")
        precision = placement.precision(tensor)
        parts = tiers.modelopt(tensor.spec, precision)
        before = origin.tensors.get(tensor.name)
        found = [made.tensors.get(part.name) for part in parts]
        if before is None or (before.dtype, before.shape) != (tensor.dtype, tensor.shape):
            continue
        held = [
            entry
            for entry, part in zip(found, parts, strict=True)
            if entry is not None and (entry.dtype, entry.shape) == (part.dtype, part.shape)
        ]
        if len(held) < len(parts):
            continue
        count = tensor.shape[0]
        taken = count if total <= WEIGHTS_DECODED else max(1, count * WEIGHTS_DECODED // total)
        step = count // taken
        begin = int(sha256(tensor.name.encode()).hexdigest(), 16) % step
        rows = range(begin, begin + step * taken, step)
        weights = decode.bf16(_rows(source, before, rows))
        codes = _rows(checkpoint, held[0], rows)
        if precision is Precision.NVFP4_W4A16:
            scales, scale = _rows(checkpoint, held[1], rows), _scalar(checkpoint, held[2])
            error = decode.nvfp4_error(weights, codes, scales, scale)
        else:
            error = decode.fp8_error(weights, codes, _scalar(checkpoint, held[1]))
        yield {"name": tensor.name, "rows": count, "rows_compared": len(rows), "relative_error": error}
    emit("progress", done=len(matrices), total=len(matrices), unit="matrices")


def _rows(folder: Path, entry: TensorEntry, rows: range) -> bytes:
    """The bytes of some rows of a matrix."""
    if len(rows) == entry.shape[0]:
        return b"".join(read_range(folder, entry))
    width = entry.nbytes // entry.shape[0]
    begins = (entry.begin + row * width for row in rows)
    return b"".join(
        chunk for begin in begins for chunk in read_range(folder, replace(entry, begin=begin, end=begin + width))
    )


def _scalar(folder: Path, entry: TensorEntry) -> float:
    return decode.f32(b"".join(read_range(folder, entry)))


def _roles(placement: Placement, made: TensorIndex) -> list[dict[str, Any]]:
    """Tensors and bytes of each role and precision, as found."""
    sums: dict[tuple[str, str], list[int]] = {}
    for entry in placement.stored():
        if entry.spec.name in made.tensors:
            role = entry.source.role.value if entry.source is not None else "kv-cache-scale"
            total = sums.setdefault((role, entry.precision.value), [0, 0])
            total[0] += 1
            total[1] += made[entry.spec.name].nbytes
    return [
        {"role": role, "precision": precision, "tensors": count, "bytes": size}
        for (role, precision), (count, size) in sorted(sums.items())
    ]


def _sizes(placement: Placement, made: TensorIndex) -> dict[str, Scalar]:
    """Bytes found and expected; bits per weight of the routed experts, as found."""
    stored = placement.stored()
    experts = [tensor.spec for tensor in placement.geometry.tensors if tensor.role is Role.ROUTED_EXPERTS]
    found = sum(
        made[entry.spec.name].nbytes
        for entry in stored
        if entry.source is not None and entry.source.role is Role.ROUTED_EXPERTS and entry.spec.name in made.tensors
    )
    return {
        "tensors": len(made),
        "expected_tensors": len(stored),
        "total_bytes": made.nbytes,
        "expected_bytes": sum(entry.spec.nbytes for entry in stored),
        "effective_bits": tiers.bits_per_weight(found, tiers.weights_in(experts)),
    }


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("wb") as stream:
        for row in rows:
            stream.write(canonical(row) + b"\n")
