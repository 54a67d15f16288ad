"""The fixes themselves: each takes the record of served layers and patches vLLM in this process.

Reached only from `register`, after every function named here was found to be the known one.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any

from quantmint_overlay_laguna.nvfp4 import dequantize

if TYPE_CHECKING:
    import torch

    from quantmint_overlay_laguna.knowledge import Overlay

BIAS = "e_score_correction_bias"
EMULATION = "dequantized emulation"
_LOGGER = logging.getLogger("vllm.quantmint_overlay_laguna")

Served = dict[str, int]
"""Fix → number of layers it has served in this process."""


def installed(overlay: Overlay) -> dict[str, str]:
    """Distribution → version of everything installed that may provide vLLM."""
    found = {}
    for name in {"vllm", *(engine.distribution for engine in overlay.engines)}:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device() -> str:
    """The device type as vLLM calls it: cpu, cuda and so on."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def source(function: str) -> str:
    """Source text of `module:qualified.name` as it would run now, seen through no decorator and no patch.

    Raises:
        ImportError: no such module.
        AttributeError: no such name.
        TypeError: not a plain Python function.
        OSError: its source is not available.
    """
    module, _, path = function.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    code = getattr(found, "__code__", None)
    if code is None:
        raise TypeError(f"{path} is not a plain function")
    return inspect.getsource(code)


