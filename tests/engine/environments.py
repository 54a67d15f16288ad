"""Make the process runner's virtual environments: `environments.py STATE DIR`; afterwards DIR/IMAGE/bin/python.

For the tests marked `environments`: export QUANTMINT_ENVIRONMENTS=DIR.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantmint.wheelhouse import environment

ROOT = Path(__file__).resolve().parents[2]


def tell(event: Mapping[str, Any]) -> None:
    done = f" {event['done']}/{event['total']}" if "done" in event else ""
    sys.stderr.write(f"{event.get('text', '')}{done}\n")


state, target = (Path(argument).absolute() for argument in sys.argv[1:])
target.mkdir(parents=True, exist_ok=True)
for name in ("modelopt", "serve"):
    python, _ = environment(name, root=ROOT, state=state, on_event=tell)
    link = target / name
    link.unlink(missing_ok=True)
    link.symlink_to(python.parent.parent)
