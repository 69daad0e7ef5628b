"""What /proc says of processes, read as it is there this moment.

Owns the reading only. Of files that the kernel fills without waiting for the process: not its command line, nor
anything else for which a process that hangs in the kernel would have to let go of its memory first.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

_MOST_BYTES = 8192
_MOST_PARENTS = 16


def read(path: str, *, most: int = _MOST_BYTES) -> bytes:
    """All of a file, up to so many bytes; b"" when there is none, or it is not to be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        # The kernel gives long ones in pieces of a page or so.
        data = piece = os.read(descriptor, most)
        while most > _MOST_BYTES and piece and len(data) < most:
            piece = os.read(descriptor, most - len(data))
            data += piece
        return data
    except OSError:  # the process ends this moment
        return b""
    finally:
        os.close(descriptor)


def lines(path: str) -> dict[bytes, bytes]:
    """A file of lines such as "VmRSS:     1234 kB", by their names."""
    return dict(line.partition(b":")[::2] for line in read(path).split(b"\n"))


def number(values: dict[bytes, bytes], name: bytes, *, base: int = 10) -> int:
    """The first word of one of them; 0 where there is none."""
    words = values.get(name, b"").split()
    with contextlib.suppress(ValueError, IndexError):
        return int(words[0], base)
    return 0


def moved(io: dict[bytes, bytes]) -> int:
    """The bytes that a process has read and written, by the lines of its io.

    These are what its system calls have counted, which leave out what comes from sockets by recv(), and what was read
    in from discs: so is a file that is mapped into memory. What both count is counted twice.
    """
    return sum(number(io, name) for name in (b"rchar", b"wchar", b"read_bytes"))


def stat(pid: int) -> list[bytes]:
    """The fields of a process's stat behind its name, the state first; [] when there is no such process."""
    return read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


@dataclass(frozen=True, slots=True)
class Entry:
    """What is seen of any process at a glance. Ticks are the kernel's.

    Attributes:
        parent, session: processes, by number.
        started: when, in ticks since the boot: with its number that is which process it is.
        cpu: CPU time of its own and of its children that have ended, in ticks.
    """

    parent: int
    session: int
    started: int
    cpu: int


def table() -> dict[int, Entry]:
    """All processes of this machine. Blocks for about ten microseconds each."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and len(fields := stat(int(name))) >= 20:
            found[int(name)] = Entry(int(fields[1]), int(fields[3]), int(fields[19]), sum(map(int, fields[11:15])))
    return found


def descends_from(pid: int, started: int) -> bool:
    """Whether a process is the started one, of its session, or a child of a child of it."""
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
