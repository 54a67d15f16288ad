"""Plans: pure functions of their arguments, golden for the three recipes, and exact in what they predict.

`QUANTMINT_BLESS=1 pytest tests/unit/test_plan.py` rewrites the golden files.
"""

from __future__ import annotations

import json
import os
from itertools import pairwise

import pytest

from quantmint.artifact import Artifact, Tree, digest_of
from quantmint.document import author_value
from quantmint.errors import ReleaseError
from quantmint.evidence import Verdict, judge
from quantmint.plan import CHECK_THRESHOLDS, ERROR_MAX, Plan, gigabytes, make_plan
from quantmint.recipe import Recipe, pin
from quantmint.stage import HANDLERS

NAMES = ("demo", "hybrid-3.25", "nvfp4-w4a16-quality")
WHEELS = {"worker": digest_of(b"worker"), "overlay": digest_of(b"overlay")}
IMAGE = "registry.example/quantmint@" + digest_of(b"image")


def UNCHANGED(text: str) -> str:  # noqa: N802  a default that is compared by identity
    return text


@pytest.fixture(scope="session")
def plan_of(root):
    cache: dict[str, Plan] = {}

    def build(name, *, change=UNCHANGED, config=None, **arguments):
        if not arguments and config is None and change is UNCHANGED and name in cache:
            return cache[name]
        text = change((root / f"manifests/recipes/{name}.toml").read_text("utf-8"))
        if name == "demo":
            text = pin(text, "base", digest_of(b"source"))
        recipe = Recipe.parse(text, file=f"{name}.toml")
        given = {
            "file": f"{name}.toml", "recipe_digest": digest_of(name.encode()), "runner": "container",
            "platform": "linux/amd64", "images": lambda _: IMAGE, "wheels": WHEELS,
            "config": json.loads((root / recipe.model.config).read_bytes()) if config is None else config,
            "files": {path: digest_of(path.encode()) for path in recipe.files},
        }  # fmt: skip
        plan = make_plan(recipe, **(given | arguments))
        if not arguments and config is None and change is UNCHANGED:
            cache[name] = plan
        return plan

    return build