def router_bias(served: Served) -> None:
    """Load `mlp.experts.e_score_correction_bias`, which no row of vLLM's expert mapping matches, and insist on it."""
    import torch
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.models.laguna import LagunaForCausalLM

    stock_experts = RoutedExperts.load_weights
    stock_model = LagunaForCausalLM.load_weights
    filled = "_quantmint_router_bias_loaded"

    def load_experts(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
        taken: list[str] = []

        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                parameter = getattr(self, BIAS, None)
                if name != BIAS or parameter is None:
                    yield name, tensor
                    continue
                if parameter.shape != tensor.shape:
                    raise ValueError(f"{self.layer_name}.{BIAS}: {tuple(tensor.shape)}, not {tuple(parameter.shape)}")
                parameter.data.copy_(tensor)
                if not torch.equal(parameter.data.to(tensor.dtype), tensor.to(parameter.device)):
                    raise ValueError(f"{self.layer_name}.{BIAS}: {tensor.dtype} does not fit {parameter.dtype} exactly")
                setattr(self, filled, True)
                served["router-bias"] = served.get("router-bias", 0) + 1
                taken.append(name)

        yield from stock_experts(self, others())
        yield from taken

    def load_model(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded: set[str] = stock_model(self, weights)
        empty = [
            name
            for name, module in self.named_modules()
            if isinstance(module, RoutedExperts)
            and getattr(module, BIAS, None) is not None
            and not getattr(module, filled, False)
        ]
        if empty:
            raise RuntimeError(f"the checkpoint gave no {BIAS} for {', '.join(empty)}")
        return loaded

    RoutedExperts.load_weights = load_experts
    LagunaForCausalLM.load_weights = load_model


def cpu_router(_served: Served) -> None:
    """Sigmoid top-k on CPU: the same function as grouped top-k with one group of which one is chosen."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router as engine

    stock = engine.CPURouter._compute_routing  # noqa: SLF001  the function that overlay.toml pins

    def compute_routing(
        self: Any, hidden_states: Any, router_logits: Any, indices_type: Any, *, input_ids: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.use_grouped_topk or self.scoring_func != "sigmoid" or self.custom_routing_function is not None:
            chosen: tuple[torch.Tensor, torch.Tensor] = stock(
                self, hidden_states, router_logits, indices_type, input_ids=input_ids
            )
            return chosen
        grouped: tuple[torch.Tensor, torch.Tensor] = engine._grouped_topk(  # noqa: SLF001  pinned too
            gating_output=router_logits,
            topk=self.top_k,
            renormalize=self.renormalize,
            num_expert_group=1,
            topk_group=1,
            scoring_func="sigmoid",
            routed_scaling_factor=self.routed_scaling_factor,
            e_score_correction_bias=self.e_score_correction_bias,
        )
        return grouped

    engine.CPURouter._compute_routing = compute_routing  # noqa: SLF001


class DequantizedLinear:
    """Stands where vLLM expects an NVFP4 linear kernel: dequantizes once after loading, then multiplies plainly."""

    supports_pre_processed_weights = False

    def __init__(self, dtype: torch.dtype, served: Served) -> None:
        self._dtype = dtype
        self._served = served

    def input_quant_key(self) -> None:
        """Activations stay as they are."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace `layer.weight` uint8 [N, K/2] by its values [N, K]."""
        from torch.nn import Parameter

        values = dequantize(
            layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data.view(1, 1), self._dtype
        )
        layer.weight = Parameter(values, requires_grad=False)
        del layer.weight_scale, layer.weight_global_scale
        self._served["cpu-nvfp4-linears"] = self._served.get("cpu-nvfp4-linears", 0) + 1

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """X [T, K] → [T, N]."""
        from torch.nn.functional import linear

        return linear(x, layer.weight, bias)


def dequantize_experts(layer: Any) -> None:
    """Replace the experts of `layer`, w13 uint8 [E, 2N, K/2] and w2 uint8 [E, K, N/2], by values; drop the scales.

    Each row of w13 takes the global scale of its own projection: gate and up may differ.
    """
    import torch
    from torch.nn import Parameter

    rows = layer.w13_weight.shape[1] // layer.w13_weight_scale_2.shape[1]
    w13_scale_2 = layer.w13_weight_scale_2.data.repeat_interleave(rows, dim=1).unsqueeze(-1)
    w2_scale_2 = layer.w2_weight_scale_2.data.view(-1, 1, 1)
    for name, global_scale in (("w13_weight", w13_scale_2), ("w2_weight", w2_scale_2)):
        codes, blocks = getattr(layer, name).data, getattr(layer, f"{name}_scale").data
        values = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=layer.params_dtype)
        for expert in range(codes.shape[0]):
            values[expert] = dequantize(codes[expert], blocks[expert], global_scale[expert], values.dtype)
        setattr(layer, name, Parameter(values, requires_grad=False))
    for name in ("weight_scale", "weight_scale_2", "input_scale"):
        delattr(layer, f"w13_{name}")
        delattr(layer, f"w2_{name}")


def cpu_nvfp4(served: Served) -> None:
    """Serve ModelOpt W4A16 NVFP4 on CPU, which has no kernel for it, by dequantizing once after loading."""
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization import modelopt

    stock_select = modelopt.select_linear_kernel
    method = modelopt.ModelOptNvFp4FusedMoE

    def select(spec: Any, layer: Any, rt: Any, weight_shape: Any = None) -> Any:
        if spec.weight.dtype != modelopt.FP4_DTYPE or spec.activation is not None:
            return stock_select(spec, layer, rt, weight_shape=weight_shape)
        return DequantizedLinear(rt.out_dtype, served)

    def construct(self: Any, quant_config: Any, moe_config: Any) -> None:
        if quant_config.quant_method != "W4A16_NVFP4":
            raise NotImplementedError(f"on CPU only W4A16_NVFP4 is emulated, not {quant_config.quant_method}")
        FusedMoEMethodBase.__init__(self, moe_config)
        self.quant_config = quant_config
        self.use_a16 = True
        self.per_token_activation = False
        self.use_global_sf = False
        self.nvfp4_backend = NvFp4MoeBackend.EMULATION
        self.quantmint_label = EMULATION
        self.plain = UnquantizedFusedMoEMethod(moe_config)
        self.experts_cls = self.plain.experts_cls

    def finish(self: Any, layer: Any) -> None:
        dequantize_experts(layer)
        self.plain.process_weights_after_loading(layer)
        self.moe_kernel, self.moe_quant_config = self.plain.moe_kernel, self.plain.moe_quant_config
        served["cpu-nvfp4"] = served.get("cpu-nvfp4", 0) + 1
        if served["cpu-nvfp4"] == 1:
            _LOGGER.warning("NVFP4 experts run as %s in %s on this device", EMULATION, layer.params_dtype)

    def quant_config_of(self: Any, layer: Any) -> Any:
        return self.plain.get_fused_moe_quant_config(layer)

    modelopt.select_linear_kernel = select
    method.__init__ = construct
    method.process_weights_after_loading = finish
    method.get_fused_moe_quant_config = quant_config_of


FIXES: dict[str, Callable[[Served], None]] = {
    "router-bias": router_bias,
    "cpu-router": cpu_router,
    "cpu-nvfp4": cpu_nvfp4,
}
"""Name in overlay.toml → the fix."""
