"""Encrypts a job's data for etcd, where others may read: only holders of a secret can decrypt and create it.

Owns the format: a nonce, and the bytes encrypted with AES-256 in GCM. A name is authenticated with them, but not
contained: the place where they are stored, so that others who can write there can remove them, but not put one in the
place of another.

Each part of a place has a key of its own, which HKDF derives from the secret. So the nonces, of 96 random bits each,
are far from repeating under one key: that would take 2**32 of them for a chance of 2**-33 (NIST SP 800-38D), and a part
has some thousands.
"""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_VERSION = "elastic_driver sealed 1"
_NONCE_BYTES, _KEY_BYTES, _NAME_BYTES = 12, 32, 8
OVERHEAD = _NONCE_BYTES + 16
"""By how many bytes encryption lengthens the data."""


class UnsealError(ValueError):
    """Bytes were not sealed with this secret, under this name."""


class Secret:
    """Derives keys from a secret, for one place.

    Args:
        secret: a text that cannot be guessed.
        place: the place.

    Attributes:
        name: identifies this secret, without revealing it.
    """

    def __init__(self, secret: str, place: str) -> None:
        self._secret = secret.encode()
        self._place = place
        self.name = self._derive("name", _NAME_BYTES).hex()

    def seal(self, part: str) -> Seal:
        """Return the seal of a part of the place."""
        return Seal(self._derive(f"part {part}", _KEY_BYTES))

    def _derive(self, what: str, length: int) -> bytes:
        info = f"{_VERSION}\n{self._place}\n{what}".encode()
        return HKDF(algorithm=SHA256(), length=length, salt=None, info=info).derive(self._secret)


class Seal:
    """Encrypts and decrypts with one key."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def seal(self, data: bytes, name: str) -> bytes:
        """Seal bytes for the place of that name."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, name.encode())

    def unseal(self, data: bytes, name: str) -> bytes:
        """Reverse :meth:`seal`.

        Raises:
            UnsealError: they were sealed with another key or for another name, or were changed.
        """
        try:
            return self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], name.encode())
        except (InvalidTag, ValueError) as error:
            raise UnsealError("it was sealed with another key or for another place, or was modified") from error
