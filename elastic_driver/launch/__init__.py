"""Starting, supervising and ending worker processes."""

from __future__ import annotations

from elastic_driver.launch.local import LocalLauncher
from elastic_driver.launch.output import OutputSink, Stream
from elastic_driver.launch.process import CommandNotFoundError, ExitStatus, Launcher, WorkerProcess

__all__ = [
    "CommandNotFoundError",
    "ExitStatus",
    "Launcher",
    "LocalLauncher",
    "OutputSink",
    "Stream",
    "WorkerProcess",
]
