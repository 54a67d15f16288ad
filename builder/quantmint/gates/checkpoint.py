"""Compares a quantized checkpoint with its source and its placement: names, dtypes, shapes, bytes, files.

Pure Python over headers and raw ranges. It reads every byte of both checkpoints, changes none, and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantmint import tiers
from quantmint.checkpoint import INDEX_FILE, METADATA, TensorEntry, TensorIndex, carried_over, tokenizer_file
from quantmint.document import author_value, canonical, parse_json
from quantmint.errors import ReleaseError
from quantmint.evidence import Finding, Scalar
from quantmint.geometry import Geometry, Role
from quantmint.placement import Placement, Rule, Stored
from quantmint.quantize.files import range_digest, read_header, read_index, read_range
from quantmint.stage import Emit

VERSION = 1

PRODUCED = frozenset({"config.json", "hf_quant_config.json", "quantization_recipe.json", INDEX_FILE})
"""Files that the producer writes besides weights; the index stands only beside several shards."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that engines fuse into one matrix with one scalar scale."""
FUSED_SUFFIXES = ("weight_scale_2", "input_scale", "weight_scale")


@dataclass
class _Audit:
    """Findings and their counts while the checkpoint is walked."""

    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            (
                "tensors_missing", "tensors_unexpected", "tensors_wrong_shape", "tensors_changed",
                "fused_scales_unequal", "files_missing", "files_unexpected", "files_changed", "config_changed",
                "metadata_surplus",
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
    _config(config, checkpoint, audit)
    rows = list(_tensors(placement, source, origin, checkpoint, made, audit, emit))
    _fused(placement, checkpoint, made, audit)
    evidence = out / "evidence"
    evidence.mkdir()
    _write(evidence / "tensors.jsonl", rows)
    _write(evidence / "findings.jsonl", (finding.as_json() for finding in audit.findings))
    roles = _roles(placement, made)
    _write(evidence / "roles.jsonl", roles)
    for finding in audit.findings[:20]:
        emit("note", text=f"{finding.code}: {finding.message}")
    return {**audit.counts, **_sizes(placement, made), "tensors_compared": sum(row["copied"] for row in rows)}


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


def _config(config: Any, checkpoint: Path, audit: _Audit) -> None:
    path = checkpoint / "config.json"
    if not path.is_file():
        return
    found = parse_json(path.read_bytes(), file="config.json")
    quantization = found.pop("quantization_config", None) if isinstance(found, dict) else None
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "modelopt":
        audit.found("config_changed", "config.json has no ModelOpt quantization_config", file="config.json")
    if found != config:
        audit.found("config_changed", "config.json changes fields of the source", file="config.json")


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
