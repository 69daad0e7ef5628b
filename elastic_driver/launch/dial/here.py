"""What runs as an agent, and where this package is for the python that runs it.

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

# Out of the way of scripts that use descriptors by number, as the tether's.
_FROM = 100


def source_folder() -> str:
    """The folder from which this package is imported, if python does not look there by itself; else ""."""
    folder = Path(__file__).absolute().parents[3]
    return "" if folder.name in FOLDERS else str(folder)


@functools.cache
def shared_stdin() -> tuple[int, ...]:
    """This process's standard input once more, for agents on this machine: their workers may read from it themselves.

    Nothing is read ahead of a worker then, and what it leaves is left for whoever reads next. None of a terminal, which
    only its foreground may read, and of /dev/null.
    """
    try:
        is_nothing = os.path.samestat(os.fstat(0), os.stat(os.devnull))
        return () if is_nothing or os.isatty(0) else (fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _FROM),)
    except OSError:  # it is closed, or no descriptor is free
        return ()


def local_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment in which an agent finds this same package; this process's, where none is given."""
    env = dict(os.environ if environ is None else environ)
    if folder := source_folder():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, env.get("PYTHONPATH"))))
    return env
