"""Verifying a package, ours beside the stock tool, in one run: `python benchmarks/verify.py [--mib 256] [--repeats 5]`.

Whole processes, interleaved, on the same freshly written package (warm page cache). Prints medians, spread and the
ratio to ours; also the start-up of `quantmint --help`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quantmint.artifact import digest_of
from quantmint.manifest import Predicate
from quantmint.seal import seal
from quantmint.signers import generate, write_public

BIN = Path(sys.executable).parent
DIGEST = digest_of(b"")


def package(folder: Path, mib: int) -> None:
    """A sealed package of eight random files, `mib` MiB in all."""
    folder.mkdir()
    for number in range(8):
        with (folder / f"model-{number + 1:05}-of-00008.safetensors").open("wb") as stream:
            for _ in range(mib // 8):
                stream.write(os.urandom(1024 * 1024))
    predicate = Predicate.model_validate(
        {
            "release": "benchmark", "grade": "development", "source": {"uri": "dir:none", "files": DIGEST},
            "recipe": DIGEST, "plan": DIGEST, "runner": "process", "images": {}, "targets": ("cpu",),
            "gates": (), "epoch": 0,
            "quantization": {"placement": {}, "effective_bits": 16.0},
            "builder": {"name": "quantmint", "version": "0", "wheel": DIGEST},
        }
    )  # fmt: skip
    signer = generate()
    seal(folder, predicate, signer)
    write_public(signer.public, folder.parent / "key.pub")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder, key = Path(work) / "package", Path(work) / "key.pub"
        package(folder, arguments.mib)
        stock = [str(BIN / "model_signing"), "verify", "key", str(folder), "--signature", str(folder / "model.sig")]
        ours = [str(BIN / "quantmint"), "verify", str(folder), "--key", str(key)]
        commands = {
            "quantmint verify (blake3)": ours,
            "quantmint verify --digest sha256": [*ours, "--digest", "sha256"],
            "model_signing verify key": [*stock, "--public_key", str(key)],
            "quantmint --help": [str(BIN / "quantmint"), "--help"],
        }
        took: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(arguments.repeats):
            for name, command in commands.items():
                began = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True)  # noqa: S603  our own commands
                took[name].append(time.perf_counter() - began)
    base = statistics.median(took["quantmint verify (blake3)"])
    rows = {
        name: {
            "median_s": round(statistics.median(times), 3),
            "min_s": round(min(times), 3),
            "max_s": round(max(times), 3),
            "ratio": round(statistics.median(times) / base, 2),
        }
        for name, times in took.items()
    }
    sys.stdout.write(json.dumps({"mib": arguments.mib, "repeats": arguments.repeats, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
