"""The overlay, the load gate and the API gate in front of a real engine: what they prove, and what they catch.

The package is random, made here from plain bytes: two layers, NVFP4 experts, a router bias that is not zero.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import struct
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from quantmint.checkpoint import TensorSpec, encode_header
from quantmint.evidence import Threshold, Verdict, judge
from quantmint.stage import HANDLERS, Job, JobInput, Output
from quantmint.wheels import overlay_wheel, worker_wheel

pytestmark = [pytest.mark.environments, pytest.mark.timeout(400)]

HIDDEN, INNER, HEADS, HEAD, EXPERTS = 128, 64, 2, 64, 4
DIGEST = "sha256:" + "0" * 64
SHORT = tempfile.mkdtemp(prefix="quantmint-")
"""Every engine's TMPDIR: it puts sockets there, and a socket's path has 107 characters at most."""
atexit.register(shutil.rmtree, SHORT, ignore_errors=True)
LAUNCH: dict[str, Any] = {
    "target": "cpu",
    "served_model_name": "random",
    "context_length": 512,
    "max_num_seqs": 2,
    "reasoning_parser": "poolside_v1",
    "tool_call_parser": "poolside_v1",
    "chat_template_defaults": {"enable_thinking": True},
    "environment": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    "flags": ["--enforce-eager", "--dtype", "bfloat16"],
}
LOADS = (
    Threshold(measurement="engine_loaded", op="==", value=True),
    *(
        Threshold(measurement=name, op="==", value=0)
        for name in (
            "tensors_different",
            "tensors_absent",
            "tensors_unaccounted",
            "quantized_different",
            "parameters_engine_unmatched",
        )
    ),
)


class Bytes:
    """Random tensors as bytes: BF16 of magnitude 0.0078 to 0.031, any NVFP4 code, E4M3 scales of 0.5 to 7.5."""

    def __init__(self) -> None:
        self._random = random.Random(1)  # noqa: S311  reproducible on purpose

    def of(self, spec: TensorSpec) -> bytes:
        count = spec.nbytes
        if spec.name.endswith("norm.weight"):
            return struct.pack("<H", 0x3F80) * (count // 2)
        drawn = bytearray(self._random.randbytes(count))
        if spec.dtype == "F32":
            return struct.pack(f"<{count // 4}f", *(self._random.uniform(0.01, 0.05) for _ in range(count // 4)))
        if spec.dtype == "BF16":
            drawn[1::2] = bytes(0x3C | (byte & 0x80) for byte in drawn[1::2])
        if spec.dtype == "F8_E4M3":
            drawn = bytearray(0x30 + byte % 32 for byte in drawn)
        return bytes(drawn)


def specs(vocabulary: int) -> list[TensorSpec]:
    rows = [("model.embed_tokens.weight", (vocabulary, HIDDEN)), ("lm_head.weight", (vocabulary, HIDDEN))]
    rows.append(("model.norm.weight", (HIDDEN,)))
    for layer in (0, 1):
        at = f"model.layers.{layer}"
        rows += [(f"{at}.{name}.weight", (HIDDEN,)) for name in ("input_layernorm", "post_attention_layernorm")]
        rows += [(f"{at}.self_attn.{name}_norm.weight", (HEAD,)) for name in "qk"]
        rows += [(f"{at}.self_attn.q_proj.weight", (HEADS * HEAD, HIDDEN))]
        rows += [(f"{at}.self_attn.{name}_proj.weight", (HEAD, HIDDEN)) for name in "kv"]
        rows += [(f"{at}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD))]
        rows += [(f"{at}.self_attn.g_proj.weight", (HEADS, HIDDEN))]
        block = f"{at}.mlp" if layer == 0 else f"{at}.mlp.shared_expert"
        rows += [(f"{block}.{name}_proj.weight", (INNER, HIDDEN)) for name in ("gate", "up")]
        rows += [(f"{block}.down_proj.weight", (HIDDEN, INNER))]
    rows.append(("model.layers.1.mlp.gate.weight", (EXPERTS, HIDDEN)))
    found = [TensorSpec(name, "BF16", shape) for name, shape in rows]
    found.append(TensorSpec("model.layers.1.mlp.experts.e_score_correction_bias", "F32", (EXPERTS,)))
    for expert in range(EXPERTS):
        for name, (out, width) in {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}.items():
            at = f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"
            found.append(TensorSpec(at, "U8", (out, width // 2)))
            found.append(TensorSpec(f"{at}_scale", "F8_E4M3", (out, width // 16)))
            found.append(TensorSpec(f"{at}_scale_2", "F32", ()))
    return found


def configuration(vocabulary: int) -> dict[str, Any]:
    plain = {"partial_rotary_factor": 1.0, "rope_theta": 10000.0, "rope_type": "default"}
    unquantized = ["lm_head", "model.embed_tokens", "model.layers.0*"]
    unquantized += [f"model.layers.1.{name}" for name in ("mlp.gate", "mlp.shared_expert*", "self_attn*")]
    return {
        "architectures": ["LagunaForCausalLM"],
        "model_type": "laguna",
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_attention_heads_per_layer": [HEADS, HEADS],
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "gating": "per-head",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 64,
        "rope_parameters": {"full_attention": plain, "sliding_attention": plain},
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": INNER,
        "shared_expert_intermediate_size": INNER,
        "moe_apply_router_weight_on_input": False,
        "moe_routed_scaling_factor": 2.5,
        "moe_router_logit_softcapping": 0.0,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": 2,
        "eos_token_id": [2, 24],
        "pad_token_id": 9,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4",
            "group_size": 16,
            "ignore": unquantized,
            "producer": {"name": "modelopt", "version": "0.47.0"},
        },
    }


@pytest.fixture(scope="module")
def package(tmp_path_factory, root) -> Path:
    folder = tmp_path_factory.mktemp("package")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(root / "tests/fixtures/tiny-laguna" / name, folder / name)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    vocabulary = max(ids) + 1
    vocabulary += 3 if vocabulary % 64 == 0 else 0
    (folder / "config.json").write_text(json.dumps(configuration(vocabulary)))
    tensors = specs(vocabulary)
    drawn = Bytes()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(encode_header(tensors))
        for spec in tensors:
            stream.write(drawn.of(spec))
    return folder


@pytest.fixture(scope="module")
def wheels(tmp_path_factory, root) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    return {"worker": worker_wheel(root, folder), "overlay": overlay_wheel(root / "overlays/laguna", folder)}


@pytest.fixture(scope="module")
def unknown_engine(tmp_path_factory, wheels) -> Path:
    """The overlay, knowing other source than the installed engine's for one function."""
    folder = tmp_path_factory.mktemp("unknown")
    with zipfile.ZipFile(wheels["overlay"]) as archive:
        archive.extractall(folder)
    document = folder / "quantmint_overlay_laguna" / "overlay.toml"
    head, mark, tail = document.read_text().partition('RoutedExperts.load_weights" = "sha256:')
    assert mark
    document.write_text(head + mark + "0" * 64 + tail[64:])
    return folder


