"""The laguna architecture in compact torch, for training: dense compute of all experts, masked by the router.

The same function as transformers' LagunaForCausalLM (test_tiny_laguna.py compares the logits); `export` writes the
published tensor names. Nothing here reads prompts or knows a task.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

LAYER_TYPES = ("full_attention", "sliding_attention", "full_attention", "full_attention")
CONFIG: dict[str, Any] = {
    "architectures": ["LagunaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "eos_token_id": [2, 24],
    "gating": "per-head",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "layer_types": list(LAYER_TYPES),
    "max_position_embeddings": 32768,
    "mlp_layer_types": ["dense"] + ["sparse"] * (len(LAYER_TYPES) - 1),
    "model_type": "laguna",
    "moe_apply_router_weight_on_input": False,
    "moe_intermediate_size": 256,
    "moe_routed_scaling_factor": 2.5,
    "moe_router_logit_softcapping": 0.0,
    "num_attention_heads": 6,
    "num_attention_heads_per_layer": [6 if t == "full_attention" else 8 for t in LAYER_TYPES],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": len(LAYER_TYPES),
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": 9,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {
            "attention_factor": 1.0,
            "beta_fast": 64.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.5,
            "rope_theta": 500000.0,
            "rope_type": "yarn",
        },
        "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 10000.0, "rope_type": "default"},
    },
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 256,
    "sliding_window": 512,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 1024,
}
GENERATION = {"bos_token_id": 2, "do_sample": True, "eos_token_id": [2, 24], "pad_token_id": 9, "temperature": 0.7, "top_k": 20,
              "top_p": 0.95}  # fmt: skip


def inverse_frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Rotary inverse frequencies, float32 [dim / 2]; YaRN as in arXiv 2309.00071, attention factor 1."""
    dim, base = int(head_dim * rope["partial_rotary_factor"]), rope["rope_theta"]
    plain = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
    if rope["rope_type"] == "default":
        return plain

    def at(turns: float) -> float:
        return float(
            dim * math.log(rope["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(base))
        )

    low, high = max(math.floor(at(rope["beta_fast"])), 0), min(math.ceil(at(rope["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / rope["factor"] * ramp + plain * (1 - ramp)


class Norm(nn.Module):
    """RMSNorm in float32, scaled in the activation dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        f = x.float()
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * f.to(x.dtype)


def sliding_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention to the last `window` positions (the own one included), by blocks of `window`; [B, H, T, D]."""
    b, h, t, d = q.shape
    if t <= window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    n = -(-t // window)
    q = F.pad(q, (0, 0, 0, n * window - t)).view(b, h, n, window, d)
    k, v = (F.pad(x, (0, 0, window, n * window - t)).unfold(2, 2 * window, window).transpose(-1, -2) for x in (k, v))
    row, col = torch.arange(window, device=q.device)[:, None], torch.arange(2 * window, device=q.device)[None]
    mask = ((col <= row + window) & (col > row)).expand(n, 1, window, 2 * window).clone()
    mask[0] &= col >= window
    q, k, v = (x.transpose(1, 2).reshape(b * n, h, -1, d) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.repeat(b, 1, 1, 1))
    return out.view(b, n, h, window, d).transpose(1, 2).reshape(b, h, n * window, d)[:, :, :t]


class Attention(nn.Module):
    """Grouped-query attention with q/k norms, rotary embedding and a softplus gate per head."""

    def __init__(self, c: dict[str, Any], layer: int) -> None:
        super().__init__()
        self.heads, self.kv, self.dim = (
            c["num_attention_heads_per_layer"][layer],
            c["num_key_value_heads"],
            c["head_dim"],
        )
        self.window = c["sliding_window"] if c["layer_types"][layer] == "sliding_attention" else 0
        hidden = c["hidden_size"]
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.g_proj = nn.Linear(hidden, self.heads, bias=False)
        self.q_norm, self.k_norm = Norm(self.dim, c["rms_norm_eps"]), Norm(self.dim, c["rms_norm_eps"])

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = cos.shape[-1]
        a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv, self.dim).transpose(1, 2)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        group = self.heads // self.kv
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if self.window:
            out = sliding_attention(q, k, v, self.window)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gate = F.softplus(self.g_proj(x).float()).to(out.dtype)
        out = out.transpose(1, 2) * gate.unsqueeze(-1)
        return self.o_proj(out.reshape(b, t, -1))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Moe(nn.Module):
    """Sigmoid router with a selection bias, routed experts (computed densely) and one shared expert."""

    load: Tensor
    bias: Tensor

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h, self.inner, self.experts = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
        self.top, self.scale = c["num_experts_per_tok"], c["moe_routed_scaling_factor"]
        self.gate = nn.Linear(h, self.experts, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(self.experts * self.inner, h))
        self.up_proj = nn.Parameter(torch.empty(self.experts * self.inner, h))
        self.down_proj = nn.Parameter(torch.empty(self.experts, h, self.inner))
        self.shared_expert = Mlp(h, c["shared_expert_intermediate_size"])
        self.register_buffer("bias", torch.zeros(self.experts))
        self.register_buffer("load", torch.zeros(self.experts), persistent=False)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        scores = torch.sigmoid(self.gate(x).float())
        chosen = (scores + self.bias).topk(self.top, dim=-1).indices
        mask = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        if valid is not None:
            self.load += (mask * valid.unsqueeze(-1)).sum((0, 1)).detach()
        weight = scores * mask
        weight = (weight / weight.sum(-1, keepdim=True) * self.scale).to(x.dtype)
        inner = F.silu(F.linear(x, self.gate_proj)) * F.linear(x, self.up_proj)
        inner = inner.view(*x.shape[:-1], self.experts, self.inner) * weight.unsqueeze(-1)
        down = self.down_proj.transpose(0, 1).reshape(x.shape[-1], -1)
        return F.linear(inner.flatten(-2), down) + self.shared_expert(x)  # type: ignore[no-any-return]

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """One sign update of the selection bias (arXiv 2408.15664), then forget the counts."""
        if rate > 0:
            self.bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Layer(nn.Module):
    """Pre-norm block; layer 0 is dense."""

    def __init__(self, c: dict[str, Any], layer: int) -> None:
        super().__init__()
        self.kind = c["layer_types"][layer]
        self.input_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        dense = c["mlp_layer_types"][layer] == "dense"
        self.mlp: nn.Module = Mlp(c["hidden_size"], c["intermediate_size"]) if dense else Moe(c)

    def forward(self, x: Tensor, rope: dict[str, tuple[Tensor, Tensor]], valid: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *rope[self.kind])
        h = self.post_attention_layernorm(x)
        y = self.mlp(h, valid) if isinstance(self.mlp, Moe) else self.mlp(h)
        return x + y  # type: ignore[no-any-return]


class TinyLaguna(nn.Module):
    """Token ids [B, T] to final hidden states [B, T, hidden]; `head` gives logits."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        c = self.config = config or CONFIG
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                std = 0.05 / math.sqrt(2 * len(self.layers)) if "o_proj" in name or "down_proj" in name else 0.05
                nn.init.normal_(p, std=0.3 if name.startswith("embed") else 0.02 if name.startswith("lm_head") else std)

    def moes(self) -> list[Moe]:
        """The sparse blocks in layer order."""
        return [layer.mlp for layer in self.layers if isinstance(layer, Layer) and isinstance(layer.mlp, Moe)]

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.float32, count: bool = False) -> Tensor:
        c = self.config
        rope = {}
        for kind in set(c["layer_types"]):
            freq = inverse_frequencies(c["rope_parameters"][kind], c["head_dim"]).to(ids.device)
            angle = torch.outer(torch.arange(ids.shape[1], device=ids.device).float(), freq)
            rope[kind] = (angle.cos().to(dtype), angle.sin().to(dtype))
        valid = (ids != c["pad_token_id"]).float() if count else None
        x = self.embed_tokens(ids).to(dtype)
        for layer in self.layers:
            x = layer(x, rope, valid)
        return self.norm(x)  # type: ignore[no-any-return]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of final hidden states."""
        return self.lm_head(hidden)  # type: ignore[no-any-return]

    def tensors(self) -> dict[str, Tensor]:
        """Published names: one tensor per expert; BF16 but for the float32 selection bias."""
        out: dict[str, Tensor] = {}
        for name, held in self.state_dict().items():
            p = held.detach().cpu()
            prefix = name.rsplit(".", 1)[0]
            if name.endswith("mlp.bias"):
                out[f"model.{prefix}.experts.e_score_correction_bias"] = p.float().clone()
            elif name.endswith(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")):
                rows = p if p.dim() == 3 else p.view(self.config["num_experts"], -1, p.shape[-1])
                for i, row in enumerate(rows):
                    out[f"model.{prefix}.experts.{i}.{name.rsplit('.', 1)[1]}.weight"] = row.bfloat16().clone()
            else:
                out[name if name.startswith("lm_head") else f"model.{name}"] = p.bfloat16().clone()
        return dict(sorted(out.items()))


def export(model: TinyLaguna, out: Path, shard_bytes: int = 9_000_000) -> None:
    """Write config, generation config, safetensors shards and their index; one metadata key, no time, no path."""
    out.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in model.tensors().items():
        if size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    where: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)
        where.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    for file, body in (
        ("model.safetensors.index.json", index),
        ("config.json", model.config),
        ("generation_config.json", GENERATION),
    ):
        (out / file).write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")


def load(folder: Path) -> TinyLaguna:
    """A float32 model with the weights of an exported folder."""
    model = TinyLaguna(json.loads((folder / "config.json").read_text()))
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        with safe_open(file, "pt") as f:
            found.update({name: f.get_tensor(name).float() for name in f.keys()})
    state = {}
    for name, p in model.state_dict().items():
        prefix, last = name.rsplit(".", 1)
        if name.endswith("mlp.bias"):
            state[name] = found.pop(f"model.{prefix}.experts.e_score_correction_bias")
        elif name.endswith(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")):
            rows = [found.pop(f"model.{prefix}.experts.{i}.{last}.weight") for i in range(model.config["num_experts"])]
            state[name] = torch.stack(rows).view_as(p)
        else:
            state[name] = found.pop(name if name.startswith("lm_head") else f"model.{name}")
    if found:
        raise ValueError(f"unexpected tensors: {sorted(found)[:3]}")
    model.load_state_dict(state)
    return model
