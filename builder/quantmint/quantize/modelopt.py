"""Quantizes a BF16 checkpoint with NVIDIA ModelOpt, by a placement, into the published per-expert layout.

ModelOpt computes the quantized tensors and nothing else: its exporter casts the F32 router bias to BF16 and re-saves
configuration and generation config with version stamps, so every tensor and file that is not quantized is taken from
the source, byte for byte. The same inputs give the same bytes; nothing here reaches a network.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantmint.checkpoint import (
    INDEX_FILE,
    TensorIndex,
    TensorSpec,
    carried_over,
    encode_index,
    shards,
    tokenizer_file,
)
from quantmint.document import author_value, parse_json
from quantmint.errors import ReleaseError
from quantmint.evidence import Scalar
from quantmint.geometry import Geometry, Role
from quantmint.placement import Placement, Rule, Stored
from quantmint.quantize.files import read_index, read_range, write_shard
from quantmint.stage import Emit
from quantmint.tiers import NVFP4_GROUP, Precision

VERSION = 1

WEIGHTS: Mapping[Role, str] = {
    Role.ROUTED_EXPERTS: "model.layers.{layer}.mlp.experts.",
    Role.SHARED_EXPERT: "model.layers.{layer}.mlp.shared_experts.",
    Role.ATTENTION: "model.layers.{layer}.self_attn.",
    Role.DENSE_MLP: "model.layers.{layer}.mlp.",
}
"""Where a role's modules stand in the model that transformers builds (not in the published checkpoint)."""

E4M3 = {"num_bits": (4, 3), "axis": None}
E2M1 = {"num_bits": (2, 1), "block_sizes": {-1: NVFP4_GROUP, "type": "static", "scale_bits": (4, 3)}}
ALGORITHMS: Mapping[str, Any] = {"max": "max", "mse-fp8-sweep": {"method": "mse", "fp8_scale_sweep": True}}
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that engines fuse into one matrix with one scalar weight scale."""
RECIPE_FILE = "quantization_recipe.json"


def run(
    params: Mapping[str, Any], inputs: Mapping[str, Path], out: Path, scratch: Path, emit: Emit
) -> Mapping[str, Scalar]:
    """Write the output `checkpoint` from the input `source` (and `tokenizer`, `prompts`); see `plan` for `params`."""
    source = inputs["source"]
    config = parse_json((source / "config.json").read_bytes(), file="config.json")
    placement = planned_placement(params, config)
    index = read_index(source)
    exported = scratch / "export"
    shutil.rmtree(exported, ignore_errors=True)
    emit("progress", done=0, total=4, unit="steps")
    torch.manual_seed(params["seed"])
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", local_files_only=True, device_map="auto" if torch.cuda.is_available() else None
    ).eval()
    emit("progress", done=1, total=4, unit="steps")
    quantized = mtq.quantize(model, quant_cfg(placement, params["algorithm"]), forward_loop=_forward(params, inputs))
    unify_fused_scales(quantized, placement)
    emit("progress", done=2, total=4, unit="steps")
    export_hf_checkpoint(quantized, export_dir=exported)
    emit("progress", done=3, total=4, unit="steps")
    target = out / "checkpoint"
    target.mkdir()
    measured = _write_weights(placement, source, index, exported, target, params["shard_bytes"])
    _write_documents(params, placement, config, exported, target)
    _carry_over(source, inputs.get("tokenizer", source), target)
    shutil.rmtree(exported)
    emit("progress", done=4, total=4, unit="steps")
    return measured


def environment() -> Mapping[str, Scalar]:
    """Versions and device that decided the bytes."""
    found: dict[str, Scalar] = {
        name: importlib.metadata.version(name) for name in ("torch", "transformers", "nvidia-modelopt", "safetensors")
    }
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return found


def planned_placement(params: Mapping[str, Any], config: Any) -> Placement:
    """The placement of `params` on the model of `config`, which must be the model that was planned.

    Raises:
        ReleaseError: CHECKPOINT_MISMATCH when the source's configuration gives other tensors.
    """
    geometry = Geometry.of(config)
    if geometry.model_dump(mode="json") != params["geometry"]:
        found = geometry.model_dump(mode="json")
        differing = [name for name, value in params["geometry"].items() if found.get(name) != value]
        raise ReleaseError(
            "CHECKPOINT_MISMATCH",
            f"the source is another model than was planned: {', '.join(differing)}",
            file="config.json",
            expected=str([params["geometry"][name] for name in differing])[:200],
            actual=str([found.get(name) for name in differing])[:200],
        )
    rules = [author_value(Rule, rule, file="job.json") for rule in params["placement"]]
    return Placement.of(rules, geometry, kv_scales=params["kv_cache_scales"])


def quant_cfg(placement: Placement, algorithm: str) -> dict[str, Any]:
    """ModelOpt's configuration for a placement: everything off, then one entry for each module, layer and quantizer.

    Raises:
        ReleaseError: NOT_RUNNABLE_HERE for an algorithm that needs CUDA where there is none.
    """
    if algorithm == "mse-fp8-sweep" and not torch.cuda.is_available():
        raise ReleaseError(
            "NOT_RUNNABLE_HERE",
            "the search for block scales of least squared error needs CUDA",
            expected="a CUDA device",
        )
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for (role, layer), precision in sorted(placement.precisions.items()):
        module = WEIGHTS[role].format(layer=layer)
        if precision is Precision.NVFP4_W4A16:
            entries.append({"quantizer_name": f"{module}*weight_quantizer*", "cfg": E2M1, "enable": True})
        if precision is Precision.FP8_W8A8:
            entries.append({"quantizer_name": f"{module}*weight_quantizer*", "cfg": E4M3, "enable": True})
            entries.append({"quantizer_name": f"{module}*input_quantizer*", "cfg": E4M3, "enable": True})
    if placement.kv_scales:
        entries.append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": E4M3, "enable": True})
    return {"quant_cfg": entries, "algorithm": ALGORITHMS[algorithm]}


def unify_fused_scales(model: Any, placement: Placement) -> None:
    """Give FP8 projections that engines fuse one weight scale, the largest.

    Otherwise the engine requantizes them to the largest when it loads them, which loses precision unseen. Routed
    experts share one quantizer for gate and up, and NVFP4 globals are unified by ModelOpt's exporter.
    """
    for (role, layer), precision in placement.precisions.items():
        if precision is not Precision.FP8_W8A8 or role is Role.ROUTED_EXPERTS:
            continue
        module = model.get_submodule(WEIGHTS[role].format(layer=layer).removesuffix("."))
        for names in FUSED:
            quantizers = [getattr(module, name).weight_quantizer for name in names if hasattr(module, name)]
            if quantizers:
                largest = torch.stack([quantizer.amax for quantizer in quantizers]).amax(0)
                for quantizer in quantizers:
                    quantizer.amax = largest


def _forward(params: Mapping[str, Any], inputs: Mapping[str, Path]) -> Callable[[Any], None] | None:
    """Runs the calibration texts through the model; None when no activation is quantized."""
    calibration = params.get("calibration")
    if calibration is None:
        return None
    if "prompts" not in inputs:
        raise ReleaseError(
            "NOT_RUNNABLE_HERE", f"the calibration texts of {calibration['dataset']} are not an input of this stage"
        )
    tokenizer = AutoTokenizer.from_pretrained(inputs.get("tokenizer", inputs["source"]), local_files_only=True)
    lines = inputs["prompts"].read_text("utf-8").splitlines()[: calibration["samples"]]
    texts = [parse_json(line.encode(), file="prompts")["text"] for line in lines]
    if len(texts) < calibration["samples"]:
        raise ReleaseError(
            "INVALID_VALUE",
            "too few calibration texts",
            file="prompts",
            expected=str(calibration["samples"]),
            actual=str(len(texts)),
        )

    def loop(model: Any) -> None:
        with torch.no_grad():
            for text in texts:
                ids = tokenizer(text, truncation=True, max_length=calibration["tokens"], return_tensors="pt")[
                    "input_ids"
                ]
                model(ids.to(model.device))

    return loop


def _write_weights(
    placement: Placement, source: Path, index: TensorIndex, exported: Path, target: Path, limit: int
) -> Mapping[str, Scalar]:
    """Write shards and index: quantized tensors from the export, all others from the ranges of the source's files."""
    stored = placement.stored()
    made = read_index(exported)
    origins = {entry.spec.name: entry for entry in stored}
    for entry in stored:
        _require(entry, index if entry.copied else made)

    def payload(tensor: TensorSpec) -> Iterable[bytes]:
        copied = origins[tensor.name].copied
        return read_range(source, index[tensor.name]) if copied else read_range(exported, made[tensor.name])

    files = shards((entry.spec for entry in stored), limit)
    for shard in files:
        write_shard(target, shard, payload)
    if len(files) > 1:
        (target / INDEX_FILE).write_bytes(encode_index(files))
    return {
        "tensors": len(stored),
        "tensors_copied": sum(entry.copied for entry in stored),
        "total_bytes": sum(entry.spec.nbytes for entry in stored),
    }


