"""NVFP4 as ModelOpt stores it, turned back into plain numbers with one rounding.

Nothing here knows the engine.
"""

from __future__ import annotations

import torch

GROUP = 16
"""Elements along the input axis that share one block scale."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(
    codes: torch.Tensor, block_scale: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Code by block scale by global scale, in float64, rounded once to `dtype` (BF16 or float32).

    `codes`: uint8 [N, K/2], the even element in the low nibble, the sign in bit 3 of each. `block_scale`: E4M3
    [N, K/16]. `global_scale`: float32, broadcastable to [N, 1]. Result: `dtype` [N, K]. The product needs at most
    2 + 4 + 24 bits of mantissa, so it is exact in float64.

    Raises:
        ValueError: another `dtype`.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"NVFP4 is dequantized to bfloat16 or float32, not {dtype}")
    table = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.float64, device=codes.device)
    pairs = torch.stack((codes & 0xF, codes >> 4), dim=-1).to(torch.int64)
    values = table[pairs].flatten(-2).unflatten(-1, (-1, GROUP))
    scales = block_scale.to(torch.float32).to(torch.float64) * global_scale.to(torch.float64)
    exact = (values * scales.unsqueeze(-1)).flatten(-2)
    return _nearest_bfloat16(exact) if dtype == torch.bfloat16 else exact.to(dtype)


def _nearest_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """float64 to the nearest BF16, ties to even; a cast would round twice, by way of float32.

    `values` are zero or in the normal range of BF16. Of the 52 bits of mantissa 7 are kept.
    """
    bits = values.view(torch.int64)
    bits = bits + ((1 << 44) - 1) + ((bits >> 45) & 1)
    return ((bits >> 45) << 45).view(torch.float64).to(torch.bfloat16)
