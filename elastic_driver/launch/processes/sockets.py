"""The connected TCP sockets of another process, as this process's own for a moment.

Owns how they are obtained: a process that may trace the other one can; its ancestor may, unless the system forbids it.
If not, there are none. Of other connections within this machine (unix sockets, pipes) only the other end of a unix
socket can be asked for.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator

from elastic_driver.system.kernel import pidfd_getfd, pidfd_open
from elastic_driver.system.local_socket import peer_of

_IN_KERNEL = re.compile(r"(socket|pipe):\[(\d+)\]")


def in_kernel(pid: int, descriptor: int | str) -> tuple[str, int]:
    """Return what a descriptor of a process is, "socket" or "pipe", and the kernel's number of it; or ("", 0).

    Never blocks: asking for the status (stat) of a file on a network file system would wait for its server.
    """
    with contextlib.suppress(OSError):
        if found := _IN_KERNEL.fullmatch(os.readlink(f"/proc/{pid}/fd/{descriptor}")):
            return found[1], int(found[2])
    return "", 0


def connections(pid: int) -> Iterator[tuple[int, socket.socket]]:
    """Yield the kernel's number of each socket, and a copy that is closed when the next one is asked for.

    Blocks for some ten microseconds each.
    """
    with contextlib.suppress(OSError):  # it is gone, may not be traced, or the kernel has no pidfds
        process = pidfd_open(pid)
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    kind, number = in_kernel(pid, name)
                    if kind == "socket" and (sock := _copy(process, int(name))) is not None:
                        with sock:
                            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                                yield number, sock
        finally:
            os.close(process)


def peer_process(pid: int, descriptor: int) -> int:
    """Return the PID of the process that connected the other end of a unix socket; 0 if unavailable."""
    with contextlib.suppress(OSError):
        process = pidfd_open(pid)
        try:
            if (sock := _copy(process, descriptor)) is not None:
                with sock:
                    if sock.family == socket.AF_UNIX:
                        return peer_of(sock)[0]
        finally:
            os.close(process)
    return 0


def _copy(process: int, descriptor: int) -> socket.socket | None:
    with contextlib.suppress(OSError):
        return socket.socket(fileno=pidfd_getfd(process, descriptor))
    return None
