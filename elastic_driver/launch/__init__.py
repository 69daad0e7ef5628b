"""Starting, supervising and ending worker processes."""

from elastic_driver.launch.local import LocalLauncher
from elastic_driver.launch.process import (
    CommandNotFoundError,
    ExitStatus,
    Launcher,
    WorkerProcess,
)

__all__ = [
    "CommandNotFoundError",
    "ExitStatus",
    "Launcher",
    "LocalLauncher",
    "WorkerProcess",
]
