"""A fresh engine loads a package and tells what it holds; runs as a process of its own inside the serve image.

`python -m quantmint.gates.readback REQUEST.json` writes one record per tensor of the package and one about the engine.
It compares bytes and judges nothing; a tensor that cannot be read back is said to be unaccounted, never skipped.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import re
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from quantmint.document import canonical
from quantmint.gates.load import index_of

GROUP = 16
"""NVFP4: elements along the input axis that share one block scale."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float64)
"""Value of each 4-bit code."""
EXPERT = re.compile(r"^(?P<block>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>gate|up|down)_proj\.weight$")
SCALES = ("weight_scale", "weight_scale_2")
IDENTITY_ROWS = 1024
SMALLEST_NORMAL = 2.0**-126
"""Below this magnitude a matrix unit may flush BF16 and float32 numbers to zero."""

Row = dict[str, Any]


class Package:
    """The tensors of a package, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self.index = index_of(folder)
        self._files = {name: safe_open(folder / name, framework="pt") for name in self.index.files}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self.index[name].file].get_tensor(name)
        return tensor

    def __contains__(self, name: str) -> bool:
        return name in self.index.tensors


def raw(tensor: torch.Tensor) -> bytes:
    """Row-major little-endian bytes of `tensor`."""
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def sha256(tensor: torch.Tensor) -> str:
    """Digest of `raw(tensor)`."""
    return "sha256:" + hashlib.sha256(raw(tensor)).hexdigest()


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest |one - other| in float64; the largest float32 when it is not a finite number."""
    if one.numel() == 0 or raw(one) == raw(other):
        return 0.0
    found = float((one.to(torch.float64) - other.to(torch.float64)).abs().max())
    return found if math.isfinite(found) else float(torch.finfo(torch.float32).max)


def to_bfloat16(values: np.ndarray) -> torch.Tensor:
    """float64 → BF16, rounded once to nearest even; `values` are zero or in the normal range of BF16."""
    bits = values.view(np.uint64)
    kept = np.uint64(45)
    one = np.uint64(1)
    rounded = (bits + ((one << np.uint64(44)) - one) + ((bits >> kept) & one)) >> kept << kept
    return torch.from_numpy(rounded.view(np.float64).astype(np.float32)).to(torch.bfloat16)


def dequantized(package: Package, stem: str, dtype: torch.dtype) -> torch.Tensor:
    """`stem`.weight of ModelOpt's NVFP4 as `dtype` [N, K]: e2m1 by block scale by global scale, rounded once.

    Raises:
        ValueError: `dtype` is neither BF16 nor float32.
    """
    codes = package[f"{stem}.weight"].numpy()
    blocks = package[f"{stem}.weight_scale"].to(torch.float32).numpy().astype(np.float64)
    scale = float(package[f"{stem}.weight_scale_2"].reshape(()))
    values = np.empty((codes.shape[0], 2 * codes.shape[1]), dtype=np.float64)
    values[:, 0::2] = E2M1[codes & 15]
    values[:, 1::2] = E2M1[codes >> 4]
    values *= np.repeat(blocks * scale, GROUP, axis=1)
    if dtype == torch.bfloat16:
        return to_bfloat16(values)
    if dtype == torch.float32:
        return torch.from_numpy(values.astype(np.float32))
    raise ValueError(f"no reference dequantization to {dtype}")


@dataclass(frozen=True)
class Held:
    """What the engine holds for a tensor of the package: where, by which route it was read, and the values."""

    parameter: str
    part: str
    route: str
    values: torch.Tensor


