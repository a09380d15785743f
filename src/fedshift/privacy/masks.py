"""What two parties make of each other's public keys: a key between them, and from it masks and sealed letters."""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedshift.errors import UserError
from fedshift.privacy.fixed_point import Words

NONCE = 12
SEALED = NONCE + 16  # bytes that a seal adds: the nonce before the letter, a tag behind it


def public_of(secret: bytes) -> bytes:
    """The public key of a secret one."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def key_between(secret: bytes, public: bytes, purpose: bytes) -> bytes:
    """A key that only the two owners know, for one purpose.

    >>> a, b = secrets.token_bytes(32), secrets.token_bytes(32)
    >>> key_between(a, public_of(b), b"test") == key_between(b, public_of(a), b"test")
    True
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise UserError("a public key for secure summation is none") from None
    return HKDF(SHA256(), 32, salt=None, info=purpose).derive(shared)


def mask_of(key: bytes, size: int) -> Words:
    """So many 32-bit words that look like noise to whoever does not have the key: AES-256 in counter mode.

    A key is used for one mask and never again, so the counter may start at zero.
    """
    stream = Cipher(AES256(key), CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(4 * size)), dtype="<u4")


def fingerprint(secret: bytes, purpose: bytes) -> bytes:
    """By what a secret is known again when it is told: SHA-256 for one purpose.

    It says nothing of a secret that nobody can guess, which 32 random bytes are, and a share of them too.

    >>> fingerprint(bytes(32), b"test") == fingerprint(bytes(32), b"test") != fingerprint(bytes(32), b"another")
    True
    """
    return hashlib.sha256(len(purpose).to_bytes(4, "big") + purpose + secret).digest()


def seal(key: bytes, letter: bytes, about: bytes) -> bytes:
    """A letter that only the owner of the key can read, and nobody can change."""
    nonce = secrets.token_bytes(NONCE)
    return nonce + AESGCM(key).encrypt(nonce, letter, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """The letter; a sentence if it is not what was sealed.

    >>> unseal(bytes(32), seal(bytes(32), b"hello", b"a to b"), b"a to b")
    b'hello'
    """
    try:
        return AESGCM(key).decrypt(sealed[:NONCE], sealed[NONCE:], about)
    except (InvalidTag, ValueError):
        raise UserError("a sealed share was changed on its way") from None
