from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sigstore_models.bundle.v1 import Bundle

from quantmint.document import canonical
from quantmint.errors import ReleaseError
from quantmint.statement import (
    MAX_BUNDLE_BYTES,
    MAX_SUBJECTS,
    Annotations,
    DigestSet,
    Subject,
    bundle_bytes,
    pae,
    parse_bundle,
    parse_statement,
    statement_bytes,
)

HINT = "ab" * 32
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
names = st.from_regex(r"[a-z]{1,6}/[a-z0-9_-]{1,8}[.]bin", fullmatch=True)
subjects = st.lists(
    st.builds(
        Subject,
        name=names,
        digest=st.builds(DigestSet, sha256=digests, blake3=st.none() | digests),
        annotations=st.builds(Annotations, size=st.none() | st.integers(0, 2**53 - 1)),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda subject: subject.name,
)
predicates = st.dictionaries(st.text(max_size=5), st.integers(-5, 5) | st.text(max_size=5) | st.booleans(), max_size=4)


@given(subjects, predicates)
def test_statement_round_trip_keeps_every_byte(items, predicate):
    payload = statement_bytes(items, "https://example.org/p", predicate)
    parsed = parse_statement(payload, file="s")
    assert parsed.payload == payload
    assert set(parsed.subjects) == set(items)
    assert statement_bytes(parsed.subjects, parsed.predicate_type, parsed.predicate) == payload


@given(st.binary(max_size=200), st.binary(min_size=1, max_size=80))
def test_bundle_round_trip(payload, signature):
    envelope = parse_bundle(bundle_bytes(payload, signature, HINT), file="b")
    assert (envelope.payload, envelope.signature, envelope.hint) == (payload, signature, HINT)


def test_bundle_is_read_by_the_reference_model():
    bundle = Bundle.from_json(bundle_bytes(b"{}", b"signature", HINT))
    assert bundle.dsse_envelope.payload == b"{}"
    assert bundle.verification_material.public_key.hint == HINT


def test_pae_is_the_vector_of_the_specification():
    assert pae(b"hello") == b"DSSEv1 28 application/vnd.in-toto+json 5 hello"


def test_subject_order_does_not_matter():
    one, two = (Subject(name=name, digest=DigestSet(sha256="0" * 64)) for name in ("a", "b"))
    assert statement_bytes([one, two], "t", {}) == statement_bytes([two, one], "t", {})


def mutated(change) -> bytes:
    value = json.loads(bundle_bytes(b"{}", b"signature", HINT))
    change(value)
    return canonical(value)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.update(mediaType="application/vnd.dev.sigstore.bundle+json;version=0.2"),
        lambda b: b["dsseEnvelope"].update(signatures=[]),
        lambda b: b["dsseEnvelope"].update(payload="e30"),
        lambda b: b["dsseEnvelope"].update(payload="e31="),
        lambda b: b["dsseEnvelope"].update(payload="e 30="),
        lambda b: b["dsseEnvelope"].update(payload="é"),
        lambda b: b["verificationMaterial"].update(publicKey={}),
        lambda b: b.pop("dsseEnvelope"),
        lambda b: b.update(dsseEnvelope=[]),
    ],
)
def test_malformed_bundles_are_refused(change):
    with pytest.raises(ReleaseError) as caught:
        parse_bundle(mutated(change), file="b")
    assert (caught.value.code, caught.value.file) == ("MALFORMED_DOCUMENT", "b")


def test_unknown_fields_of_a_bundle_are_ignored():
    data = mutated(lambda b: b.update(later={"x": 1}))
    assert parse_bundle(data, file="b").payload == b"{}"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"null", b'{"a":NaN}', b"[" * 100_000])
def test_what_is_no_bundle_is_malformed(data):
    with pytest.raises(ReleaseError) as caught:
        parse_bundle(data, file="b")
    assert caught.value.code == "MALFORMED_DOCUMENT"


@given(st.binary(max_size=400))
def test_no_bytes_make_the_parser_fail_otherwise(data):
    with pytest.raises(ReleaseError):
        parse_bundle(data, file="b")


def test_the_largest_statement_is_within_the_bounds():
    subjects = [
        Subject(
            name=f"{number:05}-".ljust(120, "x"),
            digest=DigestSet(sha256="0" * 64, blake3="0" * 64),
            annotations=Annotations(size=2**40),
        )
        for number in range(MAX_SUBJECTS)
    ]
    files = [{"path": item.name, "size": 2**40, "digest": f"sha256:{item.digest.sha256}"} for item in subjects]
    payload = statement_bytes(subjects, "https://example.org/p", {"gates": [{"files": files}]})
    bundle = bundle_bytes(payload, b"signature", HINT)
    assert len(bundle) < MAX_BUNDLE_BYTES
    assert len(parse_statement(parse_bundle(bundle, file="b").payload, file="s").subjects) == MAX_SUBJECTS


@pytest.mark.parametrize("parse", [parse_bundle, parse_statement])
def test_documents_of_too_many_values_are_refused_unparsed(parse):
    with pytest.raises(ReleaseError, match="too many values"):
        parse(b'{"a":[' + b"[]," * 1_000_000 + b"0]}", file="b")


def test_a_bundle_has_one_spelling():
    data = mutated(lambda b: b.update(media_type=b.pop("mediaType")))
    with pytest.raises(ReleaseError) as caught:
        parse_bundle(data, file="b")
    assert caught.value.code == "MALFORMED_DOCUMENT"


@pytest.mark.parametrize("parse", [parse_bundle, parse_statement])
def test_oversized_documents_are_refused_unparsed(parse):
    with pytest.raises(ReleaseError, match="too large"):
        parse(b" " * (MAX_BUNDLE_BYTES + 1), file="b")


@pytest.mark.parametrize(
    "digest",
    [{"sha1": "0" * 40}, {"sha256": "0" * 64, "md5": "0" * 32}, {"sha256": "A" * 64}, {"sha256": "0" * 63}, {}],
)
def test_digests_that_cannot_be_recomputed_are_refused(digest):
    value = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "a", "digest": digest}],
        "predicateType": "t",
        "predicate": {},
    }
    with pytest.raises(ReleaseError) as caught:
        parse_statement(canonical(value), file="s")
    assert caught.value.code == "MALFORMED_DOCUMENT"


@pytest.mark.parametrize("size", [1.5, -1, "1", True, 2**53])
def test_a_size_is_a_whole_number(size):
    value = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "a", "digest": {"sha256": "0" * 64}, "annotations": {"size": size}}],
        "predicateType": "t",
        "predicate": {},
    }
    with pytest.raises(ReleaseError) as caught:
        parse_statement(json.dumps(value).encode(), file="s")
    assert caught.value.code == "MALFORMED_DOCUMENT"


def test_payload_stands_as_base64():
    value = json.loads(bundle_bytes(b"payload", b"s", HINT))
    assert base64.b64decode(value["dsseEnvelope"]["payload"]) == b"payload"
    assert len(value["dsseEnvelope"]["signatures"]) == 1
