"""The environment of a program whose torch launcher runs its workers by elasticrun (``elasticrun wrap``).

Owns the variables that such a program gets for that, and removes them for its workers. The code that runs in the
program is in ``wrap_hook/sitecustomize.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from elastic_driver.launch.dial.here import source_folder

_HOOK = str(Path(__file__).absolute().with_name("wrap_hook"))
_PATH = "PYTHONPATH"


def hooked(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which torch's launcher runs its workers by elasticrun."""
    entries = [_HOOK, environ.get(_PATH, ""), source_folder()]
    return {**environ, _PATH: os.pathsep.join(filter(None, entries))}


def unhooked(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the same environment without the hook, for the workers."""
    entries = [entry for entry in environ.get(_PATH, "").split(os.pathsep) if entry != _HOOK]
    kept = {name: value for name, value in environ.items() if name != _PATH}
    return {**kept, _PATH: os.pathsep.join(entries)} if any(entries) else kept
