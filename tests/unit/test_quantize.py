"""Quantized checkpoints: what the check measures of a right one and of wrong ones, and what ModelOpt really makes."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quantmint.artifact import digest_of
from quantmint.checkpoint import INDEX_FILE, TensorSpec, encode_index, shards
from quantmint.errors import ReleaseError
from quantmint.evidence import Verdict, judge
from quantmint.gates import checkpoint as check
from quantmint.geometry import Geometry
from quantmint.placement import Placement, Rule
from quantmint.plan import CHECK_THRESHOLDS, ERROR_MAX
from quantmint.quantize import described
from quantmint.quantize.decode import E2M1, E4M3, NOT_FINITE, bf16
from quantmint.quantize.files import range_digest, read_header, read_index, read_range, write_shard
from quantmint.stage import CONTRACT, HANDLERS, Job, JobInput, Output
from quantmint.tiers import Precision, modelopt

CONFIG = {
    "model_type": "laguna", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 32, "num_experts": 2,
    "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
GEOMETRY = Geometry.of(CONFIG)
RULES = (
    {"modules": "routed-experts", "layers": "2", "precision": "nvfp4-w4a16"},
    {"modules": "attention", "layers": "1", "precision": "fp8-w8a8"},
)
PARAMS = {
    "placement": list(RULES), "kv_cache_scales": False, "geometry": GEOMETRY.model_dump(mode="json"),
    "algorithm": "max", "calibration": {"prompts": "p.jsonl", "samples": 2, "tokens": 8},
}  # fmt: skip
PLACEMENT = Placement.of([Rule.model_validate_json(json.dumps(rule)) for rule in RULES], GEOMETRY)


def payload_of(spec: TensorSpec) -> bytes:
    """Bytes that only the name decides; BF16 numbers have magnitudes of 0.03 to 0.12 and either sign."""
    drawn = random.Random(spec.name).randbytes(spec.nbytes)  # noqa: S311  reproducible on purpose
    if spec.dtype != "BF16":
        return drawn
    made = bytearray(drawn)
    made[1::2] = bytes(0x3D | (byte & 0x80) for byte in made[1::2])
    return bytes(made)


def write(folder: Path, specs: list[TensorSpec], payload, limit: int = 40_000) -> None:
    files = shards(specs, limit)
    for shard in files:
        write_shard(folder, shard, lambda spec: [payload(spec)])
    if len(files) > 1:
        (folder / INDEX_FILE).write_bytes(encode_index(files))


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    write(folder, [tensor.spec for tensor in GEOMETRY.tensors], payload_of)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "README.md"):
        (folder / name).write_text(name)
    return folder


def nearest(value: float, table: tuple[float, ...]) -> int:
    return min(range(len(table)), key=lambda code: abs(table[code] - value) if table[code] == table[code] else 1e9)


GLOBAL = struct.unpack("<f", struct.pack("<f", 0.125 / (6 * 448)))[0]
FP8_SCALE = struct.unpack("<f", struct.pack("<f", 0.125 / 448))[0]


@cache
def encoded(name: str, shape: tuple[int, ...], precision: Precision) -> tuple[bytes, ...]:
    """Codes and scales of a weight, by the definition of the formats and the largest value of each group."""
    weights = bf16(payload_of(TensorSpec(name, "BF16", shape)))
    if precision is Precision.FP8_W8A8:
        codes = bytes(nearest(weight / FP8_SCALE, E4M3) for weight in weights)
        return codes, struct.pack("<f", FP8_SCALE), struct.pack("<f", 1.0)
    nibbles, scales = [], []
    for begin in range(0, len(weights), 16):
        group = weights[begin : begin + 16]
        scales.append(nearest(max(map(abs, group)) / 6 / GLOBAL, E4M3[:128]))
        nibbles += [nearest(weight / (E4M3[scales[-1]] * GLOBAL), E2M1) for weight in group]
    pairs = bytes(low | high << 4 for low, high in zip(nibbles[0::2], nibbles[1::2], strict=True))
    return pairs, bytes(scales), struct.pack("<f", GLOBAL)


def quantized(spec: TensorSpec) -> bytes:
    for entry in PLACEMENT.stored():
        if entry.spec.name == spec.name and not entry.copied and entry.source is not None:
            parts = modelopt(entry.source.spec, entry.precision)
            made = encoded(entry.source.name, entry.source.shape, entry.precision)
            return next(data for part, data in zip(parts, made, strict=True) if part.name == spec.name)
    return payload_of(spec)


PRODUCER = {"name": "modelopt", "version": "0.47.0"}
FP8, NVFP4 = {"quant_algo": "FP8"}, {"quant_algo": "W4A16_NVFP4", "group_size": 16}
LAYERS = {
    **{f"model.layers.1.self_attn.{letter}_proj": FP8 for letter in "qkvog"},
    "model.layers.2.mlp.experts": NVFP4,
}
EIGHT = {"dynamic": False, "num_bits": 8, "type": "float"}
QUANTIZATION = {
    "config_groups": {
        "group_0": {"input_activations": EIGHT, "weights": EIGHT, "targets": sorted(LAYERS)[:5]},
        "group_1": {
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["model.layers.2.mlp.experts"],
        },
    },
    "quantized_layers": LAYERS, "ignore": [], "quant_algo": "MIXED_PRECISION", "producer": PRODUCER,
    "quant_method": "modelopt",
}  # fmt: skip
DESCRIBED = {
    "producer": PRODUCER,
    "quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": LAYERS},
}
TOLD = {
    "producer": PRODUCER, "algorithm": "max", "kv_cache_scales": False, "others": "bf16",
    "placement": {"attention": {"fp8-w8a8": "1"}, "routed-experts": {"nvfp4-w4a16": "2"}},
    "calibration": {"prompts": "p.jsonl", "samples": 2, "tokens": 8},
}  # fmt: skip


def documents(folder: Path, config: dict[str, Any] | None = None) -> None:
    body = {**(CONFIG if config is None else config), "quantization_config": QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(body))
    (folder / "hf_quant_config.json").write_text(json.dumps(DESCRIBED))
    (folder / "quantization_recipe.json").write_text(json.dumps(TOLD))
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE"):
        (folder / name).write_text(name)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write(folder, [entry.spec for entry in PLACEMENT.stored()], quantized)
    documents(folder)
    return folder


@pytest.fixture
def audit(tmp_path, source, checkpoint):
    def run(**more):
        out, number = tmp_path / "out", len(list(tmp_path.iterdir()))
        out = tmp_path / f"out{number}"
        out.mkdir()
        notes: list[str] = []
        inputs = {"source": source, "checkpoint": checkpoint} | more
        found = check.run(PARAMS, inputs, out, tmp_path, lambda event, /, **fields: notes.append(f"{event} {fields}"))
        return found, [json.loads(line) for line in (out / "evidence/findings.jsonl").read_text().splitlines()], out

    return run


def rewrite(folder: Path, specs, payload) -> None:
    for path in [*folder.glob("*.safetensors"), folder / INDEX_FILE]:
        path.unlink()
    write(folder, specs, payload)


def test_a_right_checkpoint_passes_and_leaves_a_row_for_each_tensor(audit, checkpoint):
    found, findings, out = audit()
    assert findings == []
    assert judge(CHECK_THRESHOLDS, found) == (Verdict.PASSED, ())
    stored = PLACEMENT.stored()
    assert found["tensors"] == found["expected_tensors"] == len(stored)
    assert found["total_bytes"] == found["expected_bytes"] == sum(entry.spec.nbytes for entry in stored)
    assert found["tensors_compared"] == sum(entry.copied for entry in stored)
    assert found["quantized_compared"] == 2 * 3 + 5
    assert 0.05 < found["quantized_error_max"] < 0.13
    assert found["effective_bits"] == (16 + 4.5 + 32 * 6 / (2 * 3 * 32 * 64)) / 2
    rows = [json.loads(line) for line in (out / "evidence/tensors.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == [entry.spec.name for entry in stored]
    index = read_index(checkpoint)
    assert rows[5]["digest"] == digest_of(b"".join(read_range(checkpoint, index[rows[5]["name"]])))
    roles = [json.loads(line) for line in (out / "evidence/roles.jsonl").read_text().splitlines()]
    assert sum(row["bytes"] for row in roles) == found["total_bytes"]


def test_evidence_is_the_same_twice(audit):
    first, second = audit()[2], audit()[2]
    for name in ("tensors.jsonl", "findings.jsonl", "roles.jsonl", "errors.jsonl"):
        assert (first / "evidence" / name).read_bytes() == (second / "evidence" / name).read_bytes()


BIAS = "model.layers.1.mlp.experts.e_score_correction_bias"
EXPERT = "model.layers.2.mlp.experts.0.gate_proj.weight"
SPECS = [entry.spec for entry in PLACEMENT.stored()]


def one_bit(spec):
    data = bytearray(quantized(spec))
    if spec.name == BIAS:
        data[-1] ^= 1
    return bytes(data)


def cast_bias(spec):
    return TensorSpec(spec.name, "BF16", spec.shape) if spec.name == BIAS else spec


def unequal(suffix):
    return lambda spec: b"\x01" * spec.nbytes if spec.name.endswith(suffix) else quantized(spec)


@pytest.mark.parametrize(
    ("specs", "payload", "measurement", "count"),
    [
        (SPECS, one_bit, "tensors_changed", 1),
        ([spec for spec in SPECS if spec.name != BIAS], quantized, "tensors_missing", 1),
        ([spec for spec in SPECS if spec.name != EXPERT], quantized, "tensors_missing", 1),
        ([*SPECS, TensorSpec("mtp.fc.weight", "BF16", (2,))], quantized, "tensors_unexpected", 1),
        ([cast_bias(spec) for spec in SPECS], quantized, "tensors_wrong_shape", 1),
        ([cast_bias(spec) for spec in SPECS], quantized, "tensors_changed", 1),
        (SPECS, unequal("experts.1.up_proj.weight_scale_2"), "fused_scales_unequal", 1),
        (SPECS, unequal("layers.1.self_attn.v_proj.weight_scale"), "fused_scales_unequal", 1),
        (SPECS, unequal("experts.1.down_proj.weight_scale_2"), "fused_scales_unequal", 0),
        ([tensor.spec for tensor in GEOMETRY.tensors], payload_of, "tensors_wrong_shape", 6 + 5),
    ],
)
def test_a_wrong_tensor_is_measured(audit, checkpoint, specs, payload, measurement, count):
    rewrite(checkpoint, specs, payload)
    found, findings, _ = audit()
    assert found[measurement] == count
    assert sum(finding["code"] == measurement.upper() for finding in findings) == count
    assert (judge(CHECK_THRESHOLDS, found)[0] is Verdict.FAILED) is (count > 0)


def test_a_renamed_tensor_is_missing_and_unexpected(audit, checkpoint):
    renamed = [
        TensorSpec(spec.name.replace("experts.e_score", "gate.e_score"), spec.dtype, spec.shape) for spec in SPECS
    ]
    rewrite(checkpoint, renamed, payload_of)
    found, findings, _ = audit()
    assert (found["tensors_missing"], found["tensors_unexpected"]) == (2, 2)
    assert any(BIAS in finding["message"] for finding in findings)


def test_a_tensor_of_the_source_that_the_model_does_not_have(audit, source):
    specs = [*(tensor.spec for tensor in GEOMETRY.tensors), TensorSpec("mtp.fc.weight", "BF16", (2,))]
    rewrite(source, specs, payload_of)
    assert audit()[0]["tensors_missing"] == 1


def twice(path: Path) -> None:
    path.write_text(path.read_text().replace("{", '{"producer": 1, ', 1))


def index(folder: Path, old: str, new: str) -> None:
    path = folder / INDEX_FILE
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.parametrize(
    ("change", "measurement"),
    [
        (lambda folder: (folder / "tokenizer.json").write_text("other"), "files_changed"),
        (lambda folder: (folder / "LICENSE").unlink(), "files_missing"),
        (lambda folder: (folder / "hf_quant_config.json").unlink(), "files_missing"),
        (lambda folder: (folder / "training_args.bin").write_text("x"), "files_unexpected"),
        (lambda folder: (folder / "deep").mkdir() or (folder / "deep/x").write_text("x"), "files_unexpected"),
        (lambda folder: documents(folder, {**CONFIG, "transformers_version": "5"}), "config_changed"),
        (lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG)), "documents_wrong"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config_changed"),
        (lambda folder: (folder / "config.json").write_text("{"), "documents_wrong"),
        (lambda folder: documents(folder, {**CONFIG, "num_experts": 2.0}), "config_changed"),
        (lambda folder: documents(folder, {**CONFIG, "num_experts_per_tok": True}), "config_changed"),
        (lambda folder: documents(folder, {**CONFIG, "tie_word_embeddings": None}), "config_changed"),
        (lambda folder: twice(folder / "hf_quant_config.json"), "documents_wrong"),
        (lambda folder: twice(folder / "quantization_recipe.json"), "documents_wrong"),
        (lambda folder: index(folder, '"total_size": ', '"total_size": 1'), "documents_wrong"),
        (lambda folder: index(folder, "{", '{\n  "extra": 1,'), "documents_wrong"),
        (lambda folder: index(folder, "\n  }\n}\n", "\n  }\n}"), "documents_wrong"),
    ],
)
def test_a_wrong_file_is_measured(audit, checkpoint, change, measurement):
    change(checkpoint)
    found, findings, _ = audit()
    assert found[measurement] >= 1
    assert judge(CHECK_THRESHOLDS, found)[0] is Verdict.FAILED
    assert findings


@pytest.mark.parametrize(
    ("file", "keys", "value", "said"),
    [
        ("config.json", ("quant_algo",), "NVFP4", "quant_algo"),
        ("config.json", ("quant_method",), "fp8", "quant_method"),
        ("config.json", ("ignore",), ["lm_head"], "ignore"),
        ("config.json", ("kv_cache_scheme",), EIGHT, "kv_cache_scheme"),
        ("config.json", ("config_groups", "group_1", "weights", "num_bits"), 4.0, "config_groups"),
        ("config.json", ("config_groups", "group_1", "targets"), [], "config_groups"),
        ("config.json", ("quantized_layers", "model.layers.2.mlp.experts"), FP8, "model.layers.2.mlp.experts"),
        ("config.json", ("producer", "version"), "0.1", "producer.version"),
        ("hf_quant_config.json", ("quantization", "quantized_layers"), {}, "quantized_layers.model.layers.1"),
        ("hf_quant_config.json", ("quantization", "quant_algo"), "FP8", "quantization.quant_algo"),
        ("hf_quant_config.json", ("quantization", "kv_cache_quant_algo"), "FP8", "kv_cache_quant_algo"),
        ("hf_quant_config.json", ("quantization",), None, "quantization"),
        ("hf_quant_config.json", ("producer",), {"name": "modelopt", "version": ""}, "producer"),
        ("quantization_recipe.json", ("kv_cache_scales",), 0, "kv_cache_scales"),
        ("quantization_recipe.json", ("placement", "attention"), {"fp8-w8a8": "0-2"}, "placement.attention.fp8-w8a8"),
        ("quantization_recipe.json", ("calibration", "samples"), 512, "calibration.samples"),
        ("quantization_recipe.json", ("algorithm",), "mse-fp8-sweep", "algorithm"),
        ("quantization_recipe.json", ("extra",), 1, "extra"),
    ],
)
def test_a_document_that_lies_is_measured(audit, checkpoint, file, keys, value, said):
    path = checkpoint / file
    body = json.loads(path.read_bytes())
    at = body["quantization_config"] if file == "config.json" else body
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    path.write_text(json.dumps(body))
    found, findings, _ = audit()
    assert found["documents_wrong"] >= 1
    assert found["config_changed"] == 0
    assert any(said in finding["message"] for finding in findings)
    assert judge(CHECK_THRESHOLDS, found)[0] is Verdict.FAILED


ONE = Placement.of([Rule.model_validate_json(json.dumps(RULES[0]))], GEOMETRY, kv_scales=True)
EXCLUDED = ["lm_head", "model.embed_tokens", "model.layers.0*", "model.layers.1*", "model.layers.2.self_attn*"]
EXCLUDED += ["model.layers.2.mlp.gate", "model.layers.2.mlp.shared_expert*"]


def of_one_precision(patterns: Any) -> list[tuple[str, str]]:
    """Where documents of one precision, with these exclusions, disagree."""
    quantization = {**NVFP4, "kv_cache_quant_algo": "FP8", "exclude_modules": patterns}
    group = {**QUANTIZATION["config_groups"]["group_1"], "targets": ["Linear"]}
    config = {
        "config_groups": {"group_0": group}, "ignore": patterns, "quant_algo": "W4A16_NVFP4", "producer": PRODUCER,
        "quant_method": "modelopt", "kv_cache_scheme": EIGHT,
    }  # fmt: skip
    recipe = {
        "producer": PRODUCER, "algorithm": "max", "kv_cache_scales": True, "others": "bf16",
        "placement": {"routed-experts": {"nvfp4-w4a16": "2"}},
    }  # fmt: skip
    given = {
        "config.json": config,
        "hf_quant_config.json": {"producer": PRODUCER, "quantization": quantization},
        "quantization_recipe.json": recipe,
    }
    return [(file, what) for file, what, _, _ in described.disagreements(given, ONE, {"algorithm": "max"})]


def test_exclusions_cover_what_is_not_quantized_and_nothing_else():
    assert of_one_precision(EXCLUDED) == []
    at = "quantization.exclude_modules"
    for patterns, what in (
        (EXCLUDED[1:], f"{at}: lm_head"),
        ([*EXCLUDED, "model.layers.2*"], f"{at}: model.layers.2.mlp.experts"),
        ([*EXCLUDED, "model.layers.7*"], f"{at}: model.layers.7*"),
        (None, at),
        ([1], at),
    ):
        assert ("hf_quant_config.json", what) in of_one_precision(patterns)


def test_the_order_of_groups_says_nothing(audit, checkpoint):
    body = json.loads((checkpoint / "config.json").read_bytes())
    groups = body["quantization_config"]["config_groups"]
    groups["group_0"], groups["group_1"] = groups["group_1"], groups["group_0"]
    (checkpoint / "config.json").write_text(json.dumps(body))
    assert audit()[0]["documents_wrong"] == 0


def zeroed(suffix: str):
    return lambda spec: bytes(spec.nbytes) if spec.name.endswith(suffix) else quantized(spec)


def random_codes(spec: TensorSpec) -> bytes:
    return payload_of(spec) if spec.dtype == "U8" else quantized(spec)


def doubled(spec: TensorSpec) -> bytes:
    wrong = "experts.1.down_proj.weight_scale_2"
    return struct.pack("<f", 2 * GLOBAL) if spec.name.endswith(wrong) else quantized(spec)


@pytest.mark.parametrize(
    ("payload", "least", "most"),
    [
        (zeroed("experts.0.up_proj.weight"), 1, 1),
        (zeroed("experts.0.up_proj.weight_scale"), 1, 1),
        (zeroed("layers.1.self_attn.q_proj.weight"), 1, 1),
        (lambda spec: b"\xff" * spec.nbytes if spec.dtype == "F8_E4M3" else quantized(spec), NOT_FINITE, NOT_FINITE),
        (random_codes, 0.9, 2),
        (doubled, 0.9, 1.2),
    ],
)
def test_values_that_are_not_the_sources_are_measured(audit, checkpoint, payload, least, most):
    rewrite(checkpoint, SPECS, payload)
    found, _, out = audit()
    assert least <= found["quantized_error_max"] <= most
    assert least > ERROR_MAX
    rows = [json.loads(line) for line in (out / "evidence/errors.jsonl").read_text().splitlines()]
    assert max(row["relative_error"] for row in rows) == found["quantized_error_max"]


def test_a_matrix_that_cannot_be_decoded_is_not_counted(audit, checkpoint):
    rewrite(checkpoint, [spec for spec in SPECS if not spec.name.endswith("0.up_proj.weight_scale_2")], quantized)
    assert audit()[0]["quantized_compared"] == 2 * 3 + 5 - 1


def test_a_large_model_is_sampled_evenly_and_says_so(audit, monkeypatch):
    monkeypatch.setattr(check, "WEIGHTS_DECODED", 4096)
    found, _, out = audit()
    rows = [json.loads(line) for line in (out / "evidence/errors.jsonl").read_text().splitlines()]
    assert len(rows) == found["quantized_compared"] == 2 * 3 + 5
    assert all(0 < row["rows_compared"] < row["rows"] or row["rows"] < 8 for row in rows)
    assert 0.01 < found["quantized_error_max"] < 0.15


def test_several_metadata_keys_are_measured(audit, checkpoint):
    path = min(checkpoint.glob("*.safetensors"))
    header = read_header(path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].replace(b'"format":"pt"', b'"format":"pt","b":"1"')
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert len(read_header(path).tensors) == len(header.tensors)
    assert audit()[0]["metadata_surplus"] == 1


def test_the_tokenizer_may_come_from_another_source(tmp_path, audit, checkpoint):
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text("newer")
    (other / "LICENSE").write_text("of the tokenizer")
    (checkpoint / "tokenizer.json").write_text("newer")
    (checkpoint / "chat_template.jinja").unlink()
    found, findings, _ = audit(tokenizer=other)
    assert findings == []
    assert judge(CHECK_THRESHOLDS, found)[0] is Verdict.PASSED


def test_a_truncated_shard_stops_the_check(audit, checkpoint):
    path = min(checkpoint.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ReleaseError) as caught:
        audit()
    assert (caught.value.code, caught.value.file) == ("CORRUPT_SHARD", path.name)


def test_another_model_than_was_planned_is_refused(audit, source):
    (source / "config.json").write_text(json.dumps({**CONFIG, "num_experts": 4}))
    with pytest.raises(ReleaseError) as caught:
        audit()
    assert caught.value.code == "CHECKPOINT_MISMATCH"


def test_a_folder_without_weights(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReleaseError) as caught:
        read_index(tmp_path / "empty")
    assert caught.value.code == "SOURCE_MISSING"


def test_a_payload_of_the_wrong_length_is_refused(tmp_path):
    (shard,) = shards([TensorSpec("a", "U8", (4,))], 100)
    with pytest.raises(ReleaseError) as caught:
        write_shard(tmp_path, shard, lambda _: [b"abc"])
    assert caught.value.code == "CHECKPOINT_MISMATCH"


def test_a_file_that_shrinks_while_it_is_read(checkpoint):
    index = read_index(checkpoint)
    last = max(index.tensors.values(), key=lambda entry: (entry.file, entry.end))
    path = checkpoint / last.file
    path.write_bytes(path.read_bytes()[: last.begin + 1])
    with pytest.raises(ReleaseError) as caught:
        range_digest(checkpoint, last)
    assert (caught.value.code, caught.value.file) == ("CORRUPT_SHARD", last.file)


# --- the real producer ---


@pytest.fixture
def small(root, tmp_path):
    """A copy of the small model."""
    return shutil.copytree(root / "tests/fixtures/tiny-laguna", tmp_path / "small")


def quantize(
    root: Path, source: Path, job: Path, rules: list[dict[str, str]], texts: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Perform one quantize job in the modelopt environment; its parameters and its report."""
    geometry = Geometry.of(json.loads((source / "config.json").read_bytes())).model_dump(mode="json")
    params = {
        "placement": rules, "kv_cache_scales": bool(texts), "geometry": geometry,
        "algorithm": "max", "shard_bytes": 5_000_000, "seed": 0,
    }  # fmt: skip
    for name in ("in", "out", "scratch"):
        (job / name).mkdir(parents=True)
    shutil.copytree(source, job / "in/source")
    inputs = [JobInput(name="source", path="in/source", kind="tree", digest=digest_of(b"s"))]
    if texts:
        (job / "in/prompts").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        inputs.append(JobInput(name="prompts", path="in/prompts", kind="file", digest=digest_of(b"p")))
        params["calibration"] = {"prompts": "p", "samples": len(texts), "tokens": 64}
    described = Job(
        contract=CONTRACT, stage="quantize", handler="quantize/modelopt", version=HANDLERS["quantize/modelopt"][1],
        params=params, seed=0, inputs=tuple(inputs), key=digest_of(b"k"),
        outputs=(Output(name="checkpoint", kind="tree", path="checkpoint"),),
    )  # fmt: skip
    (job / "job.json").write_bytes(described.canonical())
    python = Path(os.environ["QUANTMINT_ENVIRONMENTS"]) / "modelopt/bin/python"
    environment = {
        "PYTHONPATH": str(root / "builder"),
        "HOME": str(job / "scratch"),
        "HF_HUB_OFFLINE": "1",
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        [python, "-m", "quantmint.worker", str(job)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return params, json.loads((job / "out/report.json").read_bytes())


def audited(source: Path, job: Path, params: dict[str, Any]) -> dict[str, Any]:
    inputs = {"source": source, "checkpoint": job / "out/checkpoint"}
    return dict(check.run(params, inputs, job / "scratch", job, lambda _event, /, **_fields: None))


@pytest.mark.environments
@pytest.mark.timeout(500)
def test_modelopt_quantizes_the_small_model_the_same_way_twice(root, small, tmp_path):
    rules = [{"modules": "routed-experts", "layers": "all", "precision": "nvfp4-w4a16"}]
    trees = []
    for name in ("first", "second"):
        params, report = quantize(root, small, tmp_path / name, rules, [])
        assert report["status"] == "completed", report
        folder = tmp_path / name / "out/checkpoint"
        trees.append({path.name: digest_of(path.read_bytes()) for path in folder.iterdir()})
    assert trees[0] == trees[1]
    found = audited(small, tmp_path / "first", params)
    assert judge(CHECK_THRESHOLDS, found) == (Verdict.PASSED, ())
    assert found["effective_bits"] == pytest.approx(4.5, abs=0.001)
    assert found["quantized_compared"] == 72
    assert 0.08 < found["quantized_error_max"] < 0.12
    assert report["measurements"]["total_bytes"] == found["total_bytes"]
    config = json.loads((tmp_path / "first/out/checkpoint/config.json").read_bytes())
    assert config["quantization_config"]["quant_algo"] == "W4A16_NVFP4"
    assert "transformers_version" not in config


@pytest.mark.environments
@pytest.mark.timeout(500)
def test_modelopt_mixes_precisions_and_fused_scales_are_equal(root, small, tmp_path):
    rules = [
        {"modules": "routed-experts", "layers": "1", "precision": "bf16"},
        {"modules": "routed-experts", "layers": "2", "precision": "fp8-w8a8"},
        {"modules": "routed-experts", "layers": "3", "precision": "nvfp4-w4a16"},
        {"modules": "attention", "layers": "1-2", "precision": "fp8-w8a8"},
        {"modules": "dense-mlp", "layers": "all", "precision": "fp8-w8a8"},
        {"modules": "shared-expert", "layers": "1", "precision": "nvfp4-w4a16"},
    ]
    params, report = quantize(root, small, tmp_path / "job", rules, ["def f(x): return x + 1", "words to calibrate on"])
    assert report["status"] == "completed", report
    assert judge(CHECK_THRESHOLDS, audited(small, tmp_path / "job", params)) == (Verdict.PASSED, ())
    config = json.loads((tmp_path / "job/out/checkpoint/config.json").read_bytes())
    assert config["quantization_config"]["quant_algo"] == "MIXED_PRECISION"
