"""What tensors a model has: from its config.json alone to the name, shape, dtype, role and layer of each.

The published layout of the `laguna` architecture, one tensor per expert. Values only; nothing here reads a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from quantmint.checkpoint import TensorSpec
from quantmint.document import Received
from quantmint.errors import ReleaseError

Extent = Annotated[int, Field(gt=0, le=2**24)]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
MAX_TENSORS = 2_000_000


class Role(StrEnum):
    """What a tensor is for."""

    ROUTED_EXPERTS = "routed-experts"
    SHARED_EXPERT = "shared-expert"
    ROUTER = "router"
    ROUTER_BIAS = "router-bias"
    ATTENTION = "attention"
    NORM = "norm"
    EMBEDDING = "embedding"
    HEAD = "head"
    DENSE_MLP = "dense-mlp"


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of the unquantized model. `layer` and `expert` are None where they mean nothing."""

    spec: TensorSpec
    role: Role
    layer: int | None = None
    expert: int | None = None

    @property
    def name(self) -> str:
        """Published name."""
        return self.spec.name

    @property
    def dtype(self) -> str:
        """Safetensors dtype."""
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major shape."""
        return self.spec.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the unquantized tensor."""
        return self.spec.nbytes


class Geometry(Received):
    """The fields of a `laguna` config.json that decide its tensors."""

    model_type: Literal["laguna"]
    hidden_size: Extent
    intermediate_size: Extent
    num_hidden_layers: Annotated[int, Field(gt=0, le=1024)]
    num_attention_heads: Extent
    num_attention_heads_per_layer: tuple[Extent, ...] | None = None
    num_key_value_heads: Extent
    head_dim: Extent
    vocab_size: Extent
    num_experts: Annotated[int, Field(gt=0, le=65536)]
    num_experts_per_tok: Extent
    moe_intermediate_size: Extent
    shared_expert_intermediate_size: Extent
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = None
    gating: bool | Literal["per-head", "per-element"] = True
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: Literal["bfloat16"] = "bfloat16"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in ("num_attention_heads_per_layer", "mlp_layer_types"):
            given = getattr(self, name)
            if given is not None and len(given) != self.num_hidden_layers:
                raise ValueError(f"{name} has {len(given)} entries for {self.num_hidden_layers} layers")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"{self.num_experts_per_tok} experts per token of {self.num_experts}")
        if len(self.sparse_layers) * self.num_experts * 3 > MAX_TENSORS:
            raise ValueError(f"more than {MAX_TENSORS} expert tensors")
        return self

    @classmethod
    def of(cls, config: Any, *, file: str = "config.json") -> Geometry:
        """The geometry of a parsed config.json.

        Raises:
            ReleaseError: UNSUPPORTED_MODEL when it is not a `laguna` configuration that is understood here.
        """
        value = dict(config) if isinstance(config, dict) else {}
        if "torch_dtype" in value:
            value.setdefault("dtype", value["torch_dtype"])
        for name in ("num_attention_heads_per_layer", "mlp_layer_types"):
            if isinstance(value.get(name), list):
                value[name] = tuple(value[name])
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "configuration"
            raise ReleaseError(
                "UNSUPPORTED_MODEL",
                f"{where}: {first['msg']}",
                file=file,
                expected="a laguna configuration",
                actual=repr(first.get("input"))[:80],
            ) from None

    @cached_property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with routed experts; by default all but layer 0."""
        if self.mlp_layer_types is None:
            return tuple(range(1, self.num_hidden_layers))
        return tuple(layer for layer, kind in enumerate(self.mlp_layer_types) if kind == "sparse")

    @cached_property
    def tensors(self) -> tuple[ModelTensor, ...]:
        """Every tensor of the published checkpoint: embedding, layers in order, final norm, head."""
        found = tuple(self._tensors())
        assert all(count == 1 for count in Counter(tensor.name for tensor in found).values())
        return found

    def heads(self, layer: int) -> int:
        """Query heads of `layer`."""
        return (
            self.num_attention_heads_per_layer[layer]
            if self.num_attention_heads_per_layer
            else self.num_attention_heads
        )

    def _tensors(self) -> Iterator[ModelTensor]:
        vocabulary = (self.vocab_size, self.hidden_size)
        yield ModelTensor(TensorSpec("model.embed_tokens.weight", "BF16", vocabulary), Role.EMBEDDING)
        for layer in range(self.num_hidden_layers):
            yield from self._attention(layer)
            if layer in self.sparse_layers:
                yield from self._sparse(layer)
            else:
                yield from self._mlp(f"model.layers.{layer}.mlp", self.intermediate_size, Role.DENSE_MLP, layer)
        yield ModelTensor(TensorSpec("model.norm.weight", "BF16", (self.hidden_size,)), Role.NORM)
        if not self.tie_word_embeddings:
            yield ModelTensor(TensorSpec("lm_head.weight", "BF16", vocabulary), Role.HEAD)

    def _attention(self, layer: int) -> Iterator[ModelTensor]:
        prefix, hidden, width = f"model.layers.{layer}", self.hidden_size, self.heads(layer) * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        gate = self.heads(layer) if self.gating in (True, "per-head") else width
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield ModelTensor(TensorSpec(f"{prefix}.{norm}.weight", "BF16", (hidden,)), Role.NORM, layer)
        for norm in ("q_norm", "k_norm"):
            yield ModelTensor(
                TensorSpec(f"{prefix}.self_attn.{norm}.weight", "BF16", (self.head_dim,)), Role.NORM, layer
            )
        shapes = {
            "q": (width, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden),
            "o": (hidden, width),
            "g": (gate, hidden),
        }
        for letter, shape in shapes.items():
            name = f"{prefix}.self_attn.{letter}_proj"
            yield ModelTensor(TensorSpec(f"{name}.weight", "BF16", shape), Role.ATTENTION, layer)
            if self.attention_bias and letter != "g":
                yield ModelTensor(TensorSpec(f"{name}.bias", "BF16", shape[:1]), Role.ATTENTION, layer)

    def _sparse(self, layer: int) -> Iterator[ModelTensor]:
        prefix = f"model.layers.{layer}.mlp"
        yield ModelTensor(
            TensorSpec(f"{prefix}.gate.weight", "BF16", (self.num_experts, self.hidden_size)), Role.ROUTER, layer
        )
        bias = f"{prefix}.experts.e_score_correction_bias"
        yield ModelTensor(TensorSpec(bias, "F32", (self.num_experts,)), Role.ROUTER_BIAS, layer)
        yield from self._mlp(f"{prefix}.shared_expert", self.shared_expert_intermediate_size, Role.SHARED_EXPERT, layer)
        for expert in range(self.num_experts):
            name = f"{prefix}.experts.{expert}"
            yield from self._mlp(name, self.moe_intermediate_size, Role.ROUTED_EXPERTS, layer, expert)

    def _mlp(self, name: str, inner: int, role: Role, layer: int, expert: int | None = None) -> Iterator[ModelTensor]:
        for projection in PROJECTIONS:
            shape = (self.hidden_size, inner) if projection == "down_proj" else (inner, self.hidden_size)
            yield ModelTensor(TensorSpec(f"{name}.{projection}.weight", "BF16", shape), role, layer, expert)
