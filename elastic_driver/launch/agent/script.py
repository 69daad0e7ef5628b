"""The script that a worker's command runs on this host, so that the driver notices if hosts have different ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from elastic_driver.launch.warm.preload import read_command

# No script is that long; reading anything longer would be wasted.
_MOST_BYTES = 16 << 20


def script_of(command: Sequence[str], cwd: Path) -> tuple[str, str]:
    """Return the path of a command's script or module, and the SHA-256 of its content in hexadecimal digits.

    Blocks while it reads that file. Returns two empty strings if the command names no file, or it cannot be read.

    Args:
        command: the command that the worker runs.
        cwd: its working directory.
    """
    try:
        found = read_command(command, cwd)
        if found is None or not found.files:
            return "", ""
        path = found.files[-1]
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError):  # ValueError: not a valid file name
        return "", ""
    return ("", "") if len(text) > _MOST_BYTES else (str(path), hashlib.sha256(text).hexdigest())
