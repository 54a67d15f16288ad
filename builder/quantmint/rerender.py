"""The card once more: rendered from what a package seals (recipe, plan, evidence), to compare with the card it ships.

Reads a package and writes nothing. Whether the package itself is what was signed is for `verify` to say.
"""

from __future__ import annotations

from pathlib import Path

from quantmint.card import render
from quantmint.document import author_value, receive
from quantmint.errors import ReleaseError
from quantmint.evidence import Evidence
from quantmint.manifest import Overlay
from quantmint.package import grade_of
from quantmint.plan import Plan
from quantmint.recipe import Recipe
from quantmint.verify import read_release

MAX_TEXT_BYTES = 16 * 1024 * 1024


def rerender(package: Path) -> bytes:
    """The card of a package, from its sealed recipe, plan and evidence.

    Raises:
        ReleaseError: PACKAGE_MISSING, SIGNATURE_MISSING, MALFORMED_DOCUMENT.
    """
    predicate = read_release(package, public_key=None).statement.predicate
    recipe = Recipe.parse(_text(package, "evidence/recipe.toml").decode("utf-8"), file="evidence/recipe.toml")
    plan = receive(Plan, _text(package, "evidence/plan.json"), file="evidence/plan.json")
    evidence = tuple(author_value(Evidence, gate, file="release.sigstore.json") for gate in predicate["gates"])
    overlay = (
        author_value(Overlay, predicate["overlay"], file="release.sigstore.json") if "overlay" in predicate else None
    )
    grade, reasons = grade_of(plan, evidence, signed=predicate["grade"] == "release")
    return render(recipe, plan, evidence, overlay=overlay, grade=grade, reasons=reasons)


def _text(package: Path, name: str) -> bytes:
    place = package / name
    if not place.is_file() or place.stat().st_size > MAX_TEXT_BYTES:
        raise ReleaseError("MALFORMED_DOCUMENT", f"the package has no readable {name}", file=name)
    return place.read_bytes()
