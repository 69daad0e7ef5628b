"""The folder through which workers find the ``horovod`` that is not installed, and its place on their PYTHONPATH.

Pure: text in, text out. Imported by the driver's side, so it loads nothing else of this folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from elastic_driver.errors import SettingsError

AUTO, ALWAYS, NEVER = MODES = ("auto", "always", "never")
ENV_SHIM = "ELASTIC_DRIVER_HOROVOD_SHIM"
SHIM_FOLDER = str(Path(__file__).parents[1] / "compat" / "shim")


def check_mode(mode: str, said_by: str) -> str:
    """The mode in lower case.

    Raises:
        SettingsError: there is no such mode.
    """
    lower = mode.lower()
    if lower not in MODES:
        raise SettingsError(f"{said_by} {mode!r} is not one of {', '.join(MODES)}")
    return lower


def with_shim(python_path: str | None, mode: str) -> str | None:
    """PYTHONPATH for a worker.

    Args:
        python_path: the user's; None when the variable is not set.
        mode: "auto" puts the folder behind the user's own (it is still before the installed packages: the package in
            the folder looks for an installed Horovod itself), "always" before them, "never" takes it away.

    Returns:
        None when the variable is not to be set.
    """
    # An outer job's folder goes, whatever its mode was. Empty entries stay: they mean the working directory.
    entries = python_path.split(os.pathsep) if python_path else []
    kept = [entry for entry in entries if entry != SHIM_FOLDER]
    if mode == NEVER:
        return os.pathsep.join(kept) if kept else None
    return os.pathsep.join([SHIM_FOLDER, *kept] if mode == ALWAYS else [*kept, SHIM_FOLDER])
