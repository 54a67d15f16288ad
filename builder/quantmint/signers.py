"""Keys and signatures: make, keep, load and use ECDSA P-256 keys; the only importer of `cryptography`.

A signer is given bytes and never sees what they mean. Secrets come by callback, and none of them, nor anything read
from a private key, ever reaches an error, a repr or a log.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from quantmint.errors import ReleaseError

Passphrase = Callable[[], str | None]
"""Gives the passphrase of a private key when it is needed, or None when nobody can."""

MAX_KEY_BYTES = 64 * 1024
KIND = "an ECDSA P-256 key in PEM form"


class PublicKey:
    """A P-256 public key. `pem` is its SubjectPublicKeyInfo PEM, `key_id` the hex SHA-256 of that PEM."""

    def __init__(self, key: ec.EllipticCurvePublicKey) -> None:
        self._key = key
        self.pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        self.key_id = hashlib.sha256(self.pem).hexdigest()

    def verify(self, message: bytes, signature: bytes) -> None:
        """Return when `signature` (DER) is this key's ECDSA-SHA256 signature of `message`.

        Raises:
            ReleaseError: SIGNATURE_INVALID.
        """
        with _translated(None):
            self._key.verify(signature, message, ec.ECDSA(hashes.SHA256()))

    def __repr__(self) -> str:
        return f"PublicKey({self.key_id[:16]})"


class Signer(Protocol):
    """Something that holds a private key and signs bytes with it."""

    @property
    def public(self) -> PublicKey:
        """The public half."""
        ...

    def sign(self, message: bytes) -> bytes:
        """The DER-encoded ECDSA-SHA256 signature of `message`."""
        ...


class MemorySigner:
    """A P-256 key held in memory: loaded from a file, or made for one development release."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self._public = PublicKey(key.public_key())

    @property
    def public(self) -> PublicKey:
        """The public half."""
        return self._public

    def sign(self, message: bytes) -> bytes:
        """Deterministic (RFC 6979) where the cryptographic library can: the same package has the same signature."""
        try:
            return self._key.sign(message, ec.ECDSA(hashes.SHA256(), deterministic_signing=True))
        except UnsupportedAlgorithm:
            return self._key.sign(message, ec.ECDSA(hashes.SHA256()))

    def private_pem(self, passphrase: bytes | None) -> bytes:
        """PKCS#8 PEM, encrypted with `passphrase` unless that is None."""
        encryption: serialization.KeySerializationEncryption = (
            serialization.NoEncryption() if passphrase is None else serialization.BestAvailableEncryption(passphrase)
        )
        return self._key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)

    def __repr__(self) -> str:
        return f"MemorySigner({self._public.key_id[:16]})"

    def __reduce__(self) -> str:
        raise TypeError("a signer is never pickled")


def generate() -> MemorySigner:
    """A new key, in memory only: throw it away after a development release, or keep it with `write_private`."""
    return MemorySigner(ec.generate_private_key(ec.SECP256R1()))


def write_private(
    signer: MemorySigner, path: Path, *, passphrase: Passphrase | None = None, unencrypted: bool = False
) -> None:
    """Keep a private key in a new file of mode 0600: PKCS#8, encrypted unless `unencrypted` is asked for.

    Raises:
        ReleaseError: KEY_EXISTS when the file exists; KEY_PASSPHRASE when encryption is due and no passphrase comes.
    """
    secret = None
    if not unencrypted:
        secret = (passphrase() if passphrase is not None else None) or ""
        if not secret:
            raise ReleaseError(
                "KEY_PASSPHRASE", "a private key is written encrypted, and no passphrase was given", file=path.name
            )
    _write_new(path, signer.private_pem(None if secret is None else secret.encode()), 0o600)


