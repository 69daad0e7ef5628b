"""The keys of a job: one that never leaves the driver, and those derived from it, one for each who may say something.

Owns how keys are made and the names of the variables that hand them to workers. How a key proves something is the
business of whoever holds it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import WorkerId

KEY_BYTES = 32

# In hexadecimal digits, in a worker's environment, which only its own user can read.
ENV_RANKS_KEY = "ELASTIC_DRIVER_RANKS_KEY"  # shared by the workers of a job: proves them to each other


@dataclass(frozen=True, slots=True)
class JobKey:
    """The job's key. What is derived from it tells nothing of it, nor of what else was derived."""

    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        """One that nobody can guess."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def of_worker(self, worker: WorkerId) -> bytes:
        """With which this worker and the driver prove themselves to each other."""
        return self._derive(f"worker {worker.key}")

    def of_ranks(self) -> bytes:
        """With which workers prove themselves to each other, and what they send to each other."""
        return self._derive("ranks")

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(self.secret, f"elastic_driver {purpose}".encode(), hashlib.sha256)


def ranks_key(environ: Mapping[str, str]) -> bytes:
    """The key that the workers of this process's job share; empty where no driver has started this process.

    Raises:
        SettingsError: the variable holds something else than a key.
    """
    text = environ.get(ENV_RANKS_KEY, "")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b"?"
    if text and len(key) != KEY_BYTES:
        raise SettingsError(f"cannot use {ENV_RANKS_KEY}: it is not a key of {KEY_BYTES} bytes in hexadecimal digits")
    return key
