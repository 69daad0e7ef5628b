"""The cgroup of this process: the kernel's record of its memory limit, and of the processes killed for exceeding it.

The memory limits of containers, pods and Slurm steps are limits of cgroups.
"""

from __future__ import annotations

import contextlib
from pathlib import Path, PurePosixPath

_MEMORY = "proc/meminfo"


def memory_files(version_1: str, version_2: str, root: Path = Path("/")) -> list[Path]:
    """Return where a file of a cgroup with a memory limit may be, this process's own first, then those above it.

    A container often sees its own cgroup only, as the topmost.

    Args:
        version_1, version_2: the file's name in each version of cgroups.
        root: of the file system.
    """
    found = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            own = PurePosixPath(path.strip("/"))
            folders = [own, *own.parents] if own.parts else [own]
            if "memory" in controllers.split(","):
                found += [root / "sys/fs/cgroup/memory" / folder / version_1 for folder in folders]
            elif number == "0" and not controllers:
                found += [root / "sys/fs/cgroup" / folder / version_2 for folder in folders]
    return found


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the limit of this process's memory, bytes, by its cgroups and the machine; None if unknown."""
    limits = []
    for file in memory_files("memory.limit_in_bytes", "memory.max", root):
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number
            limits.append(int(file.read_text()))
    with contextlib.suppress(OSError, ValueError):
        for line in (root / _MEMORY).read_text().splitlines():
            name, _, size = line.partition(":")
            if name == "MemTotal":
                limits.append(int(size.split()[0]) << 10)
    return min(limits, default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this process's cgroups may still use; None if none has a limit.

    Memory for file pages that were not read lately is reclaimed by the kernel before it runs short, and counts as free:
    a container's page cache grows up to its limit.
    """
    left = []
    for file in memory_files("memory.limit_in_bytes", "memory.max", root):
        usage = "memory.current" if file.name == "memory.max" else "memory.usage_in_bytes"
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number
            limit, used = int(file.read_text()), int(file.with_name(usage).read_text())
            left.append(limit - used + _reclaimable(file.with_name("memory.stat")))
    return max(min(left), 0) if left else None


def _reclaimable(stat: Path) -> int:
    """Return the reclaimable bytes of a cgroup and those below it; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        figures: dict[str, str] = dict(line.split() for line in stat.read_text().splitlines())
        # Version 1 has those of this cgroup alone under the shorter name.
        return int(figures.get("total_inactive_file") or figures.get("inactive_file") or 0)
    return 0
