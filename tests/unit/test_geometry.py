"""The tensors of a model follow from its configuration: the real ones in number and bytes, the small one in full."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from quantmint.errors import ReleaseError
from quantmint.geometry import Geometry, Role
from quantmint.plan import kv_scales_of_source
from quantmint.quantize.files import read_index
from quantmint.tiers import compressed, nbytes


@pytest.fixture(scope="session")
def real(root):
    return Geometry.of(json.loads((root / "manifests/models/laguna-s-2.1.json").read_bytes()))


@pytest.fixture
def config(root):
    return json.loads((root / "tests/fixtures/tiny-laguna/config.json").read_bytes())


def test_laguna_s_has_117_6_billion_weights(real):
    assert sum(tensor.nbytes for tensor in real.tensors) == 235_123_979_264
    assert len(real.tensors) == 36_769
    assert len(real.sparse_layers) == 47


def test_non_expert_tensors_of_laguna_s(real):
    """673 tensors; the 8,027,583,680 bytes that are published for them hold the 96 KV-cache scales as well."""
    others = [tensor for tensor in real.tensors if tensor.role is not Role.ROUTED_EXPERTS]
    scales = kv_scales_of_source(real)
    assert (len(others), len(scales)) == (673, 96)
    assert sum(tensor.nbytes for tensor in others) + nbytes(scales) == 8_027_583_680
    assert Counter(tensor.role.value for tensor in others) == {
        "attention": 240, "norm": 193, "shared-expert": 141, "router": 47, "router-bias": 47,
        "dense-mlp": 3, "embedding": 1, "head": 1,
    }  # fmt: skip


def test_the_nvfp4_layouts_that_are_published(real):
    """145,153 tensors of 71,898,733,760 bytes in July 2026; 126,625 since August, with layers 40-47 in BF16."""
    experts = [tensor for tensor in real.tensors if tensor.role is Role.ROUTED_EXPERTS]
    others = [tensor for tensor in real.tensors if tensor.role is not Role.ROUTED_EXPERTS]
    july = [spec for tensor in experts for spec in compressed(tensor.spec)] + [tensor.spec for tensor in others]
    july += kv_scales_of_source(real)
    assert (len(july), nbytes(july)) == (145_153, 71_898_733_760)
    august = [tensor.spec for tensor in others]
    for tensor in experts:
        august += compressed(tensor.spec) if tensor.layer is not None and tensor.layer < 40 else (tensor.spec,)
    assert len(august) == 126_625


def test_query_heads_follow_the_attention_kind(real):
    shapes = {tensor.name: tensor.shape for tensor in real.tensors}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (6144, 3072)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (9216, 3072)
    assert shapes["model.layers.1.self_attn.g_proj.weight"] == (72, 3072)
    assert shapes["model.layers.4.self_attn.o_proj.weight"] == (3072, 6144)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (3072, 12288)
    assert "model.layers.0.mlp.gate.weight" not in shapes


def test_the_small_model_is_what_its_configuration_says(root, config):
    index = read_index(root / "tests/fixtures/tiny-laguna")
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in Geometry.of(config).tensors} == {
        name: (entry.dtype, entry.shape) for name, entry in index.tensors.items()
    }


def test_gating_per_element_widens_the_gate(config):
    shapes = {tensor.name: tensor.shape for tensor in Geometry.of({**config, "gating": "per-element"}).tensors}
    assert shapes["model.layers.0.self_attn.g_proj.weight"] == shapes["model.layers.0.self_attn.q_proj.weight"]


def test_tied_embeddings_have_no_head_and_biases_appear(config):
    roles = Counter(tensor.role for tensor in Geometry.of({**config, "tie_word_embeddings": True}).tensors)
    assert roles[Role.HEAD] == 0
    biased = Geometry.of({**config, "attention_bias": True}).tensors
    assert sum(tensor.name.endswith(".bias") for tensor in biased) == 4 * config["num_hidden_layers"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 256.0}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads_per_layer": [6]}, "1 entries for 4 layers"),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "odd"]}, "mlp_layer_types"),
        ({"num_experts_per_tok": 9}, "experts per token"),
        ({"num_experts": 65536, "num_hidden_layers": 1000, "mlp_layer_types": None}, "entries for 1000 layers"),
        ({"dtype": "float16"}, "dtype"),
        ({"gating": "none"}, "gating"),
    ],
)
def test_a_configuration_that_is_not_understood(config, change, named):
    with pytest.raises(ReleaseError, match=named) as caught:
        Geometry.of({**config, **change}, file="some.json")
    assert (caught.value.code, caught.value.file) == ("UNSUPPORTED_MODEL", "some.json")


def test_a_configuration_cannot_ask_for_endless_tensors(config):
    huge = {**config, "num_experts": 65536, "num_hidden_layers": 1000}
    huge["mlp_layer_types"] = huge["num_attention_heads_per_layer"] = None
    with pytest.raises(ReleaseError, match="expert tensors"):
        Geometry.of(huge)


@pytest.mark.parametrize("value", [None, [], "laguna", 1])
def test_a_configuration_that_is_no_object(value):
    with pytest.raises(ReleaseError, match="model_type"):
        Geometry.of(value)
