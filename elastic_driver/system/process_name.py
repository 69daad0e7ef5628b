"""What names this machine, and a process of it for longer than its id does: boot, namespace, id, start.

Owns the form of such a name, and reads /proc. Whoever was given one can tell whether that very process lives.
"""

from __future__ import annotations

import os


def name_of_this_process() -> str:
    """What tells this process from all others, of whatever machine and time: for the processes that it owns.

    Returns:
        "" where the system does not say.
    """
    try:
        _, started = look_up(os.getpid())
        return f"{place_of_processes()} {os.getpid()} {started}"
    except (OSError, ValueError, IndexError):
        return ""


def place_of_processes() -> str:
    """The boot of this machine, and in it the namespace that process ids belong to."""
    return f"{_boot()} {os.readlink('/proc/self/ns/pid')}"


def boot_id() -> str:
    """What tells this boot of the machine from all others; "" where the system does not say."""
    try:
        return _boot()
    except OSError:
        return ""


def network_id() -> str:
    """What tells this process's network from those of other containers of the machine; "" likewise."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def look_up(pid: int) -> tuple[str, int]:
    """State and time of start of a process.

    Raises:
        OSError: there is none.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        # Behind the name, which may hold anything: the state is field 3, the time of the start 22.
        fields = file.read().rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether a process stands still, by a signal or under a debugger. One that is gone does not."""
    try:
        return look_up(pid)[0] in "Tt"
    except (OSError, ValueError, IndexError):
        return False


def is_below(pid: int, ancestor: int) -> bool:
    """Whether a process is that one, or a descendant of it that no ancestor has left behind."""
    try:
        while pid not in (0, 1, ancestor):
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return False
    return pid == ancestor