def python() -> str:
    return str(Path(os.environ["QUANTMINT_ENVIRONMENTS"]) / "serve" / "bin" / "python")


def variables(home: Path, *paths: Path) -> dict[str, str]:
    searched = [*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": SHORT, "PYTHONPATH": ":".join(searched)}


def perform(tmp_path: Path, package: Path, paths: tuple[Path, ...], handler: str, **params: Any) -> dict[str, Any]:
    """Run one job with the real worker; its report."""
    folder = tmp_path / "job"
    for name in ("in", "out", "scratch", "home"):
        (folder / name).mkdir(parents=True)
    (folder / "in" / "package").symlink_to(package)
    job = Job(
        contract=1,
        stage="gate",
        handler=handler,
        version=HANDLERS[handler][1],
        params={"launch": LAUNCH, **params},
        seed=0,
        inputs=(JobInput(name="package", path="in/package", kind="tree", digest=DIGEST),),
        outputs=(Output(name="evidence", kind="tree", path="evidence"),),
        key=DIGEST,
    )
    (folder / "job.json").write_bytes(job.canonical())
    with (tmp_path / "log").open("wb") as log:
        subprocess.run(
            [python(), "-m", "quantmint.worker", str(folder)],
            env=variables(folder / "home", *paths),
            stdout=subprocess.DEVNULL,
            stderr=log,
            check=True,
            timeout=300,
        )
    report: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text())
    assert report["status"] == "completed", report
    return report


