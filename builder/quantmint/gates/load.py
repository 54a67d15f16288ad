"""The load gate: a fresh engine loads the package, and what it then holds is compared with the files, tensor by tensor.

Runs in the serve image; the engine runs in a process of its own (`readback`), so that its crash becomes a measurement.
It measures and never judges, and no tensor is ever left out of the account.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from quantmint.checkpoint import PREFIX_BYTES, TensorIndex, header_bytes, parse_header
from quantmint.document import author_value, canonical
from quantmint.errors import ReleaseError
from quantmint.evidence import Scalar
from quantmint.launch import LaunchRecipe
from quantmint.stage import Emit

VERSION = 2
PROMPT = "Hello. Repeat this text exactly:"
SWITCH = "QUANTMINT_OVERLAY_DISABLE"
"""Set from `params["disable"]` only: names of overlay fixes to leave out, to show that this gate notices."""

IN_ONE_PROCESS = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Lets `readback` reach the loaded model, and the engine start without a network."""

_seen: dict[str, Scalar] = {}


def environment() -> dict[str, Scalar]:
    """What the last run found out about engine and kernels: names and versions only."""
    return dict(_seen)


def run(
    params: Mapping[str, Any], inputs: Mapping[str, Path], out: Path, scratch: Path, emit: Emit
) -> Mapping[str, Scalar]:
    """Measure how `inputs["package"]` loads under `params["launch"]`, a LaunchRecipe.

    Optional params: `prompt`, `disable` (names of overlay fixes to leave out), `dtype` (added as --dtype). Writes
    `evidence/parameters.jsonl` (one object per tensor) and `evidence/environment.jsonl` (one object).

    Raises:
        ReleaseError: INVALID_VALUE for the parameters, CORRUPT_SHARD or LFS_POINTER for the package,
            STAGE_OUT_OF_MEMORY when the engine was killed, STAGE_FAILED when it died without a word.
    """
    launch = author_value(LaunchRecipe, params["launch"], file="launch")
    package = inputs["package"]
    index = index_of(package)
    _seen.clear()
    flags = [*launch.engine_flags(), *(("--dtype", str(params["dtype"])) if "dtype" in params else ())]
    record = _engine(
        {"package": str(package), "flags": flags, "prompt": str(params.get("prompt", PROMPT))},
        {**launch.process_environment(), SWITCH: ",".join(params.get("disable", ()))},
        scratch,
        emit,
    )
    error = record.get("error")
    if error is not None:
        rows: list[dict[str, Any]] = [
            {"name": name, "dtype": entry.dtype, "shape": list(entry.shape), "verdict": "absent"}
            for name, entry in index.tensors.items()
        ]
        record["error"] = {"type": error["type"], "message": _placeless(error["message"], package, scratch)}
        emit("note", text=f"the engine did not start: {error['type']}")
    else:
        lines = (scratch / "readback" / "parameters.jsonl").read_bytes().splitlines()
        rows = [json.loads(line) for line in lines]
    measured = measurements(index.tensors, rows, record)
    evidence = out / "evidence"
    evidence.mkdir()
    (evidence / "parameters.jsonl").write_bytes(b"".join(canonical(row) + b"\n" for row in rows))
    told = {key: value for key, value in record.items() if key not in ("load_seconds", "peak_rss_bytes")}
    told["launch"] = launch.as_json()
    (evidence / "environment.jsonl").write_bytes(canonical(told) + b"\n")
    _seen.update(summary(record))
    return measured


