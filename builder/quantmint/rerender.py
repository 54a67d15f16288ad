"""The card once more: rendered from what a package seals (recipe, plan, evidence), to compare with the card it ships.

Reads a package and writes nothing. Whether the package itself is what was signed is for `verify` to say.
"""

from __future__ import annotations

from pathlib import Path

from quantmint.card import render
from quantmint.document import author_value, receive
from quantmint.errors import ReleaseError
from quantmint.evidence import Evidence
from quantmint.manifest import PLAN_FILE, RECIPE_FILE, RELEASE_FILE, Overlay
from quantmint.package import grade_of
from quantmint.plan import Plan
from quantmint.recipe import Recipe
from quantmint.verify import Listing, list_package, read_release, read_small

MAX_TEXT_BYTES = 4 * 1024 * 1024


def rerender(package: Path) -> bytes:
    """The card of a package, from its sealed recipe, plan and evidence.

    Raises:
        ReleaseError: PACKAGE_MISSING, SIGNATURE_MISSING, MALFORMED_DOCUMENT, or a code of `document.author` for the
            recipe and the evidence.
    """
    predicate = read_release(package, public_key=None).statement.predicate
    listing = list_package(package)
    recipe = Recipe.parse(_text(listing, RECIPE_FILE), file=RECIPE_FILE)
    plan = receive(Plan, _text(listing, PLAN_FILE).encode(), file=PLAN_FILE)
    evidence = tuple(author_value(Evidence, gate, file=RELEASE_FILE) for gate in predicate["gates"])
    claimed = predicate.get("overlay")
    overlay = None if claimed is None else author_value(Overlay, claimed, file=RELEASE_FILE)
    grade, reasons = grade_of(plan, evidence, signed=predicate["grade"] == "release")
    return render(recipe, plan, evidence, overlay=overlay, grade=grade, reasons=reasons)


def _text(listing: Listing, name: str) -> str:
    """A UTF-8 file of the package; no link is followed but that of a Hub cache to its own blob."""
    entry = listing.files.get(name)
    if entry is None:
        raise _unreadable(name)
    try:
        data = read_small(entry, MAX_TEXT_BYTES)
        if len(data) > MAX_TEXT_BYTES:
            raise _unreadable(name)
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        raise _unreadable(name) from None


def _unreadable(name: str) -> ReleaseError:
    return ReleaseError("MALFORMED_DOCUMENT", f"the package has no readable {name}", file=name)
