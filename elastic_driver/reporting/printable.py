"""Makes foreign texts safe in our lines: texts of hosts, scripts and errors must not control the terminal.

Removes the control characters of both sets (C0 and DEL; C1, U+0080 to U+009F, of which U+009B starts an escape sequence
by itself), line and paragraph separators, and characters that change the direction of text, with which a line would
read differently.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any, TypeVar

_NOT_PRINTED = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]+")
# The second set in UTF-8; its first byte also begins characters that must stay.
_C1 = re.compile(b"\xc2[\x80-\x9f]")

_T = TypeVar("_T")


def one_line(text: str) -> str:
    """Return the text on one line, without characters that a terminal would interpret."""
    return _NOT_PRINTED.sub(" ", text)


def without_c1(data: bytes) -> bytes:
    """Filter a program's output for a terminal. Escape sequences stay: colors and progress bars consist of them.

    The second set of control characters has no such use, and evades a search for escape sequences.
    """
    return _C1.sub("\ufffd".encode(), data) if b"\xc2" in data else data


def without_home(text: str) -> str:
    """Replace the user's home by a tilde in each path in a text."""
    home = os.path.expanduser("~").rstrip("/")
    return re.sub(rf"(?<![\w/.-]){re.escape(home)}(?![\w.-])", "~", text) if home.startswith("/") else text


def all_without_home(value: _T) -> _T:
    """Do the same for each text in dataclasses, lists, tuples and the values of dictionaries, recursively."""
    return _all_without_home(value)  # type: ignore[no-any-return]


def _all_without_home(value: Any) -> Any:
    if isinstance(value, str):
        return without_home(value)
    if isinstance(value, dict):
        return {key: _all_without_home(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_all_without_home, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **_all_without_home(fields))
    return value
