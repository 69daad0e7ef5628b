"""Follows a file of JSON lines that others write: each line is read once, however often one looks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class JsonLines:
    """A file that only grows. It need not be there yet; a line counts when its end is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._lines: list[dict[str, Any]] = []

    def new(self) -> list[dict[str, Any]]:
        """The lines that have come since the last look."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        lines = [json.loads(line) for line in whole.splitlines()]
        self._lines += lines
        return lines

    def all(self) -> list[dict[str, Any]]:
        """All lines so far, in a list of the caller's own."""
        self.new()
        return list(self._lines)