def evidence(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    lines = (tmp_path / "job/out/evidence" / f"{name}.jsonl").read_bytes().splitlines()
    assert not [line for line in lines if str(tmp_path).encode() in line]
    return [json.loads(line) for line in lines]


def test_every_tensor_is_read_back_from_the_engine(tmp_path, package, wheels):
    report = perform(tmp_path, package, tuple(wheels.values()), "gates/load")
    found = report["measurements"]
    assert judge(LOADS, found) == (Verdict.PASSED, ())
    assert found["tensors_total"] == found["tensors_compared"] + found["quantized_tensors"]
    assert found["quantized_tensors"] == 9 * EXPERTS
    assert found["router_biases_compared"] == 1
    assert found["quantized_max_abs_diff"] == 0
    assert found["logits_finite"] is True
    assert report["environment"]["overlay.labels"] == "dequantized emulation"
    rows = {row["name"]: row for row in evidence(tmp_path, "parameters")}
    query = rows["model.layers.0.self_attn.q_proj.weight"]
    assert query["route"] == "multiplication by the identity"
    assert query["engine_sha256"] == query["sha256"]


def test_the_load_gate_fails_when_the_engine_ignores_the_router_bias(tmp_path, package, wheels):
    report = perform(tmp_path, package, tuple(wheels.values()), "gates/load", disable=["router-bias"])
    assert judge(LOADS, report["measurements"]) == (Verdict.FAILED, ("tensors_different: 1, accepted == 0",))
    assert report["measurements"]["overlay_fixes_disabled"] == 1
    assert report["environment"]["overlay.fix.router-bias"] == "disabled"
    wrong = [row for row in evidence(tmp_path, "parameters") if row["verdict"] == "different"]
    assert [row["name"] for row in wrong] == ["model.layers.1.mlp.experts.e_score_correction_bias"]
    assert wrong[0]["max_abs_diff"] > 0


def test_an_unknown_engine_is_refused_and_serves_nothing(tmp_path, package, wheels, unknown_engine):
    report = perform(tmp_path, package, (wheels["worker"], unknown_engine), "gates/load")
    verdict, reasons = judge(LOADS[:-1], report["measurements"])
    assert verdict == Verdict.FAILED
    assert "engine_loaded: False, accepted == True" in reasons
    (told,) = evidence(tmp_path, "environment")
    assert told["error"]["type"] == "OverlayRefusedError"
    assert "RoutedExperts.load_weights" in told["error"]["message"]
    assert "nothing was patched" in told["error"]["message"]


def test_an_unknown_engine_is_refused_again_and_again(tmp_path, unknown_engine):
    program = """
from vllm.plugins import load_general_plugins
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
stock = RoutedExperts.load_weights
for _ in range(2):
    try:
        load_general_plugins()
    except RuntimeError as error:
        print(type(error).__name__, RoutedExperts.load_weights is stock)
"""
    done = subprocess.run(
        [python(), "-c", program],
        env=variables(tmp_path, unknown_engine),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-2:] == ["OverlayRefusedError True"] * 2


def test_registering_twice_patches_once(tmp_path, wheels):
    program = """
import quantmint_overlay_laguna as overlay
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
overlay.register()
first, record = RoutedExperts.load_weights, overlay.applied()
overlay.register()
print(first is RoutedExperts.load_weights, record == overlay.applied(), sorted(record["fixes"]))
"""
    done = subprocess.run(
        [python(), "-c", program],
        env=variables(tmp_path, wheels["overlay"]),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1] == "True True ['cpu-nvfp4', 'cpu-router', 'router-bias']"


def test_a_package_without_router_bias_is_refused(tmp_path, package, wheels):
    lacking = tmp_path / "lacking"
    shutil.copytree(package, lacking)
    vocabulary = json.loads((lacking / "config.json").read_text())["vocab_size"]
    tensors = [spec for spec in specs(vocabulary) if not spec.name.endswith("e_score_correction_bias")]
    drawn = Bytes()
    with (lacking / "model.safetensors").open("wb") as stream:
        stream.write(encode_header(tensors))
        stream.writelines(drawn.of(spec) for spec in tensors)
    report = perform(tmp_path, lacking, tuple(wheels.values()), "gates/load")
    assert report["measurements"]["engine_loaded"] is False
    (told,) = evidence(tmp_path, "environment")
    assert "the checkpoint gave no e_score_correction_bias" in told["error"]["message"]


def test_the_api_gate_accounts_for_every_probe_of_a_model_that_babbles(tmp_path, package, wheels):
    asked = {
        "kind": "echo",
        "messages": [{"role": "user", "content": "Repeat: x"}],
        "max_tokens": 4,
        "expected": {"content": "x"},
    }
    report = perform(tmp_path, package, tuple(wheels.values()), "gates/api", probes=[asked])
    found = report["measurements"]
    assert found["server_ready"] is True
    assert (found["refusal_n"], found["refusal_passed"]) == (2, 2)
    assert (found["echo_n"], found["echo_failed"]) == (1, 1)
    assert (found["probes_n"], found["probes_unanswered"]) == (8, 0)
    assert (found["server_errors"], found["server_exits"]) == (0, 0)
    assert found["context_length_served"] == LAUNCH["context_length"]
    assert (found["overlays_applied"], found["overlay_fixes_disabled"]) == (1, 0)
    assert found["stream_mismatches"] == 0
    rows = evidence(tmp_path, "transcript")
    assert len(rows) == 8
    assert all(row["stream"]["chunks"] > 0 for row in rows if row["stream"]["status"] == 200)
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(package) not in listed


def test_the_api_gate_reports_a_server_that_does_not_start(tmp_path, package, wheels, unknown_engine):
    asked = {"kind": "echo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "expected": {}}
    report = perform(tmp_path, package, (wheels["worker"], unknown_engine), "gates/api", probes=[asked])
    found = report["measurements"]
    assert found["server_ready"] is False
    assert (found["overlays_applied"], found["context_length_served"]) == (0, 0)
    assert found["probes_unanswered"] == found["probes_n"] == 8
    assert found["echo_failed"] == 1