@dataclass
class Engine:
    """The loaded model and what was read of it so far."""

    model: torch.nn.Module
    dtype: torch.dtype
    modules: dict[str, torch.nn.Module] = field(init=False)
    parameters: dict[str, torch.Tensor] = field(init=False)
    read: Counter[str] = field(default_factory=Counter)
    dense: dict[str, torch.Tensor] = field(default_factory=dict)
    orders: dict[tuple[int, int, str], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))

    def packed(self, name: str, package: Package) -> tuple[str, list[str]] | None:
        """Engine parameter that fuses the tensor `name` with others, and the names of all parts in row order."""
        stem, _, leaf = name.rpartition(".")
        parent, _, last = stem.rpartition(".")
        for fused, parts in getattr(self.model, "packed_modules_mapping", {}).items():
            if last in parts and f"{parent}.{fused}" in self.modules:
                names = [f"{parent}.{part}.{leaf}" for part in parts]
                return f"{parent}.{fused}.{leaf}", [part for part in names if part in package]
        return None

    def find(self, name: str, package: Package) -> Held | None:
        """What the engine holds for the package's tensor `name`, or None when it holds nothing."""
        expert = EXPERT.match(name)
        if expert is not None:
            return self._expert(name, expert["block"], int(expert["expert"]), expert["projection"], package)
        if name.endswith(".experts.e_score_correction_bias"):
            return self._bias(name)
        fused = None if name in self.parameters else self.packed(name, package)
        target = name if fused is None else fused[0]
        if target not in self.parameters:
            return None
        width = int(package.index[name].shape[-1]) if package.index[name].shape else 1
        if package.index[name].dtype == "U8":
            width *= 2
        values, route = self._whole(target, width)
        start, rows = 0, int(package.index[name].shape[0]) if package.index[name].shape else 1
        if fused is not None:
            before = fused[1][: fused[1].index(name)]
            start = sum(int(package.index[part].shape[0]) for part in before)
        part = values[start : start + rows] if values.ndim else values
        self.read[target] += part.numel()
        return Held(target, f"rows {start}:{start + rows}", route, part)

    def _whole(self, target: str, width: int) -> tuple[torch.Tensor, str]:
        """All values of the parameter `target`; through the layer's own multiplication when the engine repacked it."""
        parameter = self.parameters[target]
        if parameter.numel():
            self.dense[target] = parameter.detach()
            return parameter.detach(), "parameter"
        if target not in self.dense:
            module = self.modules[target.rpartition(".")[0]]
            identity = torch.eye(width, dtype=self.dtype)
            columns = [
                module.quant_method.apply(module, identity[row : row + IDENTITY_ROWS])
                for row in range(0, width, IDENTITY_ROWS)
            ]
            self.dense[target] = torch.cat(columns).t().contiguous()
        return self.dense[target], "multiplication by the identity"

    def _bias(self, name: str) -> Held | None:
        block = name.removesuffix(".e_score_correction_bias")
        targets = (f"{block}.routed_experts.e_score_correction_bias", name)
        target = next((one for one in targets if one in self.parameters), None)
        if target is None:
            return None
        values = self.parameters[target].detach()
        self.dense[target] = values
        self.read[target] += values.numel()
        router = getattr(self.modules.get(block), "router", None)
        used = getattr(router, "e_score_correction_bias", None)
        if used is None:
            return Held(target, "all", "parameter", values)
        return Held(target, "all", "parameter, as the router holds it", used.detach())

    def _expert(self, name: str, block: str, expert: int, projection: str, package: Package) -> Held | None:
        layer = self.modules.get(f"{block}.routed_experts") or self.modules.get(block)
        leaf = "w2_weight" if projection == "down" else "w13_weight"
        weight = getattr(layer, leaf, None)
        if layer is None or weight is None or weight.ndim != 3 or expert >= weight.shape[0]:
            return None
        prefix = next(key for key, module in self.modules.items() if module is layer)
        target = f"{prefix}.{leaf}"
        order, route = self._order(layer, weight)
        if order is None:
            return None
        held = weight.detach()[expert].reshape(-1)
        values = torch.empty_like(held).scatter_(0, order, held).view(weight.shape[1], weight.shape[2])
        shape = package.index[name].shape
        rows, columns = int(shape[0]), int(shape[1]) * (2 if package.index[name].dtype == "U8" else 1)
        half = values.shape[0] // 2
        start = half if projection == "up" else 0
        end = values.shape[0] if projection != "gate" else half
        part = values[start:end]
        if part[rows:].any() or part[:, columns:].any():
            return Held(target, f"expert {expert} {projection}", f"{route}, padding not zero", part)
        self.dense[target] = weight
        self.read[target] += part.numel()
        return Held(target, f"expert {expert} {projection}", route, part[:rows, :columns].contiguous())

    def _order(self, layer: torch.nn.Module, weight: torch.Tensor) -> tuple[torch.Tensor | None, str]:
        """Position in [N, K] of each stored element, found by packing the positions with the engine's own packer."""
        kernel = getattr(getattr(getattr(layer, "quant_method", None), "moe_kernel", None), "fused_experts", None)
        if not type(kernel).__name__.endswith("CPUUnquantizedExperts") or getattr(kernel, "_use_zentorch", True):
            return None, ""
        isa = str(getattr(kernel, "isa", None))
        rows, columns = int(weight.shape[1]), int(weight.shape[2])
        key = (rows, columns, isa)
        if key not in self.orders:
            from vllm._custom_ops import cpu_prepack_moe_weight

            place = torch.arange(rows * columns)
            order = torch.zeros(rows * columns, dtype=torch.int64)
            for digit in range(4):
                plane = ((place >> (8 * digit)) & 255).to(weight.dtype).view(1, rows, columns)
                order += cpu_prepack_moe_weight(plane, isa).reshape(-1).to(torch.int64) << (8 * digit)
            if not torch.equal(order.sort().values, place):
                return None, ""
            self.orders[key] = order
        return self.orders[key], f"unpacked ({isa})"

    def unmatched(self) -> list[str]:
        """Parameters of which some element belongs to no tensor of the package; zero padding is not counted."""
        odd = []
        for name, parameter in self.parameters.items():
            if name in self.read:
                whole = self.dense[name]
                missing = whole.numel() - self.read[name]
                if missing and not self._padded(name, whole):
                    odd.append(name)
            elif not any(parameter is self.parameters[other] for other in self.read):
                odd.append(name)
        return odd

    def _padded(self, name: str, whole: torch.Tensor) -> bool:
        module = self.modules[name.rpartition(".")[0]]
        rows = getattr(module, "org_vocab_size", None)
        return rows is not None and whole.ndim == 2 and not whole[rows:].any()


