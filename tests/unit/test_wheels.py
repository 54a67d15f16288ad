"""Our own wheels are the same bytes each time, and the worker's holds nothing of the host."""

from __future__ import annotations

import zipfile
from pathlib import Path

from quantmint.stage import HANDLERS
from quantmint.wheels import overlay_wheel, worker_wheel


def test_the_worker_wheel_is_reproducible_and_holds_every_handler_and_no_door(root: Path, tmp_path: Path) -> None:
    one, two = (worker_wheel(root, tmp_path / name) for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    names = set(zipfile.ZipFile(one).namelist())
    for module, _ in HANDLERS.values():
        if module != "host":
            assert f"{module.replace('.', '/')}.py" in names
    for door in ("cli", "container", "hub", "signers", "store", "release", "recipe", "plan"):
        assert f"quantmint/{door}.py" not in names


def test_the_overlay_wheel_is_reproducible(root: Path, tmp_path: Path) -> None:
    one, two = (overlay_wheel(root / "overlays" / "laguna", tmp_path / name) for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
