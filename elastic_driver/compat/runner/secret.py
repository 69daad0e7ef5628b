"""``horovod.runner.common.util.secret``: keys, and codes that prove that a message is of who has the key."""

from __future__ import annotations

import hmac
import os

__all__ = ["DIGEST_LENGTH", "HOROVOD_SECRET_KEY", "SECRET_LENGTH", "check_digest", "compute_digest", "make_secret_key"]

SECRET_LENGTH = 32  # bytes, like the next
DIGEST_LENGTH = 32
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"


def make_secret_key() -> bytes:
    """A new random key."""
    return os.urandom(SECRET_LENGTH)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """HMAC-SHA256."""
    return hmac.digest(key, message, "sha256")


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Whether the code is that of the message; in constant time."""
    return hmac.compare_digest(compute_digest(key, message), digest)
