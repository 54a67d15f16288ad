"""A placement is total, names each module once, and its tensors follow from it alone."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmint.errors import ReleaseError
from quantmint.geometry import Geometry, Role
from quantmint.placement import Placement, Rule, compact, layer_numbers
from quantmint.tiers import Precision

LAYERS = st.sets(st.integers(0, 60), min_size=1)

CONFIG = {
    "model_type": "laguna", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 32, "num_experts": 2,
    "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
TINY = Geometry.of(CONFIG)


@pytest.fixture(scope="session")
def tiny(root):
    return Geometry.of(json.loads((root / "tests/fixtures/tiny-laguna/config.json").read_bytes()))


def rule(modules, layers, precision="nvfp4-w4a16"):
    return Rule(modules=modules, layers=layers, precision=Precision(precision))


@given(LAYERS)
def test_compact_ranges_are_read_back(layers):
    assert layer_numbers(compact(layers)) == tuple(sorted(layers))


@pytest.mark.parametrize("text", ["", "1-", "-1", "1,,2", "5-3", "1,1", "1-3,2", "all,1", "one", "1 - 2", "1\n"])
def test_ranges_that_mean_nothing_are_refused(text):
    with pytest.raises(ReleaseError) as caught:
        layer_numbers(text)
    assert caught.value.code == "INVALID_VALUE"


def test_unplaced_modules_stay_as_they_are(tiny):
    placement = Placement.of([], tiny)
    assert [(entry.spec, entry.copied) for entry in placement.stored()] == [
        (tensor.spec, True) for tensor in tiny.tensors
    ]


def test_all_means_every_layer_that_has_the_module(tiny):
    placement = Placement.of([rule("routed-experts", "all"), rule("dense-mlp", "all", "fp8-w8a8")], tiny)
    assert placement.by_layer() == {"routed-experts": {"nvfp4-w4a16": "1-3"}, "dense-mlp": {"fp8-w8a8": "0"}}


def test_only_matrices_are_ever_quantized(tiny):
    placement = Placement.of([rule("attention", "all"), rule("routed-experts", "all")], tiny)
    changed = {entry.source.role for entry in placement.stored() if entry.source is not None and not entry.copied}
    assert changed == {Role.ATTENTION, Role.ROUTED_EXPERTS}
    assert all(
        len(entry.source.shape) == 2 for entry in placement.stored() if entry.source is not None and not entry.copied
    )


def test_kv_scales_stand_beside_their_projections(tiny):
    scales = [e.spec.name for e in Placement.of([], tiny, kv_scales=True).stored() if e.source is None]
    assert len(scales) == 8
    assert scales[0] == "model.layers.0.self_attn.k_proj.k_scale"
    assert scales[1] == "model.layers.0.self_attn.v_proj.v_scale"


@given(st.dictionaries(st.sampled_from([1, 2, 3]), st.sampled_from(list(Precision))))
def test_bytes_are_additive_over_layers(placed):
    rules = [rule("routed-experts", str(layer), precision.value) for layer, precision in placed.items()]

    def total(some):
        return sum(entry.spec.nbytes for entry in Placement.of(some, TINY).stored())

    plain = total([])
    assert total(rules) - plain == sum(total([one]) - plain for one in rules)
    assert total(rules) <= plain


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ([("routed-experts", "0")], "layer 0 has no routed-experts"),
        ([("routed-experts", "1-4")], "layer 4 has no routed-experts"),
        ([("dense-mlp", "1")], "layer 1 has no dense-mlp"),
        ([("routed-experts", "1-2"), ("routed-experts", "2-3")], "placed twice"),
        ([("routed-experts", "all"), ("routed-experts", "1")], "placed twice"),
    ],
)
def test_a_placement_that_does_not_fit_its_model(tiny, rules, named):
    with pytest.raises(ReleaseError, match=named) as caught:
        Placement.of([rule(*each) for each in rules], tiny)
    assert caught.value.code == "INVALID_VALUE"


def test_a_weight_that_does_not_fall_into_groups_is_refused():
    odd = Geometry.of({**CONFIG, "moe_intermediate_size": 40})
    with pytest.raises(ReleaseError, match="groups"):
        Placement.of([rule("routed-experts", "1")], odd)
