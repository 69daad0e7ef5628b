"""Whether code belongs to an installed package or to the user."""

from __future__ import annotations

import os

FOLDERS = ("site-packages", "dist-packages")
"""Where installers put packages; Python searches them by itself."""
_MARKS = tuple(f"{os.sep}{name}{os.sep}" for name in FOLDERS)


def within_installed(path: str) -> str:
    """Return a file's path within the folder in which it was installed; "" if it was not put there by an installer."""
    for mark in _MARKS:
        _, found, rest = path.rpartition(mark)
        if found:
            return rest
    return ""
