"""What runs as an agent, and where this package is for the python that runs it.

Imports little: see :mod:`elastic_driver.launch.dial.early`.
"""

from __future__ import annotations

import os
from pathlib import Path

AGENT = "elastic_driver.launch.agent"

# Where installers put packages; python looks there by itself.
_INSTALLED = ("site-packages", "dist-packages")


def source_folder() -> str:
    """The folder from which this package is imported, if python does not look there by itself; else ""."""
    folder = Path(__file__).absolute().parents[3]
    return "" if folder.name in _INSTALLED else str(folder)


def local_environment() -> dict[str, str]:
    """This process's environment, in which the agent finds this same package."""
    env = dict(os.environ)
    if folder := source_folder():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, env.get("PYTHONPATH"))))
    return env
