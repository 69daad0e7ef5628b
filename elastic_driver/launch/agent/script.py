"""The script that a worker's command runs, as it is on this host: so that the driver sees where hosts have others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from elastic_driver.launch.warm.preload import read_command

# No script is that long; whatever is would be read for nothing.
_MOST_BYTES = 16 << 20


def script_of(command: Sequence[str], cwd: Path) -> tuple[str, str]:
    """The path of a command's script, or of its module, and the SHA-256 of what is in it, in hexadecimal digits.

    Blocks for a read of that file. Two empty texts where the command names no file, or where it cannot be read.

    Args:
        command: what the worker runs.
        cwd: its working directory.
    """
    try:
        found = read_command(command, cwd)
        if found is None or not found.files:
            return "", ""
        path = found.files[-1]
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return "", ""
    return ("", "") if len(text) > _MOST_BYTES else (str(path), hashlib.sha256(text).hexdigest())
