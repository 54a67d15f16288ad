"""What the documents beside quantized weights must say: ModelOpt's configuration and our own, from the placement alone.

Values in, disagreements out; nothing here opens a file. Engines decide by these documents how they read the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from quantmint.geometry import Role
from quantmint.placement import Placement
from quantmint.tiers import NVFP4_GROUP, Precision

CONFIG, DESCRIBED, RECIPE = "config.json", "hf_quant_config.json", "quantization_recipe.json"

ALGORITHMS: Mapping[Precision, dict[str, Any]] = {
    Precision.FP8_W8A8: {"quant_algo": "FP8"},
    Precision.NVFP4_W4A16: {"quant_algo": "W4A16_NVFP4", "group_size": NVFP4_GROUP},
}
"""How ModelOpt names a precision."""
_FLOAT8 = {"dynamic": False, "num_bits": 8, "type": "float"}
GROUPS: Mapping[Precision, dict[str, Any]] = {
    Precision.FP8_W8A8: {"input_activations": _FLOAT8, "weights": _FLOAT8},
    Precision.NVFP4_W4A16: {
        "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_GROUP},
    },
}
"""How ModelOpt describes a precision in `config_groups`."""


def alike(one: Any, other: Any) -> bool:
    """Equality of JSON values that tells true from 1 and 1 from 1.0; the order of keys does not matter."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def modules(placement: Placement) -> dict[str, Precision]:
    """Every module with a matrix, as ModelOpt names it, and its precision; a layer's routed experts are one module."""
    found: dict[str, Precision] = {}
    for tensor in placement.geometry.tensors:
        if tensor.role is Role.ROUTED_EXPERTS:
            found[f"model.layers.{tensor.layer}.mlp.experts"] = placement.precision(tensor)
        elif tensor.role not in (Role.NORM, Role.ROUTER_BIAS):
            found[tensor.name.removesuffix(".weight")] = placement.precision(tensor)
    return found


def disagreements(
    documents: Mapping[str, Any], placement: Placement, params: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, str]]:
    """(file, what, expected, actual) for each part of `documents` that contradicts the placement or another document.

    `documents` holds those of `CONFIG` (only its quantization_config), `DESCRIBED` and `RECIPE` that could be parsed;
    `params` has the `algorithm`, and the `calibration` if there was one.
    """
    described = documents.get(DESCRIBED)
    quantization = described.get("quantization") if isinstance(described, dict) else None
    producer = described.get("producer") if isinstance(described, dict) else None
    excluded = quantization.get("exclude_modules") if isinstance(quantization, dict) else None
    config = documents.get(CONFIG)
    told = config.get("config_groups") if isinstance(config, dict) else None
    if not _is_producer(producer):
        yield DESCRIBED, "producer", "ModelOpt and its version", _shown(producer)
    made = modules(placement)
    wanted = _expected(placement, made, params, producer, excluded, told)
    for file, value in documents.items():
        yield from _differing(file, "", wanted[file], value)
    if len(_precisions(made)) == 1:
        yield from _exclusions(made, excluded)


def _precisions(made: Mapping[str, Precision]) -> list[Precision]:
    return [one for one in ALGORITHMS if one in made.values()]


def _expected(
    placement: Placement,
    made: Mapping[str, Precision],
    params: Mapping[str, Any],
    producer: Any,
    excluded: Any,
    told: Any,
) -> dict[str, Any]:
    """The documents as they must be, given who produced them, which modules they exclude and the groups `told`."""
    used = _precisions(made)
    layers = {name: ALGORITHMS[precision] for name, precision in made.items() if precision in ALGORITHMS}
    mixed = len(used) > 1
    algorithm = {"quant_algo": "MIXED_PRECISION"} if mixed else ALGORITHMS[used[0]] if used else {"quant_algo": None}
    described = {**algorithm, "kv_cache_quant_algo": "FP8" if placement.kv_scales else None}
    described |= {"quantized_layers": layers} if mixed else {"exclude_modules": excluded}
    groups = [
        {**GROUPS[one], "targets": sorted(name for name in layers if made[name] is one) if mixed else ["Linear"]}
        for one in used
    ]
    config = {
        "config_groups": _numbered(groups, told),
        "ignore": [] if mixed else excluded,
        "quant_algo": algorithm["quant_algo"],
        "producer": producer,
        "quant_method": "modelopt",
    }
    config |= {"quantized_layers": layers} if mixed else {}
    config |= {"kv_cache_scheme": _FLOAT8} if placement.kv_scales else {}
    recipe = {
        "producer": producer,
        "algorithm": params["algorithm"],
        "kv_cache_scales": placement.kv_scales,
        "placement": placement.by_layer(),
        "others": Precision.BF16.value,
    }
    recipe |= {"calibration": params["calibration"]} if "calibration" in params else {}
    return {CONFIG: config, DESCRIBED: {"producer": producer, "quantization": described}, RECIPE: recipe}


def _numbered(groups: list[dict[str, Any]], told: Any) -> dict[str, Any]:
    """`groups` by the names ModelOpt gives them; their order says nothing, so that of `told` is kept."""
    names = [f"group_{number}" for number in range(len(groups))]
    if isinstance(told, dict) and sorted(told) == names:
        free = list(groups)
        for name in names:
            free.sort(key=lambda group, name=name: not alike(group, told[name]))  # type: ignore[misc]
            if not alike(free[0], told[name]):
                break
            free.pop(0)
        else:
            return told
    return dict(zip(names, groups, strict=True))


def _differing(file: str, where: str, wanted: Any, found: Any) -> Iterator[tuple[str, str, str, str]]:
    """The innermost keys at which two values differ."""
    if alike(wanted, found):
        return
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in sorted(wanted.keys() | found.keys()):
            at = f"{where}.{key}" if where else key
            if key not in found or key not in wanted:
                yield file, at, _shown(wanted.get(key, _ABSENT)), _shown(found.get(key, _ABSENT))
            else:
                yield from _differing(file, at, wanted[key], found[key])
        return
    yield file, where or "the document", _shown(wanted), _shown(found)


_ABSENT = "no such key"


def _exclusions(made: Mapping[str, Precision], patterns: Any) -> Iterator[tuple[str, str, str, str]]:
    """Patterns must cover every module that is not quantized, none that is, and nothing that the model lacks."""
    at = "quantization.exclude_modules"
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        yield DESCRIBED, at, "a list of patterns", _shown(patterns)
        return
    for name, precision in made.items():
        hit = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
        if (hit is None) is (precision is Precision.BF16):
            yield DESCRIBED, f"{at}: {name}", f"{precision.value}", f"excluded by {hit}" if hit else "not excluded"
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in made):
            yield DESCRIBED, f"{at}: {pattern}", "a module of the model", "none"


def _is_producer(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "version"}
        and value["name"] == "modelopt"
        and isinstance(value["version"], str)
        and bool(value["version"])
    )


def _shown(value: Any) -> str:
    return value if value is _ABSENT else json.dumps(value, sort_keys=True)[:200]
