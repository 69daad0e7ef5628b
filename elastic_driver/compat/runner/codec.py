"""``horovod.runner.common.util.codec``: objects as text, by cloudpickle."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import cloudpickle

__all__ = ["dumps_base64", "loads_base64"]


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:  # noqa: FBT001, FBT002 - Horovod's signature
    """Encode an object as base64: a string, or bytes if ``to_ascii`` is false."""
    encoded = base64.b64encode(cloudpickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """Decode an object. This can run any code, so the text must come from a trusted source."""
    return cloudpickle.loads(base64.b64decode(encoded))
