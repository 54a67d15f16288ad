"""What every test may use: a project root, and which heavy things this machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quantmint.manifest import Predicate

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's folder."""
    return ROOT


@pytest.fixture(autouse=True)
def _no_ambient_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the state folder of the person who runs it."""
    monkeypatch.setenv("QUANTMINT_STORE", str(tmp_path / "state"))
    for name in ("QUANTMINT_KEY_PASSPHRASE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def predicate() -> Predicate:
    """What a small development release claims; a whole one has evidence, an overlay and a grade besides."""
    digest = "sha256:" + "0" * 64
    return Predicate.model_validate(
        {
            "release": "demo",
            "grade": "development",
            "source": {"uri": "dir:source", "files": digest},
            "recipe": digest,
            "plan": digest,
            "runner": "process",
            "images": {"serve": "registry.example/serve@" + digest},
            "quantization": {"placement": {"experts": "NVFP4_W4A16", "rest": "BF16"}, "effective_bits": 6.5},
            "targets": ("cpu",),
            "gates": (),
            "epoch": 1,
            "builder": {"name": "quantmint", "version": "0.1.0", "wheel": digest},
        }
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need an engine or the images' environments say so when they are left out."""
    if os.environ.get("QUANTMINT_CI") and not (
        os.environ.get("QUANTMINT_PINS") and os.environ.get("QUANTMINT_ENVIRONMENTS")
    ):
        raise pytest.UsageError("in CI nothing is skipped for want of an engine or environments: see .ci/run")
    engine = bool(os.environ.get("QUANTMINT_PINS"))
    environments = bool(os.environ.get("QUANTMINT_ENVIRONMENTS"))
    for item in items:
        if item.get_closest_marker("engine") and not engine:
            item.add_marker(pytest.mark.skip(reason="no engine: start one with tests/engine/up.sh (see README)"))
        if item.get_closest_marker("environments") and not environments:
            item.add_marker(pytest.mark.skip(reason="QUANTMINT_ENVIRONMENTS is not set (see README)"))
