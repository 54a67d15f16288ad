"""What every runner promises: run one prepared job folder in one image, and tell how it ended.

A runner never interprets a report and never decides a verdict. Its kind and the image's identity enter the stage key,
so that what one runner made can never stand for what another made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from quantmint.stage import Hints

RunnerKind = Literal["container", "process"]
OnEvent = Callable[[Mapping[str, Any]], None]

ENVIRONMENT: dict[str, str] = {
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""The whole environment that every job gets, besides PATH, HOME, TMPDIR and PYTHONPATH; nothing of the host's."""

NATIVE = "native"
"""Folder of a process environment with the shared libraries that the machine lacks."""

CODE_INPUTS = ("worker", "overlay")
"""Inputs that are wheels to import from, in this order."""


@dataclass(frozen=True)
class Ended:
    """How a job ended: its exit code, and whether it was killed at its deadline or for memory."""

    exit_code: int
    reason: Literal["exited", "deadline", "memory"] = "exited"


class Runner(Protocol):
    """Runs jobs. All methods raise ReleaseError for what the environment refuses."""

    kind: RunnerKind

    def identity(self, image: str) -> str:
        """What stands for `image` in a stage key; makes the image available when it is not."""
        ...

    def describe(self, image: str) -> str:
        """What `image` was, for the manifest: a reference by digest, or the environment that stood for it."""
        ...

    def run(self, folder: Path, image: str, hints: Hints, log: Path, on_event: OnEvent) -> Ended:
        """Run the job in `folder`; whatever happens, nothing of it is running when this returns or raises."""
        ...

    def sweep(self) -> int:
        """Remove what runs of killed processes left running; how many were removed."""
        ...


def wheels(folder: Path) -> list[str]:
    """Paths relative to the job folder of the wheels to import from, in `CODE_INPUTS` order."""
    found: list[str] = []
    for name in CODE_INPUTS:
        base = folder / "in" / name
        if base.is_dir():
            found.extend(f"in/{name}/{wheel.name}" for wheel in sorted(base.glob("*.whl")))
    return found
