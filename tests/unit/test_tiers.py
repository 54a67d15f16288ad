"""Bytes and bits of each stored form, and the laws of a tier map."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from quantmint.checkpoint import TensorSpec
from quantmint.errors import ReleaseError
from quantmint.tiers import (
    LayerTiers,
    Precision,
    TierMap,
    bits_per_weight,
    compressed,
    exl3,
    modelopt,
    nbytes,
    weights_in,
)

GATE = TensorSpec("model.layers.1.mlp.experts.7.gate_proj.weight", "BF16", (1024, 3072))
DOWN = TensorSpec("model.layers.1.mlp.experts.7.down_proj.weight", "BF16", (3072, 1024))

SCORES = st.integers(1, 12).flatmap(
    lambda experts: st.tuples(
        st.dictionaries(
            st.integers(0, 60),
            st.lists(st.floats(-1e6, 1e6), min_size=experts, max_size=experts),
            min_size=1,
            max_size=5,
        ),
        st.integers(0, experts),
    )
)


def shapes(specs):
    return {spec.name.removeprefix("model.layers.1.mlp.experts.7."): (spec.dtype, spec.shape) for spec in specs}


def test_nvfp4_of_modelopt():
    assert shapes(modelopt(GATE, Precision.NVFP4_W4A16)) == {
        "gate_proj.weight": ("U8", (1024, 1536)),
        "gate_proj.weight_scale": ("F8_E4M3", (1024, 192)),
        "gate_proj.weight_scale_2": ("F32", ()),
    }


def test_fp8_of_modelopt():
    assert shapes(modelopt(DOWN, Precision.FP8_W8A8)) == {
        "down_proj.weight": ("F8_E4M3", (3072, 1024)),
        "down_proj.weight_scale": ("F32", ()),
        "down_proj.input_scale": ("F32", ()),
    }


def test_nvfp4_of_compressed_tensors():
    assert shapes(compressed(DOWN)) == {
        "down_proj.weight_packed": ("U8", (3072, 512)),
        "down_proj.weight_scale": ("F8_E4M3", (3072, 64)),
        "down_proj.weight_global_scale": ("F32", ()),
        "down_proj.input_global_scale": ("F32", ()),
    }


def test_exl3_slices_of_a_column_and_a_row_cut():
    found = shapes(exl3(GATE, bits=3, slices=2, codebook="mcg")) | shapes(exl3(DOWN, bits=3, slices=2, codebook="mcg"))
    assert found["gate_proj.rank1.trellis"] == ("I16", (192, 32, 48))
    assert found["gate_proj.rank0.suh"] == ("F16", (3072,))
    assert found["gate_proj.rank0.svh"] == ("F16", (512,))
    assert found["down_proj.rank1.trellis"] == ("I16", (32, 192, 48))
    assert found["down_proj.rank1.suh"] == ("F16", (512,))
    assert found["down_proj.rank0.svh"] == ("F16", (3072,))
    assert found["down_proj.rank0.mcg"] == ("I32", ())
    assert len(found) == 16


def test_an_exl3_expert_slice_has_1_769_472_code_bytes():
    up = TensorSpec(GATE.name.replace("gate", "up"), "BF16", GATE.shape)
    codes = [
        spec
        for tensor in (GATE, up, DOWN)
        for spec in exl3(tensor, bits=3, slices=2, codebook="mcg")
        if "rank0.trellis" in spec.name
    ]
    assert nbytes(codes) == 1_769_472


def test_3inst_stores_no_multiplier():
    assert len(exl3(GATE, bits=4, slices=1, codebook="3inst")) == 3


@given(st.integers(1, 32), st.integers(1, 32), st.integers(1, 8))
def test_bits_of_every_form(rows, columns, bits):
    tensor = TensorSpec("x.gate_proj.weight", "BF16", (rows * 128, columns * 128))
    weights = weights_in([tensor])
    assert bits_per_weight(nbytes(modelopt(tensor, Precision.BF16)), weights) == 16
    assert nbytes(modelopt(tensor, Precision.FP8_W8A8)) * 8 == weights * 8 + 64
    assert nbytes(modelopt(tensor, Precision.NVFP4_W4A16)) * 16 == weights * 9 + 64
    assert nbytes(compressed(tensor)) - nbytes(modelopt(tensor, Precision.NVFP4_W4A16)) == 4
    codes = [spec for spec in exl3(tensor, bits=bits, slices=1, codebook="mcg") if spec.name.endswith("trellis")]
    assert nbytes(codes) * 8 == weights * bits


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 8))
def test_slicing_keeps_the_codes_and_repeats_only_the_hidden_axis(slices, bits):
    whole, cut = (exl3(GATE, bits=bits, slices=count, codebook="mcg") for count in (1, slices))
    kinds = {
        kind: [nbytes([s for s in specs if s.name.endswith(kind)]) for specs in (whole, cut)]
        for kind in ("trellis", "suh", "svh")
    }
    assert kinds["trellis"][0] == kinds["trellis"][1]
    assert kinds["svh"][0] == kinds["svh"][1]
    assert kinds["suh"][0] * slices == kinds["suh"][1]


@pytest.mark.parametrize(
    ("tensor", "slices"), [(GATE, 3), (GATE, 16), (DOWN, 16), (TensorSpec("x.up_proj.weight", "BF16", (64, 128)), 1)]
)
def test_a_cut_inside_a_hadamard_block_is_refused(tensor, slices):
    with pytest.raises(ReleaseError, match="slices") as caught:
        exl3(tensor, bits=3, slices=slices, codebook="mcg")
    assert caught.value.code == "INVALID_VALUE"


@pytest.mark.parametrize("form", [compressed, lambda tensor: modelopt(tensor, Precision.NVFP4_W4A16)])
def test_an_axis_that_does_not_fall_into_groups_is_refused(form):
    with pytest.raises(ReleaseError, match="groups"):
        form(TensorSpec("x.weight", "BF16", (16, 24)))


@given(SCORES)
def test_tiers_partition_the_experts(given_scores):
    scores, hot = given_scores
    chosen = TierMap.choose(scores, hot)
    for layer, values in scores.items():
        assert sorted((*chosen.hot(layer), *chosen.tail(layer))) == list(range(len(values)))
        assert len(chosen.hot(layer)) == hot
        for kept in chosen.hot(layer):
            for left in chosen.tail(layer):
                assert (values[kept], -kept) > (values[left], -left)


@given(SCORES)
def test_a_tier_map_survives_its_json(given_scores):
    chosen = TierMap.choose(*given_scores)
    assert TierMap.model_validate_json(json.dumps(chosen.as_json())) == chosen


def test_equal_scores_keep_the_lower_expert():
    assert TierMap.choose({3: [1.0, 2.0, 1.0, 1.0]}, 2).hot(3) == (0, 1)


@pytest.mark.parametrize(
    "scores", [{1: [1.0], 2: [1.0, 2.0]}, {1: [float("nan"), 1.0]}, {1: [float("inf"), 1.0]}, {}, {1: []}]
)
def test_scores_that_cannot_be_ranked_are_refused(scores):
    with pytest.raises(ReleaseError) as caught:
        TierMap.choose(scores, 1)
    assert caught.value.code == "INVALID_VALUE"


@pytest.mark.parametrize("hot", [(1, 0), (0, 0), (4,)])
def test_a_tier_map_that_is_no_partition_is_refused(hot):
    with pytest.raises(ValidationError):
        TierMap(experts=4, layers=(LayerTiers(layer=1, hot=hot),))


def test_a_tier_map_names_each_layer_once():
    with pytest.raises(ValidationError, match="ascending"):
        TierMap(experts=2, layers=(LayerTiers(layer=1, hot=(0,)), LayerTiers(layer=1, hot=(1,))))
    with pytest.raises(KeyError):
        TierMap(experts=2, layers=()).hot(1)
