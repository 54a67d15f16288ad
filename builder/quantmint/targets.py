"""Device classes that a release can promise: architecture, memory, platforms.

Facts only; nothing here looks at the machine it runs on.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9


@dataclass(frozen=True, slots=True)
class Target:
    """A device class.

    `memory` is in bytes as the vendor states it (decimal GB); None when it is the host's own. `capability` is the CUDA
    compute capability, None without CUDA. `unified` memory is shared with the host: running out takes the host down.
    """

    name: str
    title: str
    platforms: tuple[str, ...]
    capability: tuple[int, int] | None
    memory: int | None
    unified: bool


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("cpu", "any CPU host (emulated formats)", ("linux/amd64", "linux/arm64"), None, None, unified=True),
        Target("gb10", "DGX Spark, GB10 (sm_121)", ("linux/arm64",), (12, 1), 128 * GB, unified=True),
        Target("rtx-pro-6000", "RTX PRO 6000 (sm_120)", ("linux/amd64",), (12, 0), 96 * GB, unified=False),
        Target("h200", "H200 (sm_90)", ("linux/amd64",), (9, 0), 141 * GB, unified=False),
    )
}
"""Target name → device class."""
