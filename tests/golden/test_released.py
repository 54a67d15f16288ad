"""Everything ever signed still verifies: the statements of manifests/released by their keys, for ever."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from quantmint.artifact import Artifact, digest_of
from quantmint.manifest import compare_model, contradictions, parse_model, parse_release
from quantmint.signers import load_public
from quantmint.statement import pae, parse_bundle
from quantmint.verify import read_release

RELEASED = Path(__file__).resolve().parents[2] / "manifests" / "released"
FOLDERS = sorted(path.parent for path in RELEASED.glob("*/release.sigstore.json"))


def test_the_corpus_is_there() -> None:
    assert FOLDERS


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_released_manifest_still_verifies(folder: Path) -> None:
    release = read_release(folder, public_key=folder / "key.pub")
    assert not contradictions(release)
    key = load_public(folder / "key.pub")
    bundle = parse_bundle((folder / "model.sig").read_bytes(), file="model.sig")
    key.verify(pae(bundle.payload), bundle.signature)
    data = (folder / "release.sigstore.json").read_bytes()
    statement = Artifact(path="release.sigstore.json", size=len(data), digest=digest_of(data))
    assert not compare_model(release, statement, parse_model(bundle.payload, file="model.sig"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_released_manifest_fits_the_published_schema(folder: Path) -> None:
    import jsonschema

    payload = base64.b64decode(json.loads((folder / "release.sigstore.json").read_bytes())["dsseEnvelope"]["payload"])
    release = parse_release(payload, file="release.sigstore.json")
    schema = json.loads((RELEASED.parent / "schema" / "release.json").read_bytes())
    jsonschema.validate(dict(release.statement.predicate), schema)


def test_the_published_schemas_are_current(root: Path) -> None:
    from quantmint import manifest, recipe

    assert (root / "manifests/schema/release.json").read_bytes() == manifest.schema()
    assert (root / "manifests/schema/recipe.json").read_bytes() == recipe.schema()
