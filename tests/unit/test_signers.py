from __future__ import annotations

import pickle
import stat

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from quantmint.errors import ReleaseError
from quantmint.signers import MemorySigner, generate, load_public, load_signer, write_private, write_public

SECRET = "correct horse battery staple"  # noqa: S105


def never() -> str:
    raise AssertionError("no passphrase is needed")


def public_pem(key) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def private_pem(key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def test_a_signature_holds_for_its_key_and_bytes_only():
    signer, other = generate(), generate()
    signature = signer.sign(b"message")
    signer.public.verify(b"message", signature)
    for key, message, signed in [
        (other.public, b"message", signature),
        (signer.public, b"massage", signature),
        (signer.public, b"message", signature[:-1]),
        (signer.public, b"message", b""),
    ]:
        with pytest.raises(ReleaseError) as caught:
            key.verify(message, signed)
        assert caught.value.code == "SIGNATURE_INVALID"


def test_signing_twice_gives_one_signature():
    signer = generate()
    assert signer.sign(b"m") == signer.sign(b"m")


@pytest.mark.parametrize("uri", ["{}", "file:{}"])
def test_a_key_is_kept_encrypted_and_loaded_again(tmp_path, uri):
    signer, path = generate(), tmp_path / "release.pem"
    write_private(signer, path, passphrase=lambda: SECRET)
    assert path.read_bytes().startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    loaded = load_signer(uri.format(path), lambda: SECRET)
    assert loaded.public.key_id == signer.public.key_id
    assert [file.name for file in tmp_path.iterdir()] == ["release.pem"]


def test_unencrypted_keys_are_written_on_request_only(tmp_path):
    signer, path = generate(), tmp_path / "key.pem"
    for passphrase in (None, lambda: None, lambda: ""):
        with pytest.raises(ReleaseError) as caught:
            write_private(signer, path, passphrase=passphrase)
        assert caught.value.code == "KEY_PASSPHRASE"
        assert not path.exists()
    write_private(signer, path, unencrypted=True)
    assert load_signer(str(path), never).public.key_id == signer.public.key_id


def test_a_key_is_never_overwritten(tmp_path):
    path = tmp_path / "key.pem"
    path.write_bytes(b"precious")
    with pytest.raises(ReleaseError) as caught:
        write_private(generate(), path, unencrypted=True)
    assert caught.value.code == "KEY_EXISTS"
    with pytest.raises(ReleaseError) as caught:
        write_public(generate().public, path)
    assert caught.value.code == "KEY_EXISTS"
    assert path.read_bytes() == b"precious"


def test_a_public_key_is_replaced_on_request_only(tmp_path):
    path = tmp_path / "key.pub"
    first, second = generate().public, generate().public
    write_public(first, path)
    write_public(first, path)
    write_public(second, path, overwrite=True)
    assert load_public(path).key_id == second.key_id
    assert load_public(second.pem).pem == second.pem


def test_nowhere_to_write_is_said(tmp_path):
    with pytest.raises(ReleaseError) as caught:
        write_private(generate(), tmp_path / "absent" / "key.pem", unencrypted=True)
    assert caught.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("answer", [None, "", "wrong " + SECRET])
def test_a_wrong_passphrase_is_said_without_any_secret(tmp_path, answer):
    path = tmp_path / "key.pem"
    write_private(generate(), path, passphrase=lambda: SECRET)
    with pytest.raises(ReleaseError) as caught:
        load_signer(str(path), lambda: answer)
    assert caught.value.code == "KEY_PASSPHRASE"
    assert SECRET not in str(caught.value.as_json())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a key",
        b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        generate().public.pem,
        private_pem(ec.generate_private_key(ec.SECP384R1())),
        private_pem(ed25519.Ed25519PrivateKey.generate()),
        b"x" * 100_000,
    ],
    ids=["empty", "text", "garbage", "public", "p384", "ed25519", "large"],
)
def test_what_is_no_private_key_of_our_kind_is_invalid(tmp_path, data):
    path = tmp_path / "key.pem"
    path.write_bytes(data)
    with pytest.raises(ReleaseError) as caught:
        load_signer(str(path), never)
    assert (caught.value.code, caught.value.file) == ("KEY_INVALID", "key.pem")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        public_pem(ec.generate_private_key(ec.SECP384R1()).public_key()),
        public_pem(ec.generate_private_key(ec.SECP256K1()).public_key()),
        public_pem(ed25519.Ed25519PrivateKey.generate().public_key()),
    ],
    ids=["empty", "garbage", "p384", "secp256k1", "ed25519"],
)
def test_what_is_no_public_key_of_our_kind_is_invalid(data):
    with pytest.raises(ReleaseError) as caught:
        load_public(data)
    assert caught.value.code == "KEY_INVALID"


@pytest.mark.parametrize("passphrase", [None, SECRET.encode()])
def test_a_private_key_handed_as_public_is_refused_and_not_echoed(passphrase):
    pem = generate().private_pem(passphrase)
    with pytest.raises(ReleaseError) as caught:
        load_public(pem)
    assert caught.value.code == "KEY_INVALID"
    shown = str(caught.value.as_json())
    assert "private key" in shown
    assert not any(line and line in shown for line in pem.decode().splitlines()[1:-1])


def test_missing_and_unknown_are_told_apart(tmp_path):
    cases = [
        (str(tmp_path / "absent.pem"), "KEY_MISSING"),
        (str(tmp_path), "KEY_INVALID"),
        ("pkcs11:token=release", "KEY_INVALID"),
    ]
    for uri, code in cases:
        with pytest.raises(ReleaseError) as caught:
            load_signer(uri, never)
        assert caught.value.code == code
    with pytest.raises(ReleaseError) as caught:
        load_public(tmp_path / "absent.pub")
    assert caught.value.code == "KEY_MISSING"


def test_a_signer_shows_and_pickles_nothing():
    signer = generate()
    assert repr(signer) == f"MemorySigner({signer.public.key_id[:16]})"
    with pytest.raises(TypeError):
        pickle.dumps(signer)
    assert isinstance(signer, MemorySigner)
