"""``horovod.runner.common.util.secret``: keys, and authentication codes of messages."""

from __future__ import annotations

import hmac
import os

__all__ = ["DIGEST_LENGTH", "HOROVOD_SECRET_KEY", "SECRET_LENGTH", "check_digest", "compute_digest", "make_secret_key"]

SECRET_LENGTH = 32  # bytes; also the next constant
DIGEST_LENGTH = 32
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"


def make_secret_key() -> bytes:
    """Create a random key."""
    return os.urandom(SECRET_LENGTH)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """Return the HMAC-SHA256 of a message."""
    return hmac.digest(key, message, "sha256")


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Return whether the digest is the message's; compares in constant time."""
    return hmac.compare_digest(compute_digest(key, message), digest)
