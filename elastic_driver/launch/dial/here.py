"""The module that runs as an agent, and the folder of this package for the python that runs it.

Imports little: see :mod:`elastic_driver.launch.dial.early`.
"""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Mapping
from pathlib import Path

from elastic_driver.system.installed import FOLDERS

AGENT = "elastic_driver.launch.agent"

# High enough not to collide with scripts that use descriptors by number, like the tether's.
_FROM = 100


def source_folder() -> str:
    """Return the folder from which this package is imported, if python does not search it by itself; else ""."""
    folder = Path(__file__).absolute().parents[3]
    return "" if folder.name in FOLDERS else str(folder)


@functools.cache
def shared_stdin() -> tuple[int, ...]:
    """Return a copy of this process's standard input, for agents on this machine: their workers may read from it.

    So nothing is read ahead of a worker, and what it does not read is left for the next reader. Empty for a terminal,
    which only its foreground may read, and for /dev/null.
    """
    try:
        is_nothing = os.path.samestat(os.fstat(0), os.stat(os.devnull))
        return () if is_nothing or os.isatty(0) else (fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _FROM),)
    except OSError:  # it is closed, or no descriptor is free
        return ()


def local_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which an agent finds this same package, based on this process's by default."""
    env = dict(os.environ if environ is None else environ)
    if folder := source_folder():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, env.get("PYTHONPATH"))))
    return env
