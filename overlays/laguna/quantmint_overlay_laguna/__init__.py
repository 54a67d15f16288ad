"""Entry point of the overlay: vLLM calls `register` in each of its processes, before it builds a model.

Only the standard library is imported here, because vLLM swallows what fails while an entry point is imported; what
`register` raises ends the engine. An engine whose code is not known must never be patched, nor serve unpatched.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from typing import Any

SWITCH = "QUANTMINT_OVERLAY_DISABLE"
"""Environment variable: comma-separated names of fixes to leave out, for showing that a gate notices their absence."""

_LOGGER = logging.getLogger("vllm.quantmint_overlay_laguna")
_RECORD: dict[str, Any] = {}


def applied() -> dict[str, Any]:
    """What was patched in this process, as JSON values; empty before `register`.

    `engine`, `device`, `fixes` (name → applied, disabled or not-applicable), `labels` (how results must be called),
    `sources` (replaced or relied-upon function → SHA-256 of its source) and `loaded` (fix → layers it served).
    """
    return copy.deepcopy(_RECORD)


def register() -> None:
    """Apply the fixes that this engine and device need; a second call does nothing.

    Raises:
        OverlayRefusedError: the engine, or the source of a function that a fix touches, is not listed in overlay.toml,
            or the switch names an unknown fix. Nothing was patched, and vLLM's next attempt raises again.
    """
    if _RECORD:
        return
    try:
        from quantmint_overlay_laguna import fixes, knowledge

        overlay = knowledge.shipped()
        disabled = frozenset(name.strip() for name in os.environ.get(SWITCH, "").split(",") if name.strip())
        decision = knowledge.decide(
            overlay, fixes.installed(overlay), fixes.device(), disabled=disabled, source=fixes.source
        )
        record: dict[str, Any] = {"overlay": overlay.overlay, **decision.as_json(), "loaded": {}}
        for name in decision.applied:
            fixes.FIXES[name](record["loaded"])
    except BaseException:
        _forget()
        raise
    _RECORD.update(record)
    _LOGGER.warning("quantmint overlay %s", json.dumps({k: v for k, v in record.items() if k != "sources"}))


def _forget() -> None:
    """Let vLLM call `register` again: it marks plug-ins as loaded before it runs them."""
    try:
        import vllm.plugins
    except ImportError:
        return
    vllm.plugins.plugins_loaded = False