def _require(entry: Stored, index: TensorIndex) -> None:
    spec = entry.spec
    found = index.tensors.get(spec.name)
    if found is None or (found.dtype, found.shape) != (spec.dtype, spec.shape):
        whose = "source" if entry.copied else "exporter"
        raise ReleaseError(
            "CHECKPOINT_MISMATCH",
            f"the {whose} does not hold {spec.name} as planned",
            file=found.file if found is not None else None,
            expected=f"{spec.dtype} {list(spec.shape)}",
            actual=f"{found.dtype} {list(found.shape)}" if found is not None else "nothing",
        )


def _write_documents(
    params: Mapping[str, Any], placement: Placement, config: dict[str, Any], exported: Path, target: Path
) -> None:
    """`config.json` is the source's with ModelOpt's `quantization_config`; the rest says what was done."""
    made = parse_json((exported / "config.json").read_bytes(), file="config.json")
    _write_json(target / "config.json", {**config, "quantization_config": made["quantization_config"]})
    described = parse_json((exported / "hf_quant_config.json").read_bytes(), file="hf_quant_config.json")
    _write_json(target / "hf_quant_config.json", described)
    recipe = {
        "producer": {"name": "modelopt", "version": importlib.metadata.version("nvidia-modelopt")},
        "algorithm": params["algorithm"],
        "kv_cache_scales": placement.kv_scales,
        "placement": placement.by_layer(),
        "others": Precision.BF16.value,
    }
    if "calibration" in params:
        recipe["calibration"] = params["calibration"]
    _write_json(target / RECIPE_FILE, recipe)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _carry_over(source: Path, tokenizer: Path, target: Path) -> None:
    """Tokenizer, template, generation config and licence texts, byte for byte."""
    for path in sorted(source.iterdir()):
        if path.is_file() and carried_over(path.name) and not (tokenizer != source and tokenizer_file(path.name)):
            shutil.copyfile(path, target / path.name)
    if tokenizer != source:
        for path in sorted(tokenizer.iterdir()):
            if path.is_file() and tokenizer_file(path.name):
                shutil.copyfile(path, target / path.name)
