"""What a worker's main thread waits for outside its process, according to the kernel: a lock, a child, a connection.

Owns reading that. Used for workers that stand still only. Not reported: a lock inside the process (futex), and a lock
or connection whose holder or other end is another worker of this host. If the kernel gives no information, there is
nothing to report. Judges nothing.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import itertools
import os
import platform
import select
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from elastic_driver.hosts import with_number
from elastic_driver.launch.agent import proc
from elastic_driver.launch.processes.sockets import in_kernel, peer_process

# Numbers of system calls, from the kernel's headers.
_X86_64 = {
    "read": (0, 19),  # and readv
    "write": (1, 20),
    "poll": (7, 271),
    "select": (23, 270),
    "epoll": (232, 281, 441),
    "connect": (42,),
    "send": (44, 46, 307),
    "receive": (45, 47, 299),
    "wait": (61, 247),
    "sleep": (35, 230),
    "flock": (73,),
    "fcntl": (72,),
}
_AARCH64 = {
    "read": (63, 65),
    "write": (64, 66),
    "poll": (73,),
    "select": (72,),
    "epoll": (22, 441),
    "connect": (203,),
    "send": (206, 211, 269),
    "receive": (207, 212, 243),
    "wait": (260, 95),
    "sleep": (101, 115),
    "flock": (32,),
    "fcntl": (25,),
}
_CALLS = {
    number: name
    for name, numbers in {"x86_64": _X86_64, "aarch64": _AARCH64}.get(platform.machine(), {}).items()
    for number in numbers
}
_ON_ONE = ("read", "write", "connect", "send", "receive")
# F_SETLKW and F_OFD_SETLKW.
_WAITS_FOR_LOCK = (7, 38)
_POLLED = struct.Struct("=ihh")
_MOST_DESCRIPTORS, _MOST_BYTES = 1024, 4 << 20

_Sockets: TypeAlias = Mapping[bytes, list[bytes]]


@dataclass(frozen=True, slots=True)
class Wait:
    """The object of a wait.

    Attributes:
        what: in words: "a file lock (flock) that process 12 holds".
        peer: the address of the other end of a connection to another host; else "".
    """

    what: str
    peer: str = ""


def of_main_thread(
    pid: int, *, children: Callable[[], Collection[int]], others: Callable[[], Collection[int]]
) -> Wait | None:
    """Return what the main thread of a process waits for outside it; None if nothing is known.

    Args:
        pid: the process.
        children: returns its descendants.
        others: returns the processes of this host's other workers, and any others of the job.
    """
    words = proc.read(f"/proc/{pid}/task/{pid}/syscall").split()
    if len(words) < 7 or not words[0].isdigit():
        return None
    call, first, second, third, fourth = _CALLS.get(int(words[0]), ""), *(int(word, 16) for word in words[1:5])
    if call == "wait":
        return Wait("a child process")
    if call == "sleep":
        return Wait("a sleep to end")
    if call == "flock" or (call == "fcntl" and second in _WAITS_FOR_LOCK):
        return _lock(pid, call, others)
    if call in _ON_ONE:
        descriptors: Iterator[int] = iter((first,))
    elif call == "poll":
        descriptors = _polled(pid, first, second)
    elif call == "select":
        descriptors = _selected(pid, first, (second, third, fourth))
    elif call == "epoll":
        descriptors = _watched(pid, first)
    else:
        return None
    # Evaluated for many descriptors, and each walks through /proc.
    children, others = functools.cache(children), functools.cache(others)
    sockets = functools.cache(functools.partial(_sockets, pid))
    for descriptor in itertools.islice(descriptors, _MOST_DESCRIPTORS):
        if (found := _other_end(pid, descriptor, sockets, children, others)) is not None:
            return found
    return None


def _lock(pid: int, call: str, others: Callable[[], Collection[int]]) -> Wait | None:
    """Return the wait for a file lock; None if another thread of the process or another worker holds it."""
    held_by: dict[bytes, int] = {}
    holder = 0
    # A lock, followed by those who wait for it: "7: FLOCK ADVISORY WRITE 12 fe:00:34 0 EOF", "7: -> FLOCK ...".
    for line in proc.read("/proc/locks", most=_MOST_BYTES).split(b"\n"):
        number, *words = line.split() or [b""]
        waits = words[:1] == [b"->"]
        of = words[4:5] if waits else words[3:4]
        if of and of[0].isdigit():  # not a lock of an open file description
            if not waits:
                held_by[number] = int(of[0])
            elif int(of[0]) == pid:
                holder = held_by.get(number, 0)
    if holder == pid or (holder > 0 and holder in others()):
        return None
    return Wait(f"a file lock ({call})" + (f" that process {holder} holds" if holder > 0 else ""))


def _polled(pid: int, address: int, number: int) -> Iterator[int]:
    """Yield the descriptors in the array of a poll()."""
    size = min(number, _MOST_DESCRIPTORS) * _POLLED.size
    for descriptor, _, _ in _POLLED.iter_unpack(_memory(pid, address, size)):
        if descriptor >= 0:
            yield descriptor


def _selected(pid: int, number: int, sets: Collection[int]) -> Iterator[int]:
    """Yield the descriptors in the sets of a select()."""
    size = (min(number, _MOST_DESCRIPTORS) + 63) // 64 * 8
    for address in sets:
        bits = int.from_bytes(_memory(pid, address, size) if address else b"", "little")
        yield from (descriptor for descriptor in range(8 * size) if bits >> descriptor & 1)


def _watched(pid: int, epoll: int) -> Iterator[int]:
    """Yield the descriptors that an epoll instance watches."""
    for line in proc.read(f"/proc/{pid}/fdinfo/{epoll}", most=_MOST_BYTES).split(b"\n"):
        words = line.split()
        if words[:1] == [b"tfd:"] and int(words[3], 16) & ~select.EPOLLET:
            yield int(words[1])


def _memory(pid: int, address: int, size: int) -> bytes:
    """Return part of a process's memory; b"" if unavailable, also because reading it might block on a disk."""
    with contextlib.suppress(OSError, OverflowError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            if proc.stat(f"{pid}/task/{thread}")[:1] == [b"D"]:
                return b""
        descriptor = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(descriptor, size, address)
        finally:
            os.close(descriptor)
        if len(data) == size:
            return data
    return b""


def _other_end(
    pid: int,
    descriptor: int,
    sockets: Callable[[str], _Sockets],
    children: Callable[[], Collection[int]],
    others: Callable[[], Collection[int]],
) -> Wait | None:
    kind, number = in_kernel(pid, descriptor)
    if kind == "pipe":
        child = _who_has(number, children())
        return None if child is None else Wait(f"a pipe to its child process {child}")
    if kind != "socket":
        return None
    for name in ("tcp", "tcp6", "udp", "udp6"):
        if (found := _connected(pid, sockets(name), number, children, others)) is not None:
            return found[0]
    peer = peer_process(pid, descriptor)
    if peer in (0, pid) or peer in others():
        return None
    return Wait(f"a connection to process {peer} on the same host")


def _sockets(pid: int, name: str) -> _Sockets:
    """Return a socket table of the kernel, as the process sees it: the fields of each socket, by inode."""
    lines = proc.read(f"/proc/{pid}/net/{name}", most=_MOST_BYTES).split(b"\n")[1:]
    return {row[9]: row for row in map(bytes.split, lines) if len(row) > 9}


def _connected(
    pid: int,
    table: _Sockets,
    inode: int,
    children: Callable[[], Collection[int]],
    others: Callable[[], Collection[int]],
) -> tuple[Wait | None] | None:
    """Return what waiting for a socket of this table means, as a tuple of one; None if the socket is not in it."""
    row = table.get(str(inode).encode())
    if row is None:
        return None
    address, port = _address(row[2])
    if not port:
        return (None,)  # it listens
    shown = with_number(address, port)
    here = next((int(each[9]) for each in table.values() if each[1:3] == [row[2], row[1]]), 0)
    if here:
        if _who_has(here, (pid,)) is not None or _who_has(here, others()) is not None:
            return (None,)
        child = _who_has(here, children())
        whose = f"its child process {child}" if child else "on the same host"
        return (Wait(f"a connection to {shown} ({whose})"),)
    is_here = ipaddress.ip_address(address).is_loopback or row[1].partition(b":")[0] == row[2].partition(b":")[0]
    return (Wait(f"a connection to {shown}", "" if is_here else address),)


def _address(text: bytes) -> tuple[str, int]:
    """Parse an address and port of such a table: words of 32 bits in the machine's byte order."""
    digits, _, port = text.partition(b":")
    data = bytes.fromhex(digits.decode())
    data = b"".join(struct.pack(">I", *struct.unpack("=I", data[at : at + 4])) for at in range(0, len(data), 4))
    address = ipaddress.ip_address(data)
    return str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)


def _who_has(inode: int, processes: Collection[int]) -> int | None:
    """Return which of these processes has a pipe or socket open; None if none has."""
    for pid in processes:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd")[:_MOST_DESCRIPTORS]:
                if in_kernel(pid, name)[1] == inode:
                    return pid
    return None
