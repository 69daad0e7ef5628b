"""The page of a job that has ended: the page with the job's last state in it, in one file.

Owns the embedding of the state: as data that no browser executes, whatever a script has printed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from elastic_driver.errors import SettingsError
from elastic_driver.reporting.page.document import document, policy

VERSION = 1
"""The version of the recorded state."""


def recorded_page(recorded: Mapping[str, Any]) -> str:
    """Return one file of HTML that loads nothing, and needs no driver.

    Args:
        recorded: "version", "frame" (a whole one, of the feed), and "outputs": the last lines of workers by their keys.

    Raises:
        SettingsError: the record has another version, or is invalid.
    """
    version, frame, outputs = recorded.get("version"), recorded.get("frame"), recorded.get("outputs") or {}
    if version != VERSION:
        raise SettingsError(f"cannot show a page that was recorded in version {version!r}: this is version {VERSION}")
    if not isinstance(frame, Mapping) or not isinstance(outputs, Mapping):
        raise SettingsError("cannot show a page that was not recorded as a whole")
    page = document()
    # JSON of ASCII has no line separators that end a line of JavaScript. Characters that could end the element, or
    # begin a comment in it, are escaped.
    data = json.dumps(_plain({"frame": frame, "outputs": outputs}), separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    rules = policy(page).replace("connect-src 'self'", "connect-src 'none'")
    head, script, rest = page.partition("<script>")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{rules}">'
    head = head.replace('<meta charset="utf-8">', f'<meta charset="utf-8">{meta}', 1)
    return f'{head}<script type="application/json" id="recorded">{data}</script>\n{script}{rest}'


def _plain(value: Any) -> Any:
    """Convert to values that JSON has; other numbers become None."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(name): _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case str() | int() | None:
            return value
        case _:
            return str(value)
