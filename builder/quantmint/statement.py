"""What is signed, as bytes: in-toto statements, the DSSE text that a key signs, and the Sigstore bundle around both.

A statement keeps the bytes it came from; signatures hold over those bytes, decisions are made on the parsed model.
Nothing here reads a file, knows a key, or believes that a bundle it parsed is genuine.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from quantmint.artifact import RelPath, collision, legal_path
from quantmint.document import Document, Received, canonical, receive
from quantmint.errors import ReleaseError

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
MAX_SUBJECTS = 10_000
MAX_BUNDLE_BYTES = 8 * 1024 * 1024
"""Bytes of a bundle or payload: in base64, `MAX_SUBJECTS` files of 120-byte names (some 330 bytes each), every one of
them named as evidence again (some 240 bytes)."""
MAX_BUNDLE_VALUES = 10_000
"""Brackets and commas of a bundle; ours has 13, one with certificates and log entries some hundreds."""
MAX_PAYLOAD_VALUES = 200_000
"""Brackets and commas of a statement: `MAX_SUBJECTS` of 7 each, of 4 more as evidence, and as many for the claims."""

Hex256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""64 lower-case hex digits: a SHA-256 or BLAKE3 digest inside an in-toto digest set."""


class DigestSet(Document):
    """The digests of a subject. Closed: an algorithm that cannot be recomputed here is refused, not ignored."""

    sha256: Hex256
    blake3: Hex256 | None = None


class Annotations(Received):
    """What a subject says beside its digests: its size in bytes."""

    size: Annotated[int, Field(ge=0, le=2**53 - 1)] | None = None


class Subject(Document):
    """An artifact named in a statement (an in-toto ResourceDescriptor)."""

    name: RelPath
    digest: DigestSet
    annotations: Annotations = Annotations()

    @property
    def size(self) -> int | None:
        """Signed size in bytes, when the statement gives one."""
        return self.annotations.size

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; an empty annotation map is left out."""
        value = super().as_json()
        return value if value["annotations"] else {k: v for k, v in value.items() if k != "annotations"}


@dataclass(frozen=True)
class Statement:
    """A parsed in-toto statement and the exact bytes it was parsed from."""

    payload: bytes
    predicate_type: str
    subjects: tuple[Subject, ...]
    predicate: Mapping[str, Any]


@dataclass(frozen=True)
class Envelope:
    """The parts of a bundle, not yet believed: payload and DER signature bytes, and the signer's hint of its key."""

    payload: bytes
    signature: bytes
    hint: str


class _Subject(Received):
    name: str
    digest: DigestSet
    annotations: Annotations = Annotations()


class _Statement(Received):
    type_: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: Annotated[tuple[_Subject, ...], Field(min_length=1, max_length=MAX_SUBJECTS)]
    predicate_type: Annotated[str, Field(alias="predicateType", max_length=1024)]
    predicate: dict[str, Any]


class _Signature(Received):
    sig: str


class _Dsse(Received):
    payload: str
    payload_type: Literal["application/vnd.in-toto+json"] = Field(alias="payloadType")
    signatures: Annotated[tuple[_Signature, ...], Field(min_length=1, max_length=1)]


class _PublicKey(Received):
    hint: Hex256


class _Material(Received):
    public_key: _PublicKey = Field(alias="publicKey")


class _Bundle(Received):
    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"] = Field(alias="mediaType")
    material: _Material = Field(alias="verificationMaterial")
    dsse: _Dsse = Field(alias="dsseEnvelope")


def statement_bytes(subjects: Iterable[Subject], predicate_type: str, predicate: Mapping[str, Any]) -> bytes:
    """The RFC 8785 bytes of an in-toto Statement v1, subjects in name order."""
    ordered = sorted(subjects, key=lambda subject: subject.name)
    return canonical(
        {
            "_type": STATEMENT_TYPE,
            "subject": [subject.as_json() for subject in ordered],
            "predicateType": predicate_type,
            "predicate": dict(predicate),
        }
    )


def parse_statement(payload: bytes, *, file: str) -> Statement:
    """Parse the payload of an envelope whose signature already holds.

    Raises:
        ReleaseError: DUPLICATE_KEY, MALFORMED_DOCUMENT (too large, wrong type, no subject, a subject twice, an unknown
            digest algorithm), or ILLEGAL_PATH (a subject that leaves the package, or two that collide), naming `file`.
    """
    _limited(payload, file)
    parsed = receive(_Statement, payload, file=file, values=MAX_PAYLOAD_VALUES)
    names = [legal_path(subject.name) for subject in parsed.subject]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ReleaseError("MALFORMED_DOCUMENT", f"the subject {twice!r} is listed twice", file=file)
    clash = collision(names)
    if clash is not None:
        raise ReleaseError(
            "ILLEGAL_PATH", f"subjects {clash[0]!r} and {clash[1]!r} cannot both be files everywhere", file=clash[1]
        )
    subjects = tuple(
        Subject(name=subject.name, digest=subject.digest, annotations=subject.annotations) for subject in parsed.subject
    )
    return Statement(payload, parsed.predicate_type, subjects, parsed.predicate)


def pae(payload: bytes) -> bytes:
    """What is signed for an in-toto payload: the DSSE v1 pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def bundle_bytes(payload: bytes, signature: bytes, hint: str) -> bytes:
    """A Sigstore bundle v0.3 as RFC 8785 bytes: one DSSE envelope, one signature, a public key known by `hint`.

    `hint` is the hex SHA-256 of the public key's PEM (SubjectPublicKeyInfo).
    """
    return canonical(
        {
            "mediaType": BUNDLE_TYPE,
            "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
            "dsseEnvelope": {
                "payload": base64.b64encode(payload).decode(),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
            },
        }
    )


def parse_bundle(data: bytes, *, file: str) -> Envelope:
    """Take a hostile bundle apart, believing nothing of it.

    Raises:
        ReleaseError: DUPLICATE_KEY or MALFORMED_DOCUMENT (too large, too many values, another media or payload type,
            not exactly one signature, no public key hint, sloppy base64), naming `file`.
    """
    _limited(data, file)
    bundle = receive(_Bundle, data, file=file, values=MAX_BUNDLE_VALUES)
    return Envelope(
        payload=_decoded(bundle.dsse.payload, "payload", file),
        signature=_decoded(bundle.dsse.signatures[0].sig, "signature", file),
        hint=bundle.material.public_key.hint,
    )


def _limited(data: bytes, file: str) -> None:
    if len(data) > MAX_BUNDLE_BYTES:
        raise ReleaseError(
            "MALFORMED_DOCUMENT",
            "document too large",
            file=file,
            expected=f"at most {MAX_BUNDLE_BYTES} bytes",
            actual=f"{len(data)} bytes",
        )


def _decoded(text: str, what: str, file: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = None
    if data is None or base64.b64encode(data).decode() != text:
        raise ReleaseError("MALFORMED_DOCUMENT", f"the {what} is not canonical base64", file=file)
    return data
