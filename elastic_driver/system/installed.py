"""Whose code a file is: what an installer has put somewhere, or the user's own."""

from __future__ import annotations

import os

FOLDERS = ("site-packages", "dist-packages")
"""Where installers put packages; Python looks there by itself."""
_MARKS = tuple(f"{os.sep}{name}{os.sep}" for name in FOLDERS)


def within_installed(path: str) -> str:
    """A file's path within the folder that it was installed in; "" for one that no installer has put there."""
    for mark in _MARKS:
        _, found, rest = path.rpartition(mark)
        if found:
            return rest
    return ""
