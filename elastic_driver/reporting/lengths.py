"""Lengths of time, for users."""

from __future__ import annotations


def length(seconds: float) -> str:
    """Format a length of time: "95 s", "35 min", "7 h", "3 d"."""
    whole = max(0, int(seconds))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if whole >= 2 * size:
            return f"{whole // size} {unit}"
    return f"{whole} s"
