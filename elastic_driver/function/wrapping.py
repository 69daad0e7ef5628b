"""The environment of a program in which torch's launcher runs its workers by elasticrun (``elasticrun wrap``).

Owns what such a program gets for that, and what of it its workers do not get. What happens in the program is told by
``wrap_hook/sitecustomize.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from elastic_driver.launch.dial.here import source_folder

_HOOK = str(Path(__file__).absolute().with_name("wrap_hook"))
_PATH = "PYTHONPATH"


def hooked(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which torch's launcher runs its workers by elasticrun."""
    entries = [_HOOK, environ.get(_PATH, ""), source_folder()]
    return {**environ, _PATH: os.pathsep.join(filter(None, entries))}


def unhooked(environ: Mapping[str, str]) -> dict[str, str]:
    """The same without that, for the workers."""
    entries = [entry for entry in environ.get(_PATH, "").split(os.pathsep) if entry != _HOOK]
    kept = {name: value for name, value in environ.items() if name != _PATH}
    return {**kept, _PATH: os.pathsep.join(entries)} if any(entries) else kept
