"""Whether the kernel's OOM killer has ended a process of this process's cgroup.

Owns the count that it goes by. The kernel counts in a cgroup whom it kills, before it does; those, too, that it kills
since the whole machine is out of memory.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from elastic_driver.launch.words import OUT_OF_MEMORY, ExitStatus
from elastic_driver.system.cgroups import memory_files

# A shell says so when SIGKILL has ended its command.
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


class OomKills:
    """The kills in this process's cgroup, and those below it, of which nobody has been told yet.

    Args:
        root: of the file system.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._file = next(
            (file for file in memory_files("memory.oom_control", "memory.events", root) if _count(file) is not None),
            None,
        )
        self.forget()

    def forget(self) -> None:
        """What was killed until now is no worker's end."""
        self._told = self._now()

    def note(self, status: ExitStatus) -> str:
        """What is to be said of this end; "" where the OOM killer has nothing to do with it. Ask once for each."""
        if status.returncode not in _KILLED or self._now() <= self._told:
            return ""
        self._told += 1
        return OUT_OF_MEMORY

    def _now(self) -> int:
        return 0 if self._file is None else _count(self._file) or 0


def _count(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return None
