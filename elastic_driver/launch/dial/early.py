"""The agent of the driver's own machine, started before the driver itself is imported: both take a sixth of a second.

Owns that process until it is dialled, or is not needed. Until then it waits for its bootstrap on its standard input,
and ends with this process. Imports little.
"""

from __future__ import annotations

import contextlib
import sys

from elastic_driver.launch.dial.here import AGENT, local_environment, shared_stdin
from elastic_driver.launch.dial.spawned import Spawned, spawn


def local_command(module: str = AGENT) -> list[str]:
    """Return the command line of an agent here."""
    return [sys.executable, "-P", "-m", module]


class EarlyAgent:
    """A process that may become this machine's agent.

    Args:
        module: what to run.
        with_stdin: whether it has this process's standard input.
    """

    def __init__(self, module: str = AGENT, *, with_stdin: bool = True) -> None:
        self._spawned: Spawned | None = None
        with contextlib.suppress(OSError):  # a later start of an agent reports the error
            more = shared_stdin() if with_stdin else ()
            self._spawned = spawn(local_command(module), local_environment(), with_group=True, more=more)

    def take(self) -> Spawned | None:
        """Hand the process over to the caller; None if it is no longer available."""
        spawned, self._spawned = self._spawned, None
        return spawned

    def dismiss(self) -> None:
        """End the process, unless it was taken. Blocks until it is dead. Harmless when repeated."""
        spawned = self.take()
        if spawned is not None:
            spawned.end()
