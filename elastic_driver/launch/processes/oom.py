"""Whether the kernel's OOM killer has ended a process of this process's cgroup.

Owns the count used for that. The kernel counts a kill in the cgroup before it kills; also kills because the whole
machine is out of memory.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from elastic_driver.launch.words import OUT_OF_MEMORY, ExitStatus
from elastic_driver.system.cgroups import memory_files

# A shell returns the latter when SIGKILL has ended its command.
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


class OomKills:
    """The kills in this process's cgroup, and those below it, that have not been reported yet.

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
        """Forget the kills so far: attribute none of them to a worker."""
        self._told = self._now()

    def note(self, status: ExitStatus) -> str:
        """Return a note on this end; "" if it was not the OOM killer. To be called once for each end."""
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