def quantized_stem(name: str, package: Package) -> str | None:
    """The projection that `name` belongs to, when its weight is stored as NVFP4."""
    stem, _, leaf = name.rpartition(".")
    members = [f"{stem}.{scale}" in package for scale in SCALES]
    if leaf in ("weight", *SCALES) and all(members) and package.index[f"{stem}.weight"].dtype == "U8":
        return stem
    return None


def exact(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """`tensor` as `dtype`, or None when a value changes."""
    cast = tensor.to(dtype)
    return cast if raw(cast.to(tensor.dtype)) == raw(tensor) else None


def flushed(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with what a multiplication by one may lose (subnormal numbers, the sign of zero) as plain zero."""
    return torch.where(tensor.abs() < SMALLEST_NORMAL, torch.zeros_like(tensor), tensor)


def compared(expected: torch.Tensor, held: Held) -> Row:
    """The verdict fields of one comparison; `expected` is already of the engine's dtype."""
    row: Row = {
        "engine_parameter": held.parameter,
        "engine_part": held.part,
        "engine_dtype": str(held.values.dtype).removeprefix("torch."),
        "engine_sha256": sha256(held.values),
        "route": held.route,
    }
    if held.values.shape != expected.shape:
        return {**row, "verdict": "different", "reason": f"engine shape {list(held.values.shape)}"}
    values = held.values.cpu()
    if "identity" in held.route:
        lost = int((raw_int(expected) != raw_int(flushed(expected))).sum())
        expected, values = flushed(expected), flushed(values)
        row["flushed_elements"] = lost
    difference = largest_difference(expected, values)
    same = raw(expected) == raw(values)
    return {**row, "verdict": "equal" if same else "different", "max_abs_diff": difference}


def raw_int(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes, one row an element."""
    return tensor.contiguous().view(torch.uint8).view(tensor.numel(), -1)


def records(engine: Engine, package: Package) -> Iterator[Row]:
    """One record per tensor of the package, in name order."""
    joint: dict[str, Row] = {}
    for name, entry in package.index.tensors.items():
        tensor = package[name]
        row: Row = {"name": name, "dtype": entry.dtype, "shape": list(entry.shape), "sha256": sha256(tensor)}
        stem = quantized_stem(name, package)
        if stem is not None:
            if stem not in joint:
                joint[stem] = _quantized(engine, package, stem)
            yield {**row, **joint[stem]}
            continue
        held = engine.find(name, package)
        if held is None:
            yield {**row, "verdict": "absent"}
            continue
        expected = exact(tensor, held.values.dtype)
        if expected is None:
            yield {
                **row,
                "engine_parameter": held.parameter,
                "verdict": "different",
                "reason": "narrower in the engine",
            }
            continue
        yield {**row, **compared(expected, held)}


def _quantized(engine: Engine, package: Package, stem: str) -> Row:
    held = engine.find(f"{stem}.weight", package)
    if held is None:
        return {"verdict": "absent", "projection": stem}
    if not held.values.is_floating_point() or held.values.dtype not in (torch.bfloat16, torch.float32):
        return {"verdict": "unaccounted", "projection": stem, "engine_parameter": held.parameter}
    row = compared(dequantized(package, stem, held.values.dtype), held)
    same = row.pop("verdict") == "equal"
    return {**row, "projection": stem, "verdict": "quantized", "dequantized_equal": same}


def overlays() -> list[Row]:
    """What each Quantmint overlay in this process says it did; an overlay that did nothing says so."""
    found = []
    for entry in importlib.metadata.entry_points(group="vllm.general_plugins"):
        if entry.dist is not None and entry.dist.name.startswith("quantmint-overlay-"):
            module = sys.modules.get(entry.module)
            found.append(
                {
                    "distribution": entry.dist.name,
                    "version": entry.dist.version,
                    "applied": module.applied() if module is not None else {},
                }
            )
    return sorted(found, key=lambda row: str(row["distribution"]))


def kernels(model: torch.nn.Module) -> Row:
    """Names of the attention and expert kernels in use, each with the number of layers that use it."""
    attention: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    for module in model.modules():
        backend = getattr(module, "attn_backend", None)
        if backend is not None and hasattr(backend, "get_name"):
            attention[str(backend.get_name())] += 1
        method = getattr(module, "quant_method", None)
        kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if kernel is not None:
            label = getattr(method, "quantmint_label", None)
            experts[type(kernel).__name__ + (f" ({label})" if label else "")] += 1
    return {"attention": dict(sorted(attention.items())), "experts": dict(sorted(experts.items()))}


def answer(llm: LLM, prompt: str) -> Row:
    """Greedy continuation of `prompt` by eight tokens, and whether every logit on the way was finite."""
    finite: list[bool] = []

    def watch(model: torch.nn.Module) -> None:
        stock = model.compute_logits

        def compute(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits: torch.Tensor | None = stock(*args, **kwargs)
            if logits is not None:
                finite.append(bool(torch.isfinite(logits).all()))
            return logits

        model.compute_logits = compute

    llm.apply_model(watch)
    output = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), use_tqdm=False)[0]
    return {
        "prompt": prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "token_ids": list(output.outputs[0].token_ids),
        "text": output.outputs[0].text,
        "logits_seen": len(finite),
        "logits_finite": bool(finite) and all(finite),
    }


def load(package: str, flags: list[str]) -> tuple[LLM, float]:
    """A fresh engine in this process with the arguments that a server would get, and the seconds it took."""
    started = time.monotonic()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", package, *flags])
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(arguments))
    return llm, time.monotonic() - started


def examine(request: Mapping[str, Any], out: Path, tell: Any) -> Row:
    """Load, read back into `out`/parameters.jsonl, answer once; the record about the engine."""
    package = Package(Path(request["package"]))
    tell(done=0, total=len(package.index))
    llm, seconds = load(request["package"], list(request["flags"]))
    record: Row = {"overlays": overlays(), "load_seconds": seconds}

    def inside(model: torch.nn.Module) -> Row:
        engine = Engine(model, llm.model_config.dtype)
        with torch.inference_mode(), (out / "parameters.jsonl").open("wb") as stream:
            for done, row in enumerate(records(engine, package), 1):
                stream.write(canonical(row) + b"\n")
                if done % 64 == 0 or done == len(package.index):
                    tell(done=done, total=len(package.index))
        return {"unmatched": engine.unmatched(), "engine_parameters": len(engine.parameters), "kernels": kernels(model)}

    record |= llm.apply_model(inside)[0]
    record |= {
        "answer": answer(llm, request["prompt"]),
        "model_dtype": str(llm.model_config.dtype).removeprefix("torch."),
    }
    config = llm.llm_engine.vllm_config
    record |= {
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "quantization": str(llm.model_config.quantization),
    }
    record["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return record


def main(argv: list[str]) -> int:
    """Serve the request file named in `argv`; 0 when a record was written, even if it tells of an error."""
    request = json.loads(Path(argv[0]).read_text("utf-8"))
    out = Path(request["out"])
    os.set_inheritable(request["progress_fd"], False)  # the engine's children must not hold it open
    with os.fdopen(request["progress_fd"], "w", buffering=1) as progress:

        def tell(**fields: int) -> None:
            progress.write(json.dumps(fields) + "\n")

        try:
            record = examine(request, out, tell)
        except (Exception, SystemExit) as error:  # noqa: BLE001  what stops the engine is what this gate reports
            traceback.print_exc()
            record = {"error": {"type": type(error).__name__, "message": str(error)}, "overlays": overlays()}
    draft = out / "engine.draft.json"
    draft.write_text(json.dumps(record), "utf-8")
    draft.rename(out / "engine.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
