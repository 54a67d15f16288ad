"""Our own wheels: the worker that is mounted into every job and the overlay that is mounted into the engine's.

Built by hatchling, byte for byte the same from the same tree. The worker wheel holds what runs inside images and
nothing of the host: floors 0 to 2, the worker and the in-image handlers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from quantmint.errors import ReleaseError
from quantmint.store import disk_errors

IN_JOBS = frozenset(
    {
        "__init__.py", "py.typed", "artifact.py", "checkpoint.py", "document.py", "errors.py", "evidence.py",
        "geometry.py", "launch.py", "placement.py", "stage.py", "tiers.py", "worker.py",
        "assemble", "calibrate", "gates", "quantize",
    }
)  # fmt: skip
"""What of our package jobs import. Changing anything else of it re-executes nothing."""


def _built(root: Path, target: Path, exclude: tuple[str, ...]) -> Path:
    from hatchling.builders.wheel import WheelBuilder

    if not (root / "pyproject.toml").is_file():
        raise ReleaseError("SOURCE_MISSING", f"there is no project at {root.name}", file="pyproject.toml")
    with disk_errors():
        target.mkdir(parents=True, exist_ok=True)
    builder = WheelBuilder(str(root))
    if exclude:
        builder.config.target_config["exclude"] = list(exclude)
        builder.config.__dict__.pop("exclude_spec", None)
    with _fixed_time(), disk_errors():
        return Path(next(iter(builder.build(directory=str(target), versions=["standard"]))))


@contextlib.contextmanager
def _fixed_time() -> Iterator[None]:
    """The builder takes SOURCE_DATE_EPOCH from the environment; what stands there must not change our bytes."""
    before = os.environ.pop("SOURCE_DATE_EPOCH", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["SOURCE_DATE_EPOCH"] = before


def worker_wheel(root: Path, target: Path) -> Path:
    """Build the worker wheel of the project at `root` into `target`; its path."""
    package = root / "builder" / "quantmint"
    others = sorted(entry.name for entry in package.iterdir() if entry.name not in IN_JOBS)
    return _built(root, target, tuple(f"builder/quantmint/{name}" for name in others))


def overlay_wheel(root: Path, target: Path) -> Path:
    """Build the wheel of the overlay project at `root` into `target`; its path."""
    return _built(root, target, ())


def whole_wheel(root: Path, target: Path) -> Path:
    """Build the complete wheel of the project at `root`, for the verify image."""
    shutil.rmtree(target, ignore_errors=True)
    return _built(root, target, ())
