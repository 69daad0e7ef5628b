"""The folder with our stand-in for an uninstalled ``horovod``, and its place on workers' PYTHONPATH.

Pure: text in, text out. The driver's side imports it, so it loads nothing else of this folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from elastic_driver.errors import SettingsError

AUTO, ALWAYS, NEVER = MODES = ("auto", "always", "never")
ENV_SHIM = "ELASTIC_DRIVER_HOROVOD_SHIM"
SHIM_FOLDER = str(Path(__file__).parents[1] / "compat" / "shim")


def check_mode(mode: str, said_by: str) -> str:
    """Return the mode in lower case.

    Raises:
        SettingsError: there is no such mode.
    """
    lower = mode.lower()
    if lower not in MODES:
        raise SettingsError(f"{said_by} {mode!r} is not one of {', '.join(MODES)}")
    return lower


def with_shim(python_path: str | None, mode: str) -> str | None:
    """Return the PYTHONPATH for a worker.

    Args:
        python_path: the user's; None if the variable is not set.
        mode: "auto" puts the folder after the user's own (but still before the installed packages: the package in the
            folder looks for an installed Horovod itself), "always" before them, "never" removes it.

    Returns:
        None if the variable is not to be set.
    """
    # Remove an outer job's folder, whatever its mode was. Keep empty entries: they mean the working directory.
    entries = python_path.split(os.pathsep) if python_path else []
    kept = [entry for entry in entries if entry != SHIM_FOLDER]
    if mode == NEVER:
        return os.pathsep.join(kept) if kept else None
    return os.pathsep.join([SHIM_FOLDER, *kept] if mode == ALWAYS else [*kept, SHIM_FOLDER])
