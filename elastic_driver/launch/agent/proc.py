"""Facts about processes from /proc, as they are at this moment.

Owns the reading only, and of such files only that the kernel fills without waiting for the process: not its command
line, nor anything else for which a process hanging in the kernel would first have to release its memory.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from elastic_driver.system.process_name import stat_of

_MOST_BYTES = 8192
_MOST_PARENTS = 16


def read(path: str, *, most: int = _MOST_BYTES) -> bytes:
    """Read a whole file, up to so many bytes; b"" if it does not exist or cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        # The kernel returns long files in pieces of about a page.
        data = piece = os.read(descriptor, most)
        while most > _MOST_BYTES and piece and len(data) < most:
            piece = os.read(descriptor, most - len(data))
            data += piece
        return data
    except OSError:  # the process has just ended
        return b""
    finally:
        os.close(descriptor)


def lines(path: str) -> dict[bytes, bytes]:
    """Read a file of lines such as "VmRSS:     1234 kB", by their names."""
    return dict(line.partition(b":")[::2] for line in read(path).split(b"\n"))


def number(values: dict[bytes, bytes], name: bytes, *, base: int = 10) -> int:
    """Return the first word of one of the values as a number; 0 if there is none."""
    words = values.get(name, b"").split()
    with contextlib.suppress(ValueError, IndexError):
        return int(words[0], base)
    return 0


def moved(io: dict[bytes, bytes]) -> int:
    """Return the bytes that a process has read and written, from the lines of its io file.

    Adds the bytes of its system calls, which do not include recv() from sockets, and the bytes read from disks, which
    include memory-mapped files. Bytes in both are counted twice.
    """
    return sum(number(io, name) for name in (b"rchar", b"wchar", b"read_bytes"))


def stat(pid: int | str) -> list[bytes]:
    """Return the fields of a process's stat after its name, the state first; [] if there is no such process.

    Args:
        pid: its number; of a thread "PID/task/TID".
    """
    try:
        return stat_of(pid)[1]
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class Entry:
    """The basic facts of a process. Ticks are the kernel's.

    Attributes:
        parent, session: PIDs.
        started: start time, in ticks since the boot; identifies the process together with its PID.
        cpu: CPU time of its own and of its children that have ended, in ticks.
    """

    parent: int
    session: int
    started: int
    cpu: int


def table() -> dict[int, Entry]:
    """Return all processes of this machine. Blocks for about ten microseconds each."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and len(fields := stat(int(name))) >= 20:
            found[int(name)] = Entry(int(fields[1]), int(fields[3]), int(fields[19]), sum(map(int, fields[11:15])))
    return found


def descends_from(pid: int, started: int) -> bool:
    """Return whether a process is the started one, in its session, or a descendant of it."""
    with contextlib.suppress(OSError):
        if pid == started or os.getsid(pid) == started:
            return True
    for _ in range(_MOST_PARENTS):
        fields = stat(pid)
        if len(fields) < 2 or pid <= 1:
            return False
        pid = int(fields[1])
        if pid == started:
            return True
    return False
