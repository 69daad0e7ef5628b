"""The cgroup that this process is in: where the kernel says how much memory it may have, and whom it has killed for it.

A container's limit of memory, a pod's and a Slurm step's are limits of cgroups.
"""

from __future__ import annotations

import contextlib
from pathlib import Path, PurePosixPath

_MEMORY = "proc/meminfo"


def memory_files(version_1: str, version_2: str, root: Path = Path("/")) -> list[Path]:
    """Where a file may be that a cgroup with a limit of memory has, this process's own first, then those above it.

    A container often sees its own cgroup only, as the uppermost.

    Args:
        version_1, version_2: what it is called there.
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
    """The bytes of memory that this process can have at most, by its cgroups and the machine; None if nobody says."""
    limits = []
    for file in memory_files("memory.limit_in_bytes", "memory.max", root):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            limits.append(int(file.read_text()))
    with contextlib.suppress(OSError, ValueError):
        for line in (root / _MEMORY).read_text().splitlines():
            name, _, size = line.partition(":")
            if name == "MemTotal":
                limits.append(int(size.split()[0]) << 10)
    return min(limits, default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """The bytes that this process's cgroups let it have beside what they hold now; None where none has a limit.

    What they hold of files that were not read lately is given back by the kernel before it is short, and counts as
    free: a container's cache of files grows up to its limit.
    """
    left = []
    for file in memory_files("memory.limit_in_bytes", "memory.max", root):
        usage = "memory.current" if file.name == "memory.max" else "memory.usage_in_bytes"
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            limit, used = int(file.read_text()), int(file.with_name(usage).read_text())
            left.append(limit - used + _reclaimable(file.with_name("memory.stat")))
    return max(min(left), 0) if left else None


def _reclaimable(stat: Path) -> int:
    """Bytes of a cgroup and those below it; 0 where nobody says."""
    with contextlib.suppress(OSError, ValueError):
        figures: dict[str, str] = dict(line.split() for line in stat.read_text().splitlines())
        # Version 1 has those of this cgroup alone under the shorter name.
        return int(figures.get("total_inactive_file") or figures.get("inactive_file") or 0)
    return 0
