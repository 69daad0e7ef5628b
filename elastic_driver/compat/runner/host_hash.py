"""``horovod.runner.common.util.host_hash``: a name for a machine, or for a container on it, that shares memory."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

__all__ = ["host_hash"]

_NAMESPACES = Path("/proc/self/ns")


def _hash(string: str) -> str:
    return hashlib.md5(string.encode(), usedforsecurity=False).hexdigest()


def host_hash(salt: object = None) -> str:
    """Return ``HOST-DIGEST``, the same for all processes that share a machine and its namespaces.

    Args:
        salt: if not empty, added to the digest's input.
    """
    name = socket.gethostname()
    namespaces = sorted(str(link.readlink()) for link in _NAMESPACES.iterdir()) if _NAMESPACES.is_dir() else []
    parts = [name, *namespaces, *([str(salt)] if salt else [])]
    return f"{name.partition('.')[0]}-{_hash(' '.join(parts))}"