@pytest.mark.parametrize("name", NAMES)
def test_plans_are_golden(root, plan_of, name):
    plan = plan_of(name)
    pretty = json.dumps(plan.as_json(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    for suffix, text in (("json", pretty), ("txt", plan.text())):
        golden = root / "tests/golden" / f"plan-{name}.{suffix}"
        if os.environ.get("QUANTMINT_BLESS"):
            golden.write_text(text, "utf-8")
        assert golden.read_text("utf-8") == text


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_is_a_function_and_survives_its_json(plan_of, name):
    plan = plan_of(name)
    assert plan == plan_of(name, change=str)
    assert author_value(Plan, json.loads(plan.canonical()), file="plan.json") == plan


@pytest.mark.parametrize("name", NAMES)
def test_every_input_is_pinned_or_made_by_an_earlier_stage(plan_of, name):
    plan = plan_of(name)
    made: dict[str, str] = {}
    for stage in plan.stages:
        for ref in stage.inputs:
            if ref.stage is None:
                assert ref.digest is not None
            else:
                assert made[f"{ref.stage}/{ref.output}"] == ref.kind
        made |= {f"{stage.name}/{output.name}": output.kind for output in stage.outputs}
        assert len({ref.name for ref in stage.inputs}) == len(stage.inputs)
        assert (stage.image is None) == (stage.kind == "fetch")
        assert stage.image is None or any(ref.name == "worker" for ref in stage.inputs)
    assert "/".join(plan.package) in made


@pytest.mark.parametrize("name", NAMES)
def test_the_arithmetic_adds_up(plan_of, name):
    plan = plan_of(name)
    assert sum(part.tensors for part in plan.arithmetic) == plan.expected.tensors
    assert sum(part.nbytes for part in plan.arithmetic) == plan.expected.tensor_bytes
    assert plan.expected.tensor_bytes < plan.expected.package_bytes < 1.01 * plan.expected.tensor_bytes
    assert plan.expected.nominal_bits < plan.expected.effective_bits < 16


def test_the_quality_release(plan_of):
    """101,377 tensors and 5.9468 bits as published; 192 bytes more than its estimate, since KV scales are F32 here."""
    plan = plan_of("nvfp4-w4a16-quality")
    assert plan.expected.tensors == 101_377
    assert round(plan.expected.effective_bits, 4) == 5.9468
    assert plan.expected.tensor_bytes == 92_433_895_616 + 192
    assert 92_469_054_276 - plan.expected.package_bytes < 2**24
    assert plan.not_runnable == ("gates/fidelity",)
    assert not any(source.pinned for source in plan.sources)


def test_the_hybrid_release(plan_of):
    plan = plan_of("hybrid-3.25")
    parts = {part.name: part for part in plan.arithmetic}
    assert plan.expected.nominal_bits == 3.25
    assert plan.expected.tensor_bytes == 56_319_122_624
    assert parts["hot experts (64 a layer), NVFP4 as in the source"].tensors == 47 * 64 * 12
    assert parts["hot experts (64 a layer), NVFP4 as in the source"].nbytes == 15_967_787_520
    tail = [part for part in parts.values() if part.name.startswith("tail")]
    assert parts["tail experts (192 a layer), EXL3 3-bit trellis"].nbytes == 31_935_430_656
    assert parts["tail experts (192 a layer), suh and svh"].nbytes == 388_104_192
    assert sum(part.tensors for part in tail) == 216_576 == 47 * 2 * 2304
    others = [part for part in parts.values() if not part.name.startswith(("tail", "hot"))]
    assert sum(part.nbytes for part in others) == 8_027_583_680
    assert sum(part.tensors for part in others) == 673 + 96
    assert next(source.nbytes for source in plan.sources if source.name == "nvfp4") == 71_898_733_760
    assert next(source.nbytes for source in plan.sources if source.name == "bf16") == 235_123_979_264
    assert [stage.name for stage in plan.stages] == [
        "fetch", "saliency", "tiers", "tails", "assemble", "check", "transform", "load", "api", "marker", "throughput",
    ]  # fmt: skip


def test_the_demo_can_be_run(plan_of):
    plan = plan_of("demo")
    assert plan.not_runnable == ()
    assert [stage.name for stage in plan.stages] == ["fetch", "quantize", "check", "load", "api"]
    load = plan.stage("load")
    assert [(ref.name, ref.kind) for ref in load.inputs] == [
        ("package", "tree"),
        ("overlay", "tree"),
        ("worker", "tree"),
    ]
    assert [(ref.name, ref.kind) for ref in plan.stage("api").inputs][-1] == ("probes", "file")
    assert load.params["launch"]["served_model_name"] == "tiny-laguna"
    assert [output.path for output in load.outputs] == ["evidence"]
    assert load.hints.memory == 6 * 1024**3
    assert plan.accepted("check")[: len(CHECK_THRESHOLDS)] == CHECK_THRESHOLDS
    assert plan.accepted("quantize") == ()
    for stage in plan.stages:
        assert stage.version == HANDLERS[stage.handler][1]
    with pytest.raises(KeyError):
        plan.stage("nothing")


def test_a_source_at_hand_gives_its_digest_and_its_other_files(plan_of):
    tree = Tree.of(
        [
            Artifact(path="model.safetensors", size=10**6, digest=digest_of(b"1")),
            Artifact(path="tokenizer.json", size=5000, digest=digest_of(b"2")),
            Artifact(path="README.md", size=700, digest=digest_of(b"3")),
        ]
    )
    without, with_tree = plan_of("demo"), plan_of("demo", sources={"base": tree})
    assert with_tree.expected.package_bytes == without.expected.package_bytes + 5000
    assert with_tree.sources[0].nbytes == tree.size
    assert with_tree.sources[0].digest == digest_of(b"source")


def test_parameters_and_not_hints_or_thresholds_reach_a_stage(plan_of):
    plan = plan_of("demo")
    other = plan_of(
        "demo", change=lambda text: text.replace("memory_gib = 6", "memory_gib = 7").replace("value = 13", "value = 12")
    )
    for one, two in zip(plan.stages, other.stages, strict=True):
        assert (one.params, one.inputs, one.outputs) == (two.params, two.inputs, two.outputs)
    assert other.stage("load").hints.memory == 7 * 1024**3
    assert plan.acceptance != other.acceptance
    assert (
        plan_of("demo", change=lambda text: text.replace("16384", "8192")).stage("load").params
        != plan.stage("load").params
    )


def test_what_is_not_there_is_planned_as_unpinned(plan_of):
    plan = plan_of("demo", images=lambda _: None, wheels={}, files={}, runner="process")
    assert {image.reference for image in plan.images} == {"unpinned"}
    assert [ref.digest for ref in plan.stage("api").inputs] == [None] * 4
    assert "modelopt unpinned" in plan.text()


def test_a_plan_of_another_architecture_is_refused(plan_of):
    with pytest.raises(ReleaseError) as caught:
        plan_of("demo", config={"model_type": "llama"})
    assert (caught.value.code, caught.value.file) == ("UNSUPPORTED_MODEL", "tests/fixtures/tiny-laguna/config.json")


def test_a_plan_that_does_not_fit_its_model_names_the_recipe(plan_of):
    with pytest.raises(ReleaseError) as caught:
        plan_of("demo", change=lambda text: text.replace('layers = "all"', 'layers = "9"'))
    assert (caught.value.code, caught.value.file) == ("INVALID_VALUE", "demo.toml")


def test_tables_are_rectangular(plan_of):
    for table in plan_of("hybrid-3.25").tables():
        assert all(len(row) == len(table.columns) for row in table.rows)
        lines = table.text().splitlines()
        assert lines[0] == table.title
        assert not any(line.endswith(" ") for line in lines)


def test_sizes_name_both_units():
    assert gigabytes(56_319_122_624) == "56,319,122,624 B (56.32 GB, 52.45 GiB)"
    assert gigabytes(1_500_000) == "1,500,000 B (1.50 MB, 1.43 MiB)"


@pytest.mark.parametrize("name", NAMES)
def test_the_check_is_held_to_the_numbers_of_the_plan(plan_of, name):
    plan = plan_of(name)
    lines = {(line.measurement, line.op): line.value for line in plan.accepted("check")}
    assert lines["tensors", "=="] == plan.expected.tensors
    assert lines["total_bytes", "=="] == plan.expected.tensor_bytes
    assert lines["effective_bits", "=="] == plan.expected.effective_bits
    assert lines["documents_wrong", "=="] == 0


def test_quantized_values_are_held_to_an_error(plan_of):
    for name, matrices in (("demo", 72), ("nvfp4-w4a16-quality", 42 * 256 * 3)):
        lines = {(line.measurement, line.op): line.value for line in plan_of(name).accepted("check")}
        assert lines["quantized_compared", "=="] == matrices
        assert lines["quantized_error_max", "<="] == ERROR_MAX


SERVED = {"gates/load": "router_biases_compared", "gates/api": "context_length_served"}


@pytest.mark.parametrize("name", NAMES)
def test_gates_demand_what_follows_from_the_model_whatever_the_recipe_says(plan_of, name):
    plan = plan_of(name)
    for stage in plan.stages:
        if stage.handler not in SERVED:
            continue
        lines = {line.measurement: line.value for line in plan.accepted(stage.name) if line.op == "=="}
        assert SERVED[stage.handler] in lines
        assert (lines["overlays_applied"], lines["overlay_fixes_disabled"]) == (1, 0)
        if stage.handler == "gates/load":
            assert lines["tensors_total"] == plan.expected.tensors
            assert lines["quantized_tensors"] > 0
        else:
            assert lines["context_length_served"] == stage.params["launch"]["context_length"]


def test_a_recipe_can_add_and_tighten_and_never_loosen(plan_of):
    looser = '{ measurement = "tensors_absent", op = "<=", value = 99 }, { measurement = "mine", op = "==", value = 1 }'
    again = '{ measurement = "tensors_absent", op = "==", value = 0 }'
    gate = 'handler = "gates/load"\n'
    changed = plan_of("demo", change=lambda text: text.replace(gate, f"{gate}thresholds = [{looser}, {again}]\n"))
    before, after = plan_of("demo").accepted("load"), changed.accepted("load")
    assert after[: len(before)] == before
    assert [line.measurement for line in after[len(before) :]] == ["tensors_absent", "mine"]
    measured = {line.measurement: line.value for line in after} | {"tensors_absent": 1}
    assert judge(after, measured) == (Verdict.FAILED, ("tensors_absent: 1, accepted == 0",))


def test_a_recipe_without_overlay_demands_none(plan_of):
    cut = plan_of("demo", change=lambda text: text.replace('[overlay]\npath = "overlays/laguna"\n', ""))
    assert "overlays_applied" not in {line.measurement for line in cut.accepted("load")}


def test_gates_come_after_the_check(plan_of):
    for name in NAMES:
        kinds = [stage.kind for stage in plan_of(name).stages]
        assert all(kinds.index(a) < kinds.index(b) for a, b in pairwise(("fetch", "build", "check", "gate")))