def write_public(key: PublicKey, path: Path, *, overwrite: bool = False) -> None:
    """Write the PEM of a public key, mode 0644.

    Raises:
        ReleaseError: KEY_EXISTS when the file exists with other bytes and `overwrite` is not given.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == key.pem:
            return
    if overwrite:
        path.unlink(missing_ok=True)
    _write_new(path, key.pem, 0o644)


def load_public(source: bytes | Path) -> PublicKey:
    """The public key in PEM bytes or in a file.

    Raises:
        ReleaseError: KEY_MISSING, or KEY_INVALID for anything but a P-256 public key.
    """
    data, name = (source, None) if isinstance(source, bytes) else (_read(source), source.name)
    if b"PRIVATE KEY" in data:
        raise ReleaseError(
            "KEY_INVALID",
            "this is a private key, and a public key belongs here",
            file=name,
            expected=f"the public half of {KIND}",
            actual="a private key",
            hint="Pass the .pub file. If anybody else gave you this private key, it is no longer one: replace it.",
        )
    with _translated(name):
        key = serialization.load_pem_public_key(data)
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _wrong_kind(key, name)
    return PublicKey(key)


def load_signer(uri: str, passphrase: Passphrase) -> Signer:
    """The signer that `uri` names: `file:PATH`, or a bare path. `passphrase` is asked only for an encrypted key.

    Raises:
        ReleaseError: KEY_MISSING, KEY_INVALID (also for an unknown scheme) or KEY_PASSPHRASE.
    """
    match = re.match(r"([a-z][a-z0-9+.-]*):", uri)
    scheme, rest = (match.group(1), uri[match.end() :]) if match else ("file", uri)
    load = SCHEMES.get(scheme)
    if load is None:
        raise ReleaseError(
            "KEY_INVALID",
            f"no signer is known for the scheme {scheme!r}",
            expected=", ".join(f"{known}:" for known in sorted(SCHEMES)),
            actual=f"{scheme}:",
        )
    return load(rest, passphrase)


def _from_file(rest: str, passphrase: Passphrase) -> Signer:
    path = Path(rest)
    data = _read(path)
    if b"PRIVATE KEY" not in data:
        kind = "a public key" if b"PUBLIC KEY" in data else "no private key"
        raise ReleaseError("KEY_INVALID", f"the file holds {kind}", file=path.name, expected=KIND, actual=kind)
    try:
        with _translated(path.name):
            key = serialization.load_pem_private_key(data, None)
    except ReleaseError as error:
        if error.code != "KEY_PASSPHRASE":
            raise
        secret = passphrase()
        if not secret:
            raise
        with _translated(path.name, wrong_value="KEY_PASSPHRASE"):
            key = serialization.load_pem_private_key(data, secret.encode())
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _wrong_kind(key, path.name)
    return MemorySigner(key)


SCHEMES: Mapping[str, Callable[[str, Passphrase], Signer]] = MappingProxyType({"file": _from_file})
"""URI scheme → how to load a signer of it."""

_TRANSLATIONS: tuple[tuple[type[Exception], str, str], ...] = (
    (InvalidSignature, "SIGNATURE_INVALID", "the signature is not one of this key over these bytes"),
    (UnsupportedAlgorithm, "KEY_INVALID", "the key is of a kind that is not supported"),
    (TypeError, "KEY_PASSPHRASE", "the private key is encrypted"),
    (ValueError, "KEY_INVALID", "the file is not a readable key"),
)
_UNOPENED = "the passphrase does not open the private key"


@contextlib.contextmanager
def _translated(file: str | None, *, wrong_value: str = "KEY_INVALID") -> Iterator[None]:
    """Exceptions of the library as ours; their texts, which may quote a key, are dropped.

    `wrong_value` is KEY_PASSPHRASE where a ValueError means that decryption failed.
    """
    try:
        yield
    except tuple(kind for kind, _, _ in _TRANSLATIONS) as error:
        code, message = next((code, text) for kind, code, text in _TRANSLATIONS if isinstance(error, kind))
        if isinstance(error, ValueError) and wrong_value != code:
            code, message = wrong_value, _UNOPENED
        expected = KIND if code == "KEY_INVALID" else None
        raise ReleaseError(code, message, file=file, expected=expected) from None


def _wrong_kind(key: object, file: str | None) -> ReleaseError:
    curve = getattr(getattr(key, "curve", None), "name", None)
    actual = f"a key on the curve {curve}" if curve else "a key of another algorithm"
    return ReleaseError("KEY_INVALID", "the key is of another kind", file=file, expected=KIND, actual=actual)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_KEY_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise ReleaseError("KEY_MISSING", f"there is no key at {path.name!r}", file=path.name) from None
    except OSError as error:
        raise ReleaseError(
            "KEY_INVALID", f"the key cannot be read: {error.strerror}", file=path.name, expected=KIND
        ) from None
    if len(data) > MAX_KEY_BYTES:
        raise ReleaseError("KEY_INVALID", "the file is too large to be a key", file=path.name, expected=KIND)
    return data


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a file that did not exist: its name is taken first, its bytes appear whole by rename."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
    except FileExistsError:
        raise ReleaseError("KEY_EXISTS", f"{path.name} exists already", file=path.name) from None
    except OSError as error:
        raise ReleaseError(
            "INVALID_ARGUMENT", f"the key cannot be written there: {error.strerror}", file=path.name
        ) from None
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise
