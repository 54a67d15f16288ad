"""Build the images with the engine of the tests: `build.py STATE [--local] [NAME…]`; prints the pins, logs to stderr.

With --local nothing is pushed, which halves the time: images are pinned by their IDs in this engine. The engine, its
registry and the bases come from the environment that tests/engine/up.sh made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantmint.imagebuild import build
from quantmint.images import render_pins

ROOT = Path(__file__).resolve().parents[2]


def tell(event: Mapping[str, Any]) -> None:
    done = f" {event['done']}/{event['total']}" if "done" in event else ""
    sys.stderr.write(f"{event.get('text', '')}{done}\n")


state, *names = sys.argv[1:]
wanted = [name for name in names if name != "--local"]
pins = build(
    wanted,
    root=ROOT,
    state=Path(state),
    environment=os.environ,
    on_event=tell,
    builder_image=os.environ["QUANTMINT_BUILDER_IMAGE"],
    runtime_image=os.environ["QUANTMINT_RUNTIME_IMAGE"],
    registry=None if "--local" in names else os.environ["QUANTMINT_REGISTRY"],
)
sys.stdout.write(render_pins(pins))