def index_of(package: Path) -> TensorIndex:
    """The strict index over every safetensors file at the top of `package`.

    Raises:
        ReleaseError: CORRUPT_SHARD or LFS_POINTER.
    """
    headers = []
    for path in sorted(package.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = header_bytes(stream.read(PREFIX_BYTES), file=path.name, size=size)
            stream.seek(0)
            headers.append(parse_header(stream.read(length), file=path.name, size=size))
    listing = package / "model.safetensors.index.json"
    return TensorIndex.of(headers, listing.read_bytes() if listing.exists() else None)


def measurements(
    names: Collection[str], rows: Iterable[Mapping[str, Any]], record: Mapping[str, Any]
) -> dict[str, Scalar]:
    """The account of the tensors `names` of the package: each counts once.

    It stands in compared (equal or different), quantized or absent when a row says so, else in unaccounted: the number
    of rows proves nothing, and a row about another tensor, or a second one, adds nothing.
    """
    told: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        told.setdefault(str(row["name"]), row)
    table = [told[name] for name in names if name in told]
    verdicts = Counter(str(row["verdict"]) for row in table)
    quantized = [row for row in table if row["verdict"] == "quantized"]
    compared = verdicts["equal"] + verdicts["different"]
    known = compared + verdicts["absent"] + len(quantized)
    answer = record.get("answer", {})
    found: dict[str, Scalar] = {
        "engine_loaded": "error" not in record,
        "tensors_total": len(names),
        "tensors_compared": compared,
        "tensors_different": verdicts["different"],
        "tensors_absent": verdicts["absent"],
        "tensors_unaccounted": len(names) - known,
        "quantized_tensors": len(quantized),
        "quantized_different": sum(not row["dequantized_equal"] for row in quantized),
        "router_biases_compared": sum(
            row["verdict"] in ("equal", "different") and str(row["name"]).endswith(".e_score_correction_bias")
            for row in table
        ),
        "overlay_fixes_disabled": sum(
            state == "disabled"
            for overlay in record.get("overlays", ())
            for state in overlay["applied"].get("fixes", {}).values()
        ),
        "overlays_applied": sum(bool(overlay["applied"]) for overlay in record.get("overlays", ())),
        "logits_finite": bool(answer.get("logits_finite", False)),
    }
    if quantized:
        found["quantized_max_abs_diff"] = max(float(row.get("max_abs_diff", 0.0)) for row in quantized)
    if "error" not in record:
        found["parameters_engine_unmatched"] = len(record["unmatched"])
        found["load_seconds"] = round(float(record["load_seconds"]), 3)
        found["peak_rss_bytes"] = int(record["peak_rss_bytes"])
    return found


def summary(record: Mapping[str, Any]) -> dict[str, Scalar]:
    """Flat names and versions out of the engine's record."""
    found: dict[str, Scalar] = {}
    for overlay in record.get("overlays", ()):
        found[f"overlay.{overlay['distribution']}"] = overlay["version"]
        applied = overlay["applied"]
        if applied:
            found["engine"] = f"{applied['engine']['distribution']} {applied['engine']['version']}"
            found["device"] = applied["device"]
            found["overlay.labels"] = ", ".join(applied["labels"])
            found |= {f"overlay.fix.{name}": state for name, state in applied["fixes"].items()}
    for kind, names in record.get("kernels", {}).items():
        found[f"kernels.{kind}"] = ", ".join(f"{name} in {count} layers" for name, count in names.items())
    for name in ("model_dtype", "kv_cache_dtype", "quantization"):
        if name in record:
            found[name] = record[name]
    return found


def _engine(request: dict[str, Any], variables: Mapping[str, str], scratch: Path, emit: Emit) -> dict[str, Any]:
    """Run `readback` on `request`; its record about the engine."""
    folder = scratch / "readback"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    reading, writing = os.pipe()
    request |= {"out": str(folder), "progress_fd": writing}
    asked = folder / "request.json"
    asked.write_text(json.dumps(request), "utf-8")
    child = subprocess.Popen(  # noqa: S603  our own module, our own arguments
        [sys.executable, "-m", "quantmint.gates.readback", str(asked)],
        stdin=subprocess.DEVNULL,
        pass_fds=(writing,),
        env={
            **os.environ,
            **variables,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        },
    )
    try:
        os.close(writing)
        with os.fdopen(reading, encoding="utf-8") as progress:
            for line in progress:
                emit("progress", unit="tensors", **json.loads(line))
        code = child.wait()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    answer = folder / "engine.json"
    if answer.exists():
        record: dict[str, Any] = json.loads(answer.read_text("utf-8"))
        return record
    if code == -signal.SIGKILL:
        raise ReleaseError("STAGE_OUT_OF_MEMORY", "the engine was killed while it loaded the package")
    raise ReleaseError("STAGE_FAILED", f"the engine's process ended with {code} and no record")


def _placeless(text: str, *places: Path) -> str:
    """`text` without host paths, at most 1,000 characters."""
    for place in (*places, Path.home()):
        text = text.replace(str(place.resolve()), "<…>").replace(str(place), "<…>")
    return text[:1000]
