"""Bytes that only those can read and make who have a secret: what of a job is in etcd, where others may look.

Owns the form: a nonce, and what AES-256 in GCM makes of the bytes. A name is authenticated with them, and not in them:
where they are, so that whoever can write there can remove them, and not put one in the place of another.

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
"""By how many bytes it is longer."""


class UnsealError(ValueError):
    """Bytes are not as somebody with this secret has sealed them, under this name."""


class Secret:
    """What is derived from a secret, for one place.

    Args:
        secret: a text that nobody can guess.
        place: for which.

    Attributes:
        name: tells this secret from others, and says nothing of it.
    """

    def __init__(self, secret: str, place: str) -> None:
        self._secret = secret.encode()
        self._place = place
        self.name = self._derive("name", _NAME_BYTES).hex()

    def seal(self, part: str) -> Seal:
        """The seal of a part of the place."""
        return Seal(self._derive(f"part {part}", _KEY_BYTES))

    def _derive(self, what: str, length: int) -> bytes:
        info = f"{_VERSION}\n{self._place}\n{what}".encode()
        return HKDF(algorithm=SHA256(), length=length, salt=None, info=info).derive(self._secret)


class Seal:
    """Of one key."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def seal(self, data: bytes, name: str) -> bytes:
        """Seals bytes for the place of that name."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, name.encode())

    def unseal(self, data: bytes, name: str) -> bytes:
        """The inverse of :meth:`seal`.

        Raises:
            UnsealError: they are not of this key, not of this name, or were changed.
        """
        try:
            return self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], name.encode())
        except (InvalidTag, ValueError) as error:
            raise UnsealError("it was not sealed with this key for this place, or was changed") from error
