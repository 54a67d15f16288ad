"""Start-up stays light: what the command line and a full verify import, and what they must not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quantmint.manifest import Predicate
from quantmint.seal import seal
from quantmint.signers import generate, write_public

HEAVY = ("torch", "vllm", "modelopt", "exllamav3", "docker", "huggingface_hub", "transformers", "numpy")
LATE = (*HEAVY, "pydantic", "cryptography", "jinja2", "rich", "hatchling", "requests")


def imported(code: str, *arguments: str) -> set[str]:
    told = "sys.stderr.write(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    script = f"{code}\nimport json, sys\n{told}"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr))


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    assert imported("import quantmint.cli").isdisjoint(LATE)


def test_help_imports_nothing_heavy() -> None:
    assert imported("from quantmint.cli import run\nassert run(['--help']) == 0").isdisjoint(LATE)


def test_a_full_verify_imports_nothing_heavy(tmp_path: Path, predicate: Predicate) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "config.json").write_text("{}")
    signer = generate()
    seal(package, predicate, signer)
    write_public(signer.public, tmp_path / "key.pub")
    names = imported(
        "import sys\nfrom quantmint.cli import run\nassert run(['verify', sys.argv[1], '--key', sys.argv[2]]) == 0",
        str(package),
        str(tmp_path / "key.pub"),
    )
    assert names.isdisjoint(HEAVY)
    assert names.isdisjoint({"jinja2", "hatchling", "requests"})


@pytest.mark.parametrize("module", ["recipe", "plan", "manifest", "card", "images", "launch"])
def test_knowledge_imports_nothing_heavy(module: str) -> None:
    assert imported(f"import quantmint.{module}").isdisjoint(HEAVY)
