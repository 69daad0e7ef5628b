"""What must not stand in a report that is shown to anybody. Owns how a user's home is left out of messages."""

from __future__ import annotations

import os


def without_home(text: str) -> str:
    """The text with ``~`` for this user's home folder on this machine."""
    home = os.path.expanduser("~").rstrip("/")
    return text.replace(home, "~") if home else text
